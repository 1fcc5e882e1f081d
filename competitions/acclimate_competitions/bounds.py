"""How much memory a Parquet file may take: a few hundred bytes of one can stand for many GiB.

Two things make a small file large: compression, of a page whose true size only its own header tells; and dictionaries, of which a row repeats a long
value by a number. So the page headers are read first, which costs nothing, whatever the footer claims. A file whose pages are too large is given up
unread; the rest is decoded in batches, each small enough for the longest value that its pages can hold, and given up once too much has come.
"""

import base64
import re
import stat
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
_FOOTER = 16 << 20
"""Bytes that a footer may have: one column of one row group takes some hundred, and some thousand bytes of memory before any row is read."""
_LOOKED_AT = 8 << 20  # writers end a dictionary at 1 MiB or so
_DEEPEST = 8
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_2 = 0, 2, 3
_BYTES, _FIXED = 6, 7  # BYTE_ARRAY, FIXED_LEN_BYTE_ARRAY
_CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_BY_DICTIONARY = frozenset({2, 8})  # PLAIN_DICTIONARY, RLE_DICTIONARY
_WINDOWS = (256, 65_536, 1 << 24)
_LENGTH = struct.Struct("<I")
_MAGIC = b"PAR1"
_TAIL = 8  # the footer's length, and the magic bytes
_SCHEMA = b"ARROW:schema"
_WRITER = re.compile(r"parquet-cpp-arrow version [0-9A-Za-z.+-]{1,40}")
# By Parquet's own numbers: what our writer writes; statistics, indexes, filters, orders and metadata of columns are not among them.
_FILE_FIELDS = frozenset({1, 2, 3, 4, 5, 6, 7})
_GROUP_FIELDS = frozenset({1, 2, 3, 5, 6, 7})
_CHUNK_FIELDS = frozenset({2, 3})
# The last is how many bytes and nulls there are, by which readers make room and leave out nothing.
_COLUMN_FIELDS = frozenset({1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 16})
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
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe keeps whoever opens it waiting
        raise pa.ArrowInvalid("it is no regular file")
    most = allowed(path) if most is None else most
    check_footer(path)
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


MOST_NUMBERS = LEAST // 16
"""Numbers that a table of predictions may hold: so many are read, however the file is packed. A number takes 8 bytes in a page, and 8 more for its place."""


def predicted(rows: int, choices: int, ids: int) -> int:
    """How many numbers' room a table of predictions takes to a reader, as MOST_NUMBERS counts it.

    Args:
        rows: of the split that is asked.
        choices: numbers of a row.
        ids: bytes of all examples' names.
    """
    # Names stand there once, in a page and decoded; and each row has a place in each of the seven columns.
    return rows * choices + ids // 8 + 7 * rows


def check(size: int, most: int) -> None:
    """Give up on rows that take more than `most` bytes.

    Raises:
        ArrowInvalid: they do.
    """
    if size > most:
        raise pa.ArrowInvalid(f"its rows take {size} bytes of memory or more, at most {most} are allowed")


def check_footer(path: Path) -> None:
    """Give up on a file whose footer alone would take much memory and time, before it is parsed.

    Raises:
        ArrowInvalid: it is longer than _FOOTER, or the file is too short for one.
    """
    with path.open("rb") as stream:
        if stream.seek(0, SEEK_END) < _TAIL:
            raise pa.ArrowInvalid("it is too short for a Parquet file")
        stream.seek(-_TAIL, SEEK_END)
        (length,) = _LENGTH.unpack(stream.read(4))
        if stream.read(4) != _MAGIC:  # what is no Parquet has no footer, and Arrow says so
            return
    if length > _FOOTER:
        raise pa.ArrowInvalid(f"its footer has {length} bytes, at most {_FOOTER} are allowed")


def beside(path: Path, like: Path) -> str:
    """What a file holds that is none of its rows, and that a reader may show or believe; "" where it is nothing.

    1. The pages follow one another from the first bytes to the footer, and the footer ends the file.
    2. No page and no footer has statistics, an index, a filter, an order: readers leave rows out by them.
    3. Texts of the footer are those of the other file, but for the version of the library that wrote it.

    Args:
        path: a file that `read` has read.
        like: the same rows, as this machine writes them.

    Raises:
        OSError, ArrowException: as read.
    """
    with path.open("rb", buffering=0) as stream:
        # 1
        size = stream.seek(0, SEEK_END)
        (length,) = _LENGTH.unpack(_at(stream, size - 8, 4))
        if _at(stream, 0, 4) != _MAGIC or _at(stream, size - 4, 4) != _MAGIC:
            return "it does not begin and end as a Parquet file does"
        found, end = _struct(_at(stream, size - 8 - length, length), 0, depth=0)
        if end != length:
            return f"{length - end} bytes stand behind the footer"
        at = len(_MAGIC)
        for group in _parts(found, 4):
            for chunk in _parts(group, 1):
                column = _column(chunk)
                begin = min((place for place in (column.dictionary, column.data) if place > 0), default=0)
                if begin != at:
                    return f"bytes that belong to no page stand at byte {at}"
                # 2
                if any(page.statistics for page, _ in _headers(stream, column)):
                    return f"a page that begins behind byte {begin} has statistics of its own"
                if odd := _odd(chunk, _CHUNK_FIELDS) or _odd(chunk[3 << 4 | _STRUCT], _COLUMN_FIELDS):
                    return f"the footer says of a column what rows do not need: field {odd}"
                at += column.size
            if odd := _odd(group, _GROUP_FIELDS):
                return f"the footer says of rows what they do not need: field {odd}"
        if at != size - 8 - length:
            return f"bytes that belong to no page stand at byte {at}"
        if odd := _odd(found, _FILE_FIELDS):
            return f"the footer has a field {odd}, which rows do not need"
    # 3
    return _other_texts(found, path, like)


def _odd(found: dict[int, Any], known: frozenset[int]) -> int:
    """The first field of a struct that is none of these; 0 where there is none."""
    return next((field >> 4 for field in found if field >> 4 not in known), 0)


def _other_texts(footer: dict[int, Any], path: Path, like: Path) -> str:
    with pq.ParquetFile(path) as file, pq.ParquetFile(like) as own:
        here, there = file.metadata.metadata or {}, own.metadata.metadata or {}
        if set(here) != set(there) or len(footer.get(5 << 4 | _LIST) or []) != len(there):
            return f"its metadata has the keys {sorted(here)}, a table of these rows {sorted(there)}"
        for key in here:
            same = _schema(here[key]).equals(_schema(there[key]), check_metadata=True) if key == _SCHEMA else False
            if not same and here[key] != there[key]:
                return f"its metadata {key.decode(errors='replace')!r} is none of these rows"
        if not file.schema.equals(own.schema):
            return "its schema says of the columns what rows do not need"
        if not _WRITER.fullmatch(file.metadata.created_by or ""):
            return f"it says that it was created by {(file.metadata.created_by or '')[:100]!r}"
    return ""


def _schema(value: bytes) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value)))
    except ValueError as error:
        raise pa.ArrowInvalid("the metadata ARROW:schema is no schema") from error


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
    groups, count, repeats = _footer(path), int(file.metadata.num_rows), 0
    with path.open("rb", buffering=0) as stream:
        for columns in groups:
            if len(columns) != len(file.schema):
                raise pa.ArrowInvalid(f"a row group has {len(columns)} columns, the schema {len(file.schema)}")
            chunks = [_chunk(stream, column, most) for column in columns]
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


@dataclass(frozen=True)
class _Column:
    """What the footer says of a column of a row group, by Parquet's own numbers of types and codecs; bytes for sizes and places."""

    type: int
    codec: int
    values: int
    size: int
    data: int
    dictionary: int


def _footer(path: Path) -> list[list[_Column]]:
    """The columns of each row group. Arrow's own view of them ends the process where a footer contradicts itself.

    Raises:
        ArrowInvalid: it is broken.
    """
    with path.open("rb") as stream:
        end = stream.seek(-8, SEEK_END)
        (length,) = _LENGTH.unpack(stream.read(4))
        stream.seek(max(0, end - length))
        data = stream.read(length)
    try:
        found, _ = _struct(data, 0, depth=0)
    except IndexError:
        raise pa.ArrowInvalid("the footer is cut off") from None
    return [[_column(chunk) for chunk in _parts(group, 1)] for group in _parts(found, 4)]


def _parts(found: dict[int, Any], field: int) -> list[dict[int, Any]]:
    parts = found.get(field << 4 | _LIST)
    if parts is None or not all(isinstance(part, dict) for part in parts):
        raise pa.ArrowInvalid(f"field {field} of the footer is no list of structs")
    return list(parts)


def _column(chunk: dict[int, Any]) -> _Column:
    about = chunk.get(3 << 4 | _STRUCT)
    if not isinstance(about, dict) or any(field >> 4 in (8, 9) for field in chunk):  # encrypted
        raise pa.ArrowInvalid("the footer does not say what a column is")
    type_, codec = about.get(1 << 4 | _I32), about.get(4 << 4 | _I32)
    values, size, data = (about.get(field << 4 | _I64) for field in (5, 7, 9))
    if type_ is None or codec is None or values is None or size is None or data is None:
        raise pa.ArrowInvalid("the footer does not say of what type and size a column is, and where")
    return _Column(type_, codec, values, size, data, about.get(11 << 4 | _I64, 0))


def _chunk(stream: FileIO, column: _Column, most: int) -> _Chunk:
    chunk, longest, numbers = _Chunk(), 0, column.type not in (_BYTES, _FIXED)
    for page, at in _headers(stream, column):
        chunk.bytes += page.size
        check(chunk.bytes, most)
        if page.type == _DICTIONARY_PAGE:
            # Small ones are not worth the look.
            small = numbers or page.size * min(_ROWS, column.values) <= _BATCH // 16
            longest = max(longest, page.size if small else _longest(_at(stream, at, page.packed), column, page.size))
            continue
        chunk.values += page.values
        if not numbers and page.encoding in _BY_DICTIONARY:
            chunk.repeats = max(chunk.repeats, longest)
        if not numbers and page.encoding == _BY_PREFIX:
            chunk.repeats = max(chunk.repeats, page.size)
    if chunk.values < column.values:  # else Arrow would look for more of them behind
        raise pa.ArrowInvalid(f"a column's pages have {chunk.values} values, the footer says {column.values}")
    return chunk


def _longest(page: bytes, column: _Column, size: int) -> int:
    """Bytes of the longest text of a dictionary page; all of the page's where that can't be told."""
    if column.type != _BYTES or column.codec not in _CODECS or size > _LOOKED_AT:
        return size
    try:
        codec = _CODECS[column.codec]
        plain = page if codec is None else _decompressed(page, codec, size)
        at = longest = 0
        while at < len(plain):
            (length,) = _LENGTH.unpack_from(plain, at)
            at, longest = at + 4 + length, max(longest, length)
    except (ValueError, OSError, struct.error, pa.ArrowException):
        return size
    return longest if at == len(plain) else size


def _decompressed(page: bytes, codec: str, size: int) -> bytes:
    plain: bytes = pa.Codec(codec).decompress(page, decompressed_size=size, asbytes=True)
    return plain


@dataclass(frozen=True)
class _Page:
    """What a page's header says, by Parquet's own numbers of types and encodings; bytes for size, decompressed, and packed."""

    type: int
    size: int
    packed: int
    values: int
    encoding: int | None
    statistics: bool = False


def _headers(stream: FileIO, column: _Column) -> Iterator[tuple[_Page, int]]:
    """The page headers of a column chunk, in order, and where the pages begin."""
    if column.values <= 0:  # Arrow reads no page then, and some writers point nowhere
        return
    at = column.dictionary if 0 < column.dictionary < column.data else column.data
    end = at + column.size
    if not 0 <= at <= end <= stream.seek(0, SEEK_END):
        raise pa.ArrowInvalid("a column's pages lie outside of the file")
    while at < end:
        found, length = _header(stream, at)
        page = _page(found)
        at += length
        if page.packed > end - at:
            raise pa.ArrowInvalid("a page ends behind its column")
        yield page, at
        at += page.packed


def _page(header: dict[int, Any]) -> _Page:
    type_, size, packed = (header.get(field << 4 | _I32) for field in (1, 2, 3))
    if type_ is None or size is None or packed is None or size < 0 or packed < 0:
        raise pa.ArrowInvalid("a page's header has no type or no size")
    if type_ not in (_DATA_PAGE, _DATA_PAGE_2):
        return _Page(type_, size, packed, 0, None)
    # A data page of version 1 has its header in field 5 (encoding: 2), one of version 2 in field 8 (encoding: 4).
    field, encoding = (5, 2) if type_ == _DATA_PAGE else (8, 4)
    about = header.get(field << 4 | _STRUCT, {})
    values = about.get(1 << 4 | _I32, -1)
    if values < 0:
        raise pa.ArrowInvalid("a page's header does not say how many values it has")
    # Field 5 of the one, field 8 of the other again; some writers leave it there empty.
    has = bool(about.get(field << 4 | _STRUCT))
    return _Page(type_, size, packed, values, about.get(encoding << 4 | _I32), has)


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


# ---- Thrift's compact protocol, as far as footers and page headers need it ------------------------------------------

_I16, _I32, _I64, _LIST, _STRUCT = 4, 5, 6, 9, 12
_LARGEST = {_I16: 2**15 - 1, _I32: 2**31 - 1, _I64: 2**63 - 1}


def _struct(data: bytes, at: int, *, depth: int) -> tuple[dict[int, Any], int]:
    """Numbers, structs and lists of both by `field << 4 | type`, and where the struct ends; IndexError where it does not end in the data.

    The type is a part of the key as Arrow skips a field that is of another one than it should be.
    """
    found: dict[int, Any] = {}
    field = 0
    while kind := data[at]:
        delta, kind, at = kind >> 4, kind & 15, at + 1
        if delta:
            field += delta
        else:
            field, at = _number(data, at, _I16)
        # Arrow has 16 bits for it, and what is more wraps around.
        if not 0 < field <= _LARGEST[_I16]:
            raise pa.ArrowInvalid(f"a struct has a field {field}")
        key = field << 4 | kind
        # Readers differ in what they make of a field that comes twice.
        if key in found:
            raise pa.ArrowInvalid(f"field {field} of a struct comes twice")
        if 4 <= kind <= 6:
            # As _value; most fields are numbers, and reading a table's headers takes as long as reading the table.
            found[key], at = _number(data, at, kind)
        elif kind in (1, 2):
            # A field that is true or false has no byte of its own.
            found[key] = None
        else:
            found[key], at = _value(data, at, kind, depth=depth)
    return found, at + 1


def _value(data: bytes, at: int, kind: int, *, depth: int) -> tuple[Any, int]:
    """A number, a struct or a list of them, None for all else, and where it ends."""
    if kind in (4, 5, 6):  # i16, i32, i64
        return _number(data, at, kind)
    if kind == 12 and depth < _DEEPEST:
        return _struct(data, at, depth=depth + 1)
    if kind in (9, 10) and depth < _DEEPEST:  # list, set
        count, kind, at = data[at] >> 4, data[at] & 15, at + 1
        if count == 15:
            count, at = _varint(data, at)
        if count > len(data):  # each takes a byte at least
            raise IndexError
        values: list[Any] = []
        for _ in range(count):
            value, at = _value(data, at, kind, depth=depth + 1)
            values.append(value)
        return values, at
    if kind == 8:  # binary
        length, at = _varint(data, at)
        end = at + length
    else:
        sizes = {1: 1, 2: 1, 3: 1, 7: 8}  # true and false in a list, byte, double
        if kind not in sizes:
            raise pa.ArrowInvalid(f"a value is of type {kind}")
        end = at + sizes[kind]
    if end > len(data):
        raise IndexError
    return None, end


def _number(data: bytes, at: int, kind: int) -> tuple[int, int]:
    value = data[at]
    if value < 128:
        return (value >> 1) ^ -(value & 1), at + 1
    value, at = _varint(data, at)
    value = (value >> 1) ^ -(value & 1)
    if not -_LARGEST[kind] - 1 <= value <= _LARGEST[kind]:
        raise pa.ArrowInvalid("a number is too large")
    return value, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise pa.ArrowInvalid("a number is too long")
