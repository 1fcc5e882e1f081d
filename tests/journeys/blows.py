"""Blows to a round by a drawn plan: to its children, its dispatchers, and whatever else it stands on."""

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

import dispatching
from chaos import Play
from dispatching import Process


@dataclass(frozen=True)
class Blow:
    """What is done to a round, once its history has so many events."""

    after: int
    what: str


def planned(seed: int, *, events: int, kinds: dict[str, int]) -> list[Blow]:
    """Blows of these kinds, so many of each, drawn over a history of about so many events."""
    draw = random.Random(seed)
    kinds_drawn = [kind for kind, count in kinds.items() for _ in range(count)]
    draw.shuffle(kinds_drawn)
    moments = sorted(draw.randrange(2, events) for _ in kinds_drawn)
    return [Blow(moment, kind) for moment, kind in zip(moments, kinds_drawn, strict=True)]


class Disturbed:
    """A leader and a standby, started again wherever one was killed, and what can be done to them.

    Args:
        play: the round.
        seed: of who is struck.
        outages: what else can be struck, by its kind; one that says False found nothing to strike yet.
    """

    def __init__(self, play: Play, seed: int, **outages: Callable[[], bool | None]) -> None:
        self._play, self._draw, self._outages = play, random.Random(seed), outages
        self._here: dict[str, Process] = {}
        self.done: list[str] = []

    def tend(self) -> None:
        """Start what is not there."""
        for name in ("one", "two"):
            if name not in self._here or self._here[name].process.poll() is not None:
                self._here[name] = self._play.start(name)

    def strike(self, blow: Blow) -> bool:
        """Do it; False where there is nobody to do it to yet."""
        if blow.what in self._outages:
            if self._outages[blow.what]() is False:
                return False
        else:
            found = self._victims(blow.what)
            if not found:
                return False
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._draw.choice(sorted(found)), signal.SIGKILL)
        self.done.append(blow.what)
        return True

    def _victims(self, what: str) -> list[int]:
        if what == "child":
            return dispatching.children(str(self._play.folder))
        leads = self._play.leader()
        here = [process for process in self._here.values() if process.process.poll() is None]
        # Who says of itself that it leads is the one whose name the lease has.
        names = {process.process.pid: {line["holder"] for line in process.events("started")} for process in here}
        return [pid for pid, holders in names.items() if (leads in holders) == (what == "leader")]


def play_out(play: Play, plan: list[Blow], *, seed: int, **outages: Callable[[], bool | None]) -> Disturbed:
    """The round to its evaluation, through all that is planned."""
    left, disturbed = list(plan), Disturbed(play, seed, **outages)

    def over() -> bool:
        disturbed.tend()
        if left and len(play.rows()) >= left[0].after and disturbed.strike(left[0]):
            left.pop(0)
        return play.phase == "evaluated"

    play.until(over, within=1500)
    return disturbed
