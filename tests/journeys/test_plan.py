"""The pool as the API tells it, and `acclimate plan` against it."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import live
import pytest
import tiny
from live import Live
from sqlalchemy import delete, insert
from waiting import WITHIN

from acclimate.client import Client
from acclimate.lease import Lease
from acclimate.store import pools, results, stages, timestamp
from acclimate_runners.local import LocalRunner

GPUS = {
    "name": "gpu-1.internal",
    "cpus": 8.0,
    "gpus": 2.0,
    "memory": 64 << 30,
    "labels": {"accelerator": "A100", "zone": "gpu-1", "rack": "r7.internal"},
}
PLAIN = {"name": "plain.internal", "cpus": 4.0, "gpus": 0.0, "memory": 16 << 30, "labels": {}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live.serve(tmp_path_factory.mktemp("served")) as server:
        yield server


def tell(served: Live, *machines: dict[str, Any], slots: int = 12, problem: str = "") -> None:
    """What a leading dispatcher writes down."""
    with served.store.transaction() as tx:
        tx.execute(delete(pools))
        row = {"name": "dispatch", "runner": "ray", "slots": slots, "machines": list(machines), "problem": problem}
        tx.execute(insert(pools), {**row, "at": timestamp(tx)})


def competition(folder: Path, compute: str = "") -> Path:
    tiny.competition(folder)
    (folder / "competition.toml").write_text(tiny.DEFINITION.replace("[compute]", f"[compute]\n{compute}"), "utf-8")
    return folder


def acclimate(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    command = [sys.executable, "-m", "acclimate", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, env=kept, check=False)


def test_the_pool_before_and_after_a_dispatcher_leads(served: Live) -> None:
    anyone = served.anyone()
    empty = anyone.get("/v1/pool").json()
    assert (empty["leads"], empty["machines"], empty["at"]) == (False, [], None) and empty["problem"]
    tell(served, GPUS, PLAIN)
    served.clock.forward(seconds=20)
    told = anyone.get("/v1/pool").json()
    assert (told["leads"], told["slots"], told["age"]) == (False, 12, 20)
    lease = Lease(served.store, holder="a dispatcher")
    assert lease.take()
    assert anyone.get("/v1/pool").json()["leads"]
    served.clock.forward(seconds=60)
    assert not anyone.get("/v1/pool").json()["leads"]


def test_only_an_organizer_is_told_names_and_causes(served: Live) -> None:
    tell(served, GPUS, PLAIN, problem="there is no Ray cluster at 10.0.0.7:6379")
    public, own = served.anyone().get("/v1/pool"), served.organizer().get("/v1/pool").json()
    assert "internal" not in public.text and "10.0.0.7" not in public.text and public.json()["problem"]
    assert [machine["name"] for machine in public.json()["machines"]] == ["machine-1", "machine-2"]
    assert [machine["name"] for machine in own["machines"]] == ["gpu-1.internal", "plain.internal"]
    assert "10.0.0.7" in own["problem"]
    entrant = served.actor("team-a").get("/v1/pool")
    assert "internal" not in entrant.text
    with Client(served.url) as client:
        assert client.pool() == public.json() | {"now": client.pool()["now"]}


def test_a_plan_of_a_folder_against_a_server_s_pool(served: Live, tmp_path: Path) -> None:
    tell(served, GPUS, PLAIN)
    folder = competition(tmp_path / "marbles", "gpus = 1\ncpus = 2")
    done = acclimate("plan", folder, "--server", served.url, "--entries", 5)
    assert done.returncode == 0, done.stderr
    assert "one attempt   2 CPUs and 1 GPU" in done.stdout and "at once       2 attempts" in done.stdout
    assert "no dispatcher leads now" in done.stdout and "accelerator=A100" in done.stdout
    # The rest of its labels may tell what it is called.
    assert "gpu-1" not in done.stdout and "r7" not in done.stdout
    found = json.loads(acclimate("plan", folder, "--server", served.url, "--entries", 5, "--json").stdout)
    assert (found["at_once"], found["attempts"], found["preparations"]) == (2, 10, 5 * 2 * 3)
    # Three waves to prepare five entries two at a time, three to evaluate them, of five minutes at most.
    assert found["seconds"] == 6 * 300
    assert [machine["fits"] for machine in found["machines"]] == [True, False]


def test_a_plan_that_no_machine_can_ever_run_is_refused(served: Live, tmp_path: Path) -> None:
    tell(served, GPUS, PLAIN)
    folder = competition(tmp_path / "marbles", 'gpus = 2\nlabels = { accelerator = "H100" }')
    done = acclimate("plan", folder, "--server", served.url, "--json")
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "infeasible"
    assert error["sentence"].startswith("no machine has 1 CPU and 2 GPUs with accelerator=H100; the pool has machine-1")
    assert "hint: change [compute]" in done.stderr


def test_memory_that_this_machine_has_not_is_refused_with_the_local_runner_too(served: Live, tmp_path: Path) -> None:
    (machine,) = LocalRunner(tmp_path / "work", 2).machines()
    assert machine.memory > 0
    tell(served, dataclasses.asdict(machine), slots=2)
    gib = machine.memory // 2**30 + 1
    done = acclimate("plan", competition(tmp_path / "large", f'memory = "{gib}GiB"'), "--server", served.url, "--json")
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "infeasible" and f"{gib} GiB of memory" in error["sentence"]
    small = acclimate("plan", competition(tmp_path / "small", 'memory = "1MiB"'), "--server", served.url)
    assert small.returncode == 0, small.stdout


def test_a_plan_of_a_round_takes_its_definition_and_its_entrants(served: Live, tmp_path: Path) -> None:
    tell(served, PLAIN)
    staged, request = live.defined(served, tmp_path)
    answer = served.organizer().post("/v1/rounds", request)
    assert answer.status_code in (200, 201), answer.text
    done = acclimate("plan", request["round"], "--server", served.url, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (found["competition"], found["entries"], found["at_once"]) == ("marbles", 1, 4)
    assert found["definition"] == staged.fields["definition"]


def test_an_empty_pool_is_told_as_that(served: Live, tmp_path: Path) -> None:
    tell(served, slots=0, problem="no Ray")
    done = acclimate("plan", competition(tmp_path / "marbles"), "--server", served.url)
    assert done.returncode == 1 and "no machine is known" in done.stdout and "its operator is told why" in done.stdout


def test_the_models_of_a_round_that_was_voided_before_its_close_stay_private(served: Live, tmp_path: Path) -> None:
    staged = live.open_round(served, tmp_path, name="voided")
    live.submit_model(staged, live.enter(staged, served.actor("planner-void")), seed=1)
    organizer = served.organizer()
    body = organizer.sign("RoundVoided", staged.round, reason="the labels are wrong")
    assert organizer.post(f"{staged.path}/void", body).status_code == 200
    found = served.anyone().get(f"{staged.path}/forecast").json()
    assert (found["entries"], found["preparations"], found["evaluations"]) == (1, [], [])
    assert len(organizer.get(f"{staged.path}/forecast").json()["preparations"]) == 1


def test_a_plan_of_a_round_by_what_its_checks_measured(served: Live, tmp_path: Path) -> None:
    """One check measured 600 s, the other entry is as large; two machines' worth of room for two of them at a time."""
    tell(served, PLAIN, slots=2)
    staged = live.open_round(served, tmp_path, name="forecast")
    ids = [live.submit_model(staged, live.enter(staged, served.actor(f"planner-{i}")), seed=i + 1) for i in range(3)]
    with served.store.transaction() as tx:
        for number, (submission, seconds) in enumerate(zip(ids, (600.0, 300.0), strict=False)):
            row = {"key": f"sha256:{number:064}", "round": staged.round, "kind": "check", "submission": submission}
            tx.execute(insert(stages), {**row, "state": "committed"})
            document = {"forecast": seconds, "losses": []}
            tx.execute(insert(results), {"stage": row["key"], "document": document, "at": timestamp(tx)})
    # The third has told nothing, and is as large as the others: it counts as their median.
    own = served.organizer().get(f"{staged.path}/forecast").json()
    assert own["entries"] == 3 and own["preparations"] == [600.0, 450.0, 300.0]
    assert own["evaluations"] == pytest.approx([0.1 * seconds * 8 / 6 for seconds in (600, 450, 300)])
    # How large the models of others are nobody else learns before the close.
    assert served.anyone().get(f"{staged.path}/forecast").json()["preparations"] == []
    served.clock.set(staged.fields["closes"], seconds=61)
    assert "RoundClosed" in served.tick()
    done = acclimate("plan", staged.round, "--server", served.url)
    assert done.returncode == 0, done.stderr
    # 600 beside 450 and 300, and a tenth of it for each stage of the evaluations.
    assert "expected      14 min 10 s" in done.stdout, done.stdout
    assert "preparations, the longest first, 12 min 30 s" in done.stdout and "#####" in done.stdout
    found = json.loads(acclimate("plan", staged.round, "--server", served.url, "--json").stdout)
    assert [row["end"] for row in found["expected"]["preparations"]] == [600, 450, 750]
    assert found["expected"]["seconds"] == pytest.approx(750 + 100)
