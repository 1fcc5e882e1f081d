"""What programs put around a table: which character separates its cells, which one is the decimal point, columns of an index and empty ones.

Pure: what is told here is taken for something by score_tables.py, which says so in a note.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+(?:[eE][+-]?[0-9]+)?")
"""A number with a decimal comma."""
NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""A number with a decimal point, or with none."""
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2},[0-9]{3}")
_SAID = re.compile("sep=([,;\t])[,;\t]*[\r\n]+")
_INDEX = re.compile(r"[0-9]+")
_LARGE = 2**62
_UNNAMED = re.compile(r"|Unnamed: 0|__index_level_[0-9]+__")
"""What pandas calls a column of an index without a name: in CSV, read again, and in Parquet."""


def separator_said(text: str) -> tuple[str | None, int]:
    """The separator that a first line `sep=;` names, as spreadsheets take it, and where the table begins; None and 0 without such a line."""
    found = _SAID.match(text)
    return (found[1], found.end()) if found else (None, 0)


def has_decimal_comma(columns: Mapping[str, Sequence[str]], separator: str) -> bool:
    """Whether the comma is the decimal point: where numbers have one, and no number has a point.

    Where a comma is no matter of course, at least one number must be none that is grouped in thousands, such as 0,5: 1,234 may be either.
    """
    cells = [cell for column in columns.values() for cell in column]
    with_comma = [cell for cell in cells if COMMA.fullmatch(cell)]
    if not with_comma or any("." in cell and NUMBER.fullmatch(cell) for cell in cells):
        return False
    return separator == ";" or not all(_THOUSANDS.fullmatch(cell) for cell in with_comma)


def empty_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The places of columns without a name, after the first, of which no cell holds anything: spreadsheets write them."""
    return [
        place
        for place, name in enumerate(header)
        if place and not name and not any(place < len(row) and row[place] for row in rows)
    ]


def is_index(cells: Mapping[str, Sequence[Any]], entrants: Collection[str]) -> bool:
    """Whether the first column only counts rows: whole numbers without a name, and next to it a column that names entrants.

    Args:
        cells: a table by columns.
        entrants: words that name a column of entrants, in small letters.
    """
    first, second, *scores = [*list(cells), "", ""][: max(3, len(cells))]
    if not scores or not _UNNAMED.fullmatch(first) or not all(_INDEX.fullmatch(str(cell)) for cell in cells[first]):
        return False
    named = second.strip().lower() in entrants
    return named or any(isinstance(cell, str) and cell and not _is_numeric(cell) for cell in cells[second])


def index_first(table: pa.Table) -> pa.Table:
    """A table of pandas with the columns of its index before the others, as pandas shows it; in Parquet they stand behind."""
    try:
        told = table.schema.pandas_metadata or {}
    except ValueError:  # metadata that are no JSON
        return table
    index = told.get("index_columns") if isinstance(told, dict) else None
    if not isinstance(index, list):
        return table
    behind = [name for name in index if isinstance(name, str) and name in table.column_names]
    if behind:
        table = table.select([*behind, *(name for name in table.column_names if name not in behind)])
    # Numbers in equal steps are no column of the file: what it says of itself has them.
    for one in (one for one in index if isinstance(one, dict)):
        name, steps = one.get("name"), [one.get(word) for word in ("start", "stop", "step")]
        whole = [step for step in steps if isinstance(step, int) and abs(step) < _LARGE]
        if isinstance(name, str) and name not in table.column_names and len(whole) == len(steps) and whole[2]:
            numbers = range(*whole)
            if len(numbers) == table.num_rows:
                table = table.add_column(0, name, pa.array(numbers, pa.int64()))
    return table


def _is_numeric(cell: str) -> bool:
    return bool(NUMBER.fullmatch(cell) or COMMA.fullmatch(cell))
