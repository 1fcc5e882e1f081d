"""dtype = "bfloat16": products in bfloat16, everything that adds up over steps in float32; near the float32 series, and D1 as ever."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from acclimate_competitions import recipe as recipes
from acclimate_runners import jobs
from acclimate_runners.checkpoints import RESUME, WRITTEN

NEAR = 0.02
"""How far a step's loss may be from that in float32, relatively; as docs/organizers.md says."""


def opened(tiny: Any, folder: Path, architecture: str) -> Any:
    """A loaded tiny model, and rows of any length."""
    from acclimate_runners import computing, preparation

    computing.be_deterministic(1)
    job = tiny.job(folder, tiny.model(folder / "model", architecture), "check")
    model, tokenizer = preparation.open_model(job, folder)
    return model, preparation.pack_splits(job, folder, job.tasks[1], model, tokenizer)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mamba"])
def test_its_losses_are_near_those_of_float32_however_the_batch_is_read(
    tiny: Any, tmp_path: Path, architecture: str
) -> None:
    import torch

    from acclimate_runners import preparation

    model, data = opened(tiny, tmp_path, architecture)
    start = model.copy_weights()

    def losses(micro: int | None = None, **changes: Any) -> Any:
        model.set_weights(start)
        return preparation.fit(model, data, tiny.recipe(**changes), lr=0.003, seed=12, micro_batch=micro).losses

    plain, half = losses(), losses(dtype="bfloat16")
    assert half != plain and half == pytest.approx(plain, rel=NEAR)
    assert losses(dtype="bfloat16") == half
    for micro in (3, 1):
        assert losses(micro, dtype="bfloat16") == pytest.approx(half, rel=NEAR)
    assert losses(dtype="bfloat16", packing=True) == pytest.approx(half, rel=NEAR)
    # What adds up over the steps never is in bfloat16: the weights have bits that it lacks.
    assert {weight.dtype for weight in model.weights.values()} == {torch.float32}
    assert {weight.grad.dtype for weight in model.weights.values() if weight.grad is not None} == {torch.float32}
    assert any(not weight.bfloat16().float().equal(weight) for weight in model.weights.values())


def test_validation_and_evaluation_are_float32(tiny: Any, tmp_path: Path) -> None:
    """The model as submitted has the same validation NLL with either recipe."""
    outcomes = [prepared(tiny, tmp_path / dtype, dtype) for dtype in ("float32", "bfloat16")]
    plain, half = (outcome.results["selections"][0]["candidates"] for outcome in outcomes)
    assert plain[0] == half[0] and plain[1] != half[1]
    assert outcomes[1].hardware.startswith(outcomes[0].hardware + "/")


def prepared(tiny: Any, folder: Path, dtype: str, *, seconds: float = 60.0, stop: int = 0) -> jobs.Outcome:
    """The outcome of a job; `stop` raises after so many steps."""
    from acclimate_runners import preparation

    limits = dataclasses.replace(tiny.limits, checkpoint_seconds=seconds)
    values = {"recipe": tiny.recipe(epochs=1, dtype=dtype), "limits": limits, "stages": (("words", 11),)}
    if not (folder / "model").exists():
        tiny.model(folder / "model")
    job = tiny.job(folder, folder / "model", "prepare", **values)

    with pytest.MonkeyPatch.context() as patch:
        if stop:
            patch.setattr(preparation, "learning_rate", _until(stop, preparation.learning_rate))
        return preparation.prepare(job, folder, lambda *words: None)


def _until(stop: int, plain: Any) -> Any:
    left = [stop]

    def counted(*given: Any, **named: Any) -> float:
        if not left[0]:
            raise InterruptedError
        left[0] -= 1
        return float(plain(*given, **named))

    return counted


def test_interrupted_anywhere_it_comes_to_the_same_bytes(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acclimate_runners import checkpoints

    monkeypatch.setattr(checkpoints, "_SHARE", 0)
    whole = prepared(tiny, tmp_path / "whole", "bfloat16")
    assert whole.files == prepared(tiny, tmp_path / "again", "bfloat16").files
    folder = tmp_path / "resumed"
    for steps in (1, 3, 6, 2, 5):
        with pytest.raises(InterruptedError):
            prepared(tiny, folder, "bfloat16", seconds=0.0, stop=steps)
        if (folder / RESUME).exists():
            (folder / RESUME).rename(folder / f"resumed-{steps}")
        (folder / WRITTEN / "whole").rename(folder / RESUME)
    assert prepared(tiny, folder, "bfloat16", seconds=0.0).files == whole.files


def test_the_recipe_says_it_and_has_another_digest(tiny: Any) -> None:
    plain, half = tiny.recipe(), tiny.recipe(dtype="bfloat16")
    assert plain.digest != half.digest and recipes.from_document(half.document()) == half
