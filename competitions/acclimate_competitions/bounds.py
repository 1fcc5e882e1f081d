"""How much memory a Parquet file may take: a few hundred bytes of one can stand for many GiB.

Two things make a small file large: compression, of a page whose true size only its own header tells; and dictionaries, of which a row repeats a long
value by a number. So the page headers are read first, which costs nothing, whatever the footer claims. A file whose pages are too large is given up
unread; the rest is decoded in batches, each small enough for the longest value that its pages can hold, and given up once too much has come.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import SEEK_END, FileIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

LEAST = 512 << 20
"""Bytes in memory that any file may take."""
_TIMES = 16
"""How many times its own size a larger file may take; what compresses better than that is no table of ours."""
STREAMED = 256
_BATCH = 256 << 20
_ROWS = 65_536
_MANY = 100
_LOOKED_AT = 8 << 20  # writers end a dictionary at 1 MiB or so
_DICTIONARY_PAGE = 2
_BY_DICTIONARY = frozenset({2, 8})  # PLAIN_DICTIONARY, RLE_DICTIONARY
_WINDOWS = (256, 65_536, 1 << 24)
_LENGTH = struct.Struct("<I")
_BY_PREFIX = 7  # DELTA_BYTE_ARRAY: a value begins with as much of the one before it as it likes


def read(path: Path, *, most: int | None = None) -> pa.Table:
    """All rows of a Parquet file.

    Args:
        path: the file.
        most: bytes that it may take in memory; LEAST, or more for a large file, where it is not given.

    Raises:
        OSError: it can't be read.
        ArrowException: it is no Parquet; or ArrowInvalid, where it would take more.
    """
    most = allowed(path) if most is None else most
    with pq.ParquetFile(path) as file:
        rows = batch_rows(path, file, most=most)
        batches, taken = [], 0
        # Most files are small, and starting threads for each would take longer than reading it.
        for batch in file.iter_batches(batch_size=rows, use_threads=False):
            taken += batch.nbytes
            check(taken, most)
            batches.append(batch)
        table = pa.Table.from_batches(batches, schema=file.schema_arrow)
    return table.combine_chunks() if len(batches) > _MANY else table


def allowed(path: Path, *, times: int = _TIMES) -> int:
    """Bytes that a file may take in memory, or, with STREAMED times, all in all where only some of them are there at once."""
    return max(LEAST, times * path.stat().st_size)


def check(size: int, most: int) -> None:
    """Give up on rows that take more than `most` bytes.

    Raises:
        ArrowInvalid: they do.
    """
    if size > most:
        raise pa.ArrowInvalid(f"its rows take {size} bytes of memory or more, at most {most} are allowed")


@dataclass
class _Chunk:
    """What the page headers of a column of a row group say.

    Attributes:
        bytes: of all pages, decompressed.
        values: how many, nulls included.
        repeats: the most that one value may take which stands in the pages fewer times than in the table.
    """

    bytes: int = 0
    values: int = 0
    repeats: int = 0


def batch_rows(path: Path, file: pq.ParquetFile, *, most: int) -> int:
    """Rows to decode at once.

    1. Of each column, all pages decompressed and a number or offset for each value are no more than `most`.
    2. So many rows as, by values that the pages hold once and rows repeat, take no more than _BATCH.
    3. A list may repeat them in one row, too: there all of them are counted.

    Raises:
        ArrowInvalid: the pages would take more, or their headers are broken.
    """
    footer = file.metadata
    count, repeats = int(footer.num_rows), 0
    with path.open("rb", buffering=0) as stream:
        for group in range(footer.num_row_groups):
            columns = footer.row_group(group)
            chunks = [_chunk(stream, columns.column(i), most) for i in range(columns.num_columns)]
            # 1
            needed = sum(chunk.bytes + 8 * chunk.values for chunk in chunks)
            # 3
            lists = [i for i in range(len(chunks)) if file.schema.column(i).max_repetition_level]
            needed += sum(chunks[i].values * chunks[i].repeats for i in lists)
            check(needed, most)
            # 2
            repeats = max(repeats, sum(chunk.repeats for chunk in chunks))
    # No more than there are: Arrow makes room for a whole batch.
    return max(1, min(_ROWS, count, _BATCH // max(repeats, 1)))


def _chunk(stream: FileIO, column: pq.ColumnChunkMetaData, most: int) -> _Chunk:
    chunk, longest, numbers = _Chunk(), 0, column.physical_type not in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
    for header, at in _headers(stream, column):
        size = header[2]
        chunk.bytes += size
        check(chunk.bytes, most)
        if header.get(1) == _DICTIONARY_PAGE:
            # Small ones are not worth the look.
            small = numbers or size * min(_ROWS, column.num_values) <= _BATCH // 16
            longest = max(longest, size if small else _longest(_at(stream, at, header[3]), column, size))
            continue
        # A data page of version 1 has its header in field 5 (encoding: 2), one of version 2 in field 8 (encoding: 4).
        one, two = header.get(5), header.get(8)
        about, encoding = (one, 2) if isinstance(one, dict) else (two, 4)
        if not isinstance(about, dict):
            continue
        chunk.values += about.get(1, 0)
        if not numbers and about.get(encoding) in _BY_DICTIONARY:
            chunk.repeats = max(chunk.repeats, longest)
        if not numbers and about.get(encoding) == _BY_PREFIX:
            chunk.repeats = max(chunk.repeats, size)
    return chunk


def _longest(page: bytes, column: pq.ColumnChunkMetaData, size: int) -> int:
    """Bytes of the longest text of a dictionary page; all of the page's where that can't be told."""
    if column.physical_type != "BYTE_ARRAY" or size > _LOOKED_AT:
        return size
    try:
        plain = page if column.compression == "UNCOMPRESSED" else _decompressed(page, column.compression, size)
        at = longest = 0
        while at < len(plain):
            (length,) = _LENGTH.unpack_from(plain, at)
            at, longest = at + 4 + length, max(longest, length)
    except (ValueError, OSError, struct.error, pa.ArrowException):
        return size
    return longest if at == len(plain) else size


def _decompressed(page: bytes, codec: str, size: int) -> bytes:
    plain: bytes = pa.Codec(codec.lower()).decompress(page, decompressed_size=size, asbytes=True)
    return plain


def _headers(stream: FileIO, column: pq.ColumnChunkMetaData) -> Iterator[tuple[dict[int, Any], int]]:
    """The page headers of a column chunk, in order, and where the pages begin."""
    if column.num_values <= 0:  # Arrow reads no page then, and some writers point nowhere
        return
    at = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < at:
        at = column.dictionary_page_offset
    end = at + column.total_compressed_size
    if not 0 <= at <= end <= stream.seek(0, SEEK_END):
        raise pa.ArrowInvalid("a column's pages lie outside of the file")
    while at < end:
        header, length = _header(stream, at)
        if not isinstance(header.get(2), int) or not isinstance(header.get(3), int) or min(header[2], header[3]) < 0:
            raise pa.ArrowInvalid("a page's header has no size")
        at += length
        yield header, at
        at += header[3]


def _header(stream: FileIO, at: int) -> tuple[dict[int, Any], int]:
    """A page's header, and its length."""
    for window in _WINDOWS:
        try:
            return _struct(_at(stream, at, window), 0, depth=0)
        except IndexError:  # statistics may be long
            continue
    raise pa.ArrowInvalid("a page's header is cut off")


def _at(stream: FileIO, at: int, length: int) -> bytes:
    stream.seek(at)
    return stream.read(length)


# ---- Thrift's compact protocol, as far as page headers need it ------------------------------------------------------


def _struct(data: bytes, at: int, *, depth: int) -> tuple[dict[int, Any], int]:
    """Whole numbers and structs by their field, and where the struct ends; IndexError where it does not end in the data."""
    found: dict[int, Any] = {}
    field = 0
    while kind := data[at]:
        delta, kind, at = kind >> 4, kind & 15, at + 1
        if delta:
            field += delta
        else:
            field, at = _number(data, at)
        if kind in (4, 5, 6):  # i16, i32, i64
            found[field], at = _number(data, at)
        elif kind == 12 and depth < 4:
            found[field], at = _struct(data, at, depth=depth + 1)
        elif kind == 8:  # binary: statistics
            length, at = _varint(data, at)
            at += length
        elif kind == 3:  # byte
            at += 1
        elif kind == 7:  # double
            at += 8
        elif kind not in (1, 2):  # true, false
            raise pa.ArrowInvalid(f"a page's header has a field of type {kind}")
    return found, at + 1


def _number(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise pa.ArrowInvalid("a number in a page's header is too long")
