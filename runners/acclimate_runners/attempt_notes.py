"""What the tries of an attempt leave with the blobs, for whichever machine takes it up next.

- attempts/<attempt>/<fence>/manifest.json: {job, outcome, log}. Written once all files of the outcome are blobs; any later try, on any
  machine, takes it as its own outcome.
- attempts/<attempt>/<fence>/said.json: {log}. Written by a try that failed: where its child's output lies, for the round's organizer; no
  other try reads it.
- attempts/<attempt>/<fence>/checkpoint.json: {job, files, step, total, seconds}. Written while a preparation goes on (checkpoints.py); the
  next try goes on from the farthest. `files` are names in a job's folder -> blobs.

`job` is the digest of the job's JSON, itself a blob. What is torn, of another job, or names a blob that is gone or damaged is said and
passed over: then the work is done again, which gives the same bytes.
"""

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners import jobs
from acclimate_runners.checkpoints import RESUME, STATE, TENSORS, WRITTEN
from acclimate_runners.jobs import CheckJob, EvaluateJob, Job, Outcome, PrepareJob
from acclimate_runners.runner import BlobAccess

_log = logging.getLogger(__name__)
_OF_A_STATE = frozenset({f"{RESUME}/{STATE}", f"{RESUME}/{TENSORS}"})
_PREPARED = re.compile(r"out/[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
_UNSAID = frozenset({"blob_unknown", "blob_corrupt"})


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its note has it; seconds are those that led there."""

    job: str
    files: Mapping[str, str]
    step: int
    total: int
    seconds: float


class AttemptNotes:
    """The notes of one attempt, as one of its tries reads and writes them.

    Args:
        name: the attempt's id, and after a slash the fence of this try.
        job: what to do.
        blobs: where they lie.
    """

    def __init__(self, name: str, job: Job, blobs: BlobAccess) -> None:
        attempt, slash, fence = name.rpartition("/")
        safe = re.sub(r"[^A-Za-z0-9_-]", "-", (attempt if slash else name).removeprefix("sha256:"))
        self._all, self._fence = f"attempts/{safe}/", fence if slash and fence.isdecimal() else "0"
        self._job, self._blobs = job, blobs
        self._digest = jobs.digest(job)
        self._mine: Checkpoint | None = None

    # ---- outcomes

    def outcome(self) -> tuple[Outcome, str] | None:
        """What another try came to, all of whose files are whole blobs, with its log's digest; None where there is no such.

        Raises:
            Refusal: blobs_unreachable.
        """
        for name in self._names("manifest.json"):
            with self._passed_over(name):
                document = json.loads(self._blobs.note(name) or b"")
                self._same_job(document)
                outcome, log = Outcome(**document["outcome"]), str(document["log"])
                _require_answer(self._job, outcome)
                for digest in [*outcome.files.values(), log]:
                    # Kept first: garbage collection must not take what is about to be named again.
                    self._blobs.keep(digest)
                    self._blobs.check(digest)
                return outcome, log
        return None

    def write_outcome(self, folder: Path, outcome: Outcome, log: str) -> None:
        """Write what this try came to, whose files are blobs by now, and drop the attempt's checkpoints.

        Raises:
            Refusal: blobs_unreachable, no_space.
        """
        document = {"job": self._blobs.put(folder / "job.json"), "outcome": asdict(outcome), "log": log}
        self._blobs.put_note(self._all + self._fence + "/manifest.json", json.dumps(document, sort_keys=True).encode())
        self.drop_checkpoints()

    def write_said(self, log: str) -> None:
        """Write where the output of a try's child lies that came to nothing.

        Raises:
            Refusal: blobs_unreachable, no_space.
        """
        self._blobs.put_note(self._all + self._fence + "/said.json", json.dumps({"log": log}).encode())

    # ---- checkpoints

    def resume(self, folder: Path) -> Checkpoint | None:
        """Lay the files of the farthest whole checkpoint into a job's folder; None where there is none.

        Raises:
            Refusal: blobs_unreachable, no_space.
        """
        found: list[tuple[int, int, str, Checkpoint]] = []
        for name in self._names("checkpoint.json"):
            with self._passed_over(name):
                document = json.loads(self._blobs.note(name) or b"")
                self._same_job(document)
                checkpoint = _checkpoint(document)
                found.append((checkpoint.step, _fence(name), name, checkpoint))
        for *_, name, checkpoint in sorted(found, key=lambda each: each[:2], reverse=True):
            with self._passed_over(name):
                try:
                    for file, digest in sorted(checkpoint.files.items()):
                        self._blobs.keep(digest)
                        (folder / file).parent.mkdir(exist_ok=True)
                        self._blobs.get(digest, folder / file)
                except BaseException:
                    for file in checkpoint.files:
                        (folder / file).unlink(missing_ok=True)
                    raise
                self._mine = checkpoint
                return checkpoint
        return None

    def take(self, folder: Path) -> str | None:
        """Put the checkpoint that a child has left in its folder with the blobs; what had asked for it, or None where it has left none.

        Raises:
            Refusal: blobs_unreachable, no_space: it is lost then; the child writes another.
        """
        taken = folder / WRITTEN / "taken"
        shutil.rmtree(taken, ignore_errors=True)
        try:
            (folder / WRITTEN / "whole").rename(taken)
        except FileNotFoundError:
            return None
        try:
            state = json.loads((taken / STATE).read_text("utf-8"))
            left = [path for path in (taken / STATE, taken / TENSORS) if path.is_file() and not path.is_symlink()]
            files = {f"{RESUME}/{path.name}": self._blobs.put(path) for path in left}
            files |= {f"out/{name}": self._stored(folder, name, digest) for name, digest in _made(state).items()}
            job = self._blobs.put(folder / "job.json")
            document = {"job": job, "files": files, **{name: state[name] for name in ("step", "total", "seconds")}}
            checkpoint, asked = _checkpoint(document), str(state["asked"])
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise Refusal("job_failed", f"the child's checkpoint can't be read: {error}") from error
        finally:
            shutil.rmtree(taken, ignore_errors=True)
        self._blobs.put_note(
            self._all + self._fence + "/checkpoint.json", json.dumps(document, sort_keys=True).encode()
        )
        before, self._mine = self._mine, checkpoint
        self._forget(before, keep=checkpoint)
        for name in self._names("checkpoint.json"):
            if _fence(name) < int(self._fence):
                self._blobs.drop_note(name)
        return asked

    def drop_checkpoints(self) -> None:
        """Forget all checkpoints of the attempt, so that its next try begins anew; what can't be removed is left to garbage collection."""
        with contextlib.suppress(Refusal):
            for name in self._names("checkpoint.json"):
                self._blobs.drop_note(name)
            self._forget(self._mine, keep=None)
        self._mine = None

    # ---- both

    def _names(self, last: str) -> list[str]:
        """Notes of all tries, the newest first."""
        names = [name for name in self._blobs.notes(self._all) if re.fullmatch(rf"\d+/{last}", name[len(self._all) :])]
        return sorted(names, key=_fence, reverse=True)

    def _same_job(self, document: Mapping[str, Any]) -> None:
        if document["job"] != self._digest:
            raise ValueError(f"it is of job {str(document['job'])[:71]}, not of {self._digest}")

    def _stored(self, folder: Path, name: str, digest: str) -> str:
        path = folder / "out" / name
        if not _PREPARED.fullmatch(f"out/{name}") or path.is_symlink():
            raise ValueError(f"it names a file {name[:100]!r}")
        return digest if self._blobs.keep(digest) else self._blobs.put(path)

    def _forget(self, checkpoint: Checkpoint | None, *, keep: Checkpoint | None) -> None:
        """Remove a state's blobs; they hold a nonce, so that nobody else names them. Prepared models stay."""
        for name in _OF_A_STATE:
            digest = checkpoint.files.get(name) if checkpoint else None
            if digest and not (keep and keep.files.get(name) == digest):
                with contextlib.suppress(Refusal):
                    self._blobs.remove(digest, older_than=0.0)

    @contextlib.contextmanager
    def _passed_over(self, name: str) -> Iterator[None]:
        """Say what is wrong with a note and go on without it."""
        try:
            yield
        except Refusal as refusal:
            if refusal.code not in _UNSAID:
                raise
            _log.warning("%s is passed over: %s", name, refusal.sentence)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s is passed over: %s: %s", name, type(error).__name__, str(error)[:300])


def _fence(name: str) -> int:
    return int(name.split("/")[-2])


def _made(state: Mapping[str, Any]) -> dict[str, str]:
    """Files of the parts that a state names as done."""
    entries = [part for part in state["done"].values() if isinstance(part, dict) and part.get("file") is not None]
    return {str(entry["file"]): str(entry["prepared"]) for entry in entries}


def _checkpoint(document: Mapping[str, Any]) -> Checkpoint:
    files = dict(document["files"])
    for name, digest in files.items():
        if not (name in _OF_A_STATE or _PREPARED.fullmatch(name)):
            raise ValueError(f"it names a file {name[:100]!r}")
        if not digests.is_digest(digest):
            raise ValueError(f"{name} has no digest")
    if f"{RESUME}/{STATE}" not in files:
        raise ValueError(f"it names no {STATE}")
    seconds = float(document["seconds"])
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(f"seconds is {seconds}")
    return Checkpoint(str(document["job"]), files, int(document["step"]), int(document["total"]), seconds)


def _require_answer(job: Job, outcome: Outcome) -> None:
    """That an outcome has the shape of an answer to the job.

    Raises:
        ValueError, TypeError, KeyError: it has not.
    """
    if outcome.status == "refused":
        if not (isinstance(outcome.reason, str) and outcome.reason and not outcome.files):
            raise ValueError("a refusal has a reason and no files")
        return
    if outcome.status != "done" or not all(map(digests.is_digest, outcome.files.values())):
        raise ValueError("it is no outcome")
    given: list[Any] = []
    if isinstance(job, CheckJob):
        return
    if isinstance(job, PrepareJob):
        entries = outcome.results["prepared"]
        given = [(entry["task"], entry["seed"]) for entry in entries]
        named = {entry["file"]: entry["prepared"] for entry in entries if entry["file"] is not None}
        right = named == dict(outcome.files)
    if isinstance(job, EvaluateJob):
        entries = outcome.results["predictions"]
        given = [(entry["task"], entry["seed"], entry["protocol"]) for entry in entries]
        right = {entry["file"] for entry in entries} == set(outcome.files)
    if not right or sorted(map(str, given)) != sorted(map(str, job.stages)):
        raise ValueError("it does not answer the job")
