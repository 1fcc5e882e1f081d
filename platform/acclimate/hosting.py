"""The thread that holds a runner: a local Ray ends with the thread that made it, and starting one takes seconds."""

import os
import threading
import time
from collections.abc import Callable

from acclimate.config import Settings
from acclimate.console import say
from acclimate_competitions.errors import Refusal
from acclimate_runners.runner import Runner

_AGAIN_AFTER = 5.0


class Host:
    """Makes a runner in a thread of its own, again and again until it succeeds, and closes it there.

    Attributes:
        runner: None until it is there.
        problem: why it isn't, in words; empty where it is or no try has failed.
    """

    def __init__(self, factory: Callable[[], Runner]) -> None:
        self.runner: Runner | None = None
        self.problem = ""
        self._factory, self._stop = factory, threading.Event()
        self._thread = threading.Thread(target=self._hold, name="runner", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Close the runner, which kills what runs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _hold(self) -> None:
        while self.runner is None and not self._stop.is_set():
            began = time.monotonic()
            try:
                self.runner = self._factory()
                self.problem = ""
                say("runner ready", slots=self.runner.slots, seconds=round(time.monotonic() - began, 2))
            except Exception as error:
                self.problem = error.sentence if isinstance(error, Refusal) else f"{type(error).__name__}: {error}"
                self._stop.wait(_AGAIN_AFTER)
        self._stop.wait()
        if self.runner is not None:
            self.runner.close()


def runner_of(settings: Settings) -> Runner:
    """The runner that the settings ask for.

    Raises:
        Refusal: extra_missing.
    """
    if settings.runner == "local":
        from acclimate_runners.local import LocalRunner

        return LocalRunner(settings.work, settings.slots or os.cpu_count() or 1)
    from acclimate_runners.cluster import RayRunner

    try:
        return RayRunner(settings.work, settings.ray_address, settings.slots or None)
    except ImportError as error:
        hint = "pip install 'acclimate[runner]', or set the runner to local"
        raise Refusal("extra_missing", "the Ray runner needs the extra `runner`", hint=hint) from error
