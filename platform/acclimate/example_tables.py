"""Anybody's scores by example, as a long table: which column is what, and the checks before numbers are computed from it.

A row is one score: of an entrant, for an example of a set, with a cluster, a seed, a protocol and a metric where such columns are. Names of columns
count without capitals; of several that could be one thing, the first of the list below is taken, but of several columns that tell sets apart
(round, task) each combination is a set. A set with repeated names of examples in
another set shares them: both stand in one cluster.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from acclimate import chosen_rows, directions, score_tables
from acclimate.analysis_options import chosen, left_out, require_left
from acclimate.score_tables import Columns, Named, Source, counted, listed
from acclimate_competitions import items
from acclimate_competitions.errors import Refusal
from acclimate_competitions.items import Items

ROLES: Mapping[str, tuple[str, ...]] = {
    "entrant": ("entrant", "model", "system", "algorithm", "team", "submission"),
    "set": chosen_rows.SETS,
    "example": ("example", "item", "case", "example_id", "item_id", "doc_id", "id", "target"),
    "score": ("score", "correct", "value"),
    "cluster": ("cluster", "group"),
    "seed": ("seed", "repetition", "run"),
    "protocol": ("protocol",),
    "metric": ("metric",),
}
"""What a column is -> the names by which it is known."""
_NEEDED = ("entrant", "example", "score")


def read(source: Source, options: Mapping[str, Any]) -> tuple[Items, list[str]]:
    """Items of a long table, and notes on what was taken for what.

    Args:
        source: path, pyarrow Table or pandas DataFrame.
        options: tasks (the sets that count), protocol, metric.

    Raises:
        Refusal: file_unreadable; scores_invalid: a column missing, several protocols or metrics and none chosen, two rows of one key.
    """
    found, notes = rows(source, options)
    return items.arrange(found), notes


def rows(source: Source, options: Mapping[str, Any]) -> tuple[items.Rows, list[str]]:
    """The rows that count, before they are arranged; arguments and refusals as read."""
    table = score_tables.read(source)
    roles = _roles(table)
    notes = list(table.notes)
    kept = np.ones(len(table.rows), dtype=bool)
    for role in ("protocol", "metric"):
        chosen_places = chosen_rows.of_one(table, roles.get(role), role, options.get(role))
        kept &= np.isin(np.arange(len(table.rows)), chosen_places)
    sets = np.array(_sets(table, notes), dtype=object)
    if "set" in roles and options.get("tasks"):
        unknown = sorted(set(options["tasks"]) - set(sets.tolist()))
        if unknown:
            hint = f"there are {listed(sorted(set(sets.tolist())))}"
            raise Refusal("scores_invalid", f"{table.name}: no set {listed(unknown)}", hint=hint)
        kept &= np.isin(sets, list(options["tasks"]))
    elif options.get("tasks"):
        raise Refusal("scores_invalid", f"{table.name}: no column of sets", hint=f"one of {listed(ROLES['set'])}")
    if len(kept) and not kept.any():
        asked = [f"--{name} {options[name]}" for name in ("protocol", "metric") if options.get(name)]
        asked += [f"--tasks {','.join(options['tasks'])}"] if options.get("tasks") else []
        raise Refusal(
            "scores_invalid", f"{table.name}: no row is of {' and '.join(asked)}", hint="leave one of them out"
        )
    if not kept.all():
        notes.append(f"{table.name}: {int(kept.sum())} of {len(kept)} rows are of what was chosen")
    looked_at = [*roles.values(), *_set_columns(table)]
    beside = [column for column in table.cells if column not in looked_at]
    if beside:
        notes.append(f"{table.name}: columns that are not looked at: {listed(beside, most=20)}")
    places = np.flatnonzero(kept).tolist()
    return _rows(table, roles, places, sets), notes


def answered(found: Items, options: Mapping[str, Any], notes: list[str]) -> Items:
    """The items under the policy for missing scores: fail, exclude or worst; a note says what it did.

    Raises:
        Refusal: scores_invalid, with who lacks what; or where nothing is known to be the worst score.
    """
    policy = chosen("policy for missing scores", options.get("missing", "fail"), ("fail", "exclude", "worst"))
    missing = found.missing()
    total = int(missing.sum())
    if not total:
        return found
    lacks = [
        f"{entrant!r}: {missing[i, j]} of {found.values[j][i].size} in {found.sets[j] or 'the table'}"
        for i, entrant in enumerate(found.entrants)
        for j in range(len(found.sets))
        if missing[i, j]
    ]
    if policy == "fail":
        score_tables.refuse(
            f"{counted(total, 'score')} {'is' if total == 1 else 'are'} missing: entrants were not all scored on the same examples",
            lacks,
            hint="--missing exclude leaves them out of the entrant's mean, --missing worst counts them as wrong",
        )
    if policy == "exclude":
        notes.append(f"left out of means, as missing: {total} scores ({listed(lacks, quoted=False)})")
        empty = [i for i in range(len(found.entrants)) if found.of([i]).scores()[0] is None]
        notes += left_out([found.entrants[i] for i in empty], "no score in a whole set")
        lone = [name for place, name in enumerate(found.entrants) if place not in empty]
        require_left(
            lone,
            found.entrants,
            "nobody has a score in every set",
            hint="--tasks chooses sets in which they have; --missing worst",
        )
        return found.of([i for i in range(len(found.entrants)) if i not in empty])
    worst = _worst(found, options)
    notes.append(f"counted as {worst:g}, the worst score, as missing: {total} ({listed(lacks, quoted=False)})")
    return found.filled(worst)


def _worst(found: Items, options: Mapping[str, Any]) -> float:
    """What a missing score counts: the metric's worst, or that of scores from 0 to 1."""
    if "worst_score" in options:
        worst: float | None = options["worst_score"]
        if worst is None:
            sentence = "the metric has no worst score, so that a missing one can't count as that"
            raise Refusal("scores_invalid", sentence, hint="--missing exclude or fail")
        return worst
    scored = np.concatenate([value[~np.isnan(value)] for value in found.values])
    if len(scored) and (scored.min() < 0 or scored.max() > 1):
        raise Refusal(
            "scores_invalid",
            f"scores reach from {scored.min()} to {scored.max()}: which is the worst is not known",
            hint="--missing exclude or fail",
        )
    return 1.0 if options.get("lower_is_better") else 0.0


def directed(source: Source, options: Any) -> tuple[Source, Any]:
    """A table of scores by example, with the direction of its metric, as far as its name or the source tells it."""
    if source is None:
        return source, options
    whole = score_tables.read(source)
    table, left = directions.of_table(whole, options, sets=lambda: sets_of(whole))
    if isinstance(source, Named):
        mixed = bool(left.get("lower")) and not left.get("lower_is_better")
        return dataclasses.replace(source, notes=table.notes, mixed=source.mixed or mixed), left
    return (source if table is whole else table), left


def role_columns(table: Columns) -> dict[str, str]:
    """What each column is, by its name: role -> column, for the roles that there are."""
    by_name: dict[str, str] = {}
    for column in table.cells:
        by_name.setdefault(column.lower(), column)
    known = {role: [by_name[name] for name in names if name in by_name] for role, names in ROLES.items()}
    return {role: columns[0] for role, columns in known.items() if columns}


def sets_of(table: Columns) -> list[str]:
    """[rows] the set of each row; "" where no column names one."""
    return _sets(table, [])


def _roles(table: Columns) -> dict[str, str]:
    """What each column is, by its name: role -> column."""
    found = role_columns(table)
    lacking = [f"{role}: one of {listed(ROLES[role])}" for role in _NEEDED if role not in found]
    score_tables.refuse(
        f"{table.name} is no table of scores by example: its columns are {listed(table.cells)}",
        lacking,
        hint="a row is one score: entrant, set, example, score; a table entrants × tasks is for acclimate rank, compare or stability, with --scores",
    )
    return found


def _set_columns(table: Columns) -> list[str]:
    """The columns that tell sets apart: all that could, and have more than one value; else the first, if any."""
    found = [column for name in ROLES["set"] for column in table.cells if column.lower() == name]
    telling = [column for column in found if len(set(table.names(column))) > 1]
    return telling or found[:1]


def _sets(table: Columns, notes: list[str]) -> list[str]:
    """[rows] the set of each row; "" where no column names one."""
    columns = _set_columns(table)
    if len(columns) > 1:
        notes.append(f"{table.name}: each combination of {listed(columns)} is a set")
    parts = [table.names(column) for column in columns]
    return [" / ".join(words) for words in zip(*parts, strict=True)] if parts else [""] * len(table.rows)


def _rows(table: Columns, roles: Mapping[str, str], places: Sequence[int], sets: Any) -> items.Rows:
    def column(role: str) -> list[str]:
        names = table.names(roles[role])
        return [names[place] for place in places]

    nothing = [""] * len(places)
    seeds = [table.cells[roles["seed"]][place] for place in places] if "seed" in roles else nothing
    examples = column("example")
    return items.Rows(
        entrants=column("entrant"),
        sets=[sets[place] for place in places],
        examples=examples,
        clusters=column("cluster") if "cluster" in roles else examples,
        seeds=["" if score_tables.absent(seed) else str(seed) for seed in seeds],
        scores=table.numbers(roles["score"])[places, 0],
    )
