"""A cluster that places attempts as Ray does, on machines that come, go, and are drained: each takes what it has room for, the rest waits.

What an attempt is told to keep off when it is handed out is fixed for its life. As the driver of a cluster does, this one gives back an
attempt that waits where it is to keep off a machine that may take it by now. A try goes on from the last checkpoint of the one before.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field

from worlds import Attempt, Cluster

from acclimate_runners import placement
from acclimate_runners.jobs import Job
from acclimate_runners.runner import Demand, Machine, Status

SOUGHT = 60.0
"""Seconds after which a driver looks whether an attempt waits in vain."""
CHECKPOINT = 30.0
"""Seconds between two checkpoints of an attempt."""
LEAVES = 4.0
"""Seconds in which an attempt that is told to leave its machine has written a checkpoint."""
FLAWS = 2
"""So often an attempt fails on a machine with a flaw; then it does not, as of a flaw that passes."""


@dataclass
class Placing(Cluster):
    """A cluster with a pool that changes.

    Attributes:
        flawed: names of machines on which attempts fail, each FLAWS times.
        drained: machines that take nothing more, until what runs there has left.
        demands, off: of each attempt, and the machines that it is to keep off for its life.
        kept: attempt -> seconds of its work that a checkpoint has.
        lost: attempt -> seconds of work that machines did in vain for it.
    """

    flawed: set[str] = field(default_factory=set)
    drained: dict[str, Machine] = field(default_factory=dict)
    demands: dict[str, Demand] = field(default_factory=dict)
    off: dict[str, frozenset[str]] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    failed: dict[tuple[str, str], int] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def start(self, name: str, job: Job, demand: Demand) -> None:
        if name not in self.attempts:
            fate, seconds = self.fates(name, job)
            self.started.append(name)
            self.asked.append(demand)
            left = seconds - self.kept.get(of(name), 0.0)
            self.attempts[name] = Attempt(name, job, math.inf, left, "", fate)
            self.demands[name], self.since[name] = demand, self.now()
            self.off[name] = placement.avoided(demand, self.machines)
        self.place()

    def poll(self, name: str) -> Status:
        self.place()
        one = self.attempts.get(name)
        if one is None or one.machine or one.ended is not None:
            return super().poll(name)
        kept = self.off[name] - placement.avoided(self.demands[name], self.machines)
        if self.now() - self.since[name] > SOUGHT and any(machine.name in kept for machine in self.machines):
            one.ended = Status("failed", reason="it waited in vain", code="preempted")
        return one.ended or Status("running", what="waiting for a machine")

    def place(self) -> None:
        """Give what waits the first machine that has room for it; what runs out its time makes room."""
        for one in self.attempts.values():
            if one.ended is None and one.machine and self.now() >= one.began + one.seconds:
                super().poll(one.name)
        for name in [name for name in self.drained if not self.on(name)]:
            del self.drained[name]
        for name, one in self.attempts.items():
            if one.ended is None and not one.machine:
                free = (
                    m for m in self.machines if m.name not in self.off[name] and self.has_room(m, self.demands[name])
                )
                machine = next(free, None)
                if machine is not None:
                    self._begin(one, machine)

    def on(self, machine: str) -> list[Attempt]:
        """What runs there now."""
        return [one for one in self.attempts.values() if one.machine == machine and one.ended is None]

    def has_room(self, machine: Machine, demand: Demand) -> bool:
        taken = sum(self.demands[one.name].cpus for one in self.on(machine.name))
        return placement.fits(demand, machine) and taken + demand.cpus <= machine.cpus

    def leave(self, name: str) -> None:
        """A machine is lost, and what runs there with it, but for its checkpoints."""
        for one in self.on(name):
            done = self.now() - one.began
            self._keep(one, done - done % CHECKPOINT)
            self.lost[of(one.name)] += done % CHECKPOINT
            one.ended = Status("failed", reason="its actor is gone", code="runner_failed", machine=name)
        self._without(name)

    def drain(self, name: str) -> None:
        """A machine will go: what runs there writes a checkpoint and leaves."""
        (self.drained[name],) = [machine for machine in self.machines if machine.name == name]
        self._without(name)
        for one in self.on(name):
            self._keep(one, self.now() - one.began)
            self.lost[of(one.name)] += LEAVES
            one.began, one.seconds = self.now(), LEAVES
            one.fate = Status("failed", reason="its machine is to be drained", code="preempted", machine=name)

    def join(self, machine: Machine) -> None:
        """A machine comes."""
        self._have(*self.machines, machine)

    def _without(self, name: str) -> None:
        self._have(*(machine for machine in self.machines if machine.name != name))

    def _have(self, *machines: Machine) -> None:
        self.machines, self.slots = machines, max(1, int(sum(machine.cpus for machine in machines)))

    def _begin(self, one: Attempt, machine: Machine) -> None:
        one.machine, one.began = machine.name, self.now()
        key = (of(one.name), machine.name)
        if machine.name in self.flawed and self.failed.get(key, 0) < FLAWS:
            self.failed[key] = self.failed.get(key, 0) + 1
            self.lost[of(one.name)] += 1.0
            one.seconds = 1.0
            one.fate = Status("failed", reason="the machine has a flaw", code="runner_failed", machine=machine.name)

    def _keep(self, one: Attempt, seconds: float) -> None:
        if one.fate is None:
            self.kept[of(one.name)] = self.kept.get(of(one.name), 0.0) + seconds


def of(name: str) -> str:
    """The attempt that a name is a try of."""
    return name.partition("/")[0]
