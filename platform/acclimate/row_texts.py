"""The canonical JSON of Parquet rows, made column by column in Arrow, since a holdout may have millions.

What a value's text is stands in rows.py. A batch takes a few MiB whatever the rows' size; a Parquet page is read as a whole, though, and
some writers make pages of 1,024 values whatever these measure. A small file that stands for a huge table is given up (bounds.py).
"""

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

_LARGEST_INTEGER = 2**53 - 1
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 8192
_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def texts(path: Path, named: dict[str, int] | None = None, *, name: str = "") -> Iterator[bytes]:
    """The canonical JSON of each row of a Parquet file, in order; arguments and refusals as of `views`."""
    for view in views(path, {} if named is None else named, name=name or path.name):
        yield bytes(view)


def views(path: Path, named: dict[str, int], *, name: str) -> Iterator[memoryview]:
    """The canonical JSON of each row of a Parquet file, in order; each view lasts until the next.

    Args:
        path: the file.
        named: filled with digest -> size of every blob that a row names.
        name: what refusals call the file.

    Raises:
        Refusal: splits_invalid, naming column and row where there is one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from acclimate_competitions import bounds

    start = taken = 0
    try:
        bounds.check_footer(path)
        with pq.ParquetFile(path, memory_map=False, buffer_size=1 << 20, pre_buffer=False) as file:
            columns = file.schema_arrow.names
            if len(set(columns)) != len(columns):
                raise Refusal("splits_invalid", f"{name}: two columns have the same name")
            rows = min(_batch_rows(file.metadata), bounds.batch_rows(path, file, most=bounds.allowed(path)))
            most = bounds.allowed(path, times=bounds.STREAMED)
            for batch in file.iter_batches(batch_size=rows, use_threads=False):
                taken += batch.nbytes
                bounds.check(taken, most)
                yield from _rows(batch, _Context(name, start, named))
                start += batch.num_rows
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        raise Refusal("splits_invalid", f"{name} is not a readable Parquet file: {error}") from error


def _batch_rows(metadata: "pa.Table") -> int:
    """Rows a batch, so that one takes a few MiB whatever the rows' size."""
    size = max((metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)), default=0)
    rows = max((metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)), default=0)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))


@dataclass(frozen=True)
class _Context:
    """Where a batch is, for refusals; `named` collects the blobs that rows name."""

    file: str
    start: int
    named: dict[str, int]
    column: tuple[str, ...] = field(default=())

    def below(self, name: str) -> "_Context":
        return _Context(self.file, self.start, self.named, (*self.column, name))

    def refuse(self, why: str, *, hint: str = "") -> Refusal:
        return Refusal("splits_invalid", f"{self.file}, column {'.'.join(self.column)!r}: {why}", hint=hint)


def _rows(batch: "pa.RecordBatch", context: _Context) -> Iterator[memoryview]:
    columns = [_column(batch.column(name), context.below(name)) for name in batch.schema.names]
    found = _objects(batch.schema.names, columns, rows=batch.num_rows)
    offsets, data = _offsets(found), memoryview(found.buffers()[2] or b"")
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield data[begin:end]


# ---- columns -------------------------------------------------------------------------------------------------------
# A column's JSON is an array of large_binary. That of strings comes without its quotation marks, which the object then adds,
# so that long texts are copied once less.


@dataclass(frozen=True)
class _Column:
    """JSON texts, none null; `mark` goes before and after each."""

    values: "pa.Array"
    mark: bytes = b""

    def whole(self) -> "pa.Array":
        return _join(self.mark, self.values, self.mark) if self.mark else self.values


def _join(*parts: "bytes | pa.Array") -> "pa.Array":
    """Concatenation, element by element; null where a part is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = pa.large_binary()
    scalars = [pa.scalar(part, kind) if isinstance(part, bytes) else part for part in (*parts, b"")]
    return pc.binary_join_element_wise(*scalars, null_handling="emit_null")


def _objects(names: list[str], columns: list[_Column], *, rows: int) -> "pa.Array":
    """{name: value} of each row, names in the order of RFC 8785."""
    import pyarrow as pa

    order = sorted(range(len(names)), key=lambda i: names[i].encode("utf-16-be"))
    parts: list[bytes | pa.Array] = []
    between = b"{"
    for i in order:
        between += encode_basestring(names[i]).encode() + b":" + columns[i].mark
        parts += [between, columns[i].values]
        between = columns[i].mark + b","
    if not parts:
        return _made(["{}"] * rows)
    result = _join(*parts, between.removesuffix(b",") + b"}")
    assert isinstance(result, pa.Array)
    return result


def _made(written: list[str]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(written, pa.large_string()).cast(pa.large_binary())


def _offsets(array: "pa.Array") -> Any:
    """Where each value of a large_binary array begins in its data, and the last one ends."""
    import numpy as np

    return np.frombuffer(array.buffers()[1] or bytes(8), np.int64)[array.offset : array.offset + len(array) + 1]


def _column(array: "pa.Array", context: _Context) -> _Column:
    """The JSON texts of an array's values."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.dictionary_decode(), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return _strings(array)
    if pa.types.is_struct(kind):
        return _Column(_structs(array, context))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _Column(_lists(array, context))
    if pa.types.is_integer(kind):
        return _Column(_integers(array, context))
    if pa.types.is_boolean(kind):
        return _Column(array.cast(pa.string()).cast(pa.large_binary()).fill_null(b"null"))
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            raise context.refuse("timestamps without a time zone", hint="store them as UTC")
        write: Callable[[int], str] = lambda value: _timestamp(value, _SECOND[kind.unit])  # noqa: E731
        return _plain(array.cast(pa.int64()), write)
    if (write_one := _writer(kind, context)) is None:
        raise context.refuse(
            f"values of type {kind}", hint="use strings, numbers, bool, bytes, timestamps, lists or structs"
        )
    return _plain(array, write_one)


def _strings(array: "pa.Array") -> _Column:
    """Strings with what JSON must escape escaped; Parquet's are checked for UTF-8 here, since Arrow takes any bytes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    array.validate(full=True)
    texts_ = array.cast(pa.large_string()).cast(pa.large_binary())
    offsets = _offsets(texts_)
    # The backslash is first, since the others bring it.
    for character in _special(np.frombuffer(texts_.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]):
        texts_ = pc.replace_substring(
            texts_, pattern=character.encode(), replacement=encode_basestring(character)[1:-1].encode()
        )
    if texts_.null_count:
        return _Column(_join(b'"', texts_, b'"').fill_null(b"null"))
    return _Column(texts_, b'"')


def _special(data: "npt.NDArray[np.uint8]") -> list[str]:
    """Which characters that JSON must escape stand in these bytes, the backslash first; in parts, to need little memory."""
    found = set[str]()
    for start in range(0, len(data), _BATCH_BYTES):
        part = data[start : start + _BATCH_BYTES]
        text = part.tobytes()
        found.update(c for c in '\\"' if c.encode() in text)
        if part.min() < 0x20:
            found.update(c for c in map(chr, range(0x20)) if c.encode() in text)
    return sorted(found, key=lambda c: c != "\\")


def _integers(array: "pa.Array", context: _Context) -> "pa.Array":
    import pyarrow as pa
    import pyarrow.compute as pc

    bounds = pc.min_max(array).as_py()
    if bounds["min"] is not None and not -_LARGEST_INTEGER <= bounds["min"] <= bounds["max"] <= _LARGEST_INTEGER:
        value = next(v for v in array.to_pylist() if v is not None and not -_LARGEST_INTEGER <= v <= _LARGEST_INTEGER)
        raise context.refuse(f"{value} is beyond 2^53 - 1", hint="store it as a string")
    return array.cast(pa.string()).cast(pa.large_binary()).fill_null(b"null")


def _plain(array: "pa.Array", write: Callable[..., str]) -> _Column:
    return _Column(_made(["null" if value is None else write(value) for value in array.to_pylist()]))


def _writer(kind: "pa.DataType", context: _Context) -> Callable[..., str] | None:
    import pyarrow as pa

    types = pa.types
    if types.is_floating(kind):
        return lambda value: _real(float(value), context)
    if (
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    ):
        return lambda value: f'"{base64.b64encode(value).decode()}"'
    if types.is_date(kind):
        return lambda value: f'"{value.isoformat()}"'
    if types.is_null(kind):
        return str
    return None


def _real(value: float, context: _Context) -> str:
    try:
        return f'"{digests.number(value)}"'
    except Refusal as refusal:
        raise context.refuse(f"a value is {value}", hint="use null for what is not known") from refusal


def _timestamp(value: int, per_second: int) -> str:
    from datetime import UTC, datetime, timedelta

    seconds, fraction = divmod(value, per_second)
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    digits = f"{fraction * (10**9 // per_second):09d}".rstrip("0")
    return f'"{moment.strftime("%Y").zfill(4)}{moment.strftime("-%m-%dT%H:%M:%S")}{"." if digits else ""}{digits}Z"'


def _structs(array: "pa.StructArray", context: _Context) -> "pa.Array":
    import pyarrow as pa
    import pyarrow.compute as pc

    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    if len(set(names)) != len(names):
        raise context.refuse("a struct has two fields of the same name")
    # flatten() makes the fields of a null struct null.
    columns = [_column(child, context.below(name)) for child, name in zip(array.flatten(), names, strict=True)]
    whole = _objects(names, columns, rows=len(array))
    if sorted(names) == ["sha256", "size"]:
        _name_blobs(array, context)
    return pc.if_else(array.is_valid(), whole, pa.scalar(b"null", pa.large_binary())) if array.null_count else whole


def _lists(array: "pa.ListArray", context: _Context) -> "pa.Array":
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    items = _column(array.flatten(), context).whole()  # without the items of null lists
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(ends, pa.int32()), items), pa.scalar(b",", items.type))
    whole = _join(b"[", joined, b"]")
    return pc.if_else(array.is_valid(), whole, pa.scalar(b"null", items.type)) if array.null_count else whole


def _name_blobs(array: "pa.StructArray", context: _Context) -> None:
    for value in array.to_pylist():
        if value is None:
            continue
        if not digests.is_digest(value["sha256"]) or type(value["size"]) is not int or value["size"] < 0:
            raise context.refuse(f"{value} names no blob", hint="{sha256: sha256:… of 64 hex digits, size: bytes}")
        if context.named.setdefault(value["sha256"], value["size"]) != value["size"]:
            raise context.refuse(f"{value['sha256']} is named with two sizes")
