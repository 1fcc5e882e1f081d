"""In which order entries are prepared and evaluated, and how many at once: longest first, equals in an order nobody could choose.

The order of equals is drawn from the checkpoint that contains RoundClosed: it is fixed only once the entries are frozen, and
whoever holds the log can draw it again. Longest first keeps the machines busy to the end (Graham's LPT rule: at most 4/3 − 1/(3m) times the
shortest makespan on m equal machines; R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969). It is one order over the work of
all rounds that are under way, as they share the machines.

How many are handed out at once is decided on a model of the pool (placement.py), since whatever places attempts on a cluster waits
without a word for what no machine can ever give. `admit` decides, for the dispatcher and for the simulation of a plan (simulation.py).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from acclimate_runners.placement import Outstanding, Room
from acclimate_runners.runner import Demand, Machine

UNMET = "no machine has "
"""How placement.refusal_of begins: the reason of work that no machine of the pool can take."""
PINNED = "the round is pinned to code "
"""How the reason of work begins that is another version's."""
_OVER = 1.2
"""Attempts that may be outstanding for each that fits: a few that wait, so that no machine idles until the next plan."""
PATIENCE = 20
"""How many may begin before one whose turn it is, as they find room and it doesn't, until a machine is set aside for it."""


@dataclass(frozen=True)
class Work:
    """One attempt to be made.

    Attributes:
        entrant: whose entry.
        cost: expected seconds, or any other effort in a unit that is the same for all.
        priority: lower comes first, whatever the cost.
    """

    entrant: str
    cost: float
    priority: int = 0


class Waiting(Protocol):
    """An attempt that waits to be handed out."""

    @property
    def attempt(self) -> str:
        """Its id."""

    @property
    def demand(self) -> Demand:
        """What it takes of a machine."""


_Waiting = TypeVar("_Waiting", bound=Waiting)


def draw(checkpoint: str, entrant: str) -> bytes:
    """The entrant's place in the random order: sha256 of the checkpoint's text and the entrant's id."""
    return hashlib.sha256(checkpoint.encode() + entrant.encode()).digest()


def place(work: Work, *, checkpoint: str) -> tuple[int, float, bytes, str]:
    """Sorts work by priority, then longest first, then in the order that the checkpoint of its round draws."""
    return (work.priority, -work.cost, draw(checkpoint, work.entrant), work.entrant)


def order(works: Iterable[Work], *, checkpoint: str) -> list[Work]:
    """Works of one round by their place; independent of the order in which they are given."""
    return sorted(works, key=lambda work: place(work, checkpoint=checkpoint))


def admit(
    ready: Sequence[_Waiting],
    machines: Sequence[Machine],
    *,
    slots: int,
    outstanding: Iterable[Outstanding],
    overtaken: MutableMapping[str, int],
    may: Callable[[_Waiting], bool] = lambda one: True,
) -> Iterator[_Waiting]:
    """What is handed out now, one after the other: the first for which there is room, and what fits beside it.

    What finds no room is passed over, as something smaller may find some: else machines would idle before each large demand. So that a
    stream of small ones does not starve it, one that was overtaken PATIENCE times comes before all others, and where it still finds
    no room, a machine that can hold it is set aside: in the model it takes nothing more until it is empty enough. So it is handed out at the
    latest when PATIENCE others have begun and the longest of those that run has ended after that, and no more than that machine's idle
    part is lost for it. What the cluster then lets wait, `held_for` sees. Where all demands are equal nothing is overtaken, and the
    order alone counts.

    Args:
        ready: in their order.
        machines: the pool.
        slots: how many may be outstanding at most.
        outstanding: those that are, whether they run or wait on the cluster.
        overtaken: attempt -> how many of a later place began while it found no room; kept by the caller, and counted here.
        may: asked right before an attempt is handed out; a false one is passed over and does not count as overtaken.
    """
    capacity = Capacity(machines, slots=slots, outstanding=outstanding)
    if any(count >= PATIENCE for count in overtaken.values()):
        ready = sorted(ready, key=lambda one: overtaken.get(one.attempt, 0) < PATIENCE)
    # What found no room now finds none later in this pass, nor does its like: only the first of each kind is counted and helped.
    without, begun = dict[tuple[object, ...], tuple[str, int]](), 0
    try:
        for one in ready:
            if capacity.full:
                return
            kind = _kind(one.demand)
            if kind in without or not may(one):
                continue
            if capacity.take(one.demand):
                overtaken.pop(one.attempt, None)
                begun += 1
                yield one
                continue
            without[kind] = (one.attempt, begun)
            if overtaken.get(one.attempt, 0) >= PATIENCE:
                capacity.set_aside(one.demand)
    finally:
        for attempt, before in without.values():
            if begun > before:
                overtaken[attempt] = overtaken.get(attempt, 0) + begun - before


@dataclass(frozen=True)
class HandedOut:
    """An attempt that was handed out and has not ended.

    Attributes:
        attempt: its id.
        able: names of the machines that may get it (placement.able).
        machine: where it has begun; empty while it waits on the cluster.
    """

    attempt: str
    able: frozenset[str]
    machine: str = ""


def held_for(handed_out: Sequence[HandedOut], passed: MutableMapping[str, set[str]]) -> frozenset[str]:
    """The machines for which one waits on the cluster although PATIENCE handed out later have begun there: what may get one is not handed out.

    A cluster that spreads small attempts over all machines would never have room for one that takes a whole machine; once no more come, it
    has. What began on a machine that the one that waits can't get, or keeps off, took nothing from it.

    Args:
        handed_out: in the order in which they were handed out.
        passed: attempt -> those that passed it; kept by the caller, and counted here.
    """
    begun, held = list[HandedOut](), set[str]()
    for one in reversed(handed_out):
        if one.machine:
            begun.append(one)
            passed.pop(one.attempt, None)
            continue
        by = passed.setdefault(one.attempt, set())
        by.update(other.attempt for other in begun if other.machine in one.able)
        if len(by) >= PATIENCE:
            held |= one.able
    return frozenset(held)


def _kind(demand: Demand) -> tuple[object, ...]:
    return demand.cpus, demand.gpus, demand.memory, tuple(sorted(demand.labels.items())), demand.avoid


def _by_hardness(one: Outstanding) -> tuple[object, ...]:
    """First where something is, as that is known; then the hardest, so that what is easy to place does not take the places of what is not."""
    demand = one.demand
    return bool(one.machine), len(demand.labels) + len(demand.avoid), demand.gpus, demand.memory, demand.cpus


class Capacity:
    """What a pool still takes beside what is outstanding there.

    Args:
        machines: the pool; empty where it can't be told, and then only slots count.
        slots: how many attempts may be outstanding at most.
        outstanding: those that are, whether they run or wait.
    """

    def __init__(self, machines: Sequence[Machine], *, slots: int, outstanding: Iterable[Outstanding] = ()) -> None:
        self._room, self._known = Room(machines), bool(machines)
        self._left, self._placed, self._waiting = slots, 0, 0
        self._kept = False
        there = {machine.name for machine in machines}
        for one in sorted(outstanding, key=_by_hardness, reverse=True):
            if one.machine and one.machine not in there:
                # It ends on a machine that takes nothing more, and needs no room elsewhere.
                self._left -= 1
            else:
                placed = self._room.take(one.demand, on=one.machine) is not None
                self._count(placed=placed or bool(one.machine))

    @property
    def full(self) -> bool:
        """Whether nothing more can be taken, whatever it is."""
        return self._left <= 0

    def take(self, demand: Demand) -> bool:
        """Take one more attempt, if it fits beside the others or may wait for its place; says whether it is taken."""
        if self.full:
            return False
        placed = not self._known or self._room.take(demand) is not None
        # Whoever waits on the cluster would get the machine that is set aside for another.
        if not placed and (self._kept or self._placed + self._waiting + 1 > _OVER * self._placed):
            return False
        self._count(placed=placed)
        return True

    def set_aside(self, demand: Demand) -> None:
        """Keep a machine that can hold a demand from taking anything more, if there is one left."""
        self._kept = self._room.set_aside(demand) is not None or self._kept

    def _count(self, *, placed: bool) -> None:
        self._left -= 1
        self._placed += placed
        self._waiting += not placed
