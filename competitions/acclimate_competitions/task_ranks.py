"""Entrants over several tasks by their ranks in each, which need no common scale: mean ranks, win rates, and what of their order is sure.

A mean rank or win rate is no mean of examples' scores, and ranks are not smooth in them, so no standard error is given. What is sure follows
from what is sure in the tasks: where all intervals and orders of all tasks hold at once, each pair's mean ranks differ by no more than the sum
of what is possible in each task. So the level is kept whatever the errors of the tasks have to do with each other (Bonferroni over the tasks);
the price is intervals that are wider than they might be.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from acclimate_competitions.confidence import Floats, RankSets


def mean_rank(own: Sequence[Fraction], others: Sequence[Sequence[Fraction]]) -> Fraction:
    """Mean over tasks of 1 + the number of others that are better + half of those that are equal.

    Args:
        own: a score a task, larger is better.
        others: for each task the others' scores in ascending order.
    """
    ranks = [
        1 + (len(scores) - bisect_right(scores, score)) + Fraction(_equal(scores, score), 2)
        for score, scores in zip(own, others, strict=True)
    ]
    return sum(ranks, Fraction(0)) / len(ranks)


def win_rate(rank: Fraction, *, others: int) -> Fraction:
    """Share of the others that one of this mean rank beats, a tie being half a win; 1 where there are no others."""
    return 1 - (rank - 1) / others if others else Fraction(1)


def task_level(level: float, tasks: int) -> float:
    """The level of each task's sets, so that those of all tasks hold together with probability `level`."""
    return 1 - (1 - level) / tasks


def rank_sets(tasks: Sequence[RankSets]) -> RankSets:
    """Sets for the order by mean rank of m entrants, from simultaneous sets in each task, each of `task_level`.

    In a task i is at most high_i − low_j ranks behind j; where it is significantly better, it is ahead by 1 and by one more for each that is
    significantly worse than i and better than j. i is significantly better where the sum of that over the tasks is below 0. There are no
    critical values (NaN).
    """
    m = len(tasks[0].low)
    behind = np.zeros((m, m))
    for task in tasks:
        apart = (task.high[:, None] - task.low[None, :]).astype(np.float64)
        order: Floats = task.better.astype(np.float64)
        behind += np.where(task.better, np.minimum(apart, -1 - order @ order), apart)
    better = behind < 0
    np.fill_diagonal(better, False)
    return RankSets(1 + better.sum(axis=0), m - better.sum(axis=1), better, np.full(m, np.nan))


def _equal(scores: Sequence[Fraction], score: Fraction) -> int:
    return bisect_right(scores, score) - bisect_left(scores, score)
