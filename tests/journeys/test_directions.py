"""A table whose column `metric` names a metric of ours is ranked in that metric's direction, and a note says so."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas
import pytest
import rounds_made
from typer.testing import CliRunner

import acclimate
from acclimate import exporting, report_data
from acclimate.cli.main import app
from acclimate_competitions.errors import Refusal


def table(metric: str, *, more: str | None = None) -> pandas.DataFrame:
    """Losses: good is the best, with the least."""
    rows = []
    for place, name in enumerate(("good", "fair", "poor")):
        for task in ("s", "t"):
            for example in range(6):
                row = {"entrant": name, "task": task, "example": f"{task}{example}", "metric": metric}
                rows.append({**row, "score": 0.1 + place + example / 100})
                if more is not None and task == "s":
                    rows.append({**row, "metric": more, "score": 1 - place / 2})
    return pandas.DataFrame(rows)


def order(found: Any) -> list[str]:
    return [row["entrant"] for row in found["ranking"]]


@pytest.mark.parametrize("metric", ["nll", "log_loss", "rmse", "bits_per_byte"])
def test_losses_are_ranked_the_least_first(metric: str) -> None:
    frame = table(metric)
    found = acclimate.rank(items=frame)
    assert order(found) == ["good", "fair", "poor"]
    assert f"the table: lower is better, as of the metric: {metric!r}" in found["notes"]
    for one in acclimate.stability(items=frame)["sets"].values():
        assert order(one) == ["good", "fair", "poor"]
    pair = acclimate.compare("good", "poor", items=frame, alternative="greater")
    assert pair["permutation_p"] <= 0.05
    (read,) = report_data.read(frame, options={})
    assert read.lower and order(read.ranking) == ["good", "fair", "poor"]


def test_a_metric_that_is_not_known_or_where_more_is_better_stays_as_it_was() -> None:
    for metric in ("accuracy", "my_own"):
        found = acclimate.rank(items=table(metric))
        assert order(found) == ["poor", "fair", "good"]
        assert not [note for note in found["notes"] if "lower is better" in note]
    assert order(acclimate.rank(items=table("my_own"), lower_is_better=True)) == ["good", "fair", "poor"]


def test_of_two_metrics_the_one_that_is_chosen_says_the_direction() -> None:
    frame = table("nll", more="accuracy")
    with pytest.raises(Refusal, match="mixes 2 metrics"):
        acclimate.rank(items=frame)
    assert order(acclimate.rank(items=frame, metric="nll")) == ["good", "fair", "poor"]
    found = acclimate.rank(items=frame, metric="accuracy")
    assert order(found) == ["good", "fair", "poor"]
    assert not [note for note in found["notes"] if "lower is better" in note]
    only = acclimate.stability(items=frame, metric="accuracy")
    assert list(only["sets"]) == ["s"]
    assert order(acclimate.stability(items=frame, metric="nll", tasks=["t"])["sets"]["t"]) == ["good", "fair", "poor"]


def test_tables_of_means_go_by_their_metric_too() -> None:
    means = table("nll").groupby(["entrant", "task", "metric"], as_index=False)["score"].mean()
    ranked = acclimate.rank(means.assign(se=0.1), score="score", se="se", tasks=["s"])
    assert order(ranked) == ["good", "fair", "poor"]
    assert order(acclimate.compare(scores=means)) == ["good", "fair", "poor"]
    assert order(acclimate.rank(means, method="casp")) == ["good", "fair", "poor"]


LOSSES = {"good": 0.5, "fair": 1.5, "poor": 9.0}


def wide(columns: dict[str, float], *, m: int = 12) -> pandas.DataFrame:
    """Entrants of falling ability e00, e01, …; a column's number is its direction."""
    rows = range(m)
    values = {name: [sign * (1 + place + (place * 7 % 3) / 9) for place in rows] for name, sign in columns.items()}
    return pandas.DataFrame({"model": [f"e{place:02}" for place in rows], **values})


def test_a_column_that_is_called_as_a_loss_is_turned_and_said() -> None:
    frame = wide({"quiz": -1, "nll": 1, "wiki/perplexity": 1, "val_loss": 1})
    found = acclimate.stability({"t": frame})
    assert found["t"]["lower"] == ["nll", "wiki/perplexity"]
    assert found["t"]["tau_b"]["quiz"] == {"nll": 1.0, "wiki/perplexity": 1.0, "val_loss": -1.0}
    said = "t: lower is better in 'nll', 'wiki/perplexity', as of the metric; --lower says otherwise"
    asked = "t: 'val_loss' sounds like a loss: is lower better there (--lower)? They are taken as they stand"
    assert [note for note in found["notes"] if "lower" in note][:2] == [said, asked]
    for lower in (["nll"], "nll", []):
        by_word = acclimate.stability({"t": frame}, lower=lower)
        assert by_word["t"]["lower"] == (["nll"] if lower else [])
        (note,) = [note for note in by_word["notes"] if "is called as a loss" in note]
        assert "wiki/perplexity" in note and ("'nll'" in note) == (not lower)
    assert acclimate.stability({"t": frame}, lower="nll,wiki/perplexity,val_loss")["t"]["mean_tau_b"] == 1


def test_a_loss_below_zero_was_turned_before() -> None:
    found = acclimate.stability({"t": wide({"quiz": -1, "nll": -1})})
    assert (found["t"]["lower"], found["t"]["mean_tau_b"]) == ([], 1.0)
    assert any("all scores are below 0, so turned already" in note for note in found["notes"])


def test_the_winner_of_losses_is_who_has_the_least() -> None:
    one = wide({"s": 1, "t": 1}).melt("model", var_name="task", value_name="score").assign(metric="nll")
    other = one.assign(score=one["score"].where(one["model"] != "e11", 99.0))  # who is last anyway
    found = acclimate.stability({"one": one, "other": other})
    assert found["one"]["lower"] == found["other"]["lower"] == ["s", "t"]
    assert found["same_winner"] == 2
    moved = one.assign(score=one["score"].where(one["model"] != "e11", 0.0))
    assert acclimate.stability({"one": one, "other": moved})["same_winner"] == 0


def test_all_that_read_tables_of_means_turn_losses_alike() -> None:
    frame = pandas.DataFrame({"model": list(LOSSES), "perplexity": list(LOSSES.values()), "se": 0.1})
    found = acclimate.rank(frame, score="perplexity", se="se")
    assert order(found) == ["good", "fair", "poor"]
    assert any("lower is better in 'perplexity'" in note for note in found["notes"])
    assert order(acclimate.rank(frame, score="perplexity", se="se", lower_is_better=False)) == ["poor", "fair", "good"]
    turned = frame.assign(perplexity=-frame["perplexity"])
    assert order(acclimate.rank(turned, score="perplexity", se="se")) == ["good", "fair", "poor"]
    targets = pandas.DataFrame({"model": list(LOSSES), "quiz": [9.0, 5, 1], "rmse": list(LOSSES.values())})
    assert order(acclimate.compare(scores=targets)) == ["good", "fair", "poor"]
    casp = acclimate.rank(targets, method="casp")
    assert order(casp) == ["good", "fair", "poor"]
    assert any("lower is better in 'rmse'" in note for note in casp["notes"])


def test_a_command_says_that_higher_is_better(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table("nll").to_csv(path, index=False)
    first = {}
    for word in ("--lower-is-better", "--higher-is-better", "--json"):
        done = CliRunner().invoke(app, ["rank", "--items", str(path), word, "--json"])
        assert done.exit_code == 0, done.output
        first[word] = json.loads(done.stdout)["ranking"][0]["entrant"]
    assert first == {"--lower-is-better": "good", "--higher-is-better": "poor", "--json": "good"}


def test_results_that_say_that_lower_is_better_are_ranked_so(tmp_path: Path) -> None:
    for name, loss in LOSSES.items():
        folder = tmp_path / "out" / name
        folder.mkdir(parents=True)
        document = {
            "model_name": name,
            "results": {"odd": {"surprise,none": loss}, "odder": {"surprise,none": loss}},
            "configs": {},
            "higher_is_better": {"odd": {"surprise": False}, "odder": {"surprise": False}},
            "n-samples": {"odd": {}, "odder": {}},
        }
        (folder / "results_1.json").write_text(json.dumps(document), encoding="utf-8")
        for task in ("odd", "odder"):
            rows = [
                {"doc_id": n, "doc_hash": f"{task}{n}", "filter": "none", "metrics": ["surprise"], "surprise": loss + n}
                for n in range(4)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"samples_{task}_1.jsonl").write_text(text, encoding="utf-8")
    found = acclimate.rank(items=tmp_path / "out")
    assert order(found) == ["good", "fair", "poor"]
    assert any("lower is better, as of the metric: 'surprise'" in note for note in found["notes"])
    for one in acclimate.stability(items=[tmp_path / "out" / name for name in LOSSES])["sets"].values():
        assert order(one) == ["good", "fair", "poor"]
    means = acclimate.stability({"t": tmp_path / "out"})
    assert means["t"]["lower"] == ["odd", "odder"]
    assert order(acclimate.compare(scores=tmp_path / "out")) == ["good", "fair", "poor"]


def test_an_export_by_another_metric_read_back_gives_the_same_ranking(tmp_path: Path) -> None:
    bundle = rounds_made.make(tmp_path / "made").write(tmp_path / "bundle")
    options = {"metric": "log_loss"}
    exporting.export(bundle, tmp_path / "out", form="parquet", options=options, at=datetime.now(UTC))
    before = acclimate.rank(items=bundle, metric="log_loss", missing="exclude")
    after = acclimate.rank(items=tmp_path / "out/examples.parquet", protocol="prepared", missing="exclude")
    assert after["ranking"] == before["ranking"]
    assert (
        acclimate.rank(items=bundle, metric="log_loss", missing="worst")["ranking"]
        == (acclimate.rank(items=tmp_path / "out/examples.parquet", protocol="prepared", missing="worst")["ranking"])
    )
