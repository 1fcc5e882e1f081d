"""Five ways to rank the same scores by example, and how far the order depends on the way. Needs scipy.

    mean: the mean over sets of the mean over examples, then ranks (aggregate, then rank).
    mean_rank: ranks on each example, ties sharing the mean of theirs; then the mean over examples and sets (rank, then aggregate).
    win_rate: the share of others whose mean in a set is worse, equal ones counting half; then the mean over sets.
    test_then_rank: the share of others that are significantly worse in a set, by one-sided Wilcoxon tests over clusters with Holm's adjustment
        over all ordered pairs; then the mean over sets.
    bradley_terry: strengths by which wins on single examples are likeliest, equal scores being half a win for each; each set has the same weight.
        Undefined where some entrants never lose, or never win, against the others.

Sources: Wiesenfarth et al., challengeR (the first two, and test_then_rank); Bradley & Terry, Rank Analysis of Incomplete Block Designs; Newman,
Efficient Computation of Rankings from Pairwise Comparisons; the win rate is that of HELM, where a set is a scenario.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from acclimate_competitions import paired
from acclimate_competitions.items import Items
from acclimate_competitions.scores import Floats

WAYS = ("mean", "mean_rank", "win_rate", "test_then_rank", "bradley_terry")
_CONVERGED, _ROUNDS, _LEAST_STEP, _TINY = 1e-9, 200, 1e-12, 1e-300


@dataclass(frozen=True)
class Ways:
    """m entrants ranked in each way.

    Attributes:
        values: way -> [m], larger is better (mean ranks are negated); ways that are undefined are not in it.
        ranks: way -> [m], 1 the best, equal values share a rank.
        tau: way -> way -> tau-b of their orders, None where one of them is constant.
        low: [m], the best rank in any way.
        high: [m], the worst one.
    """

    values: Mapping[str, Floats]
    ranks: Mapping[str, tuple[int, ...]]
    tau: Mapping[str, Mapping[str, float | None]]
    low: tuple[int, ...]
    high: tuple[int, ...]


def ways(items: Items, *, lower_is_better: bool = False, level: float = 0.95) -> Ways:
    """Rank entrants in each way.

    Args:
        items: of m ≥ 1 entrants and one set or more, nothing missing, examples in each set.
        lower_is_better: whether it is.
        level: of the tests: significant is p ≤ 1 − level.
    """
    from scipy import stats

    sign = -1.0 if lower_is_better else 1.0
    tables = [sign * value.mean(axis=1) for value in items.values]
    means = np.array([[float(mean or 0.0) * sign for mean in row] for row in items.means()])
    beaten = [_significant(table, place, level=level) for table, place in zip(tables, items.places, strict=True)]
    others = max(1, len(items.entrants) - 1)
    strengths = bradley_terry(np.mean([_wins(table) for table in tables], axis=0))
    values: dict[str, Floats] = {
        "mean": means.mean(axis=0),
        "mean_rank": -np.mean([stats.rankdata(-table, axis=0).mean(axis=1) for table in tables], axis=0),
        "win_rate": np.mean([_wins(row[:, None]).sum(axis=1) / others for row in means], axis=0),
        "test_then_rank": np.mean(beaten, axis=0) / others,
    }
    if strengths is not None:
        values["bradley_terry"] = strengths
    ranks = {way: _shared(value) for way, value in values.items()}
    table = np.array(list(ranks.values()))
    tau = {one: {other: _tau(ranks[one], ranks[other]) for other in values if other != one} for one in values}
    return Ways(values, ranks, tau, tuple(table.min(axis=0).tolist()), tuple(table.max(axis=0).tolist()))


def bradley_terry(wins: Floats) -> Floats | None:
    """Log-strengths, [m] with mean 0, of wins [m, m]: wins[i, j] is how often i beat j; None where no finite ones are the likeliest.

    They are finite where whoever is in one of two parts beat somebody in the other, however the entrants are parted (Ford, Solution of a Ranking
    Problem from Binary Comparisons, 1957): where the graph of wins is strongly connected. Then the likelihood has one top, which Newton's
    steps find; None, too, where rounding keeps them from it.
    """
    from scipy.sparse.csgraph import connected_components
    from scipy.special import expit

    m = len(wins)
    count, _ = connected_components(wins > 0, directed=True, connection="strong")
    if count > 1:
        return None
    found = np.zeros(m)
    for _ in range(_ROUNDS):
        chances = expit(found[:, None] - found)
        # As a difference of what is left over: wins less their expectation would cancel where one of them is almost certain.
        gradient = (wins * chances.T - wins.T * chances).sum(axis=1)
        weights = (wins + wins.T) * chances * chances.T
        # Strengths are known up to a constant: the mean is held at 0.
        step = np.linalg.solve(np.diag(weights.sum(axis=1)) - weights + max(weights.sum(), _TINY) / m**2, gradient)
        step -= step.mean()
        if np.abs(step).max() <= _CONVERGED:
            return np.asarray(found + step)
        after = _ascended(wins, found, step, slope=float(gradient @ step))
        if after is None:
            return None
        found = after
    return None


def _ascended(wins: Floats, found: Floats, step: Floats, *, slope: float) -> Floats | None:
    """A Newton step, halved until the likelihood grows by a part of what its slope promises; None where it no longer does."""
    before, size = _likelihood(wins, found), 1.0
    while size > _LEAST_STEP:
        after = found + size * step
        # Near the top the gain is below what the sum is rounded to.
        if _likelihood(wins, after) >= before + 1e-4 * size * slope - 1e-13 * abs(before):
            return after
        size /= 2
    return None


def _likelihood(wins: Floats, strengths: Floats) -> float:
    return -float((wins * np.logaddexp(0.0, strengths - strengths[:, None])).sum())


def _wins(table: Floats) -> Floats:
    """[m, m]: the share of columns of a table [m, n] in which i is above j, equal ones counting half; 0 on the diagonal."""
    m, n = table.shape
    found = np.zeros((m, m))
    for i, row in enumerate(table):
        found[i] = ((row > table).sum(axis=1) + (row == table).sum(axis=1) / 2) / n
    np.fill_diagonal(found, 0.0)
    return found


def _significant(table: Floats, places: np.ndarray[tuple[int], np.dtype[np.int64]], *, level: float) -> Floats:
    """[m]: how many others are significantly worse; table: [m, n], places: [n], each example's cluster."""
    m = len(table)
    _, index = np.unique(places, return_inverse=True)
    clusters = np.array([np.bincount(index, weights=row) for row in table])
    pairs = list(permutations(range(m), 2))
    adjusted = paired.holm([paired.wilcoxon(clusters[i] - clusters[j], "greater") for i, j in pairs])
    found = np.zeros(m)
    for (i, _), p in zip(pairs, adjusted, strict=True):
        found[i] += p is not None and p <= 1 - level
    return found


def _shared(values: Floats) -> tuple[int, ...]:
    """Competition ranks (1-2-2-4); what differs by rounding only is equal."""
    rounded = np.round(values, 9)
    return tuple(1 + int((rounded > value).sum()) for value in rounded)


def _tau(one: tuple[int, ...], other: tuple[int, ...]) -> float | None:
    from scipy import stats

    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return float(stats.kendalltau(one, other).statistic)
