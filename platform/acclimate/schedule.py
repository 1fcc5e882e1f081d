"""In which order entries are prepared and evaluated: longest expected first, equals in an order nobody could choose.

The order of equals is drawn from the checkpoint that contains RoundClosed: it is fixed only once the entries are frozen, and
whoever holds the log can draw it again. Longest first keeps the machines busy to the end (Graham's LPT rule: at most 4/3 − 1/(3m) times the
shortest makespan on m equal machines; R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969).
"""

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
