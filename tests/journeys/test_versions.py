"""Results that are judged again: a new version beside the old one, from the same predictions; both stay, and a stranger recomputes both."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_bundles
import pyarrow.parquet as pq
import pytest
import revised_rounds
import rounds_made
from cli_world import CUSTODIANS, World, kinds, new_round, person, world
from commands import Run, done, refused
from sqlalchemy import select

import acclimate
from acclimate import client as actors
from acclimate import projection, report_data, verify
from acclimate.publisher import gather
from acclimate.store import log_entries
from acclimate_competitions import definition, digests

__all__ = ["world"]


def published(acclimate: Run, world: World) -> str:
    """A round that nobody enters: the null predictor stands alone, and has scores by the holdout's targets."""
    round_id = new_round(acclimate, world)
    world.tick(round_id, hours=2)
    for name in CUSTODIANS[:2]:
        done(acclimate("custodian", "release", round_id, "--keys", world.root / "people" / name))
    assert world.tick(round_id, seconds=1) == ["HoldoutOpened", "EvaluationFinished"]
    done(acclimate("round", "publish", round_id, "--keys", person(acclimate, world, "organizer", "organizer")))
    return round_id


def corrected(world: World, path: Path) -> dict[str, str]:
    """A correction file: of the first task the guess of the null predictor becomes right for one more example."""
    competition = definition.load(world.competition)
    task = competition.tasks[0]
    rows = pq.read_table(world.competition / "splits" / task.name / "preparation.parquet")["target"].to_pylist()
    guess = max(task.choices, key=rows.count)
    holdout = pq.read_table(world.competition / "splits" / task.name / "holdout.parquet").to_pylist()
    wrong = next(row for row in holdout if row["target"] != guess)
    path.write_text(json.dumps({"targets": {task.name: {wrong["example"]: guess}}}))
    return {"task": task.name, "example": wrong["example"], "target": guess}


def test_a_ranking_is_revised_and_both_versions_stay(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = published(acclimate, world)
    me, file = world.root / "people" / "organizer", tmp_path / "wrong.json"
    what = corrected(world, file)
    first = done(acclimate("ranking", round_id, "--server", world.url, "--json"))
    assert first.err == ""
    command = ("round", "revise", round_id, "--correction", file, "--reason", "a wrong label", "--keys", me, "--json")
    shown = done(acclimate(*command, "--dry-run")).json
    assert shown["index"] is None and kinds(world, round_id)[-1] == "RankingPublished"
    ran = done(acclimate(*command))
    (change,) = ran.json["changes"]
    assert change["entrant"] == "majority" and change["score"] > change["score_before"]
    assert kinds(world, round_id)[-1] == "RankingRevised"
    # Once more: the same version, not another one.
    assert done(acclimate(*command)).json["index"] == ran.json["index"]
    assert kinds(world, round_id).count("RankingRevised") == 1
    with actors.Client(world.url) as client:
        found = client.versions(round_id)
        assert [one["version"] for one in found] == [1, 2]
        assert found[1]["corrected"]["targets"] == {what["task"]: {what["example"]: what["target"]}}
        assert found[1]["changes"] == ran.json["changes"] and found[1]["correction"] == ran.json["correction"]
        assert client.ranking(round_id, version=1) == first.json
        assert digests.of_json(client.ranking(round_id)) == ran.json["ranking"] == found[1]["ranking"]
        state = client.round(round_id)
        assert (state["versions"], state["ranking"]) == (2, ran.json["ranking"])
        report = client.report(round_id, tmp_path / "report.html").read_text("utf-8")
        bundle = client.bundle(round_id, tmp_path / "bundle.zip")
        key = client.server()["log"]
    newest = acclimate("ranking", round_id, "--server", world.url)
    assert "version 2 of 2" in newest.err and "a wrong label" in newest.err
    old = done(acclimate("ranking", round_id, "--server", world.url, "--version", 1, "--json")).json
    assert old == first.json
    refused(acclimate("ranking", round_id, "--server", world.url, "--version", 3, "--json"), "not_found")
    listed = done(acclimate("round", "versions", round_id, "--server", world.url)).out
    assert "version 2, in force" in listed and "majority" in listed
    assert "Version 2" in report and "a wrong label" in report and "What this version changed" in report
    checks = {check.name: check for check in verify.verify(bundle, log_key=key).checks}
    assert [check for check in checks.values() if check.status == "FAILED"] == []
    assert checks["versions"].status == "ok"
    assert checks["versions"].where.startswith("2 versions; in force is version 2: a wrong label; version 2 with ")
    assert checks["published"].where.startswith("version 2,")
    # What goes to MLflow has both: the newest on a step of its own, above the older one's.
    data = gather(world.store, world.settings, round_id)
    assert data.revision == 1 and [old.ranking for old in data.older] == [first.json]
    (parent,) = [planned for planned in projection.whole(data) if planned.parent is None]
    steps = {step: value for name, value, step in parent.metrics if name == "test/accuracy"}
    assert steps == {0: pytest.approx(change["score_before"]), 1: pytest.approx(change["score"])}
    assert parent.tags["acclimate.version"] == projection.experiment_tags(data)["acclimate.version"] == "2"


@pytest.mark.slow
def test_who_may_not_revise_and_what_can_not_be_revised(acclimate: Run, world: World, tmp_path: Path) -> None:
    me, file = person(acclimate, world, "organizer", "organizer"), tmp_path / "wrong.json"
    what = corrected(world, file)
    early = new_round(acclimate, world)
    options = ("--correction", file, "--reason", "why", "--json")
    refused(acclimate("round", "revise", early, *options, "--keys", me), "phase_wrong")
    round_id = published(acclimate, world)
    b = world.root / "people" / CUSTODIANS[1]
    refused(acclimate("round", "revise", round_id, *options, "--keys", b), "signature_invalid")
    for text, why in (
        ('{"targets": {"digit": {"no-such": "d1"}}}', "no example 'no-such'"),
        ('{"labels": {}}', "and nothing else"),
        ("{}", "corrects nothing"),
    ):
        file.write_text(text)
        assert why in refused(acclimate("round", "revise", round_id, *options, "--keys", me), "correction_invalid")
    file.write_text(json.dumps({"targets": {what["task"]: {what["example"]: what["target"]}}}))
    blank = ("round", "revise", round_id, "--correction", file, "--reason", "", "--keys", me, "--json")
    refused(acclimate(*blank), "name_invalid")
    with world.store.snapshot() as tx:
        types = tx.execute(select(log_entries.c.type).where(log_entries.c.round == round_id)).scalars().all()
    assert "RankingRevised" not in types


# ---- a stranger's audit --------------------------------------------------------------------------------------------


def revised(tmp_path: Path) -> tuple[rounds_made.Made, Path]:
    """A revised round and its bundle."""
    played = revised_rounds.play(tmp_path / "made")
    return played.made, played.write(tmp_path / "bundle")


def test_a_stranger_recomputes_every_version(tmp_path: Path) -> None:
    made, bundle = revised(tmp_path)
    report = verify.verify(bundle, log_key=made.signer.vkey)
    assert not report.failed
    checks = {check.name: check for check in report.checks}
    changed = "version 2 with 1 targets changed and 1 examples void"
    assert checks["versions"].where == f"2 versions; in force is version 2: mislabelled; {changed}"
    assert checks["ranking"].status == checks["published"].status == "ok"
    # Scores by example are judged by the correction, and whoever reads them is told so.
    assert any("revised" in note for note in acclimate.rank(items=bundle, missing="exclude")["notes"])
    (found,) = report_data.read(bundle, options={})
    assert any("revised" in note for note in found.notes)


def change(name: str, edit: Callable[[dict], Any]) -> Callable[[Path], None]:
    def apply(bundle: Path) -> None:
        value = json.loads((bundle / name).read_bytes())
        edit(value)
        (bundle / name).write_bytes(digests.canonical(value))

    return apply


@pytest.mark.parametrize(
    ("tamper", "check", "where"),
    [
        (change("versions/1/ranking.json", lambda v: v["ranking"][0].update(score=1.0)), "versions", "versions/1/ranking.json"),
        (change("versions/2/correction.json", lambda v: v["void"].clear()), "ranking", "versions/2/correction.json"),
        (lambda b: (b / "versions/2/correction.json").unlink(), "ranking", "versions/2/correction.json"),
        (lambda b: (b / "versions/1/ranking.json").unlink(), "versions", "versions/1/ranking.json"),
        (lambda b: (b / "versions/1/correction.json").write_bytes(b"{}"), "versions", "versions/1/correction.json"),
        (lambda b: (b / "ranking.json").write_bytes((b / "versions/1/ranking.json").read_bytes()), "published", ""),
    ],
    ids=["older ranking", "correction", "no correction", "no older", "a file too many", "the older one in force"],
)  # fmt: skip
def test_a_bundle_whose_versions_are_others_fails(
    tamper: Callable[[Path], Any], check: str, where: str, tmp_path: Path
) -> None:
    _, bundle = revised(tmp_path)
    tamper(bundle)
    made_bundles.mend(bundle)
    failed = {found.name: found.where for found in verify.verify(bundle).failed}
    assert check in failed and where in failed[check]


def test_a_file_of_versions_stands_in_no_bundle_without_a_revision(tmp_path: Path) -> None:
    bundle = rounds_made.make(tmp_path / "made").write(tmp_path / "bundle")
    assert "versions" not in {check.name for check in verify.verify(bundle).checks}
    (bundle / "versions" / "1").mkdir(parents=True)
    (bundle / "versions" / "1" / "ranking.json").write_bytes(b"{}")
    made_bundles.mend(bundle)
    assert [(c.name, c.where) for c in verify.verify(bundle).failed] == [("versions", "versions/1/ranking.json")]
