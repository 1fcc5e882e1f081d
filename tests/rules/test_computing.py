"""Where a job computes: the placement of everything on a device of its own, by one that no machine has; and on a GPU, where there is one."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import toy_device

from acclimate_competitions import tables
from acclimate_competitions.recipe import Lora, Selection
from acclimate_competitions.tasks import Task
from acclimate_runners import architectures, checkpoints, computing, devices, jobs

WRITE = Task("write", "generate", "{{ input }}", (), "exact_match", 0.0, stop=("e", "ab\n"), max_tokens=6)
READ = Task("read", "perplexity", "{{ input }}", (), "bits_per_byte", 8.0)
LAST = Selection("nll", 0, ("last",))
WITHIN = 600
NEAR = 2e-5
"""Devices may put operations together in other ways than the processor: the last bits of float32."""


@pytest.mark.parametrize(
    ("cpuinfo", "named"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n\nprocessor\t: 1\nvendor_id\t: GenuineIntel\n", "intel"),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx512f\n", "amd"),
        ("vendor_id       : IBM/S390\n", "ibm/s390"),
        ("vendor_id\t:   Shanghai  \n", "shanghai"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "0x41-0xd0c"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd44\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n", "0x41-0xd05+0x41-0xd44"),
        ("vendor_id\n", "unnamed"),
        ("", "unnamed"),
    ],
)  # fmt: skip
def test_a_class_of_hardware_says_who_made_the_processor(cpuinfo: str, named: str) -> None:
    assert computing.maker(cpuinfo) == named


def test_two_makers_are_two_classes_of_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = []
    for maker in ("GenuineIntel", "AuthenticAMD"):
        told = f"vendor_id : {maker}\nflags : avx512f amx_bf16\n"
        monkeypatch.setattr(Path, "read_text", lambda *_, told=told: told)
        classes.append([computing.hardware(dtype).split("/") for dtype in ("float32", "bfloat16")])
    (plain, half), (other, _) = classes
    assert plain[3:] == ["intel"] and half[3:] == ["intel", "amx_bf16"]
    assert other[:3] == plain[:3] and other[3:] == ["amd"]


def run(folders: list[Any], *, device: str) -> None:
    """Run the jobs of folders in one process that has the device."""
    for folder in dict.fromkeys(str(each).partition("@")[0] for each in folders):
        path = Path(folder) / "job.json"
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "device": device}), "utf-8")
    command = [sys.executable, toy_device.__file__, *map(str, folders)]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def outcome(folder: Path) -> jobs.Outcome:
    found = jobs.read_outcome(folder)
    assert found is not None and found.status == "done", found
    return found


def twin(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-{name}")))


def labelled(tiny: Any, folder: Path, architecture: str, kind: str, **more: Any) -> Path:
    """A job whose model is a classifier, and whose tasks are for one."""
    given = {"architectures": [architectures.ARCHITECTURES[architecture].classifier], "id2label": {"0": "a", "1": "b"}}
    model = tiny.model(folder.with_name(f"{folder.name}-model"), architecture, **given)
    job = tiny.job(folder, model, kind, **more)
    job = replace(job, tasks=tuple(replace(d, task=replace(d.task, kind="classify")) for d in job.tasks))
    (folder / "job.json").write_text(jobs.to_json(job), "utf-8")
    return folder


def preparations(tiny: Any, folder: Path) -> list[Path]:
    """Jobs that between them do all that a preparation can do."""
    lora = {"method": "lora", "lora": Lora(2, 4.0, ("attention",))}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("plain", "llama", {}),
        ("packed", "gpt2", {"packing": True}),
        ("adapters", "llama", lora),
        ("window", "gemma2", {}),
        ("state", "mamba", {}),
    ]
    found = []
    for name, architecture, changes in kinds:
        recipe = tiny.recipe(epochs=1, lr_grid=(1e-2,), **changes)
        model = tiny.model(folder / f"{name}-model", architecture)
        found.append(folder / name)
        more = {"micro_batch": 3, "recompute": True} if name == "packed" else {}
        tiny.job(found[-1], model, "prepare", stages=((tiny.tasks[0].name, 11),), recipe=recipe, **more)
    recipe = tiny.recipe(epochs=1, lr_grid=(1e-2,), selection=LAST)
    stages = ((tiny.tasks[0].name, 11),)
    for name, architecture in (("labels", "llama"), ("encoder", "bert")):
        found.append(labelled(tiny, folder / name, architecture, "prepare", stages=stages, recipe=recipe))
    tiny.job(folder / "check", folder / "plain-model", "check")
    return [*found, folder / "check"]


def evaluations(tiny: Any, folder: Path) -> list[Path]:
    """Jobs that ask models in every way there is."""
    model = tiny.model(folder / "asked-model")
    direct = tuple((task.name, None, "direct") for task in tiny.tasks)
    tiny.job(folder / "choices", model, "evaluate", stages=direct, prepared={}, entrant="fox")
    labelled(tiny, folder / "labelled", "llama", "evaluate", stages=direct, prepared={}, entrant="fox")
    data = []
    for task in (WRITE, READ):
        path = folder / f"{task.name}.parquet"
        rows = [{"example": str(n), "input": " ".join("abcdef"[: 1 + n % 6])} for n in range(12)]
        tables.write(pa.Table.from_pylist(rows), path)
        data.append(jobs.TaskData(task, holdout_inputs=tiny.put(folder / "written", path)))
    asked: dict[str, Any] = {"tasks": tuple(data), "recipe": tiny.recipe(max_length=12)}
    stages = tuple((task.name, None, "direct") for task in (WRITE, READ))
    tiny.job(folder / "written", model, "evaluate", stages=stages, prepared={}, entrant="fox", **asked)
    return [folder / name for name in ("choices", "labelled", "written")]


def numbers(folder: Path, found: jobs.Outcome) -> list[float]:
    """All losses of a preparation or a check; all log-likelihoods of an evaluation, and its texts' bytes."""
    results = found.results
    losses = [*results.get("losses", ()), *(x for each in results.get("prepared", ()) for x in each["losses"])]
    for each in results.get("predictions", ()):
        for row in tables.read(folder / "out" / each["file"], tables.PREDICTIONS).to_pylist():
            losses += [*(row["loglikelihoods"] or ()), *(row["text"] or "").encode()]
    assert losses
    return losses


def test_all_is_on_the_model_s_device_and_gives_the_processor_s_numbers(tiny: Any, tmp_path: Path) -> None:
    plain = [*preparations(tiny, tmp_path), *evaluations(tiny, tmp_path)]
    placed = [twin(each, "placed") for each in plain]
    run(plain, device="cpu")
    run(placed, device=toy_device.NAME)
    for one, other in zip(plain, placed, strict=True):
        first, again = outcome(one), outcome(other)
        assert set(first.files) == set(again.files) and bool(first.files) == (one.name != "check")
        assert numbers(one, first) == pytest.approx(numbers(other, again), abs=NEAR), one.name


@pytest.mark.slow
def test_a_killed_preparation_goes_on_from_what_lay_on_the_device(tiny: Any, tmp_path: Path) -> None:
    recipe = tiny.recipe(epochs=1, lr_grid=(1e-2,), selection=LAST)
    model, folder, limits = (
        tiny.model(tmp_path / "model"),
        tmp_path / "killed",
        replace(tiny.limits, checkpoint_seconds=0),
    )
    tiny.job(folder, model, "prepare", stages=((tiny.tasks[0].name, 11),), recipe=recipe, limits=limits)
    whole, resumed = twin(folder, "whole"), twin(folder, "resumed")
    run([whole, f"{folder}@9"], device=toy_device.NAME)
    shutil.copytree(folder / checkpoints.WRITTEN / "whole", resumed / checkpoints.RESUME)
    half = json.loads((resumed / checkpoints.RESUME / checkpoints.STATE).read_text("utf-8"))["half"]
    assert half["part"].endswith("seed 11") and len(half["losses"]) == 2
    run([resumed], device=toy_device.NAME)
    assert outcome(resumed).files == outcome(whole).files


def test_what_is_mixed_is_refused_by_the_device(tiny: Any, tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    code = (
        "import torch, toy_device\ntoy_device.install()\na, b = torch.ones(3).to('toy'), torch.ones(3)\n"
        "assert (a + a.cpu().to('toy')).cpu().tolist() == [2, 2, 2]\ntry:\n    a + b\nexcept RuntimeError as error:\n"
        "    print('same device' in str(error))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(toy_device.__file__).parent
    )
    assert found.stdout == "True\n", found.stderr[-2000:]


def test_a_job_for_a_gpu_that_is_not_there_says_so(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.job(tmp_path / "job", tiny.model(tmp_path / "model"), "check", device="cuda")
    command = [sys.executable, "-m", "acclimate_runners", str(tmp_path / "job")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, env=environment)
    assert done.returncode == 1 and "the job is for a GPU" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("named", "found"), [("", ""), ("-1", ""), ("0,2", "0,2"), ("GPU-5a", "GPU-5a")])
def test_the_gpus_of_a_process_are_those_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch, named: str, found: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert devices.visible_gpus() == found


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bytes_twice_and_nearly_the_processor_s_numbers(tiny: Any, tmp_path: Path) -> None:
    plain = [*preparations(tiny, tmp_path), *evaluations(tiny, tmp_path)]
    first, again = ([twin(each, name) for each in plain] for name in ("first", "again"))
    run(plain, device="cpu")
    run(first, device="cuda")
    run(again, device="cuda")
    for one, other, third in zip(plain, first, again, strict=True):
        found = outcome(other)
        assert found.files == outcome(third).files and found.hardware.startswith("cuda/")
        assert numbers(other, found) == pytest.approx(numbers(one, outcome(one)), abs=1e-3)
