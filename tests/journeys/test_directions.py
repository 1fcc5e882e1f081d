"""A table whose column `metric` names a metric of ours is ranked in that metric's direction, and a note says so."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas
import pytest
import rounds_made

import acclimate
from acclimate import exporting, report_data
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
