"""Scores by example from several tables, each of its own entrants or sets, as the one table that `--items` takes.

Columns are joined by what they are (example_tables.ROLES), whatever each file calls them. A score that stands in two files is refused, as it can't be
told which counts; where entrants were not scored on the same examples, the policy for missing scores decides as in one table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate import example_tables, foreign_results, score_tables
from acclimate.score_tables import Columns, Source, listed
from acclimate_competitions.errors import Refusal

_KEY = ("entrant", "protocol", "metric", "seed", "example")
_SAME = ("entrant", "example", "cluster", "seed", "protocol", "metric")
"""What all files have, or none: a blank in its place would say something."""


def joined(sources: Sequence[Source]) -> Columns:
    """Several tables as one.

    Args:
        sources: paths, pyarrow Tables or DataFrames, at least one; paths may be results of other programs, but no bundles.

    Raises:
        Refusal: file_unreadable; scores_invalid: a round's bundle among them, a column that only some have, a score that stands twice.
    """
    parts = [_read(source, number) for number, source in enumerate(sources, start=1)]
    if not parts:
        raise Refusal("scores_invalid", "no table is given", hint="--items PATH")
    columns = [_columns(part) for part in parts]
    if all(len(own.sets) == 1 for own in columns):
        columns = [own.with_one_set() for own in columns]
    _require_alike(parts, columns)
    cells: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for own in columns for name in own.names):
        cells[name] = []
        for part, own in zip(parts, columns, strict=True):
            cells[name] += part.cells[own.names[name]] if name in own.names else [None] * len(part.rows)
    rows = [f"{part.name} {part.unit} {row}" for part in parts for row in part.rows]
    name = listed([part.name for part in parts], quoted=False)
    notes = tuple(note for part in parts for note in part.notes)
    lower = frozenset[tuple[str, str]]().union(*(part.lower for part in parts))
    found = Columns(name, cells, rows, "", comma=parts[0].comma, notes=notes, lower=lower)
    _require_once(found)
    return found


@dataclass(frozen=True)
class _Named:
    """A table's columns as the joined table calls them.

    Attributes:
        names: there -> here.
        sets: names there of the columns that can tell sets apart.
    """

    names: dict[str, str]
    sets: tuple[str, ...]

    def with_one_set(self) -> "_Named":
        """The same with the only column of sets called so."""
        names = {there if there != self.sets[0] else "set": here for there, here in self.names.items()}
        return _Named(names, ("set",))


def _columns(part: Columns) -> _Named:
    roles = example_tables.role_columns(part)
    sets = {name.lower(): name for name in reversed(part.cells) if name.lower() in example_tables.ROLES["set"]}
    own = {role: name for role, name in roles.items() if role != "set"}
    known = {name for role in own for name in example_tables.ROLES[role]} - {"target"}
    others = {name: name for name in part.cells if name.lower() not in known | set(sets)}
    taken = {name: here for name, here in others.items() if here not in own.values()}
    return _Named({**own, **sets, **taken}, tuple(sorted(sets)))


def _read(source: Source, number: int) -> Columns:
    from acclimate import item_sources

    if item_sources.is_rounds(source):
        raise Refusal(
            "scores_invalid",
            f"{source} is a round, which isn't joined with other tables",
            hint="acclimate export --bundle PATH --format parquet --out DIR makes tables of it",
        )
    if isinstance(source, str | Path) and foreign_results.is_foreign(Path(source)):
        return score_tables.read(foreign_results.items(Path(source)))
    return score_tables.read(source, name=None if isinstance(source, str | Path) else f"table {number}")


def _require_alike(parts: Sequence[Columns], columns: Sequence[_Named]) -> None:
    wrong = []
    for role in dict.fromkeys((*(name for own in columns for name in own.sets), *_SAME)):
        without = [part.name for part, own in zip(parts, columns, strict=True) if role not in own.names]
        if 0 < len(without) < len(parts):
            wrong.append(f"{role}: not in {listed(without, quoted=False)}")
    if len({part.comma for part in parts}) > 1:
        with_comma = listed([part.name for part in parts if part.comma], quoted=False)
        wrong.append(f"numbers have a decimal comma in {with_comma} only")
    score_tables.refuse("the tables can't be joined", wrong, hint="give all of them the column, or none")


def _require_once(found: Columns) -> None:
    columns = [found.cells[role] for role in _KEY if role in found.cells] + [example_tables.sets_of(found)]
    first: dict[tuple[str, ...], int] = {}
    twice = []
    for place, key in enumerate(zip(*columns, strict=True)):
        other = first.setdefault(tuple(map(str, key)), place)
        if other != place:
            twice.append(f"{', '.join(str(part) for part in key if part)}: {found.at([other, place])}")
    score_tables.refuse(
        f"{len(twice)} {'score stands' if len(twice) == 1 else 'scores stand'} twice in {found.name}",
        twice,
        hint="name entrants apart (acclimate evaluate --entrant NAME), or give repetitions a column seed",
    )
