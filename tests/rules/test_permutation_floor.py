"""The number of random flips sets the least p that the permutation test can give; `acclimate compare` says so."""

import numpy as np
import pandas
from typer.testing import CliRunner

import acclimate
from acclimate.analysis_options import FLIPS, MOST_FLIPPED, flips
from acclimate.cli.main import app


def scored(entrants: int, examples: int = 30, *, apart: float = 0.1) -> pandas.DataFrame:
    """Entrants that are certainly apart, with scores that are no two alike."""
    random = np.random.default_rng(5)
    rows = [
        {"entrant": f"e{place:02}", "example": str(one), "score": 0.5 + apart * place + random.normal(0, 0.01)}
        for place in range(entrants)
        for one in range(examples)
    ]
    return pandas.DataFrame(rows)


def test_a_p_at_the_floor_is_said_to_be_that(tmp_path):
    path = tmp_path / "items.csv"
    scored(2).to_csv(path, index=False)
    found = acclimate.compare("e01", "e00", items=path)
    assert found["permutation_p"] == found["permutation_least_p"] == 1 / (FLIPS + 1)
    note = "the permutation test flips the signs at random, 9,999 times: its p is never below 0.0001"
    assert note in found["notes"]
    done = CliRunner().invoke(app, ["compare", "e01", "e00", "--items", str(path)])
    assert f"note: {note}" in done.output
    assert "comes with probability 0.0001 or less." in done.output


def test_a_p_that_is_counted_or_above_the_floor_has_no_note():
    few = acclimate.compare("e01", "e00", items=scored(2, examples=10))
    assert few["permutation_least_p"] is None
    near = acclimate.compare("e01", "e00", items=scored(2, apart=0.0))
    assert near["permutation_p"] > near["permutation_least_p"]
    assert not [note for found in (few, near) for note in found["notes"] if "flips" in note]


def test_many_pairs_are_flipped_so_often_that_they_can_be_told_apart():
    found = acclimate.compare(items=scored(34, examples=15))
    assert len(found["pairs"]) == 561
    assert all(row["permutation_p_holm"] <= 0.05 for row in found["pairs"])
    assert not [note for note in found["notes"] if "by Holm" in note]


def test_what_so_few_flips_can_never_show_is_said():
    found = acclimate.compare(items=scored(4), draws=99)
    assert min(row["permutation_p_holm"] for row in found["pairs"]) > 0.05
    (note,) = [note for note in found["notes"] if "by Holm" in note]
    assert note.startswith("over 6 pairs no p of it is below 0.06 by Holm, so that it can't show that any pair differs")


def test_flips_of_thousands_of_pairs_end():
    assert flips({}, 100, 1) == FLIPS
    assert flips({}, 100, 1_000) == 200_000
    many = flips({}, 10_000, 20_000)
    assert many * 10_000 * 20_000 <= max(MOST_FLIPPED, FLIPS * 10_000 * 20_000)
    assert flips({"draws": 7}, 10_000, 20_000) == 7
