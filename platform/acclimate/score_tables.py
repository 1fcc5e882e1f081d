"""Anybody's score tables, as files or in memory: CSV and Parquet in, columns out, and nothing dropped without a word.

What is read: CSV in UTF-8, with or without BOM, any line ends, separated by commas, semicolons or tabs; a comma is the decimal point where no number
has a point (where the file is not separated by semicolons, unless all of them may group thousands). An empty cell, NA, N/A, NaN, null, none and - are missing. Everything else in a
column of numbers that is no finite number (or of a size that can't be squared) is refused, all of it at once, with its lines. What was taken for what stands in `notes`.
"""

import csv
import dataclasses
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from acclimate import table_forms
from acclimate_competitions import bounds, reading
from acclimate_competitions.errors import Refusal

Source = Any
"""A path, a pyarrow Table, a pandas DataFrame, a Named, or Columns as read."""

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "-", "–"})
"""Cells that stand for nothing known, in small letters."""
SMALLEST, LARGEST = 1e-100, 1e100
"""Sizes of numbers that are not 0: squares and products of others are no numbers, or 0."""
SHOWN = 20
"""Problems of a table that a refusal lists; it counts the rest."""

_TRUTH = {"true": 1.0, "false": 0.0}
_LONG = (
    ("entrant", "model", "system", "algorithm", "team", "submission", "group"),
    ("task", "benchmark", "dataset", "target", "set"),
    ("score", "value"),
)
_ENTRANTS = frozenset(_LONG[0]) - {"group"}
_BESIDE = frozenset({"se", "n", "missing"})
"""What a long table of scores may have beside, as `acclimate export` writes it."""
_NO_ROWS = "was it written to its end? A table has a header and below it a row for each entrant or score"


@dataclass(frozen=True)
class Columns:
    """A table by columns.

    Attributes:
        name: how refusals call it.
        cells: column -> its cells, in the file's order; text of a CSV without blanks at its ends.
        rows: what each row is called: its line in a CSV, else its number from 1; of several files with the file before it.
        unit: "line" or "row"; "" where rows say it themselves.
        comma: whether numbers have a decimal comma.
        notes: what was taken for what.
        lower: sets with the metric in which lower is better, as the source says; "" for all sets.
    """

    name: str
    cells: dict[str, list[Any]]
    rows: Sequence[int | str]
    unit: str
    comma: bool = False
    notes: tuple[str, ...] = ()
    lower: frozenset[tuple[str, str]] = frozenset()

    def column(self, name: str) -> list[Any]:
        """The cells of a column.

        Raises:
            Refusal: scores_invalid, where there is none.
        """
        if name not in self.cells:
            raise Refusal(
                "scores_invalid", f"{self.name}: no column {name!r}", hint=f"its columns are {listed(self.cells)}"
            )
        return self.cells[name]

    def names(self, column: str) -> list[str]:
        """A column of names, none of them missing.

        Raises:
            Refusal: scores_invalid, with every row that has none.
        """
        values = self.column(column)
        bad = [
            self._at(place) for place, value in enumerate(values) if value is None or value != value or not _name(value)
        ]
        refuse(f"{self.name}: {counted(len(bad), 'row')} without {column!r}", bad, hint="name it, or take the rows out")
        return [_name(value) for value in values]

    def numbers(self, *columns: str) -> NDArray[np.float64]:
        """[rows, columns], NaN where missing.

        Raises:
            Refusal: scores_invalid, with every cell that is neither a number nor missing.
        """
        found = np.full((len(self.rows), len(columns)), np.nan)
        bad = []
        for number, column in enumerate(columns):
            for place, value in enumerate(self.column(column)):
                parsed = _number(value, comma=self.comma)
                if parsed is None:
                    bad.append(f"{self._at(place)}, column {column!r}: {str(value)!r}")
                else:
                    found[place, number] = parsed
        refuse(
            f"{self.name}: {counted(len(bad), 'cell')} that should be a finite number "
            f"{'is' if len(bad) == 1 else 'are'} none",
            bad,
            hint=f"correct them (0, or sizes from {SMALLEST:g} to {LARGEST:g}); an empty cell is a missing score; --tasks leaves columns out that are no scores",
        )
        return found

    def at(self, places: Iterable[int]) -> str:
        """Rows, in words."""
        return listed([self._at(place) for place in places], quoted=False)

    def _at(self, place: int) -> str:
        return f"{self.unit} {self.rows[place]}".strip()


@dataclass(frozen=True)
class Named:
    """A table that comes from somewhere else than one file, with what was taken for what on the way.

    Attributes:
        table: long, a row a score.
        name: how refusals call it.
        notes: what was taken for what.
        mixed: whether its sets are of metrics of several scales, which no mean may join.
        baselines: of a round, who was left out as one.
        aggregate: how one score is made of several sets: by the mean of scores, or by ranks in each (mean_rank, win_rate).
        metrics: set -> its metric, where each has its own.
        lower: sets with the metric in which lower is better, as the source says.
    """

    table: pa.Table
    name: str
    notes: tuple[str, ...] = ()
    mixed: bool = False
    baselines: frozenset[str] = frozenset()
    aggregate: str = "mean"
    metrics: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lower: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True)
class Wide:
    """A table entrants × tasks, as the file has it.

    Attributes:
        name: how refusals call it.
        entrants: one a row.
        tasks: one a column.
        scores: [entrants, tasks], NaN where missing.
        notes: what was taken for what.
        lower: the tasks in which lower is better, as the source says.
    """

    name: str
    entrants: tuple[str, ...]
    tasks: tuple[str, ...]
    scores: NDArray[np.float64]
    notes: tuple[str, ...] = ()
    lower: frozenset[str] = frozenset()


def read(source: Source, *, name: str | None = None) -> Columns:
    """Read a table of whatever form.

    Raises:
        Refusal: file_unreadable, where it can't be read; scores_invalid, where it is no table, or a file without a row below its header.
    """
    found = _without_index(_read(source, name))
    # A table that a program made may be of nobody; a file of nobody is one that was not written to its end.
    if not found.rows and isinstance(source, str | Path):
        raise Refusal("scores_invalid", f"{found.name} has no rows: nobody stands in it", hint=_NO_ROWS)
    return found


def _read(source: Source, name: str | None) -> Columns:
    if isinstance(source, str | Path):
        path = Path(source)
        return _file(path, name or str(path))
    if isinstance(source, pa.Table):
        return _arrow(source, name or "the table")
    if isinstance(source, Columns):
        return source
    if isinstance(source, Named):
        return dataclasses.replace(_arrow(source.table, source.name), notes=source.notes, lower=source.lower)
    if hasattr(source, "iloc"):  # pandas, which need not be installed
        # An index without a name that counts rows says nothing; any other is a column.
        counts = source.index.nlevels == 1 and source.index.name is None and source.index.dtype.kind in "iu"
        frame = source.reset_index(drop=counts)
        frame = frame.rename(columns=str)
        _check_header([str(column) for column in frame.columns], name or "the table")
        return _frame(frame, name or "the table")
    raise TypeError(f"a score table is a path, a pyarrow Table or a pandas DataFrame, not {type(source).__name__}")


def wide(table: Columns, *, tasks: Sequence[str] = ()) -> Wide:
    """A table entrants × tasks: the first column names the entrant, every other column is a task; or a long table of entrant, task, score.

    Args:
        table: as read.
        tasks: the tasks to take, in this order; all where none are given.

    Raises:
        Refusal: scores_invalid: no task, an entrant twice, text in numbers.
    """
    long = _long_columns(table)
    if long is not None:
        table = _widened(table, *long)
    first, *others = table.cells
    chosen = list(tasks) or others
    if first in chosen:
        raise Refusal("scores_invalid", f"{table.name}: {first!r} names the entrants, it is no task")
    doubled = sorted({task for task in chosen if chosen.count(task) > 1})
    if doubled:
        raise Refusal("scores_invalid", f"{table.name}: asked for twice: {listed(doubled)}")
    for task in chosen:
        table.column(task)
    if not chosen:
        raise Refusal("scores_invalid", f"{table.name}: no column of scores beside {first!r}")
    said = {task for task, _ in table.lower}
    lower = frozenset(task for task in chosen if task in said or "" in said)
    return Wide(table.name, entrants(table, first), tuple(chosen), table.numbers(*chosen), table.notes, lower)


def is_long(table: Columns) -> bool:
    """Whether a table is a long one: a row an entrant and task."""
    return _long_columns(table) is not None


def _long_columns(table: Columns) -> list[str] | None:
    """The columns of entrant, task and score, where the table has these and no others but errors and counts."""
    by_name = {column.lower(): column for column in table.cells if column.lower() not in _BESIDE}
    found = [next((by_name[name] for name in names if name in by_name), None) for names in _LONG]
    columns = [column for column in found if column is not None]
    return columns if len(columns) == len(by_name) == len(_LONG) else None


def _widened(table: Columns, entrant: str, task: str, score: str) -> Columns:
    """A long table with a column a task; entrants and tasks in the order in which they come first."""
    names, tasks = table.names(entrant), table.names(task)
    keys: dict[tuple[str, str], list[int]] = {}
    for place, key in enumerate(zip(names, tasks, strict=True)):
        keys.setdefault(key, []).append(place)
    double = [f"{one!r} in {other!r}: {table.at(where)}" for (one, other), where in keys.items() if len(where) > 1]
    refuse(
        f"{table.name}: {counted(len(double), 'score')} in more than one row",
        double,
        hint="one row an entrant and task",
    )
    table.numbers(score)  # tells of the file's own rows what is no number
    order, columns = list(dict.fromkeys(names)), list(dict.fromkeys(tasks))
    cells: dict[str, list[Any]] = {entrant: list(order)}
    if entrant in columns:
        raise Refusal("scores_invalid", f"{table.name}: a task can't be called {entrant!r}", hint="rename it")
    for column in columns:
        places = [keys.get((name, column)) for name in order]
        cells[column] = [None if where is None else table.cells[score][where[0]] for where in places]
    beside = [column for column in table.cells if column not in (entrant, task, score)]
    left = f"; not looked at: {listed(beside)}" if beside else ""
    notes = (*table.notes, f"{table.name} is a long table: {len(order)} entrants in {len(columns)} tasks{left}")
    rows = list(range(1, len(order) + 1))
    return dataclasses.replace(table, cells=cells, rows=rows, unit="entrant", notes=notes)


def entrants(table: Columns, column: str) -> tuple[str, ...]:
    """A column that names one entrant a row.

    Raises:
        Refusal: scores_invalid: an entrant without a name, or twice.
    """
    names = table.names(column)
    places: dict[str, list[int]] = {}
    for place, value in enumerate(names):
        places.setdefault(value, []).append(place)
    double = [f"{value!r}: {table.at(where)}" for value, where in places.items() if len(where) > 1]
    refuse(
        f"{table.name}: {counted(len(double), 'entrant')} in more than one row",
        double,
        hint="a table has one row an entrant: take one out, or give them different names",
    )
    return tuple(names)


def refuse(sentence: str, problems: Sequence[str], *, hint: str) -> None:
    """Refuse a table where there are problems, with the first of them.

    Raises:
        Refusal: scores_invalid.
    """
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise Refusal("scores_invalid", sentence, hint=hint, problems=[*problems[:SHOWN], *more])


def listed(names: Iterable[object], *, most: int = 8, quoted: bool = True) -> str:
    """Names in a sentence; of many, the first and how many more."""
    texts = [repr(name) if quoted else str(name) for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more if texts else "none"


def absent(value: Any) -> bool:
    """Whether a cell stands for nothing known."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return isinstance(value, str) and value.strip().lower() in MISSING


def is_number(value: Any) -> bool:
    """Whether a cell is a number with a decimal point, or missing."""
    return _number(value, comma=False) is not None


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 row, 2 rows."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def _file(path: Path, name: str) -> Columns:
    reading.regular(path)
    try:
        with path.open("rb") as stream:
            parquet = stream.read(4) == b"PAR1"
        if parquet:
            return _arrow(bounds.read(path), name)
        data = path.read_bytes()
    except (OSError, ValueError, pa.ArrowException) as error:
        hint = "is it whole, and may you read it? Copy it again, or save the table as CSV in UTF-8"
        raise Refusal("file_unreadable", f"{name}: {error}", hint=hint) from error
    try:
        return _csv(data.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise Refusal(
            "scores_invalid",
            f"{name} is no Parquet and no text in UTF-8: line {line}",
            hint="save it as CSV in UTF-8, or as Parquet",
        ) from error


def _without_index(table: Columns) -> Columns:
    """The same without a first column that only counts rows, which programs write without being asked."""
    if not table_forms.is_index(table.cells, _LONG[0]):
        return table
    first = next(iter(table.cells))
    cells = {column: values for column, values in table.cells.items() if column != first}
    note = f"{table.name}: left out, as it only counts rows: the first column, which has no name"
    return dataclasses.replace(table, cells=cells, notes=(*table.notes, note))


def _csv(text: str, name: str) -> Columns:
    said, begin = table_forms.separator_said(text)
    lines, text = text.count("\n", 0, begin), text[begin:]
    head = re.split("[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    try:
        separator = said or max(
            table_forms.SEPARATORS, key=lambda one: len(next(csv.reader([head], delimiter=one), []))
        )
    except csv.Error as error:
        raise Refusal("scores_invalid", f"{name}, line 1: {error}", hint="is it a table of scores?") from error
    cells: list[list[str]] = []
    rows, problems = [], []
    # Strict: a quote that never ends would swallow the rest of the table.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        for row in reader:
            row = [cell.strip() for cell in row]
            if not any(row):
                continue
            if cells and len(row) != len(cells[0]):
                problems.append(f"line {lines + reader.line_num}: {len(row)} cells")
            cells.append(row)
            rows.append(lines + reader.line_num)
    except csv.Error as error:
        raise Refusal("scores_invalid", f"{name}, line {lines + reader.line_num}: {error}") from error
    if not cells:
        raise Refusal("scores_invalid", f"{name} is empty", hint="a table has a header and a row for each entrant")
    empty = table_forms.empty_columns(cells[0], cells[1:])
    header = [column for place, column in enumerate(cells[0]) if place not in empty]
    _check_header(header, name)
    refuse(
        f"{name}: rows that have not {len(cells[0])} cells as the header",
        problems,
        hint="quote cells that hold the separator",
    )
    if len(header) == 1:
        raise Refusal(
            "scores_invalid", f"{name} has one column only, {header[0]!r}", hint="cells are separated by , ; or tabs"
        )
    notes = [] if separator == "," else [f"{name}: cells are separated by {table_forms.SEPARATORS[separator]}"]
    if empty:
        notes.append(f"{name}: left out: {counted(len(empty), 'column')} without a name in which nothing stands")
    kept = [(place, column) for place, column in enumerate(cells[0]) if place not in empty]
    columns = {column: [row[place] for row in cells[1:]] for place, column in kept}
    comma = table_forms.has_decimal_comma(columns, separator)
    if comma:
        notes.append(f"{name}: the comma is the decimal point")
    return Columns(name, columns, rows[1:], "line", comma, tuple(notes))


def _arrow(table: pa.Table, name: str) -> Columns:
    table = table_forms.index_first(table)
    _check_header(table.column_names, name)
    if table.num_columns < 2:
        raise Refusal("scores_invalid", f"{name} has fewer than two columns")
    cells = {column: table.column(column).to_pylist() for column in table.column_names}
    return Columns(name, cells, list(range(1, table.num_rows + 1)), "row")


def _frame(frame: Any, name: str) -> Columns:
    """A pandas DataFrame, whose index has become columns; cells of several types in one column are what they are."""
    try:
        return _arrow(pa.Table.from_pandas(frame, preserve_index=False), name)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        objects = frame.astype(object).where(frame.notna(), None)
        cells = {column: objects[column].tolist() for column in frame.columns}
        return dataclasses.replace(
            _arrow(pa.table({column: [] for column in cells}), name), cells=cells, rows=range(1, len(frame) + 1)
        )


def by_entrant(table: Columns) -> Columns:
    """The same with the column that is called as one of entrants first, where the first one is called otherwise and holds only numbers."""
    first, *others = table.cells
    named = next((column for column in others if column.strip().lower() in _ENTRANTS), None)
    if named is None or first.strip().lower() in _LONG[0] or not all(map(is_number, table.cells[first])):
        return table
    cells = {named: table.cells[named], **table.cells}
    note = f"{table.name}: {named!r} names the entrants, though {first!r}, which holds numbers, comes first"
    return dataclasses.replace(table, cells=cells, notes=(*table.notes, note))


def _check_header(header: Sequence[str], name: str) -> None:
    double = sorted({column for column in header if list(header).count(column) > 1})
    if double:
        what = "columns without a name" if double == [""] else f"more than one column {listed(double)}"
        raise Refusal("scores_invalid", f"{name} has {what}", hint="give each column a name of its own")
    if "" in header[1:]:  # the first is empty where pandas wrote an index
        raise Refusal("scores_invalid", f"{name} has a column without a name", hint="name it, or take it out")


def _name(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value).strip()


def _number(value: Any, *, comma: bool) -> float | None:
    """A number that can be computed with, NaN where missing, None where it is neither."""
    if absent(value):
        return math.nan
    if isinstance(value, str):
        text = value.strip()
        if comma and table_forms.COMMA.fullmatch(text):
            text = text.replace(",", ".")
        if text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
        parsed = float(text) if table_forms.NUMBER.fullmatch(text) else math.inf
    else:
        try:
            parsed = float(value)
        except (TypeError, ValueError, OverflowError):
            return None
    return parsed if parsed == 0 or SMALLEST <= abs(parsed) <= LARGEST else None
