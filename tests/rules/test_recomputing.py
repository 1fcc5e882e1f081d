"""Layers that are computed again in the backward pass: the same bytes in less memory, so that only a job says whether they are."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from acclimate_competitions.recipe import Lora
from acclimate_runners import jobs


def architectures_of() -> list[str]:
    from acclimate_runners import architectures

    return sorted(name for name, kind in architectures.ARCHITECTURES.items() if not kind.encodes)


@pytest.mark.parametrize("architecture", architectures_of())
def test_the_same_bytes_with_and_without(tiny: Any, tmp_path: Path, architecture: str) -> None:
    """Of all weights, in both dtypes, packed, in parts, and of adapters."""
    from acclimate_runners import computing, preparation

    computing.be_deterministic(1)
    folder = tiny.model(tmp_path / "model", architecture)
    job = tiny.job(tmp_path, folder, "check")
    model, tokenizer = preparation.open_model(job, tmp_path)
    data = preparation.pack_splits(job, tmp_path, job.tasks[1], model, tokenizer)
    start, lora = model.copy_weights(), Lora(2, 4.0, ("attention",))

    def fitted(micro: int | None = None, **changes: Any) -> Any:
        model.set_weights(start)
        how: dict[str, Any] = {"stop_after": 3, "micro_batch": micro}
        done = preparation.fit(model, data, tiny.recipe(**changes), lr=0.003, seed=12, **how)
        return done.losses, done.validation, model.copy_weights()

    ways: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"packing": True}, {"micro": 3}]
    ways.append({"method": "lora", "lora": lora})
    before = [fitted(**way) for way in ways]
    model.recompute()
    layers = [layer for layer in model.model.modules() if getattr(layer, "gradient_checkpointing", False) is True]
    assert len(layers) >= int(model.model.config.num_hidden_layers)
    for way, plain in zip(ways, before, strict=True):
        again = fitted(**way)
        assert again[:2] == plain[:2], way
        assert all(again[2][name].equal(tensor) for name, tensor in plain[2].items()), way


def test_jobs_say_it(tiny: Any, tmp_path: Path) -> None:
    model = tiny.model(tmp_path / "model")
    for kind, more in (("check", {}), ("prepare", {"stages": (("words", 11),)})):
        job = tiny.job(tmp_path, model, kind, recompute=True, micro_batch=3, **more)
        assert jobs.from_json(jobs.to_json(job)) == job and job.recompute


@pytest.mark.slow
def test_it_takes_less_memory_and_the_check_foresees_it(tiny: Any, tmp_path: Path) -> None:
    """Layers that remember much of each token: about one of them instead of all four."""
    shape = {"hidden_size": 16, "intermediate_size": 20_000, "num_hidden_layers": 4}
    model = tiny.model(tmp_path / "model", **shape)
    limits = dataclasses.replace(tiny.limits, max_parameters=10**7, max_bytes=10**8)
    peaks = {}
    for kind, more in (("check", {}), ("prepare", {"stages": (("words", 11),), "lr": 0.001, "max_steps": 2})):
        for recompute in (False, True):
            folder = tmp_path / f"{kind}-{recompute}"
            values = {"recipe": tiny.recipe(global_batch=42), "limits": limits, "recompute": recompute, **more}
            tiny.job(folder, model, kind, **values)
            command = [sys.executable, "-m", "acclimate_runners", str(folder)]
            subprocess.run(command, check=True, timeout=600, stdin=subprocess.DEVNULL, capture_output=True)
            outcome = jobs.read_outcome(folder)
            assert outcome is not None and outcome.status == "done", outcome
            peaks[kind, recompute] = outcome.results["memory"]
            peaks[kind, recompute, "files"] = dict(outcome.files)
    assert peaks["prepare", False, "files"] == peaks["prepare", True, "files"] != {}
    for kind in ("check", "prepare"):
        assert peaks[kind, True] < peaks[kind, False] - (100 << 20), peaks
        # What the check has taken, which reads all tasks, suffices for the preparation.
        assert all(peaks["prepare", recompute] < 1.05 * peaks["check", recompute] for recompute in (False, True))
