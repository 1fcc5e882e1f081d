"""Standard errors by cluster and seed, and confidence sets for ranks. numpy only.

Sources: Miller, Adding Error Bars to Evals (cluster standard errors); Mogstad, Romano, Shaikh & Wilhelm, Inference for Ranks
with Applications to Mobility across Neighbourhoods and Academic Achievement across Countries (rank confidence sets); Romano &
Wolf, Exact and Approximate Stepdown Methods for Multiple Hypothesis Testing (step-down).

Critical values are Monte Carlo quantiles. They decide integers only; no published float derives from them. Draws depend on
the order of the arguments, so a caller who wants permutation invariance sorts first (ranking.py does).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

FEW_SEEDS = 10
"""Below this number of seeds the seed variance is pooled over entrants."""

_CHUNK = 256
_TOGETHER = 16  # entrants of a group: what is bounded at once are the pairs of two groups
# Variances below this share of their parts are zero: what is left of S_ii + S_jj − 2 S_ij after equal parts cancelled.
_ZERO = 1e-12


@dataclass(frozen=True)
class Mean:
    """A mean with its cluster standard error.

    Attributes:
        mean: of n values.
        error: sqrt(G/(G−1) · Σ_c (Σ_{j∈c} (x_j − mean))²)/n; NaN with fewer than two clusters.
        clusters: G; a t-test has G − 1 degrees of freedom.
        n: number of values.
    """

    mean: float
    error: float
    clusters: int
    n: int


@dataclass(frozen=True)
class RankSets:
    """Confidence sets for the ranks of m entrants, 1 the best.

    Attributes:
        low: [m], 1 + the number significantly better.
        high: [m], m − the number significantly worse.
        better: [m, m], better[i, j]: in the family of i, i is significantly better than j. Families are all the same
            where the sets are simultaneous.
        critical: the last critical value of each family, [m].
    """

    low: Ints
    high: Ints
    better: Bools
    critical: Floats


def cluster_mean(values: Sequence[float] | Floats, clusters: Sequence[object] | NDArray[np.generic]) -> Mean:
    """Mean of n values and its standard error by cluster (Miller, 2.2), for n ≥ 1; exact sums."""
    array = np.asarray(values, dtype=np.float64)
    n = len(array)
    if n == 0:
        return Mean(math.nan, math.nan, 0, 0)
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    mean = math.fsum(array.tolist()) / n
    sums = np.bincount(index, weights=array - mean)
    count = len(sums)
    if count < 2:
        return Mean(mean, math.nan, count, n)
    return Mean(mean, math.sqrt(count / (count - 1) * math.fsum((sums * sums).tolist())) / n, count, n)


@dataclass(frozen=True)
class TaskError:
    """The error of m entrants' scores in one task.

    Attributes:
        residuals: [m, clusters of all tasks], sqrt(G/(G−1)) Σ_{j∈c} (x̄_j − mean) / n; NaN where G < 2.
        seeds: [m], the part of seeds, σ²/K.
    """

    residuals: Floats
    seeds: Floats


def task_error(values: Floats, clusters: Ints, *, count: int, pool: Bools) -> TaskError:
    """Residuals by cluster and seed variance of one task's scores; sums are exact or in a fixed order.

    Args:
        values: [m, K, n], NaN where left out.
        clusters: [n], below `count`.
        count: number of clusters over all tasks.
        pool: [m], whose seed variance is pooled.

    The variance between seed means holds a part that items explain: the interaction of seeds and items, which the residuals of
    seed averages already hold. σ² = max(0, between − item part), pooled below FEW_SEEDS seeds; 0 for an entrant whose seeds
    gave the same scores throughout, since then the base model was chosen and seeds have no part in it.
    """
    m, seeds, _ = values.shape
    size = len(np.unique(clusters))
    scale = math.sqrt(size / (size - 1)) if size > 1 else math.nan
    residuals, excess = np.zeros((m, count)), np.zeros(m)
    varying = np.zeros(m, dtype=bool)
    for place, rows in enumerate(values):
        centred, means = _centred(rows)
        residuals[place] = _by_cluster(_average(centred, len(means)), clusters, count) * scale
        varying[place] = seeds > 1 and bool((rows != rows[:1]).any())
        if varying[place] and len(means) == seeds:
            excess[place] = _seed_excess(centred, means, clusters=clusters) if size > 1 else math.nan
    pooled = excess[pool & varying].tolist()
    if seeds < FEW_SEEDS and pooled:
        excess[:] = math.fsum(pooled) / len(pooled)
    return TaskError(residuals, np.where(varying, np.maximum(excess, 0.0), 0.0) / max(1, seeds))


def covariance(errors: Sequence[TaskError]) -> Floats:
    """[m, m]: covariance of the means over tasks; for decisions, not for publication (BLAS rounds as it likes)."""
    total, seeds = _over_tasks(errors)
    return np.asarray(total @ total.T + np.diag(seeds))


def standard_errors(errors: Sequence[TaskError]) -> list[float]:
    """Standard errors of the means over tasks, the same on every machine; NaN where unknown."""
    total, seeds = _over_tasks(errors)
    parts = ([*(row * row).tolist(), seed] for row, seed in zip(total, seeds.tolist(), strict=True))
    return [math.sqrt(math.fsum(part)) for part in parts]


def difference_errors(errors: Sequence[TaskError], one: int, other: int) -> tuple[float, float]:
    """Standard errors of the difference between two entrants' means over tasks: paired, and as if their items were others; NaN where unknown."""
    total, seeds = _over_tasks(errors)
    apart = total[one] - total[other]
    part = float(seeds[one] + seeds[other])
    paired = math.fsum([*(apart * apart).tolist(), part])
    unpaired = math.fsum([*(total[one] ** 2).tolist(), *(total[other] ** 2).tolist(), part])
    return math.sqrt(paired), math.sqrt(unpaired)


def _over_tasks(errors: Sequence[TaskError]) -> tuple[Floats, Floats]:
    residuals, seeds = np.zeros_like(errors[0].residuals), np.zeros_like(errors[0].seeds)
    for error in errors:
        residuals, seeds = residuals + error.residuals, seeds + error.seeds
    return residuals / len(errors), seeds / len(errors) ** 2


def _centred(rows: Floats) -> tuple[Floats, list[float]]:
    """[K, n]: (value − mean of its seed) / number of the seed's known values, 0 where unknown; and the known seeds' means."""
    centred, means = np.zeros(rows.shape), []
    for place, row in enumerate(rows):
        known = ~np.isnan(row)
        size = int(known.sum())
        if size:
            means.append(math.fsum(row[known].tolist()) / size)
            centred[place, known] = (row[known] - means[-1]) / size
    return centred, means


def _average(rows: Floats, count: int) -> Floats:
    total = np.zeros(rows.shape[1])
    for row in rows:  # in a fixed order, unlike sum()
        total = total + row
    return total / max(1, count)


def _by_cluster(row: Floats, clusters: Ints, count: int) -> Floats:
    return np.bincount(clusters, weights=row, minlength=count).astype(np.float64)


def _seed_excess(centred: Floats, means: list[float], *, clusters: Ints) -> float:
    """Variance between seed means minus the part that items explain (by cluster); may be negative."""
    seeds = len(means)
    mean = math.fsum(means) / seeds
    between = math.fsum((value - mean) ** 2 for value in means)
    common = _average(centred, seeds)
    _, index = np.unique(clusters, return_inverse=True)
    size = int(index.max()) + 1
    items = []
    for row in centred:
        sums = _by_cluster(row - common, index, size)
        items += (sums * sums).tolist()
    return (between - size / (size - 1) * math.fsum(items)) / (seeds - 1)


def rank_sets(
    scores: Sequence[float] | Floats,
    covariance: Floats,
    *,
    kind: Literal["simultaneous", "marginal"],
    level: float,
    draws: int,
    seed: int,
) -> RankSets:
    """Two-sided confidence sets for ranks, studentized, with step-down.

    Args:
        scores: [m], larger is better.
        covariance: [m, m] of the scores.
        kind: simultaneous: all m sets hold together with probability `level`; marginal: each by itself.
        level: of confidence.
        draws: of Monte Carlo.
        seed: of PCG64.

    Pairs of zero variance: never significant where the difference is zero, always where it is not. A pair of unknown
    (NaN) variance is never significant.
    """
    pairs = _Pairs.of(scores, covariance)
    m = len(pairs.difference)
    sample = _sample(covariance, draws=draws, seed=seed)
    rejected = pairs.certain.copy()
    remaining = pairs.testable.copy()
    critical = np.zeros(m)
    groups = _groups(pairs.inverse)
    while remaining.any():
        inverse = np.where(remaining, pairs.inverse, 0.0)
        if kind == "simultaneous":
            critical[:] = _largest(sample, inverse, groups, level=level)
        else:
            critical = np.array([_quantile(row, level) for row in _maxima(sample, inverse, two_sided=True)])
        new = remaining & (np.abs(pairs.difference) * pairs.inverse > critical[:, None])
        if not new.any():
            break
        rejected |= new
        remaining &= ~new
    better = rejected & (pairs.difference > 0)
    worse = rejected & (pairs.difference < 0)
    return RankSets(1 + worse.sum(axis=1), m - better.sum(axis=1), better, critical)


def top_set(
    scores: Sequence[float] | Floats, covariance: Floats, *, k: int, level: float, draws: int, seed: int
) -> Bools:
    """Which of m entrants may be among the k best: a set that holds all k best with probability `level`, [m].

    One-sided simultaneous lower bounds of all ranks (Mogstad et al., "tau-best"); those whose bound is at most k.
    """
    pairs = _Pairs.of(scores, covariance)
    sample = _sample(covariance, draws=draws, seed=seed)
    rejected = pairs.certain & (pairs.difference > 0)
    remaining = pairs.testable.copy()
    while remaining.any():
        maxima = _maxima(sample, np.where(remaining, pairs.inverse, 0.0), two_sided=False)
        critical = _quantile(maxima.max(axis=0), level)
        new = remaining & (pairs.difference * pairs.inverse > critical)
        if not new.any():
            break
        rejected |= new
        remaining &= ~new
    lower = 1 + rejected.sum(axis=0)
    return np.asarray(lower <= k)


@dataclass(frozen=True)
class _Pairs:
    """All ordered pairs of m entrants: difference[i, j] = score_i − score_j, inverse[i, j] = 1/sd of it or 0."""

    difference: Floats
    inverse: Floats
    certain: Bools  # zero variance, nonzero difference
    testable: Bools  # known positive variance

    @staticmethod
    def of(scores: Sequence[float] | Floats, covariance: Floats) -> "_Pairs":
        values = np.asarray(scores, dtype=np.float64)
        m = len(values)
        if covariance.shape != (m, m):
            raise ValueError(f"{m} scores, but a covariance of shape {covariance.shape}")
        difference = values[:, None] - values[None, :]
        parts = np.diag(covariance)[:, None] + np.diag(covariance)[None, :]
        variance = parts - 2 * covariance
        other = ~np.eye(m, dtype=bool)
        # Comparisons with NaN are false: an unknown variance is neither zero nor positive.
        zero = other & (variance <= _ZERO * parts)
        testable = other & (variance > _ZERO * parts)
        inverse = np.zeros((m, m))
        inverse[testable] = 1 / np.sqrt(variance[testable])
        return _Pairs(difference, inverse, zero & (difference != 0), testable)


def _sample(covariance: Floats, *, draws: int, seed: int) -> Floats:
    """[m, draws] of N(0, covariance); unknown (NaN) rows are zero."""
    known = np.isfinite(np.diag(covariance))
    factor = _factor(np.where(known[:, None] & known[None, :], covariance, 0.0))
    normal = np.random.Generator(np.random.PCG64(seed)).standard_normal((len(covariance), draws))
    return np.asarray(factor @ normal)


def _factor(covariance: Floats) -> Floats:
    """Lower triangular L with L Lᵀ = covariance, also where it is singular.

    By hand, since eigenvectors of equal eigenvalues differ between LAPACK builds, and with them the draws; a Cholesky
    factor moves by rounding only.
    """
    m = len(covariance)
    factor = np.zeros((m, m))
    for k in range(m):
        column = covariance[k:, k] - (factor[k:, :k] * factor[k, :k]).sum(axis=1)
        if column[0] > 1e-10 * covariance[k, k]:
            factor[k:, k] = column / math.sqrt(column[0])
    return factor


def _maxima(sample: Floats, inverse: Floats, *, two_sided: bool) -> Floats:
    """[m, draws]: for each i the largest (z_i − z_j) · inverse[i, j] over j, of absolute differences if two-sided; at least 0."""
    m, draws = sample.shape
    result, space = np.zeros((m, draws), sample.dtype), np.empty((m, _CHUNK), sample.dtype)
    rows = [_places(row) for row in inverse]
    for start in range(0, draws, _CHUNK):  # chunks stay in the cache
        chunk = np.ascontiguousarray(sample[:, start : start + _CHUNK])
        for i, others in enumerate(rows):
            scale = inverse[i, others, None]
            block = np.subtract(chunk[i], chunk[others], out=space[: len(scale), : chunk.shape[1]])
            np.multiply(block, scale, out=block)
            if two_sided:
                np.abs(block, out=block)
            block.max(axis=0, initial=0.0, out=result[i, start : start + _CHUNK])
    return result


def _places(row: Floats) -> Ints | slice:
    """Where a row is not zero; a slice where that is one run, which saves a copy."""
    places = np.flatnonzero(row)
    run = len(places) > 0 and int(places[-1]) - int(places[0]) == len(places) - 1
    return slice(int(places[0]), int(places[-1]) + 1) if run else places


def _groups(inverse: Floats) -> list[Ints]:
    """Entrants in groups of those that are alike: one by one with the nearest that are left. However they are made, results are the same."""
    left, groups = np.ones(len(inverse), dtype=bool), []
    while left.any():
        places = np.flatnonzero(left)
        nearest = np.argsort(-inverse[places[0], places[1:]], kind="stable")[: _TOGETHER - 1]
        groups.append(np.sort(np.concatenate([places[:1], places[1:][nearest]])))
        left[groups[-1]] = False
    return groups


def _largest(sample: Floats, inverse: Floats, groups: Sequence[Ints], *, level: float) -> float:
    """The quantile of the draws' largest |z_i − z_j| · inverse[i, j]: exactly that of all pairs, without computing them all.

    Of two groups no pair is above the largest weight times the largest difference, rounded or not, as rounding keeps the order. So pairs
    are computed only in those draws in which they may be above what was found there (`found`, bounds from below) and above the quantile
    of that, which is one of the result from below. In the end no draw is above both, so the quantile is the result.

    Args:
        sample: of _sample.
        inverse: [m, m], of which the part above the diagonal counts; 0 for pairs that don't count.
        groups: of _groups.
        level: of confidence.
    """
    upper = np.triu(inverse)
    weights = upper + upper.T
    high = np.array([sample[group].max(axis=0) for group in groups])
    low = np.array([sample[group].min(axis=0) for group in groups])
    numbers = [(a, b) for a in range(len(groups)) for b in range(a, len(groups))]
    blocks = [(groups[a], groups[b]) for a, b in numbers]
    heaviest = [float(weights[np.ix_(*block)].max(initial=0.0)) for block in blocks]
    found, best, which = np.zeros(sample.shape[1]), np.zeros(sample.shape[1]), np.zeros(sample.shape[1], dtype=np.int64)
    for place, ((a, b), weight) in enumerate(zip(numbers, heaviest, strict=True)):
        bound = _bound(high, low, a, b) * weight
        better = bound > best
        best[better], which[better] = bound[better], place
    # First where the bounds are the largest: most of what is found there is the largest of its draw.
    for place in np.unique(which).tolist():
        _raise(found, sample, weights, blocks[place], np.flatnonzero(which == place))
    floor = _quantile(found, level)
    for (a, b), weight, block in zip(numbers, heaviest, blocks, strict=True):
        draws = np.flatnonzero(_bound(high, low, a, b) * weight > np.maximum(found, floor))
        if len(draws):
            _raise(found, sample, weights, block, draws)
            floor = _quantile(found, level)
    return floor


def _bound(high: Floats, low: Floats, a: int, b: int) -> Floats:
    """The largest differences between members of two groups, [draws], by their largest and smallest values."""
    return np.asarray(np.maximum(high[a] - low[b], high[b] - low[a]))


def _raise(found: Floats, sample: Floats, weights: Floats, block: tuple[Ints, Ints], draws: Ints) -> None:
    """Raise what was found in some draws to the largest |z_i − z_j| · weight of the pairs of two groups."""
    first, second = block
    scale = weights[np.ix_(first, second)][:, :, None]
    for start in range(0, len(draws), _CHUNK):  # chunks stay in the cache
        part = draws[start : start + _CHUNK]
        values = sample[np.ix_(first, part)][:, None, :] - sample[np.ix_(second, part)][None, :, :]
        np.abs(values, out=values)
        values *= scale
        found[part] = np.maximum(found[part], values.reshape(-1, len(part)).max(axis=0, initial=0.0))


def _quantile(maxima: Floats, level: float) -> float:
    """The smallest draw with at least `level` of all draws at or below it."""
    place = min(len(maxima), max(1, math.ceil(level * len(maxima)))) - 1
    return float(np.partition(maxima, place)[place])
