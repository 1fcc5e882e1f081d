"""Weights in shards over several processes: the numbers of processes that hold all weights, the same bytes again and resumed, and less memory."""

import dataclasses
import json
import math
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import processes_together
import pytest
from children import ran, started
from safetensors import safe_open
from safetensors.numpy import load_file

from acclimate_competitions import tables
from acclimate_competitions.recipe import Lora
from acclimate_runners import architectures, checkpoints, image_classifiers, jobs

NEAR = 1e-5
"""Losses in float32, relative."""
WEIGHTS_NEAR = 2e-4
"""Weights after twelve steps at 0.003: AdamW has a step's size follow from a gradient's sign where that is hardly more than rounding."""
LORA = {"method": "lora", "lora": Lora(2, 4.0, ("attention", "mlp"))}
HALF = {"dtype": "bfloat16"}
ALL = (
    "llama", "gpt2", "gpt_neox", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "phi", "phi3", "falcon",
    "mamba", "falcon_mamba", "bert", "roberta", "xlm-roberta", "electra", "albert", "distilbert", "deberta-v2", "modernbert",
)  # fmt: skip


def prepared(tiny: Any, folder: Path, architecture: str = "llama", *, weights: str = "shards", **changes: Any) -> Path:
    """A job of one fit of eleven steps of 8 sequences; the last batch of an epoch has 2. An encoder learns two labels."""
    model = folder.with_name(f"model-{architecture}")
    if not model.exists():
        kind = architectures.ARCHITECTURES[architecture]
        labels = {"architectures": [kind.classifier], "id2label": {"0": "less", "1": "more"}} if kind.encodes else {}
        tiny.model(model, architecture, **labels)
    limits = dataclasses.replace(tiny.limits, checkpoint_seconds=changes.pop("checkpoint_seconds", 60.0))
    recipe = tiny.recipe(**{"epochs": 2, **changes.pop("recipe", {})})
    values = {
        "stages": (("words", 11),),
        "lr": 0.003,
        "recipe": recipe,
        "limits": limits,
        "weights": weights,
        **changes,
    }
    job = tiny.job(folder, model, "prepare", **{"processes": 2, **values})
    if architectures.ARCHITECTURES[architecture].encodes:
        labelled(folder, job)
    return folder


def labelled(folder: Path, job: Any) -> None:
    job = dataclasses.replace(
        job, tasks=tuple(dataclasses.replace(d, task=dataclasses.replace(d.task, kind="classify")) for d in job.tasks)
    )
    (folder / "job.json").write_text(jobs.to_json(job), "utf-8")


def of(folder: Path) -> dict[str, Any]:
    found = processes_together.outcome(folder)
    assert found.get("status") == "done", found
    return found


def only(folder: Path) -> dict[str, Any]:
    (entry,) = of(folder)["results"]["prepared"]
    return dict(entry)


def near(one: Path, other: Path, *, losses: float = NEAR, weights: float = WEIGHTS_NEAR) -> None:
    """Whether two preparations have the same losses and weights but for rounding, and files of the same layout."""
    first, second = only(one), only(other)
    np.testing.assert_allclose(second["losses"], first["losses"], rtol=losses, err_msg=other.name)
    assert second["validation"] == pytest.approx(first["validation"], rel=10 * losses), other.name
    assert second["cost"]["flops"] == first["cost"]["flops"]
    with safe_open(one / "out" / first["file"], "np") as before, safe_open(other / "out" / second["file"], "np") as now:
        assert before.keys() == now.keys() and before.metadata() == now.metadata()
        for name in before.keys():
            one_, two = before.get_tensor(name), now.get_tensor(name)
            assert one_.dtype == two.dtype and one_.shape == two.shape
            off = float(np.sqrt(np.mean((one_ - two) ** 2)))
            assert off <= weights, (other.name, name, off)


def twins(tiny: Any, folder: Path, count: int, kinds: dict[str, dict[str, Any]]) -> dict[str, tuple[Path, Path]]:
    """Jobs with whole weights and in shards."""
    found = {}
    for name, how in kinds.items():
        pair = [
            prepared(tiny, folder / f"{name}-{weights}", **{"weights": weights, "processes": count, **how})
            for weights in ("whole", "shards")
        ]
        found[name] = (pair[0], pair[1])
    return found


SOME: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"architecture": "gpt2", "micro_batch": 5},
    "adapters": {"architecture": "gpt2", "recipe": LORA},
    # So low that AdamW's epsilon counts: else it knows no scale of a gradient, and a wrong norm would not be seen.
    "clipped": {"recipe": {"clip": 1e-6}},
    "encoder": {"architecture": "bert"},
}


def test_shards_give_the_numbers_of_whole_weights_and_the_same_bytes_again(tiny: Any, tmp_path: Path) -> None:
    found = twins(tiny, tmp_path, 2, SOME)
    again = Path(shutil.copytree(found["gpt2"][1], tmp_path / "again"))
    processes_together.run(2, [*(folder for pair in found.values() for folder in pair), again])
    for whole, shards in found.values():
        near(whole, shards)
    assert of(again)["files"] == of(found["gpt2"][1])["files"]
    # Clipping did something.
    assert only(found["clipped"][1])["losses"][-1] != pytest.approx(only(found["llama"][1])["losses"][-1], rel=1e-3)
    # The first writes alone.
    assert json.loads((found["llama"][1] / "left-1.json").read_text("utf-8")) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_all_architectures_give_the_numbers_of_whole_weights(tiny: Any, tmp_path: Path, count: int) -> None:
    """Tied and untied heads, biases of few numbers, transposed layers; of three processes one has no row of the last batch."""
    assert {*ALL, *image_classifiers.IMAGES} == set(architectures.ARCHITECTURES)
    found = twins(tiny, tmp_path, count, {name: {"architecture": name} for name in ALL})
    processes_together.run(count, [folder for pair in found.values() for folder in pair])
    for whole, shards in found.values():
        near(whole, shards)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_all_that_a_recipe_does_gives_the_numbers_of_whole_weights(tiny: Any, tmp_path: Path, count: int) -> None:
    kinds: dict[str, dict[str, Any]] = {f"rows{size}": {"micro_batch": size} for size in (1, 2, 3, 5, 8)}
    kinds |= {f"packed-{name}": {"recipe": {"packing": True, **more}} for name, more in (("whole", {}), ("lora", LORA))}
    kinds |= {f"lora-{name}": {"architecture": name, "recipe": LORA} for name in ("llama", "gpt2", "gpt_neox", "bert")}
    kinds["short"] = {"recipe": {"schedule": dataclasses.replace(tiny.recipe().schedule, warmup_steps=0, final=0.0)}}
    found = twins(tiny, tmp_path, count, kinds)
    halves = twins(tiny, tmp_path, count, {"half": {"recipe": HALF}, "half-lora": {"recipe": {**HALF, **LORA}}})
    lighter = prepared(tiny, tmp_path / "lighter", processes=count, micro_batch=1, recompute=True)
    every = [folder for pair in (*found.values(), *halves.values()) for folder in pair]
    processes_together.run(count, [*every, lighter])
    for whole, shards in found.values():
        near(whole, shards)
    for whole, shards in halves.values():
        near(whole, shards, losses=2e-2, weights=2e-3)
    # Computing layers again changes no bit.
    assert of(lighter)["files"] == of(found["rows1"][1])["files"]


@pytest.mark.slow
def test_a_killed_one_goes_on_to_the_same_bytes_from_a_checkpoint_that_looks_like_any(
    tiny: Any, tmp_path: Path
) -> None:
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "adapters": {"architecture": "gpt2", "recipe": LORA}}
    whole = {n: prepared(tiny, tmp_path / n, **how, checkpoint_seconds=0.0) for n, how in kinds.items()}
    killed = {name: Path(shutil.copytree(folder, tmp_path / f"{name}-killed")) for name, folder in whole.items()}
    alone = prepared(tiny, tmp_path / "alone", weights="whole", checkpoint_seconds=0.0)
    processes_together.run(2, [*whole.values(), *(f"{folder}@8" for folder in killed.values()), f"{alone}@8"])
    for name, folder in killed.items():
        state = json.loads((folder / checkpoints.WRITTEN / "whole" / checkpoints.STATE).read_text("utf-8"))
        assert len(state["half"]["losses"]) in (6, 7) and not (folder / "done.json").exists()
        (folder / checkpoints.WRITTEN / "whole").rename(folder / checkpoints.RESUME)
        assert json.loads((folder / "left-1.json").read_text("utf-8")) == [], name
    # It has whole tensors, as one has of whole weights.
    one, other = (
        load_file(path / checkpoints.TENSORS)
        for path in (killed["plain"] / checkpoints.RESUME, alone / checkpoints.WRITTEN / "whole")
    )
    assert {name: tensor.shape for name, tensor in one.items()} == {
        name: tensor.shape for name, tensor in other.items()
    }
    processes_together.run(2, list(killed.values()))
    for name, folder in killed.items():
        assert of(folder)["files"] == of(whole[name])["files"], name


@pytest.mark.slow
def test_a_checkpoint_that_finds_no_place_ends_nothing(tiny: Any, tmp_path: Path) -> None:
    fine, full = (prepared(tiny, tmp_path / name, checkpoint_seconds=0.0) for name in ("fine", "full"))
    (full / checkpoints.WRITTEN).write_text("in the way", "utf-8")
    processes_together.run(2, [fine, full])
    assert of(full)["files"] == of(fine)["files"]


def asked(tiny: Any, folder: Path, model: Path, **changes: Any) -> Path:
    stages = tuple((task.name, None, "direct") for task in tiny.tasks)
    tiny.job(folder, model, "evaluate", stages=stages, prepared={}, entrant="fox", **changes)
    return folder


def test_a_check_and_an_evaluation_in_shards_find_what_one_process_finds(tiny: Any, tmp_path: Path) -> None:
    """An evaluation adds nothing up over processes, so that it has the same bytes; a check's losses are nearly the same."""
    from acclimate_runners import evaluation, models

    model, shards = tiny.model(tmp_path / "model"), {"processes": 2, "weights": "shards"}
    tiny.job(tmp_path / "check", model, "check", **shards)
    asked(tiny, tmp_path / "evaluate", model, **shards)
    processes_together.run(2, [tmp_path / "check", tmp_path / "evaluate"])
    checked = models.check(tiny.job(tmp_path / "check1", model, "check"), tmp_path / "check1", lambda *words: None)
    assert of(tmp_path / "check")["results"]["losses"] == pytest.approx(checked.results["losses"], rel=NEAR)
    job = jobs.from_json((asked(tiny, tmp_path / "evaluate1", model) / "job.json").read_text("utf-8"))
    found = evaluation.evaluate(job, tmp_path / "evaluate1", lambda *words: None)
    assert of(tmp_path / "evaluate")["files"] == dict(found.files) and len(found.files) == 2
    rows = tables.read(tmp_path / "evaluate" / "out" / next(iter(found.files)), tables.PREDICTIONS).to_pylist()
    assert all(math.isfinite(x) for row in rows for x in row["loglikelihoods"])


def test_what_one_process_finds_ends_the_job_in_all(tiny: Any, tmp_path: Path) -> None:
    """A number that only the second process reads; weights that diverge."""
    import torch
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    model = tiny.model(tmp_path / "model-bad")
    weights = load(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][-1, 0] = torch.nan
    save_file(weights, model / "model.safetensors")
    tiny.job(tmp_path / "bad", model, "prepare", stages=(("words", 11),), processes=2, weights="shards")
    prepared(tiny, tmp_path / "diverging", lr=1e30)
    processes_together.run(2, [tmp_path / "bad", tmp_path / "diverging"])
    found = processes_together.outcome(tmp_path / "bad")
    assert found["problems"] == ["tensor 'model.layers.0.mlp.up_proj.weight' holds NaN or infinity"]
    assert "diverged" in only(tmp_path / "diverging") and only(tmp_path / "diverging")["base"]


def test_a_torch_that_can_only_average_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from acclimate_competitions.errors import Refusal
    from acclimate_runners import sharding

    sharding.require_sums()
    monkeypatch.delattr(sharding.FSDPModule, "set_force_sum_reduction_for_comms")
    with pytest.raises(Refusal, match="can't add up the gradients") as refused:
        sharding.require_sums()
    assert refused.value.code == "request_invalid"


@pytest.mark.slow
def test_a_child_s_processes_take_less_memory_together_than_with_whole_weights(tiny: Any, tmp_path: Path) -> None:
    """Of 34 million parameters: five times 131 MiB a process with whole weights (weights, gradients, moments, the model as submitted)."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    tiny.model(tmp_path / "model-llama", "llama", **sizes)
    limits = dataclasses.replace(tiny.limits, max_parameters=10**8, max_bytes=10**9)
    taken = {}
    for weights in ("whole", "shards"):
        folder = prepared(tiny, tmp_path / weights, weights=weights, limits=limits, max_steps=2)
        taken[weights] = ran(folder).results["memory"]
    size = 4 * sum(math.prod(t.shape) for t in load_file(tmp_path / "model-llama" / "model.safetensors").values())
    # Half of five times the weights in each of two processes, less what is whole for a moment.
    assert taken["shards"] < taken["whole"] - 3 * size, (taken, size)


@pytest.mark.slow
def test_a_confined_child_that_is_killed_goes_on_to_the_same_bytes(tiny: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"processes": 3, "checkpoint_seconds": 0.0}
    whole = ran(prepared(tiny, tmp_path / "whole", **how))
    assert ran(prepared(tiny, tmp_path / "again", **how)).files == whole.files
    child, stop = started(prepared(tiny, tmp_path / "killed", **how)), threading.Event()
    left = tmp_path / "killed" / checkpoints.WRITTEN / "whole"
    supervising = threading.Thread(target=child.supervise, args=(stop,))
    supervising.start()
    until = time.monotonic() + 240
    while not (left / checkpoints.STATE).exists() and supervising.is_alive() and time.monotonic() < until:
        time.sleep(0.005)
    stop.set()
    supervising.join()
    shutil.rmtree(tmp_path / "killed" / "out", ignore_errors=True)
    if json.loads((left / checkpoints.STATE).read_text("utf-8"))["done"] == {}:
        left.rename(tmp_path / "killed" / checkpoints.RESUME)
    assert ran(tmp_path / "killed").files == whole.files


@pytest.mark.gpu
def test_gpus_give_the_same_bytes_twice_in_shards_and_nearly_the_processor_s_numbers(tiny: Any, tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("shards need two GPUs")
    kinds: dict[str, dict[str, Any]] = {"llama": {}, "adapters": {"architecture": "gpt2", "recipe": LORA}}
    plain = [prepared(tiny, tmp_path / name, **how) for name, how in kinds.items()]
    first, again, killed = (
        [Path(shutil.copytree(each, each.with_name(f"{each.name}-{name}"))) for each in plain]
        for name in ("first", "again", "killed")
    )
    processes_together.run(2, plain)
    processes_together.run(2, [*first, *again, *(f"{each}@8" for each in killed)], device="cuda")
    for each in killed:
        (each / checkpoints.WRITTEN / "whole").rename(each / checkpoints.RESUME)
    processes_together.run(2, killed)
    for one, two, three, four in zip(plain, first, again, killed, strict=True):
        assert of(two)["files"] == of(three)["files"] == of(four)["files"]
        assert of(two)["hardware"].startswith("cuda/")
        near(one, two, losses=1e-3, weights=2e-3)
