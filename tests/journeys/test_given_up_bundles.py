"""What a bundle shows of work that the organizer gave up, told without a machine: never more assurance than there is."""

import base64
import dataclasses
import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import projected
import pyarrow as pa
import pytest
import rounds_made
import stories
from labs import line
from rounds_made import Made, public

import acclimate
from acclimate import bundle_rerun, item_sources, projection, report_data, report_page, tracking, verify
from acclimate.rerun import Remade, RerunFolder
from acclimate.verify import audits, checks
from acclimate.verify.audit import Audit
from acclimate.verify.files import Bundle
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import digests, tables
from acclimate_competitions.phases import Phase
from acclimate_runners.jobs import ModelFiles

WHY = "given up by the round's organizer after 3 tries: its tokenizer crashes"
FAILURE = {"reason": WHY, "log": digests.of_bytes(b""), "given_up": True}
SECRET = b"thirty-two bytes of an auditor's"
LAB = {"name": "lab", "ed25519": public("lab"), "draw": digests.of_bytes(SECRET)}
AGREES = {"agrees": True, "tolerance": 0, "hardware": "cpu/x86_64", "reason": "the same bytes"}
NOT_MADE = {"agrees": True, "tolerance": 0, "hardware": "none", "reason": "given up by the organizer, not made again"}


def nothing(table: pa.Table) -> pa.Table:
    none = pa.nulls(table.num_rows, tables.PREDICTIONS.field("loglikelihoods").type)
    return table.set_column(table.schema.names.index("loglikelihoods"), "loglikelihoods", none).cast(tables.PREDICTIONS)


def of_seed(direct: pa.Table, seed: int | None) -> pa.Table:
    """A direct evaluation's predictions as those of a preparation that left the model as it was."""
    count = direct.num_rows
    table = direct.set_column(1, "protocol", pa.array(["prepared"] * count))
    return table.set_column(3, "seed", pa.array([seed] * count, pa.int64())).cast(tables.PREDICTIONS)


@pytest.fixture(scope="module")
def playing() -> Iterator[None]:
    """Rounds whose organizer gave up a preparation of bea and the direct evaluations of ada; every preparation is drawn.

    Every preparation of ada and of the baseline for tint left the model as submitted.
    """
    fields, prepare, predict = rounds_made.defined_fields, rounds_made.prepare_all, rounds_made.predict
    fit = rounds_made.fit_of

    def prepare_and_audit(made: Made) -> None:
        prepare(made)
        made.signed("AuditDrawn", {"secret": base64.b64encode(SECRET).decode()}, by="lab")
        state = made.fold()
        for key in state.drawn or ():
            first = state.prepared[key]
            outcome = {"prepared": first.fields.get("prepared"), **(NOT_MADE if "failed" in first.fields else AGREES)}
            named = dict(zip(("submission", "task", "seed"), key, strict=True))
            made.signed("PreparationAudited", named | outcome, by="lab")

    def fitted(entrant: str, task: str, seed: int) -> dict[str, Any]:
        made = fit(entrant, task, seed)
        if entrant == "bea" or task != "tint":
            return made
        candidates = [{**one, "validation": 0.25} if one["lr"] is None else one for one in made["candidates"]]
        submitted = digests.of_bytes(f"{entrant}, as submitted".encode())
        return made | {"candidates": candidates, "selected": {"lr": None, "epoch": 0}, "prepared": submitted}

    def predicted(made: Made, entrant: str, task: str, seed: int | None, protocol: str) -> pa.Table:
        if (entrant, task, protocol) == ("untrained", "tint", "prepared"):
            return of_seed(made.predictions["predictions/untrained/direct-tint-none.parquet"], seed)
        table = predict(made, entrant, task, seed, protocol)
        return nothing(table) if rounds_made.ended(entrant, protocol) else table

    with pytest.MonkeyPatch.context() as patch:
        text = rounds_made.DEFINITION.replace("audits = 0", 'audits = 100\nauditor = "lab"')
        patch.setattr(rounds_made, "DEFINITION", text)
        patch.setattr(rounds_made, "FAILURE", FAILURE)
        patch.setattr(rounds_made, "defined_fields", lambda made: {**fields(made), "auditor": LAB})
        patch.setattr(rounds_made, "prepare_all", prepare_and_audit)
        patch.setattr(rounds_made, "fit_of", fitted)
        patch.setattr(
            rounds_made,
            "ended",
            lambda entrant, protocol: {"given_up": WHY} if (entrant, protocol) == ("ada", "direct") else {},
        )
        patch.setattr(rounds_made, "predict", predicted)
        yield


@pytest.fixture(scope="module")
def made(playing: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def bundle(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("bundle"))


def test_what_was_given_up_is_counted_and_no_re_run_of_it_is_taken_for_one(made: Made, bundle: Path) -> None:
    report = verify.verify(bundle, log_key=made.signer.vkey)
    assert report.failed == ()
    said = line(report, "prepared").where
    assert said.endswith(
        "1 failed: bea, size, seed 13; 1 of them were given up by the organizer, as the evaluator says; 2 evaluations were given up by the"
        " organizer, as the evaluator says: ada, tint, direct; ada, size, direct"
    )
    assert line(report, "predictions").where == "23 evaluations; 2 given up, which have no prediction"
    check = line(report, "honest preparation")
    assert check.status == "NOT CHECKED"
    assert check.meaning == (
        "1 of 18 drawn preparations (bea, size, seed 13) were given up by the round's organizer, as the evaluator says, so that no re-run"
        " shows whether they were beyond mending; the other 17 were made again by lab: 17 with equal bytes"
    )


def test_a_model_that_counts_as_submitted_is_held_against_no_evaluation_that_was_given_up(
    made: Made, bundle: Path
) -> None:
    check = line(verify.verify(bundle, log_key=made.signer.vkey), "as submitted")
    # Those of the baseline were compared all the same.
    assert (check.status, check.meaning) == (
        "NOT CHECKED",
        "6 of 17 preparations count the model as submitted; of 36 rows 0 needed slack; of 3 of them the organizer gave up an evaluation, as"
        " the evaluator says, so that nothing was compared, the first of ada, tint, seed 11; that the model is the submitted one is the"
        " evaluator's word there",
    )


def test_predictions_of_what_was_given_up_are_named(playing: None, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rounds_made, "predict", lambda *key: nothing(PREDICT(*key)) if key[2] == "tint" else PREDICT(*key)
        )
        made = rounds_made.make(tmp_path / "round")
    report = verify.verify(made.write(tmp_path / "bundle"), log_key=made.signer.vkey)
    (failed,) = report.failed
    assert (failed.name, failed.where) == ("predictions", "predictions/ada/direct-size-none.parquet, row 0")
    assert "says that the evaluation was given up" in failed.meaning


PREDICT = rounds_made.predict


# ---- stories ----------------------------------------------------------------------------------------------------------


def said_of(story: stories.Story, bundle: Path) -> str:
    audit = Audit(Bundle(bundle), None, (), bundle)
    audit.competition, audit.round = story.state.competition, story.state
    with pytest.raises(NotChecked) as caught:
        audits.honest(audit)
    return caught.value.reason


def test_each_doubt_of_the_drawn_re_runs_is_told(bundle: Path) -> None:
    rules = stories.competition(audits='audits = 2\nauditor = "lab"\naudit_tolerance = 0.01')

    def drawn(*given_up: int, hardware: str = "cpu") -> stories.Story:
        """A round of two drawn preparations, of which these are given up: which ones they are is known once they are drawn."""
        story = stories.until(Phase.CLOSED, rules)
        plan = story.state.preparation_plan()
        for key in plan:
            if given_up and key in plan[: len(plan) if len(given_up) == 2 else given_up[0]]:
                story.prepare(key, drop="prepared candidates selected", failed=FAILURE)
            else:
                story.prepare(key, hardware=hardware)
        return story.finish("PreparationFinished").draw()

    def audited(story: stories.Story, **changes: object) -> stories.Story:
        for key in story.state.drawn or ():
            lost = "failed" in story.state.prepared[key].fields
            story.audit(key, **({"prepared": None, **NOT_MADE} if lost else {"hardware": "cpu", **changes}))
        return story

    every = audited(drawn(0, 1))
    assert said_of(every, bundle).startswith("2 of 2 drawn preparations (") and said_of(every, bundle).endswith(
        "; no other was drawn"
    )
    # They keep no share.
    assert every.release(1).state.released
    for count in range(1, 12):
        story = drawn(count, hardware="abacus")
        lost = sum("failed" in story.state.prepared[key].fields for key in story.state.drawn or ())
        if lost == 1:
            break
    near = audited(story, prepared=stories.digest("near"), hardware="cpu", tolerance=0.01)
    told = said_of(near, bundle)
    assert "1 of 2 drawn preparations" in told and "the other 1 were made again by lab: 1 by a validation nll" in told
    assert "agrees by a validation nll only" in told and "'abacus'" in told


def test_a_re_run_of_what_was_given_up_may_agree_by_failing_and_not_by_a_model() -> None:
    story = stories.until(Phase.CLOSED, stories.competition(audits='audits = 10000\nauditor = "lab"'))
    lost = story.state.preparation_plan()[0]
    story.prepare(lost, drop="prepared candidates selected", failed=FAILURE)
    story.prepare_all().finish("PreparationFinished").draw()
    stories.refuses("guard_failed", story.audit, lost)
    assert story.audit(lost, prepared=None, **NOT_MADE).state.audited[lost]["agrees"]


# ---- an entry that is made again --------------------------------------------------------------------------------------


@pytest.fixture
def work(bundle: Path, tmp_path: Path) -> Iterator[bundle_rerun._Work]:
    with checks._audit(bundle, log_key=None, witnesses=()) as audit:
        checks._go_through(audit, checks.CHECKS)
        (entry,) = [entry for entry in audit.round.entries if entry.entrant == "bea"]
        yield bundle_rerun._Work(audit, entry, ModelFiles({}), RerunFolder(tmp_path / "shop"))


def test_an_entry_made_again_tells_what_was_given_up_and_how_the_rest_did(work: bundle_rerun._Work) -> None:
    for key in work.left():
        first = work.audit.round.prepared[work.entry.submission, *key]
        work._preparation(first, Remade(first["prepared"], hardware="cpu/x86_64"), where=work._where(*key))
    with pytest.raises(NotChecked) as caught:
        work.verdict("bea")
    assert caught.value.reason == (
        "preparation of bea, size, seed 13: given up by the round's organizer, as the evaluator says, and not made again here; bea: 5 equal"
    )


def test_what_is_false_of_the_rest_fails_all_the_same(work: bundle_rerun._Work) -> None:
    key = ("tint", 11)
    first = work.audit.round.prepared[work.entry.submission, *key]
    with pytest.raises(Failed):
        work._preparation(first, Remade(None, failed="it diverged", hardware="cpu/x86_64"), where="bea, tint, seed 11")


def test_an_entry_all_of_whose_evaluations_were_given_up_has_none_made_again(
    work: bundle_rerun._Work, tmp_path: Path
) -> None:
    (entry,) = [entry for entry in work.audit.round.entries if entry.entrant == "ada"]
    ada = dataclasses.replace(work, entry=entry, given_up=[])
    # No prepared model is at hand, and the direct evaluations were given up: nothing is left to do.
    assert ada._evaluations({}) == 0
    assert ada.given_up == ["evaluation of ada, tint, direct", "evaluation of ada, size, direct"]
    with pytest.raises(
        NotChecked, match="evaluation of ada, tint, direct and 1 others: given up by the round's organizer"
    ):
        ada.verdict("ada: 0 preparations and 0 evaluations")


# ---- where its reason is shown ----------------------------------------------------------------------------------------


def test_a_report_of_the_bundle_says_whose_work_was_given_up(bundle: Path) -> None:
    (read,) = report_data.read(bundle, options={})
    assert f"bea: 1 preparation {WHY}" in read.notes and f"ada: 2 evaluations {WHY}" in read.notes
    assert len(set(read.notes)) == len(read.notes)
    page, _ = report_page.make([read], title="One")
    assert f"ada: 2 evaluations {WHY}" in html.unescape(page)
    # Whoever ranks its scores is told the same.
    named, _ = item_sources.opened(bundle, {})
    assert f"bea: 1 preparation {WHY}" in named.notes
    one = item_sources.of_bundle(bundle)
    named, _ = item_sources.chosen([one, dataclasses.replace(one, name="other", given_up=())], "two", (), {})
    assert f"{one.name}: bea: 1 preparation {WHY}" in named.notes


def test_mlflow_alone_says_whose_work_was_given_up_as_the_bundle_does(tmp_path: Path) -> None:
    data = projected.made(entrants={"ada": 0.9, "bea": 0.5, "cal": 0.3}, examples=6, losses=2, failed="bea")
    lost = [s for s in data.stages if s.kind == "evaluate" and (s.entrant, s.protocol) == ("ada", "direct")]
    failed = {stage.key: {"reason": WHY, "given_up": True} for stage in lost}
    failed |= {s.key: {"reason": WHY, "given_up": True} for s in data.stages if s.document.get("failed")}
    assert len(failed) == 3
    stages = tuple(
        dataclasses.replace(stage, document={**stage.document, "failed": failed[stage.key]})
        if stage.key in failed
        else stage
        for stage in data.stages
    )
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracking.publish_round(uri, tmp_path / "artifacts", dataclasses.replace(data, stages=stages))
    found = acclimate.load_rounds(uri, "digits")
    assert found.given_up.to_dict("records") == [
        {"round": data.name, "entrant": "ada", "work": "evaluation", "reason": WHY, "count": 2},
        {"round": data.name, "entrant": "bea", "work": "preparation", "reason": WHY, "count": 1},
    ]
    assert any(note.startswith(f"{data.name}: preparations and evaluations that the organizer") for note in found.notes)
    said = {f"ada: 2 evaluations {WHY}", f"bea: 1 preparation {WHY}"}
    (read,) = report_data.read(found, options={})
    assert said <= set(read.notes) and len(set(read.notes)) == len(read.notes)
    page, _ = report_page.make([read], title="One")
    assert all(sentence in html.unescape(page) for sentence in said)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name(f"acclimate/digits/{data.name}")
    assert len(client.search_runs([experiment.experiment_id], "tags.`acclimate.given_up` = 'true'")) == 3
    named, _ = item_sources.opened(found, {})
    assert said <= set(named.notes)


def test_a_round_in_mlflow_of_which_nothing_was_given_up_says_nothing_of_it(tmp_path: Path) -> None:
    data = projected.made(entrants={"ada": 0.9, "bea": 0.5}, examples=4, losses=2, failed="bea")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracking.publish_round(uri, tmp_path / "artifacts", data)
    found = acclimate.load_rounds(uri, "digits")
    assert found.given_up.empty and not [note for note in found.notes if "gave up" in note]


@pytest.mark.parametrize("private", [False, True])
def test_mlflow_has_the_reason_of_an_evaluation_that_was_given_up(private: bool) -> None:
    data = projected.made(entrants={"amber-fox": 0.5}, examples=4, losses=2)
    if private:
        round_ = dataclasses.replace(data.competition.round, holdout_after="private")
        data = dataclasses.replace(data, competition=dataclasses.replace(data.competition, round=round_))
    one, other, *_ = [stage for stage in data.stages if stage.kind == "evaluate"]
    failures = {one.key: {"reason": WHY, "given_up": True}, other.key: {"reason": "its predictions can't be used: …"}}
    stages = tuple(
        dataclasses.replace(stage, document={"count": 4, "failed": failures[stage.key]})
        if stage.key in failures
        else stage
        for stage in data.stages
    )
    runs = {run.key: run for run in projection.whole(dataclasses.replace(data, stages=stages))}
    assert runs[one.key].tags["acclimate.reason"] == WHY
    assert [key for key, run in runs.items() if "acclimate.given_up" in run.tags] == [one.key]
    # Any other may tell of a private holdout's examples.
    assert ("acclimate.reason" in runs[other.key].tags) is not private
    assert [key for key, run in runs.items() if "acclimate.reason" in run.tags and key not in failures] == []
