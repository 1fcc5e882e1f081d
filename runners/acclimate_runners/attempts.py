"""One attempt at a job, the same on this machine and in a Ray actor: inputs out of the blobs, a child, outputs into the blobs.

Folder of an attempt: WORK/attempts/<id>/<try>/{job.json, inputs/<hex>, resume/…, checkpoint/…, out/…, child.log}. An outcome that any try
has left with the blobs is taken as it is (attempt_notes.py); so is one of this machine whose files did not get there yet. So a crash between a
manifest and its commit costs nothing. A crash before it costs a preparation what it did since its last checkpoint.
"""

import contextlib
import errno
import logging
import re
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from acclimate_competitions.errors import Refusal
from acclimate_runners import checkpoints, failpoints, isolation, jobs
from acclimate_runners.attempt_notes import AttemptNotes
from acclimate_runners.isolation import Ended
from acclimate_runners.jobs import Job, Outcome, PrepareJob
from acclimate_runners.nursery import Nursery
from acclimate_runners.runner import BlobAccess, Status

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOOK = 0.1
_ANEW = frozenset({"limit_exceeded", "out_of_memory", "machine_memory", "job_failed"})
"""Ends after which the next try begins anew: all that a result took has one limit of time, one micro-batch makes all of it, and what our code
got wrong may lie in the checkpoint."""
_log = logging.getLogger(__name__)


class Attempt:
    """An attempt under way in a thread of its own, which lives as long as its child (see isolation.spawn).

    Args:
        name: the attempt's id, and after a slash the fence of this try.
        job: what to do.
        blobs: where inputs come from and outputs go.
        work: folder for all attempts of this machine.
        nursery: where its child is forked.
        devices: GPUs that the child may use.
    """

    def __init__(
        self, name: str, job: Job, blobs: BlobAccess, *, work: Path, nursery: Nursery, devices: str = ""
    ) -> None:
        self.name, self._job, self._blobs, self._devices = name, job, blobs, devices
        self._nursery, self._notes = nursery, AttemptNotes(name, job, blobs)
        # Of all its tries: what an earlier one has finished is adopted, whatever its fence.
        self._folder = work / "attempts" / re.sub(r"[^A-Za-z0-9._-]", "-", name.rpartition("/")[0] or name)
        self._stop = threading.Event()
        self._child: isolation.Child | None = None
        self._ended: Status | None = None
        self._keeping: _Keeping | None = None
        self._thread = threading.Thread(target=self._run, name=f"attempt {name[:16]}", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def poll(self) -> Status:
        """Where it stands."""
        ended, child = self._ended, self._child
        if ended is not None:
            return ended
        if child is None:
            return Status("running", what="fetching inputs")
        word = child.progress
        network = child.isolation.network if child.isolation is not None else ""
        return Status("running", word.step, word.total, word.what, network=network, words=child.words)

    def cancel(self) -> None:
        """Kill its child; poll() says failed soon after, unless it was done before."""
        self._stop.set()

    def checkpoint(self, *, within: float = 30.0) -> bool:
        """Have the child write where it stands, and wait until that is with the blobs, or until there is nothing left to lose.

        Returns:
            Whether all that was done when this was called is kept. Never of a job that has no checkpoints and goes on.
        """
        until = time.monotonic() + within
        keeping = self._keeping
        if keeping is not None and self._ended is None:
            keeping.ask(until)
            if keeping.kept:
                return True
        return self._ended is not None and self._ended.state == "done"

    def join(self, timeout: float) -> bool:
        """Wait until it has ended and no process of it is left; says whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._ended = self._found() or self._adopted() or self._carried_out()
        except Refusal as refusal:
            self._ended = Status("failed", reason=refusal.sentence, code=refusal.code)
        except Exception as error:
            # Whatever else goes wrong here is ours, and the dispatcher must hear of it rather than wait.
            full = isinstance(error, OSError) and error.errno in _FULL
            code = "no_space" if full else "runner_failed"
            self._ended = Status("failed", reason=f"{type(error).__name__}: {error}", code=code)

    def _tries(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted((p for p in self._folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))

    def _found(self) -> Status | None:
        found = self._notes.outcome()
        return None if found is None else self._said(Status("done", outcome=found[0], log=found[1]))

    def _adopted(self) -> Status | None:
        for folder in reversed(self._tries()):
            try:
                outcome = jobs.read_outcome(folder)
                if outcome is not None and (folder / "job.json").read_text("utf-8") == jobs.to_json(self._job):
                    return self._stored(folder, outcome)
            except (ValueError, TypeError, OSError):
                continue
            except Refusal as refusal:
                if refusal.code == "no_space":
                    raise
        return None

    def _carried_out(self) -> Status:
        before = self._tries()
        for folder in before:
            # A killed process tidied nothing. With a manifest its files may not be in the blobs yet; without one they are half of something.
            if not (folder / "out" / "manifest.json").exists():
                _tidy(folder)
            for name in ("inputs", checkpoints.RESUME, checkpoints.WRITTEN):
                shutil.rmtree(folder / name, ignore_errors=True)
        folder = self._folder / str(int(before[-1].name) + 1 if before else 1)
        for name in ("inputs", "out"):
            (folder / name).mkdir(parents=True)
        try:
            (folder / "job.json").write_text(jobs.to_json(self._job), "utf-8")
            for digest in sorted(jobs.inputs(self._job)):
                self._blobs.get(digest, folder / "inputs" / digest[7:])
                if self._stop.is_set():
                    return Status("failed", reason="cancelled", code="cancelled")
            ended = self._supervised(folder)
            outcome = jobs.read_outcome(folder)
            if outcome is None:
                return self._failed(folder, ended)
            failpoints.reach("ended")
            return self._stored(folder, outcome)
        finally:
            # With a manifest the outputs stay until they are in the blobs: see _stored.
            if not (folder / "out" / "manifest.json").exists():
                _tidy(folder)

    def _supervised(self, folder: Path) -> Ended:
        limits, threads = self._job.limits, self._job.recipe.threads
        fork = partial(self._nursery.start, stop=self._stop)
        if not isinstance(self._job, PrepareJob):
            self._child = isolation.spawn(folder, limits=limits, threads=threads, devices=self._devices, fork=fork)
            return self._child.supervise(self._stop)
        begun = self._notes.resume(folder)
        if begun is not None:
            _log.info("%s goes on from step %d of %d", self.name, begun.step, begun.total)
            limits = replace(limits, wall_seconds=limits.wall_seconds - begun.seconds)
        self._child = isolation.spawn(folder, limits=limits, threads=threads, devices=self._devices, fork=fork)
        self._keeping = _Keeping(folder, self._notes)
        self._keeping.start()
        try:
            ended = self._child.supervise(self._stop)
        finally:
            self._keeping.end()
        if ended.code in _ANEW:
            self._notes.drop_checkpoints()
            # Of what was left of it here, nobody needs to hear.
            left, allowed = (f"{each.wall_seconds:.0f} s allowed" for each in (limits, self._job.limits))
            ended = replace(ended, reason=ended.reason.replace(left, allowed))
        elif ended.code not in ("", "cancelled"):
            self._keeping.take()
        return ended

    def _failed(self, folder: Path, ended: Ended) -> Status:
        reason, code = ended.reason or "ended without a manifest", ended.code or "job_failed"
        status = Status("failed", reason=reason, code=code)
        # What can't be kept now is not worth failing for otherwise.
        with contextlib.suppress(Refusal):
            status = replace(status, log=self._blobs.put(folder / "child.log"))
            if (folder / "child.log").stat().st_size:
                self._notes.write_said(status.log)
        return self._said(status)

    def _stored(self, folder: Path, outcome: Outcome) -> Status:
        """Done, with all files of the outcome in the blobs; the last of them is the child's log."""
        for name, digest in sorted(outcome.files.items()):
            path = folder / "out" / name
            if not path.resolve().is_relative_to((folder / "out").resolve()):
                raise Refusal("job_failed", f"the manifest names {name!r}, which is not below out/")
            found = self._blobs.put(path) if path.is_file() else digest if self._blobs.has(digest) else "nothing"
            if found != digest:
                raise Refusal("job_failed", f"the manifest says {digest} of {name!r}, the file is {found}")
        log = self._blobs.put(folder / "child.log")
        failpoints.reach("stored")
        self._notes.write_outcome(folder, outcome, log)
        failpoints.reach("noted")
        _tidy(folder)
        return self._said(Status("done", outcome=outcome, log=log))

    def _said(self, status: Status) -> Status:
        if status.outcome is not None:
            # Its own word, which stays with it: nobody may have heard the child's, and of a preparation it is of all its tries.
            status = replace(status, network=status.outcome.network)
        child = self._child
        if child is None:
            return status
        word = child.progress
        network = status.network or (child.isolation.network if child.isolation is not None else "")
        return replace(status, step=word.step, total=word.total, what=word.what, network=network)


class _Keeping:
    """Takes each checkpoint that a child writes to the blobs, in a thread of its own."""

    def __init__(self, folder: Path, notes: AttemptNotes) -> None:
        self._folder, self._notes = folder, notes
        self._over, self._took = threading.Event(), threading.Condition()
        self._asked, self._answered = 0, 0
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)

    @property
    def kept(self) -> bool:
        """Whether the last that was asked for is with the blobs."""
        return 0 < self._asked <= self._answered

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """End, after what is under way."""
        self._over.set()
        self._thread.join()
        with self._took:
            self._took.notify_all()

    def ask(self, until: float) -> None:
        """Ask the child for a checkpoint; returns once it is with the blobs, the child has ended, or it is too late."""
        with self._took:
            self._asked += 1
            asked = self._asked
            temporary = self._folder / f"{checkpoints.ASKED}.new"
            with contextlib.suppress(OSError):
                temporary.write_text(str(asked), "utf-8")
                temporary.replace(self._folder / checkpoints.ASKED)
            while self._answered < asked and not self._over.is_set() and (rest := until - time.monotonic()) > 0:
                self._took.wait(min(rest, _LOOK))

    def take(self) -> None:
        """Take what there is; what can't be taken is said."""
        try:
            asked = self._notes.take(self._folder)
        except (Refusal, OSError) as error:
            _log.warning("a checkpoint was not kept: %s", error)
            return
        if asked and asked.isdecimal():
            with self._took:
                self._answered = max(self._answered, int(asked))
                self._took.notify_all()

    def _run(self) -> None:
        while not self._over.wait(_LOOK):
            self.take()


def _tidy(folder: Path) -> None:
    """Keep of a try what adoption and people need: job, manifest, log. Inputs and outputs are in the blobs."""
    kept = {folder / "job.json", folder / "child.log", folder / "out", folder / "out" / "manifest.json"}
    for path in [*folder.iterdir(), *(folder / "out").glob("*")]:
        if path not in kept:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
