"""Attempts that die and go on on another machine: outcomes and checkpoints with the blobs, and what is not taken for one."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from buckets import Place
from waiting import WITHIN, ended

from acclimate_competitions import digests
from acclimate_runners import jobs
from acclimate_runners.attempt_notes import AttemptNotes
from acclimate_runners.blobs import FolderBlobs, blobs_at
from acclimate_runners.checkpoints import RESUME, STATE, TENSORS, WRITTEN
from acclimate_runners.jobs import Outcome, PrepareJob
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import Status

NAME = "sha256:" + "ab" * 32
NOTES = f"attempts/{'ab' * 32}/"


def carried_out(work: Path, job: PrepareJob, blobs: FolderBlobs, fence: int) -> Status:
    """On a machine that has nothing yet."""
    runner = LocalRunner(work, slots=1)
    try:
        status = ended(runner.start(f"{NAME}/{fence}", job, blobs))
    finally:
        runner.close()
    assert status.state == "done", status.reason
    return status


def comparable(outcome: Outcome | None) -> Any:
    """Prepared bytes, losses and selection: an outcome without the times and the memory in it."""
    assert outcome is not None
    text = json.loads(json.dumps({"files": dict(outcome.files), "results": outcome.results}))
    del text["results"]["memory"]
    for entry in [*text["results"]["selections"], *text["results"]["prepared"]]:
        del entry["cost"]["seconds"]
    return text


def note(blobs: FolderBlobs, name: str) -> dict[str, Any] | None:
    found = blobs.note(NOTES + name)
    return None if found is None else json.loads(found)


def undisturbed(folder: Path, *, epochs: int) -> Any:
    """A job and what it comes to when nothing happens."""
    blobs = FolderBlobs(folder / "blobs")
    job = tiny.prepare_job(folder, blobs)
    job = replace(
        job,
        recipe=replace(job.recipe, epochs=epochs, selection=replace(job.recipe.selection, candidates=("last",))),
        limits=replace(job.limits, checkpoint_seconds=0.02, wall_seconds=600.0),
    )
    return folder, job, carried_out(folder / "work", job, blobs, 1)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Long enough to be interrupted at a chosen moment."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), epochs=200)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Over in a moment."""
    return undisturbed(tmp_path_factory.mktemp("small"), epochs=2)


@pytest.fixture
def blobs(done: Any, tmp_path: Path) -> FolderBlobs:
    """A store that has the long job's inputs and nothing else."""
    return with_inputs(done, tmp_path)


def with_inputs(given: Any, folder: Path) -> FolderBlobs:
    made, source = FolderBlobs(folder / "blobs"), FolderBlobs(given[0] / "blobs")
    for digest in jobs.inputs(given[1]):
        made.put(source.path(digest))
    return made


def test_an_outcome_is_with_the_blobs_and_is_taken_on_any_machine(done: Any, tmp_path: Path) -> None:
    folder, job, first = done
    blobs = FolderBlobs(folder / "blobs")
    assert blobs.notes(NOTES) == [f"{NOTES}1/manifest.json"]
    again = carried_out(tmp_path / "another", job, blobs, 2)
    assert again.outcome == first.outcome and again.log == first.log
    # Also what its child was kept from, which nobody has heard here.
    assert again.network == first.network == first.outcome.network in ("none", "open")
    assert not (tmp_path / "another").exists()
    # What the checkpoints held of fits is gone, what they shared with the outcome is not.
    kept = {each.digest for each in blobs.listing()}
    assert not [digest for digest in kept if b"exp_avg_sq/" in blobs.read(digest)[:1000]]
    assert kept >= set(first.outcome.files.values())


def torn(blobs: FolderBlobs, document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()[:-30]


def of_another_job(blobs: FolderBlobs, document: dict[str, Any]) -> bytes:
    return json.dumps({**document, "job": digests.of_bytes(b"another")}).encode()


def of_fewer_stages(blobs: FolderBlobs, document: dict[str, Any]) -> bytes:
    results = document["outcome"]["results"]
    return json.dumps(
        {
            **document,
            "outcome": {**document["outcome"], "results": {**results, "prepared": results["prepared"][:1]}},
        }
    ).encode()


def with_a_blob_that_is_gone(blobs: FolderBlobs, document: dict[str, Any]) -> bytes:
    blobs.path(next(iter(document["outcome"]["files"].values()))).unlink()
    return json.dumps(document).encode()


def with_a_flipped_byte(blobs: FolderBlobs, document: dict[str, Any]) -> bytes:
    flip(blobs.path(next(iter(document["outcome"]["files"].values()))))
    return json.dumps(document).encode()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [torn, of_another_job, of_fewer_stages, with_a_blob_that_is_gone, with_a_flipped_byte]
)
def test_a_manifest_that_is_not_whole_is_said_and_the_work_is_done(
    small: Any, tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder, job, first = small
    blobs = with_inputs(small, tmp_path)
    source = FolderBlobs(folder / "blobs")
    document = json.loads(source.note(f"{NOTES}1/manifest.json") or b"")
    for digest in [*document["outcome"]["files"].values(), document["log"]]:
        blobs.put(source.path(digest))
    blobs.put_note(f"{NOTES}1/manifest.json", damage(blobs, document))
    again = carried_out(tmp_path / "work", job, blobs, 2)
    assert comparable(again.outcome) == comparable(first.outcome)
    assert (tmp_path / "work" / "attempts").exists() and f"{NOTES}1/manifest.json is passed over" in caplog.text
    assert f"{NOTES}2/manifest.json" in blobs.notes(NOTES)


MACHINE = """
import pickle, sys, time
from pathlib import Path
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.local import LocalRunner
job, blobs, work, name = pickle.loads(Path(sys.argv[1]).read_bytes()), FolderBlobs(Path(sys.argv[2])), Path(sys.argv[3]), sys.argv[4]
handle = LocalRunner(work, slots=1).start(name, job, blobs)
while handle.poll().state == "running":
    time.sleep(0.02)
print(handle.poll())
"""


def killed(folder: Path, job: PrepareJob, blobs: FolderBlobs, fence: int, when: Callable[[], bool]) -> None:
    """Another machine (`folder`/machine-FENCE) begins the next try and dies at once at some moment, without a word."""
    (folder / "job").write_bytes(pickle.dumps(job))
    paths = [str(path) for path in (folder / "job", blobs.root, folder / f"machine-{fence}")]
    command = [sys.executable, "-P", "-c", MACHINE, *paths, f"{NAME}/{fence}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + WITHIN
        while not when():
            assert process.poll() is None and time.monotonic() < until, "it did not come so far"
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_killed_five_times_it_comes_to_the_same_bytes(done: Any, tmp_path: Path, blobs: FolderBlobs) -> None:
    _, job, first = done

    def so_far(fence: int, share: float) -> Callable[[], bool]:
        def is_so_far() -> bool:
            found = note(blobs, f"{fence}/checkpoint.json")
            return found is not None and found["step"] >= share * found["total"]

        return is_so_far

    steps = [0]
    for fence, share in enumerate((0.0, 0.15, 0.3, 0.45, 0.6), start=1):
        killed(tmp_path, job, blobs, fence, so_far(fence, share))
        found = note(blobs, f"{fence}/checkpoint.json")
        assert found is not None and found["step"] > steps[-1]
        steps.append(found["step"])
        assert blobs.notes(NOTES) == [f"{NOTES}{fence}/checkpoint.json"]
    last = carried_out(tmp_path / "last", job, blobs, 6)
    assert comparable(last.outcome) == comparable(first.outcome)
    assert blobs.notes(NOTES) == [f"{NOTES}6/manifest.json"]
    # Nothing of a machine's folder was needed: each had its own.
    assert len(list(tmp_path.glob("machine-*"))) == 5


@pytest.mark.slow
def test_killed_between_the_files_and_the_manifest_it_is_tried_again(
    done: Any, tmp_path: Path, blobs: FolderBlobs
) -> None:
    _, job, first = done
    files = list(first.outcome.files.values())
    # The first prepared model is a blob long before the outcome is whole: a checkpoint names it.
    killed(tmp_path, job, blobs, 1, lambda: any(map(blobs.has, files)))
    assert not note(blobs, "1/manifest.json")
    assert comparable(carried_out(tmp_path / "work", job, blobs, 2).outcome) == comparable(first.outcome)


def of_try(work: Path, fence: int) -> Path:
    return work / "attempts" / f"sha256-{'ab' * 32}" / str(fence)


@pytest.mark.slow
def test_killed_with_files_written_and_no_manifest_the_same_machine_takes_nothing_half(
    done: Any, tmp_path: Path, blobs: FolderBlobs
) -> None:
    _, job, first = done
    # No checkpoint helps: what was written is all that there is.
    job, left = replace(job, limits=replace(job.limits, checkpoint_seconds=3600.0)), tmp_path / "machine-1"
    killed(tmp_path, job, blobs, 1, lambda: any(of_try(left, 1).glob("out/*.safetensors")))
    written = {path.name for path in of_try(left, 1).glob("out/*")}
    assert written and "manifest.json" not in written and blobs.notes(NOTES) == []
    assert comparable(carried_out(left, job, blobs, 2).outcome) == comparable(first.outcome)
    kept = {str(path.relative_to(of_try(left, 1))) for path in of_try(left, 1).rglob("*")}
    assert kept <= {"job.json", "child.log", "out"} and blobs.notes(NOTES) == [f"{NOTES}2/manifest.json"]


def test_whatever_a_killed_try_left_without_its_manifest_is_not_taken_and_not_kept(small: Any, tmp_path: Path) -> None:
    folder, job, first = small
    blobs, work = with_inputs(small, tmp_path), tmp_path / "work"
    source = FolderBlobs(folder / "blobs")
    names = sorted(first.outcome.files)
    whole = [source.read(first.outcome.files[name]) for name in names]
    leavings: list[dict[str, bytes]] = [
        {},
        {names[0]: whole[0][:100]},
        dict(zip(names, whole, strict=True)),
        {**dict(zip(names, whole, strict=True)), ".manifest": b'{"files": {'},
    ]
    for fence, files in enumerate(leavings, start=1):
        (of_try(work, fence) / "out").mkdir(parents=True)
        (of_try(work, fence) / "job.json").write_text(jobs.to_json(job), "utf-8")
        for name, data in files.items():
            (of_try(work, fence) / "out" / name).write_bytes(data)
    # Killed before it had even that folder.
    of_try(work, 5).mkdir()
    again = carried_out(work, job, blobs, 6)
    assert comparable(again.outcome) == comparable(first.outcome)
    # It was begun anew, and what was left takes no room any more.
    assert (of_try(work, 6) / "out" / "manifest.json").is_file()
    left = [path for fence in range(1, 6) for path in of_try(work, fence).rglob("*") if path.is_file()]
    assert {path.name for path in left} == {"job.json"}


def stopped_at(work: Path, job: PrepareJob, blobs: FolderBlobs) -> int:
    """A try that is asked for a checkpoint and cancelled then; the step of the checkpoint."""
    runner = LocalRunner(work, slots=1)
    handle = runner.start(f"{NAME}/1", job, blobs)
    while handle.poll().step < 100:
        assert handle.poll().state == "running"
        time.sleep(0.01)
    before = handle.poll().step
    assert handle.attempt.checkpoint(within=WITHIN)
    handle.cancel()
    assert ended(handle).code == "cancelled"
    # The next is asked in vain, as nothing is left to ask.
    assert not handle.attempt.checkpoint(within=0.1)
    runner.close()
    found = note(blobs, "1/checkpoint.json")
    assert found is not None and found["step"] >= before
    return int(found["step"])


def test_a_checkpoint_that_is_asked_for_is_with_the_blobs_when_the_answer_comes(
    done: Any, tmp_path: Path, blobs: FolderBlobs
) -> None:
    _, job, first = done
    # None comes by itself.
    job = replace(job, limits=replace(job.limits, checkpoint_seconds=3600.0))
    step = stopped_at(tmp_path / "work", job, blobs)
    runner = LocalRunner(tmp_path / "other", slots=1)
    handle = runner.start(f"{NAME}/2", job, blobs)
    steps = set[int]()
    while (status := handle.poll()).state == "running":
        steps.add(status.step)
        time.sleep(0.002)
    assert comparable(status.outcome) == comparable(first.outcome) and min(steps - {0}) > step
    # Of what is over, everything is kept.
    assert handle.attempt.checkpoint()
    runner.close()


def test_what_began_with_an_open_network_stays_said_to_have_had_one(
    done: Any, tmp_path: Path, blobs: FolderBlobs
) -> None:
    _, job, first = done
    stopped_at(tmp_path / "work", job, blobs)
    found = note(blobs, "1/checkpoint.json")
    assert found is not None
    state = json.loads(blobs.read(found["files"]["resume/state.json"]))
    assert state["network"] == first.network
    # A machine that gave its children a network wrote such a one.
    files = {**found["files"], "resume/state.json": blobs.put_bytes(json.dumps({**state, "network": "open"}).encode())}
    blobs.put_note(f"{NOTES}1/checkpoint.json", json.dumps({**found, "files": files}).encode())
    last = carried_out(tmp_path / "other", job, blobs, 2)
    assert comparable(last.outcome) == comparable(first.outcome)
    assert last.network == "open" and last.outcome is not None and last.outcome.network == "open"


@pytest.mark.parametrize("name", ["resume/state.json", "resume/fit.safetensors"])
def test_a_flipped_byte_in_a_checkpoint_is_said_and_it_begins_anew(
    done: Any, tmp_path: Path, blobs: FolderBlobs, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, job, first = done
    stopped_at(tmp_path / "work", job, blobs)
    found = note(blobs, "1/checkpoint.json")
    assert found is not None
    flip(blobs.path(found["files"][name]))
    last = carried_out(tmp_path / "other", job, blobs, 2)
    assert comparable(last.outcome) == comparable(first.outcome)
    assert f"{NOTES}1/checkpoint.json is passed over" in caplog.text and "quarantine" in caplog.text


def test_a_checkpoint_of_another_job_or_of_strange_files_is_said_and_ignored(
    done: Any, tmp_path: Path, blobs: FolderBlobs, caplog: pytest.LogCaptureFixture
) -> None:
    _, job, first = done
    stopped_at(tmp_path / "work", job, blobs)
    found = note(blobs, "1/checkpoint.json")
    assert found is not None
    strange = {**found, "files": {**found["files"], "../../../owned": found["files"]["resume/state.json"]}}
    blobs.put_note(f"{NOTES}1/checkpoint.json", json.dumps(strange).encode())
    blobs.put_note(f"{NOTES}2/checkpoint.json", json.dumps({**found, "job": digests.of_bytes(b"another")}).encode())
    blobs.put_note(f"{NOTES}3/checkpoint.json", b"[]")
    last = carried_out(tmp_path / "other", job, blobs, 4)
    assert comparable(last.outcome) == comparable(first.outcome)
    for fence in (1, 2, 3):
        assert f"{NOTES}{fence}/checkpoint.json is passed over" in caplog.text
    assert not list(tmp_path.rglob("owned"))


def test_all_tries_share_one_limit_of_time_and_what_exceeds_it_begins_anew(
    done: Any, tmp_path: Path, blobs: FolderBlobs
) -> None:
    job = replace(done[1], limits=replace(done[1].limits, wall_seconds=500.0))
    stopped_at(tmp_path / "work", job, blobs)
    found = note(blobs, "1/checkpoint.json")
    assert found is not None and 0 < found["seconds"] < 100
    blobs.put_note(f"{NOTES}1/checkpoint.json", json.dumps({**found, "seconds": 499.99}).encode())
    runner = LocalRunner(tmp_path / "other", slots=1)
    status = ended(runner.start(f"{NAME}/2", job, blobs))
    runner.close()
    assert status.code == "limit_exceeded" and status.reason == "ran longer than the 500 s allowed"
    assert blobs.notes(NOTES) == []


def test_a_bucket_keeps_outcome_and_checkpoint_as_a_folder_does(small: Any, s3_place: Place, tmp_path: Path) -> None:
    folder, job, first = small
    bucket = blobs_at(s3_place.blobs, endpoint=s3_place.server.endpoint, scratch=tmp_path / "scratch")
    source, here, there = FolderBlobs(folder / "blobs"), tmp_path / "here", tmp_path / "there"
    (here / "out").mkdir(parents=True)
    there.mkdir()
    (here / "job.json").write_text(jobs.to_json(job), "utf-8")
    name, digest = next(iter(first.outcome.files.items()))
    source.get(digest, here / "out" / name)

    def left(step: int) -> None:
        """What a child leaves."""
        whole = here / WRITTEN / "whole"
        whole.mkdir(parents=True)
        (whole / TENSORS).write_bytes(b"tensors after step %d" % step)
        part = {"file": name, "prepared": digest}
        state = {"done": {"a seed": part}, "step": step, "total": 9, "seconds": 1.5, "asked": "3"}
        (whole / STATE).write_text(json.dumps(state), "utf-8")

    notes = AttemptNotes(f"{NAME}/7", job, bucket)
    assert notes.take(here) is None and notes.resume(there) is None and notes.outcome() is None
    for step in (4, 5):
        left(step)
        assert notes.take(here) == "3" and not list((here / WRITTEN).iterdir())
    assert bucket.notes(NOTES) == [f"{NOTES}7/checkpoint.json"]
    begun = AttemptNotes(f"{NAME}/8", job, bucket).resume(there)
    assert begun is not None and (begun.step, begun.total, begun.seconds) == (5, 9, 1.5)
    assert (there / RESUME / TENSORS).read_bytes() == b"tensors after step 5"
    assert digests.of_file(there / "out" / name) == digest
    # The outcome, once all of it is there; then no checkpoint is left.
    for each in [*first.outcome.files.values(), first.log]:
        bucket.put(source.path(each))
    notes.write_outcome(here, first.outcome, first.log)
    assert bucket.notes(NOTES) == [f"{NOTES}7/manifest.json"]
    assert AttemptNotes(f"{NAME}/9", job, bucket).outcome() == (first.outcome, first.log)
    # Stored once, and by their digests alone: what is gone is no outcome.
    bucket.remove(digest, older_than=-1.0)
    assert AttemptNotes(f"{NAME}/9", job, bucket).outcome() is None
