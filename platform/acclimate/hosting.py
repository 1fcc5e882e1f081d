"""The thread that holds a runner: a local Ray ends with the thread that made it, and starting one takes seconds.

It looks after the runner too. Where the pool can't be told any more, or starts fail for want of a connection, the runner is closed and
made anew, with growing pauses, and its user goes on. A pool that tells that it has no machines is no lost one: it is waited for.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from acclimate.config import Settings
from acclimate.console import say
from acclimate.schedule import UNMET
from acclimate_competitions.errors import Refusal, installing
from acclimate_runners.runner import Machine, Runner

_PAUSES = (1.0, 60.0)
_LOOK_EVERY, _LOOKS = 2.0, 3
_PATIENCE, _LOOK = 60.0, 0.05
NO_MACHINES = f"{UNMET}joined the pool, or none that is fit for work is left in it"
"""The problem of a pool that is there and empty."""


def wait(event: threading.Event, seconds: float) -> None:
    """Wait for an event, for so many seconds at most."""
    event.wait(seconds)


class Host:
    """Makes a runner in a thread of its own, again and again until it succeeds and whenever it is lost, and closes it there.

    Args:
        factory: makes it.
        pause: waits, as `wait` does; a simulation's goes by its own clock.

    Attributes:
        runner: None while it isn't there; another object once it was made anew.
        machines: the pool as last seen.
        problem: why there is no runner, or NO_MACHINES; empty where all is well or no try has failed.
        since: since when it is, or was last, without a runner that has machines, by the monotonic clock.
        left: whether it was closed while a runner was being made, which was not waited for.
    """

    def __init__(
        self, factory: Callable[[], Runner], *, pause: Callable[[threading.Event, float], None] = wait
    ) -> None:
        self.runner: Runner | None = None
        self.machines: tuple[Machine, ...] = ()
        self.problem, self.since, self.left = "", 0.0, False
        self._factory, self._pause, self._keep = factory, pause, False
        self._stop, self._wake, self._making = threading.Event(), threading.Event(), threading.Event()
        self._cut, self._well = 0, False
        self._thread = threading.Thread(target=self._hold, name="runner", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self.since = time.monotonic()
        self._thread.start()

    def close(self, *, keep: bool = False, leaving: bool = False) -> None:
        """Close the runner; what runs is killed, or with `keep` goes on where it can. One that hangs is left alone after a while.

        With `leaving` this process is about to end: a runner that is still being made, which takes a Ray up to half a minute, is left alone
        at once, and `left` says so. It has run nothing yet.
        """
        self._keep = keep
        self._stop.set()
        self._wake.set()
        deadline = time.monotonic() + _PATIENCE
        while self._thread.is_alive() and time.monotonic() < deadline:
            if leaving and self._making.is_set():
                self.left = True
                return
            self._thread.join(_LOOK)

    def suspect(self, error: Exception) -> None:
        """A start failed: look after the runner now. Several in a row for want of a connection and it is made anew."""
        self._cut = self._cut + 1 if isinstance(error, ConnectionError) else 0
        self._wake.set()

    def trust(self) -> None:
        """A start succeeded."""
        self._cut = 0

    def _hold(self) -> None:
        pause = _PAUSES[0]
        while not self._stop.is_set():
            began = time.monotonic()
            self._making.set()
            try:
                runner = self._factory()
                machines = runner.machines()
            except Exception as error:
                self._making.clear()
                self._troubled(error.sentence if isinstance(error, Refusal) else f"{type(error).__name__}: {error}")
            else:
                self._making.clear()
                self._cut = 0
                self._see(machines)
                self.runner = runner
                say("runner ready", slots=runner.slots, seconds=round(time.monotonic() - began, 2))
                ready = time.monotonic()
                lost = self._watch(runner)
                # First why, and no machines only without a runner: with one they would mean an empty pool.
                if lost:
                    self._troubled(lost)
                    say("runner lost", reason=lost)
                self.runner = None
                self.machines = ()
                try:
                    runner.close(keep=self._keep or bool(lost))
                except Exception:
                    # What is lost may not even close; the next one is made all the same.
                    say("error", traceback=traceback.format_exc())
                if time.monotonic() - ready > _PATIENCE:
                    pause = _PAUSES[0]
            self._pause(self._stop, pause)
            pause = min(pause * 2, _PAUSES[1])

    def _watch(self, runner: Runner) -> str:
        """Look after a runner until the end, or until it is lost; says why, if it is."""
        missed, why = 0, ""
        while not self._stop.is_set():
            self._pause(self._wake, _LOOK_EVERY)
            self._wake.clear()
            if self._stop.is_set():
                break
            if self._cut >= _LOOKS:
                return f"{self._cut} starts in a row had no connection"
            try:
                self._see(runner.machines())
                missed = 0
                continue
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            missed += 1
            if missed >= _LOOKS:
                return why
        return ""

    def _see(self, machines: tuple[Machine, ...]) -> None:
        """Note the pool as a runner told it."""
        if machines:
            self.problem, self._well = "", True
        else:
            self._troubled(NO_MACHINES)
        self.machines = machines

    def _troubled(self, problem: str) -> None:
        if self._well:
            self.since, self._well = time.monotonic(), False
        self.problem = problem


def leave() -> NoReturn:
    """End this process with status 0, as one has to after a close that left a runner in the making.

    The interpreter's own end would pull the floor from under a thread that is in Ray's libraries. What that thread has started ends
    with it: Ray has the kernel see to that.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def runner_of(settings: Settings, *, installation: str = "") -> Runner:
    """The runner that the settings ask for.

    Args:
        settings: of the installation.
        installation: its id: on a cluster that several share, none takes another's attempts for its own.

    Raises:
        Refusal: extra_missing; on a cluster, config_invalid, runner_failed.
    """
    from acclimate_runners.watch import Patience

    patience = Patience(hang=float(settings.hang_after))
    if settings.runner == "local":
        from acclimate_runners.allotment import allotted
        from acclimate_runners.local import LocalRunner

        return LocalRunner(settings.work, settings.slots or allotted().cpus, patience=patience)
    from acclimate_runners.cluster import RayRunner

    try:
        namespace = f"acclimate-{installation}" if installation else "acclimate"
        slots = settings.slots or None
        return RayRunner(settings.node_work, settings.ray_address, slots, namespace=namespace, patience=patience)
    except ImportError as error:
        hint = f"set the runner to local, or {installing('runner')}"
        raise Refusal("extra_missing", "the Ray runner needs the extra `runner`", hint=hint) from error


def outlives(settings: Settings) -> bool:
    """Whether attempts go on where the dispatcher that started them ends: on a cluster, never on this machine's own runners."""
    return settings.runner == "ray" and settings.ray_address != "local"
