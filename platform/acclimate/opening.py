"""Opening holdouts in a thread: a large one takes long, and its dispatcher goes on leading meanwhile."""

import queue
import threading

from acclimate.config import Settings
from acclimate.service import clockwork, release
from acclimate.store import Store
from acclimate_competitions.errors import Refusal

PATIENCE = 5.0
"""Seconds for which a dispatcher that is stopped waits for an opening; then the next one opens."""
_WHOLE = frozenset({"lease_lost", "database_unreachable"})


class Opener:
    """Opens holdouts one at a time, in a thread that does not outlive the process.

    Args:
        store: the leader's; what is opened once its term is over is refused there.
        settings: of the installation.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[str, bool | Exception]] = queue.SimpleQueue()
        self._under_way: set[str] = set()
        self._thread: threading.Thread | None = None

    def begin(self, round_id: str) -> bool:
        """Begin to open a round's holdout unless that is under way; for clockwork.tick: False, as it isn't open yet."""
        if round_id not in self._under_way:
            self._under_way.add(round_id)
            self._asked.put(round_id)
        if self._thread is None:
            # A daemon: concurrent.futures would keep a process that is stopped until a holdout is open.
            self._thread = threading.Thread(target=self._work, name="opening", daemon=True)
            self._thread.start()
        return False

    def made(self) -> list[str]:
        """A line, as tick's, for each holdout that was opened since this was last asked; what hindered one is logged.

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
            elif end:
                made.append(f"{round_id}: HoldoutOpened")
        if outage is not None:
            raise outage
        return made

    def close(self, *, patience: float | None = None) -> None:
        """Begin nothing more, and wait so many seconds, or PATIENCE, for what is under way; what takes longer is left alone."""
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join(PATIENCE if patience is None else patience)

    def _work(self) -> None:
        while (round_id := self._asked.get()) is not None:
            try:
                end: bool | Exception = release.open_holdout(self._store, self._settings, round_id)
            except Exception as error:
                end = error
            self._ended.put((round_id, end))
