"""Actors that have no machine, or stand still on one before they ever answered, are given up in bounded time."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from waiting import WAITING, ended, placed, until, without_input

from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.cluster import RayRunner
from acclimate_runners.runner import Demand
from acclimate_runners.watch import Patience

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("with_token")]


def actors() -> list[int]:
    """The processes of actors on this test's own clusters."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().startswith(b"ray::Attendant") and os.getpid() in above(folder):
                found.append(int(folder.name))
    return found


def above(folder: Path) -> list[int]:
    found = [int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])]
    return found + above(Path(f"/proc/{found[0]}")) if found[0] > 1 else found


def test_one_that_waits_in_vain_is_begun_anew_and_one_that_stands_still_is_given_up(
    ray_clusters: Callable, tmp_path: Path
) -> None:
    cluster = ray_clusters()
    for pool in ("a", "b"):
        cluster.add(num_cpus=1, labels={"pool": pool})
    blobs = FolderBlobs(tmp_path / "blobs")
    job = tiny.prepare_job(tmp_path, blobs, wall_seconds=3600.0)
    endless = replace(job, recipe=replace(job.recipe, epochs=50_000))
    runner = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name, patience=Patience(hang=90.0))
    a, b = (next(m.name for m in runner.machines() if m.labels["pool"] == pool) for pool in ("a", "b"))
    keeps_off = Demand(avoid=frozenset({a}))
    # 1. It keeps off a, and b is taken: it waits, as b may be free by and by.
    busy = runner.start("busy/1", endless, blobs, demand=keeps_off)
    until(lambda: busy.poll().machine == b)
    waits = runner.start("waits/1", endless, blobs, demand=keeps_off)
    time.sleep(25)
    assert waits.poll().what == WAITING
    runner.close(keep=True)
    # 2. Another driver takes it up and doesn't know what it fails on: it waits in vain, as far as that one knows, and is begun anew.
    second = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name, patience=Patience(hang=90.0))
    status = ended(second.find("waits/1", endless, blobs))
    assert status.code == "preempted" and "was to keep off one that may take it by now" in status.reason, status
    again = second.start("waits/2", endless, blobs)
    until(lambda: again.poll().machine == a)
    # 3. What waits at a machine that goes had not begun; what ran there had.
    busy, queued = second.find("busy/1", endless, blobs), second.start("queued/1", endless, blobs, demand=keeps_off)
    until(lambda: busy.poll().machine == b)
    time.sleep(5)
    cluster.remove(1)
    status = ended(queued)
    assert status.code == "preempted" and "it never had a machine" in status.reason, status
    assert (ended(busy).code, ended(busy).machine) == ("runner_failed", b)
    # 4. Another driver takes it up while its process is stopped: it has a machine, and no answer comes.
    second.close(keep=True)
    (process,) = actors()
    os.kill(process, signal.SIGSTOP)
    third = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name, patience=Patience(hang=4.0))
    (left,) = third.machines()
    frozen = third.find("waits/2", endless, blobs)
    until(lambda: frozen.poll().machine == left.name)
    status = ended(frozen)
    assert (status.code, status.machine) == ("runner_failed", left.name) and "no answer" in status.reason, status
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    third.close()
    cluster.close()


def test_a_hundred_thousandth_try_begins_as_quickly_as_a_second(ray_clusters: Callable, tmp_path: Path) -> None:
    cluster = ray_clusters()
    cluster.add(num_cpus=2)
    blobs = FolderBlobs(tmp_path / "blobs")
    job = tiny.prepare_job(tmp_path, blobs)
    runner = RayRunner(tmp_path / "work", cluster.address, namespace=tmp_path.name)
    first = runner.start("old/7", job, without_input(tmp_path / "stuck", blobs, job))
    until(lambda: placed(first) == 1)
    # One question for each earlier try would keep the gateway silent for longer than it may be.
    assert ended(runner.start("old/100000", job, blobs)).state == "done"
    gone = ended(first)
    assert gone.code == "runner_failed" and "actor is gone" in gone.reason
    runner.close()
    cluster.close()
