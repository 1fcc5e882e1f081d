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
