"""Which rows of a table count: those of one protocol and one metric, for they are never pooled, and of the tasks asked for.

Names of columns count without capitals. A column `metric` of numbers is one of scores, not of names.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from acclimate import directions, score_tables
from acclimate.score_tables import Columns, Source, listed
from acclimate_competitions.errors import Refusal

SETS = ("set", "task", "round", "dataset", "benchmark", "split")
"""The names of columns that tell sets apart."""
_APART = {
    "protocol": "choose one with --protocol: they are never pooled; to compare two, give each a table of its own (acclimate export writes table-PROTOCOL)",
    "metric": "choose one with --metric: they are never pooled",
}


def narrowed(source: Source, options: Mapping[str, Any], *, name: str | None = None) -> Columns:
    """A table of scores, of one protocol and one metric, without these columns; a note says what was left out.

    Args:
        source: as score_tables.read takes it.
        options: protocol, metric.
        name: what refusals call it; else its own.

    Raises:
        Refusal: file_unreadable; scores_invalid: several protocols or metrics and none chosen, or one that there is not.
    """
    table = score_tables.read(source, name=name)
    for role in ("protocol", "metric"):
        column = (
            directions.metric_column(table)
            if role == "metric"
            else next((one for one in table.cells if one.lower() == role), None)
        )
        places = of_one(table, column, role, options.get(role))
        if role == "metric" and column is not None and places:
            table = dataclasses.replace(
                table, lower=directions.of_all_sets(table.names(column)[places[0]], table.lower)
            )
        table = _of(table, places, without=column, why=f"--{role} {options.get(role)}")
    return table if score_tables.is_long(table) else score_tables.by_entrant(table)


def of_tasks(table: Columns, tasks: Sequence[str]) -> Columns:
    """A table with a row an entrant, of the tasks asked for, where a column names them: of one, as nobody can stand in it twice.

    Raises:
        Refusal: scores_invalid: a task that there is not, or several whose rows are of the same entrants.
    """
    first = next(iter(table.cells))
    column = next((one for one in table.cells if one.lower() in SETS and one != first), None)
    if column is None:
        if tasks:
            hint = f"one of {listed(SETS)}; without --tasks all rows count"
            raise Refusal("scores_invalid", f"{table.name}: no column of tasks", hint=hint)
        return table
    names = table.names(column) if tasks else [str(cell) for cell in table.cells[column]]
    known = list(dict.fromkeys(names))
    if unknown := [task for task in tasks if task not in known]:
        raise Refusal(
            "scores_invalid", f"{table.name}: no task {listed(unknown)}", hint=f"there are {listed(known, most=40)}"
        )
    places = [place for place, one in enumerate(names) if not tasks or one in tasks]
    several = [one for one in known if not tasks or one in tasks]
    whose = [str(table.cells[first][place]).strip() for place in places]
    if len(several) > 1 and len(set(whose)) < len(whose):
        raise Refusal(
            "scores_invalid",
            f"{table.name} has scores in {len(several)} tasks: {listed(several)}",
            hint="--tasks chooses one; a mean over tasks, with its error, takes scores by example (--items)",
        )
    found = _of(table, places, why=f"--tasks {','.join(tasks)}")
    if len(several) > 1:
        note = f"{table.name}: rows are of {len(several)} tasks, taken as one: {listed(several)}; --tasks chooses"
        found = dataclasses.replace(found, notes=(*found.notes, note))
    return found


def of_one(table: Columns, column: str | None, role: str, wanted: str | None) -> list[int]:
    """The places of the rows of one protocol or metric; all where no column tells it.

    Args:
        table: as read.
        column: which tells it; None where none does.
        role: protocol or metric.
        wanted: which counts; None where none was chosen.

    Raises:
        Refusal: scores_invalid: one is wanted that there is not; several, and none is wanted.
    """
    if column is None:
        if wanted is not None:
            raise Refusal("scores_invalid", f"{table.name}: no column {role!r}", hint=f"leave --{role} out")
        return list(range(len(table.rows)))
    names = table.names(column)
    known = sorted(set(names))
    if wanted is None and len(known) > 1:
        sentence = f"{table.name} mixes {len(known)} {role}s: {listed(known)}"
        raise Refusal("scores_invalid", sentence, hint=_APART[role])
    if wanted is not None and wanted not in known:
        raise Refusal("scores_invalid", f"{table.name}: no {role} {wanted!r}", hint=f"there are {listed(known)}")
    return [place for place, name in enumerate(names) if wanted in (None, name)]


def _of(table: Columns, places: Sequence[int], *, why: str, without: str | None = None) -> Columns:
    """Some rows of a table, which keep what they are called; what was left out is noted."""
    if without is None and len(places) == len(table.rows):
        return table
    cells = {name: [column[place] for place in places] for name, column in table.cells.items() if name != without}
    rows = [table.rows[place] for place in places]
    told = len(places) < len(table.rows)
    note = (f"{table.name}: {len(places)} of {len(table.rows)} rows are of {why}",) if told else ()
    return dataclasses.replace(table, cells=cells, rows=rows, notes=(*table.notes, *note))
