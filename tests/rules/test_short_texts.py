"""The competition of short texts: what its splits hold, and that nothing of the holdout stands elsewhere."""

import csv
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from acclimate.cli import competition as command
from acclimate_competitions import definition, digests, splits, tables

SHIPPED = definition.shipped("short-texts")
SIZES = {"preparation": 400, "validation": 100, "holdout": 400}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("short-texts") / "data"
    command.build_into(SHIPPED, out)
    return out


def rows(built: Path, task: str, split: str) -> list[dict[str, str]]:
    return tables.read(built / f"splits/{task}/{split}.parquet").to_pylist()


def test_each_split_has_its_size_and_as_many_of_each_answer(built: Path) -> None:
    for task in definition.load(built).tasks:
        for split, size in SIZES.items():
            found = Counter(row["target"] for row in rows(built, task.name, split))
            each = size // 2 if task.name != "source" else {400: 130, 100: 33}[size]
            assert found == dict.fromkeys(task.choices, each)


def test_no_text_and_no_cluster_stands_in_two_splits(built: Path) -> None:
    spec = importlib.util.spec_from_file_location("derive", SHIPPED / "derive.py")
    assert spec is not None and spec.loader is not None
    derive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(derive)
    where: dict[str, str] = {}
    for task in definition.load(built).tasks:
        for split in splits.REQUIRED:
            for row in rows(built, task.name, split):
                for what in (derive.normalized(row["input"]), row["cluster"], row["example"]):
                    assert where.setdefault(what, split) == split


def test_the_texts_are_what_was_derived(built: Path) -> None:
    with (SHIPPED / "texts.csv").open(encoding="utf-8", newline="") as file:
        texts = {row["id"]: row for row in csv.DictReader(file)}
    assert len(texts) == 4200
    for row in texts.values():
        assert 12 <= len(row["text"]) <= 240
        assert row["source"] != "mail" or not re.search(r"\S+@\S+|https?://", row["text"])
    for split in splits.REQUIRED:
        for task, source in (("spam", "mail"), ("film", "film"), ("product", "product")):
            for row in rows(built, task, split):
                text = texts[row["example"].removeprefix(f"{task}-")]
                assert (row["input"], row["target"], text["source"]) == (text["text"], text["label"], source)
        for row in rows(built, "source", split):
            assert row["target"] == texts[row["example"].removeprefix("source-")]["source"]


def test_a_second_build_writes_the_same_bytes(built: Path, tmp_path: Path) -> None:
    command.build_into(SHIPPED, tmp_path / "again")
    trees = [
        digests.of_tree((str(p.relative_to(folder)), p) for p in sorted(folder.rglob("*")) if p.is_file())
        for folder in (built, tmp_path / "again")
    ]
    assert trees[0] == trees[1]


def test_licences_are_shipped_with_the_texts() -> None:
    said = (SHIPPED / "LICENSES.txt").read_text("utf-8")
    assert "Permission is hereby granted, free of charge" in said and "Public Domain Dedication" in said
    assert (SHIPPED / "texts.csv").stat().st_size < 2_000_000
