"""Row commitments: one root over every row of the holdout, that opens single rows without the others.

A row's text is canonical JSON (RFC 8785) of {column: value}. Values: null; true, false; whole numbers up to ±(2^53 − 1); strings; lists;
structs as objects; floats as a string of the shortest decimal that gives the same 64-bit float back, written as RFC 8785 writes numbers, no NaN
or infinity; bytes as a base64 string; timestamps as RFC 3339 in UTC, with the shortest fraction of a second that says
the same, and only such as name a time zone; dates as YYYY-MM-DD. A file that a row names (an image, a structure) stands in it as the struct
{sha256: digest, size: bytes}, and in the archive as `blobs/` and the 64 hex digits.

The row with global index i, counted over the Parquet files in bytewise order of their names, is the leaf salt ‖ text of an RFC 6962
tree, with salt = HMAC-SHA256(row_key, i as unsigned 64-bit big-endian). The salt keeps a guessed row from being confirmed before the opening.
It is values that are committed to, not Parquet bytes, which change with the version and codec of the writer.
"""

import base64
import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from pathlib import Path
from typing import TYPE_CHECKING

from acclimate import archive
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIX = ".parquet"
BLOBS = "blobs/"
_LARGEST_INTEGER = 2**53 - 1
_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 8192
_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
class Commitment:
    """What the rows of a holdout are committed to with.

    Attributes:
        root: the RFC 6962 root over the salted rows, as a digest.
        count: how many rows.
        counts: rows of each Parquet file.
    """

    root: str
    count: int
    counts: Mapping[str, int]


def commit(files: Mapping[str, Path], row_key: bytes) -> Commitment:
    """Commit to the rows of Parquet files, in memory that grows with their pages, not with the files.

    Args:
        files: name in the archive -> file; those that don't end in .parquet must be blobs that rows name.
        row_key: 32 bytes.

    Raises:
        Refusal: splits_invalid, where a file is not Parquet, a value can't be said in JSON, or a file is not named by any row.
    """
    tree, counts, named = _Root(), dict[str, int](), dict[str, int]()
    for name in archive.ordered(files):
        if not name.endswith(SUFFIX):
            continue
        before = tree.size
        for text in texts(files[name], named, name=name):
            tree.add(hashlib.sha256(b"\x00" + salt(row_key, tree.size) + text).digest())
        counts[name] = tree.size - before
    if not counts:
        raise Refusal("splits_invalid", "a holdout needs at least one Parquet file")
    if not tree.size:
        raise Refusal("splits_invalid", f"there are no rows in {', '.join(counts)}")
    _check_blobs({name: path for name, path in files.items() if not name.endswith(SUFFIX)}, named)
    return Commitment("sha256:" + tree.root().hex(), tree.size, counts)


def salt(row_key: bytes, index: int) -> bytes:
    """What salts the row with this global index."""
    return hmac.digest(row_key, index.to_bytes(8, "big"), "sha256")


def texts(path: Path, named: dict[str, int] | None = None, *, name: str = "") -> Iterator[bytes]:
    """The canonical JSON of each row of a Parquet file, in order.

    Args:
        path: the file.
        named: filled with digest -> size of every blob that a row names.
        name: what refusals call the file; else its own name.

    Raises:
        Refusal: splits_invalid, naming column and row where there is one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = name or path.name
    named = {} if named is None else named
    start = 0
    try:
        with pq.ParquetFile(path, memory_map=False, buffer_size=1 << 20, pre_buffer=False) as file:
            columns = file.schema_arrow.names
            if len(set(columns)) != len(columns):
                raise Refusal("splits_invalid", f"{name}: two columns have the same name")
            for batch in file.iter_batches(batch_size=_batch_rows(file.metadata), use_threads=False):
                yield from _rows(batch, _Context(name, start, named))
                start += batch.num_rows
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        raise Refusal("splits_invalid", f"{name} is not a readable Parquet file: {error}") from error


def _batch_rows(metadata: "pa.Table") -> int:
    """Rows a batch, so that one takes a few MiB whatever the rows' size."""
    size = max((metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)), default=0)
    rows = max((metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)), default=0)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))


# ---- values --------------------------------------------------------------------------------------------------------


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


def _rows(batch: "pa.RecordBatch", context: _Context) -> Iterator[bytes]:
    names = sorted(batch.schema.names, key=lambda name: name.encode("utf-16-be"))
    columns = [_texts(batch.column(name), context.below(name)) for name in names]
    for text in _objects(names, columns, rows=batch.num_rows):
        yield text.encode("utf-8")


def _objects(names: list[str], columns: list[list[str]], *, rows: int) -> Iterator[str]:
    # The constant parts of {"a":…,"b":…} are made once; a row fills the gaps.
    if not names:
        yield from ("{}" for _ in range(rows))
        return
    template = "{{" + ",".join(_escape(encode_basestring(name)) + ":{}" for name in names) + "}}"
    yield from map(template.format, *columns)


def _escape(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _texts(array: "pa.Array", context: _Context) -> list[str]:
    """The JSON texts of an array's values."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.dictionary_decode(), kind.value_type
    if pa.types.is_struct(kind):
        return _structs(array, context)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _lists(array, context)
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


def _plain(array: "pa.Array", write: Callable[..., str]) -> list[str]:
    values = array.to_pylist()
    if not array.null_count:
        return list(map(write, values))
    return ["null" if value is None else write(value) for value in values]


def _writer(kind: "pa.DataType", context: _Context) -> Callable[..., str] | None:
    import pyarrow as pa

    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return encode_basestring
    if types.is_boolean(kind):
        return {True: "true", False: "false"}.__getitem__
    if types.is_integer(kind):
        return lambda value: _whole(value, context)
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


def _whole(value: int, context: _Context) -> str:
    if not -_LARGEST_INTEGER <= value <= _LARGEST_INTEGER:
        raise context.refuse(f"{value} is beyond 2^53 - 1", hint="store it as a string")
    return str(value)


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


def _structs(array: "pa.StructArray", context: _Context) -> list[str]:
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    if len(set(names)) != len(names):
        raise context.refuse("a struct has two fields of the same name")
    order = sorted(range(len(names)), key=lambda i: names[i].encode("utf-16-be"))
    children = array.flatten()
    columns = [_texts(children[i], context.below(names[i])) for i in order]
    whole = list(_objects([names[i] for i in order], columns, rows=len(array)))
    if sorted(names) == ["sha256", "size"]:
        _name_blobs(array, context)
    return [text if valid else "null" for text, valid in zip(whole, array.is_valid().to_pylist(), strict=True)]


def _lists(array: "pa.ListArray", context: _Context) -> list[str]:
    import pyarrow.compute as pc

    items = iter(_texts(array.flatten(), context))  # without the items of null lists
    lengths = pc.list_value_length(array).to_pylist()
    return [
        "null" if length is None else "[" + ",".join(next(items) for _ in range(length)) + "]" for length in lengths
    ]


# ---- blobs ---------------------------------------------------------------------------------------------------------


def _name_blobs(array: "pa.StructArray", context: _Context) -> None:
    for value in array.to_pylist():
        if value is None:
            continue
        if not digests.is_digest(value["sha256"]) or type(value["size"]) is not int or value["size"] < 0:
            raise context.refuse(f"{value} names no blob", hint="{sha256: sha256:… of 64 hex digits, size: bytes}")
        if context.named.setdefault(value["sha256"], value["size"]) != value["size"]:
            raise context.refuse(f"{value['sha256']} is named with two sizes")


def _check_blobs(blobs: Mapping[str, Path], named: Mapping[str, int]) -> None:
    """Every file besides Parquet is named by a row, and every blob that a row names is there, with its digest and size."""
    expected = {BLOBS + digest.removeprefix("sha256:"): (digest, size) for digest, size in named.items()}
    for name in sorted(set(expected) | set(blobs)):
        if name not in blobs:
            raise Refusal("splits_invalid", f"a row names {expected[name][0]}, but {name} is missing")
        if name not in expected:
            raise Refusal("splits_invalid", f"{name} is neither a Parquet file nor a blob that a row names")
        with blobs[name].open("rb") as stream:
            found = digests.of_stream(stream)
        if found != expected[name]:
            raise Refusal(
                "splits_invalid", f"{name} is {found[0]} of {found[1]} bytes, its row says {expected[name][1]}"
            )


class _Root:
    """An RFC 6962 root that grows leaf by leaf and remembers one hash for each power of two."""

    def __init__(self) -> None:
        self.size = 0
        self._peaks: list[bytes] = []  # the complete subtrees from the left; sizes are the bits of `size`

    def add(self, leaf: bytes) -> None:
        rest = self.size
        while rest & 1:
            leaf = digests.node_hash(self._peaks.pop(), leaf)
            rest >>= 1
        self._peaks.append(leaf)
        self.size += 1

    def root(self) -> bytes:
        if not self._peaks:
            return digests.root_of_hashes([])
        result = self._peaks[-1]
        for peak in reversed(self._peaks[:-1]):
            result = digests.node_hash(peak, result)
        return result
