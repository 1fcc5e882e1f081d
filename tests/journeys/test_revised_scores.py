"""Scores by example from the bundle of a round whose ranking was revised."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import made_bundles
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import revised_rounds
import rounds_made
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


def spoiled(played: revised_rounds.Revised, folder: Path, spoil: Callable[[Path], object]) -> str:
    """What `rank` says of a bundle that somebody changed and gave a MANIFEST that fits."""
    played.write(folder)
    spoil(folder)
    made_bundles.mend(folder)
    code, _, output = command("rank", "--bundle", folder, "--missing", "worst")
    assert code == 1 and output.startswith("bundle_invalid"), output
    return output


def rewritten(path: Path, edit: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(edit(pq.read_table(path)), path)


FIRST = "predictions/ada/direct-size-none.parquet"


def test_a_bundle_of_which_something_is_gone_or_changed_is_not_ranked_by_what_is_left(tmp_path: Path) -> None:
    played = revised_rounds.play(tmp_path / "round")

    def said(name: str, spoil: Callable[[Path], object]) -> str:
        return spoiled(played, tmp_path / name, spoil)

    assert f"{FIRST}: the file is missing" in said("one gone", lambda folder: (folder / FIRST).unlink())
    assert "the file is missing" in said("all gone", lambda folder: shutil.rmtree(folder / "predictions"))
    assert "its digest is" in said("fewer", lambda folder: rewritten(folder / FIRST, lambda table: table.slice(0, 5)))
    other = "predictions/ada/direct-size-7.parquet"
    assert f"{other}: the log has no such evaluation" in said(
        "more", lambda folder: shutil.copy(folder / FIRST, folder / other)
    )
    assert "scores/bea.parquet: the file is missing" in said(
        "no scores", lambda folder: (folder / "scores/bea.parquet").unlink()
    )
    assert "scores/bob.parquet: the round has no such entry" in said(
        "more scores", lambda folder: shutil.copy(folder / "scores/bea.parquet", folder / "scores/bob.parquet")
    )
    assert "ranking.json: it has" in said(
        "another ranking", lambda folder: shutil.copy(folder / "versions/1/ranking.json", folder / "ranking.json")
    )


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("holdout/tint.parquet", "example"),
        ("holdout/tint.parquet", "cluster"),
        ("public/splits/tint/preparation.parquet", "target"),
    ],
)
def test_a_split_that_lacks_a_column_is_no_traceback(name: str, column: str, tmp_path: Path) -> None:
    played = revised_rounds.play(tmp_path / "round")
    lacking = spoiled(
        played, tmp_path / "a", lambda folder: rewritten(folder / name, lambda table: table.drop_columns([column]))
    )
    assert f"{name}: it must have one column {column!r}" in lacking
    garbage = spoiled(played, tmp_path / "b", lambda folder: (folder / name).write_bytes(b"x"))
    assert f"{name}: not a Parquet table" in garbage


@pytest.mark.parametrize(("field", "value"), [("task", "nope"), ("submission", 999)])
def test_an_evaluation_of_what_the_round_does_not_have_is_no_traceback(
    field: str, value: object, tmp_path: Path
) -> None:
    played = revised_rounds.play(tmp_path / "round")

    def spoil(folder: Path) -> None:
        path = folder / "entries.jsonl"
        lines = path.read_bytes().splitlines()
        at = next(place for place, line in enumerate(lines) if b'"ModelEvaluated"' in line)
        lines[at] = digests.canonical(json.loads(lines[at]) | {field: value})
        path.write_bytes(b"\n".join(lines) + b"\n")

    assert "log entry" in (output := spoiled(played, tmp_path / "bundle", spoil)) and str(value) in output


def test_a_bundle_of_a_round_that_was_not_revised_is_ranked_by_all_of_its_scores_too(tmp_path: Path) -> None:
    folder = rounds_made.make(tmp_path / "round").write(tmp_path / "bundle")
    assert command("rank", "--bundle", folder, "--missing", "worst", "--json")[0] == 0
    (folder / "scores/bea.parquet").unlink()
    made_bundles.mend(folder)
    code, _, output = command("rank", "--bundle", folder, "--missing", "worst")
    assert code == 1 and "scores/bea.parquet: the file is missing" in output
