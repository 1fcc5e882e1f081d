"""Machines come, go, are drained, and fail what they are given: an idle machine that fits, and work that is ready, mean that work starts."""

import random
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import crowds
import pytest
import worlds
from pools import SOUGHT, Placing, of
from sqlalchemy import select
from worlds import Beginning, World

from acclimate import retries, stages
from acclimate.store import stages as rows
from acclimate_competitions.phases import Phase
from acclimate_competitions.records import format_time
from acclimate_runners import placement
from acclimate_runners.jobs import Job
from acclimate_runners.runner import Demand, Machine, Status

IDLE = 2 * SOUGHT
"""Seconds that room may stand idle beside work for it: what waits in vain is given back after SOUGHT, and then may wait a little."""
STEP = 2.0
SIZES = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.0, "e": 4.0}
MAY_FAIL = frozenset({"a", "c", "e"})
"""With more machines that fail what they are given, an attempt may come to the ten tries after which it is an operator's."""
ENTRIES = 36


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    return worlds.begin(tmp_path_factory.mktemp("beginning"), entrants=4)


@dataclass
class Span:
    """What a phase had and did.

    Attributes:
        offered: CPUs that were there, at each step.
        lost: seconds of work that were lost by its end.
    """

    offered: list[float] = field(default_factory=list)
    lost: float = 0.0

    def least(self, work: float) -> float:
        """Seconds in which what was there can do so many seconds of work, were it never idle."""
        for number, cpus in enumerate(self.offered, start=1):
            work -= cpus * STEP
            if work <= 0:
                return number * STEP
        return len(self.offered) * STEP


class Watched:
    """A round on machines that come and go, one step after the other."""

    def __init__(self, beginning: Beginning, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.world = World(beginning, folder, fates=self._fate)
        crowds.fill(self.world, ENTRIES)
        plain, first = self.world.cluster, [Machine(name, cpus=SIZES[name]) for name in ("a", "c")]
        self.cluster = Placing(plain.now, plain.blobs, tuple(first), self._fate, slots=3)
        self.world.cluster = self.cluster
        self.process = self.world.process()
        self.idle = dict.fromkeys(SIZES, 0.0)
        self.takes: dict[str, tuple[Phase, float]] = {}
        self.spans = {phase: Span() for phase in (Phase.OPEN, Phase.CLOSED, Phase.OPENED)}

    def _fate(self, name: str, job: Job) -> tuple[Status | None, float]:
        if of(name) not in self.takes:
            self.takes[of(name)] = self.world.state().phase, self.draw.choice([10.0, 40.0, 90.0])
        return None, self.takes[of(name)][1]

    def happens(self) -> None:
        """A machine goes, comes, is drained, has a flaw or none any more; one is always there."""
        name, there = self.draw.choice(sorted(SIZES)), {machine.name for machine in self.cluster.machines}
        match self.draw.choice(["come or go", "come or be drained", "flaw"]):
            case "flaw":
                self.cluster.flawed ^= {name} & MAY_FAIL
            case _ if name not in there and name not in self.cluster.drained:
                self.cluster.join(Machine(name, cpus=SIZES[name]))
            case "come or go" if len(there) > 1 and name in there:
                self.cluster.leave(name)
            case "come or be drained" if len(there) > 1 and name in there:
                self.cluster.drain(name)

    def step(self) -> None:
        self.process.step()
        self.world.others()
        self.cluster.place()
        phase, ready = self.world.state().phase, self._ready()
        machines = {machine.name: machine for machine in self.cluster.machines}
        for name in SIZES:
            stands = name in machines and any(
                name in able and self.cluster.has_room(machines[name], demand) for demand, able in ready
            )
            self.idle[name] = self.idle[name] + STEP if stands else 0.0
            assert self.idle[name] <= IDLE, (name, ready, self.cluster.off, self.world.told())
        if phase in self.spans:
            self.spans[phase].offered.append(sum(machine.cpus for machine in self.cluster.machines))
            self.spans[phase].lost = self.cluster.lost
        self.world.clock.forward(seconds=STEP)

    def _ready(self) -> list[tuple[Demand, frozenset[str]]]:
        """What could run now, whether it was handed out or not, and the machines that may get it."""
        ready = []
        for name, one in self.cluster.attempts.items():
            if one.ended is None and not one.machine:
                demand = self.cluster.demands[name]
                ready.append((demand, placement.able(demand, self.cluster.machines)))
        with self.world.store.snapshot() as tx:
            now = format_time(tx.now())
            pending = tx.execute(select(rows).where(rows.c.state == "pending")).all()
            for row in pending:
                if (row.not_before or "") <= now:
                    avoid = retries.avoided(stages.failures(tx, row.attempt)) if row.attempt else frozenset()
                    demand = Demand(avoid=avoid)
                    ready.append((demand, placement.able(demand, self.cluster.machines)))
        return ready

    def prompt(self) -> None:
        """No phase took much longer than it must: with what was there, never idle, for its work and what was lost of it."""
        told, before = list[str](), 0.0
        for phase, span in self.spans.items():
            takes = [seconds for begun, seconds in self.takes.values() if begun is phase]
            took = len(span.offered) * STEP
            least = span.least(sum(takes) + span.lost - before)
            # The last that begins may be the longest, and wait a little more for a machine that it may get.
            told.append(f"{phase}: took {took}, least {least}, longest {max(takes)}, lost {span.lost - before}")
            assert took <= 1.10 * least + max(takes) + SOUGHT, told
            before = span.lost


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_machine_stands_idle_whatever_comes_and_goes_and_a_round_takes_as_long_as_it_must(
    beginning: Beginning, tmp_path: Path, seed: int
) -> None:
    watched = Watched(beginning, tmp_path / "run", seed)
    with closing(watched.world) as world:
        for _ in range(2000):
            if world.state().phase is Phase.EVALUATED:
                break
            if watched.draw.random() < 0.04:
                watched.happens()
            watched.step()
        assert world.state().phase is Phase.EVALUATED, world.told()
        world.check()
        watched.prompt()
