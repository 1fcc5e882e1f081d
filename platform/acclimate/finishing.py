"""What follows a round's end outside the log: its projection into MLflow, its bundle and report. Late or failed, it changes no result.

A round is finished once when all entries are prepared and once for each ranking that is published, since results belong to nobody before;
the outbox remembers which, so that the next dispatcher goes on where this one stopped.
"""

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from sqlalchemy import insert, select

from acclimate.console import say
from acclimate.store import Store, outbox, rounds
from acclimate_competitions import digests
from acclimate_competitions.phases import Phase, Round

PATIENCE = 15.0
"""Seconds for which a dispatcher that is stopped waits before it hands over."""
_AGAIN_AFTER = 30.0
_DUE = frozenset({Phase.PREPARED, Phase.RELEASED, Phase.OPENED, Phase.EVALUATED, Phase.PUBLISHED})


class Finisher:
    """Calls `finish` with the id of each round that has something to finish, in a thread, one at a time."""

    def __init__(self, store: Store, finish: Callable[[str], None]) -> None:
        self._store, self._finish = store, finish
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="finishing")
        self._under_way: dict[str, Future[None]] = {}
        self._not_before: dict[str, float] = {}

    def step(self) -> None:
        """Begin what is due, and note what has ended."""
        with self._store.snapshot() as tx:
            found = [tx.round(name) for name in tx.execute(select(rounds.c.id)).scalars()]
            due = {_mark(state): state for state in found if state.phase in _DUE}
            done = set(tx.execute(select(outbox.c.stage).where(outbox.c.stage.in_(list(due)))).scalars())
        for mark, future in list(self._under_way.items()):
            if future.done():
                del self._under_way[mark]
                self._ended(mark, future)
                done.add(mark)
        for mark, state in due.items():
            if mark not in done | set(self._under_way) and time.monotonic() >= self._not_before.get(mark, 0.0):
                self._under_way[mark] = self._thread.submit(self._carry_out, mark, state)

    def close(self, *, patience: float = PATIENCE) -> None:
        """Begin nothing more, and wait so many seconds for what is under way. What takes longer ends as it may; it is finished again."""
        wait(self._under_way.values(), timeout=patience)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _carry_out(self, mark: str, state: Round) -> None:
        self._finish(state.id)
        with self._store.transaction() as tx:
            payload = {"kind": "round", "phase": _part(state)}
            tx.execute(insert(outbox), {"round": state.id, "stage": mark, "payload": payload, "run": "done"})
        say("finished", round=state.id, part=_part(state))

    def _ended(self, mark: str, future: "Future[None]") -> None:
        error = future.exception()
        if error is not None:
            self._not_before[mark] = time.monotonic() + _AGAIN_AFTER
            say("not finished", traceback="".join(traceback.format_exception(error)))


def _part(state: Round) -> str:
    """What is due: "preparations", or "published", the name of the phase in which the status calls the round tracked."""
    return str(Phase.PUBLISHED) if state.rankings else "preparations"


def _mark(state: Round) -> str:
    """The outbox's name for "this part is finished, with this ranking"."""
    ranking = state.rankings[-1][0] if state.rankings else ""
    return digests.of_json(["finished", state.id, _part(state), ranking])
