"""MLflow's copy of a round that is written again: no value of a version before is left to be taken for the newest, and nobody reads two at once."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from projected import made
from typer.testing import CliRunner

import acclimate
from acclimate import tracked_state, tracking
from acclimate.cli.main import app
from acclimate.round_data import RoundData, Version
from acclimate_competitions import ranking
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal

SKILL = {"ant": 0.9, "bee": 0.4}


def by_loss(data: RoundData) -> RoundData:
    """The second version: judged by log loss, the first one behind it."""
    assert data.scores is not None and data.ranking is not None
    old = data.competition
    tasks = tuple(replace(task, metric="log_loss") for task in old.tasks)
    competition: Competition = replace(old, tasks=tasks)
    rows = data.scores.filter(pc.equal(data.scores["metric"], old.tasks[0].metric))
    place = rows.schema.get_field_index("metric")
    scores = rows.set_column(place, rows.schema.field("metric"), pa.array(["log_loss"] * len(rows), pa.string()))
    names = [entry.entrant for entry in data.entries]
    ranked = ranking.rank(scores, tasks=tasks, policy=old.ranking, entrants=names).document()
    first = Version(old, data.scores, data.ranking)
    return replace(data, competition=competition, scores=scores, ranking=ranked, revision=1, older=(first,))


@pytest.fixture
def revised(tmp_path: Path) -> tuple[str, RoundData]:
    uri, data = f"sqlite:///{tmp_path / 'mlflow.db'}", replace(made(entrants=SKILL, examples=4, losses=0), stages=())
    tracking.publish_round(uri, tmp_path / "artifacts", data)
    newer = by_loss(data)
    tracking.publish_round(uri, tmp_path / "artifacts", newer)
    return uri, newer


def again(data: RoundData) -> RoundData:
    """One more version, with the ranking of the one before."""
    assert data.scores is not None and data.ranking is not None
    before = Version(data.competition, data.scores, data.ranking)
    return replace(data, revision=data.revision + 1, older=(*data.older, before))


def latest(uri: str) -> set[str]:
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as connection:
        query = "SELECT DISTINCT m.key FROM latest_metrics m JOIN runs r USING (run_uuid) WHERE r.lifecycle_stage = 'active'"
        return {key for (key,) in connection.execute(query)}


def test_a_metric_that_a_revision_replaced_is_in_no_run(revised: tuple[str, RoundData], tmp_path: Path) -> None:
    uri, data = revised
    assert not [key for key in latest(uri) if "accuracy" in key]
    assert any(key.startswith("test/log_loss") for key in latest(uri))
    assert tracking.check(uri, data) == []
    found = acclimate.load_rounds(uri, "digits")
    assert set(found.scores["metric"]) == {"log_loss"}
    assert found.ranking["score"].notna().all()
    # Runs that were superseded stand among the deleted ones, and say what they are.
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as connection:
        rows = connection.execute(
            "SELECT r.lifecycle_stage FROM runs r JOIN tags t USING (run_uuid) WHERE t.key = 'acclimate.superseded'"
        ).fetchall()
    assert rows and set(rows) == {("deleted",)}
    again = len(list((tmp_path / "artifacts").rglob("*")))
    tracking.publish_round(uri, tmp_path / "artifacts", data)
    assert len(list((tmp_path / "artifacts").rglob("*"))) == again


@pytest.mark.slow
def test_a_value_of_the_version_before_is_seen_by_check(revised: tuple[str, RoundData]) -> None:
    uri, data = revised
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as connection:
        (run,) = connection.execute(
            "SELECT run_uuid FROM latest_metrics JOIN runs USING (run_uuid) "
            "WHERE key = 'rank/rank' AND lifecycle_stage = 'active'"
        ).fetchone()
        connection.execute("INSERT INTO latest_metrics VALUES ('test/accuracy', 0.5, 0, 0, 0, ?)", (run,))
    assert [one.what for one in tracking.check(uri, data)] == [("metric test/accuracy",)]


@pytest.mark.slow
def test_a_score_that_a_revision_made_unknown_is_not_the_old_one(tmp_path: Path) -> None:
    uri, data = f"sqlite:///{tmp_path / 'mlflow.db'}", replace(made(entrants=SKILL, examples=4, losses=0), stages=())
    assert data.scores is not None and data.ranking is not None
    tracking.publish_round(uri, tmp_path / "artifacts", data)
    unknown = [row | {"score": None, "se": None} for row in data.ranking["ranking"]]
    first = Version(data.competition, data.scores, data.ranking)
    newer = replace(data, ranking={**data.ranking, "ranking": unknown}, revision=1, older=(first,))
    tracking.publish_round(uri, tmp_path / "artifacts", newer)
    frame = tracking.ranking(uri, "digits", "2027-1")
    assert frame[~frame["baseline"]]["score"].isna().all()
    assert tracking.check(uri, newer) == []


@pytest.mark.slow
def test_while_a_round_is_written_nobody_reads_two_versions(
    revised: tuple[str, RoundData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_state, "_PAUSE", 0.01)
    uri, data = revised
    before = acclimate.load_rounds(uri, "digits")
    said: list[str] = []

    def look(done: int, total: int) -> None:
        if done > 1:
            return
        for read in (
            lambda: acclimate.load_rounds(uri, "digits"),
            lambda: tracking.ranking(uri, "digits", "2027-1"),
            lambda: tracking.examples(uri, "digits", "2027-1"),
            before.examples,
        ):
            with pytest.raises(Refusal, match=r"written anew just now.*2027-1") as caught:
                read()
            said.append(caught.value.code)
        (wrong,) = [one.what for one in tracking.check(uri, data) if one.run == "experiment"]
        assert "acclimate.written" in wrong

    third = again(data)
    tracking.publish_round(uri, tmp_path / "artifacts", third, progress=look)
    assert set(said) == {"busy"}
    found = acclimate.load_rounds(uri, "digits")
    assert len(found.examples()) == len(before.scores) * 4
    with pytest.raises(Refusal, match="written anew"):
        before.examples()


@pytest.mark.slow
def test_a_writing_that_was_broken_off_is_refused_until_it_is_completed(
    revised: tuple[str, RoundData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_state, "_PAUSE", 0.01)
    uri, data = revised
    third = again(data)

    def die(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tracking.publish_round(uri, tmp_path / "artifacts", third, progress=die)
    words = ["rank", "--tracking-uri", uri, "--competition", "digits"]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, Refusal)
    assert "acclimate mlflow sync completes it" in refused.exception.hint
    tracking.publish_round(uri, tmp_path / "artifacts", third)
    assert tracking.check(uri, third) == []
    assert CliRunner().invoke(app, words).exit_code == 0
