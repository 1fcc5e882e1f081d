"""How far the tasks of a plain score table agree about who is better: for tables of which only the scores are known.

The mean of Kendall's tau-b over pairs of tasks, its bootstrap interval over entrants, and the share of the first principal component. A task
in which all entrants are equal has no order: tau-b is undefined there, not 0, and such pairs are left out of the mean and counted.

Invariance. Draws of the bootstrap are of places in a canonical order, by the entrants' ranks in their tasks: the order of rows or columns, a constant
added to a task, or other names leave no trace. Only entrants who have the same ranks, in other tasks, are told apart by their names.

Source: Zhang, Dominguez-Olmedo & Hardt, Train-before-Test Harmonizes Language Model Rankings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from acclimate_competitions import stability
from acclimate_competitions.scores import Floats, Ints


@dataclass(frozen=True)
class Agreement:
    """Agreement between the tasks of one table; None where undefined.

    Attributes:
        models: number of entrants.
        tasks: number of tasks.
        pairs: of tasks.
        undefined: pairs in which a task ties all entrants.
        mean: of tau-b over the other pairs.
        interval: of mean, by a bootstrap over entrants; None below stability.INFORMATIVE.
        component: share of the first principal component, columns z-scored (ddof 0), constant ones left out.
        ties: tied pairs of entrants, summed over tasks.
        tau: [tasks, tasks], NaN where undefined.
    """

    models: int
    tasks: int
    pairs: int
    undefined: int
    mean: float | None
    interval: tuple[float, float] | None
    component: float | None
    ties: int
    tau: Floats


def of_table(scores: Floats, *, names: Sequence[str], draws: int, seed: int) -> Agreement:
    """Agreement between the columns of scores [m, tasks], larger is better, none missing.

    Args:
        scores: [m, tasks].
        names: of the m entrants.
        draws: of the bootstrap.
        seed: of PCG64.
    """
    m, count = scores.shape
    ordered = scores[canonical(scores, names)]
    tau = stability.tau(ordered, ordered)
    above = tau[np.triu_indices(count, 1)]
    random = np.random.Generator(np.random.PCG64(seed))
    informative = m >= stability.INFORMATIVE and not np.isnan(above).all()
    return Agreement(
        m,
        count,
        len(above),
        int(np.isnan(above).sum()),
        stability.agreement(ordered),
        stability.bootstrap(ordered, draws=draws, random=random) if informative else None,
        stability.first_component(ordered),
        stability.tied_pairs(ordered),
        tau,
    )


def canonical(scores: Floats, names: Sequence[str]) -> Ints:
    """An order of the rows that depends on ranks alone, where these tell rows apart."""
    low = (scores[:, None, :] > scores[None, :, :]).sum(axis=1)
    high = (scores[:, None, :] >= scores[None, :, :]).sum(axis=1)
    keys = np.sort(low + high, axis=1).tolist()
    return np.array(sorted(range(len(scores)), key=lambda place: (keys[place], names[place])), dtype=np.int64)


def between(left: Floats, right: Floats) -> tuple[float | None, int]:
    """Mean tau-b of each column of `left` with each of `right`, and how many pairs are undefined."""
    table = stability.tau(left, right)
    known = table[~np.isnan(table)].tolist()
    return (math.fsum(known) / len(known) if known else None), table.size - len(known)


def risen(before: Floats, after: Floats) -> int:
    """Pairs of tasks whose tau-b ([tasks, tasks]) is larger after than before; undefined ones are not."""
    above = np.triu_indices(len(before), 1)
    return int((after[above] > before[above]).sum())


def same_winner(before: Floats, after: Floats) -> int:
    """Tasks with the same best row before and after, both [m, tasks]; of several best the first counts."""
    if not len(before):
        return 0
    return int((before.argmax(axis=0) == after.argmax(axis=0)).sum())
