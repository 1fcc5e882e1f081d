"""`acclimate backup` and `acclimate restore`: a copy of an installation, and an installation from a copy."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from acclimate.cli.database import existing
from acclimate.cli.options import AsJson, Blobs, ConfigFile, Database, DataFolder, need
from acclimate.cli.output import counted, emit, named_bar


def backup(
    to: Annotated[Path, typer.Argument(help="A folder: empty, or with an earlier backup.", metavar="DIR")],
    data: DataFolder = None,
    config: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    no_blobs: Annotated[
        bool, typer.Option("--no-blobs", help="Leave the blobs out: they are copied by other means.")
    ] = False,
    keys: Annotated[
        bool, typer.Option("--keys", help="Copy the server's keys, too: whoever has them is the server.")
    ] = False,
    recheck: Annotated[
        bool, typer.Option("--recheck", help="Hash the blobs again that an earlier backup copied.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Back up the database, the blobs and, if asked for, the keys, while everything runs.

    The tables are of one moment, and the same from SQLite and PostgreSQL; the blobs are copied by their digests, only those that the folder does
    not have yet. All of it is read again and compared. Killed at any moment, the backup before is still whole, and the same command goes on.
    Exit code 1 where a blob that the database names is nowhere to be found: the backup is made all the same.

    Example: acclimate backup /backup/acclimate --data /srv/acclimate --keys
    """
    need("server", "sqlalchemy", "alembic")
    from acclimate import backups, installation
    from acclimate.store import Store

    settings = existing(data, file=config, database=database, blobs=blobs)
    store = Store.open(settings)
    try:
        found = installation.check(store, settings)
        wanted = backups.Wanted(blobs=not no_blobs, keys=keys, recheck=recheck)
        with named_bar("backup") as progress:
            made = backups.write(store, settings, found, to, wanted=wanted, progress=progress)
    finally:
        store.close()
    rows = sum(table["rows"] for table in made["tables"].values())
    lines = [
        f"installation {found.id}, schema {made['schema']}, {made['made']}",
        f"log: {made['log']['size']} entries, root {made['log']['root']}",
        f"database: {counted(rows, 'row')} of {len(made['tables'])} tables",
    ]
    if made["blobs"] is None:
        lines.append("blobs: left out")
    else:
        lines.append(f"blobs: {made['blobs']['count']}, {made['blobs']['size']:,} bytes; {made['copied']} new")
    lines.append("keys: " + ("in the backup" if made["keys"] else "left out; without them the log is worth nothing"))
    lines += [f"problem: blob {digest} is named, and neither stored nor in a backup" for digest in made["lost"]]
    emit({"folder": str(to), **made}, as_json=as_json, text=lines)
    if made["lost"]:
        raise typer.Exit(1)


def restore(
    folder: Annotated[Path, typer.Argument(help="A folder that `acclimate backup` made.", metavar="DIR")],
    data: DataFolder = None,
    config: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    as_json: AsJson = False,
) -> None:
    """Make an installation anew from its backup, in an empty data folder and an empty database.

    The backup is verified first, and every table once more in the new database; a damaged file is named, and nothing is restored over
    anything. The database may be of another kind than the one that was backed up. Blobs that are still there are taken as they are, and their
    newest signed checkpoint says whether the log lost entries: those are told at the end, with the attempts whose outcomes are at hand. Killed
    at any moment, the same command goes on. A backup of an older version is brought to this one's schema. Exit code 1 where entries of the log
    or blobs are lost: all the rest is restored all the same.

    Example: acclimate restore /backup/acclimate --data /srv/acclimate
    """
    need("server", "sqlalchemy", "alembic")
    from acclimate import restoring

    settings = existing(data, file=config, database=database, blobs=blobs, make=True)
    with named_bar("restore") as progress:
        made = restoring.restore(folder, settings, progress=progress)
    gap = made["gap"]
    lines = [
        f"installation {made['installation']['id']} as of {made['made']}: {made['log']['size']} entries, root {made['log']['root']}",
        *(f"done: {step}" for step in made["upgraded"]),
        f"blobs: {made['restored']} copied to {settings.blobs}"
        if made["blobs"]
        else f"blobs: not in the backup, they must be at {settings.blobs}",
        f"keys: {settings.keys}"
        if made["keys"]
        else f"keys: not in the backup; put them into {settings.keys} before you start",
        *gap.lines(),
        *([f"warning: {made['clock']}"] if made["clock"] else []),
    ]
    missing = made["missing"] or []
    lines += [f"problem: blob {digest} is named, and not at {settings.blobs}" for digest in missing]
    if missing:
        lines.append(f"look for these blobs in older backups, and copy them to {settings.blobs} under the same names")
    emit({**made, "data": str(settings.data), "gap": dataclasses.asdict(gap)}, as_json=as_json, text=lines)
    if gap.lost or missing:
        raise typer.Exit(1)
