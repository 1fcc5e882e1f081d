"""Machines come, go, and fail what they are given: an idle machine that fits, and work that is ready, mean that work starts."""

import random
from contextlib import closing
from pathlib import Path

import pytest
import worlds
from pools import Placing
from sqlalchemy import select
from worlds import Beginning, World

from acclimate import retries, stages
from acclimate.store import format_time
from acclimate.store import stages as rows
from acclimate_competitions.phases import Phase
from acclimate_runners import placement
from acclimate_runners.jobs import Job
from acclimate_runners.runner import Demand, Machine, Status

IDLE = 150.0
"""Seconds that a machine may stand idle beside work for it: one that waits in vain is given back after a minute, and then waits a little."""
STEP = 5.0
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def beginning(tmp_path_factory: pytest.TempPathFactory) -> Beginning:
    return worlds.begin(tmp_path_factory.mktemp("beginning"), entrants=4)


class Watched:
    """A round on machines that come and go, one step after the other."""

    def __init__(self, beginning: Beginning, folder: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.world = World(beginning, folder, fates=self._fate)
        made, plain = [Machine(name, cpus=1.0) for name in NAMES], self.world.cluster
        self.cluster = Placing(plain.now, plain.blobs, tuple(made), self._fate)
        self.world.cluster = self.cluster
        self.process = self.world.process()
        self.idle = dict.fromkeys(NAMES, 0.0)

    def _fate(self, name: str, job: Job) -> tuple[Status | None, float]:
        return None, self.draw.choice([10.0, 100.0, 1500.0])

    def happens(self) -> None:
        """A machine goes, comes, has a flaw or none any more; one is always there."""
        name, there = self.draw.choice(NAMES), {machine.name for machine in self.cluster.machines}
        match self.draw.choice(["come or go", "flaw"]):
            case "flaw":
                self.cluster.flawed ^= {name}
            case _ if name not in there:
                self.cluster.join(Machine(name, cpus=1.0))
            case _ if len(there) > 1:
                self.cluster.leave(name)

    def step(self) -> None:
        self.process.step()
        self.world.others()
        self.cluster.place()
        ready = self._ready()
        there = {machine.name for machine in self.cluster.machines}
        for name in NAMES:
            stands = name in there and not self.cluster.on(name) and any(name in able for able in ready.values())
            self.idle[name] = self.idle[name] + STEP if stands else 0.0
            assert self.idle[name] <= IDLE, (name, ready, self.cluster.off, self.world.told())
        self.world.clock.forward(seconds=STEP)

    def _ready(self) -> dict[str, frozenset[str]]:
        """What could run now, whether it was handed out or not -> the machines that may get it."""
        ready = {}
        for name, one in self.cluster.attempts.items():
            if one.ended is None and not one.machine:
                ready[name] = placement.able(self.cluster.demands[name], self.cluster.machines)
        with self.world.store.snapshot() as tx:
            now = format_time(tx.now())
            for row in tx.execute(select(rows).where(rows.c.state == "pending")).all():
                if (row.not_before or "") <= now:
                    avoid = retries.avoided(stages.failures(tx, row.attempt)) if row.attempt else frozenset()
                    ready[row.key] = placement.able(Demand(avoid=avoid), self.cluster.machines)
        return ready


def runs(beginning: Beginning, folder: Path, *, seed: int, steps: int) -> Placing:
    watched = Watched(beginning, folder, seed)
    with closing(watched.world) as world:
        for _ in range(steps):
            if watched.draw.random() < 0.04:
                watched.happens()
            watched.step()
        # Then nothing happens any more, and the round comes to its end.
        watched.cluster.flawed.clear()
        for _ in range(1500):
            if world.state().phase is Phase.EVALUATED:
                break
            watched.step()
        assert world.state().phase is Phase.EVALUATED, world.told()
        world.check()
    return watched.cluster


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_machine_stands_idle_whatever_comes_and_goes(beginning: Beginning, tmp_path: Path) -> None:
    made = [runs(beginning, tmp_path / str(seed), seed=seed, steps=200) for seed in range(4)]
    # Some did wait in vain, and none for good.
    assert sum(one.in_vain for one in made) > 0
