"""The pages of the roles as they are read: blocks, exports, command lines."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer.main

from acclimate.cli.main import app

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Block:
    """A fenced block: under which heading it stands, how it is fenced, and what is in it."""

    heading: str
    language: str
    text: str
    line: int


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


def blocks(name: str) -> list[Block]:
    found: list[Block] = []
    heading, fence, lines, began = "", None, [], 0
    for number, line in enumerate(page(name).splitlines(), start=1):
        if line.startswith("```"):
            if fence is None:
                fence, lines, began = line[3:].strip(), [], number
            else:
                found.append(Block(heading, fence, "\n".join(lines), began))
                fence = None
        elif fence is not None:
            lines.append(line)
        elif line.startswith("## "):
            heading = line[3:]
    assert fence is None, f"{name}.md: a block is not closed"
    return found


def exported(name: str) -> dict[str, str]:
    """What the page tells a reader to fill in: variable -> the example's value."""
    found: dict[str, str] = {}
    for block in blocks(name):
        if block.language == "sh":
            for line in re.findall(r"^export (.*)$", block.text, re.MULTILINE):
                found |= dict(re.findall(r"\b([A-Z][A-Z_]*)=([^\s$#]+)", line.partition(" #")[0]))
    return found


def command_lines(name: str) -> Iterator[str]:
    """Each acclimate command line of a page's blocks, with its variables filled in."""
    values = exported(name) | {"ROUND": "digits-2027-1", "receipt": "a.tlog-proof", "HOME": "/home/ada"}
    for block in blocks(name):
        if block.language not in ("sh", "console"):
            continue
        lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
        if block.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines:
            text = re.sub(r"\$\{?([A-Za-z_]+)\}?", lambda m: values.get(m[1], m[0]), re.sub(r"\s#.*", "", line))
            for part in re.split(r"&&|;|\$\(|\||\)$", text):
                if found := re.search(r"(?:^|\s)acclimate (?!-)[^>]*", part.strip()):
                    yield found[0].strip()


def spoken(name: str) -> set[str]:
    """All words after `acclimate` on a page, in blocks or in a sentence."""
    return set(re.findall(r"\bacclimate ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)?)", page(name)))


def commands() -> dict[str, object]:
    found: dict[str, object] = {}

    def walk(path: tuple[str, ...], command: object) -> None:
        if inner := getattr(command, "commands", None):
            for name, item in inner.items():
                walk((*path, name), item)
        if not inner or getattr(command, "invoke_without_command", False) and path:
            found[" ".join(path)] = command

    walk((), typer.main.get_command(app))
    return found
