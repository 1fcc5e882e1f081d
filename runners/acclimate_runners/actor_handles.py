"""What the driver of a Ray cluster holds of an attempt in an actor; ray itself is given to it by cluster.py."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from acclimate_runners.runner import Status

_WAITING = "waiting for a machine"
_BEGINS = "beginning on its machine"
_LONG = 60.0
"""Seconds after which it is told since when an actor has had no place, or gave no answer."""

_SOUGHT = 0.1
"""Of the patience, after which it is asked where an actor is that has not answered yet, and how often."""
_SELDOM, _SHARE = 1.0, 0.005
"""Seconds between two questions at most, and which share of the time that an attempt has taken so far."""


@dataclass(frozen=True)
class Keeper:
    """What a handle asks of its driver.

    Attributes:
        ray: the module.
        forget: called once the attempt has ended.
        set_aside: called with the name of Ray for a machine that was unfit, and why.
        named: what the runner calls the machine that Ray calls so.
        seek: the name of Ray for the machine on which an actor has begun, empty where it has not; and whether it is then told to keep off
            one that may take it by now.
        patience: seconds without an answer after which an actor is given up.
    """

    ray: Any
    forget: Callable[[], object]
    set_aside: Callable[[str, Status], object]
    named: Callable[[str], str]
    seek: Callable[[], tuple[str, bool]]
    patience: float


class ActorHandle:
    """An attempt in an actor.

    Attributes:
        actor: Ray's handle of it.
        node: what Ray calls its machine; empty before it has one.
    """

    def __init__(self, actor: Any, keeper: Keeper) -> None:
        self.actor, self.node = actor, ""
        self._keeper = keeper
        self._status = Status("running", what=_WAITING)
        self._asked: Any = None
        self._began = self._answered = self._sought = time.monotonic()
        self._told_to_leave = False
        self._lock = threading.Lock()

    def poll(self) -> Status:
        """The last answer that came; asks for the next one. An actor that is gone is a failed attempt."""
        with self._lock:
            if self._status.state != "running":
                return self._status
            self._status, quiet = self._look(), time.monotonic() - self._answered
            if self._status.state != "running":
                self._end()
                return self._status
            return self._aged(quiet)

    def cancel(self) -> None:
        """Kill the child, then the actor."""
        with self._lock:
            if self._status.state == "running":
                self._status = replace(self._status, state="failed", reason="cancelled", code="cancelled")
                self._end()

    def leave(self, reason: str) -> None:
        """Tell the actor, once, that the attempt must leave its machine."""
        if not self._told_to_leave:
            self._told_to_leave = True
            with contextlib.suppress(self._keeper.ray.exceptions.RayError):
                self.actor.preempt.options(concurrency_group="control").remote(reason)

    def _look(self) -> Status:
        errors = self._keeper.ray.exceptions
        try:
            answer = self._answer()
        except errors.ActorUnavailableError:
            # The way there is cut for now; once Ray knows the actor or its machine to be gone, it says so.
            self._asked = answer = None
        except errors.RayError as error:
            return self._gone(f"its Ray actor is gone: {_cause(error)}")
        if answer is not None:
            return answer
        now, patience = time.monotonic(), self._keeper.patience
        if not self.node:
            return self._seek(now) if now - self._sought > _SOUGHT * patience else self._status
        if (quiet := now - self._answered) > patience:
            return self._failed(f"its machine has given no answer for {quiet:.0f} s")
        return self._status

    def _gone(self, reason: str) -> Status:
        if self.node:
            return self._failed(reason)
        node, _ = self._keeper.seek()
        if node:
            return replace(self._failed(reason), machine=self._keeper.named(node))
        # Where it waits for a machine Ray lets go of it with that machine, and whatever it was to do it had not begun.
        return replace(self._failed(f"it never had a machine: {reason}"), code="preempted")

    def _seek(self, now: float) -> Status:
        """Of one that has never answered: it waits for a machine, where it may do so in vain, or stands still on the one it has."""
        self._sought = now
        node, in_vain = self._keeper.seek()
        if node:
            # From now on it is to answer; it may have waited for its machine until now.
            self.node, self._answered = node, now
            return replace(self._status, machine=self._keeper.named(node), what=_BEGINS)
        if in_vain:
            reason = f"it had no machine for {now - self._began:.0f} s, and was to keep off one that may take it by now"
            return replace(self._status, state="failed", reason=reason, code="preempted")
        return self._status

    def _answer(self) -> Status | None:
        """The answer to the question that was asked last, if it came; asks the next one."""
        if self._asked is None:
            # A question costs its machine a millisecond or two; what goes on for long is asked seldom.
            if time.monotonic() - self._answered < min(_SELDOM, (self._answered - self._began) * _SHARE):
                return None
            self._asked = self.actor.poll.options(concurrency_group="control").remote()
        ready, _ = self._keeper.ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        asked, self._asked = self._asked, None
        told: Status = self._keeper.ray.get(asked)
        self.node, self._answered = told.machine, time.monotonic()
        status = replace(told, machine=self._keeper.named(told.machine))
        if told.unfit:
            self._keeper.set_aside(told.unfit, status)
        return status

    def _failed(self, reason: str) -> Status:
        return replace(self._status, state="failed", reason=reason, code="runner_failed")

    def _aged(self, quiet: float) -> Status:
        status = replace(self._status, silent=self._status.silent + quiet)
        if quiet < _LONG:
            return status
        if not self.node:
            return replace(status, what=f"{_WAITING} for {quiet / 60:.0f} min")
        return replace(status, what=f"{status.what}; its machine has given no answer for {quiet:.0f} s")

    def _end(self) -> None:
        # Killing the actor kills its process, and the child with it (see isolation.py).
        with contextlib.suppress(Exception):
            self._keeper.ray.kill(self.actor, no_restart=True)
        self._keeper.forget()


def _cause(error: Exception) -> str:
    """What an error of Ray says, in one line: of a traceback its end, else its beginning."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [""]
    at_creation = "creation task" in lines[0] or "Traceback" in str(error)
    return f"{type(error).__name__}: {lines[-1 if at_creation else 0][:500]}"
