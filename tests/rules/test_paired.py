"""Paired tests against published numbers, scipy, and counting by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from acclimate_competitions import paired


@pytest.mark.parametrize(
    ("differences", "p"),
    [([0.3] * 4, 0.03593), ([0.3] * 2, 0.17289), ([1, 2, 3, 4], 0.0502), ([1, 2], 0.1855)],
)
def test_wilcoxon_is_as_challenger_has_it(differences, p):
    assert paired.wilcoxon(np.array(differences, dtype=float), "greater") == pytest.approx(p, abs=5e-5)
    two_sided = paired.wilcoxon(np.array(differences, dtype=float))
    assert two_sided == pytest.approx(2 * p, abs=1e-4)


def test_wilcoxon_leaves_zeros_out_and_ties_what_differs_by_rounding():
    noisy = np.array([0.7 - 0.6, 0.2 - 0.1, 0.4 - 0.3, 0.9 - 0.8, 0.0, 0.0])
    assert len(set(noisy[:4].tolist())) > 1
    assert paired.wilcoxon(noisy, "greater") == pytest.approx(0.03593, abs=5e-6)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_no_difference_is_never_significant(n):
    nothing = np.zeros(n)
    assert paired.wilcoxon(nothing) == 1.0
    assert paired.sign_flip(nothing[:, None]) == [1.0]
    assert paired.mcnemar(0, 0) == 1.0


@pytest.mark.parametrize("alternative", paired.ALTERNATIVES)
@pytest.mark.parametrize(("more", "less"), [(1, 0), (0, 7), (12, 3), (30, 29)])
def test_mcnemar_is_a_fair_coin(more, less, alternative):
    n = more + less
    coin = [math.comb(n, k) / 2**n for k in range(n + 1)]
    expected = {
        "greater": sum(coin[more:]),
        "less": sum(coin[: more + 1]),
        "two-sided": min(1.0, 2 * sum(coin[max(more, less) :])),
    }[alternative]
    assert paired.mcnemar(more, less, alternative) == pytest.approx(expected)


@settings(max_examples=40)
@given(st.lists(st.integers(-4, 4), min_size=0, max_size=8), st.sampled_from(paired.ALTERNATIVES))
def test_flips_of_few_units_are_counted(values, alternative):
    column = np.array(values, dtype=float) / 10
    sums = [
        sum(s * v for s, v in zip(signs, values, strict=True))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    seen = sum(values)
    hits = {
        "greater": [s >= seen for s in sums],
        "less": [s <= seen for s in sums],
        "two-sided": [abs(s) >= abs(seen) for s in sums],
    }
    expected = sum(hits[alternative]) / len(sums)
    assert paired.sign_flip(column[:, None], alternative=alternative) == [pytest.approx(expected)]


def test_flips_of_many_units_agree_with_scipy():
    values = np.random.default_rng(1).normal(0.25, 1, size=60)
    theirs = stats.permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=9_999, rng=np.random.default_rng(2), axis=-1, vectorized=True
    ).pvalue  # fmt: skip
    (ours,) = paired.sign_flip(values[:, None])
    assert ours == pytest.approx(theirs, abs=0.015)
    assert paired.sign_flip(np.column_stack([values, values, -values])) == [ours] * 3


def test_the_least_p_is_that_of_the_flips_unless_all_are_counted():
    random = np.random.default_rng(3)
    many, few, alike, none = random.normal(5, 0.1, 60), np.zeros(60), np.zeros(60), np.zeros(60)
    few[:14] = random.normal(5, 0.1, 14)
    alike[:40] = 0.5
    columns = np.column_stack([many, few, alike, none])
    assert paired.least(columns, draws=99) == [0.01, None, None, None]
    assert paired.sign_flip(columns, draws=99) == [0.01, 2 / 2**14, pytest.approx(2 / 2**40), 1.0]


def test_right_and_wrong_are_flipped_as_mcnemar_counts_them():
    column = np.array([1.0] * 24 + [-1.0] * 9 + [0.0] * 500) / 533
    assert paired.sign_flip(column[:, None]) == [pytest.approx(paired.mcnemar(24, 9))]


def test_holm_is_the_textbooks():
    assert paired.holm([0.01, 0.04, None, 0.03, 0.005]) == [
        pytest.approx(0.03),
        pytest.approx(0.06),
        None,
        pytest.approx(0.06),
        pytest.approx(0.02),
    ]
    assert paired.holm([0.9, 0.8]) == [1.0, 1.0]
    assert paired.holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=9), st.randoms())
def test_holm_does_not_go_by_place(values, random):
    order = list(range(len(values)))
    random.shuffle(order)
    held = paired.holm(values)
    assert paired.holm([values[place] for place in order]) == [held[place] for place in order]
    assert all(adjusted >= value for adjusted, value in zip(held, values, strict=True))
