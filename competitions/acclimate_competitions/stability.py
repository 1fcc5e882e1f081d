"""Stability of a round: agreement between tasks beside its noise ceiling, and the effect of preparation. From scores alone.

Agreement is Kendall's tau-b between the entrants' scores in two tasks; of a round, the mean over pairs of tasks. tau-b is
computed from signs of pairs, whose sums are exact integers: many resamples at once, the same everywhere.

Ceiling. Clusters are split at random into halves A and B, seeds too where there are two or more, alike for all tasks. For
a task t, tau(A_t, B_t) is how well the task agrees with itself through noise; the ceiling is its mean over splits and
tasks: the agreement to expect between tasks that rank entrants identically but for noise, each seen through half of the
items. It is therefore to be compared with the *half* agreement, the mean over splits and pairs t ≠ u of tau(A_t, B_u), which
rests on the same n and, like the ceiling, on no common item. The agreement of whole tasks rests on twice the items and
may pass the ceiling; noise of items that tasks share is in it, too.

Sources: Zhang, Dominguez-Olmedo & Hardt, Train-before-Test Harmonizes Language Model Rankings; Kendall, The treatment of ties in
ranking problems.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from acclimate_competitions import metrics, ranking
from acclimate_competitions.definition import Policy, Task
from acclimate_competitions.scores import Floats, Ints, Scores, read

INFORMATIVE = 10
"""With fewer entrants, intervals over entrants are not informative, and not given."""
LEVEL = 0.95
"""Of intervals over entrants."""
PROTOCOLS = ("direct", "prepared")
_AT_ONCE = 64


@dataclass(frozen=True)
class Effect:
    """Agreement between tasks under one protocol; None where undefined (one task, one entrant, all scores equal).

    Attributes:
        agreement: mean tau-b over pairs of tasks.
        interval: its bootstrap interval over entrants; None below INFORMATIVE entrants.
        ceiling: mean over splits and tasks of the agreement of a task's halves.
        half: mean over splits and pairs of tasks of the agreement of one's half with the other's other half.
        pairs: [tasks][tasks] tau-b.
        ceilings: the ceiling by task.
        component: share of the first principal component of the score matrix, columns z-scored.
        component_null: mean of the same after each column is permuted.
    """

    agreement: float | None
    interval: tuple[float, float] | None
    ceiling: float | None
    half: float | None
    pairs: tuple[tuple[float | None, ...], ...]
    ceilings: tuple[float | None, ...]
    component: float | None
    component_null: float | None


@dataclass(frozen=True)
class Winners:
    """Who is first in a task, with ties; changed: nobody is first under both protocols."""

    task: str
    direct: tuple[str, ...]
    prepared: tuple[str, ...]
    changed: bool


@dataclass(frozen=True)
class Fall:
    """Ranks lost by preparation: prepared_rank − direct_rank; task None: over all tasks."""

    entrant: str
    task: str | None
    direct_rank: int
    prepared_rank: int
    fall: int


@dataclass(frozen=True)
class Stability:
    """What a round says about itself.

    Attributes:
        entrants: those with a score in each task under both protocols; only they count in effects and protocols.
        left_out: the others.
        protocols: tau-b of direct with prepared, over all tasks ("") and by task.
        falls: each entrant's largest fall in a task, the largest first.
        losers: each entrant's fall over all tasks, the largest first.
        draws: number of splits, bootstrap samples and permutations.
    """

    tasks: tuple[str, ...]
    entrants: tuple[str, ...]
    left_out: tuple[str, ...]
    effects: Mapping[str, Effect]
    protocols: Mapping[str, float | None]
    winners: tuple[Winners, ...]
    falls: tuple[Fall, ...]
    losers: tuple[Fall, ...]
    draws: int
    seed: int

    def document(self) -> dict[str, Any]:
        """JSON-ready; `agreement` is the summary {direct, prepared, ceiling_direct, ceiling_prepared, half_…}."""
        direct, prepared = (self.effects[name] for name in PROTOCOLS)
        return {
            "tasks": list(self.tasks),
            "entrants": list(self.entrants),
            "left_out": list(self.left_out),
            "informative": len(self.entrants) >= INFORMATIVE,
            "agreement": {
                "direct": direct.agreement,
                "prepared": prepared.agreement,
                "ceiling_direct": direct.ceiling,
                "ceiling_prepared": prepared.ceiling,
                "half_direct": direct.half,
                "half_prepared": prepared.half,
            },
            "effects": {name: _plain(dataclasses.asdict(effect)) for name, effect in self.effects.items()},
            "protocols": {
                "overall": self.protocols[""],
                "tasks": {task: self.protocols[task] for task in self.tasks},
            },
            "winners": [_plain(dataclasses.asdict(row)) for row in self.winners],
            "falls": [dataclasses.asdict(row) for row in self.falls],
            "losers": [dataclasses.asdict(row) for row in self.losers],
            "draws": self.draws,
            "seed": self.seed,
        }


def of_round(
    scores: pa.Table,
    *,
    tasks: Sequence[Task],
    policy: Policy,
    entrants: Sequence[str],
    unranked: Collection[str] = frozenset(),
    draws: int = 400,
    seed: int = 1,
) -> Stability:
    """Stability of one round from its score table, under the ranking's own policy.

    Args:
        scores: tables.SCORES.
        tasks: all tasks of the competition.
        policy: of the ranking.
        entrants: as for ranking.rank; baselines and unranked ones are left out.
        unranked: as for ranking.rank.
        draws: random splits, bootstrap samples, and permutations, at least 200 for a ceiling worth printing.
        seed: of PCG64.

    Raises:
        Refusal: as ranking.rank.
    """
    ranked = ranking.rank(scores, tasks=tasks, policy=policy, entrants=entrants, unranked=unranked)
    names = [task.name for task in tasks]
    rows = {name: {row.entrant: row for row in ranked.tasks[name]} for name in names}
    book = read(
        scores,
        tasks=tasks,
        entrants=[*(row.entrant for row in ranked.rows), *(row.entrant for row in ranked.baselines)],
    )
    everyone = sorted(row.entrant for row in ranked.rows)
    used = [
        name
        for name in everyone
        if all(rows[task][name].score is not None and rows[task][name].direct_score is not None for task in names)
    ]
    # Tasks in which the other direction is the better one than in the first are turned, so that all of them can be compared.
    turns = metrics.turns(tasks)
    matrices = {
        "direct": _matrix([[rows[task][name].direct_score for task in names] for name in used], len(names)) * turns,
        "prepared": _matrix([[rows[task][name].score for task in names] for name in used], len(names)) * turns,
    }
    places = np.array([book.entrants.index(name) for name in used], dtype=np.int64)
    effects = {}
    for protocol in PROTOCOLS:
        random = np.random.Generator(np.random.PCG64(seed))
        halves = Halves.of(book, protocol, places, missing=policy.missing)
        effects[protocol] = effect(matrices[protocol], halves, draws=draws, random=random)
    overall = {row.entrant: row for row in ranked.rows}
    totals = _matrix([[overall[name].direct_score, overall[name].score] for name in used], 2)
    protocols = {"": _known(tau(totals[:, :1], totals[:, 1:])[0, 0])}
    for place, name in enumerate(names):
        columns = [matrices[protocol][:, place : place + 1] for protocol in PROTOCOLS]
        protocols[name] = _known(tau(*columns)[0, 0])
    falls = [max((_fall(rows[task][name], task) for task in names), key=lambda fall: fall.fall) for name in everyone]
    return Stability(
        tuple(names),
        tuple(used),
        tuple(name for name in everyone if name not in used),
        effects,
        protocols,
        tuple(_winners(task, ranked.tasks[task]) for task in names),
        _largest(falls),
        _largest([_fall(row, None) for row in ranked.rows]),
        draws,
        seed,
    )


def tau(left: Floats, right: Floats) -> Floats:
    """Kendall's tau-b of each column of `left` [m, a] with each of `right` [m, b]: [a, b], NaN where one is constant."""
    return _tau(_signs(left), _signs(right))


def agreement(scores: Floats) -> float | None:
    """Mean tau-b over pairs of columns of scores [m, tasks]; undefined pairs are left out; None without any."""
    return _mean_pairs(tau(scores, scores))


def bootstrap(scores: Floats, *, draws: int, random: np.random.Generator) -> tuple[float, float] | None:
    """Percentile interval of agreement over resampled entrants; None where undefined."""
    m = len(scores)
    left, right = np.triu_indices(m, 1)
    signs = np.sign(scores.T[:, left] - scores.T[:, right])
    values = []
    while draws > 0:
        # Entrants i and j, drawn w_i and w_j times, are w_i w_j of the sample's pairs: all sums stay whole numbers.
        times = np.array([np.bincount(random.integers(0, m, size=m), minlength=m) for _ in range(min(draws, _AT_ONCE))])
        weights = (times[:, left] * times[:, right]).T.astype(np.float64)
        sums = np.array([(signs * row) @ weights for row in signs]).reshape(len(signs), len(signs), len(times))
        for draw in range(len(times)):
            untied = np.diag(sums[:, :, draw])
            value = _mean_pairs(_normed(sums[:, :, draw], untied, untied))
            if value is not None:
                values.append(value)
        draws -= len(times)
    if not values:
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return low, high


def first_component(scores: Floats) -> float | None:
    """Share of variance of the first principal component of scores [m, tasks], columns z-scored (ddof 0); constant ones 0."""
    varying = (scores != scores[:1]).any(axis=0)  # the deviation of equal scores may be more than 0 by rounding
    if not varying.any():
        return None
    centred = scores[:, varying] - scores[:, varying].mean(axis=0)
    squares = np.linalg.svd(centred / centred.std(axis=0), compute_uv=False) ** 2
    return float(squares[0] / squares.sum())


def first_component_null(scores: Floats, *, draws: int, random: np.random.Generator) -> float | None:
    """Mean of first_component after each column is permuted by itself."""
    shares = [first_component(random.permuted(scores, axis=0)) for _ in range(draws)]
    known = [share for share in shares if share is not None]
    return math.fsum(known) / len(known) if known else None


def tied_pairs(scores: Floats) -> int:
    """Number of tied pairs of rows, summed over the columns of scores [m, tasks]."""
    m, count = scores.shape
    return int((count * m * m - np.abs(_signs(scores)).sum() - count * m) / 2)


def effect(scores: Floats, halves: "Halves", *, draws: int, random: np.random.Generator) -> Effect:
    """Agreement between the tasks of scores [m, tasks], larger is better, none missing; halves are of the same entrants and tasks."""
    pairs = tau(scores, scores)
    ceilings, half = halves.agreement(draws=draws, random=random)
    known = [value for value in ceilings if value is not None]
    return Effect(
        agreement=_mean_pairs(pairs),
        interval=bootstrap(scores, draws=draws, random=random) if len(scores) >= INFORMATIVE else None,
        ceiling=math.fsum(known) / len(known) if known else None,
        half=half,
        pairs=tuple(tuple(_known(value) for value in row) for row in pairs.tolist()),
        ceilings=tuple(ceilings),
        component=first_component(scores),
        component_null=first_component_null(scores, draws=draws, random=random),
    )


@dataclass(frozen=True)
class Halves:
    """Sums and counts of one protocol's scores by cluster, to be split.

    Attributes:
        sums: one array a task, [m, seeds, clusters of the task].
        counts: the same shapes.
        clusters: one array a task, indices into all clusters.
        strata: [clusters], equal for clusters that stand in the same tasks; each stratum is halved by itself.
    """

    sums: list[Floats]
    counts: list[Floats]
    clusters: list[Ints]
    strata: Ints

    @staticmethod
    def of(book: Scores, protocol: str, places: Ints, *, missing: str) -> "Halves":
        """Of a round's scores under one protocol, of the entrants in `places`."""
        values, clusters = [], []
        for (name, task), turn in zip(book.tasks.items(), metrics.turns(list(book.tasks.values())), strict=True):
            grid, worst = book.grids[protocol, name], metrics.metric_of(task).worst
            values.append(grid.counted(missing=missing, worst=worst)[0][places] * turn)
            clusters.append(grid.clusters)
        return Halves.of_values(values, clusters, count=len(book.clusters))

    @staticmethod
    def of_values(tasks: Sequence[Floats], places: Sequence[Ints], *, count: int) -> "Halves":
        """Of scores by task, [m, seeds, examples], NaN where left out, whose examples stand in `places` of `count` clusters."""
        sums, counts, clusters = [], [], []
        present = np.zeros((len(tasks), count), dtype=np.int64)
        for number, (values, of_task) in enumerate(zip(tasks, places, strict=True)):
            order = np.argsort(of_task, kind="stable")
            found, start = np.unique(of_task[order], return_index=True)
            known = ~np.isnan(values)
            sums.append(_grouped(np.where(known, values, 0.0)[:, :, order], start))
            counts.append(_grouped(known.astype(np.float64)[:, :, order], start))
            clusters.append(found)
            present[number, found] = 1
        _, strata = np.unique(present, axis=1, return_inverse=True)
        return Halves(sums, counts, clusters, strata.reshape(-1))

    def agreement(self, *, draws: int, random: np.random.Generator) -> tuple[list[float | None], float | None]:
        """Ceiling of each task, and the half agreement between tasks, as means over draws."""
        own: list[list[float]] = [[] for _ in self.sums]
        half: list[float] = []
        for table in self.tables(draws=draws, random=random):
            for values, value in zip(own, np.diag(table).tolist(), strict=True):
                if not math.isnan(value):
                    values.append(value)
            np.fill_diagonal(table, np.nan)
            known = table[~np.isnan(table)].tolist()
            if known:
                half.append(math.fsum(known) / len(known))
        ceilings = [math.fsum(values) / len(values) if values else None for values in own]
        return ceilings, math.fsum(half) / len(half) if half else None

    def tables(self, *, draws: int, random: np.random.Generator) -> Iterator[Floats]:
        """A table for each draw: [tasks, tasks], tau-b of one half of a task (row) with the other half of a task (column)."""
        for _ in range(draws):
            first = self._split(random)
            seeds = random.permutation(self.sums[0].shape[1])
            middle = len(seeds) // 2
            parts = (seeds[:middle], seeds[middle:]) if middle else (seeds, seeds)
            yield _tau(_signs(self._means(first, parts[0])), _signs(self._means(~first, parts[1])))

    def _split(self, random: np.random.Generator) -> NDArray[np.bool_]:
        """A random half of the clusters, as a mask; of an odd stratum, either part may be the larger."""
        size = len(self.strata)
        order = random.permutation(size)
        order = order[np.argsort(self.strata[order], kind="stable")]
        _, start, count = np.unique(self.strata[order], return_index=True, return_counts=True)
        position = np.arange(size) - np.repeat(start, count)
        larger = random.integers(0, 2, size=len(count))
        first = np.zeros(size, dtype=bool)
        first[order] = position < np.repeat((count + larger) // 2, count)
        return first

    def _means(self, half: NDArray[np.bool_], seeds: Ints) -> Floats:
        """[m, tasks]: means over these clusters and seeds, NaN where nothing is known."""
        columns = []
        for sums, counts, clusters in zip(self.sums, self.counts, self.clusters, strict=True):
            inside = half[clusters]
            total = sums[:, seeds][:, :, inside].sum(axis=(1, 2))
            count = counts[:, seeds][:, :, inside].sum(axis=(1, 2))
            columns.append(np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0))
        return np.stack(columns, axis=1)


def _grouped(values: Floats, start: Ints) -> Floats:
    return np.add.reduceat(values, start, axis=2) if len(start) else values


def _signs(scores: Floats) -> Floats:
    """[tasks, m·m]: sign of score_i − score_j, NaN where one is unknown."""
    columns = scores.T
    signs = np.sign(columns[:, :, None] - columns[:, None, :])
    return np.asarray(signs.reshape(len(columns), len(scores) ** 2))


def _tau(left: Floats, right: Floats) -> Floats:
    return _normed(left @ right.T, (left * left).sum(axis=1), (right * right).sum(axis=1))


def _normed(sums: Floats, left: Floats, right: Floats) -> Floats:
    """tau-b from sums of products of signs and how many pairs are untied on the left and on the right."""
    size = np.sqrt(np.outer(left, right))
    table: Floats = np.divide(sums, size, out=np.full(size.shape, np.nan), where=size > 0)
    return table


def _mean_pairs(table: Floats) -> float | None:
    values = table[np.triu_indices(len(table), 1)]
    known = values[~np.isnan(values)].tolist()
    return math.fsum(known) / len(known) if known else None


def _matrix(rows: list[list[float | None]], width: int) -> Floats:
    return np.array(rows, dtype=np.float64).reshape(len(rows), width)


def _winners(task: str, rows: Sequence[ranking.Row]) -> Winners:
    direct = tuple(sorted(row.entrant for row in rows if row.direct_rank == 1))
    prepared = tuple(sorted(row.entrant for row in rows if row.rank == 1))
    return Winners(task, direct, prepared, not set(direct) & set(prepared))


def _fall(row: ranking.Row, task: str | None) -> Fall:
    return Fall(row.entrant, task, row.direct_rank, row.rank, row.rank - row.direct_rank)


def _largest(falls: list[Fall]) -> tuple[Fall, ...]:
    return tuple(sorted(falls, key=lambda fall: (-fall.fall, fall.entrant)))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
