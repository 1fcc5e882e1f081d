"""Writers of one process take turns in one transaction and commit together.

One writer at a time is the database's rule (decision 0008), and what a commit costs is the disk's answer that it has it. So whoever has had its turn
while others wait for theirs leaves the transaction open for them, and all of them wait for the one commit at its end. Each turn but the first is a
savepoint: what it wrote is undone alone where it is refused. Nobody is answered, not even with a refusal, before what it saw is committed; where the
commit fails, it fails for all. A writer that nobody waits behind commits at once, as if there were no others.

A transaction ends after so many turns, or so long after its beginning: other processes wait for it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from acclimate.contention import busy
from acclimate_competitions.errors import Refusal

TOGETHER = 64
SECONDS = 0.05
_LOOK_SECONDS = 0.02
_TURN = "turn"
"""The savepoint's name. None is released before the end, which would be one more question to the database; the newest counts."""


@dataclass(eq=False)
class Batch:
    """A transaction in which turns are taken.

    Attributes:
        connection: whose.
        folded: what its turns found of the rounds, by the rounds' ids; for the turns to come.
        tip: size of the log and time of its last entry, as a turn before has left them; None where none has written.
        stack: ends it.
        began: by the monotonic clock.
        turns: how many it has had.
        done: set once it has ended.
        error: why it was not committed.
    """

    connection: Connection
    stack: ExitStack
    folded: Mapping[str, Any] = field(default_factory=dict)
    tip: Any = None
    began: float = field(default_factory=time.monotonic)
    turns: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Turns:
    """The turns of a process's writers.

    Args:
        begin: begins a transaction that may write.
        committed: told of each batch that was committed, before anybody is answered.
        turn: held by whose turn it is.
        wait: says how many seconds to wait for it.
    """

    def __init__(
        self,
        begin: Callable[[], AbstractContextManager[Connection]],
        committed: Callable[[Batch], None],
        *,
        turn: threading.Lock,
        wait: Callable[[], float],
    ) -> None:
        self._begin, self._committed, self._turn, self._wait = begin, committed, turn, wait
        self._waiting, self._counting = 0, threading.Lock()
        self._open: Batch | None = None

    @contextmanager
    def take(self) -> Iterator[Batch]:
        """A turn: the block's writes are committed when it ends, or undone where it raises.

        1. The turn comes, and with it the transaction that the one before left open, or a new one.
        2. A block that is refused undoes its own part. The first one's is the whole transaction, as is that of a connection that was lost.
        3. The transaction is committed, or left to who waits.
        4. Whoever left it waits for its end.

        Raises:
            Refusal: busy, where the turn does not come in time; whatever the block raises, or the commit.
        """
        # 1
        self._get()
        batch, failed = None, None
        try:
            batch = self._open or self._new()
            nested = batch.turns > 0
            if nested:
                _check_open(batch.connection)
                batch.connection.exec_driver_sql(f"SAVEPOINT {_TURN}")
            # 2
            try:
                yield batch
            except BaseException as error:
                failed = error
                if nested:
                    batch.connection.exec_driver_sql(f"ROLLBACK TO SAVEPOINT {_TURN}")
                else:
                    self._abort(batch, error)
            batch.turns += 1
            # 3
            if self._open is batch and self._is_over(batch):
                self._end(batch)
        except BaseException as error:
            # What the database said first tells more than that there is nothing left to undo.
            cause = error if failed is None or isinstance(failed, Refusal) else failed
            if batch is not None and not batch.done.is_set():
                self._abort(batch, cause)
            raise cause from None
        finally:
            self._turn.release()
        # 4
        self._await(batch)
        if failed is not None and batch.error in (None, failed):
            raise failed
        if isinstance(batch.error, Refusal):
            raise _again(batch.error)
        if batch.error is not None:
            raise batch.error

    def _get(self) -> None:
        with self._counting:
            self._waiting += 1
        # Waiting here is fair, which polling for SQLite's lock is not, and holds no connection of PostgreSQL's.
        got = self._turn.acquire(timeout=self._wait())
        with self._counting:
            self._waiting -= 1
        if not got:
            raise busy("other requests are being written")

    def _new(self) -> Batch:
        stack = ExitStack()
        self._open = Batch(stack.enter_context(self._begin()), stack)
        return self._open

    def _is_over(self, batch: Batch) -> bool:
        with self._counting:
            alone = self._waiting == 0
        return alone or batch.turns >= TOGETHER or time.monotonic() - batch.began >= SECONDS

    def _end(self, batch: Batch) -> None:
        """Commit, and tell those who wait for it; the turn is held."""
        self._open = None
        try:
            batch.stack.close()
            self._committed(batch)
        except BaseException as error:
            batch.error = error
        finally:
            batch.done.set()

    def _abort(self, batch: Batch, error: BaseException) -> None:
        """Undo all of it; the turn is held."""
        self._open = None
        batch.error = error
        try:
            batch.stack.__exit__(type(error), error, error.__traceback__)
        except BaseException as found:
            # What the database says of it; the error itself comes back, too.
            batch.error = found
        finally:
            batch.done.set()

    def _await(self, batch: Batch) -> None:
        while not batch.done.wait(_LOOK_SECONDS):
            # Who was waited for gave up, or is done and left the end to others: whoever sees it ends it.
            if self._turn.acquire(blocking=False):
                try:
                    if self._open is batch:
                        self._end(batch)
                finally:
                    self._turn.release()


def _check_open(connection: Connection) -> None:
    """That the transaction is still there: SQLite undoes all of one by itself where its disk is full."""
    if not getattr(connection.connection.driver_connection, "in_transaction", True):
        raise busy("what was being written was undone by the database")


def _again(refusal: Refusal) -> Refusal:
    """One of his own for each who is refused."""
    return Refusal(refusal.code, refusal.sentence, hint=refusal.hint, problems=refusal.problems)
