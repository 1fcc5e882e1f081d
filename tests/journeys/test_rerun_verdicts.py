"""What an entry that is made again shows, told without a machine: of a played round, with predictions made up as this machine's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rounds_made

from acclimate import bundle_rerun
from acclimate.rerun import Remade, RerunFolder
from acclimate.verify import checks
from acclimate.verify.report import Failed, NotChecked
from acclimate_runners.jobs import ModelFiles

HERE = "cpu/x86_64"
LIBRARIES = {"python": "3.11.9", "torch": "2.13.0+cpu"}
DIRECT = "predictions/ada/direct-tint-none.parquet"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        tolerant = rounds_made.DEFINITION.replace("audits = 0", "audits = 0\naudit_tolerance = 0.05")
        patch.setattr(rounds_made, "DEFINITION", tolerant)
        return rounds_made.make(where / "round").write(where / "bundle")


@pytest.fixture
def work(bundle: Path, tmp_path: Path) -> Iterator[bundle_rerun._Work]:
    with checks._audit(bundle, log_key=None, witnesses=()) as audit:
        checks._go_through(audit, checks.CHECKS)
        (entry,) = [entry for entry in audit.round.entries if entry.entrant == "ada"]
        yield bundle_rerun._Work(audit, entry, ModelFiles({}), RerunFolder(tmp_path / "shop"))


def off(bundle: Path, rows: dict[int, float]) -> pa.Table:
    """The direct evaluation of ada, with a row's log-likelihoods further up by so much."""
    table = pq.read_table(bundle / DIRECT)
    values = table["loglikelihoods"].to_pylist()
    for row, nats in rows.items():
        values[row] = [value + nats for value in values[row]]
    return table.set_column(5, table.schema.field(5), pa.array(values, table.schema.field(5).type))


def evaluated(work: bundle_rerun._Work, here: pa.Table, *, on: str = HERE) -> None:
    work._evaluation((work.entry.submission, "tint", None, "direct"), here, same=True, on=on, versions=LIBRARIES)


def names(work: bundle_rerun._Work, libraries: dict[str, str]) -> None:
    """Let the record of ada's direct evaluation, and those of its preparations, name libraries."""
    state = work.audit.round
    told = {
        name: {key: replace(record, fields={**record.fields, "libraries": libraries}) for key, record in found.items()}
        for name, found in (("evaluated", state.evaluated), ("prepared", state.prepared))
    }
    work.audit.round = replace(state, **told)


def test_the_same_predictions_are_equal(work: bundle_rerun._Work, bundle: Path) -> None:
    evaluated(work, off(bundle, {}))
    assert work.verdict("ada") == "ada: 1 equal"


@pytest.mark.parametrize("on", [HERE, "cpu/aarch64"])
def test_rows_of_one_model_that_cancel_out_in_the_mean_are_named(
    on: str, work: bundle_rerun._Work, bundle: Path
) -> None:
    with pytest.raises(Failed) as failed:
        evaluated(work, off(bundle, {3: 0.04, 7: -0.04}), on=on)
    assert failed.value.where == f"{DIRECT} (tint-holdout-3)"
    assert "the very same model predicts" in failed.value.why and "(2 of 12 such)" in failed.value.why


def test_what_two_machines_may_put_apart_is_within_and_counted(work: bundle_rerun._Work, bundle: Path) -> None:
    evaluated(work, off(bundle, {3: 0.0005}), on="cpu/aarch64")
    said = work.verdict("ada")
    assert said.startswith(
        "ada: 0 equal, 1 within the tolerance, at most 4.17e-05 apart, as the evaluator names cpu/x86_64"
    )
    assert said.endswith("; 1 predictions of equal models differ within what two machines may")


def test_on_one_class_such_rows_are_no_pass(work: bundle_rerun._Work, bundle: Path) -> None:
    evaluated(work, off(bundle, {3: 0.0005}))
    with pytest.raises(NotChecked, match="in 1 of 12 rows, by which the mean score is 0 off"):
        work.verdict("ada")


def test_with_the_libraries_that_the_record_names_the_last_bit_counts(work: bundle_rerun._Work, bundle: Path) -> None:
    names(work, LIBRARIES)
    with pytest.raises(Failed, match="the very same model predicts") as failed:
        evaluated(work, off(bundle, {3: 1e-9}))
    assert failed.value.where == f"{DIRECT} (tint-holdout-3)"


def test_with_other_libraries_it_may_be_they_and_they_are_named(work: bundle_rerun._Work, bundle: Path) -> None:
    names(work, LIBRARIES | {"torch": "2.12.0"})
    evaluated(work, off(bundle, {3: 0.0005}))
    with pytest.raises(NotChecked) as unsure:
        work.verdict("ada")
    assert "the evaluator names torch 2.12.0 (here 2.13.0+cpu)" in unsure.value.reason
    assert "python" not in unsure.value.reason and "does not say" not in unsure.value.reason


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.12.0", None], ids=["the same", "another", "not named"])
def test_another_prepared_model_fails_where_the_libraries_are_those_of_the_record(
    torch: str | None, work: bundle_rerun._Work
) -> None:
    if torch is not None:
        names(work, LIBRARIES | {"torch": torch})
    key = next(one for one in work.left() if one[0] == "tint")
    first = work.audit.round.prepared[work.entry.submission, *key]
    other = Remade("sha256:" + "0" * 64, hardware=HERE, versions=LIBRARIES, selection=dict(first.fields))
    lost = Remade(None, failed="it diverged", hardware=HERE, versions=LIBRARIES)
    if torch == "2.12.0":
        work._preparation(first, other, where="here")
        work._preparation(first, lost, where="here")
        assert [each[:4] for each in work.unsure] == ["here"] * 2
        return
    with pytest.raises(Failed):
        work._preparation(first, lost, where="here")
    if torch is None:
        work._preparation(first, other, where="here")
        assert work.unnamed and len(work.unsure) == 1
        return
    with pytest.raises(Failed, match="with the same libraries, where D1 promises equal bytes"):
        work._preparation(first, other, where="here")


def test_hardware_that_the_definition_does_not_declare_lets_nothing_pass(work: bundle_rerun._Work) -> None:
    work._judge([(1.0, 1.01)], "a place", "a number", hardware="abacus")
    with pytest.raises(NotChecked, match="the definition declares 'cpu' and not abacus"):
        work.verdict("ada")


def test_a_number_beyond_the_tolerance_of_declared_hardware_is_named(work: bundle_rerun._Work) -> None:
    pairs: list[tuple[Any, Any]] = [(1.0, 1.2)]
    with pytest.raises(Failed):
        work._judge(pairs, "a place", "a number", hardware="cpu/aarch64")
