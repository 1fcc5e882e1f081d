"""Per-example scores -> Ranking: total, permutation-invariant, the same bytes on every machine.

A task's score is the mean over seeds of the mean over examples, the score is the mean of that over tasks; both protocols alike
(direct has one seed). Means are exact fractions of exactly rounded sums, so that ties are decided on unrounded numbers and no
order of summation shows. Rank and interval are of the prepared protocol; the direct protocol gives direct_rank and direct_score.

Missing scores, by policy:
    worst: an unscored example counts as the metric's worst value (an entrant lacks a score where the metric has none).
    exclude: an unscored example is left out of the entrant's mean, and shows in `n`; a task without any leaves no score. Where
        the model itself is the reason (its numbers are none), the example counts as under `worst`: nobody abstains by NaN.
    fail: an entrant of whom one example is unscored under any seed has failed in that task: no score. Nobody else is touched by it.
An entrant without a score has score null and ranks after all others: one whose every preparation failed, under each policy.

Uncertainty (design: cluster covariance of Miller; tasks are fixed, clusters and seeds random): with r_tc an entrant's sum over
cluster c of seed-averaged residuals in task t, S_ij = Σ_c u_ic u_jc with u_ic = (1/T) Σ_t sqrt(G_t/(G_t−1)) r_itc / n_t, which is
Σ_tu w_t w_u S_tu with examples that tasks share in one cluster; plus, on the diagonal, (1/T²) Σ_t σ²_t / K. σ²_t is the variance
between seed means beyond what items explain, pooled over the ranked entrants below 10 seeds, never negative, and not
applicable (0) to an entrant whose seeds all gave the same scores, since then the base model was chosen.

Tasks whose metrics share no scale are aggregated by ranks (task_ranks.py): the score is then the mean over tasks of an entrant's
rank in each, or its win rate, among those who have a score; a task alone is ranked by its metric in any case.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from acclimate_competitions import confidence, digests, metrics, task_ranks
from acclimate_competitions.confidence import Bools
from acclimate_competitions.definition import Policy, Task
from acclimate_competitions.errors import Refusal
from acclimate_competitions.scores import Scores, mean_over_seeds, read


@dataclass(frozen=True)
class Row:
    """One ranked entrant.

    Attributes:
        rank: 1 is the best; equal scores share a rank (1-2-2-4).
        rank_low: best rank in the confidence set.
        rank_high: worst rank in the confidence set.
        tier: the best without a tier opens one; all not significantly worse than it join.
        score: prepared; None where there is none.
        se: standard error of score; None where it can't be known (one cluster).
        n: examples (summed over tasks) that are scored under every seed.
        seeds: number of seeds with any score.
        direct_rank: rank by the direct protocol.
        direct_score: score by the direct protocol; None where there is none.
    """

    entrant: str
    rank: int
    rank_low: int
    rank_high: int
    tier: int
    score: float | None
    se: float | None
    n: int
    seeds: int
    direct_rank: int
    direct_score: float | None


@dataclass(frozen=True)
class Baseline:
    """One baseline, or entrant with a declared conflict of interest: fields as of Row, without ranks."""

    entrant: str
    score: float | None
    se: float | None
    n: int
    seeds: int
    direct_score: float | None


@dataclass(frozen=True)
class Ranking:
    """A ranking: rows by rank, then entrant; the same for each task alone."""

    policy: Policy
    rows: tuple[Row, ...]
    baselines: tuple[Baseline, ...]
    tasks: Mapping[str, tuple[Row, ...]]

    def document(self) -> dict[str, Any]:
        """ranking.json: nothing of round, time or salt in it."""
        policy = self.policy.document()
        return {
            "policy": {**policy, "baselines": list(policy["baselines"])},
            "ranking": [dataclasses.asdict(row) for row in self.rows],
            "baselines": [dataclasses.asdict(row) for row in self.baselines],
            "tasks": {task: [dataclasses.asdict(row) for row in rows] for task, rows in self.tasks.items()},
        }

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON of document()."""
        return digests.of_json(self.document())

    def text(self) -> str:
        """A plain table for terminals."""
        return text(self.document())


def rank(
    scores: pa.Table,
    *,
    tasks: Sequence[Task],
    policy: Policy,
    entrants: Sequence[str],
    unranked: Collection[str] = frozenset(),
) -> Ranking:
    """Rank entrants by a score table.

    Args:
        scores: tables.SCORES, of entrants and baselines; metrics that are not a task's own are left alone.
        tasks: all tasks of the competition.
        policy: `[ranking]` of the definition.
        entrants: ids that must appear in the ranking, whether they have scores or not; baselines among them are unranked.
        unranked: those of them that stand among the baselines too, as they declared a conflict of interest.

    Raises:
        Refusal: scores_invalid, naming the row; definition_invalid, for metrics that can't be averaged over tasks.
    """
    _check_scale(tasks, policy)
    beside = sorted(set(policy.baselines) | set(entrants).intersection(unranked))
    ranked = sorted(set(entrants).difference(beside))
    book = read(scores, tasks=tasks, entrants=[*ranked, *beside])
    pool = np.isin(book.entrants, ranked)
    parts = {key: _Part.of(book, key, missing=policy.missing, pool=pool) for key in book.grids}
    names = [task.name for task in tasks]
    by_mean = dataclasses.replace(policy, aggregate="mean")
    alone = {name: _Standing(book, parts, by_mean, [name]) for name in names}
    if policy.aggregate == "mean":
        whole = _Standing(book, parts, policy, names)
    else:
        whole = _ByRanks(book, parts, policy, names, ranked=ranked)
    baselines = tuple(whole.baseline(book.entrants.index(name)) for name in beside)
    return Ranking(policy, whole.rows(ranked), baselines, {name: one.rows(ranked) for name, one in alone.items()})


def direction(policy: Policy, tasks: Sequence[Task]) -> Literal["max", "min"]:
    """Whether a larger or a smaller score of the whole ranking is the better one."""
    if policy.aggregate == "mean":
        return metrics.metric_of(tasks[0]).direction
    return "max" if policy.aggregate == "win_rate" else "min"


def shared_ranks(scores: Sequence[Fraction | None], *, tolerance: float) -> list[int]:
    """Competition ranks (1-2-2-4), larger is better, None last.

    A score ties with the best of its group where it is at most `tolerance` below it; the tolerance is taken as the
    decimal number that it prints as.
    """
    within = Fraction(str(tolerance))
    known = sorted((score for score in scores if score is not None), reverse=True)
    places: dict[Fraction, int] = {}
    leader, place = Fraction(0), 0
    for position, score in enumerate(known, start=1):
        if position == 1 or leader - score > within:
            leader, place = score, position
        places.setdefault(score, place)
    return [len(known) + 1 if score is None else places[score] for score in scores]


def text(document: Mapping[str, Any]) -> str:
    """A ranking document as a plain table for terminals; what can't be printed in a name is escaped."""
    policy = document["policy"]["interval"]
    head = [
        "rank",
        f"{policy['level']:.0%} set",
        "tier",
        "entrant",
        "prepared",
        "± se",
        "direct",
        "direct rank",
        "n",
        "seeds",
    ]
    lines = [head]
    for row in document["ranking"]:
        interval = f"{row['rank_low']}–{row['rank_high']}"
        lines.append([str(row["rank"]), interval, str(row["tier"]), *_cells(row), str(row["direct_rank"])])
    for row in document["baselines"]:
        lines.append(["·", "·", "·", *_cells(row), "·"])
    for line in lines[1:]:  # _cells ends with n and seeds; the direct rank stands before them
        line[7:] = [line[9], line[7], line[8]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = {1, 3}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width) for column, (cell, width) in enumerate(pairs)
        ).rstrip()
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    name = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in row["entrant"])
    numbers = ["–" if row[key] is None else f"{row[key]:.4f}" for key in ("score", "se", "direct_score")]
    return [name, *numbers, str(row["n"]), str(row["seeds"])]


def _check_scale(tasks: Sequence[Task], policy: Policy) -> None:
    if not tasks:
        raise Refusal("definition_invalid", "there are no tasks to rank by")
    if policy.aggregate != "mean":
        return
    scales = {(metric.direction, metric.scale) for metric in map(metrics.metric_of, tasks)}
    if len(scales) > 1:
        found = ", ".join(f"{task.name}: {task.metric}" for task in tasks)
        raise Refusal(
            "definition_invalid",
            f"a mean over tasks needs metrics of one scale and direction, found {found}",
            hint='use one metric for all tasks, or [ranking] aggregate = "win_rate"',
        )


@dataclass(frozen=True)
class _Part:
    """One task under one protocol, with the policy applied; each field is by entrant.

    Attributes:
        means: the task's score, None where there is none.
        found: whether a single example is scored.
        n: examples scored under every seed.
        seeds: seeds with any score.
        error: of means.
    """

    means: list[Fraction | None]
    found: list[bool]
    n: list[int]
    seeds: list[int]
    error: confidence.TaskError

    @staticmethod
    def of(book: Scores, key: tuple[str, str], *, missing: str, pool: Bools) -> "_Part":
        grid, worst = book.grids[key], metrics.metric_of(book.tasks[key[1]]).worst
        scored = ~np.isnan(grid.values)
        whole: Bools = np.asarray(scored.all(axis=(1, 2)))
        values, left_out = grid.counted(missing=missing, worst=worst)
        means = [mean_over_seeds(rows) for rows in values]
        if worst is None:  # what must count as the worst, and can't, leaves no score
            lost = np.asarray((np.isnan(values) & ~left_out).any(axis=(1, 2))).tolist()
            means = [None if gone else mean for mean, gone in zip(means, lost, strict=True)]
        if missing == "fail":
            means = [mean if known else None for mean, known in zip(means, whole.tolist(), strict=True)]
        under_all = scored.all(axis=1) & (scored.shape[1] > 0)
        return _Part(
            means,
            np.asarray(scored.any(axis=(1, 2))).tolist(),
            under_all.sum(axis=1).tolist(),
            scored.any(axis=2).sum(axis=1).tolist(),
            confidence.task_error(values, grid.clusters, count=len(book.clusters), pool=whole & pool),
        )


class _Standing:
    """Entrants and baselines over some of the tasks: all of them, or one alone."""

    def __init__(self, book: Scores, parts: Mapping[tuple[str, str], _Part], policy: Policy, names: list[str]) -> None:
        self._policy = policy
        self._entrants = book.entrants
        self._prepared = [parts["prepared", name] for name in names]
        self._scores = self._means(self._prepared)
        self._direct = self._means([parts["direct", name] for name in names])
        self._sign = 1 if direction(policy, [book.tasks[name] for name in names]) == "max" else -1
        self._errors = confidence.standard_errors([part.error for part in self._prepared])

    def _means(self, parts: list[_Part]) -> list[Fraction | None]:
        result: list[Fraction | None] = []
        for place in range(len(self._entrants)):
            means = [part.means[place] for part in parts]
            known = [mean for mean in means if mean is not None]
            whole = len(known) == len(means) and any(part.found[place] for part in parts)
            result.append(sum(known, Fraction(0)) / len(known) if whole else None)
        return result

    def _ranks(self, scores: list[Fraction | None]) -> list[int]:
        signed = [None if score is None else self._sign * score for score in scores]
        return shared_ranks(signed, tolerance=self._policy.ties.tolerance)

    def baseline(self, place: int) -> Baseline:
        score, error = self._scores[place], self._errors[place]
        return Baseline(
            self._entrants[place],
            _float(score),
            None if score is None or math.isnan(error) else error,
            sum(part.n[place] for part in self._prepared),
            max(part.seeds[place] for part in self._prepared),
            _float(self._direct[place]),
        )

    def rows(self, ranked: Sequence[str]) -> tuple[Row, ...]:
        """One row for each of the sorted ids `ranked`."""
        places = [self._entrants.index(entrant) for entrant in ranked]
        ranks = self._ranks([self._scores[place] for place in places])
        direct = self._ranks([self._direct[place] for place in places])
        known = [order for order, place in enumerate(places) if self._scores[place] is not None]
        sets = self._rank_sets([places[order] for order in known])
        beaten = len(known)  # all without a score are worse than all with one, by the policy
        low, high = [beaten + 1] * len(places), [len(places)] * len(places)
        for order, best, worst in zip(known, sets.low.tolist(), sets.high.tolist(), strict=True):
            # The set holds the point rank by construction, except where the tie tolerance reaches beyond the error.
            low[order], high[order] = min(best, ranks[order]), max(worst, ranks[order])
        tiers = _tiers([ranks[order] for order in known], sets.better)
        tier = [max(tiers, default=0) + 1] * len(places)
        for order, number in zip(known, tiers, strict=True):
            tier[order] = number
        rows = [
            Row(
                rank=ranks[order],
                rank_low=low[order],
                rank_high=high[order],
                tier=tier[order],
                direct_rank=direct[order],
                **dataclasses.asdict(self.baseline(place)),
            )
            for order, place in enumerate(places)
        ]
        return tuple(sorted(rows, key=lambda row: (row.rank, row.entrant)))

    def _rank_sets(self, places: list[int]) -> confidence.RankSets:
        covariance = confidence.covariance([part.error for part in self._prepared])[np.ix_(places, places)]
        interval = self._policy.interval
        return confidence.rank_sets(
            [self._sign * float(self._scores[place] or 0) for place in places],
            covariance,
            kind=interval.kind,
            level=interval.level,
            draws=interval.draws,
            seed=interval.seed,
        )


class _ByRanks(_Standing):
    """The same by ranks in each of the tasks, among those of `ranked` who have a score; others are compared with these."""

    def __init__(
        self,
        book: Scores,
        parts: Mapping[tuple[str, str], _Part],
        policy: Policy,
        names: list[str],
        *,
        ranked: Sequence[str],
    ) -> None:
        super().__init__(book, parts, policy, names)
        self._signs = [1 if metrics.metric_of(book.tasks[name]).direction == "max" else -1 for name in names]
        places = {book.entrants.index(name) for name in ranked}
        self._scores = self._aggregated(self._prepared, self._scores, places)
        self._direct = self._aggregated([parts["direct", name] for name in names], self._direct, places)
        self._errors = [math.nan] * len(self._entrants)

    def _aggregated(self, parts: list[_Part], means: list[Fraction | None], places: set[int]) -> list[Fraction | None]:
        among = sorted(place for place in places if means[place] is not None)
        table = [
            [None if mean is None else sign * mean for mean in part.means]
            for sign, part in zip(self._signs, parts, strict=True)
        ]
        ordered = [sorted(mean for place in among if (mean := row[place]) is not None) for row in table]
        result: list[Fraction | None] = []
        for place, mean in enumerate(means):
            own = [row[place] for row in table]
            if mean is None:
                result.append(None)
                continue
            known = [score for score in own if score is not None]
            inside = place in places
            rank = task_ranks.mean_rank(known, ordered) - (Fraction(1, 2) if inside else 0)  # it is no tie of its own
            rate = self._policy.aggregate == "win_rate"
            result.append(task_ranks.win_rate(rank, others=len(among) - inside) if rate else rank)
        return result

    def _rank_sets(self, places: list[int]) -> confidence.RankSets:
        interval, count = self._policy.interval, len(self._prepared)
        level = task_ranks.task_level(interval.level, count)
        found = []
        for sign, part in zip(self._signs, self._prepared, strict=True):
            scores = [sign * float(part.means[place] or 0) for place in places]
            covariance = confidence.covariance([part.error])[np.ix_(places, places)]
            rule: Any = {"kind": "simultaneous", "level": level, "draws": interval.draws, "seed": interval.seed}
            found.append(confidence.rank_sets(scores, covariance, **rule))
        return task_ranks.rank_sets(found)


def _tiers(ranks: list[int], better: Bools) -> list[int]:
    """Tier of each; equal ranks are opened in the order given."""
    tiers = [0] * len(ranks)
    for number in range(1, len(ranks) + 1):
        waiting = [place for place, tier in enumerate(tiers) if not tier]
        if not waiting:
            break
        leader = min(waiting, key=ranks.__getitem__)
        for place in waiting:
            if not better[leader, place]:
                tiers[place] = number
    return tiers


def _float(score: Fraction | None) -> float | None:
    return None if score is None else float(score)
