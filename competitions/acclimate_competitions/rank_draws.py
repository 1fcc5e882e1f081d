"""How often each entrant has each rank when the examples are drawn again: the data of a podium or blob plot (Wiesenfarth et al., challengeR)."""

import numpy as np
from numpy.typing import NDArray

from acclimate_competitions.items import Items

_EQUAL = 1e-9
"""Relative to the largest score: scores nearer than that share a rank, as sums of the same numbers in another order do."""

_TOGETHER = 256
"""Samples whose counts of clusters are in memory at once."""


def bootstrap_ranks(items: Items, *, draws: int, seed: int, lower_is_better: bool = False) -> NDArray[np.float64]:
    """Share of bootstrap samples in which each of m entrants has each rank, [m, m]; rows sum to 1.

    Clusters are drawn with replacement, those that stand in the same sets among each other. An entrant's score is the mean over sets of the mean
    over the drawn examples (of the mean over seeds); equal scores share the better rank.

    Args:
        items: nothing missing, at least one set.
        draws: bootstrap samples.
        seed: of PCG64.
        lower_is_better: whether it is.
    """
    m, count = len(items.entrants), len(items.clusters)
    present = np.zeros((len(items.sets), count), dtype=np.int64)
    for number, place in enumerate(items.places):
        present[number, place] = 1
    _, strata = np.unique(present, axis=1, return_inverse=True)
    strata = strata.reshape(-1)
    random = np.random.Generator(np.random.PCG64(seed))
    sums, sizes = [], []
    for value, place in zip(items.values, items.places, strict=True):
        by_example = value.mean(axis=1)
        sums.append(
            np.array([np.bincount(place, weights=row, minlength=count) for row in by_example]).reshape(m, count)
        )
        sizes.append(np.bincount(place, minlength=count).astype(np.float64))
    scores = np.zeros((draws, m))
    for start in range(0, draws, _TOGETHER):
        times = _times(strata, min(_TOGETHER, draws - start), random)
        for own, size in zip(sums, sizes, strict=True):
            scores[start : start + len(times)] += times @ own.T / (times @ size)[:, None] / len(sums)
    if lower_is_better:
        scores = -scores
    within = _EQUAL * max(1.0, float(np.abs(scores).max(initial=0.0)))
    ordered = np.sort(scores, axis=1)
    result = np.zeros((m, m))
    for draw, row in enumerate(scores):
        better = m - np.searchsorted(ordered[draw], row + within, side="right")
        result[np.arange(m), better] += 1
    return result / draws


def _times(strata: NDArray[np.int64], draws: int, random: np.random.Generator) -> NDArray[np.float64]:
    """[draws, clusters]: how often each cluster is drawn, with replacement among those of its stratum."""
    count = len(strata)
    times = np.zeros((draws, count))
    for stratum in range(int(strata.max(initial=-1)) + 1):
        places = np.flatnonzero(strata == stratum)
        drawn = random.integers(len(places), size=(draws, len(places))) + np.arange(draws)[:, None] * len(places)
        counts = np.bincount(drawn.reshape(-1), minlength=draws * len(places))
        times[:, places] = counts.reshape(draws, len(places))
    return times
