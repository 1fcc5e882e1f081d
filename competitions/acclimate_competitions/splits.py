"""The split files of a competition's folder: what they must look like, which are public, which are sealed.

    competition.toml  tokenizer.json (optional)  bases/ (where adapters may be submitted: bases.py)
    splits/<task>/preparation.parquet  validation.parquet  holdout.parquet  [practice.parquet]
    blobs/<64 hex digits>  files that rows of a holdout name: images, structures (optional)

Columns are strings: example, input, target (but of whole texts, which have none), and, where the definition or the prompt names them, cluster and others. A holdout may have
further columns that name a file each, of type struct {sha256: string, size: int64}; these files are sealed with it. Nothing that an
entrant may see stands in a holdout, of whichever task: no example, no cluster, and no input that differs only in case, blanks or
Unicode form. Tasks may share inputs within one split.
"""

import base64
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from acclimate_competitions import answers, bases, bounds, digests, reading
from acclimate_competitions.definition import Competition, Task
from acclimate_competitions.errors import Refusal
from acclimate_competitions.tables import SPLIT_COLUMNS

REQUIRED = ("preparation", "validation", "holdout")
PUBLIC = ("preparation", "validation", "practice")
ALL = (*REQUIRED, "practice")
BLOBS = "blobs"
MOST_COLUMNS = 1000
"""Columns that a split may have, which are looked at one by one: many more than a prompt names, or a row names files."""

_WHY = {
    "example": " (a name that no other row has)",
    "input": " (every row has one, whether the prompt names it or not: a text that no other split has)",
    "target": " (the right answer)",
}
"""What a column that each split needs is for."""
_SHOWN = 200
"""Characters of a name or type that a problem shows."""
_EXPRESSION = re.compile(r"{[{%](.*?)[%}]}", re.DOTALL)
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_IDENTIFIER = re.compile(r"(?<![.\w])[A-Za-z_]\w*")


@dataclass
class _Seen:
    """Where each example, cluster and normalized input stood first, as "task/split"."""

    problems: list[str] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)
    clusters: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    blobs: dict[tuple[str, int], str] = field(default_factory=dict)
    """(digest, size) that a row names -> what names it first."""


def check(
    folder: Path, competition: Competition, *, only: Sequence[str] = ALL, tasks: Sequence[str] | None = None
) -> dict[str, Any]:
    """What a folder holds: {"tasks": {task: {split: {"rows", "digest"}}}, "tokenizer": digest or None}.

    Args:
        folder: of a built competition.
        competition: its definition.
        only: the splits to look at, each of which must be there; of all of them, `practice` need not.
        tasks: the tasks to look at; None for all.

    Raises:
        Refusal: splits_invalid, with all problems of all files in `problems`.
    """
    if not (folder / "splits").is_dir():
        raise Refusal(
            "splits_invalid",
            f"{folder} has no splits: it is not built",
            hint=unbuilt(folder, competition, tasks=tasks, only=only),
        )
    seen = _Seen()
    held: dict[str, dict[str, dict[str, Any]]] = {}
    for task in competition.tasks:
        if tasks is not None and task.name not in tasks:
            continue
        held[task.name] = {}
        for split, path in _files(folder, task.name, only):
            table = _read(path, f"{task.name}/{path.name}", split, seen)
            if table is None:
                continue
            held[task.name][split] = {"rows": table.num_rows, "digest": digests.of_file(path)}
            if split == "holdout":
                table = _note_blobs(table, f"{task.name}/{path.name}", seen)
            fine = _check_columns(table, f"{task.name}/{path.name}", task, competition, seen)
            if fine and not _asks_too_much(table, split, task, seen):
                _check_rows(table, split, task, competition.ranking.cluster, seen)
    known = {task.name for task in competition.tasks}
    for found in sorted((folder / "splits").glob("*")):
        if found.name not in known:
            seen.problems.append(f"splits/{found.name}: the definition has no such task")
    if "holdout" in only:
        _check_blobs(folder / BLOBS, seen)
    tokenizer = _check_tokenizer(folder / "tokenizer.json", seen)
    there = {name: digests.of_file(path) for name, path in bases.in_folder(folder).items()}
    seen.problems += bases.problems(there, competition.submission.bases)
    if seen.problems:
        count = "1 problem" if len(seen.problems) == 1 else f"{len(seen.problems)} problems"
        raise Refusal(
            "splits_invalid",
            f"the split files of {competition.slug!r} have {count}",
            hint="mend these files, or the build.py that makes them, and write them again",
            problems=seen.problems,
        )
    return {"tasks": held, "tokenizer": tokenizer}


def unbuilt(
    folder: Path, competition: Competition, *, tasks: Sequence[str] | None = None, only: Sequence[str] = REQUIRED
) -> str:
    """What to do about a folder without split files: build them where it has a build.py, else write those that are named.

    Args:
        folder: of the competition.
        competition: its definition.
        tasks: the tasks that are meant; None for all.
        only: the splits that are meant.
    """
    if (folder / "build.py").is_file():
        return f"acclimate competition build {folder} --out DIR, then use DIR"
    wanted = [split for split in only if split in REQUIRED or only != ALL]
    parts = []
    for task in competition.tasks:
        if tasks is None or task.name in tasks:
            own = columns_needed(task, cluster=competition.ranking.cluster)
            columns = ", ".join([*own, *sorted(columns_of(task) - set(own))])
            files = " and ".join(f"{split}.parquet" for split in wanted).replace(" and ", ", ", len(wanted) - 2)
            parts.append(f"splits/{task.name}/{files} with the columns {columns}")
    return f"write {'; '.join(parts)}, each column of Arrow's type string"


def public_files(folder: Path) -> dict[str, Path]:
    """What everybody may read, by name ("splits/digit/preparation.parquet", "tokenizer.json", "bases/…"); never a holdout.

    Raises:
        Refusal: splits_invalid, where the folder has no splits.
    """
    files = {
        f"splits/{task.name}/{split}.parquet": task / f"{split}.parquet"
        for task in _tasks(folder)
        for split in PUBLIC
        if (task / f"{split}.parquet").is_file()
    }
    tokenizer = folder / "tokenizer.json"
    return files | ({tokenizer.name: tokenizer} if tokenizer.is_file() else {}) | bases.in_folder(folder)


def holdout_files(folder: Path) -> dict[str, Path]:
    """What is sealed, by name in the archive ("digit.parquet"), with the blobs that the rows name ("blobs/…").

    Raises:
        Refusal: splits_invalid, where a task has no holdout, or one that is no Parquet.
    """
    files = {f"{task.name}.parquet": task / "holdout.parquet" for task in _tasks(folder)}
    missing = [f"splits/{path.parent.name}/holdout.parquet is missing" for path in files.values() if not path.is_file()]
    if missing:
        raise Refusal("splits_invalid", f"{folder}: {missing[0]}", hint="build the competition again", problems=missing)
    seen = _Seen()
    for name, path in list(files.items()):
        table = _read(path, name, "holdout", seen)
        if table is not None:
            _note_blobs(table, name, seen)
    if seen.problems:
        raise Refusal(
            "splits_invalid",
            f"{folder}: {seen.problems[0]}",
            hint="build the competition again",
            problems=seen.problems,
        )
    for digest, _ in seen.blobs:
        name = f"{BLOBS}/{digest.removeprefix('sha256:')}"
        files[name] = folder / name
    return files


def columns_needed(task: Task, *, cluster: str | None) -> list[str]:
    """The columns that each split of a task has at least, that of `ranking.cluster` included."""
    own = [name for name in SPLIT_COLUMNS if name != "target" or task.truth == "target"]
    return [*own, *([cluster] if cluster is not None and cluster not in own else [])]


def column_problems(columns: pa.Schema, name: str, task: Task, competition: Competition) -> list[str]:
    """What is wrong with the columns of a public split of a task, by the same rules as `check`; there are no rows to look at.

    Args:
        columns: of the split.
        name: of its file, for the problems.
        task: whose it is.
        competition: whose task.
    """
    if too_many := too_wide(columns, name):
        return [too_many]
    seen = _Seen()
    _check_columns(columns.empty_table(), name, task, competition, seen)
    return seen.problems


def too_wide(columns: pa.Schema, name: str) -> str:
    """The problem of a split with more than MOST_COLUMNS; empty where it has no more. `name` is its file's, for the problem."""
    if len(columns) <= MOST_COLUMNS:
        return ""
    return f"{name}: it has {len(columns)} columns, at most {MOST_COLUMNS} are allowed"


def wrong_truths(task: Task, truths: Sequence[str]) -> dict[str, list[int]]:
    """What is wrong with targets, or with the texts of a task that has none: a sentence's subject -> the rows."""
    found: dict[str, list[int]] = {}
    extracted = answers.answers(truths, extract=task.extract, take=task.take, normalize=task.normalize)
    for place, (truth, answer) in enumerate(zip(truths, extracted, strict=True)):
        if task.choices:
            if truth not in task.choices:
                found.setdefault("targets that are not among the choices", []).append(place)
        elif not truth.strip():
            found.setdefault(f"blank {task.truth}s", []).append(place)
        elif any(stop in truth for stop in task.stop):
            found.setdefault("targets that hold a stop string, behind which nothing counts", []).append(place)
        elif not answer and task.kind == "generate":
            found.setdefault("targets without an answer, by the task's extract and normalize", []).append(place)
    return found


def columns_of(task: Task) -> frozenset[str]:
    """The columns that a task's prompt template may name: its identifiers, quoted text and attributes left out."""
    expressions = (_QUOTED.sub(" ", found) for found in _EXPRESSION.findall(task.prompt))
    return frozenset(name for text in expressions for name in _IDENTIFIER.findall(text))


def _tasks(folder: Path) -> list[Path]:
    tasks = sorted(path for path in (folder / "splits").glob("*") if path.is_dir())
    if not tasks:
        raise Refusal(
            "splits_invalid",
            f"{folder} has no splits/<task>/",
            hint="write splits/<task>/ with preparation.parquet, validation.parquet and holdout.parquet, or a build.py that does; "
            "acclimate competition check says which columns",
        )
    return tasks


def _files(folder: Path, task: str, only: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for split in only:
        path = folder / "splits" / task / f"{split}.parquet"
        if split in REQUIRED or only != ALL or path.exists():
            yield split, path


def _read(path: Path, name: str, split: str, seen: _Seen) -> pa.Table | None:
    try:
        table = bounds.read(path)
    except FileNotFoundError:
        seen.problems.append(f"{name}: the file is missing")
        return None
    except (OSError, ValueError, pa.ArrowException) as error:
        _not_the_machines(error, name)
        seen.problems.append(f"{name}: not readable as Parquet: {str(error).splitlines()[0]}")
        return None
    if too_many := too_wide(table.schema, name):
        seen.problems.append(too_many)
        return None
    if table.num_rows == 0:
        seen.problems.append(f"{name}: the {split} split is empty")
    return table


def _not_the_machines(error: Exception, name: str) -> None:
    """Refuse at once what says nothing about a file: that this machine may not, or can't, read it."""
    if reading.of_the_machine(error) is not None:
        raise Refusal("file_unreadable", f"{name}: {str(error).splitlines()[0]}") from error


def _note_blobs(table: pa.Table, name: str, seen: _Seen) -> pa.Table:
    """The table without its columns that name blobs; what they name is noted."""
    columns = {i: None for i, column in enumerate(table.schema) if is_blob(column.type)}
    for i in columns:
        for row, value in enumerate(table.column(i).to_pylist()):
            if value is None:
                continue
            if not digests.is_digest(value["sha256"]) or type(value["size"]) is not int or value["size"] < 0:
                seen.problems.append(f"{name}: row {row}, column {table.schema[i].name!r}: {value} names no blob")
            else:
                seen.blobs.setdefault((value["sha256"], value["size"]), f"{name}, row {row}")
    return table.select([i for i in range(table.num_columns) if i not in columns])


def is_blob(kind: pa.DataType) -> bool:
    """Whether a column of this type names files: struct {sha256: string, size: int64}, in any order."""
    return pa.types.is_struct(kind) and {field.name: field.type for field in kind} == {
        "sha256": pa.string(),
        "size": pa.int64(),
    }


def _check_blobs(folder: Path, seen: _Seen) -> None:
    """Each blob that a row names is there with that digest and size, and no other file is."""
    names = {digest.removeprefix("sha256:") for digest, _ in seen.blobs}
    for (digest, size), where in seen.blobs.items():
        path = folder / digest.removeprefix("sha256:")
        if not path.is_file():
            seen.problems.append(f"{BLOBS}/{path.name}: {where} names it, and the file is missing")
            continue
        with path.open("rb") as stream:
            found = digests.of_stream(stream)
        if found != (digest, size):
            seen.problems.append(
                f"{BLOBS}/{path.name}: the file is {found[0]} of {found[1]} bytes, {where} says {size} bytes"
            )
    for path in sorted(folder.glob("*")):
        if path.name not in names:
            seen.problems.append(f"{BLOBS}/{path.name}: no row of a holdout names it")


def _check_columns(table: pa.Table, name: str, task: Task, competition: Competition, seen: _Seen) -> bool:
    """Whether the rows can be checked."""
    before = len(seen.problems)
    cluster = competition.ranking.cluster
    needed = columns_needed(task, cluster=cluster)
    names = table.schema.names
    for column in needed:
        if column not in names:
            why = " (ranking.cluster names it)" if column == cluster else _WHY.get(column, "")
            seen.problems.append(f"{name}: column {column!r} is missing{why}")
    counts, used = Counter(names), {*needed, "cluster", *columns_of(task)}
    for column in sorted(column for column, count in counts.items() if count > 1):
        seen.problems.append(f"{name}: column {shown(column)} stands {counts[column]} times")
    for schema_field in table.schema:
        column, kind = schema_field.name, schema_field.type
        if column not in used:
            seen.problems.append(
                f"{name}: column {shown(column)} is used by neither the definition nor the task's prompt"
            )
        elif kind != pa.string():
            is_kind = f"is {str(kind)[:_SHOWN]}, it must be string{_remedy(kind)}"
            seen.problems.append(f"{name}: column {shown(column)} {is_kind}")
        elif nulls := table.column(column).null_count if counts[column] == 1 else 0:
            seen.problems.append(f"{name}: column {shown(column)} has {nulls} nulls")
    return len(seen.problems) == before


def shown(column: str) -> str:
    """A column's name in a sentence: quoted, and cut where it is long, since a file may name one as it likes."""
    return repr(column if len(column) <= _SHOWN else f"{column[:_SHOWN]}…")


def _remedy(kind: pa.DataType) -> str:
    """How texts of another Arrow type become strings; "" where the column holds something else."""
    if pa.types.is_struct(kind) and {part.name for part in kind} == {"sha256", "size"}:
        return ", or in a holdout struct<sha256: string, size: int64> where it names files"
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if inner not in (pa.string(), pa.large_string(), pa.string_view()):
        return ""
    return " (in pandas frame.to_parquet(path, schema=pyarrow.schema([(name, pyarrow.string()) for name in frame.columns]), index=False))"


def _asks_too_much(table: pa.Table, split: str, task: Task, seen: _Seen) -> bool:
    """Whether a model's answers to a split that is asked would be a table that nobody could be sure to read."""
    numbers, rows = max(1, len(task.choices)), table.num_rows
    needed = bounds.predicted(rows, numbers, table.column("example").nbytes)
    if split == "preparation" or needed <= bounds.MOST_NUMBERS:
        return False
    seen.problems.append(
        f"{task.name}/{split}.parquet: {rows} rows of {numbers} answers each, with the names of their examples, are predictions of {needed} numbers, "
        f"at most {bounds.MOST_NUMBERS} are read: take fewer rows, or several tasks"
    )
    return True


def _check_rows(table: pa.Table, split: str, task: Task, cluster: str | None, seen: _Seen) -> None:
    """Report each kind of problem of a file once, with a count and the first case."""
    where, name = f"{task.name}/{split}", f"{task.name}/{split}.parquet"
    found: dict[str, list[str]] = {}
    named = columns_of(task)
    compared = [column for column in table.schema.names if column in named] or ["input"]
    rows = table.to_pylist()
    for what, wrong in wrong_truths(task, [row[task.truth] for row in rows]).items():
        found[what] = [f"{rows[place][task.truth][:200]!r} of {rows[place]['example']!r}" for place in wrong]
    if task.pixels is not None:
        found |= _no_images(rows, task)
    for row in rows:
        example = row["example"]
        if not example.strip():
            found.setdefault("rows with a blank example id", []).append(repr(example))
        first = seen.examples.setdefault(example, where)
        if first != where:
            found.setdefault(f"example ids that stand in {first} too", []).append(repr(example))
        normal = " \x1f ".join(normalized(row[column]) for column in compared)
        first = seen.inputs.setdefault(normal, where)
        if first.rpartition("/")[2] != split:
            found.setdefault(f"inputs that stand in {first} too", []).append(f"that of {example!r}")
        if cluster is not None:
            first = seen.clusters.setdefault(row[cluster], split)
            if first != split:
                found.setdefault(f"clusters that stand in a {first} split too", []).append(repr(row[cluster]))
    counts = Counter(table.column("example").to_pylist())
    if doubled := sorted(example for example, count in counts.items() if count > 1):
        found["example ids that stand twice in this file"] = [repr(example) for example in doubled]
    for what, cases in found.items():
        distinct = list(dict.fromkeys(cases))
        seen.problems.append(f"{name}: {len(distinct)} {what}, first {distinct[0]}")


def image_bytes(text: str, task: Task) -> bytes | None:
    """The numbers of an image, row by row, each pixel's channels together, from 0 to 255; None where the text is no such image in base64."""
    try:
        found = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return found if task.pixels is not None and len(found) == math.prod(task.pixels) else None


def _no_images(rows: Sequence[dict[str, Any]], task: Task) -> dict[str, list[str]]:
    wrong = [f"that of {row['example']!r}" for row in rows if image_bytes(row["input"], task) is None]
    return {f"inputs that are no image of {task.image} bytes in base64": wrong} if wrong else {}


def _check_tokenizer(path: Path, seen: _Seen) -> str | None:
    if not path.exists():
        return None
    try:
        # As strictly as the library that reads it later, which takes no mark before it and no other encoding.
        if not isinstance(json.loads(reading.regular(path).read_bytes().decode("utf-8")), dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError, Refusal) as error:
        _not_the_machines(error, "tokenizer.json")
        seen.problems.append(f"tokenizer.json: {error}")
        return None
    return digests.of_file(path)


def normalized(text: str) -> str:
    """Text as it is compared between splits: NFC, case folded, blanks collapsed."""
    return " ".join(unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold()).split())
