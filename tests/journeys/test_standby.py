"""Several dispatchers over one installation: one leads at a time, whoever is killed, paused or stopped; and what none of them can do."""

import contextlib
import json
import shutil
import signal
import socket
import sqlite3
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dispatching
import live as staging
import pytest
import tiny
from dispatching import Process, beside, outcome, wait
from live import Live, Staged
from sqlalchemy import select
from threaded import Threaded, lease_of, server
from waiting import WITHIN

from acclimate import dispatch, dispatch_health, hosting, retries
from acclimate.dispatch import Dispatcher, names_of
from acclimate.lease import Lease
from acclimate.store import Store, leases, pools
from acclimate_runners.jobs import Job
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import BlobAccess, Demand, Handle, Machine

__all__ = ["server"]


def test_a_standby_takes_over_at_once_when_the_leader_stops_and_when_its_lease_runs_out(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatch, "_LOOK_EVERY", 0.1)
    staged = staging.open_round(server, tmp_path)
    first, second = (Threaded.beside(server, tmp_path / name) for name in ("first", "second"))
    with first.running():
        wait(lambda: first.dispatcher.leading)
        with second.running():
            _, submission = dispatching.send(staged, "ada", seed=1)
            wait(lambda: dispatching.state_of(server, submission)[0] == "accepted")
            assert not second.dispatcher.leading and lease_of(server).epoch == 1
            # 1. The leader is stopped in order, by a clock that stands still.
            first.stop.set()
            wait(lambda: second.dispatcher.leading)
            assert lease_of(server).epoch == 2 and lease_of(server).holder == second.dispatcher.holder
    # 2. One that leads is gone without a word: it is waited for until its lease runs out, and not a second less.
    assert Lease(server.store, holder="killed").take()
    third = Threaded.beside(server, tmp_path / "third")
    with third.running():
        for seconds in (0.0, 14.9):
            server.clock.forward(seconds=seconds)
            time.sleep(0.5)
            assert not third.dispatcher.leading and lease_of(server).holder == "killed"
        server.clock.forward(seconds=0.2)
        wait(lambda: third.dispatcher.leading)
        assert lease_of(server).epoch == 4
        _, other = dispatching.send(staged, "bea", seed=2)
        wait(lambda: dispatching.state_of(server, other)[0] == "accepted")
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["leader"] for line in said if line["event"] == "standby"][0] == first.dispatcher.holder
    assert not any(line["event"] in ("error", "blocked", "attempt failed") for line in said)


def test_a_deposed_leader_touches_nothing_and_stands_by(
    server: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = dispatching.send(staged, "ada", seed=1)
    settings = beside(server, tmp_path / "second")
    store = Store.open(settings, clock=server.clock)
    second = Dispatcher(store, store.blobs, settings, lambda: LocalRunner(settings.work, slots=2))
    with dispatching.dispatcher(server) as first, second:
        assert first.leading and not second.leading
        with dispatching.holding(str(server.settings.work)) as held:
            dispatching.step_until(first, lambda: len(held) == 1)
        before = [tuple(row) for row in dispatching.rows(server, "check")]
        # 1. Paused for longer than its lease, with a child under way; the other leads and makes the attempt anew.
        server.clock.forward(seconds=16)
        second.step()
        assert second.leading and lease_of(server).epoch == 2
        # 2. What it writes when it wakes up is refused: it stands by, its child is gone, and the other's work is untouched.
        dispatching.step_until(second, lambda: dispatching.under_way(server, "check"))
        during = [tuple(row) for row in dispatching.rows(server, "check")]
        wait(lambda: not first.leading or first.step())
        assert not first.leading and dispatching.children(str(server.settings.work)) == []
        assert [tuple(row)[:9] for row in dispatching.rows(server, "check")] == [row[:9] for row in during]
        assert [row[0] for row in before] == [row[0] for row in during]
        dispatching.step_until(second, lambda: dispatching.state_of(server, submission)[0] == "accepted")
        assert [row.attempts for row in dispatching.rows(server, "check")] == [1]
        first.step()
        assert not first.leading
    # 3. The one that led last hands over to whoever steps next.
    store.close()
    with dispatching.dispatcher(server) as third:
        assert third.leading and lease_of(server).epoch == 3
    events = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert events.count("stepped down") == 1 and events.count("standby") == 2


def test_each_process_holds_leases_under_a_name_of_its_own_and_its_folder_keeps_the_old_ones(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, none = names_of(tmp_path / "a")
    second, former = names_of(tmp_path / "a")
    assert none == () and former == (first,) and first != second
    assert first.startswith(socket.gethostname()[:40]) and len(first) <= 64
    # A copy elsewhere is another folder, and the file does not grow without end.
    shutil.copy(tmp_path / "a/dispatcher.id", tmp_path / "b")
    assert not {first, second} & {name for names in names_of(tmp_path / "b") for name in names}
    for _ in range(30):
        last, former = names_of(tmp_path / "a")
    assert len(former) == 19 and last not in former and names_of(tmp_path / "a")[1][-1] == last


def test_of_two_over_copies_of_one_folder_one_falls_behind_at_the_first_takeover(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in containers: the same host name, the same path, and a volume that was copied while its dispatcher led.
    monkeypatch.setattr(Path, "resolve", lambda self, strict=False: Path("/srv/acclimate"))
    one = Threaded.beside(server, tmp_path / "one")
    with one.dispatcher as first:
        first.step()
        assert first.leading and lease_of(server).epoch == 1
        two = Threaded.beside(server, tmp_path / "two")
        shutil.copy(tmp_path / "one/dispatcher.id", tmp_path / "two")
        with two.dispatcher as second:
            # 1. It takes the first one for the process before it, once.
            assert second.leading and lease_of(server).epoch == 2
            for _ in range(3):
                wait(lambda: not first.leading or first.step())
                first.step()
                second.step()
                assert (first.leading, second.leading, lease_of(server).epoch) == (False, True, 2)
            # 2. Later it is paused for too long, and knows better; so does one that began as a standby.
            three = Threaded.beside(server, tmp_path / "three")
            shutil.copy(tmp_path / "one/dispatcher.id", tmp_path / "three")
            with three.dispatcher as third:
                assert not third.leading
                server.clock.forward(seconds=16)
                first.step()
                assert first.leading and lease_of(server).epoch == 3
                wait(lambda: not second.leading or second.step())
                for _ in range(3):
                    for each in (second, third, first):
                        each.step()
                    assert (first.leading, second.leading, third.leading) == (True, False, False)
                    assert lease_of(server).epoch == 3
        # 3. A restart in the folder of the one that leads need not wait.
    again = Threaded.beside(server, tmp_path / "one")
    assert Lease(server.store, holder=one.dispatcher.holder).take()
    with again.dispatcher as last:
        assert last.leading
    for threaded in (one, two, three, again):
        threaded.store.close()


# ---- processes -----------------------------------------------------------------------------------------------------


def undisturbed(live: Live, staged: Staged, folder: Path) -> dict[str, Any]:
    """The same round from here on, in a copy of the installation, with one dispatcher that nobody disturbs."""
    data = live.settings.data
    shutil.copytree(data, folder / "data", ignore=shutil.ignore_patterns("acclimate.db*", "*.lock", "work"))
    with contextlib.closing(sqlite3.connect(data / "acclimate.db")) as old:
        with contextlib.closing(sqlite3.connect(folder / "data/acclimate.db")) as new:
            old.backup(new)
    with staging.serve(folder) as copy:
        copy.clock.now = live.clock.now
        copied = Staged(copy, staged.folder, staged.round, staged.fields, staged.seal, staged.envelopes)
        copy.actors.update(
            {
                name: staging.Actor(a.name, a.role, a.key, copy.connect(a.token), a.token, a.identity)
                for name, a in live.actors.items()
            }
        )
        with dispatching.dispatcher(copy) as only:
            dispatching.step_until(only, lambda: copy.phase(staged.round) == "prepared")
            dispatching.give_shares(copied)
            dispatching.step_until(only, lambda: copy.phase(staged.round) == "evaluated")
        return outcome(copy, staged.round)


def paused(process: Process, live: Live) -> None:
    """Stop a process, but not in the middle of a write: on SQLite everybody would wait for its lock as long as it is stopped."""
    for _ in range(20):
        process.signal(signal.SIGSTOP)
        probe = live.settings.database.removeprefix("sqlite:///")
        if not live.settings.database.startswith("sqlite"):
            return
        with contextlib.closing(sqlite3.connect(probe, timeout=0.2, isolation_level=None)) as connection:
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
                return
        process.signal(signal.SIGCONT)
        time.sleep(0.05)
    raise AssertionError("it was always writing")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sqlite", "postgresql"])
def test_a_round_whose_leaders_are_paused_killed_and_stopped_comes_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, engine: str
) -> None:
    # The processes go by the real clock, by which this round has just closed.
    monkeypatch.setattr(staging, "START", datetime.now(UTC) - timedelta(hours=25))
    given = {} if engine == "sqlite" else {"database": request.getfixturevalue("postgresql_url")}
    with staging.serve(tmp_path, **given) as live, contextlib.ExitStack() as stack:
        staged = staging.open_round(live, tmp_path)
        for name, seed in {"ada": 1, "bea": 2}.items():
            staging.submit_model(staged, staging.enter(staged, live.actor(name)), seed=seed)
        live.clock.set(staged.fields["closes"], seconds=61)
        expected = undisturbed(live, staged, tmp_path / "reference") if engine == "sqlite" else None

        def start(name: str) -> Process:
            # With the lease that it has by itself: a busy machine must not depose one that lives.
            made = Process(live, tmp_path / name)
            stack.callback(made.end)
            return made

        # 1. One leads, the other stands by; the leader is paused in the middle of its preparations.
        with dispatching.holding(str(tmp_path / "one")) as held:
            one = start("one")
            one.await_("leading")
            two = start("two")
            two.await_("standby")
            wait(lambda: len(held) == 2)
            paused(one, live)
            # 2. The other leads once the lease has run out, and begins the same preparations.
            with dispatching.holding(str(tmp_path / "two")) as held_too:
                two.await_("leading")
                wait(lambda: len(held_too) == 2)
                # 3. The first wakes up: it stands by, and its children are gone.
                one.signal(signal.SIGCONT)
                one.await_("stepped down")
                one.await_("standby")
                wait(lambda: dispatching.children(str(tmp_path / "one")) == [])
                assert one.events("committed") == [] and one.events("attempt failed") == []
                # 4. The leader is killed.
                two.signal(signal.SIGKILL)
                two.process.wait()
        one.await_("leading", count=2)
        wait(lambda: live.phase(staged.round) == "prepared")
        # 5. One that is stopped in order hands over at once, in the middle of the evaluations.
        two = start("two")
        two.await_("standby")
        with dispatching.holding(str(tmp_path / "one")) as held:
            dispatching.give_shares(staged)
            wait(lambda: len(held) >= 1)
            one.signal(signal.SIGTERM)
            assert one.process.wait(WITHIN) == 0
        two.await_("leading")
        wait(lambda: live.phase(staged.round) == "evaluated")
        found = outcome(live, staged.round)
        assert expected is None or found == expected
        with live.store.snapshot() as tx:
            assert tx.execute(select(leases.c.epoch).where(leases.c.name == "dispatch")).scalar_one() == 4
        for process in (one, two):
            process.end()
            assert process.events("error") == [] and process.events("blocked") == []


# ---- the pool ------------------------------------------------------------------------------------------------------


class Pool:
    """A runner of this machine that says it has other machines, and may lose its connection."""

    slots = 2

    def __init__(self, folder: Path, machines: list[Machine]) -> None:
        self._runner, self.pool, self.gone = LocalRunner(folder, slots=2), machines, ""

    def machines(self) -> tuple[Machine, ...]:
        if self.gone:
            raise RuntimeError(self.gone)
        return tuple(self.pool)

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand) -> Handle:
        if self.gone:
            raise ConnectionError(self.gone)
        return self._runner.start(name, job, blobs, demand=demand)

    def find(self, name: str, job: Job, blobs: BlobAccess) -> Handle:
        return self._runner.find(name, job, blobs)

    def close(self, *, keep: bool = False) -> None:
        self._runner.close(keep=keep)


def pool_row(live: Live) -> Any:
    with live.store.snapshot() as tx:
        return tx.execute(select(pools)).one_or_none()


def test_what_no_machine_can_take_waits_with_a_reason_and_holds_up_nobody(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "_LOOK_EVERY", 0.05)
    plain = tiny.DEFINITION
    asking = '[compute]\ngpus = 2\nlabels = { accelerator = "H100" }\n'
    monkeypatch.setattr(tiny, "DEFINITION", plain.replace("[compute]\n", asking))
    large = staging.open_round(server, tmp_path)
    assert "gpus" in (large.folder / "competition.toml").read_text()
    _, waiting = dispatching.send(large, "ada", seed=1)
    monkeypatch.setattr(tiny, "DEFINITION", plain)
    server.clock.now = staging.START
    small = staging.open_round(server, tmp_path, name="second")
    _, passing = dispatching.send(small, "bea", seed=2)
    pool = Pool(server.settings.work, [Machine("node-1", 2.0)])
    with Dispatcher(server.store, server.store.blobs, server.settings, lambda: pool) as running:
        # 1. What came later, and fits, is done; what no machine can take is never handed to the runner, and says why.
        dispatching.step_until(running, lambda: dispatching.state_of(server, passing)[0] == "accepted")
        status = server.anyone().get(large.path).json()
        assert status["problem"]["code"] == "infeasible" and status["stages"] == {"pending": 1}
        assert "2 GPUs" in status["problem"]["sentence"] and "accelerator=H100" in status["problem"]["sentence"]
        # What the machines are called is nobody's but the organizer's.
        assert "node-1" not in str(status)
        assert "node-1" in server.actors["organizer"].get(large.path).json()["problem"]["sentence"]
        assert server.anyone().get(small.path).json()["problem"] is None
        (row,) = [row for row in dispatching.rows(server, "check") if row.round == large.round]
        assert (row.state, row.attempts) == ("pending", 0) and row.reason.startswith("no machine has ")
        # 2. The pool is there for everybody to see.
        assert [machine["name"] for machine in pool_row(server).machines] == ["node-1"]
        assert (pool_row(server).slots, pool_row(server).problem) == (2, "")
        # 3. A machine joins that can.
        pool.pool.append(Machine("node-2", 8.0, 2.0, 0, {"accelerator": "H100"}))
        dispatching.step_until(running, lambda: dispatching.state_of(server, waiting)[0] == "accepted")
        assert server.anyone().get(large.path).json()["problem"] is None
        assert len(pool_row(server).machines) == 2


def test_a_lost_runner_is_made_anew_and_what_ran_there_is_no_fault_of_the_job(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"_LOOK_EVERY": 0.05, "_PAUSES": (0.05, 0.2)}.items():
        monkeypatch.setattr(hosting, name, value)
    monkeypatch.setattr(retries, "LONG_BACKOFF", (0.01, 0.05))
    monkeypatch.setattr(dispatch_health, "PATIENCE", 0.0)
    staged = staging.open_round(server, tmp_path)
    _, submission = dispatching.send(staged, "ada", seed=1)
    made: list[Pool] = []
    down = threading.Event()

    def factory() -> Pool:
        if down.is_set():
            raise ConnectionError("no head answers")
        made.append(Pool(server.settings.work, [Machine("node-1", 2.0)]))
        return made[-1]

    with Dispatcher(server.store, server.store.blobs, server.settings, factory) as running:
        with dispatching.holding(str(server.settings.work)) as held:
            dispatching.step_until(running, lambda: len(held) == 1)
        running.step()
        assert running.vitals.unready() == []
        # 1. The head is gone while an attempt runs, and does not come back at once.
        down.set()
        made[0].gone = "the head is gone"
        dispatching.step_until(running, lambda: "no head answers" in pool_row(server).problem)
        assert pool_row(server).slots == 0 and dispatching.states(server, "check") == {"pending"}
        # What Ray says, with its hosts and files, is not for whoever asks over HTTP.
        (told,) = running.vitals.unready()
        assert "the dispatcher's log says why" in told and "head" not in told and running.leading
        assert dispatching.children(str(server.settings.work)) == []
        # 2. It comes back.
        down.clear()
        dispatching.step_until(running, lambda: dispatching.state_of(server, submission)[0] == "accepted")
        running.step()
        assert len(made) == 2 and pool_row(server).problem == "" and running.vitals.unready() == []
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    events = [line["event"] for line in said]
    assert events.count("runner lost") == 1 and events.count("runner ready") == 2
    assert "no head answers" in [line["reason"] for line in said if line["event"] == "no runner"][-1]
    (failed,) = [line for line in said if line["event"] == "attempt failed"]
    assert failed["code"] == "runner_lost" and "its runner was lost: " in failed["reason"]


def test_a_pool_without_machines_is_waited_for_and_its_runner_kept(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "_LOOK_EVERY", 0.02)
    monkeypatch.setattr(dispatch_health, "PATIENCE", 0.0)
    staged = staging.open_round(server, tmp_path)
    _, submission = dispatching.send(staged, "ada", seed=1)
    made = list[Pool]()

    def factory() -> Pool:
        made.append(Pool(server.settings.work, []))
        return made[-1]

    with Dispatcher(server.store, server.store.blobs, server.settings, factory) as running:
        # 1. Nothing is handed to the runner, and everybody hears why.
        dispatching.step_until(running, lambda: (server.anyone().get(staged.path).json()["problem"] or {}).get("code"))
        since = running.vitals.no_runner[0] if running.vitals.no_runner else 0.0
        status, told = (server.anyone().get(path).json() for path in (staged.path, "/v1/pool"))
        assert status["problem"]["code"] == "infeasible" and "no machine has joined" in status["problem"]["sentence"]
        assert "no machine has joined" in told["problem"] and told["machines"] == []
        # 2. However long that lasts, it is one trouble, and no reason for another runner.
        for _ in range(20):
            running.step()
            time.sleep(0.02)
        assert running.vitals.no_runner is not None and running.vitals.no_runner[0] == since
        assert "no machine has joined" in running.vitals.unready()[0] and len(made) == 1
        (row,) = dispatching.rows(server, "check")
        assert (row.state, row.attempts) == ("pending", 0)
        # 3. A machine joins.
        made[0].pool.append(Machine("node-1", 2.0))
        dispatching.step_until(running, lambda: dispatching.state_of(server, submission)[0] == "accepted")
        assert running.vitals.unready() == [] and len(made) == 1
