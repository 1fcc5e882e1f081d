"""Which machines can take an attempt, and how many at once: the same arithmetic for the dispatcher and for `acclimate plan`.

A machine fits a demand if it could take it with nothing else running there: enough CPUs, GPUs and memory, and every label equal. A
share of a GPU lies on one GPU, so that two shares of 0.6 need two of them; whole GPUs are given whole. `Room` places demands one by
one on the machine where the least is left over, which is an estimate: where a scheduler really puts them is its own choice, and an
attempt too many waits there. A machine that a demand avoids is none that it gets, unless no other of the pool could ever take it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from acclimate_runners.runner import Demand, Machine

HAS = "; the pool has "
_STEPS = 100
"""Steps that a CPU or GPU is counted in, so that tenths add up to a whole."""


@dataclass(frozen=True)
class Outstanding:
    """What was handed out and has not ended.

    Attributes:
        demand: what it takes.
        machine: where it is; empty where that isn't known, or it waits.
    """

    demand: Demand
    machine: str = ""


def fits(demand: Demand, machine: Machine) -> bool:
    """Whether a machine could take it, were it idle."""
    return (
        _steps(demand.cpus) <= _steps(machine.cpus)
        and _steps(demand.gpus) <= int(machine.gpus) * _STEPS
        # Of a machine that doesn't say how much memory it has nothing is asked.
        and (not machine.memory or demand.memory <= machine.memory)
        and all(machine.labels.get(name) == value for name, value in demand.labels.items())
    )


def fitting(demand: Demand, machines: Iterable[Machine]) -> tuple[Machine, ...]:
    """The machines that could take it; where none can, it will never start in this pool."""
    return tuple(machine for machine in machines if fits(demand, machine))


def avoided(demand: Demand, machines: Iterable[Machine]) -> frozenset[str]:
    """The names of machines that a demand stays away from; none where no other can ever take it."""
    if not demand.avoid or not any(m.name not in demand.avoid and fits(demand, m) for m in machines):
        return frozenset()
    return demand.avoid


def able(demand: Demand, machines: Sequence[Machine]) -> frozenset[str]:
    """The names of the machines that may get it: those that it fits, but for those that it avoids."""
    off = avoided(demand, machines)
    return frozenset(machine.name for machine in machines if machine.name not in off and fits(demand, machine))


def at_once(demand: Demand, machines: Iterable[Machine]) -> int:
    """How many attempts of this demand an idle pool takes at the same time."""
    room, count = Room(machines), 0
    while room.take(demand) is not None:
        count += 1
    return count


class Room:
    """What is left of a pool once some demands have been placed.

    Args:
        machines: the pool.
        running: demands of what already runs, wherever it may be; what finds no place is left out.
    """

    def __init__(self, machines: Iterable[Machine], running: Iterable[Demand] = ()) -> None:
        self._machines = tuple(machines)
        self._left = [_Left(machine) for machine in self._machines]
        self._last: tuple[Demand, _Left] | None = None
        # The hardest first, so that what is easy to place does not take the places of what is not.
        for demand in sorted(running, key=lambda d: (len(d.labels), d.gpus, d.memory, d.cpus), reverse=True):
            self.take(demand)

    def take(self, demand: Demand, *, on: str = "") -> str | None:
        """Place a demand, on a machine that is known to have it or on any; the machine's name, or None where nothing has room for it now."""
        if on:
            able = [left for left in self._left if left.machine.name == on and left.has(demand)]
            for left in able[:1]:
                left.give(demand)
            self._last = None
            return on if able else None
        if self._last is not None and self._last[0] == demand and self._last[1].has(demand):
            # Where the least was left over for its like, less is left now: no other machine is better.
            best = self._last[1]
        else:
            off = avoided(demand, self._machines)
            able = [left for left in self._left if left.machine.name not in off and left.has(demand)]
            if not able:
                return None
            best = min(able, key=lambda left: (left.free, left.cpus, left.memory))
        best.give(demand)
        self._last = (demand, best)
        return best.machine.name

    def set_aside(self, demand: Demand) -> str | None:
        """Keep a machine that could take a demand, were it idle, from taking anything more: of several the one with the most left.

        Returns:
            Its name; None where none could, or all that could are set aside.
        """
        names = able(demand, self._machines)
        found = [left for left in self._left if not left.closed and left.machine.name in names]
        if not found:
            return None
        best = max(found, key=lambda left: (left.free, left.cpus, left.memory))
        best.closed = True
        return best.machine.name


class _Left:
    """A machine and what is left of it, in steps and bytes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.cpus = _steps(machine.cpus)
        self.gpus = [_STEPS] * int(machine.gpus)
        self.free = sum(self.gpus)
        self.memory = machine.memory
        self.closed = False

    def has(self, demand: Demand) -> bool:
        gpus = _steps(demand.gpus)
        # What is cheap to see comes first: pools are full most of the time.
        if self.closed or gpus > self.free or _steps(demand.cpus) > self.cpus:
            return False
        return (
            (not self.machine.memory or demand.memory <= self.memory)
            and (gpus == 0 or self._chosen(demand) is not None)
            and fits(demand, self.machine)
        )

    def give(self, demand: Demand) -> None:
        self.cpus -= _steps(demand.cpus)
        if self.machine.memory:
            self.memory -= demand.memory
        share = min(_STEPS, _steps(demand.gpus))
        for index in self._chosen(demand) or ():
            self.gpus[index] -= share
            self.free -= share

    def _chosen(self, demand: Demand) -> Sequence[int] | None:
        """Which of its GPUs a demand would get; None where there aren't enough."""
        asked = _steps(demand.gpus)
        if asked == 0:
            return ()
        if asked < _STEPS:
            enough = [index for index, left in enumerate(self.gpus) if left >= asked]
            return [min(enough, key=lambda index: self.gpus[index])] if enough else None
        whole, count = [index for index, left in enumerate(self.gpus) if left == _STEPS], asked // _STEPS
        return whole[:count] if len(whole) >= count else None


def spoken(demand: Demand) -> str:
    """A demand in words: "1 CPU, 2 GPUs and 4 GiB of memory on a machine with accelerator=H100"."""
    parts = [_counted(demand.cpus, "CPU")]
    parts += [_counted(demand.gpus, "GPU")] if demand.gpus else []
    parts += [f"{size(demand.memory)} of memory"] if demand.memory else []
    words = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    labels = ", ".join(f"{name}={value}" for name, value in sorted(demand.labels.items()))
    return f"{words} on a machine with {labels}" if labels else words


def described(machine: Machine) -> str:
    """A machine in words: "node-1 (8 CPUs, 2 GPUs, 62 GiB, accelerator=H100)"."""
    parts = [_counted(machine.cpus, "CPU")]
    parts += [_counted(machine.gpus, "GPU")] if machine.gpus else []
    parts += [size(machine.memory)] if machine.memory else []
    parts += [f"{name}={value}" for name, value in sorted(machine.labels.items())]
    return f"{machine.name} ({', '.join(parts)})"


def refusal_of(demand: Demand, machines: Sequence[Machine]) -> str:
    """Why no machine of a pool can take a demand, and after HAS what the pool has, by name; empty where one can or the pool is unknown."""
    if not machines or fitting(demand, machines):
        return ""
    shown = [described(machine) for machine in machines[:5]]
    more = f" and {len(machines) - 5} more" if len(machines) > 5 else ""
    return f"no machine has {spoken(demand).replace('on a machine with', 'with')}{HAS}{', '.join(shown)}{more}"


def _steps(count: float) -> int:
    return round(count * _STEPS)


def _counted(count: float, noun: str) -> str:
    return f"{count:g} {noun if count == 1 else noun + 's'}"


def size(count: int) -> str:
    """Bytes in words: "62 GiB"."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count} bytes"
