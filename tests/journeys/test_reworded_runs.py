"""What an older version wrote in other words is told apart from what was changed since."""

import json
from pathlib import Path

import mlflow
import pytest
from projected import made

from acclimate import projection, tracking
from acclimate.cli import results


@pytest.mark.parametrize("before", ["no predictions (an older version's words)", None])
def test_a_run_with_an_older_versions_words_is_reworded_and_one_that_was_altered_is_changed(
    before: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = made(entrants={"ada": 0.9, "bea": 0.5}, examples=6, losses=2)
    failed = [stage for stage in data.stages if stage.kind == "evaluate"][:2]
    for stage in failed:
        stage.document["failed"] = {"reason": "its predictions can't be scored", "log": "sha256:" + "0" * 64}
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with monkeypatch.context() as older:
        older.setattr(projection, "_why", lambda data, stage: before if "failed" in stage.document else None)
        tracking.publish_round(uri, tmp_path / "artifacts", data)
    found = tracking.check(uri, data)
    assert [each.kind for each in found] == ["reworded"] * 2
    assert {each.what for each in found} == {("tag acclimate.reason", "content digest")}
    # Somebody alters one of them, and leaves the digest.
    mlflow.MlflowClient(uri).set_tag(found[0].run_id, "acclimate.reason", "it was good")
    kinds = {each.run_id: each.kind for each in tracking.check(uri, data)}
    assert kinds == {found[0].run_id: "changed", found[1].run_id: "reworded"}
    rows = {"rounds": [{"round": "r", "differences": [each.document() for each in tracking.check(uri, data)]}]}
    told = list(results._lines(json.loads(json.dumps(rows)), "agrees"))
    assert any(line.startswith("  reworded ") for line in told) and "an older version wrote it" in told[-1]
