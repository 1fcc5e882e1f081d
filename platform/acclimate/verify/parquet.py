"""Parquet files of a bundle, and where two tables differ first."""

from pathlib import Path

import pyarrow as pa

from acclimate.verify.report import Failed
from acclimate_competitions import bounds, digests, tables


def read(path: Path, name: str, schema: pa.Schema | None = None) -> pa.Table:
    """The table of a file.

    Args:
        path: where it lies.
        name: what to call it in a failure.
        schema: the columns it must have, in this order and of these types.

    Raises:
        Failed: it is no Parquet, or takes more memory than any table of a round (bounds.py), or has other columns or types, or a null where the schema
            has none.
    """
    try:
        table = bounds.read(path)
        table.validate(full=True)
        if schema is None:
            return table
        _same_columns(table.schema, schema, name, was="expected")
        return table.cast(schema)
    except (OSError, ValueError, pa.ArrowException) as error:
        said = str(error).replace(str(path), name).partition("\n")[0]
        raise Failed(name, f"not a Parquet table of its kind: {said}") from error


def require_plain(path: Path, name: str, table: pa.Table, aside: Path) -> None:
    """Refuse a file that holds more than its rows: what readers leave rows out by, and what anybody may have written into it.

    Its bytes are those that this machine writes of the same rows, or, as another version of the library writes other ones, it has nothing
    beside the rows (`bounds.beside`).

    Args:
        path: the file.
        name: the published file.
        table: its rows, verified.
        aside: a folder for the same rows, written here.

    Raises:
        Failed: it holds more.
        Refusal: no_space.
    """
    own = aside / "written.parquet"
    tables.write(table.combine_chunks(), own)
    try:
        if digests.of_file(path) != digests.of_file(own) and (found := bounds.beside(path, own)):
            raise Failed(name, f"it holds something else than the rows, which are right: {found}")
    except (OSError, ValueError, IndexError, pa.ArrowException) as error:
        raise Failed(name, f"not a Parquet table of its kind: {str(error).partition(chr(10))[0]}") from error
    finally:
        own.unlink(missing_ok=True)


def same(found: pa.Table, expected: pa.Table, name: str, *, was: str) -> None:
    """Refuse a table that is not, column by column and row by row, the expected one.

    Args:
        found: the table published.
        expected: the table that it must be.
        name: the published file.
        was: what the expected values are, such as "recomputed".

    Raises:
        Failed: naming file, row and column.
    """
    _same_columns(found.schema, expected.schema, name, was=was)
    rows = min(found.num_rows, expected.num_rows)
    unequal = [column for column in expected.schema.names if not found.column(column).equals(expected.column(column))]
    first: tuple[int, str, object, object] | None = None
    for column in unequal:
        pairs = zip(found.column(column).to_pylist(), expected.column(column).to_pylist(), strict=False)
        row = next((row for row, (here, there) in enumerate(pairs) if not _equal(here, there)), rows)
        if row < rows and (first is None or row < first[0]):
            first = row, column, found.column(column)[row].as_py(), expected.column(column)[row].as_py()
    if first is not None:
        row, column, here, there = first
        raise Failed(f"{name}, row {row}{_key(expected, row)}, column {column}", f"it says {here!r}, {was}: {there!r}")
    if found.num_rows != expected.num_rows:
        raise Failed(f"{name}, row {rows}", f"it has {found.num_rows} rows, {was}: {expected.num_rows}")


def _same_columns(found: pa.Schema, expected: pa.Schema, name: str, *, was: str) -> None:
    """Refuse other names, another order and other types: a cast would take "0.5" for 0.5, and Python true for 1."""
    if found.names != expected.names:
        raise Failed(name, f"columns {found.names}, {was}: {expected.names}")
    for here, there in zip(found, expected, strict=True):
        if here.type != there.type:
            raise Failed(f"{name}, column {here.name}", f"it is of type {here.type}, {was}: {there.type}")


def _equal(here: object, there: object) -> bool:
    # Not a number is no equal of itself, and no score either: it counts as a difference from everything but itself.
    return here == there or (here != here and there != there)


def _key(table: pa.Table, row: int) -> str:
    parts = [table.column(c)[row].as_py() for c in ("protocol", "task", "seed", "example") if c in table.schema.names]
    return f" ({', '.join('none' if part is None else str(part) for part in parts)})" if parts else ""
