"""A real cluster of Ray with imagined GPUs: what it adds to an attempt, and the makespan of forty attempts over what no schedule can go below.

The attempts are tiny preparations of different lengths, handed out as the dispatcher does: longest first, by schedule.admit, five times a
second. What each really took is measured from its child's first word to its end; all else (an actor's start, its imports, the end noticed) is
what the platform adds, and counts against it. The GPUs are imagined, the processors are not: with fewer of them than slots all take longer,
the work and what is added to it.
"""

import importlib.util
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import overhead
import tiny

from acclimate import schedule
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.cluster import RayRunner
from acclimate_runners.jobs import PrepareJob
from acclimate_runners.placement import Outstanding
from acclimate_runners.runner import Demand, Handle

ATTEMPTS, MACHINES, GPUS = 40, 2, 2
EPOCHS = 1_000
"""Of an attempt in the middle; the shortest has a third of it, the longest three times as many. About half a minute: what is added to each
attempt is a few seconds, so that of shorter ones the ratio says nothing about the schedule."""
TRIES = 3
_DEMAND = Demand(cpus=0.1, gpus=1.0)
_LOOK = 0.2


@dataclass
class _Try:
    """One attempt: what it is to do, and when it was handed out, began and ended."""

    attempt: str
    job: PrepareJob
    demand: Demand = _DEMAND
    handle: Handle | None = None
    machine: str = ""
    given: float = 0.0
    begun: float = 0.0
    ended: float = 0.0

    def look(self) -> bool:
        """Whether it has ended."""
        assert self.handle is not None
        status, now = self.handle.poll(), time.monotonic()
        self.machine = status.machine
        if not self.begun and (status.network or status.state != "running"):
            self.begun = now
        if status.state != "running":
            assert status.state == "done", status
            self.ended = now
        return bool(self.ended)


def measure(folder: Path) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    """(name, seconds) of what is added to an attempt, and (name, ratio) of the makespan."""
    # Ray's workers are nice to all else on the machine, so that beside other work nothing would be measured but that.
    settings = {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}
    os.environ.update(settings)
    cluster = _clusters().RayCluster(settings)
    try:
        for _ in range(MACHINES):
            cluster.add(num_cpus=2, num_gpus=GPUS)
        blobs = FolderBlobs(folder / "blobs")
        job = tiny.prepare_job(folder / "job", blobs, wall_seconds=600.0)
        runner = RayRunner(folder / "work", cluster.address)
        try:
            return added(runner, job, blobs, folder), makespan(runner, job, blobs)
        finally:
            runner.close()
    finally:
        cluster.close()


def added(runner: RayRunner, job: PrepareJob, blobs: FolderBlobs, folder: Path) -> list[tuple[str, float]]:
    """The first attempt of a cluster, and the median of the next ones, beside the child alone; they take turns."""
    alone, whole = [], []
    for number in range(TRIES + 1):
        if number:
            alone.append(overhead.bare(job, blobs, folder / f"bare-{number}"))
        one = _Try(f"alone-{number}", job)
        one.given = time.monotonic()
        one.handle = runner.start(f"{one.attempt}/1", job, blobs, demand=_DEMAND)
        while not one.look():
            time.sleep(0.02)
        whole.append(one.ended - one.given)
    child, later = statistics.median(alone), statistics.median(whole[1:])
    return [
        ("an actor's attempt, the first of its machine", whole[0]),
        ("… a later one", later),
        ("… the child alone", child),
        ("overhead of an attempt on Ray", later - child),
    ]


def makespan(runner: RayRunner, job: PrepareJob, blobs: FolderBlobs) -> list[tuple[str, float]]:
    """Makespan over max(total / slots, longest) of what the children took."""
    draw, slots, machines = random.Random(1), MACHINES * GPUS, runner.machines()
    lengths = [min(3.0, max(1 / 3, draw.lognormvariate(0.0, 0.5))) * EPOCHS for _ in range(ATTEMPTS)]
    ready = [
        _Try(f"makespan-{number}", replace(job, recipe=replace(job.recipe, epochs=round(length))))
        for number, length in enumerate(sorted(lengths, reverse=True))
    ]
    every, running, overtaken = list(ready), list[_Try](), dict[str, int]()
    began = time.monotonic()
    while ready or running:
        running = [one for one in running if not one.look()]
        outstanding = [Outstanding(one.demand, one.machine) for one in running]
        given = list(schedule.admit(ready, machines, slots=slots, outstanding=outstanding, overtaken=overtaken))
        for one in given:
            one.given = time.monotonic()
            one.handle = runner.start(f"{one.attempt}/1", one.job, blobs, demand=one.demand)
        ready = [one for one in ready if one not in given]
        running += given
        time.sleep(_LOOK)
    took = [one.ended - one.begun for one in every]
    bound, whole = max(sum(took) / slots, *took), time.monotonic() - began
    name = f"{ATTEMPTS} attempts on {slots} imagined GPUs, children of {statistics.mean(took):.1f} s in the mean"
    added = statistics.mean(one.begun - one.given for one in every)
    return [
        (name, whole / bound),
        ("… makespan in seconds", whole),
        ("… seconds from an attempt's handing out to its child's first word, in the mean", added),
    ]


def _clusters() -> Any:
    """What the tests of clusters start them with."""
    path = Path(__file__).parents[1] / "cluster" / "conftest.py"
    spec = importlib.util.spec_from_file_location("ray_clusters", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        seconds, ratios = measure(Path(temporary))
        for name, value in [*seconds, *ratios]:
            sys.stdout.write(f"{name}: {value:.2f}\n")
