"""Opening holdouts and publishing rankings in threads: large ones take long, and their dispatcher goes on leading meanwhile.

A second process may compute a ranking for hours, so publications have a thread of their own, and no holdout waits behind one.
"""

import queue
import threading
import time
from collections.abc import Callable

from acclimate.config import Settings
from acclimate.service import clockwork
from acclimate.store import Store
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase

PATIENCE = 5.0
"""Seconds for which a dispatcher that is stopped waits for what is under way; then the next one does it."""
AGAIN_AFTER = (1.0, 60.0)
"""Seconds before what was hindered is tried again: twice as long each time, up to a bound."""
DIFFERS_AFTER = (60.0, 6 * 3600.0)
"""The same where the second process did not give the same ranking: that takes a machine long, and will hardly end differently."""
_WHOLE = frozenset({"lease_lost", "database_unreachable"})


class Aside:
    """Opens holdouts one at a time and publishes rankings one at a time, in two threads that do not outlive the process.

    Args:
        store: the leader's; what is done once its term is over is refused there.
        settings: of the installation.
        monotonic: the clock by which what was hindered waits.
    """

    def __init__(self, store: Store, settings: Settings, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store, self._settings, self._monotonic = store, settings, monotonic
        self._ended: queue.SimpleQueue[tuple[str, str | None | Exception]] = queue.SimpleQueue()
        self._under_way: set[str] = set()
        # Of rounds that something hindered: how often, and before when, by the monotonic clock, they are left alone.
        self._hindered: dict[str, tuple[int, float]] = {}
        self._opening, self._publishing = (_Lane(self._work) for _ in range(2))

    def begin(self, round_id: str) -> None:
        """Begin what is due of a round unless that is under way; for clockwork.tick: it isn't done yet."""
        if round_id not in self._under_way and self._monotonic() >= self._hindered.get(round_id, (0, 0.0))[1]:
            self._under_way.add(round_id)
            known = self._store.recall(round_id)
            lane = self._publishing if known is not None and known.phase is Phase.EVALUATED else self._opening
            lane.ask(round_id)

    @property
    def idle(self) -> bool:
        """Whether all that was begun has ended, told or not."""
        return self._ended.qsize() >= len(self._under_way)

    def made(self) -> list[str]:
        """A line, as tick's, for each record that was logged since this was last asked; what hindered one is logged.

        Raises:
            Refusal: lease_lost, database_unreachable.
        """
        made, outage = [], None
        while not self._ended.empty():
            round_id, end = self._ended.get()
            self._under_way.discard(round_id)
            if isinstance(end, Refusal) and end.code in _WHOLE:
                outage = end
            elif isinstance(end, Exception):
                clockwork.tell(round_id, end)
                count = self._hindered.get(round_id, (0, 0.0))[0] + 1
                differs = isinstance(end, Refusal) and end.code == "guard_failed"
                first, most = DIFFERS_AFTER if differs else AGAIN_AFTER
                wait = min(most, first * 2.0 ** min(count - 1, 16))
                self._hindered[round_id] = (count, self._monotonic() + wait)
            elif end:
                self._hindered.pop(round_id, None)
                made.append(f"{round_id}: {end}")
        if outage is not None:
            raise outage
        return made

    def close(self, *, patience: float | None = None) -> None:
        """Begin nothing more, and wait so many seconds, or PATIENCE, for what is under way; what takes longer is left alone."""
        until = time.monotonic() + (PATIENCE if patience is None else patience)
        for lane in (self._opening, self._publishing):
            lane.end()
        for lane in (self._opening, self._publishing):
            lane.join(max(0.0, until - time.monotonic()))

    def _work(self, round_id: str) -> None:
        try:
            end: str | None | Exception = clockwork.carry_out(self._store, self._settings, round_id)
        except Exception as error:
            end = error
        self._ended.put((round_id, end))


class _Lane:
    """Does one round after the other, in a thread of its own from the first on."""

    def __init__(self, work: Callable[[str], None]) -> None:
        self._work = work
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, round_id: str) -> None:
        self._asked.put(round_id)
        if self._thread is None:
            # A daemon: concurrent.futures would keep a process that is stopped until a holdout is open.
            self._thread = threading.Thread(target=self._run, name="aside", daemon=True)
            self._thread.start()

    def end(self) -> None:
        self._asked.put(None)

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while (round_id := self._asked.get()) is not None:
            self._work(round_id)
