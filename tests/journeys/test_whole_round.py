"""A whole round, every actor with keys of its own, over real HTTP, real processes, real preparation; once locally, once on Ray.

Organizer, three custodians of whom one is missing, four entrants, an analyst, and a stranger who verifies.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny

from acclimate import config, demo_servers, keys, log, tracking
from acclimate.client import connection, custodian, entrant, folder, organizer
from acclimate_competitions import definition, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round

pytestmark = pytest.mark.timeout(600)

ENTRANTS = {"ada": 1, "bela": 2, "celik-team": 3, "dora": 4}
WINDOW = timedelta(seconds=15)


@dataclass
class Played:
    """What is left when a round was played."""

    folder: Path
    settings: config.Settings
    state: Round
    bundle: Path
    receipts: list[Path]
    log_key: str
    refused: dict[str, Refusal] = field(default_factory=dict)


class Stage:
    def __init__(self, where: Path, servers: demo_servers.Servers, connections: ExitStack) -> None:
        self.where, self.servers, self.open = where, servers, connections
        self.built = where / "competition"
        tiny.competition(self.built)
        toml = self.built / "competition.toml"
        # All commit before the close; the checks may take their time on a slow machine.
        toml.write_text(toml.read_text("utf-8").replace('grace = "0s"', 'grace = "10m"'), "utf-8")
        self.competition = definition.load(toml)
        self.id = ""
        self.refused: dict[str, Refusal] = {}

    def actor(self, name: str, role: str) -> tuple[connection.Client, keys.Keys]:
        own = keys.create(self.where / name, age=role == "custodian")
        command = demo_servers.command("invite", "--data", str(self.servers.data), "--role", role, "--json")
        code = None
        if role != "entrant":
            code = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["invitation"]
        with connection.Client(self.servers.url) as visitor:
            account = folder.register_account(visitor, own, name=name, role=role, invitation=code)
        return self.open.enter_context(account.connect()), own

    def state(self, client: connection.Client) -> Round:
        self.servers.check()
        return rounds.fold(client.records(self.id), self.competition)

    def wait(self, client: connection.Client, phase: Phase) -> None:
        until = time.monotonic() + 200
        while self.state(client).phase != phase:
            blocked = [s for s in client.stages(self.id) if s["state"] == "blocked"]
            assert blocked == []
            assert time.monotonic() < until, self.state(client).phase
            time.sleep(0.2)

    def refuses(self, name: str, call: Callable[[], Any]) -> None:
        with pytest.raises(Refusal) as caught:
            call()
        self.refused[name] = caught.value


def play(where: Path, runner: str) -> Played:
    with demo_servers.Servers(where / "server", runner=runner) as servers, ExitStack() as connections:
        stage = Stage(where, servers, connections)
        boss, boss_keys = stage.actor("organizer", "organizer")
        custodians = [stage.actor(f"custodian-{letter}", "custodian") for letter in "abc"]
        people = {name: stage.actor(name, "entrant") for name in ENTRANTS}
        for name, seed in ENTRANTS.items():
            tiny.model(where / "models" / name, seed=seed)
        now = datetime.now(UTC)
        stage.id = organizer.create_round(
            boss,
            boss_keys,
            stage.built,
            custodians=[
                {"name": f"custodian-{letter}", "age": own.age_recipient, "ed25519": own.public, "backup": None}
                for letter, (_, own) in zip("abc", custodians, strict=True)
            ],
            opens=now,
            closes=now + WINDOW,
            closes_latest=now + timedelta(minutes=5),
            release_by=now + timedelta(days=1),
        )
        organizer.seal_round(boss, boss_keys, stage.id, stage.built)
        for client, own in custodians:
            custodian.acknowledge(client, own, stage.id)
        stage.wait(boss, Phase.OPEN)
        client, own = custodians[0]
        stage.refuses("early release", lambda: custodian.release(client, own, stage.id, now=datetime.now(UTC)))

        def enter_and_submit(name: str) -> entrant.Submission:
            theirs, own = people[name]
            entrant.enter_round(theirs, own, stage.id)
            about = {"title": f"Model of {name} 🦊", "weights_after": "publish"}
            return entrant.submit(theirs, own, stage.id, where / "models" / name, **about)

        closes = stage.state(boss).closes + timedelta(seconds=1)
        organizer.extend(boss, boss_keys, stage.id, closes=closes)
        with ThreadPoolExecutor(len(people)) as pool:
            submitted = list(pool.map(enter_and_submit, people))
        assert [s.state for s in submitted] == ["accepted"] * len(people)
        stage.wait(boss, Phase.CLOSED)
        tiny.model(where / "late", seed=9)
        theirs, own_of_ada = people["ada"]
        late = {"title": "late", "weights_after": "publish"}
        stage.refuses("late", lambda: entrant.submit(theirs, own_of_ada, stage.id, where / "late", **late))
        stage.wait(boss, Phase.PREPARED)
        stage.refuses("early bundle", lambda: theirs.bundle(stage.id, where / "early.zip"))
        # The second custodian is missing: two of three are enough.
        for client, own in (custodians[0], custodians[2]):
            custodian.release(client, own, stage.id, now=datetime.now(UTC))
        stage.wait(boss, Phase.EVALUATED)
        organizer.publish(boss, boss_keys, stage.id)
        with connection.Client(servers.url) as anybody:
            bundle = anybody.bundle(stage.id, where / "bundle.zip")
            until = time.monotonic() + 120
            while not anybody.round(stage.id)["tracked"]:
                assert time.monotonic() < until
                time.sleep(0.2)
            state = stage.state(anybody)
        receipts = [own.folder / "receipts" / s.receipt for (_, own), s in zip(people.values(), submitted, strict=True)]
        key = custodian.pinned(custodians[0][1], stage.id).log
    return Played(where, config.load(where / "server"), state, bundle, receipts, key, stage.refused)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    yield play(tmp_path_factory.mktemp("local"), "local")


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    yield play(tmp_path_factory.mktemp("ray"), "ray")


def test_the_round_is_published_with_every_entrant_in_it(local: Played) -> None:
    assert local.state.phase == Phase.PUBLISHED
    assert [entry.entrant for entry in local.state.entries] == sorted(ENTRANTS)
    assert len(local.state.released) == 2


def test_who_comes_late_or_early_is_told_so(local: Played) -> None:
    assert {name: refusal.code for name, refusal in local.refused.items()} == {
        "early release": "too_early",
        "late": "round_closed",
        "early bundle": "phase_wrong",
    }


def test_every_receipt_verifies_against_the_log_key_that_custodians_pinned(local: Played) -> None:
    for path in local.receipts:
        record = log.Receipt.parse(path.read_bytes().decode()).verify(log.parse_vkey(local.log_key))
        assert record is not None


def test_a_stranger_verifies_the_bundle(local: Played) -> None:
    command = demo_servers.command("verify", str(local.bundle), "--log-key", local.log_key, "--json")
    done = subprocess.run(command, capture_output=True, check=False)
    checks = json.loads(done.stdout)["checks"]
    assert [check for check in checks if check["status"] == "FAILED"] == []
    assert done.returncode == 0


def test_an_analyst_gets_the_ranking_from_mlflow_alone(local: Played) -> None:
    from acclimate import verify

    table = tracking.ranking(local.settings.tracking, local.state.competition.slug, local.state.defined["name"])
    ranked = table[~table["baseline"]]
    rows = verify.recompute_ranking(local.bundle).document()["ranking"]
    assert list(ranked["entrant"]) == [row["entrant"] for row in rows]
    assert list(ranked["rank"]) == [row["rank"] for row in rows]
    assert list(ranked["score"]) == pytest.approx([row["score"] for row in rows])


def test_ray_gives_the_same_bytes_and_the_same_ranking(local: Played, on_ray: Played) -> None:
    def prepared(played: Played) -> dict[tuple[str, str, int], str]:
        names = {entry.submission: entry.entrant for entry in played.state.entries}
        return {(names[s], task, seed): r["prepared"] for (s, task, seed), r in played.state.prepared.items()}

    assert prepared(on_ray) == prepared(local)
    assert on_ray.state.rankings[-1][0] == local.state.rankings[-1][0]
    assert definition.load(local.folder / "competition").digest == on_ray.state.competition.digest
