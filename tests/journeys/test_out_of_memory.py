"""A model that needs more memory than it may use: read in smaller parts, by whoever leads, until it fits or is its entrant's outcome."""

import dataclasses
import json
import time
from collections.abc import Iterator
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

from acclimate import assignments, rerun, retries, stages
from acclimate.retries import Ended
from acclimate.store import attempts, results
from acclimate_competitions.ledger import Ledger
from acclimate_competitions.phases import Phase
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
        status, peak = carried_out(dataclasses.replace(made, micro_batch=size), blobs, folder / f"work-{size}", fence=1)
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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with staging.serve(tmp_path) as running:
        yield running


def tries(live: Live) -> list[tuple[str, str]]:
    """(state, code) of the tries of preparations, in their order."""
    query = select(attempts.c.state, attempts.c.code).where(attempts.c.kind == "prepare").order_by(attempts.c.fence)
    with live.store.snapshot() as tx:
        return [(row.state, row.code) for row in tx.execute(query)]


@pytest.mark.slow
def test_another_leader_goes_on_with_half_the_batch_and_a_stranger_makes_the_same_bytes(
    server: Live, between: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"global_batch = 8": f"global_batch = {BATCH}", "epochs = 2": "epochs = 12"}
    changes["2GiB"] = f"{between >> 20}MiB"
    for old, new in changes.items():
        monkeypatch.setattr(tiny, "DEFINITION", tiny.DEFINITION.replace(old, new))
    monkeypatch.setattr(tiny, "model", wide)
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    with dispatcher(server) as first:
        # With whichever micro-batch its few steps need.
        step_until(first, lambda: state_of(server, submission)[0] == "accepted", within=240)
        server.clock.set(staged.fields["closes"], seconds=61)
        step_until(first, lambda: ("failed", "out_of_memory") in tries(server), within=240)
    keys = [row.key for row in rows(server, "prepare")]
    with dispatcher(server) as second:
        step_until(second, lambda: server.phase(staged.round) == "prepared", within=240)
    # 1. One try ran out of memory; what the change of the leader ended, if anything, counts for nothing.
    failed = [code for state, code in tries(server) if state == "failed"]
    assert failed == ["out_of_memory"] and tries(server)[-1] == ("committed", "")
    assert [row.key for row in rows(server, "prepare")] == keys
    with server.store.snapshot() as tx:
        state = tx.round(staged.round)
        documents = list(tx.execute(select(results.c.document).where(results.c.stage.in_(keys))).scalars())
        entry = state.entries[0].submission
        (known,) = assignments.outstanding(
            tx, dataclasses.replace(state, phase=Phase.CLOSED, prepared=Ledger()), holdout_inputs={}
        )
    assert {record["micro_batch"] for record in state.prepared.values()} == {BATCH // 2}
    assert {document["micro_batch"] for document in documents} == {BATCH // 2}
    # 2. Who makes it again reads the micro-batch in the log.
    shop = rerun.RerunFolder(tmp_path / "again")
    for digest in jobs.inputs(known.job):
        shop.blobs.put(server.store.blobs.path(digest))
    key = next(key for key in state.prepared if key[0] == entry)
    size = state.prepared[key]["micro_batch"]
    (made,) = rerun.prepare(shop, state, known.job.model, [key[1:]], micro_batch=size).values()
    assert made.prepared == state.prepared[key]["prepared"]


def test_the_micro_batch_follows_from_the_tries_that_are_written_down(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    send(staged, "ada", seed=1)
    with server.store.snapshot() as tx:
        (assignment,) = assignments.outstanding(tx, tx.round(staged.round), holdout_inputs={})
    stages.register(server.store, [assignment])
    assert assignment.micro_batch == 8 and assignment.halvings == 3

    def claimed(epoch: int) -> assignments.Held:
        with server.store.transaction() as tx:
            held = stages.claim(tx, [assignment], epoch=epoch)[0]
        assert held is not None and held.assignment.attempt == assignment.attempt
        assert held.assignment.stages == assignment.stages
        return held

    # 1. Each that ran out of memory halves it; others don't.
    sizes = []
    for epoch, code in enumerate(("out_of_memory", "runner_failed", "machine_memory"), start=1):
        held = claimed(epoch)
        sizes.append(held.assignment.micro_batch)
        with server.store.transaction() as tx:
            stages.try_again(tx, held, Ended(code), reason="so it was", wait=0.0)
    assert sizes == [8, 4, 4]
    # 2. A try that was lost is taken up as what it is, by another leader, also after an operator let it go.
    held = claimed(4)
    assert held.assignment.micro_batch == 2
    with server.store.transaction() as tx:
        stages.lost(tx, stages.row_of(tx, held), epoch=5, reason="its dispatcher ended", adoptable=True)
        stages.block(tx, dataclasses.replace(held, epoch=5), code="code_pinned", reason="another version")
        assert stages.release(tx, assignment.stages[0].key, epoch=6)
        adopted = stages.adopt(tx, assignment, fence=held.fence, epoch=6)
        known = stages.failures(tx, assignment.attempt)
    assert adopted is not None and adopted.assignment == held.assignment
    assert known == [Ended("out_of_memory", past=True), Ended("machine_memory", past=True)]
    # 3. Halving ends at 1, and so do the tries.
    for _ in range(3):
        with server.store.transaction() as tx:
            stages.try_again(tx, adopted, Ended("out_of_memory"), reason="so it was", wait=0.0)
        adopted = claimed(7)
        assert adopted.assignment.micro_batch == 1
    with server.store.snapshot() as tx:
        before = stages.failures(tx, assignment.attempt)
    end = retries.decide([*before, Ended("out_of_memory")], draw=lambda low, high: high, halvings=3)
    assert retries.shortages(before) == 5 and end == retries.Decision("outcome", tries=3)
