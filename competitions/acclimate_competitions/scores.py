"""A score table as dense arrays in canonical order: what ranking and stability compute from.

The order of rows, chunks, and dictionaries of the table leaves no trace: entrants, seeds, clusters, and each task's examples
are sorted. An absent row and a null score are the same here: NaN, unscored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from acclimate_competitions import metrics, tables
from acclimate_competitions.definition import Task
from acclimate_competitions.errors import Refusal

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Grid:
    """The scores of one task by its own metric under one protocol.

    Attributes:
        values: [entrants, seeds, examples], NaN where unscored; direct has one seed, which is null.
        clusters: [examples], indices into Scores.clusters.
        faults: as values, whether the model itself is why an example is unscored (metrics.OWN_FAULTS).
    """

    values: Floats
    clusters: Ints
    faults: Bools

    def counted(self, *, missing: str, worst: float | None) -> tuple[Floats, Bools]:
        """The values under a policy for missing scores, and what of them is left out of every mean.

        Where an example must count as the worst value, and the metric has none, it stays NaN without being left out.

        Args:
            missing: worst: every unscored example counts as the worst value. exclude: it is left out, unless the model itself
                is why it is unscored, for else a model could abstain where it would be wrong.
            worst: the metric's worst value, if it has one.
        """
        unscored = np.isnan(self.values)
        charged = unscored if missing == "worst" else unscored & self.faults
        values = self.values if worst is None else np.where(charged, worst, self.values)
        return values, unscored & ~charged


@dataclass(frozen=True)
class Scores:
    """A whole score table.

    Attributes:
        entrants: sorted ids; the first axis of every grid.
        tasks: name -> task, in the competition's order.
        seeds: of protocol prepared, sorted.
        clusters: sorted names, over all tasks: a cluster's name means the same in each task.
        grids: (protocol, task) -> grid.
    """

    entrants: tuple[str, ...]
    tasks: Mapping[str, Task]
    seeds: tuple[int, ...]
    clusters: tuple[str, ...]
    grids: Mapping[tuple[str, str], Grid]


def read(scores: pa.Table, *, tasks: Sequence[Task], entrants: Sequence[str]) -> Scores:
    """Arrange a score table (tables.SCORES) of these entrants and tasks.

    A task's examples are all that stand in the table for it, by whomever; seeds are all that stand in it.

    Raises:
        Refusal: scores_invalid, naming the row: other columns, an unknown entrant, task, protocol or metric, a protocol that
            does not fit its seed, a score outside the metric's range, two rows of one key, an example in two clusters;
            definition_invalid, for a task whose metric is unknown.
    """
    rows = _Rows.of(scores)
    allowed: dict[str, list[str]] = {
        "entrant": sorted(set(entrants)),
        "protocol": list(tables.PROTOCOLS),
        "task": [task.name for task in tasks],
        "metric": sorted(metrics.METRICS),
    }
    codes = {name: rows.recode(name, values) for name, values in allowed.items()}
    rows.check_seeds(codes["protocol"] == allowed["protocol"].index("direct"))
    rows.check_unique(codes)
    own = np.array([allowed["metric"].index(metrics.metric_of(task).name) for task in tasks], dtype=np.int64)
    primary = codes["metric"] == own[codes["task"]]
    rows.check_clusters(codes["task"], len(tasks))
    seeds = np.unique(rows.seeds[primary & ~rows.seedless])
    grids: dict[tuple[str, str], Grid] = {}
    for number, task in enumerate(tasks):
        of_task = primary & (codes["task"] == number)
        rows.check_values(of_task, metrics.metric_of(task))
        examples, position = np.unique(rows.codes["example"][of_task], return_inverse=True)
        clusters = np.zeros(len(examples), dtype=np.int64)
        clusters[position] = rows.codes["cluster"][of_task]
        for code, protocol in enumerate(tables.PROTOCOLS):
            here = codes["protocol"][of_task] == code
            count = 1 if protocol == "direct" else len(seeds)
            values = np.full((len(allowed["entrant"]), count, len(examples)), np.nan)
            seed = 0 if protocol == "direct" else np.searchsorted(seeds, rows.seeds[of_task][here])
            values[codes["entrant"][of_task][here], seed, position[here]] = rows.values[of_task][here]
            faults = np.zeros(values.shape, dtype=bool)
            faults[codes["entrant"][of_task][here], seed, position[here]] = rows.faults[of_task][here]
            grids[protocol, task.name] = Grid(values, clusters, faults)
    return Scores(
        tuple(allowed["entrant"]),
        {task.name: task for task in tasks},
        tuple(seeds.tolist()),
        tuple(rows.names["cluster"]),
        grids,
    )


@dataclass(frozen=True)
class _Rows:
    """The table's columns as numpy: codes into sorted names, seeds (0 where null), values (NaN where null), faults of the model."""

    codes: dict[str, Ints]
    names: dict[str, list[str]]
    seeds: Ints
    seedless: Bools
    values: Floats
    faults: Bools

    @staticmethod
    def of(scores: pa.Table) -> "_Rows":
        if scores.schema.names != tables.SCORES.names:
            raise Refusal(
                "scores_invalid",
                f"columns of the score table are {scores.schema.names}, expected {tables.SCORES.names}",
            )
        codes: dict[str, Ints] = {}
        names: dict[str, list[str]] = {}
        try:
            for name in ("entrant", "protocol", "task", "metric", "example", "cluster"):
                codes[name], names[name] = _encode(scores.column(name), name)
            seeds = scores.column("seed").cast(pa.int64()).combine_chunks()
            values = scores.column("score").cast(pa.float64()).to_numpy()
            reasons = scores.column("reason").cast(pa.string()).combine_chunks().dictionary_encode()
        except pa.ArrowException as error:
            raise Refusal("scores_invalid", f"the score table has a column of the wrong type: {error}") from error
        return _Rows(
            codes,
            names,
            seeds.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64),
            seeds.is_null().to_numpy(zero_copy_only=False),
            np.asarray(values, dtype=np.float64),
            _own_faults(reasons),
        )

    def refuse(self, rows: Bools, what: str) -> None:
        """Refuse the first of the marked rows, if any."""
        if rows.any():
            row = int(np.argmax(rows))
            name: dict[str, Any] = {key: self.names[key][codes[row]] for key, codes in self.codes.items()}
            seed = None if self.seedless[row] else int(self.seeds[row])
            raise Refusal(
                "scores_invalid",
                f"score row {row} (entrant {name['entrant']!r}, {name['protocol']}, task {name['task']!r}, seed {seed}, "
                f"{name['metric']}, example {name['example']!r}, score {self.values[row]}): {what}",
            )

    def recode(self, column: str, allowed: Sequence[str]) -> Ints:
        """Codes into `allowed` instead of the sorted names of the table."""
        places = {name: place for place, name in enumerate(allowed)}
        recoded = np.array([places.get(name, -1) for name in self.names[column]], dtype=np.int64)[self.codes[column]]
        self.refuse(recoded < 0, f"unknown {column}")
        return recoded

    def check_seeds(self, direct: Bools) -> None:
        self.refuse(direct & ~self.seedless, "a direct evaluation has no seed")
        self.refuse(~direct & self.seedless, "an evaluation of a prepared model has a seed")

    def check_unique(self, codes: dict[str, Ints]) -> None:
        _, seed = np.unique(self.seeds, return_inverse=True)
        key = np.zeros(len(self.values), dtype=np.int64)
        for column in (*codes.values(), seed, self.codes["example"]):
            key = key * (int(column.max(initial=0)) + 1) + column
        order = np.argsort(key, kind="stable")
        double = np.zeros(len(key), dtype=bool)
        double[order[1:]] = key[order[1:]] == key[order[:-1]]
        self.refuse(double, "a second row of the same key")

    def check_clusters(self, task: Ints, count: int) -> None:
        place = task * max(1, len(self.names["example"])) + self.codes["example"]
        cluster = np.zeros(count * max(1, len(self.names["example"])), dtype=np.int64)
        cluster[place[::-1]] = self.codes["cluster"][::-1]  # the first row of an example decides
        other = cluster[place] != self.codes["cluster"]
        names = self.names["cluster"]
        detail = f"cluster {names[self.codes['cluster'][np.argmax(other)]]!r}" if other.any() else ""
        self.refuse(other, f"{detail} differs from that of an earlier row of the example")

    def check_values(self, rows: Bools, metric: metrics.Metric) -> None:
        low = -np.inf if metric.low is None else metric.low
        high = np.inf if metric.high is None else metric.high
        beyond = (self.values < low) | (self.values > high) | np.isinf(self.values)
        self.refuse(rows & beyond, f"outside the range of {metric.name}")


def mean_over_seeds(rows: Floats) -> Fraction | None:
    """Exact mean over seeds of the means of their known values; a seed without any is left out; None where no seed has one.

    Args:
        rows: [seeds, examples], NaN where unscored.
    """
    means = []
    for row in rows:
        known = row[~np.isnan(row)].tolist()
        if known:
            means.append(Fraction(math.fsum(known)) / len(known))
    return sum(means, Fraction(0)) / len(means) if means else None


def _own_faults(reasons: pa.DictionaryArray) -> Bools:
    # The last place stands for null: no reason.
    own = np.array([name in metrics.OWN_FAULTS for name in reasons.dictionary.to_pylist()] + [False], dtype=bool)
    codes = reasons.indices.fill_null(len(own) - 1).to_numpy(zero_copy_only=False)
    return np.asarray(own[codes])


def _encode(column: pa.ChunkedArray, name: str) -> tuple[Ints, list[str]]:
    """Codes and sorted names of a string column."""
    if column.null_count:
        raise Refusal("scores_invalid", f"the score table has a row without {name}")
    encoded = column.cast(pa.string()).combine_chunks().dictionary_encode()
    names: list[str] = encoded.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names), dtype=np.int64)
    rank[order] = np.arange(len(names))
    indices = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return rank[indices] if len(names) else indices, [names[place] for place in order]
