"""What ties the holdouts of a competition's rounds: none of them may hold what another one, or anything public, holds.

Of a holdout that nobody may see any more digests are kept: of each example's id, of each input as it is compared between splits, of each
cluster. Digests of short or guessable texts can be tried out by whoever has them, so they are as secret as the holdout itself.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from acclimate_competitions import bounds
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.splits import PUBLIC, columns_of, is_blob, normalized

_DIGITS = 32
"""Hex digits of a kept digest: 128 bits, of which no two of a holdout's are the same by chance."""
_KINDS = {"examples": "example ids", "inputs": "inputs", "clusters": "clusters"}
_Texts = Mapping[str, Mapping[str, str]]
"""Kind -> digest -> where the text stands."""


@dataclass(frozen=True)
class Overlap:
    """What stands in two places that must not share it.

    Attributes:
        what: example ids | inputs | clusters.
        count: how many are in both.
        first: where the first of them stands here: file and example.
    """

    what: str
    count: int
    first: str

    def sentence(self) -> str:
        """All of it, in words."""
        return f"{self.count} {self.what}, the first: {self.first}"


def tables_of(folder: Path, competition: Competition, split: str) -> dict[str, pa.Table]:
    """A split of a built competition, by task; tasks without such a file are left out.

    Raises:
        Refusal: splits_invalid.
    """
    found = {}
    for task in competition.tasks:
        path = folder / "splits" / task.name / f"{split}.parquet"
        if path.is_file():
            found[task.name] = read(path)
    return found


def public_tables(folder: Path, competition: Competition) -> dict[str, pa.Table]:
    """All that a built competition gives to everybody, by "task/split"."""
    return {
        f"{task}/{split}": table for split in PUBLIC for task, table in tables_of(folder, competition, split).items()
    }


def read(path: Path) -> pa.Table:
    """The rows of a split's file, which may be a stranger's.

    Raises:
        Refusal: splits_invalid.
    """
    try:
        return bounds.read(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Refusal("splits_invalid", f"{path.name}: not readable: {str(error).splitlines()[0]}") from error


def kept(tables: Mapping[str, pa.Table], competition: Competition) -> dict[str, Any]:
    """What is kept of a holdout: {v, columns: {task: [column]}, examples, inputs, clusters: [digest]}, sorted.

    Args:
        tables: task -> rows.
        competition: the definition, which says what of a row an entrant's model sees.
    """
    columns = {task: _seen(competition, task, table) for task, table in tables.items()}
    texts = _texts(tables, columns, competition.ranking.cluster)
    return {"v": 1, "columns": columns, **{kind: sorted(found) for kind, found in texts.items()}}


def is_kept(value: object) -> bool:
    """Whether a value that was read is one of `kept`."""
    return (
        isinstance(value, dict)
        and {"v", "columns", *_KINDS} <= set(value)
        and value["v"] == 1
        and isinstance(value["columns"], dict)
        and all(isinstance(each, list) for each in value["columns"].values())
        and all(isinstance(value[kind], list) for kind in _KINDS)
    )


def shared(before: Mapping[str, Any], tables: Mapping[str, pa.Table], competition: Competition) -> list[Overlap]:
    """What rows share with a holdout of which this is kept.

    Inputs are compared by the columns that the models saw then, and by those that they see now.

    Args:
        before: as `kept` gave it.
        tables: task, or "task/split", -> rows.
        competition: of the rows.
    """
    then = {tuple(columns) for columns in before["columns"].values()}
    found: dict[str, dict[str, str]] = {kind: {} for kind in _KINDS}
    for name, table in tables.items():
        now = tuple(_seen(competition, name.partition("/")[0], table))
        for columns in sorted({now} | {each for each in then if set(each) <= set(table.schema.names)}):
            for kind, texts in _texts({name: table}, {name: list(columns)}, competition.ranking.cluster).items():
                for digest, where in texts.items():
                    found[kind].setdefault(digest, where)
    known = {kind: set(before[kind]) for kind in _KINDS}
    return [
        Overlap(_KINDS[kind], len(both), found[kind][both[0]])
        for kind in _KINDS
        if (both := [digest for digest in found[kind] if digest in known[kind]])
    ]


def incomparable(before: Mapping[str, Any], tables: Mapping[str, pa.Table]) -> list[str]:
    """Tasks of the holdout before whose inputs can't be told again from these rows: they lack a column that models saw then."""
    names = [set(table.schema.names) for table in tables.values()]
    return [task for task, columns in before["columns"].items() if not any(set(columns) <= each for each in names)]


def _seen(competition: Competition, task: str, table: pa.Table) -> list[str]:
    """The columns that make an input, as splits.check takes them."""
    wanted = columns_of(competition.task(task)) if task in {each.name for each in competition.tasks} else frozenset()
    return [column for column in table.schema.names if column in wanted] or ["input"]


def _texts(tables: Mapping[str, pa.Table], columns: Mapping[str, list[str]], cluster: str | None) -> _Texts:
    found: dict[str, dict[str, str]] = {kind: {} for kind in _KINDS}
    for name, table in tables.items():
        for row in _rows(table):
            where = f"{name}, {row['example']!r}"
            found["examples"].setdefault(_digest(row["example"]), where)
            text = " \x1f ".join(normalized(str(row.get(column))) for column in columns[name])
            found["inputs"].setdefault(_digest(text), where)
            if cluster is not None and row.get(cluster) is not None:
                found["clusters"].setdefault(_digest(str(row[cluster])), where)
    return found


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    plain = [name for name in table.schema.names if not is_blob(table.schema.field(name).type)]
    for batch in table.select(plain).to_batches():
        yield from batch.to_pylist()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
