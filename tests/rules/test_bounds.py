"""Small Parquet files that stand for huge tables are given up before they take the memory; others are read as they are."""

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import footers
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from acclimate import row_texts
from acclimate_competitions import bounds, tables
from acclimate_competitions.errors import Refusal

MIB = 1 << 20
TABLE = pa.table(
    {
        "text": ["one", "two", None] * 400,
        "number": [1, None, 3] * 400,
        "lists": pa.array([[1.0, 2.0], None, []] * 400),
        "blob": pa.array([{"sha256": "q", "size": 1}] * 1200),
        "names": pa.array([["a", "b"], None, ["c"]] * 400),
        "coded": pa.array(["p", "q", "r"] * 400).dictionary_encode(),
    }
).replace_schema_metadata({"made": "here"})


@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_whatever_wrote_it_a_table_is_read_as_it_is(
    compression: str, version: str, dictionary: bool, tmp_path: Path
) -> None:
    options = {"compression": compression, "data_page_version": version, "use_dictionary": dictionary}
    pq.write_table(TABLE, tmp_path / "t.parquet", row_group_size=500, data_page_size=100, **options)
    found, expected = bounds.read(tmp_path / "t.parquet"), pq.ParquetFile(tmp_path / "t.parquet").read()
    assert found.equals(expected, check_metadata=True) and found.num_rows == 1200
    empty = TABLE.slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet", **options)
    assert bounds.read(tmp_path / "empty.parquet").num_rows == 0


def dictionary(path: Path) -> None:
    """Every row is the same long text, which stands in the file once."""
    pq.write_table(pa.table({"a": pa.array(["x" * 4096]).take(pa.array([0] * 20_000))}), path, compression="zstd")


def one_long_value(path: Path) -> None:
    pq.write_table(pa.table({"a": ["x" * (60 * MIB)]}), path, compression="zstd", use_dictionary=False)


def prefixes(path: Path) -> None:
    """Each text is the one before it and a letter more; the file holds the letters."""
    rows = pa.table({"a": ["x" * count for count in range(12_000)]})
    options = {"use_dictionary": False, "column_encoding": {"a": "DELTA_BYTE_ARRAY"}}
    pq.write_table(rows, path, compression="zstd", data_page_size=100 * MIB, write_statistics=False, **options)


def lists(path: Path) -> None:
    """One row, of a list with the same long text over and over."""
    pq.write_table(pa.table({"a": pa.array([["x" * 4096] * 20_000])}), path, compression="zstd")


def numbers(path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([[0.5] * 8_000_000])}), path, compression="zstd")


def nothing(path: Path) -> None:
    pq.write_table(pa.table({"a": pa.nulls(20_000_000, pa.string())}), path, compression="zstd")


BOMBS = [dictionary, one_long_value, prefixes, lists, numbers, nothing]


@pytest.mark.parametrize(
    ("bomb", "honest"), [*((bomb, True) for bomb in BOMBS), *((bomb, False) for bomb in BOMBS[:3])]
)
def test_a_small_file_of_a_huge_table_is_given_up(bomb: Callable[[Path], None], honest: bool, tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    bomb(path)
    assert path.stat().st_size < 200_000
    if not honest:
        lie(path)
    with pytest.raises(pa.ArrowInvalid, match=f"bytes of memory or more, at most {48 * MIB} are allowed"):
        bounds.read(path, most=48 * MIB)


def lie(path: Path) -> None:
    """The footer says that the columns take no byte."""
    raw = bytearray(path.read_bytes())
    footer = pq.read_metadata(path)
    size = footer.row_group(0).column(0).total_uncompressed_size
    written = varint(2 * size)
    start = len(raw) - 8 - footer.serialized_size
    assert written in raw[start:]
    raw[start:] = raw[start:].replace(written, b"\x80" * (len(written) - 1) + b"\x00")
    path.write_bytes(raw)
    assert pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size == 0


def about(footer: list[footers.Field]) -> list[footers.Field]:
    """What a footer says of the first column of the first row group."""
    group = footers.get(footer, 4)[2][1][0]
    return footers.get(footers.get(group, 1)[2][1][0], 3)[2]


def decoyed(path: Path) -> None:
    """The dictionary's place is a number of another type, which Arrow does not read, and points at pages of nothing."""
    body, footer = footers.load(path)
    start, size = footers.get(about(footer), 11), footers.get(about(footer), 7)[2]
    pages, empty = body[start[2] : start[2] + size], footers.page(0, 0, 1)
    count, rest = divmod(size, len(empty))
    decoys = empty * (count - 1) + footers.page(0, rest, 1) + bytes(rest)
    footers.get(about(footer), 9)[2] = len(body[:4]) + len(decoys)
    start[1:] = [footers.I32, 4]
    footers.save(path, body[:4] + decoys + pages, footer)


def wrapped(path: Path) -> None:
    """A second list of row groups, of no values, stands in a field that is number 4 to whoever has 16 bits for it."""
    body, footer = footers.load(path)
    groups = footers.get(footer, 4)
    empty = copy.deepcopy(groups)
    footers.get(about([empty]), 5)[2] = 0
    footer[:] = [empty, *(field for field in footer if field is not groups), [4 + 2**16, *groups[1:]]]
    footer.sort(key=lambda field: int(field[0]))
    footers.save(path, body, footer)


def negative(path: Path) -> None:
    """Pages behind those that Arrow reads have less than no values."""
    body, footer = footers.load(path)
    more = footers.page(0, 0, -(2**30)) * 100
    footers.get(about(footer), 7)[2] += len(more)
    footers.save(path, body + more, footer)


def short(path: Path) -> None:
    """The last page stands behind the column, where some readers look for the values that are missing."""
    body, footer = footers.load(path)
    footers.get(about(footer), 5)[2] += 1
    footers.save(path, body, footer)


@pytest.mark.parametrize("trick", [decoyed, wrapped, negative, short])
def test_what_arrow_would_read_otherwise_is_refused(trick: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "bomb.parquet"
    lists(path)
    trick(path)
    # Not read here: without the refusal it would take all memory that there is.
    with pq.ParquetFile(path) as file, pytest.raises(pa.ArrowInvalid):
        bounds.batch_rows(path, file, most=48 * MIB)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**40, 2**66])
def test_a_page_of_an_impossible_size_is_a_fault_of_the_file(size: int, tmp_path: Path) -> None:
    """Not a want of memory of whoever reads it."""
    path = tmp_path / "t.parquet"
    dictionary(path)
    body, footer = footers.load(path)
    header = footers.encoded([[1, footers.I32, 2], [2, footers.I32, 4], [3, footers.I32, size]], footers.STRUCT)
    footers.get(about(footer), 11)[2] = len(body)
    footers.get(about(footer), 9)[2] = len(body) + len(header)
    footers.get(about(footer), 7)[2] = len(header) + 4
    footers.save(path, body + header + bytes(4), footer)
    with pytest.raises(Refusal) as caught:
        tables.read(path)
    assert caught.value.code == "file_unreadable"


def varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def test_what_is_given_up_never_took_the_memory(tmp_path: Path) -> None:
    """By the limit that every file has: 3 million rows of 1 kB in some hundred kilobytes."""
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 3_000_000, pa.int32()), pa.array(["x" * 1024]))
    pq.write_table(pa.table({"a": rows}), tmp_path / "bomb.parquet", compression="zstd", store_schema=False)
    code = (
        "import sys, pathlib; from acclimate.verify import parquet; from acclimate.verify.report import Failed\n"
        "peak = lambda: int(pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])\n"
        "before = peak()\n"
        "try: parquet.read(pathlib.Path(sys.argv[1]), 'scores/ada.parquet')\n"
        "except Failed as failed: print(failed.where, failed.why)\n"
        "print((peak() - before) // 1024)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bomb.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    said, grew = done.stdout.splitlines()
    assert said.startswith("scores/ada.parquet not a Parquet table of its kind: its rows take ")
    assert int(grew) < 2 * bounds.LEAST // MIB


def test_no_holdout_is_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sealed and opened is read row by row; a dictionary's million repetitions of a long text are given up there, too."""
    monkeypatch.setattr(bounds, "LEAST", 8 * MIB)
    rows = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), pa.array(["x" * MIB]))
    pq.write_table(pa.table({"a": rows}), tmp_path / "bomb.parquet", compression="zstd", store_schema=False)
    with pytest.raises(Refusal, match="its rows take ") as caught:
        for _ in row_texts.texts(tmp_path / "bomb.parquet"):
            pass
    assert caught.value.code == "splits_invalid"


@pytest.mark.parametrize("place", ["a page's header", "where the pages are"])
def test_what_is_broken_is_unreadable_and_no_more(place: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(TABLE.select(["text"]), path)
    raw = bytearray(path.read_bytes())
    if place == "a page's header":
        raw[4:24] = b"\xff" * 20
    else:
        column = pq.read_metadata(path).row_group(0).column(0)
        start = len(raw) - 8 - pq.read_metadata(path).serialized_size
        written = varint(2 * column.total_compressed_size)
        raw[start:] = raw[start:].replace(written, b"\xff" * (len(written) - 1) + b"\x7f")
    path.write_bytes(raw)
    with pytest.raises(Refusal) as caught:
        tables.read(path)
    assert caught.value.code == "file_unreadable"


@pytest.mark.parametrize("long", [True, False])
def test_rows_are_decoded_by_the_longest_text_of_a_dictionary(long: bool, tmp_path: Path) -> None:
    """Not by the size of its page: many short texts are no reason to read a few rows at a time."""
    texts = [f"text number {i}" for i in range(30_000)] + (["x" * MIB] if long else [])
    pq.write_table(pa.table({"a": texts}), tmp_path / "t.parquet", dictionary_pagesize_limit=4 * MIB)
    with pq.ParquetFile(tmp_path / "t.parquet") as file:
        rows = bounds.batch_rows(tmp_path / "t.parquet", file, most=bounds.LEAST)
    assert rows == (256 if long else 30_000)


@pytest.mark.parametrize("bit", [0, *(pytest.param(bit, marks=pytest.mark.slow) for bit in range(1, 8))])
def test_a_flipped_bit_ends_no_process(bit: int, tmp_path: Path) -> None:
    """Arrow's own view of a footer that contradicts itself would: by an abort, which nothing catches."""
    path, few = tmp_path / "t.parquet", TABLE.select(["text", "number", "lists", "blob"]).slice(0, 12)
    pq.write_table(few, path, compression="zstd")
    whole, read = path.read_bytes(), 0
    for place in range(len(whole)):
        # All eight of them flip each bit once; any one flips bits of all places.
        changed = whole[place] ^ 1 << (bit + place) % 8
        path.write_bytes(bytes((*whole[:place], changed, *whole[place + 1 :])))
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            bounds.read(path).validate(full=True)
            read += 1
        with contextlib.suppress(Refusal):
            for _ in row_texts.texts(path):
                pass
    assert read < len(whole)


def test_a_footer_that_is_huge_is_not_parsed(tmp_path: Path) -> None:
    """Its size is told by the file's last bytes; what stands there may be anything."""
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1" + b"\x00" * (17 * MIB) + (17 * MIB).to_bytes(4, "little") + b"PAR1")
    said = r"its footer has 17825792 bytes, at most 16777216 are allowed"
    with pytest.raises(pa.ArrowInvalid, match=said):
        bounds.read(path)
    with pytest.raises(Refusal, match=said):
        tables.columns(path)
    with pytest.raises(Refusal, match=said):
        list(row_texts.texts(path))


@pytest.mark.parametrize("data", [b"", b"PAR1"])
def test_a_file_without_a_footer_is_no_table(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(data)
    with pytest.raises(Refusal, match="too short for a Parquet file"):
        tables.columns(path)
