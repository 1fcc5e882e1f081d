"""In which order entries are prepared and evaluated, and how many at once: longest first, equals in an order nobody could choose.

The order of equals is drawn from the checkpoint that contains RoundClosed: it is fixed only once the entries are frozen, and
whoever holds the log can draw it again. Longest first keeps the machines busy to the end (Graham's LPT rule: at most 4/3 − 1/(3m) times the
shortest makespan on m equal machines; R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969).

How many are handed out at once is decided on a model of the pool (placement.py), since whatever places attempts on a cluster waits
without a word for what no machine can ever give.
"""

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from acclimate_runners.placement import Room
from acclimate_runners.runner import Demand, Machine

UNMET = "no machine has "
"""How placement.refusal_of begins: the reason of work that no machine of the pool can take."""
PINNED = "the round is pinned to code "
"""How the reason of work begins that is another version's."""
_OVER = 1.2
"""Attempts that may be outstanding for each that fits: a few that wait, so that no machine idles until the next plan."""


@dataclass(frozen=True)
class Work:
    """One attempt to be made.

    Attributes:
        entrant: whose entry.
        cost: expected effort in any unit that is the same for all, such as parameters times stages.
        priority: lower comes first, whatever the cost.
    """

    entrant: str
    cost: float
    priority: int = 0


def draw(checkpoint: str, entrant: str) -> bytes:
    """The entrant's place in the random order: sha256 of the checkpoint's text and the entrant's id."""
    return hashlib.sha256(checkpoint.encode() + entrant.encode()).digest()


def order(works: Iterable[Work], *, checkpoint: str) -> list[Work]:
    """Works by priority, then longest first, then in the drawn order; independent of the order in which they are given."""
    return sorted(works, key=lambda w: (w.priority, -w.cost, draw(checkpoint, w.entrant), w.entrant))


def makespan(works: Sequence[Work], *, slots: int) -> float:
    """When the last work of this order ends if each begins as soon as one of the slots is free, in the unit of the costs."""
    free = [0.0] * max(1, slots)
    for work in works:
        heapq.heappush(free, heapq.heappop(free) + work.cost)
    return max(free)


class Capacity:
    """What a pool still takes beside what is outstanding there.

    Args:
        machines: the pool; empty where it can't be told, and then only slots count.
        slots: how many attempts may be outstanding at most.
        outstanding: the demands of those that are, whether they run or wait.
    """

    def __init__(self, machines: Sequence[Machine], *, slots: int, outstanding: Iterable[Demand] = ()) -> None:
        self._room, self._known = Room(machines), bool(machines)
        self._left, self._placed, self._waiting = slots, 0, 0
        for demand in sorted(outstanding, key=lambda d: (len(d.labels), d.gpus, d.memory, d.cpus), reverse=True):
            self._count(placed=self._room.take(demand) is not None)

    @property
    def full(self) -> bool:
        """Whether nothing more can be taken, whatever it is."""
        return self._left <= 0

    def take(self, demand: Demand) -> bool:
        """Take one more attempt, if it fits beside the others or may wait for its place; says whether it is taken."""
        if self.full:
            return False
        placed = not self._known or self._room.take(demand) is not None
        if not placed and self._placed + self._waiting + 1 > _OVER * self._placed:
            return False
        self._count(placed=placed)
        return True

    def _count(self, *, placed: bool) -> None:
        self._left -= 1
        self._placed += placed
        self._waiting += not placed
