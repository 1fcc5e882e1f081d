"""Builds the splits of `short-texts` from texts.csv beside it; the same bytes every time, and nothing is downloaded.

Self-contained: `acclimate competition build short-texts --out DIR` loads this file by its path and calls main(DIR).
"""

import csv
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

SEED = 2027
SIZES = {"holdout": 400, "preparation": 400, "validation": 100}
TASKS = {
    "spam": ("mail", ("spam", "wanted")),
    "film": ("film", ("negative", "positive")),
    "product": ("product", ("negative", "positive")),
}
"""Task -> the source of its texts, and its answers; each split has as many of each."""
SOURCE_SIZES = {"holdout": 390, "preparation": 390, "validation": 99}
"""Of the task `source`: a third of each source, from the texts that the other tasks have in the same split."""

Row = Mapping[str, str]


def main(out: Path) -> None:
    """Write competition.toml and splits/<task>/<split>.parquet below out."""
    with Path(__file__).with_name("texts.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("competition.toml"), out / "competition.toml")
    splits: dict[str, dict[str, list[Row]]] = {split: {} for split in SIZES}
    for task, (source, answers) in TASKS.items():
        for split, found in _assign([row for row in rows if row["source"] == source], answers).items():
            splits[split][source] = found
            _write([(row, row["label"]) for row in found], task, out / "splits" / task / f"{split}.parquet")
    for split, size in SOURCE_SIZES.items():
        drawn = [row for found in splits[split].values() for row in _drawn(found, "source")[: size // len(TASKS)]]
        _write([(row, row["source"]) for row in drawn], "source", out / "splits" / "source" / f"{split}.parquet")


def _hash(what: str) -> bytes:
    return hashlib.sha256(f"short-texts {SEED} {what}".encode()).digest()


def _drawn(rows: list[Row], what: str) -> list[Row]:
    """Rows in the order of a hash of their id."""
    return sorted(rows, key=lambda row: _hash(f"{what} {row['id']}"))


def _assign(rows: list[Row], answers: tuple[str, ...]) -> dict[str, list[Row]]:
    """Split -> rows, as many of each answer.

    A cluster (a mail's subject, a product's review) goes to one split as a whole: in the order of a hash of its name each goes to the first
    split that lacks rows of one of the answers. What a split has too many of is left out.
    """
    clusters: dict[str, list[Row]] = {}
    for row in rows:
        clusters.setdefault(row["cluster"], []).append(row)
    taken: dict[str, list[Row]] = {split: [] for split in SIZES}
    for name in sorted(clusters, key=_hash):
        split = next((split for split in SIZES if _lacks(taken[split], answers, SIZES[split])), None)
        if split is not None:
            taken[split] += clusters[name]
    kept = {}
    for split, size in SIZES.items():
        each = [
            _drawn([row for row in taken[split] if row["label"] == answer], split)[: size // len(answers)]
            for answer in answers
        ]
        kept[split] = [row for found in each for row in found]
        if len(kept[split]) != size:
            raise ValueError(f"{split} has {len(kept[split])} rows, {size} were asked for")
    return kept


def _lacks(rows: list[Row], answers: tuple[str, ...], size: int) -> bool:
    return any(sum(row["label"] == answer for row in rows) < size // len(answers) for answer in answers)


def _write(rows: list[tuple[Row, str]], task: str, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = sorted(rows, key=lambda item: item[0]["id"])
    columns = {
        "example": [f"{task}-{row['id']}" for row, _ in rows],
        "input": [row["text"] for row, _ in rows],
        "target": [target for _, target in rows],
        "cluster": [row["cluster"] for row, _ in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([(name, pa.string()) for name in columns])
    pq.write_table(pa.table(columns, schema=schema), path)
