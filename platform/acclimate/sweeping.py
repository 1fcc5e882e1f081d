"""What crashed writers left in the store of blobs is removed by the leader, at once and then hourly, in a thread that holds up nothing."""

import threading
import time

from acclimate.console import say
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs

EVERY_SECONDS = 3600.0


class Sweeper:
    """Sweeps a store of blobs; call step() often.

    Args:
        blobs: the store.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._due = time.monotonic()
        self._thread: threading.Thread | None = None

    def step(self) -> None:
        """Begin to sweep, where it is time and none is under way."""
        if time.monotonic() < self._due or (self._thread is not None and self._thread.is_alive()):
            return
        self._due = time.monotonic() + EVERY_SECONDS
        self._thread = threading.Thread(target=self._sweep, name="sweep", daemon=True)
        self._thread.start()

    def _sweep(self) -> None:
        try:
            removed = self._blobs.sweep()
        except (Refusal, OSError) as error:
            # Rounds close in time, blobs or no blobs.
            say("not swept", reason=str(error))
        else:
            if removed:
                say("swept", removed=removed)
