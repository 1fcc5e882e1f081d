"""Attempts that make no progress are ended in bounded time, and say so."""

import os
import signal
from pathlib import Path

import pytest
import tiny
from dispatching import children
from waiting import ended, until, without_input

from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.local import LocalRunner
from acclimate_runners.watch import Patience


@pytest.fixture
def work(tmp_path: Path):
    blobs = FolderBlobs(tmp_path / "blobs")
    return blobs, tiny.prepare_job(tmp_path, blobs)


def test_inputs_that_never_come_are_a_hang(work, tmp_path: Path) -> None:
    blobs, job = work
    runner = LocalRunner(tmp_path / "work", slots=1, patience=Patience(hang=0.5, end=0.2))
    status = ended(runner.start("stuck/1", job, without_input(tmp_path / "stuck", blobs, job)))
    assert (status.code, status.machine) == ("hung", "localhost") and "fetching inputs" in status.reason
    runner.close()


def test_a_child_that_stands_still_is_killed_and_its_last_word_is_told(work, tmp_path: Path) -> None:
    blobs, job = work
    runner = LocalRunner(tmp_path / "work", slots=1, patience=Patience(hang=1.5))
    folder = str(tmp_path / "work")
    # A new server's imports take longer than that, and nothing moves meanwhile.
    other = LocalRunner(tmp_path / "other", slots=1)
    assert ended(other.start("first/1", job, blobs)).state == "done"
    handle = runner.start("still/1", job, blobs)
    until(lambda: handle.poll().step > 0)
    (child,) = children(folder)
    os.kill(child, signal.SIGSTOP)
    status = ended(handle)
    assert status.code == "hung" and f"at {status.step} of {status.total}" in status.reason and blobs.has(status.log)
    assert children(folder) == []
    runner.close()
    other.close()
