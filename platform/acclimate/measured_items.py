"""Scores by example of anybody's predictions: a long table with targets and predictions, by one of the metrics of `acclimate_competitions.measures`.

A row is one prediction: entrant, example, target, and set, cluster, seed, protocol where such columns are. What is predicted stands in `prediction` (a
label, text or number; of bits_per_byte nats, with the example's bytes as its target), in one column `p:LABEL` for each label, or, with the labels in
`choices`, as a list in `probabilities` or `loglikelihoods`, whose softmax is taken. Of probabilities the label is the largest, the first at a tie.

A metric that is no mean of scores by example is given as jackknife pseudo-values of at most 200 groups of clusters, the same for all entrants.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from acclimate import directions, example_tables, score_tables
from acclimate.score_tables import Columns, Named, Source, listed
from acclimate_competitions import measures
from acclimate_competitions.errors import Refusal

_KEYS = ("entrant", "protocol", "set", "seed")


def opened(source: Source, options: Mapping[str, Any]) -> tuple[Named, dict[str, Any]] | None:
    """A table of predictions as one of scores by example, and the options that are left; None where it is no such table.

    Args:
        source: as score_tables.read takes it.
        options: metric, which counts if the table has predictions and no scores of that name; missing.

    Raises:
        Refusal: file_unreadable; scores_invalid, for what can't be scored.
    """
    metric = options.get("metric")
    if metric not in measures.MEASURES:
        return None
    table = score_tables.read(source)
    columns = {column.lower(): column for column in reversed(table.cells)}
    given = _Given.of(table, columns)
    if given is None or "target" not in columns or metric in _scored(table, columns):
        return None
    found = measures.MEASURES[metric]
    roles = {
        role: columns[name] for role in ("entrant", "example", "cluster", "seed") if (name := _named(columns, role))
    }
    lacking = [
        f"{role}: one of {listed(example_tables.ROLES[role])}" for role in ("entrant", "example") if role not in roles
    ]
    score_tables.refuse(
        f"{table.name} has predictions, but not whose or of what", lacking, hint="a row is one prediction"
    )
    rows = _Rows(table, roles, columns, given, found)
    notes = [
        *table.notes,
        f"{table.name}: {metric} is computed from the predictions{given.how(found)}; {_BETTER[found.direction]}",
    ]
    made = rows.by_example(found) if found.mean else rows.pseudo(found, options, notes)
    left = {name: value for name, value in options.items() if name != "metric"}
    left |= directions.of_metrics((one, found.name) for one in example_tables.sets_of(table))[0]
    left["worst_score"] = found.low if found.direction == "max" else found.high
    own = dict.fromkeys(example_tables.sets_of(score_tables.read(made)), found.name)
    return Named(made, table.name, tuple(notes), metrics=own), left


_BETTER = {"min": "lower is better", "max": "higher is better"}


def _named(columns: Mapping[str, str], role: str) -> str | None:
    return next((name for name in example_tables.ROLES[role] if name in columns and name != "target"), None)


def _scored(table: Columns, columns: Mapping[str, str]) -> set[str]:
    """The metrics of which the table has scores."""
    if "metric" not in columns or _named(columns, "score") is None:
        return set()
    return {str(name) for name in table.cells[columns["metric"]]}


class _Given:
    """What a table has predictions in: its column, or columns p:LABEL."""

    def __init__(self, table: Columns, kind: str, columns: Mapping[str, str]) -> None:
        self.table, self.kind = table, kind
        self.labels: list[list[str]] | None = None
        self._own = {name.removeprefix("p:"): name for name in table.cells if name.startswith("p:")}
        self._column = columns.get(kind, "")
        if kind == "p:":
            self.labels = [list(self._own)] * len(table.rows)
        elif kind != "prediction":
            if "choices" not in columns:
                hint = "a column choices, a list of labels in their order"
                raise Refusal("scores_invalid", f"{table.name}: {kind} of which labels?", hint=hint)
            cells = [_list(table, place, columns["choices"]) for place in range(len(table.rows))]
            self.labels = [[str(one) for one in cell or ()] for cell in cells]

    @staticmethod
    def of(table: Columns, columns: Mapping[str, str]) -> "_Given | None":
        kinds = [kind for kind in ("loglikelihoods", "probabilities", "prediction") if kind in columns]
        kinds += ["p:"] if any(name.startswith("p:") for name in table.cells) else []
        return _Given(table, kinds[0], columns) if kinds else None

    def how(self, found: measures.Measure) -> str:
        return (
            ", as the softmax of the log-likelihoods"
            if (self.kind, found.takes) == ("loglikelihoods", "probabilities")
            else ""
        )

    def predictions(self, found: measures.Measure) -> list[Any]:
        """One a row, of the kind that the metric takes; None where there is none."""
        takes = found.takes
        if takes in ("text", "number", "nats") or (takes == "label" and self.kind == "prediction"):
            if self.kind != "prediction":
                self._refuse(found, "a column prediction")
            if takes in ("label", "text"):
                # Only what is not there is absent: an answer may well be the word none.
                cells = self.table.cells[self._column]
                return [None if cell is None or cell != cell or cell == "" else str(cell) for cell in cells]
            return [None if value != value else value for value in self.table.numbers(self._column)[:, 0].tolist()]
        if self.kind == "prediction":
            self._refuse(found, "a column p:LABEL for each label, probabilities or loglikelihoods")
        lists = self._lists()
        assert self.labels is not None
        if takes == "label":
            return [
                None if one is None else own[one.index(max(one))] for one, own in zip(lists, self.labels, strict=True)
            ]
        return lists

    def _lists(self) -> list[list[float] | None]:
        """Probabilities, one list a row."""
        assert self.labels is not None
        if self.kind == "p:":
            numbers = self.table.numbers(*self._own.values()).tolist()
        else:
            numbers = [_list(self.table, place, self._column) for place in range(len(self.table.rows))]
        found: list[list[float] | None] = []
        for one, own in zip(numbers, self.labels, strict=True):
            good = (
                one is not None
                and len(one) == len(own) > 0
                and all(cell is not None and abs(cell) < float("inf") for cell in one)
            )
            row = [float(cell) for cell in one] if good else None
            found.append(measures.softmax(row) if row is not None and self.kind == "loglikelihoods" else row)
        return found

    def _refuse(self, found: measures.Measure, needs: str) -> None:
        sentence = f"{self.table.name}: {found.name} takes {found.takes}, which {self.kind} has not"
        raise Refusal("scores_invalid", sentence, hint=needs)


def _list(table: Columns, place: int, column: str) -> list[Any] | None:
    cell = table.cells[column][place]
    if score_tables.absent(cell):
        return None
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            cell = None
    if not isinstance(cell, list):
        where = table.at([place])
        raise Refusal(
            "scores_invalid", f"{table.name}, {where}: {column} is no list", hint="a JSON list, such as [0.2, 0.8]"
        )
    return cell


class _Rows:
    """Predictions of a table, gathered by whose they are: entrant, protocol, set and seed."""

    def __init__(
        self,
        table: Columns,
        roles: Mapping[str, str],
        columns: Mapping[str, str],
        given: _Given,
        found: measures.Measure,
    ) -> None:
        self._name, self._predictions, self._labels = table.name, given.predictions(found), given.labels
        count = len(table.rows)
        targets = table.cells[columns["target"]]
        bad = [place for place, target in enumerate(targets) if target is None or target != target or target == ""]
        score_tables.refuse(
            f"{table.name}: rows without a target", [table.at([place]) for place in bad], hint="name the right answer"
        )
        self._targets: list[Any] = [str(target) for target in targets]
        if found.takes in ("number", "nats"):
            self._targets = table.numbers(columns["target"])[:, 0].tolist()
        self.examples = table.names(roles["example"])
        self.clusters = table.names(roles["cluster"]) if "cluster" in roles else self.examples
        sets = example_tables.sets_of(table)
        seeds = table.cells[roles["seed"]] if "seed" in roles else [None] * count
        seeds = [None if score_tables.absent(seed) else str(seed) for seed in seeds]
        protocols = table.names(columns["protocol"]) if "protocol" in columns else [None] * count
        self._protocols = "protocol" in columns
        self._of: dict[tuple[Any, ...], list[int]] = {}
        for place, key in enumerate(zip(table.names(roles["entrant"]), protocols, sets, seeds, strict=True)):
            self._of.setdefault(key, []).append(place)

    def _asked(self, places: Sequence[int]) -> tuple[list[Any], list[Any], Sequence[str]]:
        """Predictions, targets and labels of some rows."""
        labels: Sequence[str] = ()
        if self._labels is not None and places:
            labels = self._labels[places[0]]
            if any(list(self._labels[place]) != list(labels) for place in places):
                raise Refusal(
                    "scores_invalid", f"{self._name}: choices differ within a set", hint="one order of labels a set"
                )
        return [self._predictions[place] for place in places], [self._targets[place] for place in places], labels

    def by_example(self, found: measures.Measure) -> pa.Table:
        """A score a row; null where there is no prediction."""
        rows = []
        for key, places in self._of.items():
            predictions, targets, labels = self._asked(places)
            scores = measures.score(found.name, predictions, targets, labels=labels).per_example
            assert scores is not None
            for place, score in zip(places, scores.tolist(), strict=True):
                rows.append((*key, self.examples[place], self.clusters[place], None if score != score else score))
        return self._table(rows)

    def pseudo(self, found: measures.Measure, options: Mapping[str, Any], notes: list[str]) -> pa.Table:
        """A pseudo-value a group of clusters; refused where predictions are missing, unless they are to be left out."""
        groups = {name: place % measures.GROUPS for place, name in enumerate(sorted(set(self.clusters)))}
        there: dict[str, set[str]] = {}
        for key, places in self._of.items():
            there.setdefault(key[2], set()).update(self.examples[place] for place in places)
        rows: list[tuple[Any, ...]] = []
        lacks = []
        for key, places in self._of.items():
            kept = [place for place in places if not measures.absent(self._predictions[place])]
            if gone := len(there[key[2]]) - len(kept):
                lacks.append(f"{key[0]!r}: {gone} of {len(there[key[2]])} in {key[2] or 'the table'}")
            predictions, targets, labels = self._asked(kept)
            own = [groups[self.clusters[place]] for place in kept]
            values = measures.pseudo_values(found.name, predictions, targets, groups=own, labels=labels)
            rows += [(*key, f"group {group:03}", f"group {group:03}", value) for group, value in values.items()]
        if lacks and options.get("missing", "fail") != "exclude":
            hint = f"--missing exclude leaves them out; {found.name} is no mean of scores by example, so that there is no worst one"
            score_tables.refuse("predictions are missing: entrants were not all asked the same", lacks, hint=hint)
        if lacks:
            notes.append(f"left out of {found.name}, as missing: {listed(lacks, quoted=False)}")
        notes.append(
            f"{found.name} is no mean of scores by example: jackknife pseudo-values of {len(set(groups.values()))} groups of clusters stand for them"
        )
        return self._table(rows)

    def _table(self, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
        names = (*_KEYS, "example", "cluster", "score")
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
        types = {"score": pa.float64()}
        made = pa.table(
            {name: pa.array(column, types.get(name, pa.string())) for name, column in zip(names, columns, strict=True)}
        )
        empty = [
            name for name, there in (("protocol", self._protocols), ("set", any(made["set"].to_pylist()))) if not there
        ]
        return made.drop_columns(empty)
