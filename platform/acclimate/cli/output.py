"""How commands speak: results on stdout, everything else on stderr; with --json one JSON value on stdout and nothing else there.

Much of what is printed was written by a server or a stranger, so all of it goes through `plain` or `dumps`: no control or direction
character reaches the terminal.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import typer

from acclimate_competitions.errors import Refusal

Progress = Callable[[int, int], None]


def plain(text: str) -> str:
    """Text that can't steer a terminal: what is not printable, line ends included, as a backslash escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """JSON for people and programs: letters of all scripts as they are where standard output takes them, what is not printable as an escape."""
    takes_all = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(value, indent=indent, ensure_ascii=not takes_all, default=str)
    # Outside of strings JSON has no unprintable characters but the line ends of its indentation.
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def emit(value: Any, *, as_json: bool, text: str | Iterable[str], styled: bool = False) -> None:
    """Print a command's result: the value as JSON, or the text for people.

    Args:
        value: the result.
        as_json: whether to print the value.
        text: a line, or several.
        styled: the text has colours, and the caller has made plain what is in them.
    """
    if as_json:
        typer.echo(dumps(value, indent=1))
        return
    for line in [text] if isinstance(text, str) else text:
        typer.echo(line if styled else plain(line))


def say(line: str) -> None:
    """Print a note; where standard error takes none, the command goes on without."""
    with suppress(OSError):
        typer.echo(plain(line), err=True)


def complain(refusal: Refusal, *, as_json: bool) -> None:
    """Print a refusal: for people on stderr; with --json also as {"error": …} on stdout."""
    say(f"error: {refusal.sentence}")
    for place, problem in enumerate(refusal.problems):
        # Of several problems many sentences name the first after a colon; one that just happens to end like a problem has not told it.
        if place > 0 or not f": {refusal.sentence}".endswith(f": {problem}"):
            say(f"  {problem}")
    # The pages of the roles have their tables of refusals by code.
    say(f"code: {refusal.code}")
    if refusal.hint:
        say(f"hint: {refusal.hint}")
    if as_json:
        typer.echo(dumps({"error": refusal.document()}))


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> list[str]:
    """Rows under their header, in columns; those named in `right` are aligned right."""
    cells = [[plain(str(cell)) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: list[str]) -> str:
        padded = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        )
        return "  ".join(padded).rstrip()

    return [line(row) for row in cells]


@contextmanager
def bar(label: str, *, unit: str = "bytes") -> Iterator[Progress]:
    """A progress bar, on stderr where that is a terminal; what it yields is told (done, in all), in bytes or another unit."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
    if unit != "bytes":
        counts = (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn(label), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        line = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(line, completed=done, total=total)


@contextmanager
def named_bar(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar for work of several kinds, on stderr where that is a terminal; it is told (done, of how many, what is done)."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        line = progress.add_task(label, total=None)
        yield lambda done, total, what: progress.update(
            line, completed=done, total=total or None, description=plain(what or label)
        )


def counted(count: int, noun: str) -> str:
    """A number with its noun: 1 entry, 2 entries."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count} {noun if count == 1 else plural}"
