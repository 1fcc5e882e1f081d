"""A worker as `infra/` starts it, that is told to end: what runs there writes a checkpoint, leaves, and goes on elsewhere to the same bytes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from draining import DRAIN, drains
from waiting import WITHIN, ended, until

from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.cluster import RayRunner
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import Demand, Handle, Status

SECONDS = 45
"""For which a worker of `infra/` drains."""


def bytes_of(status: Status) -> dict[int, str]:
    """Seed -> digest of what was prepared."""
    assert status.state == "done" and status.outcome is not None, status.reason
    return {entry["seed"]: entry["prepared"] for entry in status.outcome.results["prepared"]}


def started(address: str, said: Path, *, there: Callable[[], bool]) -> "subprocess.Popen[bytes]":
    """A worker as `infra/` starts it, once the cluster has it.

    Its agent has fifteen seconds to come up, however busy the machine is, and no setting changes that: it comes before all else here, where
    that is allowed, and one that did not come up is started anew, as whoever keeps workers going does.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--block"]
    command += ["--num-cpus=1", "--labels=pool=leaving", f"--object-store-memory={80 << 20}"]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--include-log-monitor=false"]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", DRAIN: str(SECONDS)}
    for _ in range(8):
        with said.open("w") as words:
            worker = subprocess.Popen(
                command, env=environment, stdout=words, stderr=words, cwd="/", start_new_session=True
            )
        weigh(worker, nice=-15)
        until(lambda: worker.poll() is not None or there())  # noqa: B023
        if worker.poll() is None:
            weigh(worker, nice=0)
            return worker
        end(worker)
    raise AssertionError(said.read_text())


def weigh(worker: "subprocess.Popen[bytes]", *, nice: int) -> None:
    """Let the session of a worker have more or less of the processors, on kernels that share them out by session."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{worker.pid}/autogroup").write_text(str(nice))


def end(worker: "subprocess.Popen[bytes]") -> None:
    """Kill a worker and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def first_step(handle: Handle) -> int:
    """The first step that an attempt tells."""
    until(lambda: (status := handle.poll()).step > 0 or status.state != "running")
    status = handle.poll()
    assert status.state == "running", status
    return status.step


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("with_token")
def test_a_worker_that_is_told_to_end_drains_and_its_attempt_goes_on_elsewhere(
    ray_clusters: Callable[..., Any], tmp_path: Path
) -> None:
    assert drains() < SECONDS
    blobs = FolderBlobs(tmp_path / "blobs")
    job = tiny.prepare_job(tmp_path, blobs, wall_seconds=1200.0)
    job = replace(job, recipe=replace(job.recipe, epochs=1500), stages=job.stages[:1])
    alone = LocalRunner(tmp_path / "alone", slots=1)
    undisturbed = alone.start("sha256:cd/1", job, blobs)
    until(lambda: undisturbed.poll().state != "running", within=900)
    expected = bytes_of(undisturbed.poll())
    alone.close()
    cluster = ray_clusters()
    cluster.add(num_cpus=1, labels={"pool": "staying"})
    runner = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name)
    worker = started(cluster.address, tmp_path / "said", there=lambda: len(runner.machines()) == 2)
    try:
        one = runner.start("sha256:ab/1", job, blobs, demand=Demand(labels={"pool": "leaving"}))
        assert first_step(one) > 0
        worker.send_signal(signal.SIGTERM)
        left = ended(one)
        assert left.code == "preempted" and "is to be drained" in left.reason, left
        assert worker.wait(WITHIN) is not None
        (note,) = [name for name in blobs.notes("attempts/") if "ab" in name and name.endswith("/checkpoint.json")]
        kept = json.loads(blobs.note(note) or b"")["step"]
        two = runner.start("sha256:ab/2", job, blobs)
        assert first_step(two) >= kept > 0
        until(lambda: two.poll().state != "running", within=900)
        assert bytes_of(two.poll()) == expected
    finally:
        end(worker)
        runner.close()
