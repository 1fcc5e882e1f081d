"""A round whose tasks have metrics of different scales: ranked by win rates, verified, and shown in a report."""

import json
import re
from pathlib import Path

import pytest
import rounds_made
from marbles import DEFINITION
from typer.testing import CliRunner

import acclimate
from acclimate import projection, verify
from acclimate.cli.main import app
from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal

NLL = DEFINITION.replace('metric = "accuracy"\nchance = 0.5', 'metric = "nll"\nchance = 0.69')
MIXED = NLL.replace('aggregate = "mean"\nmissing = "worst"', 'aggregate = "win_rate"\nmissing = "exclude"')


def test_a_mean_over_metrics_of_two_scales_is_refused_with_a_way_out() -> None:
    with pytest.raises(Refusal) as refusal:
        definition.parse(NLL.encode())
    (problem,) = refusal.value.problems
    assert "tasks[1].metric" in problem and "win_rate" in problem
    both = NLL.replace('aggregate = "mean"', 'aggregate = "means"')
    with pytest.raises(Refusal) as refusal:
        definition.parse(both.encode())
    assert ["ranking.aggregate" in problem for problem in refusal.value.problems] == [True]


def test_its_bundle_is_verified_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_made, "DEFINITION", MIXED)
    made = rounds_made.make(tmp_path / "round")
    bundle = made.write(tmp_path / "bundle")
    report = verify.verify(bundle, log_key=made.signer.vkey)
    assert report.exit_code == 0, report
    published = json.loads((bundle / "ranking.json").read_text("utf-8"))
    assert published["policy"]["aggregate"] == "win_rate"
    scores = [row["score"] for row in published["ranking"]]
    known = [score for score in scores if score is not None]
    assert len(known) >= 2 and known == sorted(known, reverse=True) == scores[: len(known)]
    assert {row["se"] for row in published["ranking"]} == {None}
    assert projection.overall_metric(made.competition) == "win_rate"  # the name of its score in MLflow
    # A published ranking that was altered is found.
    published["ranking"][0]["score"] = 0.125
    (bundle / "ranking.json").write_text(json.dumps(published), "utf-8")
    assert verify.verify(bundle, log_key=made.signer.vkey).exit_code != 0
    bundle = made.write(tmp_path / "again")
    done = CliRunner().invoke(app, ["report", str(bundle), "-o", str(tmp_path / "report.html"), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["rounds"][0]
    assert [row["score"] for row in told["sections"]["ranks"]["numbers"]["ranking"]] == scores
    assert any("several metrics" in note for note in told["notes"]), told["notes"]
    done = CliRunner().invoke(
        app, ["report", str(bundle), "-o", str(tmp_path / "size.html"), "--tasks", "size", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert not any("several metrics" in note for note in json.loads(done.stdout)["rounds"][0]["notes"])


@pytest.mark.parametrize("metric", ["log_loss", "brier"])
def test_a_round_by_a_loss_is_ranked_the_least_first_and_verified(
    metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r'metric = "accuracy"\nchance = [0-9.]+\n', f'metric = "{metric}"\n', DEFINITION)
    monkeypatch.setattr(rounds_made, "DEFINITION", text)
    made = rounds_made.make(tmp_path / "round")
    assert {task.metric for task in made.competition.tasks} == {metric}
    bundle = made.write(tmp_path / "bundle")
    report = verify.verify(bundle, log_key=made.signer.vkey)
    assert report.exit_code == 0, report
    published = json.loads((bundle / "ranking.json").read_text("utf-8"))
    scores = [row["score"] for row in published["ranking"]]
    assert scores == sorted(scores) and "majority" in {row["entrant"] for row in published["baselines"]}
    # An analyst's commands know the direction, and what a missing score costs.
    found = acclimate.rank(items=bundle, missing="worst")
    assert [row["entrant"] for row in found["ranking"]] == [row["entrant"] for row in published["ranking"]]
    assert [row["score"] for row in found["ranking"]] == pytest.approx(scores)
    assert any(f"lower is better, as of the metric: '{metric}'" in note for note in found["notes"])
