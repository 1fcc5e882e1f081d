"""Writers of a process commit together: each for itself, nobody answered before the commit, all refused where it fails."""

import threading
from collections.abc import Callable

import pytest
from databases import refused, settings, store
from sqlalchemy import func, insert, select, text
from waiting import until

from acclimate import database
from acclimate.store import Store, invitations
from acclimate.turns import Batch, Turns
from acclimate_competitions.errors import Refusal

__all__ = ["settings", "store"]


class Writer(threading.Thread):
    """One transaction in a thread: writes a row, then ends when it is let; what came of it is kept."""

    def __init__(self, store: Store, name: str, also: Callable[[object], None] = lambda tx: None) -> None:
        super().__init__(daemon=True)
        self.store, self.row, self.also = store, name, also
        self.inside, self.end, self.answered = threading.Event(), threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.store.transaction() as tx:
                tx.execute(insert(invitations), {"code_hash": self.row, "role": "entrant"})
                self.inside.set()
                assert self.end.wait(60)
                self.also(tx)
        except BaseException as error:
            self.error = error
        self.answered.set()


def rows(store: Store) -> set[str]:
    with store.snapshot() as tx:
        return set(tx.execute(select(invitations.c.code_hash)).scalars())


def queued(store: Store, *writers: Writer) -> None:
    """The first is inside its block, the others wait for their turn."""
    writers[0].start()
    assert writers[0].inside.wait(60)
    for number, writer in enumerate(writers[1:], start=1):
        writer.start()
        until(lambda number=number: store._turns._waiting == number)


def test_nobody_is_answered_before_the_one_commit(store):
    first, second = Writer(store, "a"), Writer(store, "b")
    queued(store, first, second)
    first.end.set()
    assert second.inside.wait(60)
    # The first is done and not committed: it waits with the second, and nobody else sees it.
    assert not first.answered.wait(0.1) and rows(store) == set()
    second.end.set()
    assert first.answered.wait(60) and second.answered.wait(60)
    assert (first.error, second.error) == (None, None) and rows(store) == {"a", "b"}


def test_a_refused_turn_undoes_its_own_part_alone(store):
    def refuse(tx: object) -> None:
        raise Refusal("conflict", "no")

    writers = [Writer(store, name, refuse if name in "bd" else lambda tx: None) for name in "abcde"]
    queued(store, *writers)
    for writer in writers:
        writer.end.set()
    for writer in writers:
        writer.join(60)
    assert rows(store) == {"a", "c", "e"}
    assert [writer.error.code if isinstance(writer.error, Refusal) else writer.error for writer in writers] == [
        None, "conflict", None, "conflict", None,
    ]  # fmt: skip


def test_a_refused_first_turn_leaves_the_others_theirs(store):
    def refuse(tx: object) -> None:
        raise KeyError("a fault of ours")

    writers = [Writer(store, name, refuse if name == "a" else lambda tx: None) for name in "abc"]
    queued(store, *writers)
    for writer in writers:
        writer.end.set()
        writer.join(60) if writer.row == "a" else None
    for writer in writers:
        writer.join(60)
    assert isinstance(writers[0].error, KeyError)
    assert [writer.error for writer in writers[1:]] == [None, None] and rows(store) == {"b", "c"}


def test_where_the_database_undoes_all_of_it_all_are_refused_and_may_do_it_again(store):
    def fail(tx) -> None:
        if store.engine.dialect.name == "sqlite":
            # A full disk, in the middle of it: SQLite undoes the whole transaction by itself.
            pages = tx.execute(text("PRAGMA page_count")).scalar_one()
            tx.execute(text(f"PRAGMA max_page_count = {pages}"))
            tx.execute(insert(invitations), [{"code_hash": f"{n}" * 1000, "role": "entrant"} for n in range(200)])
        else:
            backend = tx.execute(text("SELECT pg_backend_pid()")).scalar_one()
            with store.engine.connect() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": backend})
            tx.execute(insert(invitations), {"code_hash": "late", "role": "entrant"})

    writers = [Writer(store, "a"), Writer(store, "b", fail), Writer(store, "c")]
    queued(store, *writers)
    for writer in writers:
        writer.end.set()
    for writer in writers:
        writer.join(60)
    code = "no_space" if store.engine.dialect.name == "sqlite" else "database_unreachable"
    assert [getattr(writer.error, "code", writer.error) for writer in writers[:2]] == [code, code]
    # Whoever came after it had a transaction of its own.
    assert writers[2].error is None or getattr(writers[2].error, "code", "") == code
    assert rows(store) == ({"c"} if writers[2].error is None else set())
    assert writers[0].error is not writers[1].error
    again = Writer(store, "a")
    again.end.set()
    again.start()
    again.join(60)
    if store.engine.dialect.name == "postgresql":
        assert again.error is None and "a" in rows(store)


def turns_of(store: Store, *, committed: Callable[[Batch], None] = lambda batch: None, wait: float = 60) -> Turns:
    """Turns on the store's database, beside those of the store itself."""
    return Turns(lambda: database.writing(store.engine), committed, turn=threading.Lock(), wait=lambda: wait)


def invite(batch: Batch, name: str) -> None:
    batch.connection.execute(insert(invitations), {"code_hash": name, "role": "entrant"})


def test_who_waits_too_long_is_refused_and_holds_up_nobody(store):
    turns = turns_of(store, wait=0.2)
    with turns.take() as batch:
        invite(batch, "a")
        refused("busy", lambda: turns.take().__enter__())
    assert rows(store) == {"a"}


@pytest.mark.parametrize("threads", [1, 24])
def test_what_many_write_at_once_takes_fewer_commits_than_writers(store, threads):
    ended: list[int] = []
    turns = turns_of(store, committed=lambda batch: ended.append(batch.turns))
    begin = threading.Barrier(threads)

    def write(number: int) -> None:
        begin.wait()
        for each in range(5):
            with turns.take() as batch:
                invite(batch, f"{number}-{each}")

    started = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    with store.snapshot() as tx:
        assert tx.execute(select(func.count()).select_from(invitations)).scalar_one() == threads * 5
    assert sum(ended) == threads * 5
    # Whoever is alone has a commit of its own; how many share one is the scheduler's.
    assert len(ended) == 5 if threads == 1 else len(ended) < threads * 5
