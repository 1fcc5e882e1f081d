"""`acclimate gap`: the smallest difference that a round's size can tell, against numbers of textbooks and a plain count."""

import itertools
import json
import math

import numpy as np
import pandas
import pytest
from scipy import stats
from typer.testing import CliRunner

import acclimate
from acclimate.cli.main import app
from acclimate_competitions import resolution
from acclimate_competitions.errors import Refusal


def pilot(*, seeds: int = 1, wobble: float = 0.0, entrants: int = 5, examples: int = 200) -> pandas.DataFrame:
    random = np.random.default_rng(11)
    ease = random.normal(0, 1, examples)
    rows = []
    for place, seed in itertools.product(range(entrants), range(seeds)):
        moved = random.normal(0, wobble) if wobble else 0.0
        for one in range(examples):
            value = 0.1 * place + ease[one] + moved + random.normal(0, 0.5)
            rows.append({"entrant": f"e{place}", "seed": seed, "example": str(one), "score": value})
    return pandas.DataFrame(rows)


def test_the_critical_value_is_that_of_the_largest_of_all_differences() -> None:
    assert resolution.critical(2, 0.95) == pytest.approx(1.96, abs=0.005)
    assert resolution.critical(20, 0.95) == pytest.approx(3.55, abs=0.01)
    assert resolution.critical(50, 0.95) == pytest.approx(4.0, abs=0.01)


def test_without_a_pilot_the_worst_case_of_right_and_wrong_counts() -> None:
    found = acclimate.gap(entrants=2, examples=400, difference=0.05)
    errors = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    assert found["gap"] == pytest.approx(errors * math.sqrt(0.5 / 400), rel=1e-4)
    assert found["examples_needed"] == math.ceil(0.5 * (errors / 0.05) ** 2)
    assert found["floor"] is None
    assert any("without a pilot" in note for note in found["notes"])


def test_so_far_apart_entrants_are_told_as_often_as_said() -> None:
    found = acclimate.gap(entrants=6, examples=300)
    random = np.random.default_rng(3)
    p, told, draws = 0.5 + found["gap"] / 2, 0, 2_000
    for _ in range(draws):
        apart = (random.random(300) < p).astype(float) - (random.random(300) < 1 - p)
        told += apart.mean() / (apart.std(ddof=1) / math.sqrt(300)) > found["critical"]
    assert told / draws == pytest.approx(0.8, abs=0.04)


def test_a_pilot_gives_the_variance_of_paired_differences() -> None:
    frame = pilot()
    wide = frame.pivot(index="example", columns="entrant", values="score")
    each = [(wide[one] - wide[other]).var(ddof=1) for one, other in itertools.combinations(wide.columns, 2)]
    found = acclimate.gap(frame)
    assert found["variance"] == pytest.approx(np.mean(each))
    assert (found["entrants"], found["examples"], found["seeds"], found["floor"]) == (5, 200, 1, None)
    # Twice as close takes four times as many examples.
    assert acclimate.gap(frame, examples=800)["gap"] == pytest.approx(found["gap"] / 2)
    needed = acclimate.gap(frame, difference=found["gap"])["examples_needed"]
    assert abs(needed - 200) <= 1


def test_seeds_set_a_floor_that_no_number_of_examples_lowers() -> None:
    frame = pilot(seeds=12, wobble=0.3)
    found = acclimate.gap(frame)
    assert math.sqrt(found["seed_variance"]) == pytest.approx(0.3, abs=0.1)
    far = acclimate.gap(frame, examples=10**9)
    assert far["gap"] == pytest.approx(far["floor"], rel=1e-3) and far["floor"] == pytest.approx(found["floor"])
    assert acclimate.gap(frame, seeds=48)["floor"] == pytest.approx(found["floor"] / 2)
    assert acclimate.gap(frame, difference=found["floor"] * 0.9)["examples_needed"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "how many entrants?"),
        ({"entrants": 5}, "how many examples?"),
        ({"entrants": 1, "examples": 5}, "1 entrants"),
        ({"entrants": 3, "examples": 0}, "0 examples"),
        ({"entrants": 3, "examples": 9, "power": 1.0}, "a power of 1.0"),
        ({"entrants": 3, "examples": 9, "level": 0.0}, "a level of confidence of 0.0"),
        ({"entrants": 3, "examples": 9, "difference": 0.0}, "a difference of 0.0"),
    ],
)
def test_what_is_no_size_is_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(Refusal) as refused:
        acclimate.gap(**options)  # type: ignore[arg-type]
    assert refused.value.code == "scores_invalid" and says in refused.value.sentence


def test_a_pilot_of_one_is_refused_and_a_word_that_there_is_not_too() -> None:
    with pytest.raises(Refusal, match="a pilot of 1 entrants"):
        acclimate.gap(pilot(entrants=1))
    with pytest.raises(TypeError, match="unknown option 'entrant'"):
        acclimate.gap(entrant=3)  # type: ignore[call-arg]


def test_the_command_says_gap_floor_and_examples(tmp_path) -> None:
    path = tmp_path / "pilot.csv"
    pilot(seeds=3, wobble=0.1).to_csv(path, index=False)
    words = ["gap", "--items", str(path), "--difference", "0.5", "--entrants", "20"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "20 entrants, 200 examples, 3 seeds: two entrants who differ by " in done.stdout
    assert "Seeds alone set a floor of " in done.stdout and "A difference of 0.5 takes " in done.stdout
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert found["entrants"] == 20 and found["critical"] == pytest.approx(3.55, abs=0.01)
