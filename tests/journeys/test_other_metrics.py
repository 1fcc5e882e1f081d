"""A round's bundle by another metric than its ranking's, and entrants of whom nothing was scored."""

import json
from pathlib import Path
from typing import Any

import made_bundles
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import revised_rounds
import rounds_made

import acclimate
from acclimate import item_sources, report_data
from acclimate_competitions import metrics
from acclimate_competitions.errors import Refusal
from acclimate_competitions.metrics import MAJORITY


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    rounds_made.make(folder / "made").write(folder / "bundle")
    return folder / "bundle"


def by_hand(made: rounds_made.Made, metric: str) -> dict[str, float]:
    """entrant -> its mean over tasks, where it has scores in all of them: by the round's own scorer, not through the bundle."""
    found: dict[str, list[float]] = {}
    for task in made.competition.tasks:
        own: dict[tuple[str, int], list[float]] = {}
        for name, table in made.predictions.items():
            if f"-{task.name}-" in name and "prepared" in table["protocol"].to_pylist():
                scored = metrics.score_predictions(table, made.holdout[task.name], task, cluster=None, metric=metric)
                for row in scored.to_pylist():
                    own.setdefault((row["entrant"], row["seed"]), []).append(row["score"])
        by_seed: dict[str, list[float]] = {}
        for (entrant, _), values in own.items():
            by_seed.setdefault(entrant, []).append(sum(values) / len(values))
        for entrant, means in by_seed.items():
            found.setdefault(entrant, []).append(sum(means) / len(means))
    return {name: sum(values) / len(values) for name, values in found.items()}


def test_a_bundle_is_ranked_by_any_metric_that_its_predictions_allow(tmp_path: Path) -> None:
    made = rounds_made.make(tmp_path / "made")
    bundle = made.write(tmp_path / "bundle")
    for metric in ("log_loss", "brier", "nll"):
        found = acclimate.rank(items=bundle, metric=metric, missing="exclude")
        expected = {name: score for name, score in by_hand(made, metric).items() if name not in ("untrained", MAJORITY)}
        ranked = {row["entrant"]: row["score"] for row in found["ranking"]}
        lacking = {rounds_made.FAILED[0]}
        assert ranked.keys() | lacking == expected.keys() | lacking
        for name in ranked.keys() - lacking:
            assert ranked[name] == pytest.approx(expected[name], abs=1e-9)
        scores = [row["score"] for row in found["ranking"]]
        assert scores == sorted(scores), "the least is the best"
        assert any(f"{metric} is computed from the predictions of round" in note for note in found["notes"])
        assert f"lower is better, as of the metric: {metric!r}" in found["notes"]


def test_the_ranking_s_own_metric_stays_what_it_was(bundle: Path) -> None:
    own = acclimate.rank(items=bundle, missing="worst")
    assert acclimate.rank(items=bundle, missing="worst", metric="accuracy")["ranking"] == own["ranking"]
    assert not [note for note in own["notes"] if "is computed from the predictions" in note]


def test_an_unknown_metric_is_refused_with_those_that_there_are_and_how_to_get_them(bundle: Path) -> None:
    with pytest.raises(Refusal) as refused:
        acclimate.rank(items=bundle, metric="bleu")
    hint = str(refused.value.hint)
    assert "there are 'accuracy'; from its predictions 'acc_norm', 'brier', 'log_loss', 'nll' can be computed" in hint
    scored = item_sources.of_bundle(bundle)
    elsewhere = item_sources.Round("2027-1", scored.scores, scored.metrics, scored.baselines)
    with pytest.raises(Refusal) as refused:
        item_sources.chosen([elsewhere], "MLflow", (), {"metric": "nll"})
    assert "--bundle PATH --metric NAME" in str(refused.value.hint)


def test_a_revised_round_is_judged_by_another_metric_with_its_correction(tmp_path: Path) -> None:
    played = revised_rounds.play(tmp_path / "round")
    folder = played.write(tmp_path / "bundle")
    (void,) = played.correction["void"]["tint"]
    scores = item_sources.of_bundle(folder, metric="brier").scores
    assert scores is not None
    judged = scores.filter(pc.equal(scores["metric"], "brier"))
    tint = judged.filter(pc.equal(judged["task"], "tint"))
    assert len(tint) and void not in tint["example"].to_pylist()


def test_a_report_of_a_bundle_takes_another_metric(bundle: Path) -> None:
    (found,) = report_data.read(bundle, options={"metric": "log_loss", "missing": "exclude"})
    assert found.lower
    assert "ranks are those of acclimate rank by what was chosen, not the published ones" in found.notes


def test_an_entrant_without_any_score_is_named_and_never_left_out_in_silence(tmp_path: Path) -> None:
    made = rounds_made.make(tmp_path / "made")
    bundle = made.write(tmp_path / "bundle")
    lacking, task, _ = rounds_made.FAILED
    for path in [*(bundle / "scores").rglob("*.parquet")]:
        table = pq.read_table(path)
        of = pc.and_(pc.equal(table["entrant"], lacking), pc.equal(table["protocol"], "prepared"))
        pq.write_table(table.filter(pc.invert(of)), path)
    made_bundles.mend(bundle)
    calls: list[dict[str, Any]] = [{}, {"tasks": [task]}]
    for options in calls:
        found = acclimate.rank(items=bundle, **options)
        assert lacking not in {row["entrant"] for row in found["ranking"]}
        said = [note for note in found["notes"] if "left out, as without any score in round" in note]
        assert len(said) == 1 and repr(lacking) in said[0], found["notes"]
    ranking = json.loads((bundle / "ranking.json").read_text("utf-8"))["ranking"]
    assert lacking in {row["entrant"] for row in ranking}
    direct = acclimate.rank(items=bundle, protocol="direct")
    assert not [note for note in direct["notes"] if "without any score" in note]
