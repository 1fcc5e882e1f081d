"""`acclimate verify`: the auditor's report on a bundle."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acclimate.cli.options import AsJson, read_key
from acclimate.cli.output import emit, plain
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.verify import Check, Report

_COLOURS = {"ok": "green", "FAILED": "red", "NOT CHECKED": "yellow"}


def verify(
    bundle: Annotated[Path, typer.Argument(help="A published bundle: its folder or its ZIP.", metavar="BUNDLE")],
    log_key: Annotated[
        str | None,
        typer.Option(
            "--log-key", help="The log's key, got elsewhere: name+hash+base64, or a file that holds it.", metavar="KEY"
        ),
    ] = None,
    witness: Annotated[
        list[str] | None,
        typer.Option("--witness", help="A witness's key, got elsewhere; may be repeated.", metavar="KEY"),
    ] = None,
    level: Annotated[
        list[str] | None,
        typer.Option("--level", help="log, seal or scores; may be repeated. All of them by default.", metavar="LEVEL"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a round from its bundle alone, offline, with no word of any server.

    One numbered line a check: ok, FAILED with the first bad place, or NOT CHECKED with the reason. Exits 0 if nothing
    FAILED, else 1.

    Example: acclimate verify digits-2027-1.zip --log-key "$(cat key-that-a-custodian-gave-me.txt)"
    """
    from acclimate import verify as auditor

    if not bundle.exists():
        raise Refusal(
            "file_unreadable", f"{bundle}: there is no such file or folder", hint="give a bundle's folder or ZIP"
        )
    report = auditor.verify(
        bundle,
        log_key=read_key(log_key) if log_key is not None else None,
        witnesses=[read_key(text) for text in witness or []],
        levels=level or auditor.LEVELS,
    )
    emit(report.document(), as_json=as_json, text=_lines(report), styled=True)
    raise typer.Exit(report.exit_code)


def _lines(report: "Report") -> Iterator[str]:
    if report.round:
        yield f"Round {plain(report.round)}"
    for check in report.checks:
        yield _line(check)
    yield ""
    yield typer.style(plain(report.summary), bold=True) if _colourful() else plain(report.summary)


def _line(check: "Check") -> str:
    status = f"{check.status + ':':<12}"
    if _colourful():
        status = typer.style(status, fg=_COLOURS[check.status], bold=check.status == "FAILED")
    meaning, where = plain(check.meaning), plain(check.where)
    said = f"{where}: {meaning}" if check.status == "FAILED" else f"{meaning} ({where})" if where else meaning
    return f"{check.number:>2}  {status} {check.name}: {said}"


def _colourful() -> bool:
    # Where stdout is no terminal, echo strips the colours.
    return not os.environ.get("NO_COLOR")
