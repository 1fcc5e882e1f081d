"""What the parts of a leading dispatcher share for one term: leader.py steps, admission.py hands out, settling.py takes back."""

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from acclimate import retries
from acclimate.assignments import Assignment, Held
from acclimate.config import Settings
from acclimate.console import say
from acclimate.dispatch_health import Vitals
from acclimate.hosting import Host, wait
from acclimate.service.identity import Identity
from acclimate.store import Store
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs
from acclimate_runners.runner import Handle, Runner, Status

OUTAGES = frozenset({"database_unreachable", "blobs_unreachable", "lease_lost"})
"""Refusals that say nothing of what was being done: the step ends, and a later one does it again."""
TOGETHER = 16
"""Attempts that are claimed or committed in one transaction; other writers wait for its end, a fraction of a second."""


@dataclass(frozen=True)
class Moments:
    """Where time that only this process counts, and chance, come from; a simulation brings its own.

    Attributes:
        monotonic: seconds since some moment; never goes back.
        uniform: a number drawn evenly between two.
        pause: waits for an event, for so many seconds at most.
    """

    monotonic: Callable[[], float] = time.monotonic
    uniform: Callable[[float, float], float] = random.uniform
    pause: Callable[[threading.Event, float], None] = wait


@dataclass(frozen=True)
class Watch:
    """What a leader tells of itself and is told while it works.

    Attributes:
        alive: called within long work: what shows life does not hang.
        still_leading: refuses lease_lost once its term is over; for work that no transaction fences.
        epoch: of the term's lease.
    """

    alive: Callable[[], None]
    still_leading: Callable[[], None]
    epoch: int


@dataclass
class Running:
    """An attempt under way.

    Attributes:
        held: what it does, and the fence under which it was claimed.
        runner: whose it is; None of one that ended without any.
        ended: once it has, until that is written down.
        said: whether its end was told.
        beat: when its progress was last written down, by the monotonic clock; told: what was written.
        begun: whether its child is known to run.
        placed: whether it is known to be on a machine, where it may still wait for its files.
        machine: which one, as the runner calls it; empty where that isn't known.
    """

    held: Held
    handle: Handle
    runner: Runner | None
    ended: Status | None = None
    said: bool = False
    beat: float = 0.0
    told: tuple[int, int] = (-1, -1)
    begun: bool = False
    placed: bool = False
    machine: str = ""


@dataclass
class Lead:
    """One term of a leader.

    Attributes:
        store: fenced by the term's lease.
        blobs: the store's, as runners see them.
        settings, identity: of the installation; the identity's evaluator key signs.
        host: holds the runner; whoever made it closes it.
        vitals: what is counted for the dispatcher's own metrics.
        watch: over this term.
        running: attempt -> what is under way.
        paused: before when nothing is started, by the monotonic clock.
    """

    store: Store
    blobs: Blobs
    settings: Settings
    identity: Identity
    host: Host
    vitals: Vitals
    watch: Watch
    moments: Moments = field(default_factory=Moments)
    running: dict[str, Running] = field(default_factory=dict)
    paused: float = 0.0
    said: dict[tuple[str, str], str] = field(default_factory=dict)

    def say_once(self, event: str, **facts: str) -> None:
        """Say something that is so at each step: once, and again where it is put otherwise."""
        key, words = (event, facts.get("round", "")), json.dumps(facts, sort_keys=True)
        if self.said.get(key) != words:
            self.said[key] = words
            say(event, **facts)


def ids(held: Held | Assignment) -> dict[str, Any]:
    """What a line of the log says of an attempt."""
    assignment = held.assignment if isinstance(held, Held) else held
    found: dict[str, Any] = {"kind": assignment.kind, "round": assignment.round, "entrant": assignment.entrant}
    found |= {"submission": assignment.submission, "attempt": assignment.attempt}
    if assignment.entry is not None:
        found["entry"] = assignment.entry
    return found | ({"fence": held.fence} if isinstance(held, Held) else {})


def passes(error: Exception) -> bool:
    """Whether an error says nothing of what was being done, which is done again in a later step."""
    return isinstance(error, Refusal) and error.code in retries.PASSING | OUTAGES
