"""Machines come, go, are drained, and fail what they are given: an idle machine that fits, and work that is ready, mean that work starts."""

import random
from collections import Counter
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
LEFT = ("pending", "starting", "running", "verifying")


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    return worlds.begin(tmp_path_factory.mktemp("beginning"), entrants=4)


@dataclass
class Course:
    """What became of a stage, step by step, until its result was there.

    Attributes:
        open: CPUs of the machines that it might get, at each step in which it could have begun and had not.
        steps: in which its phase had come and its result was not there.
    """

    attempt: str = ""
    open: list[float] = field(default_factory=list)
    steps: int = 0

    def least(self, work: float) -> float:
        """Seconds after which it must have begun, if the machines that it might get did so many seconds of work before it, and were never idle."""
        for number, cpus in enumerate(self.open, start=1):
            work -= cpus * STEP
            if work <= 0:
                return number * STEP
        return len(self.open) * STEP


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
        self.courses: dict[Phase, dict[str, Course]] = {phase: {} for phase in (Phase.OPEN, Phase.CLOSED, Phase.OPENED)}

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
        ready = self._ready()
        machines = {machine.name: machine for machine in self.cluster.machines}
        for name in SIZES:
            stands = name in machines and any(
                name in able and self.cluster.has_room(machines[name], demand) for demand, able in ready.values()
            )
            self.idle[name] = self.idle[name] + STEP if stands else 0.0
            assert self.idle[name] <= IDLE, (name, ready, self.cluster.off, self.world.told())
        for key, (_, able) in ready.items():
            self._course(key).open.append(sum(machines[name].cpus for name in able))
        self.world.clock.forward(seconds=STEP)

    def _ready(self) -> dict[str, tuple[Demand, frozenset[str]]]:
        """What could run now, whether it was handed out or not, by its stage, and the machines that may get it."""
        ready: dict[str, tuple[Demand, frozenset[str]]] = {}
        demands: dict[str | None, Demand] = {None: Demand()}
        with self.world.store.snapshot() as tx:
            now = format_time(tx.now())
            for row in tx.execute(select(rows).where(rows.c.state.in_(LEFT))):
                course = self._course(row.key)
                course.attempt, course.steps = row.attempt or "", course.steps + 1
                if row.state == "pending" and (row.not_before or "") <= now:
                    if row.attempt not in demands:
                        avoid = retries.avoided(stages.failures(tx, row.attempt))
                        demands[row.attempt] = Demand(avoid=avoid)
                    demand = demands[row.attempt]
                elif (one := self.cluster.attempts.get(f"{row.attempt}/{row.fence}")) and not (
                    one.ended or one.machine
                ):
                    demand = self.cluster.demands[one.name]
                else:
                    continue
                ready[row.key] = demand, placement.able(demand, self.cluster.machines)
        return ready

    def _course(self, key: str) -> Course:
        return self.courses[self.world.state().phase].setdefault(key, Course())

    def prompt(self) -> None:
        """Each stage came to its end as soon as it could.

        As long as it could begin and did not, the machines that it might get were never idle, so they did other work of its phase: no more
        than there was of it, with what was lost, and two steps for each try, in which its end is seen and the next begins. But for
        that it waited no longer than the rule has it after so many tries that failed, ran, and did again what was lost of it. A machine
        on which it had failed twice does not count, however long it stood idle beside it.
        """
        tries = Counter(of(name) for name in self.cluster.started)
        for phase, courses in self.courses.items():
            takes = {attempt: seconds for attempt, (begun, seconds) in self.takes.items() if begun is phase}
            needs = {each: takes[each] + self.cluster.lost[each] + 2 * STEP * tries[each] for each in takes}
            for key, course in courses.items():
                assert course.attempt in needs, (phase, key)
                waits = sum(
                    retries.pause(k, draw=lambda low, high: (low + high) / 2) for k in range(1, tries[course.attempt])
                )
                least = course.least(sum(needs.values()))
                bound = least + needs[course.attempt] + waits + SOUGHT
                assert course.steps * STEP <= bound, (phase, key, course, least, needs, waits)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
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
