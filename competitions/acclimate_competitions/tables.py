"""The tables that rounds are made of, as Arrow schemas: splits, predictions, scores. One key for a score everywhere.

A score's key is (entrant, protocol, task, seed, metric, example); seed is null for a direct evaluation, and protocol is part of
the key so that direct and prepared can never be pooled. Unknown is not zero: an unscored example has score null and a reason.
"""

import errno
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from acclimate_competitions import bounds
from acclimate_competitions.errors import Refusal

# EFBIG: the process's own limit on file sizes, which is a full disk to whoever set it.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Protocol = Literal["direct", "prepared"]
PROTOCOLS: tuple[Protocol, ...] = ("direct", "prepared")

SPLIT_COLUMNS = ("example", "input", "target")
"""Columns that each split has, all string; `cluster` (string) and further columns as the prompt template needs may follow."""

PREDICTIONS = pa.schema(
    [
        pa.field("entrant", pa.string(), nullable=False),
        pa.field("protocol", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("seed", pa.int64()),
        pa.field("example", pa.string(), nullable=False),
        # One log-likelihood a choice, natural log, in the order of the task's choices, or one of a whole text; null where there was no prediction.
        pa.field("loglikelihoods", pa.list_(pa.float64())),
        # What the model wrote; null for tasks that are not written.
        pa.field("text", pa.string()),
    ]
)

SCORES = pa.schema(
    [
        pa.field("entrant", pa.string(), nullable=False),
        pa.field("protocol", pa.string(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("seed", pa.int64()),
        pa.field("metric", pa.string(), nullable=False),
        pa.field("example", pa.string(), nullable=False),
        pa.field("cluster", pa.string(), nullable=False),
        pa.field("score", pa.float64()),
        pa.field("reason", pa.string()),
    ]
)


def write(table: pa.Table, path: Path) -> None:
    """Write a table as Parquet with fixed options, so that one library version writes the same bytes for the same rows.

    Raises:
        Refusal: no_space.
    """
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 3, "use_dictionary": True}
    try:
        pq.write_table(table, path, write_statistics=False, **options)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        hint = "free some space and do the same again"
        raise Refusal("no_space", f"no space is left for {path}; nothing was lost", hint=hint) from error


def columns(path: Path) -> pa.Schema:
    """The columns of a Parquet file, without its rows.

    Raises:
        Refusal: file_unreadable.
    """
    try:
        bounds.check_footer(path)
        return pq.read_schema(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Refusal("file_unreadable", f"{path.name}: {error}") from error


def read(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """Read a Parquet file, and refuse it where it has not exactly the schema's columns, or takes too much memory (bounds.py).

    Raises:
        Refusal: file_unreadable, scores_invalid.
    """
    try:
        table = bounds.read(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Refusal("file_unreadable", f"{path.name}: {error}") from error
    if schema is None:
        return table
    if table.schema.names != schema.names:
        raise Refusal("scores_invalid", f"{path.name}: columns {table.schema.names}, expected {schema.names}")
    try:
        return table.cast(schema)
    except (ValueError, pa.ArrowException) as error:
        raise Refusal("scores_invalid", f"{path.name}: {error}") from error
