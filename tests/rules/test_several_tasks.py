"""Tests over several tasks: Demšar's example, scipy, and the ends."""

import math

import numpy as np
import pytest
from scipy import stats

from acclimate_competitions import several_tasks


def test_the_average_ranks_of_demsar_give_his_numbers():
    found = several_tasks.friedman([3.143, 2.000, 2.893, 1.964], 14)
    assert found.chi2 == pytest.approx(9.28, abs=0.005)
    assert found.f == pytest.approx(3.69, abs=0.005)
    assert found.critical_difference == pytest.approx(1.25, abs=0.005)
    assert found.chi2_p == pytest.approx(stats.chi2.sf(found.chi2, 3))


def test_without_ties_it_is_scipys():
    scores = np.random.default_rng(1).normal(size=(5, 9))
    ranks = several_tasks.average_ranks(scores)
    found, theirs = several_tasks.friedman(ranks, 9), stats.friedmanchisquare(*scores)
    assert (found.chi2, found.chi2_p) == (pytest.approx(theirs.statistic), pytest.approx(theirs.pvalue))
    assert ranks[int(np.argmax(scores.mean(axis=1)))] < 3.5


@pytest.mark.parametrize(("k", "n"), [(0, 0), (1, 5), (5, 1)])
def test_too_little_is_undefined(k, n):
    assert several_tasks.friedman([1.0] * k, n) is None


def test_one_order_everywhere_and_no_order_at_all():
    same = several_tasks.friedman([1.0, 2.0, 3.0], 6)
    assert (same.chi2, same.f, same.f_p) == (pytest.approx(12.0), math.inf, 0.0)
    tied = several_tasks.friedman(several_tasks.average_ranks(np.ones((3, 6))), 6)
    assert (tied.chi2, tied.chi2_p, tied.f_p) == (0.0, 1.0, 1.0)


def test_pairs_are_adjusted_by_holm():
    scores = np.vstack(
        [np.arange(12.0) + 3, np.arange(12.0), np.arange(12.0) + np.random.default_rng(1).normal(size=12)]
    )
    found = several_tasks.wilcoxon_holm(scores)
    assert set(found) == {(0, 1), (0, 2), (1, 2)}
    assert found[0, 1][1] <= 3 * found[0, 1][0] + 1e-12
    assert found[0, 1][1] < 0.01 < found[1, 2][1]
