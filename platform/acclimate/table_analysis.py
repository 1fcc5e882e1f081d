"""Rankings and agreement from plain score tables, of which the scores are known, and for rankings their errors."""

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from acclimate import chosen_rows, directions, score_tables
from acclimate.analysis_options import (
    RESAMPLES,
    RankOptions,
    StabilityOptions,
    chosen,
    confidence_level,
    draws,
    left_out,
    number,
    require_left,
)
from acclimate.score_tables import Source, Wide, counted, listed
from acclimate_competitions import agreement, casp, confidence, ranking
from acclimate_competitions import stability as of_rounds
from acclimate_competitions.errors import Refusal

Floats = NDArray[np.float64]
RESERVED = frozenset({"pairs_risen", "same_winner", "notes", "error", "against"})
"""Words at the top of the result of stability: no table may have such a name."""


def rank(scores: Source, options: RankOptions) -> dict[str, Any]:
    """`acclimate.rank` of scores with standard errors."""
    whole = score_tables.read(scores)
    for name in ("score", "se"):
        if name not in options:
            columns = listed(list(whole.cells)[1:], most=40)
            hint = f"--{name} COLUMN; beside the names {whole.name} has the columns {columns}"
            raise Refusal("scores_invalid", f"no column of {name} is named", hint=hint)
    whole, told = directions.of_table(whole, options)
    table = chosen_rows.of_tasks(chosen_rows.narrowed(whole, told), options.get("tasks", ()))
    told, turned = directions.of_column(table, options["score"], told)
    options = cast(RankOptions, told)
    entrants = score_tables.entrants(table, next(iter(table.cells)))
    numbers = table.numbers(options["score"], options["se"])
    negative = [f"{entrants[place]!r}: {numbers[place, 1]}" for place in np.flatnonzero(numbers[:, 1] < 0)]
    score_tables.refuse(
        f"{table.name}: standard errors below 0", negative, hint=f"is {options['se']!r} the right column?"
    )
    lacking = np.flatnonzero(np.isnan(numbers).any(axis=1)).tolist()
    gone = [entrants[place] for place in lacking]
    if chosen("policy for missing scores", options.get("missing", "fail"), ("fail", "exclude")) == "fail":
        score_tables.refuse(
            f"{table.name}: {counted(len(gone), 'entrant')} without score or se",
            [repr(name) for name in gone],
            hint="--missing exclude leaves them out of the ranking",
        )
    kept = [place for place in range(len(entrants)) if place not in set(lacking)]
    names, errors = [entrants[place] for place in kept], numbers[kept, 1]
    require_left(
        names,
        entrants,
        f"{table.name}: nobody has both a score and a se",
        hint="are --score and --se the right columns?",
    )
    return {
        **ranked(names, numbers[kept, 0], np.diag(errors**2), errors=errors, options=options),
        "left_out": gone,
        "notes": [
            *table.notes,
            *turned,
            *left_out(gone, "no score or no se"),
            "errors are taken as independent: a table of scores does not tell otherwise",
        ],
    }


def casp_rank(source: Source, options: RankOptions) -> dict[str, Any]:
    """`acclimate.rank` by CASP's z-scores, of a table entrants × targets."""
    table = score_tables.wide(chosen_rows.narrowed(source, options), tasks=options.get("tasks", ()))
    lower, told = directions.of_tasks(table, options)
    threshold = options.get("threshold", -2.0)
    if threshold not in casp.THRESHOLDS:
        raise Refusal("scores_invalid", f"a threshold of {threshold}", hint="-2 or 0, as CASP has them")
    penalty = chosen("policy for missing targets", options.get("missing", "penalty"), ("penalty", "skip")) == "penalty"
    beside = list(options.get("baselines", ()))
    unknown = [name for name in beside if name not in table.entrants]
    if unknown:
        raise Refusal("scores_invalid", f"no baseline {listed(unknown)}", hint=f"there are {listed(table.entrants)}")
    sign = np.array([-1.0 if task in lower else 1.0 for task in table.tasks])
    out = np.array([name in beside for name in table.entrants], dtype=bool)
    found = casp.stand(sign * table.scores, threshold=threshold, penalty=penalty, baselines=out)
    kept = np.flatnonzero(~out).tolist()
    names, count = [table.entrants[place] for place in kept], found.costs.shape[1]
    # Targets are the items: the sum is their number times the mean.
    error = confidence.task_error(
        found.costs[kept][:, None, :] * count, np.arange(count), count=count, pool=np.ones(len(kept), dtype=bool)
    )
    sums, spread = found.sums[kept], np.array(confidence.standard_errors([error]))
    held = ranked(
        names, sums, confidence.covariance([error]), errors=spread, options={**options, "lower_is_better": False}
    )
    ranks = dict(zip(names, casp.shared_ranks(sums.tolist()), strict=True))
    by_average = dict(zip(names, casp.shared_ranks(found.averages[kept].tolist()), strict=True))

    def row(place: int) -> dict[str, Any]:
        return {
            "sum": float(found.sums[place]),
            "average": number(found.averages[place]),
            "attempted": int(found.attempted[place]),
            "missing": count - int(found.attempted[place]),
        }

    place_of = {name: place for place, name in enumerate(table.entrants)}
    rows = [
        {
            **one,
            "rank": ranks[one["entrant"]],
            **row(place_of[one["entrant"]]),
            "average_rank": by_average[one["entrant"]],
        }
        for one in held["ranking"]
    ]
    rows.sort(key=lambda one: (one["rank"], one["entrant"]))
    missing = int(np.isnan(table.scores).sum())
    cost = f"costs {threshold:g} each in the sum" if penalty else "costs nothing"
    said = (
        [
            f"not attempted: {missing} of {table.scores.size} cells; a missing target {cost}; averages are over attempted ones"
        ]
        if missing
        else []
    )
    return {
        **held,
        "ranking": rows,
        "baselines": [{"entrant": name, **row(place_of[name])} for name in beside],
        "method": "casp",
        "threshold": threshold,
        "left_out": [],
        "notes": [
            *table.notes,
            *told,
            *said,
            "errors are of the sum over targets like these, each target's z-scores taken as given",
        ],
    }


def ranked(
    names: Sequence[str], scores: Floats, covariance: Floats, *, errors: Floats, options: RankOptions
) -> dict[str, Any]:
    """A ranking with its sets, {ranking, top_set, top, level, sets}, from the scores' joint covariance.

    Raises:
        Refusal: scores_invalid, for an option that can't be.
    """
    level, top = confidence_level(options.get("level", 0.95)), options.get("top", 1)
    if top < 1:
        raise Refusal("scores_invalid", f"a top set of {top}", hint="--top 1 or more")
    sets: Any = chosen("kind of sets", options.get("sets", "marginal"), ("marginal", "simultaneous"))
    sign = -1.0 if options.get("lower_is_better") else 1.0
    # Draws go by place: an order by what is ranked, so that neither the file's order nor names leave a trace.
    order = sorted(
        range(len(names)),
        key=lambda place: (-sign * scores[place], float(np.nan_to_num(errors[place], nan=np.inf)), names[place]),
    )
    values, joint = sign * scores[order], covariance[np.ix_(order, order)]
    drawn: dict[str, Any] = {"level": level, "draws": draws(options, len(names)), "seed": options.get("seed", 1)}
    found = confidence.rank_sets(values, joint, kind=sets, **drawn)
    held = confidence.top_set(values, joint, k=top, **drawn)
    ranks = ranking.shared_ranks([Fraction(value) for value in values.tolist()], tolerance=0.0)
    rows = [
        {
            "entrant": names[place],
            "rank": ranks[position],
            "rank_low": int(found.low[position]),
            "rank_high": int(found.high[position]),
            "score": float(scores[place]),
            "se": number(errors[place]),
        }
        for position, place in enumerate(order)
    ]
    rows.sort(key=lambda row: (row["rank"], row["entrant"]))
    inside = {names[place] for place, can in zip(order, held.tolist(), strict=True) if can}
    top_set = [row["entrant"] for row in rows if row["entrant"] in inside]
    return {"ranking": rows, "top_set": top_set, "top": top, "level": level, "sets": sets, "draws": drawn["draws"]}


def stability(scores: Mapping[str, Source], options: StabilityOptions) -> dict[str, Any]:
    """`acclimate.stability` of tables entrants × tasks, each of one protocol and metric."""
    _check_names(scores)
    tables = {name: _matrix(name, source, options) for name, source in scores.items()}
    notes: list[str] = []
    if len(tables) == 2:
        tables = _alike(tables, notes, common=options.get("common", False))
    kept = _complete(tables, notes, missing=options.get("missing", "fail"))
    return measured(kept, notes, options)


def measured(tables: Mapping[str, Wide], notes: list[str], options: StabilityOptions) -> dict[str, Any]:
    """The numbers of stability, of tables without missing cells; their entrants and tasks in the same order where they are two."""
    result: dict[str, Any] = {}
    beside, matrices, taus = list(options.get("against", ())), [], []
    against: dict[str, Any] = {}
    for name, table in tables.items():
        lower, told = directions.of_tasks(table, options)
        sign = np.array([-1.0 if task in lower else 1.0 for task in table.tasks])
        matrix = table.scores * sign
        own = [place for place, task in enumerate(table.tasks) if task not in beside]
        tasks = [table.tasks[place] for place in own]
        found = agreement.of_table(
            matrix[:, own],
            names=table.entrants,
            draws=options.get("draws", RESAMPLES),
            seed=options.get("seed", 1),
        )
        matrices.append(matrix[:, own])
        taus.append(found.tau)
        low, high = found.interval or (None, None)
        result[name] = {
            "models": found.models,
            "tasks": found.tasks,
            "pairs": found.pairs,
            "mean_tau_b": found.mean,
            "tau_b_low": low,
            "tau_b_high": high,
            "pc1_share": found.component,
            "noise_ceiling": None,
            "ties": found.ties,
            "undefined_pairs": found.undefined,
            "tau_b": by_pair(tasks, found.tau),
            "lower": lower,
        }
        notes += [*table.notes, *told, *_doubts(name, tasks, found)]
        if beside:
            others = [place for place in range(len(table.tasks)) if place not in own]
            mean, undefined = agreement.between(matrix[:, own], matrix[:, others])
            pairs = len(own) * len(others)
            against[name] = {"tasks": beside, "pairs": pairs, "undefined_pairs": undefined, "mean_tau_b": mean}
    if len(tables) == 2:
        result["pairs_risen"] = agreement.risen(*taus)
        result["same_winner"] = agreement.same_winner(*matrices)
    if beside:
        result["against"] = against
    return {**result, "notes": list(dict.fromkeys(notes))}


def by_pair(names: Sequence[str], table: Floats) -> dict[str, dict[str, float | None]]:
    """{name: {other name: value}} of a square table; None where it is NaN."""
    return {one: {other: number(table[i, j]) for j, other in enumerate(names) if i != j} for i, one in enumerate(names)}


def _check_names(scores: Mapping[str, Source]) -> None:
    if not 1 <= len(scores) <= 2:
        raise Refusal("scores_invalid", f"{len(scores)} score tables", hint="give one, or two that are compared")
    taken = sorted(set(scores) & RESERVED)
    if taken:
        raise Refusal(
            "name_invalid", f"a table can't be called {listed(taken)}", hint="that word has a meaning in the result"
        )
    if not all(scores):
        raise Refusal("name_invalid", "a table has an empty name", hint="--scores NAME=FILE")


def _matrix(name: str, source: Source, options: StabilityOptions) -> Wide:
    """One table of stability, checked, of the tasks and entrants that count."""
    beside = list(options.get("against", ()))
    tasks = list(options.get("tasks", ()))
    table = score_tables.wide(
        score_tables.read(source, name=name),
        tasks=[*tasks, *(task for task in beside if task not in tasks)] if tasks else (),
    )
    directions.of_tasks(table, options)  # refuses tasks that there are not
    unknown = [task for task in beside if task not in table.tasks]
    if unknown:
        hint = f"its tasks are {listed(table.tasks, most=40)}"
        raise Refusal("scores_invalid", f"--against: {name} has no task {listed(unknown)}", hint=hint)
    patterns = [pattern.lower() for pattern in options.get("models", ())]
    if not patterns:
        return table
    kept = [
        place
        for place, entrant in enumerate(table.entrants)
        if any(fnmatchcase(entrant.lower(), one) for one in patterns)
    ]
    hint = f"they are {listed(table.entrants)}; * stands for any letters"
    require_left(kept, table.entrants, f"{name}: no model matches {listed(options['models'])}", hint=hint)
    note = f"{name}: {len(kept)} of {len(table.entrants)} models match {listed(options['models'])}"
    return _rows(table, kept, notes=[note])


def _rows(table: Wide, places: Sequence[int], *, notes: Sequence[str] = ()) -> Wide:
    entrants = tuple(table.entrants[place] for place in places)
    kept = table.scores[list(places)]
    return dataclasses.replace(table, entrants=entrants, scores=kept, notes=(*table.notes, *notes))


def _alike(tables: Mapping[str, Wide], notes: list[str], *, common: bool) -> dict[str, Wide]:
    """Two tables with the same entrants and tasks in the order of the first; what only one has is refused, or left out and noted."""
    (one, first), (other, second) = tables.items()
    for what, mine, theirs in (("models", first.entrants, second.entrants), ("tasks", first.tasks, second.tasks)):
        lacks = {one: [x for x in theirs if x not in mine], other: [x for x in mine if x not in theirs]}
        problems = [f"{name} lacks {listed(names)}" for name, names in lacks.items() if names]
        if problems and not common:
            hint = "--common compares what both have; --tasks chooses tasks"
            raise Refusal("scores_invalid", f"{one} and {other} have different {what}", hint=hint, problems=problems)
        notes += [f"left out: {problem}" for problem in problems]
    shared = [task for task in first.tasks if task in second.tasks]
    names = [entrant for entrant in first.entrants if entrant in second.entrants]
    hint = "are models and tasks called alike in both?"
    require_left(names, (*first.entrants, *second.entrants), f"{one} and {other} have no model in common", hint=hint)
    require_left(shared, (*first.tasks, *second.tasks), f"{one} and {other} have no task in common", hint=hint)
    return {
        name: dataclasses.replace(
            table,
            entrants=tuple(names),
            tasks=tuple(shared),
            scores=table.scores[
                np.ix_([table.entrants.index(x) for x in names], [table.tasks.index(x) for x in shared])
            ],
        )
        for name, table in tables.items()
    }


def _complete(tables: Mapping[str, Wide], notes: list[str], *, missing: str) -> dict[str, Wide]:
    """Tables without missing cells: an entrant that lacks a score in one of them is refused, or left out of both."""
    lacking: set[str] = set()
    problems = []
    for name, table in tables.items():
        for place, entrant in enumerate(table.entrants):
            tasks = [table.tasks[column] for column in np.flatnonzero(np.isnan(table.scores[place]))]
            if tasks:
                lacking.add(entrant)
                problems.append(f"{name}, {entrant!r}: {listed(tasks)}")
    if chosen("policy for missing scores", missing, ("fail", "exclude")) == "fail":
        score_tables.refuse(
            f"{counted(len(lacking), 'model')} without a score in some task",
            problems,
            hint="--missing exclude leaves them out; --tasks chooses tasks that all have",
        )
    notes += left_out(sorted(lacking), "a score is missing")
    left = [entrant for table in tables.values() for entrant in table.entrants if entrant not in lacking]
    require_left(
        left, sorted(lacking), "no model has a score in every task", hint="--tasks chooses tasks that models have"
    )
    return {
        name: _rows(table, [place for place, entrant in enumerate(table.entrants) if entrant not in lacking])
        for name, table in tables.items()
    }


def _doubts(name: str, tasks: Sequence[str], found: agreement.Agreement) -> list[str]:
    """What the numbers of a table can't carry, in sentences."""
    doubts = []
    if found.models < of_rounds.INFORMATIVE:
        doubts.append(
            f"{name}: not informative: agreement of {counted(found.models, 'model')} is mostly chance (fewer than {of_rounds.INFORMATIVE})"
        )
    if found.tasks < 2:
        doubts.append(f"{name}: {counted(found.tasks, 'task')}: there are no two whose agreement could be told")
    flat = [task for i, task in enumerate(tasks) if np.isnan(found.tau[i]).all()]
    if flat and found.models > 1 and found.tasks > 1:
        doubts.append(
            f"{name}: all models are equal in {listed(flat)}: tau-b is undefined there and left out of the mean"
        )
    if len(tasks) > 2 and found.models >= of_rounds.INFORMATIVE:
        means = [np.delete(found.tau[i], i) for i in range(len(tasks))]
        against = [
            task for task, row in zip(tasks, means, strict=True) if not np.isnan(row).all() and np.nanmean(row) < -0.2
        ]
        if against:
            doubts.append(f"{name}: {listed(against)} runs against the other tasks: is lower better there (--lower)?")
    return doubts
