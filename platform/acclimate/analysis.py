"""What an analyst asks of anybody's results, without a server: `acclimate.rank`, `acclimate.compare`, `acclimate.stability`.

Each takes tables (a path of CSV or Parquet, a pyarrow Table, a pandas DataFrame) and returns what the command of the same name prints with --json:
numbers, names, and under `notes` each thing that was left out or taken for something. Nothing is left out unless it was asked for.
"""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from acclimate import score_tables
from acclimate.score_tables import Source, Wide, listed
from acclimate_competitions import agreement, confidence, ranking
from acclimate_competitions import stability as of_rounds
from acclimate_competitions.errors import Refusal

Floats = NDArray[np.float64]
RESERVED = frozenset({"pairs_risen", "same_winner", "notes", "error", "against"})
"""Words at the top of the result of stability: no table may have such a name."""
DRAWS = 20_000
"""Of Monte Carlo, for rank intervals."""
RESAMPLES = 2_000
"""Of the bootstrap over entrants."""


class RankOptions(TypedDict, total=False):
    """How to rank; each as the command's option of the same name.

    Attributes:
        score: column of the scores.
        se: column of their standard errors.
        top: K of the top set, 1 where not given.
        level: of confidence, 0.95.
        sets: whether each interval holds by itself (marginal, the default) or all together (simultaneous).
        lower_is_better: whether it is.
        missing: what becomes of an entrant without a score: fail (the default) or exclude.
        draws: of Monte Carlo.
        seed: of Monte Carlo.
    """

    score: str
    se: str
    top: int
    level: float
    sets: Literal["marginal", "simultaneous"]
    lower_is_better: bool
    missing: str
    draws: int
    seed: int


class StabilityOptions(TypedDict, total=False):
    """What of the tables counts; each as the command's option of the same name.

    Attributes:
        tasks: the columns that count, all where not given.
        lower: tasks in which lower is better.
        against: tasks whose agreement with all others is told apart, and which are in no other number.
        models: patterns, of which an entrant's name matches one (*, ?, [abc]; capitals don't matter).
        missing: what becomes of an entrant that lacks a score: fail (the default) or exclude.
        common: whether two tables are compared by what both have; else they must have the same entrants and tasks.
        draws: of the bootstrap.
        seed: of the bootstrap.
    """

    tasks: Sequence[str]
    lower: Sequence[str]
    against: Sequence[str]
    models: Sequence[str]
    missing: str
    common: bool
    draws: int
    seed: int


def rank(scores: Source = None, **options: Unpack[RankOptions]) -> dict[str, Any]:
    """Rank entrants by scores with standard errors, with confidence sets for the ranks (Mogstad et al.).

    Args:
        scores: a table with one row an entrant, whose first column names it.
        options: see RankOptions; score and se are needed.

    Returns:
        {ranking: [{entrant, rank, rank_low, rank_high, score, se}], top_set, top, level, sets, left_out, notes}; the best first, equal
        scores share a rank. top_set holds all of the best `top` with probability `level`.

    Raises:
        Refusal: scores_invalid, file_unreadable.
    """
    known(options, RankOptions)
    for name in ("score", "se"):
        if name not in options:
            raise Refusal("scores_invalid", f"no column of {name} is named", hint=f"--{name} COLUMN")
    table = score_tables.read(scores)
    score_tables.check_protocol(table)
    entrants = score_tables.entrants(table, next(iter(table.cells)))
    numbers = table.numbers(options["score"], options["se"])
    negative = [f"{entrants[place]!r}: {numbers[place, 1]}" for place in np.flatnonzero(numbers[:, 1] < 0)]
    score_tables.refuse(
        f"{table.name}: standard errors below 0", negative, hint=f"is {options['se']!r} the right column?"
    )
    kept, left_out = _without(
        entrants,
        np.asarray(np.isnan(numbers).any(axis=1)),
        of=table.name,
        lacks="score or se",
        missing=options.get("missing", "fail"),
    )
    names = [entrants[place] for place in kept]
    errors = numbers[kept, 1]
    return {
        **ranked(names, numbers[kept, 0], np.diag(errors**2), errors=errors, options=options),
        "left_out": left_out,
        "notes": [*table.notes, *_left_out(left_out, "no score or no se")],
    }


def ranked(
    names: Sequence[str], scores: Floats, covariance: Floats, *, errors: Floats, options: RankOptions
) -> dict[str, Any]:
    """A ranking with its sets, {ranking, top_set, top, level, sets}, from the scores' joint covariance.

    Raises:
        Refusal: scores_invalid, for an option that can't be.
    """
    level, top, sets = options.get("level", 0.95), options.get("top", 1), options.get("sets", "marginal")
    if not 0 < level < 1:
        raise Refusal("scores_invalid", f"a level of confidence of {level}", hint="between 0 and 1, such as 0.95")
    if top < 1:
        raise Refusal("scores_invalid", f"a top set of {top}", hint="--top 1 or more")
    if sets not in ("marginal", "simultaneous"):
        raise Refusal("scores_invalid", f"unknown sets {sets!r}", hint="marginal or simultaneous")
    sign = -1.0 if options.get("lower_is_better") else 1.0
    # Draws go by place: an order by what is ranked, so that neither the file's order nor names leave a trace.
    order = sorted(
        range(len(names)), key=lambda place: (-sign * scores[place], _last(float(errors[place])), names[place])
    )
    values, joint = sign * scores[order], covariance[np.ix_(order, order)]
    drawn: dict[str, Any] = {"level": level, "draws": options.get("draws", DRAWS), "seed": options.get("seed", 1)}
    found = confidence.rank_sets(values, joint, kind=sets, **drawn)
    chosen = confidence.top_set(values, joint, k=top, **drawn)
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
    inside = {names[place] for place, held in zip(order, chosen.tolist(), strict=True) if held}
    top_set = [row["entrant"] for row in rows if row["entrant"] in inside]
    return {"ranking": rows, "top_set": top_set, "top": top, "level": level, "sets": sets}


def stability(scores: Mapping[str, Source], **options: Unpack[StabilityOptions]) -> dict[str, Any]:
    """How far the tasks of score tables agree about who is better, and what changes from the first table to the second.

    Args:
        scores: name -> table entrants × tasks, whose first column names the entrant; one table, or two.
        options: see StabilityOptions.

    Returns:
        {NAME: {models, tasks, pairs, mean_tau_b, tau_b_low, tau_b_high, pc1_share, noise_ceiling, ties, undefined_pairs, tau_b}}. Of two tables
        also pairs_risen and same_winner (who is first, by the order of the first table). tau_b is {task: {task: tau-b}}.
        What is undefined is None: a task that ties all entrants, an interval of fewer than ten entrants, the noise ceiling, as a table
        of scores does not tell how far they are noise. With `against`, {against: {NAME: {tasks, pairs, mean_tau_b}}}.

    Raises:
        Refusal: scores_invalid, file_unreadable, name_invalid.
    """
    known(options, StabilityOptions)
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
        sign = np.array([-1.0 if task in options.get("lower", ()) else 1.0 for task in table.tasks])
        matrix = table.scores * sign
        own = [place for place, task in enumerate(table.tasks) if task not in beside]
        tasks = [table.tasks[place] for place in own]
        draws = options.get("draws", RESAMPLES)
        found = agreement.of_table(matrix[:, own], names=table.entrants, draws=draws, seed=options.get("seed", 1))
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
        }
        notes += [*table.notes, *_doubts(name, tasks, found)]
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


def number(value: Any) -> float | None:
    """A float for JSON: None where it is not known."""
    return None if value is None or not math.isfinite(value) else float(value)


def known(options: Mapping[str, Any], kind: Any) -> None:
    """Refuse an option that there is not, as Python does with an argument."""
    unknown = sorted(set(options) - set(kind.__annotations__))
    if unknown:
        raise TypeError(f"unknown option {listed(unknown)}; there are {listed(kind.__annotations__, most=20)}")


def _last(value: float) -> float:
    return math.inf if math.isnan(value) else float(value)


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
    beside, lower = list(options.get("against", ())), options.get("lower", ())
    tasks = list(options.get("tasks", ()))
    table = score_tables.wide(
        score_tables.read(source, name=name),
        tasks=[*tasks, *(task for task in beside if task not in tasks)] if tasks else (),
    )
    for what, words in (("--lower", lower), ("--against", beside)):
        unknown = [task for task in words if task not in table.tasks]
        if unknown:
            hint = f"its tasks are {listed(table.tasks, most=40)}"
            raise Refusal("scores_invalid", f"{what}: {name} has no task {listed(unknown)}", hint=hint)
    patterns = [pattern.lower() for pattern in options.get("models", ())]
    if not patterns:
        return table
    kept = [
        place
        for place, entrant in enumerate(table.entrants)
        if any(fnmatchcase(entrant.lower(), one) for one in patterns)
    ]
    note = f"{name}: {len(kept)} of {len(table.entrants)} models match {listed(options['models'])}"
    return _rows(table, kept, notes=[note])


def _rows(table: Wide, places: Sequence[int], *, notes: Sequence[str] = ()) -> Wide:
    entrants = tuple(table.entrants[place] for place in places)
    return Wide(table.name, entrants, table.tasks, table.scores[list(places)], (*table.notes, *notes))


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
    return {
        name: Wide(
            name,
            tuple(names),
            tuple(shared),
            table.scores[np.ix_([table.entrants.index(x) for x in names], [table.tasks.index(x) for x in shared])],
            table.notes,
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
    if problems and check_missing(missing, ("fail", "exclude")) == "fail":
        score_tables.refuse(
            f"{len(lacking)} models lack a score",
            problems,
            hint="--missing exclude leaves them out; --tasks chooses tasks that all have",
        )
    notes += _left_out(sorted(lacking), "a score is missing")
    return {
        name: _rows(table, [place for place, entrant in enumerate(table.entrants) if entrant not in lacking])
        for name, table in tables.items()
    }


def check_missing(policy: str, allowed: Sequence[str]) -> str:
    """The policy for missing scores, if it is one.

    Raises:
        Refusal: scores_invalid.
    """
    if policy not in allowed:
        raise Refusal(
            "scores_invalid", f"unknown policy {policy!r} for missing scores", hint=f"one of {listed(allowed)}"
        )
    return policy


def _without(
    entrants: Sequence[str], lacking: NDArray[np.bool_], *, of: str, lacks: str, missing: str
) -> tuple[list[int], list[str]]:
    """Places of the entrants that have all, and the names of the others, who are refused unless they are to be left out."""
    names = [entrant for entrant, gone in zip(entrants, lacking.tolist(), strict=True) if gone]
    if names and check_missing(missing, ("fail", "exclude")) == "fail":
        score_tables.refuse(
            f"{of}: {len(names)} entrants without {lacks}",
            [repr(name) for name in names],
            hint="--missing exclude leaves them out of the ranking",
        )
    return np.flatnonzero(~lacking).tolist(), names


def _left_out(names: Sequence[str], why: str) -> list[str]:
    return [f"left out, as {why}: {listed(names, most=100)}"] if names else []


def _doubts(name: str, tasks: Sequence[str], found: agreement.Agreement) -> list[str]:
    """What the numbers of a table can't carry, in sentences."""
    doubts = []
    if found.models < of_rounds.INFORMATIVE:
        doubts.append(
            f"{name}: not informative: agreement of {found.models} models is mostly chance (fewer than {of_rounds.INFORMATIVE})"
        )
    flat = [task for i, task in enumerate(tasks) if np.isnan(found.tau[i]).all()]
    if flat:
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
