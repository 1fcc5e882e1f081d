"""The child process: `python -m acclimate_runners FOLDER` runs the job of one folder (see jobs.py) and writes its manifest last."""

import argparse
import contextlib
import errno
import json
import os
import re
import stat
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from acclimate_competitions.errors import Refusal
from acclimate_runners import importing, isolation, jobs
from acclimate_runners.jobs import CheckJob, EvaluateJob, Job, Outcome, PrepareJob

_WORDS = 3
"""File descriptor of the progress lines."""
_PANIC = "PanicException"
"""What a library in Rust raises where it meets what it did not expect; it is no Exception. Those here, tokenizers and safetensors, read the entrant's files."""
_UNREADABLE = "SafetensorError"
"""What the library safetensors raises over a file that it does not read, though our own reading does."""
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cannot allocate memory (os error 12)",
)
"""What torch's allocators, NVIDIA's libraries and Rust's say in plain errors."""


def main(arguments: Sequence[str]) -> int:
    """Run one job; returns the exit status: 0 with a manifest, isolation.NO_MEMORY or NO_SPACE, 1 for a fault that is ours."""
    parser = argparse.ArgumentParser(prog="python -m acclimate_runners", description="Run the job of one folder.")
    parser.add_argument("folder", type=Path, help="holds job.json and inputs/; out/ is written")
    parser.add_argument(
        "--parent", type=int, help="process id of the supervisor, which holds standard input's other end"
    )
    parser.add_argument(
        "--progress", type=int, help="file descriptor for progress lines (default: 3 where it is a pipe)"
    )
    parser.add_argument("--memory", type=int, default=0, help="limit on private memory in bytes (default: none)")
    parser.add_argument("--rank-of", type=int, help="process id of the job's first process, which this is another of")
    given = parser.parse_args(arguments)
    if given.progress is not None and given.progress != _WORDS:
        os.dup2(given.progress, _WORDS)
        os.close(given.progress)
    words = _WORDS if _is_pipe(_WORDS) else None
    network = ""
    if given.parent is not None:
        confined = isolation.confine(parent=given.parent, memory=given.memory)
        isolation.tell(words, asdict(confined))
        network = confined.network
    if given.rank_of is not None:
        # Already as confined as the first one, in whose group and namespace it is.
        isolation.die_with(given.rank_of)
        words = None
    folder = given.folder.resolve()
    job = jobs.from_json((folder / "job.json").read_text("utf-8"))
    try:
        outcome = _carry_out(job, folder, partial(_progress, words), network)
    except Refusal as refusal:
        print(f"refused: {refusal.code}: {refusal.sentence}", *refusal.problems, sep="\n", file=sys.stderr)  # noqa: T201
        if refusal.code != "model_invalid":
            return _shortage(refusal) or 1
        # A model is not to blame for what there was not enough of while it was read.
        if status := _shortage(refusal.__cause__, by_words=False):
            traceback.print_exc()
            return status
        outcome = _refused(refusal, job.device)
    except BaseException as error:
        if type(error).__name__ == _PANIC:
            # Of a holdout's text, which it may repeat, a public reason says nothing.
            why = "" if isinstance(job, EvaluateJob) else f": {str(error)[:200]}"
            said = f"tokenizer.json: the library ends over it{why}"
            outcome = _refused(Refusal("model_invalid", said, hint="save it again"), job.device)
        elif status := _shortage(error):
            traceback.print_exc()
            return status
        # What an evaluation reads was read by the check, or was written here.
        elif type(error).__name__ == _UNREADABLE and not isinstance(job, EvaluateJob):
            said = f"the weights: the library safetensors can't read them: {str(error)[:200]}"
            outcome = _refused(Refusal("model_invalid", said, hint="save them again"), job.device)
        else:
            raise
    if os.environ.get("RANK", "0") != "0":
        # One of several processes that share the batches (ranks.py): the first one writes.
        return 0
    try:
        _write_manifest(folder / "out", replace(outcome, network=outcome.network or network))
    except OSError as error:
        traceback.print_exc()
        return _shortage(error) or 1
    return 0


def _carry_out(job: Job, folder: Path, progress: Callable[[int, int, str], None], network: str) -> Outcome:
    # Imported here, as they import torch: the child is confined by then.
    importing.transformers()
    with importing.quickly():
        from acclimate_runners import checking, evaluation, preparation, ranks

    with ranks.joined(job, folder) as own:
        match job:
            case CheckJob():
                outcome = checking.check(job, own, progress)
            case PrepareJob():
                outcome = preparation.prepare(job, own, progress, kept_from=network)
            case EvaluateJob():
                outcome = evaluation.evaluate(job, own, progress)
        memory = _peak()
        results = {**outcome.results, "memory": None if memory is None else int(ranks.added(memory))}
        return replace(outcome, results=results)


def _peak() -> int | None:
    """The most memory that this process has held, in bytes, counted as its supervisor counts; None where the machine doesn't say."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _shortage(error: BaseException | None, *, by_words: bool = True) -> int:
    """The exit status that says what there was not enough of; 0 where it was something else.

    Args:
        error: what ended the job.
        by_words: whether its words count where its type says nothing, as libraries have words of their own for it; a refusal of a model
            may repeat the model's.
    """
    said = str(error) if by_words else ""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or "No space left on device" in said or (isinstance(error, Refusal) and error.code == "no_space"):
        return isolation.NO_SPACE
    refused = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    # A device's memory; nothing raises that where torch is not imported.
    refused = refused or ("torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError))
    return isolation.NO_MEMORY if refused or any(words in said for words in _OUT_OF_MEMORY) else 0


def _refused(refusal: Refusal, device: str) -> Outcome:
    from acclimate_runners import models

    # The sentence names the first problem, or all of them.
    reason = "; ".join([refusal.sentence, *(one for one in refusal.problems if one not in refusal.sentence)])
    return Outcome("refused", reason, {}, {}, hardware=models.hardware(device), versions=models.versions())


def _progress(words: int | None, step: int, total: int, what: str) -> None:
    isolation.tell(words, {"step": step, "total": total, "what": what})


def _write_manifest(out: Path, outcome: Outcome) -> None:
    out.mkdir(exist_ok=True)
    temporary = out / ".manifest"
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(asdict(outcome), stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(out / "manifest.json")


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _end(status: int) -> NoReturn:
    """End as it is: what took part in talking to other processes has threads, which an interpreter that takes itself down may trip over."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    importing.lean()
    _end(main(sys.argv[1:]))
