"""Leases on real databases: one holder at a time, and no write of one that was deposed."""

import json
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from live import Clock
from sqlalchemy import insert, select, update
from waiting import WITHIN, until

from acclimate import config
from acclimate.lease import Lease, Renewal
from acclimate.store import Store, leases, outbox
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time


class Both:
    """Two processes' stores over one database, with one clock."""

    def __init__(self, folder: Path, url: str) -> None:
        self.clock = Clock()
        self.stores = [
            Store.open(
                config.load(folder / name, environ={}, given={"database": url, "blobs": str(folder / "blobs")}),
                clock=lambda: self.clock(),
            )
            for name in ("first", "second")
        ]

    def lease(self, holder: str, *, seconds: float = 15.0, of: int = 0) -> Lease:
        return Lease(self.stores[of], holder=holder, seconds=seconds)


@pytest.fixture
def both(tmp_path: Path, database_url: str) -> Iterator[Both]:
    made = Both(tmp_path, database_url)
    yield made
    for store in made.stores:
        store.close()


def write(store: Store, mark: str) -> None:
    with store.transaction() as tx:
        tx.execute(insert(outbox), {"round": "r", "stage": mark, "payload": {}, "run": None})


def written(both: Both) -> list[str]:
    with both.stores[0].snapshot() as tx:
        return list(tx.execute(select(outbox.c.stage).order_by(outbox.c.id)).scalars())


def lost(call: Callable[[], object]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    assert caught.value.code == "lease_lost"
    return caught.value


def test_one_holds_it_until_it_expires_or_is_released(both: Both) -> None:
    first, second = both.lease("one"), both.lease("two", of=1)
    assert first.left == 0.0 and first.take() and first.epoch == 1 and 0 < first.left <= 15
    # 1. The other stands by and knows for whom; so it does as long as the first renews.
    assert not second.take() and second.seen[0] == "one" and second.left == 0.0
    for _ in range(3):
        both.clock.forward(seconds=14)
        first.renew()
        assert not second.take()
    # 2. Then it doesn't.
    both.clock.forward(seconds=15)
    assert second.take() and second.epoch == 2
    refusal = lost(first.renew)
    assert "two leads in epoch 2" in refusal.sentence and "one of epoch 1" in refusal.sentence
    # 3. What the first gives back is no longer its own; what the second gives back is free at once.
    first.release()
    third = both.lease("one")
    assert not third.take()
    second.release()
    assert third.take() and third.epoch == 3 and second.left == 0.0
    lost(second.renew)


def test_a_restarted_holder_need_not_wait_for_itself(both: Both) -> None:
    before = both.lease("one")
    assert before.take()
    after = both.lease("one", of=1)
    assert after.take() and after.epoch == 2
    lost(before.renew)


def test_a_deposed_leaders_writes_are_refused_wherever_it_was_paused(both: Both) -> None:
    first, second = both.lease("one"), both.lease("two", of=1)
    leader, standby = both.stores[0].fenced(first.check), both.stores[1].fenced(second.check)
    lost(lambda: write(leader, "before its term"))
    assert first.take()
    write(leader, "a")
    lost(lambda: write(standby, "never led"))
    # 1. Expired is not lost: nobody else took it.
    both.clock.forward(hours=1)
    write(leader, "b")
    # 2. Paused between reading and writing.
    with leader.snapshot() as tx:
        seen = len(tx.execute(select(outbox)).all())
    assert second.take()
    write(standby, "c")
    lost(lambda: write(leader, f"after {seen}"))
    # 3. An API's writes are no leader's.
    write(both.stores[0], "d")
    # 4. It leads again in a term of its own; the old term's writes stay refused.
    both.clock.forward(hours=1)
    again = both.lease("one")
    assert again.take()
    write(both.stores[0].fenced(again.check), "e")
    lost(lambda: write(leader, "of the old term"))
    lost(lambda: write(standby, "of the old term"))
    assert written(both) == ["a", "b", "c", "d", "e"]


def test_nobody_takes_it_between_the_check_and_the_commit(both: Both) -> None:
    first, second = both.lease("one"), both.lease("two", of=1)
    assert first.take()
    both.clock.forward(hours=1)
    taken = threading.Thread(target=second.take)
    with both.stores[0].fenced(first.check).transaction() as tx:
        taken.start()
        taken.join(0.5)
        # The other waits for this transaction, although the lease has expired.
        assert taken.is_alive() and second.epoch == 0
        tx.execute(insert(outbox), {"round": "r", "stage": "a", "payload": {}, "run": None})
    taken.join(WITHIN)
    assert second.epoch == 2 and written(both) == ["a"]


def test_of_many_that_ask_at_once_one_gets_it(both: Both) -> None:
    many = [both.lease(f"holder-{n}", of=n % 2) for n in range(8)]
    barrier, got = threading.Barrier(len(many)), []

    def ask(lease: Lease) -> None:
        barrier.wait()
        if lease.take():
            got.append(lease)

    for round_ in range(1, 4):
        threads = [threading.Thread(target=ask, args=[lease]) for lease in many]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN)
        assert [lease.epoch for lease in got] == [round_]
        got.pop()
        many = [both.lease(f"holder-{n}", of=n % 2) for n in range(8)]
        both.clock.forward(seconds=16)


def test_a_clock_that_jumps_doubles_no_leader_and_locks_nobody_out(both: Both) -> None:
    first, second = both.lease("one"), both.lease("two", of=1)
    assert first.take()

    def later(lease: Lease) -> None:
        """As if a lease's time had passed since it looked at the row."""
        row, seen = lease._watched
        lease._watched = (row, seen - lease.seconds - 0.1)

    # 1. Set back, and the leader lives: its next renewal puts the row right.
    both.clock.forward(hours=-5)
    assert not second.take()
    first.renew()
    later(second)
    assert not second.take()
    # 2. Set back, and the leader is dead: the row expires in hours, but nobody renews it.
    both.clock.forward(hours=-5)
    assert not second.take()
    later(second)
    assert second.take()
    # 3. Set forward: the lease looks expired and may be taken; the one before stands by.
    both.clock.forward(hours=20)
    third = both.lease("three")
    assert third.take()
    lost(second.renew)


def test_a_lease_is_renewed_in_the_background_while_its_leader_shows_life(
    both: Both, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = both.lease("one", seconds=1.0), both.lease("two", seconds=1.0, of=1)
    assert first.take()
    renewal, said = Renewal(first, patience=2 * WITHIN), list[dict[str, str]]()

    def ends() -> str:
        with both.stores[1].snapshot() as tx:
            return str(tx.execute(select(leases.c.expires)).scalar_one())

    def told() -> list[dict[str, str]]:
        said.extend(json.loads(line) for line in capsys.readouterr().err.splitlines())
        return said

    renewal.start()
    # By the database's clock, which goes on once the lease was renewed.
    for _ in range(4):
        both.clock.forward(seconds=0.9)
        due = format_time(both.clock.now + timedelta(seconds=first.seconds))
        until(lambda due=due: ends() == due)
        assert not second.take()
    until(lambda: first.left > 0)
    # 1. The leader hangs: its lease runs out, and the log says why.
    renewal._alive -= 3 * WITHIN
    until(told)
    both.clock.forward(seconds=1.1)
    assert second.take()
    assert [line["event"] for line in said] == ["lease not renewed"] and "has hung" in said[0]["reason"]
    # 2. It wakes up: the thread finds the lease lost and ends.
    renewal.alive()
    until(lambda: not renewal._thread.is_alive())
    renewal.stop()
    assert renewal.lost is not None and renewal.lost.code == "lease_lost"
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert len(said) == 1 and said[0]["reason"].startswith("lease_lost: ")


def test_what_the_database_says_when_it_is_asked_is_what_counts(both: Both) -> None:
    # The row of a process that believed in another time: the database's clock decides, not what either process thinks.
    first, second = both.lease("one"), both.lease("two", of=1)
    assert first.take()
    with both.stores[0].transaction() as tx:
        past = (tx.now() - timedelta(seconds=1)).isoformat(timespec="microseconds").replace("+00:00", "Z")
        tx.execute(update(leases).values(expires=past))
    assert first.left > 0 and second.take()
