"""A preparation that is interrupted goes on to the same bytes, from whichever step, and never from what is no checkpoint of its own."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from acclimate_competitions.recipe import Lora
from acclimate_runners import jobs
from acclimate_runners.attempt_notes import AttemptNotes
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.checkpoints import ASKED, RESUME, STATE, TENSORS, WRITTEN


def job_in(
    tiny: Any, folder: Path, *, seconds: float, architecture: str = "llama", labels: Any = None, **changes: Any
) -> Any:
    limits = replace(tiny.limits, checkpoint_seconds=seconds)
    values = {"stages": (("words", 11), ("words", 12)), "recipe": tiny.recipe(epochs=1), "limits": limits, **changes}
    told = {} if labels is None else {"id2label": {str(number): label for number, label in enumerate(labels)}}
    job = tiny.job(folder, tiny.model(folder / "model", architecture, **told), "prepare", **values)
    if labels is not None:
        job = replace(job, tasks=tuple(replace(d, task=replace(d.task, kind="classify")) for d in job.tasks))
        (folder / "job.json").write_text(jobs.to_json(job), "utf-8")
    return job


def prepare(job: Any, folder: Path, on_word: Callable[..., None] = lambda *words: None) -> jobs.Outcome:
    from acclimate_runners import preparation

    return preparation.prepare(job, folder, on_word)


def comparable(outcome: jobs.Outcome) -> Any:
    """An outcome without the times in it."""
    text = json.loads(json.dumps({"files": dict(outcome.files), "results": outcome.results}))
    for entry in [*text["results"]["selections"], *text["results"]["prepared"]]:
        del entry["cost"]["seconds"]
    return text


def resumed(folder: Path, states: Path, made: Path) -> None:
    """Lay a checkpoint, and the files that it knows, where the next try finds them."""
    shutil.rmtree(folder / RESUME, ignore_errors=True)
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.copytree(states, folder / RESUME)
    state = json.loads((states / STATE).read_text("utf-8"))
    for part in state["done"].values():
        if isinstance(part, dict) and part.get("file"):
            (folder / "out").mkdir(exist_ok=True)
            shutil.copyfile(made / part["file"], folder / "out" / part["file"])


@pytest.fixture(scope="module")
def undisturbed(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A job with a checkpoint of every one of its steps, and what it came to without any interruption."""
    from acclimate_runners import checkpoints

    folder = tmp_path_factory.mktemp("undisturbed")
    job, kept = job_in(tiny, folder, seconds=0.0), list[Path]()
    plain = checkpoints.Checkpoints._write

    def keeping(self: Any, *given: Any) -> None:
        plain(self, *given)
        kept.append(folder / f"kept-{len(kept):03}")
        shutil.copytree(folder / WRITTEN / "whole", kept[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, "_write", keeping)
        patch.setattr(checkpoints, "_SHARE", 0)
        outcome = prepare(job, folder)
    return folder, job, kept, outcome


def test_from_every_step_it_comes_to_the_same_bytes(tiny: Any, undisturbed: Any) -> None:
    folder, job, kept, outcome = undisturbed
    # Base, two rates and two seeds; six steps each, and after each part one of the parts alone.
    assert len(kept) == 4 * 6 + 5
    shutil.copytree(folder / "out", folder / "made")
    for states in kept:
        resumed(folder, states, folder / "made")
        told: list[int] = []
        again = prepare(job, folder, lambda step, total, what, told=told: told.append(step))
        assert comparable(again) == comparable(outcome), states.name
        assert {name: (folder / "out" / name).read_bytes() for name in outcome.files} == {
            name: (folder / "made" / name).read_bytes() for name in outcome.files
        }
        # Progress goes on, too.
        before = json.loads((states / STATE).read_text("utf-8"))["step"]
        assert all(step > before for step in told)


def steps_taken(tiny: Any, folder: Path, job: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[jobs.Outcome, int]:
    from acclimate_runners import preparation

    taken, plain = [0], preparation.learning_rate

    def counting(step: int, **given: Any) -> float:
        taken[0] += 1
        return plain(step, **given)

    monkeypatch.setattr(preparation, "learning_rate", counting)
    return prepare(job, folder), taken[0]


def test_what_was_done_is_not_done_again_and_counted_once(
    tiny: Any, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job, kept, outcome = undisturbed
    made = folder / "made-once"
    shutil.copytree(folder / "out", made)
    resumed(folder, kept[-2], made)
    again, taken = steps_taken(tiny, folder, job, monkeypatch)
    assert taken == 0 and comparable(again) == comparable(outcome)
    assert [entry["cost"]["steps"] for entry in again.results["prepared"]] == [6, 6]
    assert again.results["selections"][0]["cost"]["steps"] == 12
    tokens = [entry["cost"]["tokens"] for entry in again.results["prepared"]]
    assert tokens == [entry["cost"]["tokens"] for entry in outcome.results["prepared"]] and min(tokens) > 0


def torn_state(folder: Path) -> None:
    path = folder / STATE
    path.write_bytes(path.read_bytes()[:-40])


def other_job(folder: Path) -> None:
    state = json.loads((folder / STATE).read_text("utf-8"))
    (folder / STATE).write_text(json.dumps({**state, "job": "sha256:" + "0" * 64}), "utf-8")


def other_hardware(folder: Path) -> None:
    state = json.loads((folder / STATE).read_text("utf-8"))
    (folder / STATE).write_text(json.dumps({**state, "hardware": "cpu/vax"}), "utf-8")


def no_tensors(folder: Path) -> None:
    (folder / TENSORS).unlink()


def torn_tensors(folder: Path) -> None:
    path = folder / TENSORS
    path.write_bytes(path.read_bytes()[:-40])


def other_shapes(folder: Path) -> None:
    path = folder / TENSORS
    path.write_bytes(path.read_bytes().replace(b'"weight/', b'"heights'))


@pytest.mark.parametrize(
    ("damage", "said", "most"),
    [
        (torn_state, "is ignored", 24),
        (other_job, "its job is", 24),
        (other_hardware, "'cpu/vax', not 'cpu/", 24),
        (no_tensors, "the fit begins anew", 18),
        (torn_tensors, "the fit begins anew", 18),
        (other_shapes, "the fit begins anew", 18),
    ],
)
def test_what_is_no_checkpoint_of_its_own_is_said_and_ignored(
    tiny: Any,
    undisturbed: Any,
    damage: Callable[[Path], None],
    said: str,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder, job, kept, outcome = undisturbed
    # Four steps into the second rate: base and first rate are done.
    states = next(path for path in kept if half(path) == ("words, rate 0.01", 4))
    resumed(folder, states, folder / "out")
    damage(folder / RESUME)
    again, taken = steps_taken(tiny, folder, job, monkeypatch)
    assert comparable(again) == comparable(outcome) and taken == most
    assert said in capfd.readouterr().err


def half(states: Path) -> tuple[str, int] | None:
    found = json.loads((states / STATE).read_text("utf-8"))["half"]
    return found and (found["part"], len(found["losses"]))


def test_none_is_written_before_its_time_unless_it_is_asked_for(tiny: Any, tmp_path: Path) -> None:
    job = job_in(tiny, tmp_path, seconds=3600.0, stages=(("words", 11),), recipe=tiny.recipe(epochs=30))
    prepare(job, tmp_path)
    assert not (tmp_path / WRITTEN).exists()

    asked = list[int]()

    def asking(step: int, total: int, what: str) -> None:
        if step > 20 and not asked:
            asked.append(step)
            (tmp_path / ASKED).write_text("7", "utf-8")

    prepare(job, tmp_path, asking)
    state = json.loads((tmp_path / WRITTEN / "whole" / STATE).read_text("utf-8"))
    assert state["asked"] == "7" and state["step"] >= asked[0] and not (tmp_path / ASKED).exists()
    assert [path.name for path in (tmp_path / WRITTEN).iterdir()] == ["whole"]


KILLED = """
import os, signal, sys
from pathlib import Path
from acclimate_runners import checkpoints, jobs, preparation
checkpoints._SHARE, plain, count = 0, checkpoints.write_tensors, 0
def torn(tensors, path, *, nonce):
    global count
    count += 1
    plain(tensors, path, nonce=nonce)
    if count == 9:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints.write_tensors = torn
folder = Path(sys.argv[1])
preparation.prepare(jobs.from_json((folder / "job.json").read_text("utf-8")), folder, lambda *words: None)
"""


def test_killed_while_it_writes_one_the_one_before_is_whole(tiny: Any, undisturbed: Any, tmp_path: Path) -> None:
    outcome = undisturbed[3]
    job = job_in(tiny, tmp_path, seconds=0.0)
    done = subprocess.run([sys.executable, "-P", "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {path.name for path in (tmp_path / WRITTEN).iterdir()} == {"whole", "new"}
    # Taken to the blobs as its supervisor does, and laid into another machine's folder.
    blobs, other = FolderBlobs(tmp_path / "blobs"), tmp_path / "other"
    assert AttemptNotes("sha256:ab/1", job, blobs).take(tmp_path) == ""
    job_in(tiny, other, seconds=0.0)
    begun = AttemptNotes("sha256:ab/2", job, blobs).resume(other)
    assert begun is not None and begun.step == 8 and 0 < begun.seconds < 60
    assert comparable(prepare(job, other)) == comparable(outcome)


@pytest.mark.parametrize("step", [9, 16])
def test_adapters_go_on_to_the_same_bytes_too(tiny: Any, tmp_path: Path, step: int) -> None:
    """Killed in the second rate's fit, and in a seed's: what a checkpoint holds are the adapters, what comes out whole weights."""
    recipe = tiny.recipe(epochs=1, method="lora", lora=Lora(2, 4.0, ("attention", "mlp")))
    killed_and_resumed(tiny, tmp_path, step, recipe=recipe)


@pytest.mark.parametrize("step", [3, 9, 16])
def test_an_encoder_that_classifies_goes_on_to_the_same_bytes_too(tiny: Any, tmp_path: Path, step: int) -> None:
    """Killed in each rate's fit, and in a seed's."""
    killed_and_resumed(tiny, tmp_path, step, architecture="bert", labels=("more", "less"))


@pytest.mark.slow
def test_a_state_instead_of_attention_goes_on_to_the_same_bytes_too(tiny: Any, tmp_path: Path) -> None:
    killed_and_resumed(tiny, tmp_path, 16, architecture="mamba")


def killed_and_resumed(tiny: Any, tmp_path: Path, step: int, **given: Any) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    outcome = prepare(job_in(tiny, whole, seconds=3600.0, **given), whole)
    job = job_in(tiny, cut, seconds=0.0, **given)
    killed = KILLED.replace("count == 9", f"count == {step}")
    done = subprocess.run([sys.executable, "-P", "-c", killed, str(cut)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (cut / WRITTEN / "whole").rename(cut / RESUME)
    found = json.loads((cut / RESUME / STATE).read_text("utf-8"))
    assert found["step"] == step - 1 and (cut / RESUME / TENSORS).stat().st_size > 0
    told: list[int] = []
    again = prepare(job, cut, lambda step, total, what: told.append(step))
    assert min(told) >= step and again.results["prepared"][0]["cost"]["steps"] == 6
    assert again.files == outcome.files and len(again.files) == 2
    for name in outcome.files:
        assert (cut / "out" / name).read_bytes() == (whole / "out" / name).read_bytes()


def test_a_disk_without_room_for_a_checkpoint_ends_nothing(
    tiny: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_in(tiny, tmp_path, seconds=0.0, stages=(("words", 11),))
    # Where the folder is to be, there is a file.
    (tmp_path / WRITTEN).write_text("", "utf-8")
    assert prepare(job, tmp_path).status == "done"
    assert "no checkpoint: " in capfd.readouterr().err


def test_a_disk_that_is_full_in_the_middle_of_a_checkpoint_ends_nothing_and_leaves_a_whole_one(
    tiny: Any, undisturbed: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the ninth on there is room for what is prepared, and none for the moments that a checkpoint has beside it."""
    from acclimate_runners import checkpoints

    outcome = undisturbed[3]
    job, before = job_in(tiny, tmp_path, seconds=0.0), resource.getrlimit(resource.RLIMIT_FSIZE)
    room, whole = 2 * (tmp_path / "model" / "model.safetensors").stat().st_size, tmp_path / WRITTEN / "whole"
    plain, written = checkpoints.write_tensors, list[tuple[str, int] | None]()

    def filling(*given: Any, **more: Any) -> None:
        written.append(half(whole) if whole.exists() else None)
        if len(written) == 9:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        plain(*given, **more)

    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    monkeypatch.setattr(checkpoints, "write_tensors", filling)
    try:
        assert comparable(prepare(job, tmp_path)) == comparable(outcome)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert capfd.readouterr().err.count("no checkpoint: ") == 24 - 8
    # The one before stays until the fit is over; what then says which parts are done has no tensors, and finds room.
    assert written[8:12] == [("words, rate 0.01", 2)] * 4 and written[12] is None
    assert {path.name for path in (tmp_path / WRITTEN).iterdir()} == {"whole"} and half(whole) is None
