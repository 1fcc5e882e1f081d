"""What a runner adds to the bare child: an attempt of a tiny preparation by the local runner, beside its child alone on the same files."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tiny

from acclimate_runners import jobs
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.jobs import PrepareJob
from acclimate_runners.local import LocalRunner

TRIES = 3


def measure(folder: Path) -> list[tuple[str, float]]:
    """Median seconds of each, and their difference; they take turns, so that what else the machine does meets both."""
    blobs = FolderBlobs(folder / "blobs")
    job = tiny.prepare_job(folder / "job", blobs)
    alone, attempts = [], []
    for number in range(TRIES):
        alone.append(bare(job, blobs, folder / f"bare-{number}"))
        attempts.append(attempt(job, blobs, folder / f"work-{number}"))
    child, whole = statistics.median(alone), statistics.median(attempts)
    return [("the child alone", child), ("its attempt", whole), ("overhead of an attempt", whole - child)]


def bare(job: PrepareJob, blobs: FolderBlobs, folder: Path) -> float:
    """Seconds of the child process."""
    (folder / "inputs").mkdir(parents=True)
    (folder / "job.json").write_text(jobs.to_json(job), "utf-8")
    for digest in jobs.inputs(job):
        blobs.get(digest, folder / "inputs" / digest.removeprefix("sha256:"))
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "acclimate_runners", str(folder)], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def attempt(job: PrepareJob, blobs: FolderBlobs, work: Path) -> float:
    """Seconds from the start of an attempt to its outcome, with all its files in the blobs."""
    runner = LocalRunner(work, slots=1)
    try:
        began = time.perf_counter()
        # Of a name of its own: an outcome that is in the blobs would be taken up.
        handle = runner.start(f"{work.name}/1", job, blobs)
        while handle.poll().state == "running":
            time.sleep(0.02)
        assert handle.poll().state == "done", handle.poll()
        return time.perf_counter() - began
    finally:
        runner.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, value in measure(Path(temporary)):
            sys.stdout.write(f"{name}: {value:.2f} s\n")
