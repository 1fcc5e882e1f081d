"""Row commitments: each value has one text, each row one leaf, whatever wrote the Parquet file."""

import hashlib
import hmac
import itertools
import secrets
from datetime import UTC, date, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import rows, sealing
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal


def table(name, count, *, size=0):
    return pa.table(
        {
            "example": [f"{name}-{i}" for i in range(count)],
            "input": [f"question {i} " + secrets.token_hex(size) for i in range(count)],
            "target": [str(i % 10) for i in range(count)],
        }
    )


def holdout(folder, *, size=0, count=20):
    files = {}
    for name in ("parity", "digit"):
        files[f"{name}.parquet"] = folder / f"{name}.source.parquet"
        pq.write_table(table(name, count, size=size), files[f"{name}.parquet"], compression="none")
    return files


def written(tmp_path, columns, **options):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return [text.decode() for text in rows.texts(path)]


def test_each_kind_of_value_has_its_text(tmp_path):
    moment = datetime(2027, 3, 1, 12, 30, 0, 250_000, tzinfo=UTC)
    columns = {
        "z": pa.array(['a\n"\\\u001f€😀{}', None]),
        "bool": pa.array([True, None]),
        "int": pa.array([2**53 - 1, -(2**53) + 1]),
        "unsigned": pa.array([0, 255], pa.uint8()),
        "double": pa.array([0.1, 1e21]),
        "single": pa.array([0.1, None], pa.float32()),
        "bytes": pa.array([b"\x00\xff", b""]),
        "time": pa.array([moment, moment.replace(microsecond=0)], pa.timestamp("us", "UTC")),
        "zoned": pa.array([moment, None], pa.timestamp("ns", "Asia/Kathmandu")),
        "day": pa.array([date(2027, 3, 1), None]),
        "list": pa.array([[1, None], None], pa.list_(pa.int32())),
        "empty": pa.array([[], [[["x"], []]]], pa.list_(pa.list_(pa.list_(pa.string())))),
        "struct": pa.array([{"b": 1, "a": [0.5]}, None]),
        "word": pa.array(["x", "y"]).dictionary_encode(),
        "nothing": pa.nulls(2),
    }
    first, second = written(tmp_path, columns)
    assert first == (
        '{"bool":true,"bytes":"AP8=","day":"2027-03-01","double":"0.1","empty":[],"int":9007199254740991,"list":[1,null],'
        '"nothing":null,"single":"0.10000000149011612","struct":{"a":["0.5"],"b":1},"time":"2027-03-01T12:30:00.25Z","unsigned":0,'
        '"word":"x","z":"a\\n\\"\\\\\\u001f€😀{}","zoned":"2027-03-01T12:30:00.25Z"}'
    )
    assert second == (
        '{"bool":null,"bytes":"","day":null,"double":"1e+21","empty":[[["x"],[]]],"int":-9007199254740991,"list":null,'
        '"nothing":null,"single":null,"struct":null,"time":"2027-03-01T12:30:00Z","unsigned":255,"word":"y","z":null,"zoned":null}'
    )
    assert all(digests.canonical(digests.parse_canonical(text.encode())) == text.encode() for text in (first, second))


strings = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


@settings(deadline=None, max_examples=60)
@given(st.lists(strings, unique=True, min_size=1, max_size=4), st.data())
def test_row_texts_are_the_canonical_json_of_their_values(tmp_path_factory, names, data):
    values = st.none() | strings
    lists = st.none() | st.lists(st.integers(-(2**53) + 1, 2**53 - 1) | st.none(), max_size=3)
    count = data.draw(st.integers(1, 5))
    columns = {}
    for i, name in enumerate(names):
        kind = pa.string() if i % 2 == 0 else pa.list_(pa.int64())
        columns[name] = pa.array([data.draw(values if i % 2 == 0 else lists) for _ in range(count)], kind)
    expected = [digests.canonical({name: columns[name][i].as_py() for name in names}).decode() for i in range(count)]
    assert written(tmp_path_factory.mktemp("rows"), columns) == expected


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (pa.array([float("nan")]), "a value is nan"),
        (pa.array([float("inf")]), "a value is inf"),
        (pa.array([2**53]), "beyond 2"),
        (pa.array([2**64 - 1], pa.uint64()), "beyond 2"),
        (pa.array([datetime(2027, 3, 1)], pa.timestamp("us")), "without a time zone"),  # noqa: DTZ001
        (pa.array([1], pa.duration("s")), "values of type duration"),
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "values of type map"),
        (pa.array([{"sha256": "x", "size": 1}]), "names no blob"),
    ],
)
def test_a_value_that_json_can_not_say_is_refused_with_its_column(tmp_path, column, why):
    with pytest.raises(Refusal, match=f"rows.parquet, column 'weight': .*{why}") as caught:
        written(tmp_path, {"weight": column})
    assert caught.value.code == "splits_invalid"


def test_the_row_root_is_that_of_the_salted_rows_over_all_files(tmp_path):
    files, row_key = holdout(tmp_path), secrets.token_bytes(32)
    leaves = []
    for index, text in enumerate(
        itertools.chain(rows.texts(files["digit.parquet"]), rows.texts(files["parity.parquet"]))
    ):
        leaves.append(hmac.new(row_key, index.to_bytes(8, "big"), hashlib.sha256).digest() + text)
    committed = rows.commit(files, row_key)
    assert committed.root == digests.root_of_leaves(leaves) == sealing.row_root(files, row_key)
    assert (committed.count, committed.counts) == (40, {"digit.parquet": 20, "parity.parquet": 20})
    assert sealing.row_root(files, bytes(32)) != committed.root


def test_the_row_root_is_of_values_and_not_of_parquet_bytes(tmp_path):
    content, roots = table("x", 3000), set()
    for i, options in enumerate(
        [
            {},
            {"compression": "zstd"},
            {"row_group_size": 7},
            {"use_dictionary": False, "version": "1.0"},
            {"data_page_size": 100},
        ]
    ):
        pq.write_table(content, tmp_path / f"{i}.parquet", **options)
        roots.add(sealing.row_root({"x.parquet": tmp_path / f"{i}.parquet"}, bytes(32)))
    pq.write_table(content.select(["target", "example", "input"]), tmp_path / "order.parquet")
    roots.add(sealing.row_root({"x.parquet": tmp_path / "order.parquet"}, bytes(32)))
    assert len(roots) == 1
    for other in (
        content.slice(1),
        content.take([1, 0, *range(2, 3000)]),
        content.rename_columns(["example", "input", "label"]),
    ):
        pq.write_table(other, tmp_path / "other.parquet")
        assert sealing.row_root({"x.parquet": tmp_path / "other.parquet"}, bytes(32)) not in roots
