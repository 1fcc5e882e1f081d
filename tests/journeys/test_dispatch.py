"""The dispatcher over a real server, real store and real children: what it does, and what it does when it is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import live as staging
import pytest
import tiny
from dispatching import (
    children,
    dispatcher,
    give_shares,
    holding,
    rows,
    send,
    state_of,
    states,
    step_until,
    troubled,
    under_way,
)
from live import Live
from sqlalchemy import select, update
from waiting import WITHIN

import acclimate_runners
from acclimate import config, hosting, installation, retries, settling
from acclimate import stages as lifecycle
from acclimate.service import clockwork, publish, release
from acclimate.store import Store, Tx, outbox, results, stages, submissions
from acclimate_competitions import digests, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_runners.runner import Status


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with staging.serve(tmp_path) as running:
        yield running


KILLED = """
import sys, threading
from datetime import datetime
from pathlib import Path
from acclimate import config
from acclimate.dispatch import Dispatcher
from acclimate.store import Store
from acclimate_runners.local import LocalRunner
settings = config.load(Path(sys.argv[1]), environ={})
moment = datetime.fromisoformat(sys.argv[2])
store = Store.open(settings, clock=lambda: moment)
runner = lambda: LocalRunner(settings.work, slots=2)
Dispatcher(store, store.blobs, settings, runner).run(threading.Event())
"""


def test_a_round_from_check_to_evaluation_with_a_dispatcher_that_is_killed(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, finished = staging.open_round(server, tmp_path), []
    # The same files from two entrants are two entries.
    submitted = {name: send(staged, name, seed=1)[1] for name in ("ada", "bea")}
    _, bad = send(staged, "cal", seed=3, poisoned=True)
    # 1. Checks: the models are loaded and run, the one with a NaN is refused with a reason its entrant can read.
    with dispatcher(server, finish=finished.append) as first:
        step_until(first, lambda: all(state_of(server, s)[0] != "checking" for s in [*submitted.values(), bad]))
        assert {state_of(server, s)[0] for s in submitted.values()} == {"accepted"}
        refused, reason = state_of(server, bad)
        assert refused == "refused" and "NaN" in reason
        with server.store.snapshot() as tx:
            state = tx.round(staged.round)
        # Nothing of it keeps the round waiting.
        assert state.outstanding == () and sum(s.refused for s in state.submissions.values()) == 1
        assert [row.state for row in rows(server, "check")].count("committed") == 2
        with pytest.raises(Refusal) as second:
            dispatcher(server).__enter__()
        assert second.value.code == "busy"
    # 2. The round closes, at once; a dispatcher of its own process begins to prepare, and is killed.
    server.clock.set(staged.fields["closes"], seconds=1)
    arguments = [str(server.settings.data), server.clock.now.isoformat()]
    with subprocess.Popen([sys.executable, "-c", KILLED, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            with holding(str(server.settings.work)) as held:
                until = time.monotonic() + WITHIN
                while len(held) < 2:
                    assert time.monotonic() < until and process.poll() is None
                    time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.stderr is not None
        said = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert [line["event"] for line in said].count("attempt started") == 2
    assert under_way(server, "prepare") and server.phase(staged.round) == "closed"
    until = time.monotonic() + WITHIN
    while children(str(server.settings.work)):
        assert time.monotonic() < until, "a child outlived its dispatcher"
        time.sleep(0.02)
    # 3. The next one goes on: everything is prepared once, and nothing of the holdout is anywhere yet.
    with dispatcher(server, finish=finished.append) as third:
        assert states(server, "prepare") == {"pending"}
        step_until(third, lambda: server.phase(staged.round) == "prepared")
        plan = 2 * 2 * 3
        assert len(rows(server, "prepare")) == plan and states(server, "prepare") == {"committed"}
        with server.store.snapshot() as tx:
            state = tx.round(staged.round)
            assert len(state.prepared) == plan and release.holdout_files(tx, staged.round) == {}
            documents = tx.execute(select(results.c.document).where(results.c.stage.in_(keys(server, "prepare"))))
            prepared = list(documents.scalars())
        assert {d["prepared"] for d in prepared} == {r["prepared"] for r in state.prepared.values()}
        assert all(d["cost"]["steps"] == 6 and d["selection"]["task"] == d["task"] for d in prepared)
        assert all(server.store.blobs.has(d["prepared"]) and server.store.blobs.has(d["log"]) for d in prepared)
        # 4. Shares come, the holdout opens, everything is evaluated, direct and prepared.
        give_shares(staged)
        # The system's temporary folder may be full: what is scored is written beside the blobs.
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        step_until(third, lambda: server.phase(staged.round) == "evaluated" and bool(finished))
        assert states(server, "evaluate") == {"committed"} and len(rows(server, "evaluate")) == plan + 4
        assert finished == [staged.round]
    # 5. What was given to children had no answers; what was scored covers the whole holdout.
    with server.store.snapshot() as tx:
        state, files = tx.round(staged.round), release.holdout_files(tx, staged.round)
        marks = tx.execute(select(outbox.c.payload, outbox.c.run)).all()
    assert state.phase is Phase.EVALUATED and len(state.evaluated) == plan + 4
    assert [(payload["kind"], run) for payload, run in marks] == [("round", "done")]
    seen = [table for table in job_inputs(server) if "example" in table.column_names]
    holdout = set(tables.read(server.store.blobs.path(files["tint.parquet"])).column("example").to_pylist())
    of_holdout = [table for table in seen if set(table.column("example").to_pylist()) == holdout]
    assert of_holdout and all(table.column_names == ["example", "input"] for table in of_holdout)
    ranking = publish.ranking(server.store, staged.round).document()
    assert {entry["entrant"] for entry in ranking["ranking"]} == {"ada", "bea"}
    assert all(entry["n"] == 24 for entry in ranking["ranking"])


def keys(live: Live, kind: str) -> list[str]:
    return [row.key for row in rows(live, kind)]


def job_inputs(live: Live) -> list:
    """Every table that any child of this server was given, by the jobs that lie in the attempts' folders."""
    named = set()
    for path in live.settings.work.rglob("job.json"):
        for data in json.loads(path.read_text())["tasks"]:
            named |= {data[name] for name in ("preparation", "validation", "holdout_inputs") if data[name]}
    return [tables.read(live.store.blobs.path(digest)) for digest in sorted(named)]


def test_work_that_nobody_waits_for_is_cancelled(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    ada, withdrawn = send(staged, "ada", seed=1)
    _, late = send(staged, "bea", seed=2)
    with dispatcher(server) as running:
        with holding(str(tmp_path)) as held:
            step_until(running, lambda: len(held) == 2)
        assert under_way(server, "check")
        # 1. An entrant withdraws while its model is being checked.
        with server.store.snapshot() as tx:
            commitment = tx.execute(select(submissions.c.commitment).where(submissions.c.id == withdrawn)).scalar_one()
        request = ada.sign("SubmissionWithdrawn", staged.round, entrant="ada", commitment=commitment)
        assert ada.post(f"{staged.path}/withdrawals", request).status_code == 200
        # 2. The round closes, grace and all, while the other's is.
        server.clock.set(staged.fields["closes"], seconds=61)
        step_until(running, lambda: states(server, "check") == {"failed"})
        assert state_of(server, withdrawn)[0] == "withdrawn"
        assert state_of(server, late)[0] == "forfeited" and "closed before" in state_of(server, late)[1]
        assert children(str(tmp_path)) == []
        # A round without entries has nothing to prepare.
        step_until(running, lambda: server.phase(staged.round) == "prepared")


def test_a_model_that_needs_too_much_is_its_entrants_outcome_and_stops_no_round(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No child can load torch in this much memory.
    monkeypatch.setattr(tiny, "DEFINITION", tiny.DEFINITION.replace('memory = "2GiB"', 'memory = "64MiB"'))
    monkeypatch.setattr(retries, "BACKOFF", 0.01)
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    staging.submit_model(staged, staging.enter(staged, server.actor("bea")), seed=2)
    with dispatcher(server) as running:
        # 1. While the round is open, its entrant is told and can send another.
        step_until(running, lambda: state_of(server, submission)[0] != "checking")
        refused, reason = state_of(server, submission)
        assert refused == "refused" and "GiB are allowed, at each of 3 tries with micro-batch 1" in reason
        # With micro-batch 8, 4 and 2 one each.
        assert [(row.state, row.attempts) for row in rows(server, "check")] == [("failed", 6)]
        # 2. Later each preparation has failed and nothing is scored, but the round goes on.
        server.clock.set(staged.fields["closes"], seconds=61)
        step_until(running, lambda: server.phase(staged.round) == "prepared")
        with server.store.snapshot() as tx:
            outcomes = list(tx.round(staged.round).prepared.values())
        assert outcomes and all("GiB are allowed" in record["failed"]["reason"] for record in outcomes)
        assert {record["micro_batch"] for record in outcomes} == {1}
        assert all(server.store.blobs.has(record["failed"]["log"]) for record in outcomes)
        give_shares(staged)
        step_until(running, lambda: server.phase(staged.round) == "evaluated")
    with server.store.snapshot() as tx:
        evaluated = list(tx.round(staged.round).evaluated.values())
    given = [tables.read(server.store.blobs.path(record["predictions"])) for record in evaluated]
    assert given and all(table.num_rows == 12 for table in given)
    assert all(table.column("loglikelihoods").null_count == 12 for table in given)


@pytest.mark.parametrize(
    "troubles",
    [
        [ConnectionError("the head is gone")] * 12,
        [Status("failed", reason="its Ray actor is gone", code="runner_failed")] * 9,
        # What the model is not to blame for brings it no nearer to its last try.
        [Status("failed", reason="its Ray actor is gone", code="runner_failed")] * 5
        + [Status("failed", reason="ran longer than the 1 s allowed", code="limit_exceeded")] * 2,
    ],
)
def test_a_hiccup_of_the_machines_blocks_nothing(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, troubles: list[Status | Exception]
) -> None:
    monkeypatch.setattr(settling, "PAUSE", 0.01)
    monkeypatch.setattr(retries, "BACKOFF", 0.01)
    monkeypatch.setattr(retries, "LONG_BACKOFF", (0.01, 0.05))
    # Starts that have no connection have the runner made anew.
    monkeypatch.setattr(hosting, "_PAUSES", (0.01, 0.05))
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    failed = sum(isinstance(trouble, Status) for trouble in troubles)
    with troubled(server, left := list(troubles)) as running:
        step_until(running, lambda: state_of(server, submission)[0] == "accepted")
        # What has come to something is no longer counted.
        assert not running._term._leader._settling.not_before  # type: ignore[union-attr]
    # What was not even started is no attempt.
    assert left == [] and [row.attempts for row in rows(server, "check")] == [failed + 1]


def test_what_our_code_fails_at_is_blocked_until_someone_looks(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retries, "BACKOFF", 0.01)
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    ours = Status("failed", reason="exited with status 1: KeyError: 'tint'", code="job_failed")
    assert server.anyone().get(staged.path).json()["problem"]["code"] == "infeasible"
    with troubled(server, [ours] * 3) as running:
        step_until(running, lambda: states(server, "check") == {"blocked"})
        (row,) = rows(server, "check")
        assert row.attempts == 3 and "failed 3 times" in row.reason and "KeyError" in row.reason
        assert state_of(server, submission)[0] == "checking"
        for _ in range(5):
            running.step()
        assert rows(server, "check") == [row]
    # The status tells of it, but while the round is open nothing of what an entrant's model led to.
    problem = server.anyone().get(staged.path).json()["problem"]
    assert problem["code"] == "work_blocked" and "1 stages" in problem["sentence"] and "KeyError" not in str(problem)
    # 2. Another dispatcher changes nothing; the organizer does.
    with dispatcher(server) as again:
        again.step()
        assert states(server, "check") == {"blocked"}
        asked = server.organizer().post(f"{staged.path}/retries", {"stages": [row.key]})
        assert asked.status_code == 200 and asked.json()["stages"] == [row.key], asked.text
        step_until(again, lambda: state_of(server, submission)[0] == "accepted")
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in said].count("attempt failed") == 3
    assert any(line["event"] == "blocked" and line["hint"] for line in said)


def test_one_rounds_fault_stops_no_other(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = staging.open_round(server, tmp_path)
    _, unreadable = send(broken, "ada", seed=1)
    server.clock.now = staging.START
    staged = staging.open_round(server, tmp_path, name="second")
    _, submission = send(staged, "bea", seed=2)
    with server.store.transaction() as tx:
        tx.execute(update(submissions).where(submissions.c.id == unreadable).values(manifest={}))
    # 1. Its work can't be planned.
    with dispatcher(server) as running:
        step_until(running, lambda: state_of(server, submission)[0] == "accepted")
    assert state_of(server, unreadable)[0] == "checking"
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (told,) = [line for line in said if line["event"] == "not planned"]
    assert told["round"] == broken.round and "Error" in told["traceback"]
    # 2. Its transitions can't be decided.
    decide = clockwork._DECISIONS[Phase.OPEN]

    def faulty(tx: Tx, state: Round) -> tuple[str, dict] | None:
        return {}[state.id] if state.id == broken.round else decide(tx, state)

    monkeypatch.setitem(clockwork._DECISIONS, Phase.OPEN, faulty)
    server.clock.set(staged.fields["closes"], seconds=61)
    assert server.tick() == ["RoundClosed"]
    assert (server.phase(broken.round), server.phase(staged.round)) == ("open", "closed")


def test_a_new_dispatcher_removes_what_a_killed_one_had_opened(server: Live) -> None:
    work = server.settings.work
    for name in ("opening-x/holdout", "rehearsal-y/dummy", "attempts/z"):
        (work / name).mkdir(parents=True)
        (work / name / "rows").write_bytes(b"plaintext")
    with dispatcher(server):
        assert not (work / "opening-x").exists()
    # What others may be at stays.
    assert (work / "rehearsal-y/dummy/rows").exists() and (work / "attempts/z/rows").exists()


def test_a_round_of_other_code_is_left_alone(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    staging.submit_model(staged, staging.enter(staged, server.actor("ada")), seed=1)
    server.clock.set(staged.fields["closes"], seconds=61)
    # The same package with one file more: another version, which must not prepare what this one promised to.
    package = shutil.copytree(Path(acclimate_runners.__file__).parent, tmp_path / "other" / "acclimate_runners")
    (package / "more.py").write_text("# a change\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "other")}
    arguments = [str(server.settings.data), server.clock.now.isoformat()]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said = json.loads(line)
            assert said["event"] != "attempt started"
            if said["event"] == "other code":
                break
        process.kill()
    assert staged.fields["code"] in said["reason"] and states(server, "prepare") == {"blocked"}
    # The status says it, and the version that the round was made with goes on.
    problem = server.anyone().get(staged.path).json()["problem"]
    assert problem["code"] == "work_blocked" and staged.fields["code"] in problem["sentence"]
    with dispatcher(server) as right:
        step_until(right, lambda: server.phase(staged.round) == "prepared")
    assert server.anyone().get(staged.path).json()["problem"] is None


def test_a_commit_is_for_the_attempt_that_holds_the_stage(server: Live, tmp_path: Path) -> None:
    from acclimate import assignments, commits
    from acclimate.service import identity
    from acclimate_runners.jobs import Outcome

    staged = staging.open_round(server, tmp_path)
    send(staged, "ada", seed=1)
    with server.store.snapshot() as tx:
        (assignment,) = assignments.outstanding(tx, tx.round(staged.round), holdout_inputs={})
    lifecycle.register(server.store, [assignment])
    outcome = Outcome("refused", "no good", {}, {}, "cpu", {})
    status = Status("done", outcome=outcome, log=digests.of_bytes(b""))
    with pytest.raises(Refusal, match="no longer of attempt"):
        unclaimed = assignments.Held(assignment, fence=1, epoch=1)
        commits.commit(server.store, identity.load(server.settings, server.store), [commits.Done(unclaimed, status)])
    with server.store.transaction() as tx:
        held = lifecycle.claim(tx, [assignment], epoch=1)[0]
        assert held is not None and held.fence == 1
        assert lifecycle.claim(tx, [assignment], epoch=1)[0] is None


def test_an_attempt_whose_row_is_no_longer_its_own_is_dropped_and_what_is_left_is_done(
    server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    with dispatcher(server) as running:
        with holding(str(server.settings.work)) as held:
            step_until(running, lambda: len(held) == 1)
        # A database that was restored to where it stood a moment ago knows of no such attempt.
        with server.store.transaction() as tx:
            tx.execute(update(stages).values(state="blocked", attempt=None, attempts=0))
        (child,) = held
        os.kill(child, signal.SIGCONT)
        said: list[dict] = []
        while not any(line["event"] == "dropped" for line in said):
            running.step()
            time.sleep(0.05)
            said += [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert not any(line["event"] == "blocked" for line in said)
        with server.store.transaction() as tx:
            tx.execute(update(stages).values(state="pending"))
        step_until(running, lambda: states(server, "check") == {"committed"})
    assert state_of(server, submission)[0] == "accepted"


def test_the_command_stops_when_told_and_gives_back_what_it_holds(tmp_path: Path) -> None:
    environment = {**os.environ, "ACCLIMATE_RUNNER": "local"}
    command = [sys.executable, "-m", "acclimate", "dispatch", "--data", str(tmp_path / "data")]
    settings = config.load(tmp_path / "data", environ={})
    store = Store.open(settings)
    installation.begin(store, settings)
    store.close()
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            said = [json.loads(next(lines))["event"]]
            killer = threading.Timer(0.3, process.send_signal, [number])
            killer.start()
            said += [json.loads(line)["event"] for line in lines]
            assert process.wait(WITHIN) == 0 and said[0] == "started" and said[-1] == "stopped"
            killer.join()
