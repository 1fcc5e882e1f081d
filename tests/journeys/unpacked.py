"""What lies in a file's bytes where they are Parquet, or a SQLite database: for tests that search them for words."""

import contextlib
import io
import sqlite3
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def parquet(raw: bytes) -> list[pa.Table]:
    return [pq.read_table(io.BytesIO(raw))] if raw[:4] == raw[-4:] == b"PAR1" else []


def dump(path: Path, raw: bytes) -> list[str]:
    """A database's rows, its journal's included: as text, and blobs decoded."""
    if not raw.startswith(b"SQLite format 3\0"):
        return []
    rows: list[str] = []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in names:
            for row in connection.execute(f'SELECT * FROM "{name}"'):
                rows += [cell.decode("latin-1") if isinstance(cell, bytes) else str(cell) for cell in row]
    return rows
