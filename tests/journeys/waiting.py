"""Waiting for what a cluster will do, and a job that a machine takes and then waits with."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.jobs import PrepareJob
from acclimate_runners.runner import Handle, Status

WITHIN = 240.0
"""Seconds that a real process may take to whatever is waited for: a busy machine takes many times what an idle one does."""
PLACED, WAITING = "fetching inputs", "waiting for a machine"


def until(condition: Callable[[], Any], *, within: float = WITHIN) -> Any:
    """Wait until it holds; what it then gives."""
    end = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return found


def ended(handle: Handle) -> Status:
    until(lambda: handle.poll().state != "running")
    return handle.poll()


def placed(*handles: Handle) -> int:
    """How many of them a machine has taken."""
    return sum(handle.poll().what == PLACED for handle in handles)


def without_input(folder: Path, blobs: FolderBlobs, job: PrepareJob) -> FolderBlobs:
    """Blobs of which one input of a job never comes: a machine takes it and waits, at no cost."""
    copy = FolderBlobs(folder / "blobs")
    shutil.copytree(blobs.root, copy.root, dirs_exist_ok=True)
    first = copy.path(min(job.model.files.values()))
    first.unlink()
    os.mkfifo(first)
    return copy
