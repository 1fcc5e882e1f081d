"""A leader's term: what it writes once it is over, what it can't know of its own claims, long work, and giving way."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import dispatching
import live as staging
import psycopg
import pytest
from dispatching import wait
from engines import Server
from live import Live
from sqlalchemy import select
from terms import Placed, depose, driven, holder, server, written
from waiting import WITHIN

from acclimate import (
    aside,
    dispatch,
    leader,
    publisher,
    retries,
    scoring,
    settling,
    tracking,
)
from acclimate import stages as lifecycle
from acclimate.assignments import Assignment, Held
from acclimate.service import release
from acclimate.store import Tx, events, leases, stages, submissions
from acclimate_competitions.errors import Refusal
from acclimate_runners.jobs import Job
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import BlobAccess, Demand, Handle, Machine, Runner

__all__ = ["server"]


# ---- the fence -----------------------------------------------------------------------------------------------------


def test_a_deposed_leader_that_does_not_know_it_makes_no_transition(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    # Renewed every two minutes: nothing tells it before it writes.
    with Placed(server, tmp_path / "own", lease_seconds=600.0) as running:
        running.step()
        server.clock.set(staged.fields["closes"], seconds=61)
        depose(server)
        before = written(server)
        running.step()
        assert not running.leading and written(server) == before and server.phase(staged.round) == "open"
        # The one that leads is left alone.
        running.step()
        assert not running.leading and holder(server) == "another"


def test_a_deposed_leader_that_does_not_know_it_starts_nothing(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "_PLAN_EVERY", 0.0)
    staged = staging.open_round(server, tmp_path)
    dispatching.send(staged, "ada", seed=1)
    there = threading.Event()

    def factory() -> Runner:
        assert there.wait(60)
        return LocalRunner(tmp_path / "own/work", slots=2)

    with Placed(server, tmp_path / "own", runner=factory, lease_seconds=600.0) as running:
        driven(running, lambda: dispatching.states(server, "check") == {"pending"})
        there.set()
        wait(lambda: running._term is not None and running._term.host.runner is not None)
        depose(server)
        before = written(server)
        running.step()
        assert not running.leading and written(server) == before
        assert dispatching.children(str(tmp_path / "own")) == [] and running.vitals.started.total() == 0


def test_a_deposed_leader_that_does_not_know_it_commits_nothing(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = dispatching.send(staged, "ada", seed=1)
    with Placed(server, tmp_path / "own", lease_seconds=600.0) as running:
        with dispatching.holding(str(tmp_path / "own")) as held:
            driven(running, lambda: held)
        os.kill(held.pop(), signal.SIGCONT)
        wait(lambda: dispatching.children(str(tmp_path / "own")) == [])
        depose(server)
        before = written(server)
        # Its attempt's thread may still be putting files into the blobs.
        driven(running, lambda: not running.leading)
        assert written(server) == before
        assert dispatching.state_of(server, submission)[0] == "checking"
        assert dispatching.under_way(server, "check")


def test_a_deposed_leaders_finishing_stops_and_leaves_no_mark(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    server.clock.set(staged.fields["closes"], seconds=61)
    begun, go, ended = threading.Event(), threading.Event(), list[str]()

    def finish(_: str, still_leading: Callable[[], None]) -> None:
        still_leading()
        begun.set()
        assert go.wait(60)
        try:
            still_leading()
            ended.append("finished")
        except Refusal as refusal:
            ended.append(refusal.code)
            raise

    with Placed(server, tmp_path / "own", finish_round=finish) as running:
        driven(running, begun.is_set)
        depose(server)
        wait(lambda: not running.leading or running.step())
        go.set()
        wait(lambda: ended)
    assert ended == ["lease_lost"] and written(server)[2] == 0


def test_nothing_is_published_for_one_that_leads_no_more(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    server.clock.set(staged.fields["closes"], seconds=61)
    assert server.tick() == ["RoundClosed", "PreparationFinished"]

    def over() -> None:
        raise Refusal("lease_lost", "another leads")

    with pytest.raises(Refusal, match="another leads"):
        publisher.finish(server.store, server.settings, staged.round, over)
    assert tracking.rounds(server.settings.tracking).empty
    publisher.finish(server.store, server.settings, staged.round)
    assert list(tracking.rounds(server.settings.tracking)["round"]) == [staged.round]


# ---- what a leader can't know of its own claims --------------------------------------------------------------------


class Cut:
    """A runner whose first start fails, while something else happens."""

    slots = 2

    def __init__(self, folder: Path, during: Callable[[], None]) -> None:
        self._runner, self._during, self.starts = LocalRunner(folder, slots=2), during, 0

    def machines(self) -> tuple[Machine, ...]:
        return self._runner.machines()

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand) -> Handle:
        self.starts += 1
        if self.starts == 1:
            self._during()
            raise ConnectionError("the network is gone")
        return self._runner.start(name, job, blobs, demand=demand)

    def find(self, name: str, job: Job, blobs: BlobAccess) -> Handle:
        return self._runner.find(name, job, blobs)

    def close(self, *, keep: bool = False) -> None:
        self._runner.close(keep=keep)


def test_a_start_that_fails_while_the_database_is_away_is_made_again(
    tmp_path: Path, postgresql: Server, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "PAUSE", 0.1)
    monkeypatch.setattr(retries, "LONG_BACKOFF", (0.01, 0.05))
    with staging.serve(tmp_path, database=postgresql_url) as live:
        staged = staging.open_round(live, tmp_path)
        _, submission = dispatching.send(staged, "ada", seed=1)
        runner = Cut(tmp_path / "own/work", postgresql.stop)
        with Placed(live, tmp_path / "own", runner=lambda: runner) as running:
            try:
                codes = driven(running, lambda: runner.starts)
            finally:
                postgresql.start()
            assert codes == {"database_unreachable"}
            driven(running, lambda: dispatching.state_of(live, submission)[0] == "accepted")
            # What was not started is no attempt.
            assert running.leading and [row.attempts for row in dispatching.rows(live, "check")] == [1]


def test_a_claim_that_was_committed_though_its_connection_broke_is_made_again(
    tmp_path: Path, postgresql_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with staging.serve(tmp_path, database=postgresql_url) as live:
        staged = staging.open_round(live, tmp_path)
        _, submission = dispatching.send(staged, "ada", seed=1)
        placed = Placed(live, tmp_path / "own")
        commit, claim, claims, armed = placed.store.engine.dialect.do_commit, lifecycle.claim, list[int](), list[bool]()

        def breaking(connection: Any) -> None:
            commit(connection)
            if armed and armed.pop():
                raise psycopg.OperationalError("server closed the connection unexpectedly")

        def claimed(tx: Tx, wanted: Sequence[Assignment], *, epoch: int) -> list[Held | None]:
            found = claim(tx, wanted, epoch=epoch)
            armed.extend([True] if not claims else [])
            claims.extend(held.fence if held is not None else 0 for held in found)
            return found

        monkeypatch.setattr(placed.store.engine.dialect, "do_commit", breaking)
        monkeypatch.setattr(lifecycle, "claim", claimed)
        with placed as running:
            codes = driven(running, lambda: dispatching.state_of(live, submission)[0] == "accepted")
            assert codes == {"database_unreachable"} and claims == [1, 2] and running.leading
        with live.store.snapshot() as tx:
            told = tx.execute(
                select(events.c.code).where(events.c.event == "given_back").order_by(events.c.id)
            ).scalars()
            assert next(told) == "let_go"
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert [line["attempts"] for line in said if line["event"] == "given back"] == [1]


# ---- long work -----------------------------------------------------------------------------------------------------


def test_an_opening_and_scoring_longer_than_a_step_may_hang_are_done_by_one_leader(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staging.open_round(server, tmp_path)
    for seed, name in enumerate(("ada", "bea"), start=1):
        staging.submit_model(staged, staging.enter(staged, server.actor(name)), seed=seed)
    server.clock.set(staged.fields["closes"], seconds=61)
    with dispatching.dispatcher(server) as before:
        dispatching.step_until(before, lambda: server.phase(staged.round) == "prepared")
    dispatching.give_shares(staged)
    monkeypatch.setattr(leader, "_BEAT_AT_LEAST", 0.3)
    open_, score, opened, scored = release._open, scoring.score, list[str](), list[str]()
    go_on, may_open = threading.Event(), threading.Event()

    def slow_opening(*given: Any, **more: Any) -> Any:
        opened.append(threading.current_thread().name)
        assert may_open.wait(WITHIN)
        return open_(*given, **more)

    def slow_scoring(assignment: Any, *given: Any, **more: Any) -> Any:
        scored.append(threading.current_thread().name)
        if assignment.entrant == "ada":
            assert go_on.wait(WITHIN)
        return score(assignment, *given, **more)

    monkeypatch.setattr(release, "_open", slow_opening)
    monkeypatch.setattr(scoring, "score", slow_scoring)
    began, at = time.monotonic(), server.clock.now
    monkeypatch.setattr(type(server.clock), "__call__", lambda _: at + timedelta(seconds=time.monotonic() - began))
    one, two = (Placed(server, tmp_path / name, lease_seconds=60.0) for name in ("one", "two"))
    stop = threading.Event()
    threads = [threading.Thread(target=placed.dispatcher.run, args=[stop]) for placed in (one, two)]
    threads[0].start()
    wait(lambda: one.dispatcher.leading)
    threads[1].start()

    def rows() -> dict[str, tuple[set[str], set[str]]]:
        """Of each entrant's evaluation: the states and the heartbeats of its stages."""
        query = select(submissions.c.entrant, stages.c.state, stages.c.heartbeat).join(
            stages, stages.c.submission == submissions.c.id
        )
        with server.store.snapshot() as tx:
            found = tx.execute(query.where(stages.c.kind == "evaluate")).all()
        return {name: tuple({row[i] for row in found if row[0] == name} for i in (1, 2)) for name in ("ada", "bea")}  # type: ignore[misc]

    def goes_on() -> None:
        """Its steps reach their end, however long what it waits for takes."""
        seen = set[float]()
        wait(lambda: seen.add(one.dispatcher.vitals.stepped) or len(seen) > 5)

    try:
        wait(lambda: opened)
        goes_on()
        assert server.phase(staged.round) == "released"
        may_open.set()
        # Of one a single score takes longer than a step may hang; meanwhile the leader shows that it is alive, and commits the other.
        wait(lambda: rows()["ada"][0] == {"verifying"} and rows()["bea"][0] == {"committed"})
        beats = set[str]()
        wait(lambda: beats.update(rows()["ada"][1]) or len(beats) >= 3)
        goes_on()
        assert rows()["ada"][0] == {"verifying"}
        go_on.set()
        wait(lambda: server.phase(staged.round) == "evaluated")
        with server.store.snapshot() as tx:
            epoch = tx.execute(select(leases.c.epoch).where(leases.c.name == "dispatch")).scalar_one()
        assert one.dispatcher.leading and not two.dispatcher.leading
        # The one before, which prepared, and this one.
        assert epoch == 2
    finally:
        may_open.set()
        go_on.set()
        stop.set()
        for thread in threads:
            thread.join()
    assert opened == ["aside"] and set(scored) == {"scoring"}
    for placed in (one, two):
        placed.store.close()


def test_an_opening_under_way_when_its_leader_stops_writes_nothing_more_and_leaves_no_plaintext(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aside, "PATIENCE", 0.0)
    staged = staging.open_round(server, tmp_path)
    server.clock.set(staged.fields["closes"], seconds=61)
    assert server.tick() == ["RoundClosed", "PreparationFinished"]
    dispatching.give_shares(staged)
    check, begun, go = release._check_usable, threading.Event(), threading.Event()

    def waiting(*given: Any) -> None:
        begun.set()
        assert go.wait(60)
        try:
            check(*given)
        except Exception as error:
            raise Refusal("seal_mismatch", "its rows are gone") from error

    monkeypatch.setattr(release, "_check_usable", waiting)
    with Placed(server, tmp_path / "own") as running:
        driven(running, begun.is_set)
        assert list((tmp_path / "own/work").glob("opening-*/holdout"))
    assert not list((tmp_path / "own/work").glob("opening-*"))
    before = written(server)
    go.set()
    wait(lambda: not any(thread.name == "aside" for thread in threading.enumerate()))
    # Neither the opening nor, as its files were taken from under it, a failure that would keep the round from opening.
    with server.store.snapshot() as tx:
        assert release.opening_problem(tx, staged.round) is None
    assert written(server) == before
    monkeypatch.setattr(release, "_check_usable", check)
    with Placed(server, tmp_path / "next") as running:
        driven(running, lambda: server.phase(staged.round) == "evaluated")


def test_what_a_killed_process_had_opened_is_removed_by_whoever_has_its_folder(server: Live, tmp_path: Path) -> None:
    def left(name: str) -> Path:
        folder = tmp_path / "own/work" / name / "holdout"
        folder.mkdir(parents=True)
        (folder / "rows").write_bytes(b"plaintext")
        return folder

    with Placed(server, tmp_path / "first") as first:
        # 1. By a standby.
        before = left("opening-a")
        with Placed(server, tmp_path / "own") as running:
            running.step()
            assert first.leading and not running.leading and not before.exists()
            # 2. By one that is deposed.
            first.__exit__()
            running.step()
            assert running.leading
            during = left("opening-b")
            depose(server)
            wait(lambda: not running.leading or running.step())
            assert not during.exists()
            # 3. By one that stops.
            after = left("opening-c")
        assert not after.exists()


# ---- giving way ----------------------------------------------------------------------------------------------------


def test_a_leader_without_a_runner_gives_way_to_one_that_stands_by_and_to_nobody_else(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatch, "_USELESS", 0.2)
    staged = staging.open_round(server, tmp_path)
    _, submission = dispatching.send(staged, "ada", seed=1)

    def broken() -> Runner:
        raise ConnectionError("no head answers")

    with Placed(server, tmp_path / "one", runner=broken) as one:
        # 1. Alone it goes on trying.
        time.sleep(0.4)
        for _ in range(3):
            one.step()
        assert one.leading
        # 2. Not alone it doesn't, and the other has time to take over.
        with Placed(server, tmp_path / "two") as two:
            assert not two.leading
            one.step()
            assert not one.leading
            one.step()
            assert not one.leading
            two.step()
            assert two.leading and holder(server) == two.holder
            monkeypatch.setattr(dispatch, "_USELESS", 60.0)
            driven(two, lambda: dispatching.state_of(server, submission)[0] == "accepted")
            one.step()
            assert two.leading and not one.leading
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (reason,) = [line["reason"] for line in said if line["event"] == "gives way"]
    assert "no runner" in reason and "no head answers" in reason


def test_a_leader_whose_steps_do_not_reach_their_end_gives_way(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_USELESS", 0.2)
    monkeypatch.setattr(dispatch, "_STAND_BACK", 0.0)
    with Placed(server, tmp_path / "one") as one, Placed(server, tmp_path / "two") as two:
        wait(lambda: one._term is not None and one._term.host.runner is not None)
        two.step()

        def full(*_: object) -> None:
            raise Refusal("no_space", "the disk is full")

        monkeypatch.setattr(one._term._leader._pool, "write", full)  # type: ignore[union-attr]
        assert driven(one, lambda: not one.leading) == {"no_space"}
        two.step()
        assert two.leading
        # Where the other can't either, it is asked again.
        two.__exit__()
        driven(one, lambda: one.leading)
