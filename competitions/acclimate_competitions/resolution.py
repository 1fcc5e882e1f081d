"""Which gap between two entrants a round can tell, before it opens; pure arithmetic. Needs scipy, which is imported where it is used.

Sources: the critical value is that of the largest of all studentized differences of m equal entrants (Tukey's studentized range / √2), as rank
confidence sets use it; sample sizes as in Miller, Adding Error Bars to Evals, with that value in the place of 1.96.
"""

import math


def critical(entrants: int, level: float) -> float:
    """The quantile of the largest absolute difference of equal entrants, in standard errors of a difference: 1.96 for two, about 3.55 for 20."""
    from scipy import stats

    return float(stats.studentized_range.ppf(level, entrants, math.inf)) / math.sqrt(2)


def reach(entrants: int, *, level: float, power: float) -> float:
    """How many standard errors apart two entrants must be, to be told apart with probability `power` among all pairs at `level`."""
    from scipy import stats

    return critical(entrants, level) + float(stats.norm.ppf(power))


def gap(errors: float, variance: float, examples: float, seeds: float) -> float:
    """The least gap that is told.

    Args:
        errors: reach().
        variance: of the differences between two entrants on one example.
        examples: how many there are, or clusters of them.
        seeds: variance of a difference by seeds, 2 σ² / K; infinitely many examples leave it.
    """
    return errors * math.sqrt(variance / examples + seeds)


def examples(errors: float, variance: float, wanted: float, seeds: float) -> int | None:
    """How many examples tell a gap; None where seeds alone are in its way. Arguments as gap."""
    left = (wanted / errors) ** 2 - seeds
    return math.ceil(variance / left) if left > 0 else None
