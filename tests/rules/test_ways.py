"""Five ways to rank, held against small cases by hand, scipy, and evalica's Bradley-Terry."""

import json
from itertools import combinations

import evalica
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import acclimate
from acclimate.cli.main import app
from acclimate_competitions import ways
from acclimate_competitions.errors import Refusal
from acclimate_competitions.items import Items, Rows, arrange


def items(*tables, clusters=None) -> Items:
    """Of tables [m, n], a set each."""
    found = [
        (f"e{place}", f"s{number}", f"s{number}-{example}", score)
        for number, table in enumerate(tables)
        for place, row in enumerate(table)
        for example, score in enumerate(row)
    ]
    names, sets, examples, scores = zip(*found, strict=True)
    groups = examples if clusters is None else [clusters(name) for name in examples]
    return arrange(Rows(names, sets, examples, groups, [""] * len(found), np.array(scores, dtype=float)))


def test_a_case_by_hand_where_the_ways_differ():
    # One wins big once and loses narrowly elsewhere; two sets of unlike size count alike.
    found = ways.ways(items([[9, 1, 1], [2, 2, 2], [0, 0, 0]], [[1], [0], [3]]))
    assert found.values["mean"].tolist() == pytest.approx([(11 / 3 + 1) / 2, 1.0, 1.5])
    assert found.values["mean_rank"].tolist() == pytest.approx([-(5 / 3 + 2) / 2, -(4 / 3 + 3) / 2, -2.0])
    assert found.values["win_rate"].tolist() == [0.75, 0.25, 0.5]
    assert found.values["test_then_rank"].tolist() == [0, 0, 0]
    assert found.ranks["mean"] == (1, 3, 2) and found.ranks["test_then_rank"] == (1, 1, 1)
    assert found.low == (1, 1, 1) and found.high == (1, 3, 2)
    assert found.tau["mean"]["win_rate"] == 1 and found.tau["mean"]["test_then_rank"] is None


def test_significant_wins_are_counted_and_lower_may_be_better():
    rng = np.random.default_rng(3)
    base = rng.normal(size=60)
    table = [base, base + 0.5 + 0.1 * rng.normal(size=60), base + 0.52 + 0.5 * rng.normal(size=60)]
    assert ways.ways(items(table)).values["test_then_rank"].tolist() == [0, 0.5, 0.5]
    assert ways.ways(items(table), lower_is_better=True).values["test_then_rank"].tolist() == [1, 0, 0]
    # Examples of a few clusters are no independent evidence.
    few = ways.ways(items(table, clusters=lambda name: f"c{int(name.split('-')[1]) % 3}"))
    assert few.values["test_then_rank"].tolist() == [0, 0, 0]


def test_bradley_terry_is_evalicas():
    rng = np.random.default_rng(5)
    table = rng.integers(0, 3, (6, 40)) + np.arange(6)[:, None] * 0.5 * rng.integers(0, 2, (6, 40))
    found = ways.ways(items(table)).values["bradley_terry"]
    rows = [
        (i, j, evalica.Winner.X if x > y else evalica.Winner.Y if x < y else evalica.Winner.Draw)
        for i, j in combinations(range(6), 2)
        for x, y in zip(table[i], table[j], strict=True)
    ]
    left, right, winners = zip(*rows, strict=True)
    theirs = np.log(evalica.bradley_terry(left, right, winners, tolerance=1e-10, limit=10_000).scores.sort_index())
    assert found == pytest.approx((theirs - theirs.mean()).to_numpy(), abs=1e-6)


def test_who_never_loses_has_no_strength():
    assert "bradley_terry" not in ways.ways(items([[2, 2], [0, 0], [0, 1]])).values
    assert ways.bradley_terry(np.array([[0.0, 3.0], [1.0, 0.0]])) == pytest.approx([np.log(3) / 2, -np.log(3) / 2])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=5), st.randoms())
def test_the_order_of_examples_and_a_constant_change_nothing(table, random):
    order = list(range(6))
    random.shuffle(order)
    one = ways.ways(items(table))
    other = ways.ways(items([[row[place] + 2 for place in order] for row in table]))
    assert one.ranks == other.ranks and (one.low, one.high) == (other.low, other.high)


def test_the_command_shows_them_and_says_what_is_left_out(tmp_path):
    rng = np.random.default_rng(8)
    rows = [
        {"entrant": f"e{place}", "set": name, "example": str(example), "score": float(rng.random() < 0.3 + 0.1 * place)}
        for place in range(5)
        for name in ("a", "b")
        for example in range(30)
    ]
    path = tmp_path / "items.csv"
    pd.DataFrame(rows[1:]).to_csv(path, index=False)
    command = ["rank", "--items", str(path), "--ways", "--missing", "exclude"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["ways"]["ranks"]) == 5 and set(ways.WAYS) < set(found["ways"]["ranks"][0])
    assert any("1 examples" in note for note in found["notes"])
    assert found["ways"] == acclimate.rank(items=path, ways=True, missing="exclude")["ways"]
    text = CliRunner().invoke(app, command).stdout
    assert "Bradley-Terry" in text and "a rank moves by" in text
    with pytest.raises(Refusal, match="by example"):
        acclimate.rank(path, score="score", se="score", ways=True)


def test_strengths_are_found_where_they_exist_however_far_apart_and_else_there_are_none():
    def hold(wins):
        found = ways.bradley_terry(wins)
        chances = 1 / (1 + np.exp(np.clip(found - found[:, None], -700, 700)))
        assert np.abs((wins - (wins + wins.T) * chances).sum(axis=1)).max() < 1e-12 * wins.sum()
        return found

    # A long line in which each beats the next 999 times of 1000: strengths lie log(999) apart, where an iteration hardly moves.
    line = np.diag(np.full(39, 999.0), 1) + np.diag(np.ones(39), -1)
    assert -np.diff(hold(line)) == pytest.approx(np.full(39, np.log(999)), rel=1e-6)
    # One who loses once in a trillion games has a strength; who never loses, or never meets the others, has none.
    almost = np.array([[0, 1, 1], [1e-12, 0, 1], [1e-12, 1, 0]], dtype=float)
    assert hold(almost)[0] == pytest.approx(2 / 3 * np.log(1e12), rel=1e-6)
    almost[1:, 0] = 0
    assert ways.bradley_terry(almost) is None
    assert ways.bradley_terry(np.kron(np.eye(2), 1 - np.eye(2))) is None
    assert ways.bradley_terry(np.zeros((1, 1))).tolist() == [0.0]


@given(st.integers(2, 6), st.integers(1, 25), st.randoms(use_true_random=False))
def test_of_whole_tables_bradley_terry_is_the_order_of_ranks_and_of_right_and_wrong_that_of_the_mean(m, n, random):
    # Why no round ranks by it (docs/decisions/0035): where everybody answers everything it has nothing of its own to say.
    graded = ways.ways(items([[random.randint(0, 3) for _ in range(n)] for _ in range(m)])).ranks
    if "bradley_terry" in graded:
        assert graded["bradley_terry"] == graded["mean_rank"]
    counted = ways.ways(items([[random.randint(0, 1) for _ in range(n)] for _ in range(m)])).ranks
    assert counted["mean"] == counted["mean_rank"]
    if "bradley_terry" in counted:
        assert counted["bradley_terry"] == counted["mean"]
