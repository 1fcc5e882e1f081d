"""A round whose definition lets a missing score fail an entrant: published, verified, read and reported."""

import html
import json
from pathlib import Path

import pytest
import rounds_made

import acclimate
from acclimate import report_data, report_page, verify
from acclimate_competitions.errors import Refusal


def test_whoever_lacks_a_score_has_none_in_any_reading_of_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = rounds_made.DEFINITION.replace('missing = "worst"', 'missing = "fail"')
    assert definition != rounds_made.DEFINITION
    monkeypatch.setattr(rounds_made, "DEFINITION", definition)
    made = rounds_made.make(tmp_path / "made")
    bundle = made.write(tmp_path / "bundle")
    lacking = rounds_made.FAILED[0]

    report = verify.verify(bundle, log_key=made.signer.vkey)
    assert [check for check in report.checks if check.status == "FAILED"] == []

    ranking = json.loads((bundle / "ranking.json").read_text("utf-8"))["ranking"]
    scores = {row["entrant"]: row["score"] for row in ranking}
    assert scores[lacking] is None and all(score is not None for name, score in scores.items() if name != lacking)

    with pytest.raises(Refusal, match="scores are missing"):
        acclimate.rank(items=bundle)
    (read,) = report_data.read(bundle, options={})
    shown = {row["entrant"]: row["score"] for row in read.ranking["ranking"]}
    assert shown == scores
    page, _ = report_page.make([read], title="One")
    assert f"without a score, as one that is missing fails an entrant: {lacking!r}" in html.unescape(page)
