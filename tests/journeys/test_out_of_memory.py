"""A model that needs more memory than it may use: read in smaller parts, by whoever leads, until it fits or is its entrant's outcome."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import live as staging
import numpy as np
import pytest
import tiny
from dispatching import dispatcher, rows, send, state_of, step_until
from live import Live
from safetensors.numpy import save_file
from sqlalchemy import select

from acclimate import rerun, retries
from acclimate.store import attempts, results
from acclimate_competitions import recipe
from acclimate_runners import isolation, jobs
from acclimate_runners.attempt_notes import AttemptNotes
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.jobs import ModelFiles, PrepareJob
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import Status

NAME = "sha256:" + "cd" * 32
WIDTH = 60_000
"""Of the one layer's middle: so few weights, and so much to remember of each token, that the micro-batch decides how much memory is used."""
BATCH = 24
"""All rows of a task at once."""


def wide(folder: Path, *, seed: int = 1, **_: Any) -> dict[str, Path]:
    """A submission whose memory is that of what it remembers of a batch."""
    files = narrow(folder, seed=seed, width=4)
    config = json.loads(files["config.json"].read_text("utf-8")) | {"intermediate_size": WIDTH}
    files["config.json"].write_text(json.dumps(config), "utf-8")
    draw = np.random.default_rng(seed)
    weights = {name: draw.normal(0, 0.02, shape).astype(np.float32) for name, shape in tiny.shapes(config).items()}
    save_file(weights, files["model.safetensors"], metadata={"format": "pt"})
    return files


narrow = tiny.model


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[PrepareJob, FolderBlobs, Path]:
    """A preparation, the blobs that have its inputs, and a folder."""
    folder = tmp_path_factory.mktemp("wide")
    blobs = FolderBlobs(folder / "blobs")
    made = tiny.prepare_job(folder, blobs)
    model = ModelFiles({name: blobs.put(path) for name, path in wide(folder / "wide").items()})
    made = dataclasses.replace(
        made,
        model=model,
        stages=made.stages[:1],
        recipe=dataclasses.replace(made.recipe, global_batch=BATCH, epochs=12),
        limits=dataclasses.replace(made.limits, checkpoint_seconds=0.02),
    )
    return made, blobs, folder


def carried_out(job: PrepareJob, blobs: FolderBlobs, work: Path, *, fence: int = 1) -> tuple[Status, int]:
    """How it ended, and the most memory that its child was seen to hold, in bytes."""
    runner, peak = LocalRunner(work, 1), 0
    handle = runner.start(f"{NAME}/{fence}", job, blobs)
    until = time.monotonic() + 200
    while (status := handle.poll()).state == "running":
        assert time.monotonic() < until, status
        child = handle.attempt._child
        peak = max(peak, isolation.resident_bytes(child.pid) if child is not None else 0)
        time.sleep(0.005)
    runner.close()
    return status, peak


@pytest.fixture(scope="module")
def between(job: tuple[PrepareJob, FolderBlobs, Path]) -> int:
    """A limit between what the whole batch takes and what half of it does, as measured here."""
    made, _, folder = job
    peaks = []
    for size in (BATCH, BATCH // 2):
        # With blobs of their own: what one comes to is no outcome of the other.
        blobs = FolderBlobs(folder / f"measured-{size}")
        for digest in jobs.inputs(made):
            blobs.put(job[1].path(digest))
        status, peak = carried_out(
            dataclasses.replace(made, micro_batch=size), blobs, folder / f"work-{size}", fence=1
        )
        assert status.state == "done", status
        peaks.append(peak)
    assert peaks[0] - peaks[1] > 64 << 20, peaks
    return sum(peaks) // 2


@pytest.mark.slow
def test_a_child_dies_with_the_whole_batch_and_lives_with_half_of_it_and_nothing_passes_between_the_two(
    job: tuple[PrepareJob, FolderBlobs, Path], between: int, tmp_path: Path
) -> None:
    made, blobs, _ = job
    made = dataclasses.replace(made, limits=dataclasses.replace(made.limits, memory=between))
    status, _ = carried_out(made, blobs, tmp_path / "work")
    assert (status.state, status.code) == ("failed", "out_of_memory") and "GiB are allowed" in status.reason
    # It left no checkpoint; and one that it had left would be none of the next try's, whose micro-batch is another.
    notes = f"attempts/{'cd' * 32}/"
    assert blobs.notes(notes) == []
    half = dataclasses.replace(made, micro_batch=BATCH // 2)
    files = {"resume/state.json": blobs.put_bytes(b"{}")}
    note = {"job": jobs.digest(made), "files": files, "step": 3, "total": 9, "seconds": 1.0}
    blobs.put_note(f"{notes}1/checkpoint.json", json.dumps(note).encode())
    for each, found in ((made, True), (half, False)):
        (folder := tmp_path / f"found-{found}").mkdir()
        assert (AttemptNotes(f"{NAME}/2", each, blobs).resume(folder) is not None) == found
    status, _ = carried_out(half, blobs, tmp_path / "work", fence=2)
    assert status.state == "done" and status.outcome is not None
    assert [entry["micro_batch"] for entry in status.outcome.results["prepared"]] == [BATCH // 2]
    # An outcome of the one is none of the other either.
    assert AttemptNotes(f"{NAME}/3", half, blobs).outcome() is not None
    assert AttemptNotes(f"{NAME}/3", made, blobs).outcome() is None
