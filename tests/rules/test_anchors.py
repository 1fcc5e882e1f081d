"""Anchors in a definition: what they must say, and what is wrong with each that does not."""

import pytest
import tiny

from acclimate_competitions import anchors, definition
from acclimate_competitions.errors import Refusal

DIGEST = "sha256:" + "ab" * 32
WITH = tiny.DEFINITION.replace('baselines = ["majority"]', 'baselines = ["majority", "untrained"]')
TRUE = f'name = "untrained"\nmodel = "{DIGEST}"\n'


def parsed(*tables: str) -> definition.Competition:
    return definition.parse((WITH + "".join(f"\n[[anchors]]\n{table}" for table in tables)).encode())


def test_anchors_are_baselines_with_a_model_and_the_null_predictor_without() -> None:
    found = parsed(TRUE, 'name = "majority"\n')
    assert found.anchors == (anchors.Anchor("untrained", DIGEST), anchors.Anchor("majority", None))
    assert found.anchor("untrained").model == DIGEST and found.anchor("ada") is None
    assert found.effective()["anchors"] == [{"name": "untrained", "model": DIGEST}, {"name": "majority", "model": None}]
    assert parsed().anchors == () and parsed().origins["anchors"] == "default"


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('name = "ada"\nmodel = "' + DIGEST + '"\n', "an anchor is one of ranking.baselines"),
        ('name = "untrained"\n', "needs `model`"),
        ('name = "untrained"\nmodel = "sha256:1"\n', "64 lower-case hex digits"),
        (f'name = "majority"\nmodel = "{DIGEST}"\n', "which has no model"),
        ('name = "majority"\nweight = 1\n', "not a known key"),
        (f'model = "{DIGEST}"\n', "name is missing"),
    ],
)
def test_an_anchor_that_says_too_little_or_too_much_is_a_problem_with_its_line(table: str, why: str) -> None:
    with pytest.raises(Refusal) as caught:
        parsed(table)
    (problem,) = caught.value.problems
    assert why in problem and problem.startswith("line ")


def test_an_anchor_stands_once() -> None:
    with pytest.raises(Refusal) as caught:
        parsed(TRUE, TRUE)
    assert "the name of another anchor" in caught.value.problems[0]
