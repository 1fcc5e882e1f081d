"""Anybody's tables: what is read as what, and what is refused."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import acclimate
from acclimate import chosen_rows, score_tables
from acclimate_competitions.errors import Refusal

PLAIN = "model,a,b\nx,1,4\ny,2,3\nz,3,2.5\n"


def written(folder, text, name="table.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def wide(source, **options):
    return score_tables.wide(chosen_rows.narrowed(source, {}, name="t"), **options)


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "\ufeff" + PLAIN,
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\r"),
        PLAIN.replace(",", ";"),
        PLAIN.replace(",", ";").replace("2.5", "2,5"),
        PLAIN.replace(",", "\t"),
        PLAIN.replace(",", "\t").replace("2.5", "2,5"),
        PLAIN.replace("2.5", '"2,5"'),
        "sep=;\n" + PLAIN.replace(",", ";").replace("2.5", "2,5"),
        "sep=,\r\n" + PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", ",\n"),
        PLAIN.replace("\n", ",,\n") + ",,,,\n",
        ",model,a,b\n0,x,1,4\n1,y,2,3\n2,z,3,2.5\n",
        "Unnamed: 0,name,a,b\n7,x,1,4\n2,y,2,3\n5,z,3,2.5\n",
        PLAIN + "\n\n",
        "\n" + PLAIN.rstrip("\n"),
        PLAIN.replace("2.5", " 25e-1 ").replace("x", '"x"'),
        PLAIN.replace("model", ""),
    ],
)
def test_the_same_table_in_other_clothes(tmp_path, text):
    table = wide(written(tmp_path, text))
    assert (table.entrants, table.tasks) == (("x", "y", "z"), ("a", "b"))
    assert table.scores.tolist() == [[1, 4], [2, 3], [3, 2.5]]


def test_separators_and_decimal_commas_are_said(tmp_path):
    table = wide(written(tmp_path, PLAIN.replace(",", ";").replace("2.5", "2,5")))
    assert table.notes == ("t: cells are separated by semicolons", "t: the comma is the decimal point")


def test_what_is_left_out_or_taken_for_something_is_said(tmp_path):
    for text, note in (
        (PLAIN.replace("\n", ",,\n"), "t: left out: 2 columns without a name in which nothing stands"),
        (",model,a\n0,x,1\n", "t: left out, as it only counts rows: the first column, which has no name"),
        (PLAIN.replace("2.5", '"0,5"'), "t: the comma is the decimal point"),
    ):
        assert note in wide(written(tmp_path, text)).notes


def test_numbers_that_may_be_grouped_in_thousands_are_no_decimal_fractions(tmp_path):
    with pytest.raises(Refusal, match="number") as refused:
        wide(written(tmp_path, 'model,a\nx,"1,234"\ny,987\n'))
    assert refused.value.problems == ("line 2, column 'a': '1,234'",)
    assert wide(written(tmp_path, "model;a\nx;1,234\ny;2\n")).scores.tolist() == [[1.234], [2]]


def test_numbers_of_entrants_without_a_name_are_no_index(tmp_path):
    assert wide(written(tmp_path, ",a,b\n0,1,4\n1,2,3\n")).entrants == ("0", "1")
    numbered = wide(written(tmp_path, ",model,a\n0,17,1\n1,18,2\n"))  # models whose names are numbers
    assert (numbered.entrants, numbered.tasks) == (("17", "18"), ("a",))


def test_a_line_that_names_the_separator_moves_no_line(tmp_path):
    with pytest.raises(Refusal) as refused:
        wide(written(tmp_path, "sep=;\nmodel;a\nx;high\n"))
    assert refused.value.problems == ("line 3, column 'a': 'high'",)


def test_the_index_of_a_frame_names_entrants_in_parquet_too(tmp_path):
    frame = pandas.DataFrame({"model": [17, 18, 19], "a": [1.0, 2, 3], "b": [4.0, 3, 2.5]})
    path = tmp_path / "t.parquet"
    steps = frame.set_index("model")  # which pandas writes as a range, and not as a column
    other = frame.assign(model=[17, 18, 20]).set_index("model")
    for made, names in (
        (steps, ("17", "18", "19")),
        (other, ("17", "18", "20")),
        (other.rename_axis(None), ("17", "18", "20")),
        (frame.assign(model=["x", "y", "z"]).set_index("model"), ("x", "y", "z")),
    ):
        made.to_parquet(path)  # pandas writes an index behind the columns
        for source in (path, pa.Table.from_pandas(made)):
            found = wide(source)
            assert (found.entrants, found.tasks) == (names, ("a", "b"))
    frame.iloc[[0, 2]].to_parquet(path)  # rows keep their numbers
    assert wide(path).entrants == ("17", "19")
    for told in (
        "no JSON",
        "[]",
        '{"index_columns": 3}',
        '{"index_columns": [{"name": "n", "start": 0, "stop": 3, "step": 0}]}',
    ):
        table = pa.Table.from_pandas(frame).replace_schema_metadata({"pandas": told})
        assert wide(table).entrants == ("17", "18", "19")


def test_cells_of_several_types_in_one_column_of_a_frame_are_what_they_are():
    frame = pandas.DataFrame({"model": ["x", 2, None], "a": [1, "0.5", 3.0], "b": ["high", 2, pandas.NA]})
    assert wide(frame.head(2), tasks=["a"]).scores.tolist() == [[1], [0.5]]
    for chosen, tasks, says in (
        (frame.head(2), ["a", "b"], "row 1, column 'b': 'high'"),
        (frame, ["a"], "row 3"),
    ):
        with pytest.raises(Refusal) as refused:
            wide(chosen, tasks=tasks)
        assert refused.value.problems == (says,)
    assert math.isnan(wide(frame.assign(model=["x", "y", "z"], b=[1, "2", pandas.NA])).scores[2, 1])


def test_numbers_before_the_entrants_names_are_not_taken_for_them(tmp_path):
    table = wide(written(tmp_path, "rank,a,Model,b\n1,1,x,4\n2,2,y,3\n3,3,z,2.5\n"), tasks=["a", "b"])
    assert (table.entrants, table.scores.tolist()) == (("x", "y", "z"), [[1, 4], [2, 3], [3, 2.5]])
    assert table.notes == ("t: 'Model' names the entrants, though 'rank', which holds numbers, comes first",)
    frame = pandas.DataFrame({"s": [0.5, 0.6], "se": [0.1, 0.1], "model": [7, 8]})
    found = acclimate.rank(frame, score="s", se="se")
    assert [row["entrant"] for row in found["ranking"]] == ["8", "7"]
    assert any("'model' names the entrants" in note for note in found["notes"])
    country = wide(written(tmp_path, "country,team,a\nx,1,1\ny,2,3\n"))  # names come first: nothing is guessed
    assert (country.entrants, country.tasks) == (("x", "y"), ("team", "a"))


def test_a_file_with_points_and_commas_is_refused(tmp_path):
    with pytest.raises(Refusal, match="number") as refused:
        wide(written(tmp_path, "model;a;b\nx;1,5;2.5\n"))
    assert refused.value.problems == ("line 2, column 'a': '1,5'",)


def test_a_parquet_file_that_is_cut_off_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "cut.parquet"
    path.write_bytes(b"PAR1" + bytes(50))
    with pytest.raises(Refusal) as caught:
        score_tables.read(path)
    assert caught.value.code == "file_unreadable"
    assert "is it whole" in caught.value.hint


def test_parquet_arrow_and_pandas_are_the_same_table(tmp_path):
    table = pa.table({"model": ["x", "y", "z"], "a": [1, 2, 3], "b": [4, 3, 2.5]})
    pq.write_table(table, tmp_path / "table.bin")  # what it is decides, not what it is called
    frame = table.to_pandas()
    for source in (tmp_path / "table.bin", str(tmp_path / "table.bin"), table, frame, frame.set_index("model")):
        found = wide(source)
        assert (found.entrants, found.scores.tolist()) == (("x", "y", "z"), [[1, 4], [2, 3], [3, 2.5]])


@pytest.mark.parametrize("cell", ["", "NA", "n/a", "NaN", "null", "None", "-", " "])
def test_what_stands_for_a_missing_score(tmp_path, cell):
    assert math.isnan(wide(written(tmp_path, PLAIN.replace("2.5", cell))).scores[2, 1])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("\n\r\n", "empty"),
        ("model\nx\n", "one column"),
        ("model,a,b\nx,1\n", "line 2: 2 cells"),
        ("model,a,b\nx,1,2,3\n", "line 2: 4 cells"),
        ("model,a,a\nx,1,2\n", "more than one column 'a'"),
        ("model,a,\nx,1,2\n", "without a name"),
        ("model,a\nx,1\nx,2\n", "'x': line 2, line 3"),
        ("model,a\nx,1\n ,2\n", "line 3"),
        ("model,a\nx,high\ny,1\n", "line 2, column 'a': 'high'"),
        ("model,a\nx,85%\n", "'85%'"),
        ("model,a\nx,1_000\n", "'1_000'"),
        ("model,a\nx,inf\n", "'inf'"),
        ("model,a\nx,1e999\n", "'1e999'"),
        ("model,a\nx,1e101\n", "'1e101'"),
        ("model,a\nx,-1e-101\n", "'-1e-101'"),
        ("model,a\nx,١\n", "'١'"),
        ("model,protocol,a\nx,direct,1\ny,prepared,1\n", "mixes 2 protocols: 'direct', 'prepared'"),
        ('model,a\n"x,1\n', "line 2"),
        (b"model,a\n\xff\xfex,1\n", "no text in UTF-8: line 2"),
        ("model,a\nx,1\n".encode("utf-16"), "no text in UTF-8"),
        (b"PAR1nonsense", "t: "),
    ],
)
def test_what_is_no_table_is_refused_with_its_place(tmp_path, text, says):
    with pytest.raises(Refusal) as refused:
        wide(written(tmp_path, text))
    assert refused.value.code in ("scores_invalid", "file_unreadable")
    assert says in "\n".join([refused.value.sentence, *refused.value.problems])


def test_all_wrong_cells_are_told_and_many_are_counted(tmp_path):
    rows = "".join(f"m{number},bad\n" for number in range(30))
    with pytest.raises(Refusal, match="30 cells") as refused:
        wide(written(tmp_path, "model,a\n" + rows))
    assert len(refused.value.problems) == score_tables.SHOWN + 1
    assert refused.value.problems[-1] == "and 10 more"


@pytest.mark.parametrize("name", ["nowhere.csv", "."])
def test_a_file_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(Refusal) as refused:
        score_tables.read(tmp_path / name)
    assert refused.value.code == "file_unreadable"


def test_a_long_table_of_scores_is_the_same_table(tmp_path):
    rows = "model,task,score\nz,b,2.5\nx,a,1\nx,b,4\ny,a,2\ny,b,3\nz,a,3\n"
    table = wide(written(tmp_path, rows), tasks=["a", "b"])
    assert dict(zip(table.entrants, table.scores.tolist(), strict=True)) == {"x": [1, 4], "y": [2, 3], "z": [3, 2.5]}
    assert table.notes == ("t is a long table: 3 entrants in 2 tasks",)
    assert math.isnan(wide(written(tmp_path, rows.replace("z,a,3\n", "")), tasks=["a"]).scores[0, 0])
    for wrong, says in (
        (rows + "x,a,1\n", "'x' in 'a': line 3, line 8"),
        (rows + "x,c,bad\n", "line 8, column 'score': 'bad'"),
        (
            rows.replace("score", "score,protocol").replace("\n", ",p\n").replace("score,protocol,p", "score,protocol")
            + "q,a,1,d\n",
            "mixes 2 protocols",
        ),
    ):
        with pytest.raises(Refusal) as refused:
            wide(written(tmp_path, wrong))
        assert says in "\n".join([refused.value.sentence, *refused.value.problems])


def test_columns_that_are_no_scores_are_left_out_by_naming_the_tasks(tmp_path):
    path = written(tmp_path, "model,licence,a\nx,MIT,1\ny,none,2\n")
    with pytest.raises(Refusal, match="is none"):
        wide(path)
    assert wide(path, tasks=["a"]).scores.tolist() == [[1], [2]]
    with pytest.raises(Refusal, match="no column 'c'"):
        wide(path, tasks=["c"])
    for tasks, says in ((["a", "a"], "twice"), (["model"], "names the entrants")):
        with pytest.raises(Refusal, match=says):
            wide(path, tasks=tasks)


def test_the_functions_come_with_the_package_and_name_what_they_do_not_know():
    with pytest.raises(TypeError, match="unknown option 'tasl'"):
        acclimate.stability({"t": pandas.DataFrame({"m": ["x"], "a": [1.0]})}, tasl=["a"])
    with pytest.raises(AttributeError, match="nothing"):
        acclimate.nothing  # noqa: B018
    with pytest.raises(TypeError, match="path, a pyarrow Table"):
        acclimate.rank(np.eye(2), score="a", se="b")


CELLS = st.one_of(
    st.text("ab,;\t\"'\r\n \ufeff\x00é-.0123456789eEnNaA", max_size=6),
    st.sampled_from(
        ["model", "score", "task", "protocol", "1", "0", "0.5", "NaN", "", "set", "example", "cluster", "seed"]
    ),
)


@settings(max_examples=150)
@given(
    st.lists(st.lists(CELLS, max_size=5), max_size=6), st.sampled_from(",;\t"), st.sampled_from(["\n", "\r\n", "\r"])
)
def test_whatever_a_file_holds_the_answer_is_a_table_or_a_refusal(rows, separator, end):
    text = end.join(separator.join(row) for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), text.encode("utf-8", "surrogatepass"))
        for call in (
            lambda: acclimate.stability({"t": path}, draws=5),
            lambda: acclimate.rank(path, method="casp", draws=50),
            lambda: acclimate.rank(path, score="score", se="1", draws=50),
            lambda: acclimate.rank(items=path, draws=50),
            lambda: acclimate.compare(items=path, draws=50),
            lambda: acclimate.compare(scores=path, draws=50),
            lambda: acclimate.stability(items=path, draws=5),
        ):
            try:
                json.dumps(call(), allow_nan=False)
            except Refusal as refusal:
                assert refusal.code in ("scores_invalid", "file_unreadable")
                assert refusal.sentence


@pytest.mark.parametrize("text", ["[" * 200_000, "model,a\nx," + "1" * 200_000 + "\n"])
def test_a_cell_that_is_no_cell_is_refused_in_words(text: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="line .*field larger") as caught:
        score_tables.read(written(tmp_path, text))
    assert caught.value.code == "scores_invalid"
