"""Numbers and names in other programs' results that are none."""

import json

import foreign
import pytest

import acclimate
from acclimate import foreign_results
from acclimate_competitions.errors import Refusal


def test_half_of_a_character_in_a_name_is_refused_with_the_name(tmp_path):
    own = foreign.lm_eval(tmp_path, "org/x", {"arc": [1, 0]})
    samples = next(own.glob("samples_*.jsonl"))
    samples.write_text(samples.read_text().replace('"doc_hash": "arc-0"', '"doc_hash": "\\ud800"'))
    for ask in (lambda: acclimate.rank(items=tmp_path, metric="acc"), lambda: foreign_results.items(tmp_path)):
        with pytest.raises(Refusal) as caught:
            ask()
        assert caught.value.code == "scores_invalid"
        assert caught.value.problems == ("cluster '\\ud800'",)


def test_a_number_that_is_none_and_a_name_that_is_a_path_are_told(tmp_path):
    own = foreign.lm_eval(tmp_path, "org/x", {"arc": [1, 0]})
    path = next(own.glob("results_*.json"))
    document = json.loads(path.read_text())
    document["results"]["arc"]["acc,none"] = 10**400
    document["results"]["../arc"] = document["n-samples"]["../arc"] = {"acc,none": 0.5}
    path.write_text(json.dumps(document))
    assert any("arc acc" in note for note in foreign_results.means(tmp_path).notes)
    assert any("../arc" in note for note in foreign_results.items(tmp_path).notes)


ODD = ["\\ud800", "a\\u0000b", "\\u202eback", "\\u001b[31mred"]
"""In JSON: half of a character, NUL, a direction mark, a terminal's escape."""
EVER = """{"schema_version": "0.3.0", "evaluation_id": "IDENTITY", "model_info": {"id": "MODEL"}, "evaluation_results": [
 {"evaluation_name": "TASK", "metric_config": {"metric_id": "METRIC", "lower_is_better": true}, "score_details": {"score": 0.5}},
 {"evaluation_name": "TASK", "metric_config": {"metric_id": "other"}, "score_details": {"score": "NONE"}}],
 "detailed_evaluation_results": {"file_path": "FILE.jsonl", "hash_algorithm": "sha256", "checksum": "CHECKSUM"}}"""
SAMPLE = """{"evaluation_id": "IDENTITY", "evaluation_name": "TASK", "sample_id": "SAMPLE", "sample_hash": "HASH", "evaluation": {"score": 1},
 "metadata": {"seed": "SEED", "cluster": "CLUSTER"}}""".replace("\n", "")


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("word", "IDENTITY MODEL TASK METRIC FILE CHECKSUM SAMPLE HASH SEED CLUSTER".split())
def test_no_name_from_a_file_is_shown_but_quoted_nor_ends_in_a_traceback(word, odd, tmp_path):
    whole = word == "CHECKSUM"
    (tmp_path / "one.json").write_text((EVER if whole else EVER.replace("sha256", "none")).replace(word, odd))
    # Of one number not the same example, once, so that what can't be told apart is told.
    other = SAMPLE.replace("HASH", "ANOTHER")
    (tmp_path / "FILE.jsonl").write_text(f"{SAMPLE}\n{other}\n".replace(word, odd))
    (tmp_path / "two.json").write_text((EVER if whole else EVER.replace("sha256", "none")).replace(word, odd))
    for read in (foreign_results.items, foreign_results.means):
        try:
            said = "\n".join(read(tmp_path).notes)
        except Refusal as refused:
            said = "\n".join([refused.sentence, *refused.problems, refused.hint or ""])
        assert said
        assert not set("\ud800\0\u202e\x1b") & set(said), said
