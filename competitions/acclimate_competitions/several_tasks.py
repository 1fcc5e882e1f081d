"""Do entrants differ over several tasks? Friedman, Iman-Davenport, Nemenyi's critical difference, and Wilcoxon with Holm. Needs scipy.

Tasks are the blocks: each ranks the entrants by itself, and only ranks count.

Source: Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets; its chi-squared has no correction for ties.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from acclimate_competitions import paired
from acclimate_competitions.scores import Floats


@dataclass(frozen=True)
class Friedman:
    """Do k entrants differ over n tasks?

    Attributes:
        average_ranks: [k], 1 the best.
        tasks: n.
        chi2: Friedman's statistic, k − 1 degrees of freedom.
        chi2_p: its p.
        f: Iman and Davenport's, k − 1 and (k − 1)(n − 1) degrees of freedom; infinite where all tasks give one order.
        f_p: its p.
        critical_difference: Nemenyi's: average ranks that differ by more differ significantly.
    """

    average_ranks: tuple[float, ...]
    tasks: int
    chi2: float
    chi2_p: float
    f: float
    f_p: float
    critical_difference: float


def average_ranks(scores: Floats) -> list[float]:
    """Mean over tasks of each entrant's rank, [k] of scores [k, n]: 1 the best, ties share the mean of their ranks."""
    from scipy import stats

    return [float(value) for value in stats.rankdata(-scores, axis=0).mean(axis=1)]


def friedman(ranks: Sequence[float], tasks: int, *, level: float = 0.95) -> Friedman | None:
    """The tests from average ranks over n tasks; None for fewer than two entrants or tasks."""
    from scipy import stats

    k, n = len(ranks), tasks
    if k < 2 or n < 2:
        return None
    chi2 = max(0.0, 12 * n / (k * (k + 1)) * (math.fsum(rank * rank for rank in ranks) - k * (k + 1) ** 2 / 4))
    rest = n * (k - 1) - chi2
    f = (n - 1) * chi2 / rest if rest > 1e-9 * n * k else math.inf
    return Friedman(
        tuple(ranks),
        n,
        chi2,
        float(stats.chi2.sf(chi2, k - 1)),
        f,
        float(stats.f.sf(f, k - 1, (k - 1) * (n - 1))),
        critical_difference(k, n, level=level),
    )


def critical_difference(k: int, n: int, *, level: float = 0.95) -> float:
    """Nemenyi's critical difference of average ranks of k entrants over n tasks."""
    from scipy import stats

    q = float(stats.studentized_range.ppf(level, k, math.inf)) / math.sqrt(2)
    return q * math.sqrt(k * (k + 1) / (6 * n))


def wilcoxon_holm(scores: Floats) -> dict[tuple[int, int], tuple[float, float]]:
    """(p, p adjusted by Holm) of Wilcoxon's test over tasks for each two rows of scores [k, n]."""
    pairs = list(combinations(range(len(scores)), 2))
    values = [paired.wilcoxon(scores[i] - scores[j]) for i, j in pairs]
    adjusted = paired.holm(values)
    return {
        pair: (value, 1.0 if held is None else held) for pair, value, held in zip(pairs, values, adjusted, strict=True)
    }
