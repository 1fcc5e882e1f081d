"""Every Eval Ever, written and read: what its schema 0.3.0 asks for, and what samples say of themselves."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import acclimate
from acclimate import foreign_results
from acclimate.cli.main import app
from acclimate_competitions.errors import Refusal


def exported(items: Path, out: Path) -> list[str]:
    """The files that `acclimate export` writes."""
    words = ("export", "--items", items, "--format", "every-eval-ever", "--out", out, "--json")
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return list(json.loads(done.stdout)["files"])


def repeated(folder: Path) -> Path:
    """A table with seeds and clusters, of a loss, with an example that was not scored; names that are hard for files and lines."""
    rng = np.random.default_rng(2)
    lines = ["entrant,task,example,cluster,seed,metric,score"]
    for entrant in ("data", "org/zwei\u2028Zeilen", "con.x"):
        for example in range(12):
            for seed in (1, 2):
                score = "" if (entrant, example, seed) == ("data", 0, 1) else f"{rng.random():.6f}"
                lines.append(f"{entrant},arc,e{example},c{example // 3},{seed},log_loss,{score}")
    path = folder / "items.csv"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_every_eval_ever_keeps_seeds_clusters_metric_and_direction(tmp_path: Path) -> None:
    path, out = repeated(tmp_path), tmp_path / "eee"
    assert len(exported(path, out)) == 6
    options: Any = {"missing": "exclude", "lower_is_better": True}
    assert acclimate.rank(items=out, **options)["ranking"] == acclimate.rank(items=path, **options)["ranking"]
    for file in sorted(out.rglob("*.json")):
        document = json.loads(file.read_text())
        (result,) = document["evaluation_results"]
        config = result["metric_config"]
        assert (config["metric_id"], config["lower_is_better"]) == ("log_loss", True)
        assert (config["score_type"], config["min_score"]) == ("continuous", 0.0)
        assert result["score_details"]["uncertainty"]["num_samples"] == 12
        assert result["score_details"]["details"]["clusters"] == "4"


TOP = {
    "schema_version", "evaluation_id", "retrieved_timestamp", "source_metadata", "model_info", "eval_library",
    "evaluation_results", "detailed_evaluation_results",
}  # fmt: skip
SAMPLE = {
    "schema_version", "evaluation_id", "model_id", "evaluation_name", "evaluation_result_id", "sample_id",
    "interaction_type", "input", "output", "answer_attribution", "evaluation", "metadata",
}  # fmt: skip


def test_every_eval_ever_has_what_its_schema_asks_for_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "eee"
    exported(repeated(tmp_path), out)
    for file in sorted(out.rglob("*.json")):
        parts = file.relative_to(out).parts
        assert len(parts) == 5
        assert parts[0] == "data"
        assert not {part.partition(".")[0] for part in parts[1:4]} & {"data", "con"}
        document = json.loads(file.read_text())
        assert set(document) == TOP
        samples = document["detailed_evaluation_results"]
        assert samples["file_path"] == (file.relative_to(out).parent / f"{file.stem}_samples.jsonl").as_posix()
        # As the project's own check reads them: every mark that Python takes for the end of a line ends one.
        rows = [json.loads(line) for line in (out / samples["file_path"]).read_text().splitlines()]
        assert len(rows) == samples["total_rows"] == 24
        for row in rows:
            assert set(row) - {"error"} == SAMPLE
            assert (row["evaluation_id"], row["model_id"]) == (document["evaluation_id"], document["model_info"]["id"])
            assert all(isinstance(value, str) for value in row["metadata"].values())
            assert row["schema_version"] == document["schema_version"] == "0.3.0"
        unscored = [row for row in rows if "error" in row]
        assert len(unscored) == (1 if document["model_info"]["id"] == "data" else 0)


def evaluation(folder: Path, rows: list[dict[str, Any]], results: list[dict[str, Any]], **changed: Any) -> Path:
    """An evaluation with samples, as converters of Every Eval Ever leave them."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "f3a1c0de-4b2e-4c1a-9f6d-1b7e5a2c8d40"
    common = {"schema_version": "0.3.0", "evaluation_id": "demo/org_m/1", "model_id": "org/m"}
    data = "".join(json.dumps({**common, **row}) + "\n" for row in rows).encode()
    (folder / f"{name}_samples.jsonl").write_bytes(data)
    detailed = {"format": "jsonl", "file_path": f"data/demo/org/m/{name}_samples.jsonl", "hash_algorithm": "sha256"}
    detailed |= {"checksum": hashlib.sha256(data).hexdigest(), "total_rows": len(rows)}
    document = {"schema_version": "0.3.0", "evaluation_id": "demo/org_m/1", "model_info": {"id": "org/m"}}
    document |= {"evaluation_results": results, "detailed_evaluation_results": detailed | changed}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document))
    return path


def sample(number: int, score: float, **more: Any) -> dict[str, Any]:
    return {"evaluation_name": "arc", "sample_id": str(number), "evaluation": {"score": score}, **more}


def result(metric: str, **config: Any) -> dict[str, Any]:
    own = {"lower_is_better": False, "metric_id": metric, **config}
    return {"evaluation_name": "arc", "metric_config": own, "score_details": {"score": 0.5}}


def test_samples_that_are_not_those_of_their_evaluation_are_refused(tmp_path: Path) -> None:
    path = evaluation(tmp_path, [sample(0, 1.0)], [result("acc")], checksum="0" * 64)
    with pytest.raises(Refusal, match="but its evaluation says"):
        foreign_results.items(path)
    path = evaluation(tmp_path, [sample(0, 1.0, evaluation_id="another")], [result("acc")])
    with pytest.raises(Refusal, match="a sample of 'another'"):
        foreign_results.items(path)


def test_samples_keep_what_they_say_of_repetitions_directions_and_the_unknown(tmp_path: Path) -> None:
    rows = [sample(0, score, metadata={"epoch": str(epoch)}) for epoch, score in ((1, 2.0), (2, -1.0))]
    levels = {"score_type": "levels", "level_names": ["a", "b", "c"], "has_unknown_level": True}
    found = foreign_results.items(evaluation(tmp_path, rows, [result("grade", lower_is_better=True, **levels)]))
    assert found.table["seed"].to_pylist() == ["", "2"]
    assert found.table["score"].to_pylist() == [2.0, None]
    assert any("lower is better in 'arc grade'" in note for note in found.notes)


def test_samples_that_do_not_say_of_which_metric_they_are_get_none(tmp_path: Path) -> None:
    found = foreign_results.items(evaluation(tmp_path, [sample(0, 1.0)], [result("acc"), result("acc_norm")]))
    assert found.table["metric"].to_pylist() == ["score"]
    assert any("isn't told ('acc', 'acc_norm')" in note for note in found.notes)


def test_an_evaluation_without_samples_is_named_beside_others(tmp_path: Path) -> None:
    evaluation(tmp_path / "one", [sample(0, 1.0)], [result("acc")])
    path = evaluation(tmp_path / "other", [sample(0, 1.0)], [result("acc")])
    document = json.loads(path.read_text()) | {"model_info": {"id": "org/n"}}
    del document["detailed_evaluation_results"]
    path.write_text(json.dumps(document))
    assert any("'org/n, arc'" in note for note in foreign_results.items(tmp_path).notes)
