"""Runs jobs on this machine: one supervising thread and one child process a job."""

import time
from pathlib import Path

from acclimate_runners.allotment import allotted
from acclimate_runners.attempts import Attempt
from acclimate_runners.jobs import Job
from acclimate_runners.nursery import Nursery
from acclimate_runners.runner import Absent, BlobAccess, Demand, Handle, Machine
from acclimate_runners.watch import Patience, Watched, watched

_PATIENCE = Patience()
_NAME = "localhost"
_ONE_CPU = Demand()
_NURSERY = Nursery()
"""Of this process: runners that come after one another use the same imports."""


class LocalRunner:
    """A runner of this machine.

    Args:
        workdir: folder for the attempts.
        slots: how many jobs at once.
        patience: how long it waits.
        devices: GPUs that a job for GPUs may use, as CUDA_VISIBLE_DEVICES names them; jobs that share them are not shielded from each other.
    """

    def __init__(self, workdir: Path, slots: int, *, patience: Patience = _PATIENCE, devices: str = "") -> None:
        self.slots, self._devices = slots, devices
        self._workdir, self._patience = workdir.resolve(), patience
        self._attempts: dict[str, Watched] = {}

    def machines(self) -> tuple[Machine, ...]:
        """This machine, with all of its memory that this process may use; its GPUs are not offered."""
        found = allotted()
        # A job may need more than one CPU however few run at once.
        return (Machine(_NAME, float(max(self.slots, found.cpus)), memory=found.memory),)

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand = _ONE_CPU) -> Watched:
        """Start an attempt, or adopt what an earlier process finished; returns at once."""
        running = self._attempts.get(name)
        if running is not None and running.poll().state == "running":
            return running
        devices = self._devices if job.device != "cpu" else ""
        attempt = watched(
            lambda counted: Attempt(name, job, counted, work=self._workdir, nursery=_NURSERY, devices=devices),
            blobs,
            machine=_NAME,
            patience=self._patience,
        )
        self._attempts = {n: a for n, a in self._attempts.items() if a.poll().state == "running"} | {name: attempt}
        attempt.start()
        return attempt

    def find(self, name: str, job: Job, blobs: BlobAccess) -> Handle:
        """The attempt of this name, if this runner has it: nothing outlives the process that started it."""
        return self._attempts.get(name) or Absent()

    def close(self, *, keep: bool = False) -> None:
        """Kill what still runs, and wait until it is gone; nothing of it outlives this process, whatever `keep` says."""
        for attempt in self._attempts.values():
            attempt.cancel()
        until = time.monotonic() + self._patience.end
        for attempt in self._attempts.values():
            attempt.join(max(0.0, until - time.monotonic()))
