"""What the dispatcher's own decisions would come to: attempts handed out by schedule.admit on a pool where nothing fails, by an imagined clock.

The pool is thought of as a cluster that takes what is handed out in its order, each on the first machine that has room, and lets wait what
finds none. What a cluster does beyond that (start-up, data on its way, failures) is not in it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from acclimate import schedule
from acclimate.schedule import HandedOut
from acclimate_runners import placement
from acclimate_runners.placement import Outstanding, Room
from acclimate_runners.runner import Demand, Machine


@dataclass(frozen=True)
class Schedule:
    """When each attempt begins and ends, in seconds from the first, and on which machine; in the order in which they were given."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    machines: tuple[str, ...]

    @property
    def makespan(self) -> float:
        """Seconds from the first begin to the last end."""
        return max(self.ends, default=0.0)


@dataclass(frozen=True)
class _Attempt:
    number: int
    attempt: str
    demand: Demand


def simulate(
    demands: Sequence[Demand], machines: Sequence[Machine], *, slots: int, seconds: Sequence[float]
) -> Schedule:
    """Hand out these attempts, which wait in this order from the beginning, and see when each ends.

    Args:
        demands: of each attempt, in the order of schedule.order.
        machines: the pool.
        slots: how many may be outstanding.
        seconds: how long each really takes, whatever was expected.

    Raises:
        ValueError: where one can never begin.
    """
    pool = _Pool(machines)
    ready = {str(i): _Attempt(i, str(i), demand) for i, demand in enumerate(demands)}
    starts, ends, places = [0.0] * len(ready), [0.0] * len(ready), [""] * len(ready)
    running: list[tuple[float, int]] = []
    outstanding, overtaken = dict[int, Demand](), dict[str, int]()
    able = _able(demands, machines)
    passed, handed_out = dict[str, set[str]](), list[_Attempt]()
    now = 0.0
    while ready or outstanding:
        out = [HandedOut(str(number), able[number], places[number]) for number in outstanding]
        held = schedule.held_for(out, passed)
        given = list(
            schedule.admit(
                [one for one in ready.values() if held.isdisjoint(able[one.number])],
                machines,
                slots=slots,
                outstanding=[Outstanding(demand, places[number]) for number, demand in outstanding.items()],
                overtaken=overtaken,
            )
        )
        for one in given:
            del ready[one.attempt]
            outstanding[one.number] = one.demand
            handed_out.append(one)
        waiting = []
        for one in handed_out:
            name = pool.begin(one)
            if name is None:
                waiting.append(one)
                continue
            starts[one.number], ends[one.number], places[one.number] = now, now + seconds[one.number], name
            heapq.heappush(running, (ends[one.number], one.number))
        handed_out = waiting
        if not running:
            raise ValueError(f"no machine can ever take {len(ready) + len(handed_out)} of the attempts")
        now = running[0][0]
        while running and running[0][0] <= now:
            _, number = heapq.heappop(running)
            del outstanding[number]
            pool.end(number)
    return Schedule(tuple(starts), tuple(ends), tuple(places))


def _able(demands: Sequence[Demand], machines: Sequence[Machine]) -> list[frozenset[str]]:
    """As placement.able, of each; most are alike."""
    known: dict[int, frozenset[str]] = {}
    return [known.setdefault(id(demand), placement.able(demand, machines)) for demand in demands]


class _Pool:
    """What runs where."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = list(machines)
        self._rooms = [Room([machine]) for machine in machines]
        self._running: list[dict[int, Demand]] = [{} for _ in machines]
        self._places: dict[int, int] = {}

    def begin(self, one: _Attempt) -> str | None:
        for index, room in enumerate(self._rooms):
            if room.take(one.demand) is not None:
                self._running[index][one.number] = one.demand
                self._places[one.number] = index
                return self._machines[index].name
        return None

    def end(self, number: int) -> None:
        index = self._places.pop(number)
        del self._running[index][number]
        self._rooms[index] = Room([self._machines[index]], self._running[index].values())
