"""Tests that pages name: a page that says what was tried is held to it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md")])
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for file, name in NAMED.findall(page.read_text("utf-8")):
        found = [path for path in (ROOT / "tests").rglob(file) if f"def {name}(" in path.read_text("utf-8")]
        assert found, f"{file}::{name}"


def test_what_may_break_is_tried_row_by_row() -> None:
    page = (ROOT / "docs" / "operators.md").read_text("utf-8")
    rows = page.split("## What may break, and what then")[1].split("| --- | --- | --- |\n")[1].split("\n\n")[0]
    assert len(rows.splitlines()) == 25 and all(NAMED.search(row) for row in rows.splitlines())
