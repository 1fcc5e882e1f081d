"""CASP's ranking: z-scores by target, cleaned once of what is far below, clamped, and summed or averaged. numpy only.

Of each target: z of all first models (population deviation; a target without any spread gives 0), those below OUTLIER leave mean and deviation, z of all
again from the mean and deviation that are left, and whatever is below the threshold counts as the threshold: a bold failure costs no more than that.
Baselines get a z-score but have no part in mean and deviation.

Source: the ranking pages of CASP (predictioncenter.org), groups' summed and average z-scores above −2.0 and above 0.0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from acclimate_competitions.scores import Bools, Floats, Ints

OUTLIER = -2.0
"""First z-scores below this are left out of the second mean and deviation."""
THRESHOLDS = (-2.0, 0.0)
"""Where z-scores may be clamped."""


@dataclass(frozen=True)
class Standing:
    """m entrants by z-scores.

    Attributes:
        z: [m, targets], clamped, NaN where not attempted.
        costs: [m, targets], what counts in the sum: z, and where not attempted the threshold or 0.
        sums: [m].
        averages: [m], over what was attempted; NaN for nothing.
        attempted: [m].
    """

    z: Floats
    costs: Floats
    sums: Floats
    averages: Floats
    attempted: Ints


def stand(scores: Floats, *, threshold: float, penalty: bool, baselines: Bools | None = None) -> Standing:
    """Z-scores, sums and averages of scores [m, targets], larger is better, NaN where not attempted.

    Args:
        scores: of first models.
        threshold: of THRESHOLDS.
        penalty: whether a missing target costs the threshold; else it costs nothing.
        baselines: [m], who has no part in means and deviations.
    """
    counted = np.ones(len(scores), dtype=bool) if baselines is None else ~baselines
    columns = [_clamped(column, counted, threshold) for column in scores.T]
    z = np.array(columns).T.reshape(scores.shape)
    tried = ~np.isnan(z)
    costs = np.where(tried, z, threshold if penalty else 0.0)
    attempted = tried.sum(axis=1)
    known = np.where(tried, z, 0.0).sum(axis=1)
    averages = np.divide(known, attempted, out=np.full(len(z), np.nan), where=attempted > 0)
    return Standing(z, costs, costs.sum(axis=1), averages, attempted)


def _clamped(column: Floats, counted: Bools, threshold: float) -> Floats:
    first = _z(column, counted)
    # NaN is not below: who did not attempt a target is in no mean of it anyway.
    second = _z(column, counted & ~(first < OUTLIER))
    return np.maximum(second, threshold)


def _z(column: Floats, counted: Bools) -> Floats:
    """(x − mean) / deviation of those counted; 0 without spread, NaN where x is."""
    values = column[counted & ~np.isnan(column)]
    if not len(values) or (values == values[0]).all():
        return np.where(np.isnan(column), np.nan, 0.0)
    return np.asarray((column - values.mean()) / values.std())


def shared_ranks(values: Sequence[float]) -> list[int]:
    """Competition ranks (1-2-2-4), larger is better, NaN last; sums that differ by rounding only are equal."""
    rounded = [-np.inf if np.isnan(value) else round(float(value), 9) for value in values]
    return [1 + sum(other > value for other in rounded) for value in rounded]
