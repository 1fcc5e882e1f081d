"""Tables as blobs: read one, keep one."""

import uuid
from typing import TYPE_CHECKING

from acclimate_competitions import tables
from acclimate_runners.blobs import Blobs

if TYPE_CHECKING:
    import pyarrow as pa


def read(blobs: Blobs, digest: str, schema: "pa.Schema | None" = None) -> "pa.Table":
    """A table that is a blob; refused where it has not exactly the schema's columns.

    Raises:
        Refusal: blob_unknown, blob_corrupt, file_unreadable, scores_invalid.
    """
    with blobs.local(digest) as path:
        return tables.read(path, schema)


def columns(blobs: Blobs, digest: str) -> "pa.Schema":
    """The columns of a table that is a blob, without its rows.

    Raises:
        Refusal: blob_unknown, blob_corrupt, file_unreadable.
    """
    with blobs.local(digest) as path:
        return tables.columns(path)


def keep(blobs: Blobs, table: "pa.Table") -> str:
    """Store a table; returns its digest.

    Raises:
        Refusal: no_space.
    """
    path = blobs.scratch / f"{uuid.uuid4().hex}.parquet"
    try:
        tables.write(table, path)
        return blobs.put(path)
    finally:
        path.unlink(missing_ok=True)
