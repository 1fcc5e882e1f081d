"""`acclimate verify`: the auditor's report on a bundle."""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acclimate.cli.options import AsJson, LogKey, need, read_key, read_log_keys
from acclimate.cli.output import emit, named_bar, plain
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.verify import Check, Report
    from acclimate.verify.audit import Rerun
    from acclimate.verify.checks import Progress
    from acclimate.verify.files import Bundle

_COLOURS = {"ok": "green", "FAILED": "red", "NOT CHECKED": "yellow"}


def verify(
    bundle: Annotated[Path, typer.Argument(help="A published bundle: its folder or its ZIP.", metavar="BUNDLE")],
    log_key: LogKey = None,
    witness: Annotated[
        list[str] | None,
        typer.Option("--witness", help="A witness's key, got elsewhere; may be repeated.", metavar="KEY"),
    ] = None,
    log: Annotated[bool, typer.Option("--log", help="Check the log: what was said, when, by whom.")] = False,
    seal: Annotated[bool, typer.Option("--seal", help="Check the seal and its opening, and what that needs.")] = False,
    scores: Annotated[
        bool, typer.Option("--scores", help="Check predictions, scores and ranking, and what that needs.")
    ] = False,
    rerun: Annotated[
        str | None,
        typer.Option(
            "--rerun", help="Prepare and evaluate this entrant's model again; needs --models.", metavar="ENTRANT"
        ),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option("--models", help="The folder with the files that the entrant submitted.", metavar="DIR"),
    ] = None,
    level: Annotated[list[str] | None, typer.Option("--level", hidden=True, help="As --log, --seal, --scores.")] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a round from its bundle alone, offline, with no word of any server.

    One numbered line a check: ok, FAILED with the first bad place, or NOT CHECKED with the reason. Exits 0 if nothing
    FAILED, else 1. Of --log, --seal and --scores those that are given are checked, all where none is.

    Example: acclimate verify digits-2027-1.zip --log-key key-that-a-custodian-gave-me.txt
    """
    from acclimate import verify as auditor
    from acclimate.verify import files

    if not bundle.exists():
        raise Refusal(
            "file_unreadable", f"{bundle}: there is no such file or folder", hint="give a bundle's folder or ZIP"
        )
    _require_bundle(bundle)
    chosen = [name for name, wanted in (("log", log), ("seal", seal), ("scores", scores)) if wanted] + (level or [])
    if (rerun is None) != (models is None):
        raise typer.BadParameter("--rerun ENTRANT and --models DIR belong together")
    keys = [read_key(text) for text in witness or []]
    with named_bar("verifying") as progress:
        again = _again(rerun, models, progress) if rerun is not None and models is not None else None
        try:
            # Once: the key that fits is chosen by the bytes that are verified.
            with files.opened(bundle) as found:
                if rerun is not None:
                    _require_entrant(found, rerun)
                report = auditor.verify(
                    found,
                    log_key=read_log_keys(log_key, of=_named(found)) if log_key is not None else None,
                    witnesses=keys,
                    levels=[*chosen, "rerun"] if chosen and rerun is not None else chosen or auditor.LEVELS,
                    rerun=again,
                    progress=progress,
                )
        except auditor.Failed as failed:
            report = auditor.unopened(bundle, failed)
    emit(report.document(), as_json=as_json, text=_lines(report), styled=True)
    raise typer.Exit(report.exit_code)


def _again(entrant: str, models: Path, progress: "Progress") -> "Rerun":
    if not models.is_dir():
        raise Refusal(
            "file_unreadable", f"{models} is no folder", hint="the folder with the entrant's config.json and weights"
        )
    need("runner", "torch", "transformers")
    from acclimate.bundle_rerun import EntrantRerun

    return EntrantRerun(entrant, models, progress)


def _require_entrant(bundle: "Bundle", name: str) -> None:
    """Refuse a name that no submission of the bundle is of; a damaged one gets the full report.

    Raises:
        Refusal: entrant_unknown.
    """
    from acclimate.verify import Failed

    try:
        lines = [reading.parse_json(line) for line in bundle.lines("submissions.jsonl")]
        names = sorted({str(line["entrant"]) for line in lines})
    except (Failed, Refusal, ValueError, KeyError, TypeError):
        return
    if names and name not in names:
        raise Refusal(
            "entrant_unknown",
            f"{name!r} has no submission in this bundle: nothing of it could be made again",
            hint=f"--rerun takes one of {', '.join(names[:20])}{', …' if len(names) > 20 else ''}",
        )


def _require_bundle(path: Path) -> None:
    """Refuse what is no bundle at all; a damaged one gets the full report.

    Raises:
        Refusal: bundle_invalid, file_unreadable.
    """
    try:
        if path.is_dir():
            known = {item.name for item in path.iterdir()}
            what = f"the folder {path}"
        else:
            what = f"the file {path}"
            with reading.regular(path).open("rb") as stream:
                begins_as_zip = stream.read(2) == b"PK"
            if begins_as_zip and not zipfile.is_zipfile(path):
                return  # cut off or damaged
            known = set()
            if begins_as_zip:
                with zipfile.ZipFile(path) as archive:
                    known = {name.rpartition("/")[2] for name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return
    except OSError as error:
        raise Refusal("file_unreadable", f"{path}: {error.strerror or error}") from error
    if known.isdisjoint({"MANIFEST", "entries.jsonl"}):
        raise Refusal(
            "bundle_invalid",
            f"this is no bundle: {what} has neither MANIFEST nor entries.jsonl",
            hint="a published round's: acclimate round bundle ROUND --out FILE",
        )


def _named(bundle: "Bundle") -> str | None:
    """The log's key that a bundle names: which of those that a key folder keeps is meant."""
    from acclimate.verify import Failed

    try:
        return str(bundle.json("keys.json")["log"])
    except (Failed, KeyError, TypeError):
        return None  # the report says what is wrong


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
