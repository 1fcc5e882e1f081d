"""Which way scores go, told here alone: by the metric that is named, by what the source says, and of tables entrants × tasks by a column's name.

What an analyst says counts before all of it. A name tells a direction where it is that of a loss that is known here, alone or at the end of a path
(`nll`, `wiki/perplexity`). A column whose values are all below 0 is taken as turned before. What only sounds like a loss (`val_loss`) is asked about.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from acclimate import score_tables
from acclimate.score_tables import Columns, Wide, listed
from acclimate_competitions import measures, metrics
from acclimate_competitions.errors import Refusal

LOSSES = frozenset(
    name for known in (metrics.METRICS, measures.MEASURES) for name, one in known.items() if one.direction == "min"
)
"""The metrics of ours in which lower is better."""
_CALLED = LOSSES | {"perplexity", "word_perplexity", "byte_perplexity", "ppl", "loss", "cross_entropy", "mse"}
_TURNED = "all scores are below 0, so turned already"
_SOUNDS = frozenset(
    {"loss", "perplexity", "ppl", "nll", "bpb", "rmse", "mae", "mse", "wer", "cer", "error", "brier", "ece"}
)


def scale(metric: str) -> tuple[str, str]:
    """Of which direction and scale a metric is: only metrics of one make a mean."""
    known = metrics.METRICS.get(metric) or measures.MEASURES.get(metric)
    return (known.direction, getattr(known, "scale", metric)) if known is not None else ("max", metric)


def of_metrics(
    pairs: Iterable[tuple[str, str]], *, said: Collection[tuple[str, str]] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The options that say which way scores go and what the worst one is, and a note of it, if any is needed.

    Args:
        pairs: each set with its metric.
        said: those of which the source says that lower is better.

    Returns:
        {lower: the sets in which it is; lower_is_better: where that is all of them; worst_score: where all metrics are ours, and have one}.
    """
    whole = set(pairs)
    named = {metric for _, metric in whole}
    down = {pair for pair in whole if pair in said or pair[1] in LOSSES}
    found: dict[str, Any] = {"lower": sorted({one for one, _ in down})} if down else {}
    found |= {"lower_is_better": True} if down and down == whole else {}
    worst = {metrics.METRICS[name].worst for name in named if name in metrics.METRICS}
    if named <= set(metrics.METRICS) and len(worst) == 1:
        found["worst_score"] = worst.pop()
    losses = listed(sorted({metric for _, metric in down}))
    return found, [f"lower is better, as of the metric: {losses}"] if down else []


def metric_column(table: Columns) -> str | None:
    """The column that names metrics; one of numbers names none."""
    column = next((one for one in table.cells if one.lower() == "metric"), None)
    if column is None or all(score_tables.is_number(cell) for cell in table.cells[column]):
        return None
    return column


def of_all_sets(metric: str, said: Collection[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """What is left to say of sets, as `Columns.lower` has it, where all rows are of one metric."""
    return frozenset(pair for pair in said if pair[1] == metric) | ({("", metric)} if metric in LOSSES else set())


def of_table(
    table: Columns, options: Mapping[str, Any], *, sets: Callable[[], Sequence[str]] | None = None
) -> tuple[Columns, dict[str, Any]]:
    """A table and its options, with the direction of the metric that its column `metric` names, if any is known, and a note of it.

    A table of several metrics, of which none was chosen, is left to be refused.

    Args:
        table: as read.
        options: where lower_is_better is True or False it is said, and nothing is added but the worst score of such a metric.
        sets: tells the set of each row, where sets count.
    """
    found, column = dict(options), metric_column(table)
    if column is None:
        return table, found
    asked = found.get("metric")
    of = [str(cell).strip() for cell in table.cells[column]]
    name = str(asked) if asked is not None else next(iter(set(of))) if len(set(of)) == 1 else ""
    if name not in of or (name not in LOSSES and not table.lower):
        return table, found
    rows = zip(sets() if sets is not None else [""] * len(of), of, strict=True)
    chosen = found.get("tasks", ()) if sets is not None else ()
    pairs = {pair for pair in rows if pair[1] == name and (not chosen or pair[0] in chosen)}
    told, notes = of_metrics(pairs, said=table.lower)
    told["lower"] = sorted({*told.get("lower", ()), *found.get("lower", ())})
    said = found.get("lower_is_better")
    if said is not None:
        agrees = name in metrics.METRICS and (metrics.METRICS[name].direction == "min") == said
        told, notes = {"worst_score": metrics.METRICS[name].worst} if agrees else {}, []
    for word in ("lower", "lower_is_better", "worst_score"):
        if word in told and (word != "lower" or sets is not None):
            found[word] = told[word]
    if not notes:
        return table, found
    return dataclasses.replace(table, notes=(*table.notes, *(f"{table.name}: {note}" for note in notes))), found


def of_tasks(table: Wide, options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The tasks of a table in which lower is better, and notes of what tells it.

    Args:
        table: entrants × tasks, with what its source says.
        options: lower (the tasks, and no others), lower_is_better (in all).

    Raises:
        Refusal: scores_invalid, where there is no such task.
    """
    lower = options.get("lower", ())
    unknown = [task for task in lower if task not in table.tasks]
    if unknown:
        hint = f"its tasks are {listed(table.tasks, most=40)}"
        raise Refusal("scores_invalid", f"--lower: {table.name} has no task {listed(unknown)}", hint=hint)
    if options.get("lower_is_better"):
        return list(table.tasks), []
    called = [task for task in table.tasks if is_called(task)]
    if "lower" in options:
        as_is = [task for task in table.tasks if task not in lower and (task in called or task in table.lower)]
        told = "they are not among --lower"
        return [task for task in table.tasks if task in lower], _taken(table.name, as_is, told)
    turned = [
        task for task in called if task not in table.lower and _below_zero(table.scores[:, table.tasks.index(task)])
    ]
    found = [task for task in table.tasks if task in table.lower or (task in called and task not in turned)]
    notes = []
    if found:
        notes.append(f"{table.name}: lower is better in {listed(found)}, as of the metric; --lower says otherwise")
    notes += _taken(table.name, turned, _TURNED)
    sounds = [task for task in table.tasks if task not in called and task not in found and _sounds(task)]
    if sounds:
        question = "is lower better there (--lower)? They are taken as they stand"
        notes.append(f"{table.name}: {listed(sounds)} sounds like a loss: {question}")
    return found, notes


def of_column(table: Columns, column: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options of a ranking by one column, with its direction where its name tells it and nothing else does; and a note of that."""
    if options.get("lower_is_better") is not None or not is_called(column):
        return dict(options), []
    if _below_zero(table.numbers(column)[:, 0]):
        return dict(options), _taken(table.name, [column], _TURNED)
    note = f"{table.name}: lower is better in {column!r}, as of the metric; --higher-is-better says otherwise"
    return {**options, "lower_is_better": True}, [note]


def is_called(task: str) -> bool:
    """Whether a name is that of a loss, alone or at the end of a path."""
    return re.split(r"[/:.,\s]", task.strip().lower().removesuffix(",none"))[-1] in _CALLED


def _sounds(task: str) -> bool:
    return not _SOUNDS.isdisjoint(re.split(r"[\W_]+", task.lower()))


def _below_zero(column: NDArray[np.float64]) -> bool:
    known = column[~np.isnan(column)]
    return bool(len(known) and (known <= 0).all() and (known < 0).any())


def _taken(name: str, tasks: Sequence[str], why: str) -> list[str]:
    if not tasks:
        return []
    return [f"{name}: {listed(tasks)} is called as a loss, but taken as higher is better: {why}"]
