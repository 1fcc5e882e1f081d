"""The check of a submitted model: a few steps, a forecast, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from acclimate_competitions.errors import Refusal
from acclimate_runners import architectures, models


@pytest.mark.parametrize("architecture", sorted(n for n, k in architectures.ARCHITECTURES.items() if not k.encodes))
def test_check_runs_three_steps(tiny: Any, tmp_path: Path, architecture: str) -> None:
    folder = tmp_path / "job"
    job = tiny.job(folder, tiny.model(tmp_path / "model", architecture), "check")
    told: list[tuple[int, int, str]] = []
    outcome = models.check(job, folder, lambda *words: told.append(words))
    assert outcome.status == "done" and outcome.files == {}
    assert outcome.results["architecture"] == architecture
    assert len(outcome.results["losses"]) == 3
    # Three steps of each task, counted through.
    assert [(step, total) for step, total, _ in told] == [
        (n, 3 * len(job.tasks)) for n in range(1, 3 * len(job.tasks) + 1)
    ]
    assert outcome.hardware.startswith("cpu/") and outcome.versions["torch"]


def test_check_refuses_what_could_never_be_prepared_in_time(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import checking

    folder = tmp_path / "job"
    limits = replace(tiny.limits, wall_seconds=0.001)
    job = tiny.job(folder, tiny.model(tmp_path / "model"), "check", limits=limits)
    with pytest.raises(Refusal, match=r"the preparation would take about .* s, 0\.001 s are allowed") as caught:
        models.check(job, folder, lambda *words: None)
    assert caught.value.code == "model_invalid"
    # A machine that is twice as slow as the limit was meant for is no reason to refuse anybody.
    checking.refuse_endless(59.0, 30.0)
    with pytest.raises(Refusal):
        checking.refuse_endless(61.0, 30.0)


def test_a_slow_machine_makes_no_forecast_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    from acclimate_runners import checking

    walls, cpus = iter([0.0, 9.0, 9.5, 20.0]), iter([0.0, 1.0, 1.4, 2.0])
    monkeypatch.setattr(checking.time, "monotonic", lambda: next(walls))
    monkeypatch.setattr(checking.time, "process_time", lambda: next(cpus))
    pace = checking._Pace(threads=2)
    for _ in range(4):
        pace.lap()
    monkeypatch.undo()
    assert pace.seconds == pytest.approx(0.2)
    assert checking._Pace(threads=1).seconds == 0.0


def test_check_refuses_what_can_not_read_the_rows(tiny: Any, tmp_path: Path) -> None:
    folder = tmp_path / "short"
    job = tiny.job(folder, tiny.model(tmp_path / "model", max_position_embeddings=5), "check")
    # No public sequence needs to be that long: one of the holdout may.
    needed = job.recipe.max_length - 1
    with pytest.raises(Refusal, match=f"reads at most 5 tokens, the recipe has sequences of {needed}") as caught:
        models.check(job, folder, lambda *words: None)
    assert caught.value.code == "model_invalid"
    folder = tmp_path / "enough"
    job = tiny.job(folder, tiny.model(tmp_path / "enough-model", max_position_embeddings=needed), "check")
    assert models.check(job, folder, lambda *words: None).status == "done"
    folder = tmp_path / "silent"
    silent = json.loads(tiny.tokenizer.read_text())
    silent["normalizer"] = {"type": "Replace", "pattern": {"String": "yes"}, "content": ""}
    model = tiny.model(tmp_path / "silent-model")
    (model / "tokenizer.json").write_text(json.dumps(silent))
    job = tiny.job(folder, model, "check", tokenizer=None)
    with pytest.raises(Refusal, match="gives no token for the answer 'yes' of task words"):
        models.check(job, folder, lambda *words: None)
