"""A bundle in which the model as submitted counts as prepared: it must predict the same, and nothing better may stand under its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import rounds_made

from acclimate import verify
from acclimate_competitions import digests


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
    said = f"{count} of 17 preparations count the model as submitted; of {12 * count} rows 0 needed slack"
    assert (found.status, found.where) == ("ok", said)


@pytest.mark.parametrize("fit", [fit_as_submitted, fit_diverged])
def test_a_better_model_under_the_name_of_the_submitted_one_is_named(
    fit: Callable[..., dict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rounds_made, "fit_of", fit)
    failed = failed_checks(rounds_made.make(tmp_path / "round").write(tmp_path / "bundle"))
    assert set(failed) == {"as submitted"}
    assert "predictions/untrained/prepared-" in failed["as submitted"]


@pytest.mark.parametrize("lost", ["direct", "prepared"])
def test_what_was_given_up_contradicts_no_prediction_of_the_same_model_and_shows_nothing_of_it(
    lost: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Decision 0037: the organizer gave up one evaluation of the model, and the other one went well."""

    def given_up(entrant: str, protocol: str) -> dict[str, str]:
        return {"given_up": "its tokenizer crashes"} if (entrant, protocol) == ("untrained", lost) else {}

    def predict(made: rounds_made.Made, entrant: str, task: str, seed: Any, protocol: str) -> pa.Table:
        if entrant != "untrained":
            return honest_predict(made, entrant, task, seed, protocol)
        table = honest_predict(made, entrant, task, None, "direct")
        table = table.set_column(1, "protocol", pa.array([protocol] * table.num_rows))
        table = table.set_column(3, "seed", pa.array([seed] * table.num_rows, pa.int64()))
        if given_up(entrant, protocol):
            table = table.set_column(5, "loglikelihoods", pa.array([None] * table.num_rows, pa.list_(pa.float64())))
        return table.cast(rounds_made.tables.PREDICTIONS)

    monkeypatch.setattr(rounds_made, "fit_of", fit_as_submitted)
    monkeypatch.setattr(rounds_made, "ended", given_up)
    monkeypatch.setattr(rounds_made, "predict", predict)
    report = verify.verify(rounds_made.make(tmp_path / "round").write(tmp_path / "bundle"))
    assert [check.name for check in report.checks if check.status == "FAILED"] == []
    found = next(check for check in report.checks if check.name == "as submitted")
    assert found.status == "NOT CHECKED"
    said = "6 of 17 preparations count the model as submitted; of 6 of them the organizer gave up an evaluation, as the evaluator says"
    assert found.meaning.startswith(said), found.meaning
    assert "the first of untrained, " in found.meaning


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


# ---- one odd row switches off no other, and slack is for other hardware ---------------------------------------------

TINT_11 = ("untrained", "tint", 11, "prepared")
DIRECT = ("untrained", "tint", None, "direct")
PLACE = "predictions/untrained/prepared-tint-11.parquet (tint-holdout-"
Edits = dict[tuple[Any, ...], dict[int, Any]]


def changed(table: pa.Table, edits: dict[int, Any], column: str) -> pa.Table:
    values = [edits.get(row, value) for row, value in enumerate(table.column(column).to_pylist())]
    values = [
        value(table.column(column)[row].as_py()) if callable(value) else value for row, value in enumerate(values)
    ]
    place = table.schema.get_field_index(column)
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


def played(
    edits: Edits, monkeypatch: pytest.MonkeyPatch, folder: Path, *, ran_on: Callable[..., str | None] | None = None
) -> tuple[verify.Check, tuple[verify.Check, ...]]:
    """The line `as submitted`, and all that FAILED, of a round whose predictions are changed by row before they are logged."""

    def predict(made: rounds_made.Made, *key: Any) -> pa.Table:
        return changed(predict_as_submitted(made, *key), edits.get(key, {}), "loglikelihoods")

    monkeypatch.setattr(rounds_made, "fit_of", fit_as_submitted)
    monkeypatch.setattr(rounds_made, "predict", predict)
    if ran_on is not None:
        monkeypatch.setattr(rounds_made, "ran_on", ran_on)
    report = verify.verify(rounds_made.make(folder / "round").write(folder / "bundle"))
    return next(check for check in report.checks if check.name == "as submitted"), report.failed


def off_by(nats: float) -> Callable[[list[float]], list[float]]:
    return lambda values: [values[0] + nats, *values[1:]]


def other_machine(entrant: str, task: str, seed: int | None) -> str | None:
    return "cpu/aarch64" if seed is None else "cpu/x86_64"


def made_up(entrant: str, task: str, seed: int | None) -> str | None:
    return "abacus" if seed is None else "cpu/x86_64"


def unnamed(entrant: str, task: str, seed: int | None) -> str | None:
    return None


def test_a_row_without_a_prediction_hides_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Direct and prepared are one table here, so row 0 is null in both; row 5 is falsified.
    check, failed = played({DIRECT: {0: None}, TINT_11: {5: [0.0, -9.0, -9.0]}}, monkeypatch, tmp_path)
    assert [check.name for check in failed] == ["as submitted"]
    assert check.where == f"{PLACE}5)"


def test_a_row_without_a_prediction_is_named_and_all_others_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check, failed = played({DIRECT: {0: None}}, monkeypatch, tmp_path)
    assert (check.status, failed) == ("NOT CHECKED", ())
    assert "neither evaluation has a prediction for 3 rows, the first of untrained, tint, seed 11" in check.meaning


@pytest.mark.parametrize("key", [DIRECT, TINT_11], ids=["direct", "prepared"])
def test_a_prediction_beside_none_is_a_difference(
    key: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    edits: Edits = {TINT_11: {4: None}} if key == TINT_11 else {DIRECT: {4: None}, TINT_11: {4: [-1.0, -1.0, -2.0]}}
    check, _ = played(edits, monkeypatch, tmp_path, ran_on=other_machine)
    assert (check.status, check.where) == ("FAILED", f"{PLACE}4)")


@pytest.mark.parametrize("ran_on", [None, unnamed], ids=["named", "older records"])
def test_on_one_class_of_hardware_the_last_bit_counts(
    ran_on: Callable[..., str | None] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check, _ = played({TINT_11: {2: off_by(1e-9)}}, monkeypatch, tmp_path, ran_on=ran_on)
    assert (check.status, check.where) == ("FAILED", f"{PLACE}2)")
    assert "both ran on cpu/x86_64, where D1 promises equal ones" in check.meaning


def test_on_another_class_the_slack_is_counted_and_its_effect_on_the_score_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tie: Edits = {DIRECT: {2: [-1.0, -1.0004, -3.0]}, TINT_11: {2: [-1.0004, -1.0, -3.0], 3: off_by(5e-4)}}
    check, failed = played(tie, monkeypatch, tmp_path, ran_on=other_machine)
    assert (check.status, failed) == ("ok", ())
    assert "of 72 rows 2 needed slack, as the two evaluations ran on cpu/aarch64 and cpu/x86_64" in check.where
    off = check.where.rpartition("at most ")[2].partition(" ")[0]
    assert float(off) in (0.0, 0.0833)


@pytest.mark.parametrize(
    ("torch", "status"),
    [(("2.12.0", "2.13.0"), "ok"), (("2.13.0", "2.13.0"), "FAILED"), ((None, "2.13.0"), "FAILED")],
    ids=["others", "the same", "one is not named"],
)
def test_with_other_libraries_there_is_slack_on_one_class_as_well(
    torch: tuple[str | None, str], status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def libraries(entrant: str, task: str, seed: int | None) -> dict[str, Any]:
        version = torch[seed is not None]
        return {} if version is None else {"libraries": {"numpy": "2.3.0", "torch": version}}

    monkeypatch.setattr(rounds_made, "with_libraries", libraries)
    check, _ = played({TINT_11: {3: off_by(5e-4)}}, monkeypatch, tmp_path)
    assert check.status == status
    if status == "ok":
        assert "of 72 rows 1 needed slack, as the two evaluations ran on cpu/x86_64 with torch 2." in check.where
        assert "torch 2.13.0 and 2.12.0" in check.where
    else:
        assert (check.where, "D1 promises equal ones" in check.meaning) == (f"{PLACE}3)", True)


@pytest.mark.parametrize("nats", [0.02, -0.0011])
def test_on_another_class_more_than_the_slack_of_its_bytes_is_named(
    nats: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check, _ = played({TINT_11: {2: off_by(nats)}}, monkeypatch, tmp_path, ran_on=other_machine)
    assert (check.status, check.where) == ("FAILED", f"{PLACE}2)")


def test_slack_for_hardware_that_the_definition_does_not_declare_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check, failed = played({TINT_11: {2: off_by(5e-4)}}, monkeypatch, tmp_path, ran_on=made_up)
    assert (check.status, failed) == ("NOT CHECKED", ())
    assert "they ran on abacus; the definition declares 'cpu'" in check.meaning


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

WRITTEN = rounds_made.DEFINITION.replace(
    'kind = "choice"\nprompt = "{{ input }}"\nchoices = ["red", "green", "blue"]\nmetric = "accuracy"\nchance = 0.333',
    'kind = "generate"\nprompt = "{{ input }}"\nstop = ["?"]\nmax_tokens = 8\nextract = "(red|green|blue)"\nmetric = "exact_match"',
).replace('aggregate = "mean"', 'aggregate = "mean_rank"')
LONG, SHORT = "red".ljust(200, "!"), "red"


@pytest.mark.parametrize(
    ("text", "others", "ran_on", "says"),
    [
        (LONG, 0, None, "of 840 rows 0 needed slack"),
        (LONG, 1, None, "where D1 promises equal ones"),
        (LONG, 1, other_machine, "of 840 rows 1 needed slack"),
        (LONG, 2, other_machine, "2 of 140 texts differ"),
        # Short texts have few tokens that could be as good as equal.
        (SHORT, 1, other_machine, "1 of 140 texts differ"),
    ],
)
def test_texts_of_a_model_that_counts_as_submitted_are_its_own(
    text: str,
    others: int,
    ran_on: Callable[..., str | None] | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def predict(made: rounds_made.Made, *key: Any) -> pa.Table:
        table = predict_as_submitted(made, *key)
        if key[1] != "tint":
            return table
        silent = changed(table, dict.fromkeys(range(table.num_rows)), "loglikelihoods")
        edits = {row: text for row in range(table.num_rows)}
        edits |= {row: "blue" for row in range(others)} if key == TINT_11 else {}
        return changed(silent, edits, "text")

    monkeypatch.setattr(rounds_made, "DEFINITION", WRITTEN)
    monkeypatch.setattr(rounds_made, "ROWS", 140)
    monkeypatch.setattr(rounds_made, "predict", predict)
    monkeypatch.setattr(rounds_made, "fit_of", fit_as_submitted)
    if ran_on is not None:
        monkeypatch.setattr(rounds_made, "ran_on", ran_on)
    report = verify.verify(rounds_made.make(tmp_path / "round").write(tmp_path / "bundle"))
    found = next(check for check in report.checks if check.name == "as submitted")
    assert says in (found.where if found.status == "ok" else found.meaning)
    assert (found.status == "ok") == ("needed slack" in says)
    assert [check for check in report.failed if check.name != "as submitted"] == []
