"""Runs jobs on this machine: one supervising thread and one child process a job."""

import os
import time
from pathlib import Path

from acclimate_runners.attempts import Attempt
from acclimate_runners.jobs import Job
from acclimate_runners.nursery import Nursery
from acclimate_runners.runner import Absent, BlobAccess, Demand, Handle, Machine

_PATIENCE = 10.0
_ONE_CPU = Demand()
_NURSERY = Nursery()
"""Of this process: runners that come after one another use the same imports."""


class LocalRunner:
    """A runner of this machine.

    Args:
        workdir: folder for the attempts.
        slots: how many jobs at once.
    """

    def __init__(self, workdir: Path, slots: int) -> None:
        self.slots = slots
        self._workdir = workdir.resolve()
        self._attempts: dict[str, Attempt] = {}

    def machines(self) -> tuple[Machine, ...]:
        """This machine; its GPUs are not offered, nor is its memory set aside."""
        # A job may need more than one CPU however few run at once.
        return (Machine("localhost", float(max(self.slots, os.cpu_count() or 1))),)

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand = _ONE_CPU) -> Attempt:
        """Start an attempt, or adopt what an earlier process finished; returns at once."""
        running = self._attempts.get(name)
        if running is not None and running.poll().state == "running":
            return running
        attempt = Attempt(name, job, blobs, work=self._workdir, nursery=_NURSERY)
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
        until = time.monotonic() + _PATIENCE
        for attempt in self._attempts.values():
            attempt.join(max(0.0, until - time.monotonic()))
