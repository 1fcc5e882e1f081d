"""Is one entrant better than another, on the same examples? Exact McNemar, sign-flip permutation, Wilcoxon, and Holm over many pairs.

Units are clusters of examples: their signed sums are flipped as a whole, and ranked. Two entrants without any difference give p = 1 in each test.
Needs scipy, which is imported where it is used.

Sources: McNemar, Note on the sampling error of the difference between correlated proportions or percentages; Wiesenfarth et al., Methods and
open-source toolkit for analyzing and visualizing challenge results (challengeR: Wilcoxon signed rank by the normal approximation with continuity and
tie correction, zeros left out); Holm, A simple sequentially rejective multiple test procedure.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from acclimate_competitions.scores import Bools, Floats

Alternative = Literal["two-sided", "greater", "less"]
ALTERNATIVES: tuple[Alternative, ...] = get_args(Alternative)
"""What is held against no difference: any, one above 0, one below."""
ENUMERATED = 14
"""Up to so many units that differ, all ways to flip them are counted."""

_CHUNK = 256
# Sums that differ by less than this share of their parts are equal: rounding must not tell them apart.
_EQUAL = 1e-12


def mcnemar(more: int, less: int, alternative: Alternative = "two-sided") -> float:
    """Exact p of `more` examples that the first alone has right, and `less` that the second alone has."""
    from scipy import stats

    return float(stats.binomtest(more, more + less, 0.5, alternative).pvalue) if more + less else 1.0


def wilcoxon(differences: Floats, alternative: Alternative = "two-sided") -> float:
    """The p of Wilcoxon's signed rank test as challengeR has it, for [n] differences.

    Normal approximation with continuity and tie correction, zeros left out. Differences that differ by rounding only are tied.
    """
    from scipy import stats

    largest = float(np.abs(differences).max(initial=0.0))
    if largest == 0:
        return 1.0
    tied = np.round(differences / largest, 12)
    found = stats.wilcoxon(tied, zero_method="wilcox", correction=True, alternative=alternative, method="asymptotic")
    return float(found.pvalue)


def sign_flip(
    differences: Floats, *, alternative: Alternative = "two-sided", draws: int = 9_999, seed: int = 1
) -> list[float]:
    """The p of each pair: how likely its sum of differences is as large if each unit's sign is a coin's.

    Exact where all that is not 0 has one size, or up to ENUMERATED units differ; else (1 + hits) / (1 + draws), with the same draws for all pairs.

    Args:
        differences: [units, pairs].
        alternative: as ALTERNATIVES.
        draws: of Monte Carlo.
        seed: of PCG64.
    """
    found: list[float | None] = [_exact(column[column != 0], alternative) for column in differences.T]
    waiting = [place for place, value in enumerate(found) if value is None]
    if waiting:
        columns = differences[:, waiting]
        random = np.random.Generator(np.random.PCG64(seed))
        hits, done = np.zeros(len(waiting), dtype=np.int64), 0
        while done < draws:
            size = min(_CHUNK, draws - done)
            signs = 2.0 * random.integers(0, 2, size=(size, len(columns))) - 1.0
            hits += _as_large(signs @ columns, columns, alternative).sum(axis=0)
            done += size
        for place, count in zip(waiting, hits.tolist(), strict=True):
            found[place] = (1 + count) / (1 + draws)
    return [1.0 if value is None else value for value in found]


def least(differences: Floats, *, draws: int) -> list[float | None]:
    """The least p that sign_flip can give each pair; None where it counts all ways, so that nothing but the differences sets it.

    Args:
        differences: [units, pairs].
        draws: of Monte Carlo.
    """
    return [None if _counts_all(column[column != 0]) else 1 / (1 + draws) for column in differences.T]


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values in the same places; what is None is no test."""
    order = sorted((value, place) for place, value in enumerate(values) if value is not None)
    adjusted: list[float | None] = [None] * len(values)
    largest = 0.0
    for rank, (value, place) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        adjusted[place] = largest
    return adjusted


def _exact(differences: Floats, alternative: Alternative) -> float | None:
    """The p of the differences that are not 0 by counting; None where they are too many."""
    if not len(differences):
        return 1.0
    if not _counts_all(differences):
        return None
    sizes = np.abs(differences)
    if _of_one_size(sizes):
        more = int((differences > 0).sum())
        return mcnemar(more, len(differences) - more, alternative)
    bits = np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences))
    sums: Floats = np.where(bits & 1, 1.0, -1.0) @ sizes[:, None]
    return float(_as_large(sums, differences[:, None], alternative).mean())


def _counts_all(differences: Floats) -> bool:
    return len(differences) <= ENUMERATED or _of_one_size(np.abs(differences))


def _of_one_size(sizes: Floats) -> bool:
    return bool(sizes.max() - sizes.min() <= _EQUAL * sizes.max())


def _as_large(sums: Floats, columns: Floats, alternative: Alternative) -> Bools:
    """[draws, pairs]: whether a sum is at least as far as the one that was seen."""
    seen, slack = columns.sum(axis=0), _EQUAL * np.abs(columns).sum(axis=0)
    if alternative == "greater":
        return np.asarray(sums >= seen - slack)
    if alternative == "less":
        return np.asarray(sums <= seen + slack)
    return np.asarray(np.abs(sums) >= np.abs(seen) - slack)
