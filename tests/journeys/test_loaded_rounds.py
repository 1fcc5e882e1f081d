"""`acclimate.load_rounds`: several rounds of a competition as tables, from MLflow alone."""

import contextlib
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from projected import made

import acclimate
from acclimate import tracking
from acclimate.tracking import RoundData
from acclimate_competitions import ranking, tables
from acclimate_competitions.errors import Refusal

SKILL = {"amber-fox": 0.9, "blue-whale": 0.6, "cat": 0.4, "untrained": 0.1}
NAMES = ("2027-1", "2027-2", "2027-3")


def other_recipe(data: RoundData) -> RoundData:
    preparation = replace(data.competition.preparation, epochs=data.competition.preparation.epochs + 1)
    return replace(data, competition=replace(data.competition, preparation=preparation))


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three rounds: the second without one entrant, the third by another recipe."""
    folder = tmp_path_factory.mktemp("rounds")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    for name in NAMES:
        skill = {entrant: able for entrant, able in SKILL.items() if (entrant, name) != ("cat", "2027-2")}
        data = replace(made(entrants=skill, examples=30, losses=5), name=name, round=f"digits-{name}-0123456789ab")
        tracking.publish_round(uri, folder / "artifacts", other_recipe(data) if name == "2027-3" else data)
    return uri


@pytest.mark.parametrize("read", [tracking.ranking, tracking.scores, tracking.preparations])
def test_each_table_is_that_of_the_single_rounds_under_each_other(uri: str, read: Callable[..., object]) -> None:
    import pandas

    found = acclimate.load_rounds(uri, "digits")
    singles = [read(uri, "digits", name) for name in NAMES]
    for name, single in zip(NAMES, singles, strict=True):
        single.insert(0, "round", name)  # type: ignore[attr-defined]
    pandas.testing.assert_frame_equal(getattr(found, read.__name__), pandas.concat(singles, ignore_index=True))


def test_examples_are_those_of_the_single_rounds_and_can_be_narrowed(uri: str) -> None:
    found = acclimate.load_rounds(uri, "digits")
    examples = found.examples(protocol="prepared", task="prime")
    assert list(dict.fromkeys(examples["round"])) == list(NAMES)
    one = tracking.examples(uri, "digits", "2027-2", protocol="prepared", task="prime")
    assert examples[examples["round"] == "2027-2"].drop(columns="round").reset_index(drop=True).equals(one)
    assert list(found.examples(rounds=["2027-3"], entrant="cat")["round"].unique()) == ["2027-3"]
    with pytest.raises(Refusal, match="no round '1999'"):
        found.examples(rounds=["1999"])


def test_rounds_are_described_and_another_recipe_is_noted(uri: str) -> None:
    found = acclimate.load_rounds(uri, "digits")
    assert list(found.rounds["round"]) == list(NAMES)
    assert list(found.rounds["entries"]) == [3, 2, 3]
    assert found.rounds["ranked"].all()
    assert found.rounds["recipe_digest"].nunique() == 2
    recipes, examples, models = found.notes
    assert recipes == "not all rounds have the same recipe, which makes each another question: 2027-1, 2027-2; 2027-3"
    assert examples == "each round has a holdout of its own: scores of different rounds are of different examples"
    assert models.startswith("entrants that all of these rounds have: ")
    some = acclimate.load_rounds(uri, "digits", ["digits-2027-2-0123456789ab", "2027-1"])
    assert list(some.rounds["round"]) == ["2027-2", "2027-1"]
    assert not [note for note in some.notes if "recipe" in note]
    assert list(dict.fromkeys(some.ranking["round"])) == ["2027-2", "2027-1"]


def test_unknown_rounds_and_competitions_are_refused_with_what_there_is(uri: str) -> None:
    with pytest.raises(Refusal, match="no round '2028-1' of competition 'digits'") as caught:
        acclimate.load_rounds(uri, "digits", ["2027-1", "2028-1"])
    assert (caught.value.code, caught.value.hint) == ("round_unknown", "there are '2027-1', '2027-2', '2027-3'")
    with pytest.raises(Refusal, match="no round is asked for"):
        acclimate.load_rounds(uri, "digits", [])
    with pytest.raises(Refusal, match="no round of competition 'letters'") as caught:
        acclimate.load_rounds(uri, "letters")
    assert (caught.value.code, caught.value.hint) == ("round_unknown", "it has rounds of: digits")


def test_a_revised_round_has_the_scores_of_its_newest_version_and_says_so(tmp_path: Path) -> None:
    uri, data = f"sqlite:///{tmp_path / 'mlflow.db'}", replace(made(entrants=SKILL, examples=20, losses=0), stages=())
    tracking.publish_round(uri, tmp_path / "artifacts", data)
    assert not [note for note in acclimate.load_rounds(uri, "digits").notes if "revised" in note]
    assert data.scores is not None
    # Judged the other way round: right is wrong, so that the last one is the first.
    rows = [{**row, "score": 1.0 - row["score"]} for row in data.scores.to_pylist()]
    scores = pa.Table.from_pylist(rows, schema=tables.SCORES)
    names = [entry.entrant for entry in data.entries]
    ranked = ranking.rank(scores, tasks=data.competition.tasks, policy=data.competition.ranking, entrants=names)
    tracking.publish_round(
        uri, tmp_path / "artifacts", replace(data, scores=scores, ranking=ranked.document(), revision=1)
    )
    found = acclimate.load_rounds(uri, "digits")
    (said,) = [note for note in found.notes if "revised" in note]
    assert said.startswith("the ranking of 2027-1 was revised: ranking and scores by example are of version 2")
    by_examples = acclimate.rank(items=found)
    assert said in by_examples["notes"]
    published = {row["entrant"]: (row["rank"], row["score"]) for row in ranked.document()["ranking"]}
    for row in by_examples["ranking"]:
        assert (row["rank"], row["score"]) == (
            published[row["entrant"]][0],
            pytest.approx(published[row["entrant"]][1]),
        )
    assert by_examples["ranking"][0]["entrant"] == "cat"


def test_a_round_without_a_ranking_is_noted(tmp_path: Path) -> None:
    data = made(entrants={"amber-fox": 0.5}, examples=5, losses=3)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracking.publish_preparations(uri, tmp_path / "artifacts", replace(data, scores=None, ranking=None))
    found = acclimate.load_rounds(uri, "digits")
    assert found.notes == ("without a published ranking yet: 2027-1",)
    assert (len(found.ranking), len(found.scores), len(found.examples())) == (1, 0, 0)
    assert len(found.preparations) == 6


def test_a_changed_point_of_a_curve_is_named(tmp_path: Path) -> None:
    data = made(entrants={"amber-fox": 0.5}, examples=5, losses=3)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracking.publish_round(uri, tmp_path / "artifacts", data)
    assert tracking.check(uri, data) == []
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        connection.execute("UPDATE metrics SET value = 9 WHERE key = 'train/loss' AND step = 1")
        connection.commit()
    found = tracking.check(uri, data)
    assert [(one.kind, one.what) for one in found] == [("changed", ("curve train/loss",))] * 6
