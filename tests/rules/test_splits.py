import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from acclimate_competitions import bounds, definition, splits, tables
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal

TWO_TASKS = (definition.shipped("digits") / "competition.toml").read_text("utf-8")
Columns = dict[str, list[str | None]]


@pytest.fixture
def competition() -> Competition:
    start, end = TWO_TASKS.index('[[tasks]]\nname = "at-least-five"'), TWO_TASKS.index("[preparation]")
    return definition.parse((TWO_TASKS[:start] + TWO_TASKS[end:]).encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for task, answers in (("digit", ["d1", "d2"]), ("parity", ["odd", "even"])):
        for number, split in enumerate(splits.REQUIRED):
            images = [4 * number + i for i in range(4)]
            write(
                tmp_path / "splits" / task / f"{split}.parquet",
                {
                    "example": [f"{task}-{image}" for image in images],
                    "input": [f"<{task}> p{image}" for image in images],
                    "target": answers * 2,
                    "cluster": [f"image-{image}" for image in images],
                },
            )
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    return tmp_path


def write(path: Path, columns: Columns, schema: pa.Schema | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tables.write(pa.table(columns, schema=schema), path)


def change(folder: Path, name: str, edit: Callable[[Columns], object]) -> None:
    path = folder / "splits" / name
    columns = tables.read(path).to_pydict()
    edit(columns)
    write(path, columns)


def problems(folder: Path, competition: Competition) -> tuple[str, ...]:
    with pytest.raises(Refusal) as caught:
        splits.check(folder, competition)
    assert caught.value.code == "splits_invalid"
    assert caught.value.hint
    return caught.value.problems


def test_good_splits_are_described(folder: Path, competition: Competition):
    found = splits.check(folder, competition)
    assert found["tasks"]["parity"]["holdout"]["rows"] == 4
    assert list(found["tasks"]["digit"]) == list(splits.REQUIRED)
    assert found["tokenizer"].startswith("sha256:")


def test_the_holdout_is_never_public(folder: Path):
    write(folder / "splits/digit/practice.parquet", {"example": ["x"]})
    public, sealed = splits.public_files(folder), splits.holdout_files(folder)
    assert sorted(public) == [
        "splits/digit/practice.parquet", "splits/digit/preparation.parquet", "splits/digit/validation.parquet",
        "splits/parity/preparation.parquet", "splits/parity/validation.parquet", "tokenizer.json",
    ]  # fmt: skip
    assert sorted(sealed) == ["digit.parquet", "parity.parquet"]
    assert not set(public.values()) & set(sealed.values())
    assert all(path.is_file() for path in [*public.values(), *sealed.values()])


def drop(name: str) -> Callable[[Columns], object]:
    return lambda columns: columns.pop(name)


def put(column: str, row: int, value: str | None) -> Callable[[Columns], object]:
    return lambda columns: columns[column].__setitem__(row, value)


CASES = [
    ("digit/holdout.parquet", drop("target"), "digit/holdout.parquet: column 'target' is missing"),
    ("digit/holdout.parquet", drop("cluster"), "column 'cluster' is missing (ranking.cluster names it)"),
    ("digit/holdout.parquet", lambda c: c.update(hint=["a"] * 4), "column 'hint' is used by neither"),
    ("digit/holdout.parquet", lambda c: c.update(target=[1, 2, 3, 4]), "column 'target' is int64, it must be string"),
    ("digit/holdout.parquet", put("input", 1, None), "column 'input' has 1 nulls"),
    ("digit/holdout.parquet", lambda c: [c[name].clear() for name in c], "digit/holdout.parquet: the holdout split is empty"),
    ("digit/validation.parquet", lambda c: [c[name].clear() for name in c], "digit/validation.parquet: the validation split is empty"),
    ("digit/holdout.parquet", put("target", 2, "d11"), "1 targets that are not among the choices, first 'd11' of 'digit-10'"),
    ("digit/holdout.parquet", put("target", 2, "odd"), "1 targets that are not among the choices, first 'odd'"),
    ("digit/holdout.parquet", put("example", 0, "digit-1"), "1 example ids that stand in digit/preparation too, first 'digit-1'"),
    ("digit/holdout.parquet", put("example", 0, "digit-9"), "1 example ids that stand twice in this file, first 'digit-9'"),
    ("parity/holdout.parquet", put("example", 0, "digit-8"), "1 example ids that stand in digit/holdout too, first 'digit-8'"),
    ("digit/holdout.parquet", put("example", 0, " "), "1 rows with a blank example id"),
    ("digit/holdout.parquet", put("input", 0, "<digit> p5"), "1 inputs that stand in digit/validation too, first that of 'digit-8'"),
    ("digit/holdout.parquet", put("input", 0, "  <DIGIT>\tP5 "), "1 inputs that stand in digit/validation too"),
    ("parity/holdout.parquet", put("cluster", 0, "image-0"), "1 clusters that stand in a preparation split too, first 'image-0'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "says"), CASES, ids=range(len(CASES)))
def test_bad_splits_are_named_all_at_once(
    folder: Path, competition: Competition, name: str, edit: Callable[[Columns], object], says: str
):
    change(folder, name, edit)
    (folder / "splits/parity/validation.parquet").unlink()
    (folder / "splits/digit/preparation.parquet").replace(folder / "kept")
    (folder / "splits/digit/preparation.parquet").write_bytes((folder / "kept").read_bytes())
    (folder / "tokenizer.json").write_text("not JSON", "utf-8")
    found = problems(folder, competition)
    assert any(says in problem for problem in found), found
    assert "parity/validation.parquet: the file is missing" in found
    assert any(problem.startswith("tokenizer.json: ") for problem in found)
    (folder / "tokenizer.json").write_text("[" * 100_000, "utf-8")
    assert any(problem.startswith("tokenizer.json: ") for problem in problems(folder, competition))


def test_unicode_forms_of_one_input_are_one(folder: Path, competition: Competition):
    change(folder, "digit/preparation.parquet", put("input", 0, "caf\u00e9"))
    change(folder, "digit/holdout.parquet", put("input", 0, "CAFE\u0301"))
    assert any("inputs that stand in digit/preparation too" in problem for problem in problems(folder, competition))


def test_the_same_input_twice_within_a_split_is_allowed_in_one_task_or_two(folder: Path, competition: Competition):
    change(folder, "digit/preparation.parquet", put("input", 0, "<digit> p1"))
    change(folder, "parity/preparation.parquet", put("input", 0, "<digit> p1"))
    change(folder, "parity/holdout.parquet", put("input", 0, "<digit> p9"))
    assert splits.check(folder, competition)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "parity/holdout.parquet",
            "<Digit> p1",
            "parity/holdout.parquet: 1 inputs that stand in digit/preparation too",
        ),
        (
            "parity/validation.parquet",
            "<digit> p9",
            "parity/validation.parquet: 1 inputs that stand in digit/holdout too",
        ),
    ],
)
def test_a_holdouts_input_is_not_public_under_another_task(
    folder: Path, competition: Competition, name: str, text: str, says: str
):
    change(folder, name, put("input", 0, text))
    (found,) = problems(folder, competition)
    assert found.startswith(says)


def test_a_torn_file_and_a_task_too_many_are_named(folder: Path, competition: Competition):
    path = folder / "splits/digit/holdout.parquet"
    path.write_bytes(path.read_bytes()[:-7])
    (folder / "splits/colour").mkdir()
    found = problems(folder, competition)
    assert any("digit/holdout.parquet: not readable as Parquet" in problem for problem in found)
    assert "splits/colour: the definition has no such task" in found


def test_columns_that_the_prompt_names_are_allowed_and_count_as_input(folder: Path):
    prompt = '''prompt = "{{ input }} {% if hint %}{{ hint | upper }} 'nothing'{% endif %}"'''
    competition = definition.parse(TWO_TASKS.replace('prompt = "{{ input }}"', prompt, 1).encode())
    assert splits.columns_of(competition.tasks[0]) >= {"input", "hint"}
    for split in splits.REQUIRED:
        change(folder, f"digit/{split}.parquet", lambda columns: columns.update(hint=["a", "b", "c", "d"]))
    change(folder, "digit/preparation.parquet", put("input", 0, "<digit> p9"))
    found = problems(folder, competition)
    assert not any(problem.startswith("digit/") for problem in found)
    change(folder, "digit/preparation.parquet", put("hint", 0, "b"))
    assert any("inputs that stand in digit/preparation too" in problem for problem in problems(folder, competition))


def test_a_folder_without_splits_is_refused(tmp_path: Path):
    for read in (splits.public_files, splits.holdout_files):
        with pytest.raises(Refusal, match="has no splits") as caught:
            read(tmp_path)
        assert caught.value.code == "splits_invalid"
    (tmp_path / "splits/digit").mkdir(parents=True)
    with pytest.raises(Refusal, match=r"splits/digit/holdout\.parquet is missing"):
        splits.holdout_files(tmp_path)


def test_a_description_is_json(folder: Path, competition: Competition):
    assert json.loads(json.dumps(splits.check(folder, competition)))


def test_a_folder_that_was_not_built_is_told_from_one_with_faults(tmp_path: Path, competition: Competition):
    (tmp_path / "build.py").write_text("")
    with pytest.raises(Refusal, match="has no splits: it is not built") as refused:
        splits.check(tmp_path, competition)
    assert f"acclimate competition build {tmp_path} --out DIR" in refused.value.hint and not refused.value.problems


def test_a_folder_with_nothing_to_build_is_told_what_to_write(tmp_path: Path, competition: Competition):
    with pytest.raises(Refusal, match="has no splits: it is not built") as refused:
        splits.check(tmp_path, competition, tasks=["digit"])
    assert refused.value.hint == (
        "write splits/digit/preparation.parquet, validation.parquet and holdout.parquet with the columns example, input, target, cluster, "
        "each column of Arrow's type string"
    )
    with pytest.raises(Refusal) as refused:
        splits.check(tmp_path, competition, tasks=["digit"], only=("validation",))
    assert "write splits/digit/validation.parquet with the columns" in (refused.value.hint or "")


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_texts_of_another_type_are_refused_with_what_mends_them(folder: Path, competition: Competition, kind: Any):
    path = folder / "splits/digit/validation.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(0, "example", table.column("example").cast(kind)), path)
    (problem,) = problems(folder, competition)
    assert (
        f"column 'example' is {kind}, it must be string" in problem
        and "pyarrow.schema([(name, pyarrow.string())" in problem
    )
    frame = pq.read_table(path).to_pandas()
    # The line that is named, on a frame as pandas makes it.
    frame.to_parquet(path, schema=pa.schema([(name, pa.string()) for name in frame.columns]), index=False)
    assert splits.check(folder, competition)["tasks"]["digit"]["validation"]["rows"] == table.num_rows


@pytest.mark.parametrize("name", ["splits/parity/holdout.parquet", "tokenizer.json"])
def test_a_pipe_in_the_place_of_a_file_is_told_and_waited_for_by_nobody(
    name: str, folder: Path, competition: Competition
):
    """In a process of its own, which a test can end."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    (folder / "competition.toml").write_bytes(competition.raw)
    code = (
        "import sys; from pathlib import Path; from acclimate_competitions import definition, splits\n"
        "folder = Path(sys.argv[1])\n"
        "try: splits.check(folder, definition.load(folder))\n"
        "except Exception as error: print(error.problems)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=120)
    assert Path(name).name in done.stdout and "no regular file" in done.stdout, done


def schema_of(count: int) -> pa.Schema:
    return pa.schema(
        [(name, pa.string()) for name in ("example", "input", "target")]
        + [(f"c{i}", pa.string()) for i in range(count)]
    )


def test_a_split_with_very_many_columns_is_one_problem(folder: Path, competition: Competition) -> None:
    """They are looked at one by one, by a server, too."""
    found = splits.column_problems(schema_of(20_000), "digit/practice.parquet", competition.tasks[0], competition)
    assert found == ["digit/practice.parquet: it has 20003 columns, at most 1000 are allowed"]
    write(folder / "splits/digit/holdout.parquet", {f"c{i}": ["x"] for i in range(1001)})
    assert problems(folder, competition) == ("digit/holdout.parquet: it has 1001 columns, at most 1000 are allowed",)


def test_a_prompt_is_read_once_for_all_columns(monkeypatch: pytest.MonkeyPatch, competition: Competition) -> None:
    """Searching a long one for names takes milliseconds, and a file may have a thousand columns."""
    calls, honest = [], splits.columns_of
    monkeypatch.setattr(splits, "columns_of", lambda task: calls.append(task) or honest(task))
    found = splits.column_problems(schema_of(500), "digit/practice.parquet", competition.tasks[0], competition)
    assert len(found) == 501 and "'cluster' is missing" in found[0] and len(calls) == 1


def test_a_columns_long_name_is_cut_in_a_problem(competition: Competition) -> None:
    schema = pa.schema([*schema_of(0), ("cluster", pa.string()), ("x" * 100_000, pa.string())])
    (found,) = splits.column_problems(schema, "digit/practice.parquet", competition.tasks[0], competition)
    assert len(found) < 400 and "xxx…' is used by neither" in found


def test_a_split_whose_predictions_nobody_could_read_is_refused(folder: Path, competition: Competition) -> None:
    """200,000 rows of 200 labels; of the preparation, which is not asked, there may be more."""
    task = competition.task("digit")
    wide = dataclasses.replace(task, choices=(*task.choices, *(f"label {number}" for number in range(190))))
    competition = dataclasses.replace(
        competition, tasks=tuple(wide if each is task else each for each in competition.tasks)
    )
    splits.check(folder, competition)
    many = {name: [f"{name} {row}" for row in range(200_000)] for name in ("example", "input", "cluster")}
    write(folder / "splits/digit/holdout.parquet", {**many, "target": ["d1"] * 200_000})
    (said,) = problems(folder, competition)
    assert said.startswith(f"digit/holdout.parquet: 200000 rows of {len(wide.choices)} answers each")
    assert said.endswith("at most 33554432 are read: take fewer rows, or several tasks")


def test_as_many_predictions_as_are_allowed_are_read_however_they_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sixty-fourth of the bounds: numbers that are first all different, then all the same, which stand in plain pages of next to no bytes."""
    monkeypatch.setattr(bounds, "LEAST", bounds.LEAST // 64)
    most = bounds.MOST_NUMBERS // 64
    for rows, fits in ((most // 108, True), (2 * most // 100, False)):
        numbers = np.full(rows * 100, -1.5)
        numbers[:150_000] = np.arange(150_000)
        ids = [f"e{row}" for row in range(rows)]
        assert (bounds.predicted(rows, 100, sum(map(len, ids))) <= most) == fits
        columns = {
            "entrant": ["fox"] * rows,
            "protocol": ["direct"] * rows,
            "task": ["t"] * rows,
            "seed": [None] * rows,
        }
        columns |= {"example": ids, "loglikelihoods": numbers.reshape(rows, 100).tolist(), "text": [None] * rows}
        path = tmp_path / f"{rows}.parquet"
        tables.write(pa.table(columns, schema=tables.PREDICTIONS), path)
        assert path.stat().st_size * 16 < bounds.LEAST or not fits
        if fits:
            assert tables.read(path, tables.PREDICTIONS).num_rows == rows
        else:
            with pytest.raises((Refusal, pa.ArrowInvalid)):
                tables.read(path, tables.PREDICTIONS)
