"""A database's tables as files of a backup: one line of JSON a row, in the order of the primary key, the same on every engine.

The first line names table and columns. Bytes are base64, JSON columns JSON. What is read back into another database gives the same bytes
when it is written again: that is how a restore is verified before its transaction ends.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, LargeBinary, MetaData, Table, insert, select, text

from acclimate import log
from acclimate_competitions.errors import Refusal

LOG = "log_entries"
_PAGE = 500


@dataclass(frozen=True)
class Written:
    """A table that went through `lines`.

    Attributes:
        rows: how many.
        size: bytes of the file.
        digest: of the file.
    """

    rows: int
    size: int
    digest: str


class Tally:
    """Counts and hashes a table's lines as they pass."""

    def __init__(self) -> None:
        self._state, self._lines, self._size = hashlib.sha256(), 0, 0

    def add(self, line: bytes) -> bytes:
        """Take a line; returns it."""
        self._state.update(line)
        self._lines += 1
        self._size += len(line)
        return line

    def result(self) -> Written:
        """What passed; the first line is no row."""
        return Written(self._lines - 1, self._size, "sha256:" + self._state.hexdigest())


def tables(connection: Connection) -> MetaData:
    """The tables as the database has them, of whatever revision it is; without Alembic's own."""
    found = MetaData()
    found.reflect(connection)
    versions = found.tables.get("alembic_version")
    if versions is not None:
        found.remove(versions)
    return found


def lines(
    connection: Connection, table: Table, *, columns: Sequence[str] = (), tree: log.Tree | None = None
) -> Iterator[bytes]:
    """A table's file, line by line.

    Args:
        connection: in a transaction that sees one moment.
        table: which.
        columns: in which order; else the table's own.
        tree: takes the log's entries, where the table is the log.
    """
    chosen = [table.c[name] for name in columns] if columns else list(table.columns)
    yield _line({"table": table.name, "columns": [column.name for column in chosen]})
    raw = [isinstance(column.type, LargeBinary) for column in chosen]
    entry = [column.name for column in chosen].index("data") if tree is not None and table.name == LOG else None
    query = select(*chosen).order_by(*table.primary_key.columns)
    for row in connection.execute(query, execution_options={"stream_results": True, "yield_per": _PAGE}):
        if tree is not None and entry is not None:
            tree.append(log.leaf_hash(bytes(row[entry])))
        values = zip(row, raw, strict=True)
        yield _line(
            [base64.b64encode(value).decode() if code and value is not None else value for value, code in values]
        )


def fill(connection: Connection, table: Table, file: Path) -> list[str]:
    """Put a table's file into an empty table; the columns as the file has them.

    Raises:
        Refusal: backup_invalid.
    """
    with file.open("rb") as stream:
        columns = _columns(table, json.loads(stream.readline()), file)
        raw = [isinstance(table.c[name].type, LargeBinary) for name in columns]
        page: list[dict[str, Any]] = []
        for line in stream:
            values = [
                base64.b64decode(value) if code and value is not None else value
                for value, code in zip(json.loads(line), raw, strict=True)
            ]
            page.append(dict(zip(columns, values, strict=True)))
            if len(page) == _PAGE:
                connection.execute(insert(table), page)
                page = []
        if page:
            connection.execute(insert(table), page)
    if connection.dialect.name == "postgresql":
        _go_on(connection, table)
    return columns


def _columns(table: Table, head: Mapping[str, Any], file: Path) -> list[str]:
    columns = list(head["columns"])
    if head["table"] != table.name or set(columns) != set(table.c.keys()):
        raise Refusal(
            "backup_invalid",
            f"{file.name} is of the table {head['table']} with the columns {', '.join(columns)}; {table.name} has "
            f"{', '.join(table.c.keys())}",
            hint="use the version of Acclimate that wrote the backup",
        )
    return columns


def _go_on(connection: Connection, table: Table) -> None:
    """Let a counted key go on where the rows end."""
    for column in table.primary_key.columns:
        at = {"name": f'"{table.name}"', "column": column.name}
        sequence = connection.execute(text("SELECT pg_get_serial_sequence(:name, :column)"), at).scalar()
        if sequence:
            last = f'SELECT COALESCE(MAX("{column.name}"), 0) FROM "{table.name}"'
            query = text(f"SELECT setval(:sequence, GREATEST(({last}), 1), ({last}) > 0)")
            connection.execute(query, {"sequence": sequence})


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
