"""`acclimate blobs`: remove what nobody needs any more from the store of blobs."""

import dataclasses
import re
from typing import Annotated

import typer

from acclimate.cli.database import existing
from acclimate.cli.options import AsJson, Blobs, ConfigFile, Database, DataFolder, need
from acclimate.cli.output import counted, emit, named_bar
from acclimate_competitions.errors import Refusal

app = typer.Typer(no_args_is_help=True, help="The blobs: remove what nothing names any more.")
_UNITS = {"h": 3600.0, "d": 86400.0, "w": 604800.0}


def _span(text: str) -> float:
    found = re.fullmatch(r"([1-9][0-9]{0,4})([hdw])", text)
    if not found:
        raise typer.BadParameter("a whole number and h, d or w, such as 7d; at least 1h")
    return int(found[1]) * _UNITS[found[2]]


@app.callback()
def blobs() -> None:
    """The blobs: remove what nothing names any more."""


@app.command()
def gc(
    data: DataFolder = None,
    config: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than", help="Remove only what nobody stored or used for so long; at least 1h.", metavar="TIME"
        ),
    ] = "7d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only count.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the blobs that nothing names any more: of uploads that were given up, and of attempts that were made again.

    What a log record, a definition, a manifest, an upload, a seal, a result, the outbox, or an attempt that is not over names stays, and so does
    what those documents name themselves. While everything runs, nothing under way is lost. With an older backup of the database in place
    it is refused (log_inconsistent): that would know too little. Keep --older-than longer than your newest backup is old.

    Example: acclimate blobs gc --data /srv/acclimate --older-than 7d --dry-run
    """
    need("server", "sqlalchemy", "alembic")
    from acclimate import garbage, installation, log
    from acclimate.store import Store

    seconds = _span(older_than)
    settings = existing(data, file=config, database=database, blobs=blobs)
    store = Store.open(settings)
    try:
        verifier = log.parse_vkey(installation.check(store, settings).log)
        if store.blobs.marker() is None:
            raise Refusal(
                "other_installation",
                f"the blobs at {settings.blobs} are marked as no installation's",
                hint="`acclimate db upgrade` marks them, if they are this database's",
            )
        with named_bar("blobs") as progress:
            found = garbage.collect(store, settings, verifier, older_than=seconds, dry=dry_run, progress=progress)
    finally:
        store.close()
    does = "would be removed" if dry_run else "removed"
    lines = [
        f"{counted(found.stored, 'blob')}, {found.size:,} bytes: {found.needed} needed, {found.young} younger than {older_than}",
        f"{does}: {counted(found.removed, 'blob')}, {found.freed:,} bytes; {counted(found.notes, 'note')} of attempts that are over",
    ]
    emit({**dataclasses.asdict(found), "dry_run": dry_run}, as_json=as_json, text=lines)
