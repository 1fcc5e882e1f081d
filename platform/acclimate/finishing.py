"""What follows a round's end outside the log: its projection into MLflow, its bundle and report. Late or failed, it changes no result.

A round is finished once when all entries are prepared and once for each ranking that is published, since results belong to nobody before;
the outbox remembers which, so that the next dispatcher goes on where this one stopped. Only rounds with new records are looked at.
"""

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from sqlalchemy import insert, select

from acclimate.console import say
from acclimate.store import Store, log_entries, outbox
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_runners import failpoints

Finish = Callable[[str, Callable[[], None]], None]
"""Called with a round's id, and with what refuses once another dispatcher leads."""
_AGAIN_AFTER = 30.0
DUE = frozenset({Phase.PREPARED, Phase.RELEASED, Phase.OPENED, Phase.EVALUATED, Phase.PUBLISHED})
"""Phases in which MLflow has something of a round."""
# What says nothing of the round that was looked at.
_WHOLE = frozenset({"busy", "database_unreachable", "lease_lost"})


class Finisher:
    """Finishes each round that has something to finish, in a thread, one at a time.

    Args:
        store: the leader's.
        finish: does it.
        still_leading: refuses once the leader's term is over.
    """

    def __init__(self, store: Store, finish: Finish, *, still_leading: Callable[[], None]) -> None:
        self._store, self._finish, self._still_leading = store, finish, still_leading
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="finishing")
        self._under_way: dict[str, Future[None]] = {}
        # The log's size when it was last looked at; the rounds to look at; what is due, by round.
        self._size = 0
        self._changed: set[str] = set()
        self._due: dict[str, tuple[str, Round]] = {}
        self._not_before: dict[str, float] = {}
        self._unread: dict[str, str] = {}

    def step(self) -> None:
        """Begin what is due, and note what has ended.

        Raises:
            Refusal: busy, database_unreachable.
        """
        with self._store.snapshot() as tx:
            size = tx.size()
            if size != self._size:
                # A database that was restored has fewer: all are looked at again.
                start = self._size if size > self._size else 0
                new = (
                    log_entries.c.index >= start,
                    log_entries.c.round != "",
                )  # what is of no round has the empty name
                query = select(log_entries.c.round).where(*new).distinct()
                self._changed |= set(tx.execute(query).scalars())
                self._size = size
        for name in sorted(self._changed):
            if self._may_begin(name):
                self._look(name)
        for mark, future in list(self._under_way.items()):
            if future.done():
                del self._under_way[mark]
                self._ended(mark, future)
        for mark, state in self._due.values():
            if mark not in self._under_way and self._may_begin(mark):
                self._under_way[mark] = self._thread.submit(self._carry_out, mark, state)

    def close(self, *, patience: float) -> None:
        """Begin nothing more, and wait so many seconds for what is under way. What takes longer ends as it may; it is finished again."""
        wait(self._under_way.values(), timeout=patience)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _look(self, name: str) -> None:
        """Note what is due of a round; one that can't be read stops no other, and is looked at again later."""
        try:
            with self._store.snapshot() as tx:
                state = tx.round(name)
                mark = _mark(state)
                done = tx.execute(select(outbox.c.stage).where(outbox.c.stage == mark).limit(1)).first() is not None
        except Exception as error:
            if isinstance(error, Refusal) and error.code in _WHOLE:
                raise
            self._not_before[name] = time.monotonic() + _AGAIN_AFTER
            reason = f"{type(error).__name__}: {error}"
            if self._unread.get(name) != reason:
                self._unread[name] = reason
                say("not finished", round=name, reason=reason)
            return
        self._changed.discard(name)
        self._unread.pop(name, None)
        self._due.pop(name, None)
        if state.phase in DUE and not done:
            self._due[name] = (mark, state)

    def _may_begin(self, name: str) -> bool:
        return time.monotonic() >= self._not_before.get(name, 0.0)

    def _carry_out(self, mark: str, state: Round) -> None:
        self._still_leading()
        self._finish(state.id, self._still_leading)
        failpoints.reach("finishing")
        with self._store.transaction() as tx:
            payload = {"kind": "round", "phase": _part(state)}
            tx.execute(insert(outbox), {"round": state.id, "stage": mark, "payload": payload, "run": "done"})
            failpoints.reach("marking")
        say("finished", round=state.id, part=_part(state))

    def _ended(self, mark: str, future: "Future[None]") -> None:
        error = future.exception()
        if error is None:
            self._due = {name: due for name, due in self._due.items() if due[0] != mark}
            return
        self._not_before[mark] = time.monotonic() + _AGAIN_AFTER
        say("not finished", traceback="".join(traceback.format_exception(error)))


def _part(state: Round) -> str:
    """What is due: "preparations", or "published", the name of the phase in which the status calls the round tracked."""
    return str(Phase.PUBLISHED) if state.rankings else "preparations"


def _mark(state: Round) -> str:
    """The outbox's name for "this part is finished, with this ranking"."""
    ranking = state.rankings[-1][0] if state.rankings else ""
    return digests.of_json(["finished", state.id, _part(state), ranking])
