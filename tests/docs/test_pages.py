"""Documentation is enforced: every refusal code, glossary term and decision is on its page."""

import re
from pathlib import Path

import pytest

from acclimate_competitions.errors import CODES, Refusal
from acclimate_competitions.phases import Phase

DOCS = Path(__file__).parent.parent.parent / "docs"
SOURCES = [path for root in ("platform", "runners", "competitions") for path in (DOCS.parent / root).rglob("*.py")]


def errors_page() -> str:
    """docs/errors.md as it must be; write this to the file when a code is added."""
    rows = [f"| `{name}` | {code.status} | {code.meaning} |" for name, code in sorted(CODES.items())]
    head = [
        "# Refusals",
        "",
        "Commands print `error: …`, `code: …` and `hint: …` and exit with 1. The API answers with problem details (RFC 9457)",
        "that carry `code`, `hint`, `problems` and `request_id`.",
        "",
        "| code | HTTP status | meaning |",
        "| --- | --- | --- |",
    ]
    return "\n".join(head + rows) + "\n"


def test_every_refusal_code_is_documented() -> None:
    assert (DOCS / "errors.md").read_text("utf-8") == errors_page()


def test_every_refusal_code_is_raised_somewhere() -> None:
    text = "\n".join(path.read_text("utf-8") for path in SOURCES if path.name != "errors.py")
    unused = [name for name in CODES if f'"{name}"' not in text]
    assert unused == []


def test_a_refusal_with_an_unknown_code_cannot_be_made() -> None:
    with pytest.raises(KeyError):
        Refusal("no_such_code", "x")


def test_every_phase_is_in_the_glossary() -> None:
    row = next(line for line in (DOCS / "glossary.md").read_text("utf-8").splitlines() if line.startswith("| phase |"))
    assert [phase for phase in Phase if not re.search(rf"\b{phase}\b", row)] == []
