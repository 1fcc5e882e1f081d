"""Scores by example from the bundle of a round whose ranking was revised."""

import json
from pathlib import Path

import made_bundles
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import revised_rounds
from typer.testing import CliRunner

import acclimate
from acclimate.cli.main import app
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal


def command(*words: object) -> tuple[int, dict[str, object], str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(done.exception, Refusal):
        return 1, {}, f"{done.exception.code}: {done.exception.sentence}"
    return done.exit_code, json.loads(done.stdout) if done.exit_code == 0 else {}, done.output


def test_a_bundle_of_a_revised_round_is_ranked_as_its_ranking_in_force_is(tmp_path: Path) -> None:
    played = revised_rounds.play(tmp_path / "round")
    played.write(tmp_path / "bundle")
    worst = ("--missing", "worst")
    for words in (
        ("rank", *worst),
        ("stability", *worst),
        ("export", "--format", "parquet", "--out", tmp_path / "out"),
    ):
        code, found, output = command(words[0], *words[1:], "--bundle", tmp_path / "bundle", "--json")
        assert code == 0, output
        notes = found["notes"]
        assert isinstance(notes, list)
        assert any("the ranking was revised; it and scores by example are of version 2" in note for note in notes), (
            notes
        )
    # The second version was computed by a third hand: its scores are those of the scores by example.
    newest, first = played.made.ranking, played.first
    ranked = acclimate.rank(items=tmp_path / "bundle", missing="worst")
    published = {row["entrant"]: row["score"] for row in newest["ranking"]}
    assert {row["entrant"]: row["score"] for row in ranked["ranking"]} == pytest.approx(published, abs=1e-12)
    assert {row["entrant"]: row["score"] for row in first["ranking"]} != published
    (void,) = played.correction["void"]["tint"]
    exported = pq.read_table(tmp_path / "out/examples.parquet")
    assert void not in exported.filter(pc.equal(exported["task"], "tint"))["example"].to_pylist()


def test_a_bundle_whose_correction_is_another_than_the_logs_is_refused(tmp_path: Path) -> None:
    played = revised_rounds.play(tmp_path / "round")
    folder = played.write(tmp_path / "bundle")
    path = folder / "versions/2/correction.json"
    path.write_bytes(digests.canonical({**played.correction, "void": {}}))
    made_bundles.mend(folder)
    code, _, output = command("rank", "--bundle", folder)
    assert code == 1 and "bundle_invalid" in output and "the log's version 2 names" in output
    path.unlink()
    made_bundles.mend(folder)
    code, _, output = command("rank", "--bundle", folder)
    assert code == 1 and "bundle_invalid" in output and "versions/2/correction.json" in output
