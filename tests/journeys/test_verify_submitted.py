"""A bundle in which the model as submitted counts as prepared: it must predict the same, and nothing better may stand under its name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import rounds_made

from acclimate import verify
from acclimate.verify import scores
from acclimate.verify.report import Failed
from acclimate_competitions import digests, tables


def failed_checks(path: Path, **options: Any) -> dict[str, str]:
    return {check.name: check.where for check in verify.verify(path, **options).failed}


SUBMITTED = digests.of_bytes(b"the weights as submitted")
NO_COST = {"tokens": 0, "steps": 0, "seconds": 0, "flops": 0}


def fit_as_submitted(entrant: str, task: str, seed: int) -> dict[str, Any]:
    fit = honest_fit(entrant, task, seed)
    if entrant != "untrained":
        return fit
    candidates = [{**c, "validation": 0.25} if c["lr"] is None else c for c in fit["candidates"]]
    chosen = {"candidates": candidates, "selected": {"lr": None, "epoch": 0}}
    return {**fit, **chosen, "prepared": SUBMITTED, "cost": NO_COST}


def fit_diverged(entrant: str, task: str, seed: int) -> dict[str, Any]:
    """One reporting seed of tint diverged; all candidates of size did."""
    fit = honest_fit(entrant, task, seed)
    if entrant != "untrained" or (task, seed) in (("tint", 11), ("tint", 12)):
        return fit
    fit |= {"diverged": "the loss is not a number", "prepared": SUBMITTED}
    if task == "size":
        fit |= {"candidates": [{**c, "validation": None} for c in fit["candidates"]], "selected": None}
    return fit


honest_fit = rounds_made.fit_of
honest_predict = rounds_made.predict


def predict_as_submitted(made: rounds_made.Made, entrant: str, task: str, seed: Any, protocol: str) -> pa.Table:
    if entrant != "untrained" or protocol == "direct":
        return honest_predict(made, entrant, task, seed, protocol)
    table = made.predictions[f"predictions/{entrant}/direct-{task}-none.parquet"]
    table = table.set_column(1, "protocol", pa.array([protocol] * table.num_rows))
    table = table.set_column(3, "seed", pa.array([seed] * table.num_rows, pa.int64()))
    return table.cast(rounds_made.tables.PREDICTIONS)


@pytest.mark.parametrize(("fit", "count"), [(fit_as_submitted, 6), (fit_diverged, 4)])
def test_a_model_that_counts_as_submitted_passes_where_it_predicts_the_same(
    fit: Callable[..., dict], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rounds_made, "fit_of", fit)
    monkeypatch.setattr(rounds_made, "predict", predict_as_submitted)
    report = verify.verify(rounds_made.make(tmp_path / "round").write(tmp_path / "bundle"))
    assert [check for check in report.checks if check.status == "FAILED"] == []
    found = next(check for check in report.checks if check.name == "as submitted")
    assert (found.status, found.where) == ("ok", f"{count} of 17 preparations count the model as submitted")


@pytest.mark.parametrize("fit", [fit_as_submitted, fit_diverged])
def test_a_better_model_under_the_name_of_the_submitted_one_is_named(
    fit: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rounds_made, "fit_of", fit)
    failed = failed_checks(rounds_made.make(tmp_path / "round").write(tmp_path / "bundle"))
    assert set(failed) == {"as submitted"}
    assert "predictions/untrained/prepared-" in failed["as submitted"]


def test_where_the_submitted_model_gave_no_predictions_it_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def silent(made: rounds_made.Made, *key: Any) -> pa.Table:
        table = predict_as_submitted(made, *key)
        nothing = pa.array([None] * table.num_rows, pa.list_(pa.float64()))
        return table.set_column(5, "loglikelihoods", nothing) if key[0] == "untrained" else table

    monkeypatch.setattr(rounds_made, "fit_of", fit_as_submitted)
    monkeypatch.setattr(rounds_made, "predict", silent)
    report = verify.verify(rounds_made.make(tmp_path / "round").write(tmp_path / "bundle"))
    found = next(check for check in report.checks if check.name == "as submitted")
    assert found.status == "NOT CHECKED"
    assert "untrained, tint, seed 11" in found.meaning
    assert report.failed == ()


def other_model(fit: dict[str, Any], task: str, seed: int) -> dict[str, Any]:
    return {**fit, "prepared": digests.of_bytes(f"{task} {seed}".encode())} if (task, seed) == ("size", 12) else fit


def says_nothing(fit: dict[str, Any], task: str, seed: int) -> dict[str, Any]:
    candidates = [{**c, "validation": None} for c in fit["candidates"]]
    return {**fit, "candidates": candidates, "selected": None} if task == "size" else fit


def diverged_untrained(fit: dict[str, Any], task: str, seed: int) -> dict[str, Any]:
    return {**fit, "diverged": "it did"} if (task, seed) == ("size", 12) else fit


@pytest.mark.parametrize(
    ("edit", "seed"),
    [(other_model, 12), (says_nothing, 11), (diverged_untrained, 12)],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_a_model_that_can_not_be_the_submitted_one_is_named(
    edit: Callable[..., dict], seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fit(entrant: str, task: str, seed: int) -> dict[str, Any]:
        fit = fit_as_submitted(entrant, task, seed)
        return edit(fit, task, seed) if entrant == "untrained" else fit

    monkeypatch.setattr(rounds_made, "fit_of", fit)
    monkeypatch.setattr(rounds_made, "predict", predict_as_submitted)
    failed = failed_checks(rounds_made.make(tmp_path / "round").write(tmp_path / "bundle"))
    assert failed == {"selection": f"ModelPrepared of untrained, size, seed {seed}"}


def test_an_evaluator_that_puts_the_base_where_the_recipe_says_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = rounds_made.DEFINITION.replace('diverged = "base"', 'diverged = "missing"')
    monkeypatch.setattr(rounds_made, "DEFINITION", other)
    monkeypatch.setattr(rounds_made, "fit_of", fit_diverged)
    monkeypatch.setattr(rounds_made, "predict", predict_as_submitted)
    failed = failed_checks(rounds_made.make(tmp_path / "round").write(tmp_path / "bundle"))
    assert failed == {"selection": "ModelPrepared of untrained, tint, seed 13"}


# ---- generated texts -----------------------------------------------------------------------------------------------


@dataclass
class Folder:
    """What of a bundle the comparison of two evaluations reads."""

    place: Path

    def path(self, name: str) -> Path:
        return self.place / name.replace("/", "-")


@dataclass
class Opened:
    bundle: Folder


def texts(folder: Folder, name: str, found: list[str | None]) -> None:
    rows = [
        {"entrant": "ada", "protocol": "direct", "task": "sum", "seed": None, "example": str(n), "text": text}
        for n, text in enumerate(found)
    ]
    tables.write(pa.Table.from_pylist(rows, schema=tables.PREDICTIONS), folder.path(name))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({}, True),
        # One in a hundred may be a near tie on another processor, two are none.
        ({7: "5"}, True),
        ({7: None}, False),
        ({7: "5", 8: "6"}, "2 of 150 texts differ from those of the model as submitted in b, the first of them is '5'"),
    ],
)
def test_texts_of_a_model_that_counts_as_submitted_are_its_own(tmp_path: Path, other: dict, says: object) -> None:
    audit = Opened(Folder(tmp_path))
    texts(audit.bundle, "b", ["4"] * 150)
    texts(audit.bundle, "a", [other.get(n, "4") for n in range(150)])
    if isinstance(says, bool):
        assert scores._same_texts(audit, "a", "b") is says
    else:
        with pytest.raises(Failed, match=says):
            scores._same_texts(audit, "a", "b")
