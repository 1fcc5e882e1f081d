"""A cluster that places attempts as Ray does, on machines that come and go: each takes what it has room for, and the rest waits.

What an attempt is told to keep off when it is handed out is fixed for its life. As the driver of a cluster does, this one gives back an attempt
that waits where it is to keep off a machine that may take it by now.
"""

import math
from dataclasses import dataclass, field

from worlds import Attempt, Cluster

from acclimate_runners import placement
from acclimate_runners.jobs import Job
from acclimate_runners.runner import Demand, Machine, Status

SOUGHT = 60.0
"""Seconds after which a driver looks whether an attempt waits in vain."""
FLAWS = 2
"""So often an attempt fails on a machine with a flaw; then it does not, as of a flaw that passes."""


@dataclass
class Placing(Cluster):
    """A cluster with a pool that changes.

    Attributes:
        flawed: names of machines on which attempts fail, each FLAWS times.
        demands, off: of each attempt, and the machines that it is to keep off for its life.
        in_vain: how many were given back, as they waited in vain.
    """

    flawed: set[str] = field(default_factory=set)
    demands: dict[str, Demand] = field(default_factory=dict)
    off: dict[str, frozenset[str]] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    failed: dict[tuple[str, str], int] = field(default_factory=dict)
    in_vain: int = 0

    def start(self, name: str, job: Job, demand: Demand) -> None:
        if name not in self.attempts:
            fate, seconds = self.fates(name, job)
            self.started.append(name)
            self.asked.append(demand)
            self.attempts[name] = Attempt(name, job, math.inf, seconds, "", fate)
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
            self.in_vain += 1
            one.ended = Status("failed", reason="it waited in vain", code="preempted")
        return one.ended or Status("running", what="waiting for a machine")

    def place(self) -> None:
        """Give what waits the first machine that has room for it; what runs out its time makes room."""
        for one in self.attempts.values():
            if one.ended is None and one.machine and self.now() >= one.began + one.seconds:
                super().poll(one.name)
        for name, one in self.attempts.items():
            if one.ended is None and not one.machine:
                able = (
                    m for m in self.machines if m.name not in self.off[name] and self._has_room(m, self.demands[name])
                )
                machine = next(able, None)
                if machine is not None:
                    self._begin(one, machine)

    def _begin(self, one: Attempt, machine: Machine) -> None:
        one.machine, one.began = machine.name, self.now()
        key = (one.name.partition("/")[0], machine.name)
        if machine.name in self.flawed and self.failed.get(key, 0) < FLAWS:
            self.failed[key] = self.failed.get(key, 0) + 1
            one.seconds = 1.0
            one.fate = Status("failed", reason="the machine has a flaw", code="runner_failed", machine=machine.name)

    def on(self, machine: str) -> list[Attempt]:
        """What runs there now."""
        return [one for one in self.attempts.values() if one.machine == machine and one.ended is None]

    def _has_room(self, machine: Machine, demand: Demand) -> bool:
        taken = sum(self.demands[one.name].cpus for one in self.on(machine.name))
        return placement.fits(demand, machine) and taken + demand.cpus <= machine.cpus

    def leave(self, name: str) -> None:
        """A machine goes, and what runs there with it."""
        for one in self.on(name):
            one.ended = Status("failed", reason="its actor is gone", code="runner_failed", machine=name)
        self.machines = tuple(machine for machine in self.machines if machine.name != name)

    def join(self, machine: Machine) -> None:
        """A machine comes."""
        self.machines = (*self.machines, machine)
