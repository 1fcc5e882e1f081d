"""One attempt at a job, the same on this machine and in a Ray actor: inputs out of the blobs, a child, outputs into the blobs.

Folder of an attempt: WORK/attempts/<id>/<try>/{job.json, inputs/<hex>, out/…, child.log}. A try whose manifest is whole and whose
files are in the blobs is adopted and not run again, so a crash between a manifest and its commit costs nothing.
"""

import contextlib
import errno
import re
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

from acclimate_competitions.errors import Refusal
from acclimate_runners import isolation, jobs
from acclimate_runners.isolation import Ended
from acclimate_runners.jobs import Job, Outcome
from acclimate_runners.nursery import Nursery
from acclimate_runners.runner import BlobAccess, Status

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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
        self._nursery = nursery
        # Of all its tries: what an earlier one has finished is adopted, whatever its fence.
        self._folder = work / "attempts" / re.sub(r"[^A-Za-z0-9._-]", "-", name.rpartition("/")[0] or name)
        self._stop = threading.Event()
        self._child: isolation.Child | None = None
        self._ended: Status | None = None
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
        return Status("running", word.step, word.total, word.what, network=network)

    def cancel(self) -> None:
        """Kill its child; poll() says failed soon after, unless it was done before."""
        self._stop.set()

    def join(self, timeout: float) -> bool:
        """Wait until it has ended and no process of it is left; says whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._ended = self._adopted() or self._carried_out()
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
            # A killed process tidied nothing. Only the inputs: a manifest's files may not be in the blobs yet.
            shutil.rmtree(folder / "inputs", ignore_errors=True)
        folder = self._folder / str(int(before[-1].name) + 1 if before else 1)
        for name in ("inputs", "out"):
            (folder / name).mkdir(parents=True)
        try:
            (folder / "job.json").write_text(jobs.to_json(self._job), "utf-8")
            for digest in sorted(jobs.inputs(self._job)):
                self._blobs.get(digest, folder / "inputs" / digest[7:])
                if self._stop.is_set():
                    return Status("failed", reason="cancelled", code="cancelled")
            limits, threads = self._job.limits, self._job.recipe.threads
            fork = partial(self._nursery.start, stop=self._stop)
            self._child = isolation.spawn(folder, limits=limits, threads=threads, devices=self._devices, fork=fork)
            ended = self._child.supervise(self._stop)
            outcome = jobs.read_outcome(folder)
            if outcome is None:
                return self._failed(folder, ended)
            return self._stored(folder, outcome)
        finally:
            # With a manifest the outputs stay until they are in the blobs: see _stored.
            if not (folder / "out" / "manifest.json").exists():
                _tidy(folder)

    def _failed(self, folder: Path, ended: Ended) -> Status:
        reason, code = ended.reason or "ended without a manifest", ended.code or "job_failed"
        status = Status("failed", reason=reason, code=code)
        with contextlib.suppress(Refusal):
            status = replace(status, log=self._blobs.put(folder / "child.log"))
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
        _tidy(folder)
        return self._said(Status("done", outcome=outcome, log=log))

    def _said(self, status: Status) -> Status:
        child = self._child
        if child is None:
            return status
        word = child.progress
        network = child.isolation.network if child.isolation is not None else ""
        return replace(status, step=word.step, total=word.total, what=word.what, network=network)


def _tidy(folder: Path) -> None:
    """Keep of a try what adoption and people need: job, manifest, log. Inputs and outputs are in the blobs."""
    kept = {folder / "job.json", folder / "child.log", folder / "out", folder / "out" / "manifest.json"}
    for path in [*folder.iterdir(), *(folder / "out").iterdir()]:
        if path not in kept:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
