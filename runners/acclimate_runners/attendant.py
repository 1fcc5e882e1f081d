"""The actor of an attempt: it holds the attempt and its child on the machine that Ray chose, and knows when to leave.

It leaves its place where nobody needs it there: the attempt has ended and nobody asks how; no dispatcher has asked for five minutes (its
machine is gone, and no other took over); the cluster's head is gone, and with it soon this machine's part of the cluster; or the machine
is to be drained. An attempt under way is asked for a checkpoint first, so that its next try goes on from there, and ends `preempted`.

It answers in any case: what a disk or a mount that is dead would keep waiting for ever is asked in the attempt's own thread.
"""

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from acclimate_runners import fitness, isolation
from acclimate_runners.attempts import Attempt
from acclimate_runners.jobs import Job
from acclimate_runners.nursery import Nursery
from acclimate_runners.runner import BlobAccess, Status
from acclimate_runners.watch import Patience, watched

_LINGER = 120.0
"""Seconds that a machine's fork-server outlives its last attempt; the next one may come after a pause, and its imports cost 3.5 s."""
_UNCLAIMED = 3600.0
"""Seconds after its end for which an attempt's actor holds its place while nobody asks for it."""
_LOOK_EVERY = 10.0
_MISSED = 2
"""Looks in a row that find no head."""
_LOOKS = 120.0
"""Seconds that a look at the machine's folder may take."""


@dataclass(frozen=True)
class Post:
    """What an attendant is told of where it stands.

    Attributes:
        workdir: folder for the attempts.
        code: digest of the code that the attempt's results are to come from.
        here: says what the runner calls this machine.
        reached: whether the cluster's head answers.
        patience: how long it waits.
    """

    workdir: Path
    code: str
    here: Callable[[], str]
    reached: Callable[[], bool]
    patience: Patience


class Attendant:
    """One attempt and its child.

    Args:
        name, job, blobs: of the attempt.
        post: where it stands.
        gpus: whether the child is given the GPUs that Ray chose.
    """

    def __init__(self, name: str, job: Job, blobs: BlobAccess, post: Post, *, gpus: bool) -> None:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus else ""
        # An actor lives for one attempt, so the actors of a machine share their imports.
        self._nursery = nursery = Nursery(shared=post.workdir, linger=_LINGER)
        # While the inputs are fetched.
        self._environment = None if gpus else isolation.environment(post.workdir, threads=job.recipe.threads)
        self._post, self._machine = post, post.here()
        self._watched = watched(
            lambda counted: Attempt(name, job, counted, work=post.workdir, nursery=nursery, devices=devices),
            blobs,
            machine=self._machine,
            patience=post.patience,
        )
        self._asked = self._looking = time.monotonic()
        self._leaving, self._given_up = "", False
        self._lock = threading.RLock()
        # What it came to without having begun.
        self._refused: Status | None = None
        self._begun = self._over = self._folderless = False
        threading.Thread(target=self._carry_out, name="carry out", daemon=True).start()
        threading.Thread(target=self._keep, name="keep", daemon=True).start()

    def poll(self) -> Status:
        """Where the attempt stands."""
        self._asked = time.monotonic()
        return self._status()

    def stop(self) -> bool:
        """Kill the child; says whether it is gone."""
        self._watched.cancel()
        with self._lock:
            if not self._begun:
                self._refuse("it was stopped before it began", code="cancelled")
                return True
        return self._watched.join(self._post.patience.end)

    def preempt(self, reason: str) -> None:
        """Have the attempt write a checkpoint, and end it as preempted; returns at once."""
        threading.Thread(target=self._preempt, args=(reason,), name="preempt", daemon=True).start()

    def _carry_out(self) -> None:
        """The attempt, if this machine can take it, and what its folder looks like afterwards."""
        try:
            if self._environment is not None:
                self._nursery.begin(self._environment)
            unfit = fitness.unfit(self._post.workdir, self._post.code, machine=self._machine)
        except Exception as error:
            self._refuse(f"{type(error).__name__}: {error}", code="runner_failed")
            return
        with self._lock:
            self._refused = self._refused or unfit
            if self._refused is not None:
                return
            # The attempt's thread lives as long as its child, whatever Ray does with its own threads.
            self._watched.start()
            self._begun, self._looking = True, math.inf
        self._watched.join(threading.TIMEOUT_MAX)
        self._looking = time.monotonic()
        if self._watched.poll().code == "runner_failed":
            self._folderless = bool(fitness.without_folder(self._post.workdir))
        self._over = True

    def _refuse(self, reason: str, *, code: str, unfit: str = "") -> None:
        with self._lock:
            refused = Status("failed", reason=reason, code=code, unfit=unfit, machine=self._machine)
            self._refused = self._refused or refused

    def _looked_in_vain(self) -> float:
        """Seconds that a look at the folder has taken so far, where that is too long; else 0."""
        taken = time.monotonic() - self._looking
        return taken if taken > min(_LOOKS, self._post.patience.hang) else 0.0

    def _status(self) -> Status:
        with self._lock:
            if not self._begun and (taken := self._looked_in_vain()):
                reason = (
                    f"the machine {os.uname().nodename} has looked at its folder {self._post.workdir} for {taken:.0f} s"
                )
                self._refuse(f"{reason}: its disk or mount is dead", code="runner_failed", unfit=self._machine)
        if self._refused is not None:
            return self._refused
        status = self._watched.poll()
        if status.state == "running" and self._given_up:
            status = replace(status, state="failed", code="cancelled")
        if status.state != "failed":
            return status
        if self._leaving and status.code == "cancelled":
            return replace(status, code="preempted", reason=self._leaving)
        full = status.code == "no_space" and not self._watched.transfers.store_full
        if status.code == "runner_failed" and not self._over and not self._looked_in_vain():
            # Whether it is the machine's fault is told with it.
            return replace(status, state="running", reason="", code="", log="")
        if full or (status.code == "runner_failed" and (self._folderless or not self._over)):
            return replace(status, unfit=self._machine)
        return status

    def _preempt(self, reason: str) -> None:
        with self._lock:
            if self._leaving or self._status().state != "running":
                return
            self._leaving = reason
            if not self._begun:
                self._refuse(reason, code="preempted")
                return
        self._watched.attempt.checkpoint(within=self._post.patience.checkpoint)
        # What waits for a store can't be ended, but with this process it does.
        self._given_up = not self.stop()

    def _linger(self) -> float:
        """Seconds for which it stays while nobody asks, once nothing goes on."""
        if self._leaving:
            return min(self._post.patience.unasked, 60.0)
        return _UNCLAIMED if self._refused is None else self._post.patience.unasked

    def _keep(self) -> None:
        """Look after the attempt also while nobody asks, and leave when it is time."""
        patience, missed = self._post.patience, 0
        while True:
            running, unasked = self._status().state == "running", time.monotonic() - self._asked
            if running:
                missed = 0 if self._post.reached() else missed + 1
                if missed >= _MISSED:
                    self._preempt("the head of its Ray cluster is gone")
                elif unasked > patience.unasked:
                    self._preempt(f"no dispatcher has asked after it for {unasked:.0f} s")
            elif unasked > self._linger():
                os._exit(0)
            time.sleep(min(_LOOK_EVERY, patience.unasked / 4))
