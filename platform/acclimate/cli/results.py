"""`acclimate mlflow`: MLflow's own pages on the results; the results held against the record, and rebuilt from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acclimate.cli import server
from acclimate.cli.options import AsJson, Blobs, ConfigFile, Database, DataFolder, need
from acclimate.cli.output import counted, emit, named_bar

if TYPE_CHECKING:
    from acclimate.config import Settings
    from acclimate.store import Store

_SHOWN = 20
app = typer.Typer(invoke_without_command=True)
app.callback()(server.mlflow)
_REWORDED = (
    "reworded: why it failed stands there in other words than this version's, and all else is as it should be: an older version wrote it,"
    " or somebody changed it with care; `acclimate mlflow sync` writes the record's"
)
Rounds = Annotated[
    list[str] | None, typer.Option("--round", help="A round's id; may be repeated; else all.", metavar="ROUND")
]


@app.command()
def check(
    data: DataFolder = None,
    file: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    rounds: Rounds = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether MLflow agrees with the record: missing, extra and changed runs are named. Writes nothing.

    A run is reworded where it only tells its failure in other words, as an older version did.

    Exit 1 where it does not agree.

    Example: acclimate mlflow check --data /srv/acclimate
    """
    given = {"database": database, "blobs": blobs}
    with _opened(data, file, given) as (store, settings), named_bar("checking") as progress:
        from acclimate import mirroring

        found = mirroring.check(store, settings, rounds or [], progress=progress)
    emit(found, as_json=as_json, text=_lines(found, "agrees with the record"))
    if not found["same"]:
        raise typer.Exit(1)


@app.command()
def sync(
    data: DataFolder = None,
    file: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    rounds: Rounds = None,
    as_json: AsJson = False,
) -> None:
    """Make MLflow agree with the record: rebuild what is missing or changed, delete what the record does not have.

    Log and blobs are read, and never changed. Done again it changes nothing. Runs in MLflow that are not Acclimate's stay.

    Example: acclimate mlflow sync --data /srv/acclimate
    """
    given = {"database": database, "blobs": blobs}
    with _opened(data, file, given) as (store, settings), named_bar("syncing") as progress:
        from acclimate import mirroring

        found = mirroring.sync(store, settings, rounds or [], progress=progress)
    emit(found, as_json=as_json, text=_lines(found, "agreed already", end=", mended"))


@contextmanager
def _opened(data: Path | None, file: Path | None, given: dict[str, Any]) -> "Iterator[tuple[Store, Settings]]":
    need("server", "sqlalchemy", "mlflow")
    from acclimate import installation
    from acclimate.store import Store

    settings = server.made(data, file, given)
    store = Store.open(settings)
    try:
        installation.check(store, settings)
        yield store, settings
    finally:
        store.close()


def _lines(found: dict[str, Any], same: str, *, end: str = "") -> Iterator[str]:
    if not found["rounds"]:
        yield "There is no round yet that MLflow should have."
    for row in found["rounds"]:
        differences = row["differences"]
        yield f"{row['round']}: {counted(len(differences), 'difference') + end if differences else same}"
        for one in differences[:_SHOWN]:
            what = f": {', '.join(one['what'][:5])}" if one["what"] else ""
            yield f"  {one['kind']} {one['run']}{what}"
        if any(one["kind"] == "reworded" for one in differences):
            yield f"  {_REWORDED}"
        if len(differences) > _SHOWN:
            yield f"  and {len(differences) - _SHOWN} more (--json has all)"
