"""`rank`, `compare` and `stability` of predictions by the metrics of `measures`, with what those say themselves."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import acclimate
from acclimate.cli.main import app
from acclimate_competitions import measures
from acclimate_competitions.errors import Refusal

LABELS = ("a", "b", "c")
NAMES = ("ann", "bob", "cy")


def drawn(*, sets=("s", "t"), examples=60, form="loglikelihoods"):
    """Log-likelihoods of three entrants of falling ability, as rows of a long table."""
    random = np.random.default_rng(4)
    rows = []
    for task in sets:
        targets = random.choice(LABELS, examples)
        for place, name in enumerate(NAMES):
            for item, target in enumerate(targets):
                logs = random.normal(size=3) + np.array([label == target for label in LABELS]) * (2.5 - place)
                row = {"entrant": name, "task": task, "example": f"{task}{item}", "cluster": f"{task}{item // 2}", "target": str(target)}  # fmt: skip
                p = measures.softmax(logs.tolist())
                if form == "loglikelihoods":
                    row |= {"choices": list(LABELS), "loglikelihoods": logs.tolist()}
                elif form == "p":
                    row |= {f"p:{label}": one for label, one in zip(LABELS, p, strict=True)}
                else:
                    row |= {"prediction": LABELS[int(np.argmax(logs))]}
                rows.append(row)
    return rows


def of(rows, name, task):
    return [row for row in rows if (row["entrant"], row["task"]) == (name, task)]


@pytest.mark.parametrize("metric", measures.OF_CHOICE)
def test_scores_and_errors_are_those_of_the_metric_itself(metric):
    rows = drawn(sets=("s",))
    found = acclimate.rank(items=pa.Table.from_pylist(rows), metric=metric)
    for row in found["ranking"]:
        own = of(rows, row["entrant"], "s")
        expected = measures.of_choice(
            metric, [one["loglikelihoods"] for one in own], [one["target"] for one in own],
            choices=LABELS, clusters=[one["cluster"] for one in own],
        )  # fmt: skip
        assert row["score"] == pytest.approx(expected.value, abs=1e-12)
        assert row["se"] == pytest.approx(expected.se, rel=1e-9)
    assert [row["entrant"] for row in found["ranking"]][-1] == "cy" or metric == "ece"
    scores = [row["score"] for row in found["ranking"]]
    assert scores == sorted(scores, reverse=measures.MEASURES[metric].direction == "max")
    assert any("higher is better" in note or "lower is better" in note for note in found["notes"])
    assert any("pseudo-values" in note for note in found["notes"]) != measures.MEASURES[metric].mean


@pytest.mark.parametrize(("metric", "form"), [("log_loss", "p"), ("macro_f1", "prediction"), ("brier", "p")])
def test_each_form_of_predictions_gives_the_same(metric, form, tmp_path):
    whole = acclimate.rank(items=pa.Table.from_pylist(drawn()), metric=metric)
    path = tmp_path / "items.csv"
    rows = drawn(form=form)
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines), "utf-8")
    words = ["--items", str(path), "--metric", metric, "--json"]
    done = CliRunner().invoke(app, ["rank", *words], catch_exceptions=False)
    assert [row["entrant"] for row in json.loads(done.stdout)["ranking"]] == list(NAMES)
    for one, other in zip(json.loads(done.stdout)["ranking"], whole["ranking"], strict=True):
        assert one["score"] == pytest.approx(other["score"])
    done = CliRunner().invoke(app, ["compare", "ann", "cy", *words], catch_exceptions=False)
    pair = json.loads(done.stdout)
    assert (pair["difference"] > 0) == (measures.MEASURES[metric].direction == "max")
    assert pair["permutation_p"] < 0.05
    done = CliRunner().invoke(app, ["stability", *words], catch_exceptions=False)
    sets = json.loads(done.stdout)["sets"]
    assert [[row["entrant"] for row in sets[name]["ranking"]][0] for name in ("s", "t")] == ["ann", "ann"]


def test_missing_predictions_are_counted_and_cost_what_is_declared():
    rows = drawn(sets=("s",))
    rows[0]["loglikelihoods"] = None
    rows[1]["loglikelihoods"] = [0.0, math.nan, 0.0]
    table = pa.Table.from_pylist(rows)
    for metric in ("log_loss", "ece"):
        with pytest.raises(Refusal) as caught:
            acclimate.rank(items=table, metric=metric)
        assert "'ann': 2 of 60" in " ".join(caught.value.problems)
        found = acclimate.rank(items=table, metric=metric, missing="exclude")
        assert any("'ann': 2 of 60" in note for note in found["notes"])
        own = [one for one in of(rows, "ann", "s")[2:]]
        kept = measures.of_choice(
            metric, [one["loglikelihoods"] for one in own], [one["target"] for one in own], choices=LABELS
        )
        assert next(row for row in found["ranking"] if row["entrant"] == "ann")["score"] == pytest.approx(kept.value)
        with pytest.raises(Refusal):
            acclimate.rank(items=table, metric=metric, missing="worst")
    worst = acclimate.rank(items=table, metric="brier", missing="worst")
    assert any("counted as 2, the worst score" in note for note in worst["notes"])


def test_numbers_are_scored_by_what_no_mean_of_examples_gives():
    random = np.random.default_rng(2)
    rows = [
        {"entrant": name, "example": str(item), "target": float(item), "prediction": item + noise * random.normal()}
        for name, noise in (("ann", 1.0), ("bob", 30.0))
        for item in range(80)
    ]
    for metric in ("spearman", "rmse", "mae"):
        found = acclimate.rank(items=pa.Table.from_pylist(rows), metric=metric)
        assert [row["entrant"] for row in found["ranking"]] == ["ann", "bob"]
        own = [row for row in rows if row["entrant"] == "bob"]
        expected = measures.score(metric, [row["prediction"] for row in own], [row["target"] for row in own])
        assert found["ranking"][1]["score"] == pytest.approx(expected.value)
        assert found["ranking"][1]["se"] == pytest.approx(expected.se)


def test_what_a_metric_cannot_take_is_refused_and_scores_of_that_name_come_first():
    labels = pa.Table.from_pylist(drawn(form="prediction"))
    with pytest.raises(Refusal, match="log_loss takes probabilities"):
        acclimate.rank(items=labels, metric="log_loss")
    with pytest.raises(Refusal, match="rmse takes number"):
        acclimate.rank(items=pa.Table.from_pylist(drawn()), metric="rmse")
    with pytest.raises(Refusal, match="of which labels"):
        acclimate.rank(items=pa.Table.from_pylist(drawn()).drop_columns(["choices"]), metric="brier")
    with pytest.raises(Refusal, match="not whose"):
        acclimate.rank(items=pa.Table.from_pylist(drawn()).drop_columns(["entrant"]), metric="brier")
    scored = [{**row, "metric": "brier", "score": 0.5} for row in drawn()]
    assert acclimate.rank(items=pa.Table.from_pylist(scored), metric="brier")["ranking"][0]["score"] == 0.5
