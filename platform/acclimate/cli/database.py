"""`acclimate db`: bring a database to this version's schema, and see whether it is as this version leaves it."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acclimate.cli.options import AsJson, Blobs, ConfigFile, Database, DataFolder, need
from acclimate.cli.output import emit
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate.config import Settings

_PATIENCE = 60.0
app = typer.Typer(no_args_is_help=True, help="The database: bring it to this version's schema, check it.")


@app.command()
def upgrade(
    data: DataFolder = None,
    config: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    begin: Annotated[
        bool,
        typer.Option(
            "--begin", help="Begin a new installation with keys that were made beforehand, in an empty database."
        ),
    ] = False,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Upgrade although rounds are under way, which this version can't finish."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the database to this version's schema.

    Back it up and stop what uses it first: it is refused where a part runs on this data folder, or a dispatcher leads anywhere. All steps are
    one transaction; run again, or twice at once, it does nothing more. Data of a version without installations get theirs from the keys
    in the data folder. An empty PostgreSQL database is set up with new keys. Keys that are there already begin nothing without --begin:
    they may belong to an installation whose database was lost or is not the one that was named. A round is finished by the code that it was
    defined with, so it is refused while one is under way that was defined by another version.

    Example: acclimate db upgrade --data /srv/acclimate
    """
    need("server", "sqlalchemy", "alembic")
    from acclimate import installation, migrations
    from acclimate.database import connect
    from acclimate.store import Store
    from acclimate_runners.code import code_digest

    settings = existing(data, file=config, database=database, blobs=blobs, make=begin)
    with alone(settings):
        engine = connect(settings.database)
        try:
            if not unfinished and (rounds := migrations.unfinished(engine, code_digest())):
                raise Refusal(
                    "data_version",
                    f"{len(rounds)} rounds are under way that only the version they were defined with can finish: "
                    + ", ".join(rounds[:5])
                    + (", …" if len(rounds) > 5 else ""),
                    hint="publish or void them with that version, or give them up: --unfinished; nothing was changed",
                )
            steps = migrations.upgrade(engine)
        finally:
            engine.dispose()
        store = Store.open(settings)
        try:
            steps += installation.adopt(store, settings, begin=begin)
            found = installation.check(store, settings)
        finally:
            store.close()
    lines = [f"done: {step}" for step in steps] or ["nothing to do"]
    lines.append(f"schema {migrations.HEAD}, installation {found.id}")
    emit({"schema": migrations.HEAD, "installation": found.id, "steps": steps}, as_json=as_json, text=lines)


@app.command()
def check(
    data: DataFolder = None,
    config: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    as_json: AsJson = False,
) -> None:
    """Compare the database with this version's schema.

    Tables and columns, triggers, the log's numbering, and whether blobs and settings are of the same installation. Where the database was put
    back from an older backup: the entries that were signed and are not there, and the attempts whose outcomes are with the blobs, which are
    taken as they are; or that nothing here can tell of such entries, and who could. A warning where the clock lets nothing be logged. Changes
    nothing; exit code 1 where something is wrong.

    Example: acclimate db check --data /srv/acclimate
    """
    need("server", "sqlalchemy", "alembic")
    from acclimate import facts, installation, log, migrations, restoring
    from acclimate.clocks import Clocks
    from acclimate.database import connect
    from acclimate.store import Store, metadata
    from acclimate_runners.blobs import blobs_at

    settings = existing(data, file=config, database=database, blobs=blobs)
    engine, gap, clock = connect(settings.database), restoring.Gap(0, [], []), ""
    try:
        problems = migrations.problems(engine, metadata)
        if not problems:
            place = blobs_at(settings.blobs, endpoint=settings.blobs_endpoint, scratch=settings.work / "blobs")
            try:
                store = Store(engine, place, clocks=Clocks(behind=settings.clock_behind))
                verifier = log.parse_vkey(installation.check(store, settings).log)
                gap = restoring.gap(store, settings, verifier)
                clock = facts.unloggable(store)
            except Refusal as refusal:
                problems = [refusal.sentence]
    finally:
        engine.dispose()
    wrong = bool(problems or gap.lost)
    lines = [f"problem: {problem}" for problem in problems]
    doubts = [f"warning: {clock}"] if clock else []
    if not wrong:
        sound = "as this version leaves it" if doubts or gap.unknown else "nothing is wrong"
        lines.append(f"schema {migrations.HEAD}: {sound}")
    value = {"schema": migrations.HEAD, "problems": problems, "gap": dataclasses.asdict(gap), "clock": clock}
    emit(value, as_json=as_json, text=[*lines, *gap.lines(), *doubts])
    if wrong:
        raise typer.Exit(1)


@app.command("accept-loss")
def accept_loss(
    data: DataFolder = None,
    config: ConfigFile = None,
    database: Database = None,
    blobs: Blobs = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a database that lacks entries for which people hold receipts.

    After a restore from an older backup the API refuses to start (log_inconsistent), since it would sign other entries in their place. Look for
    a newer backup first. If there is none, tell everybody which entries are lost, then run this once for each API's data folder.
    The checkpoint that was signed over them is kept with the blobs. Where a restore could not know of such entries (`acclimate db check` says so),
    ask whoever might hold them, then run it as well.

    Example: acclimate db accept-loss --data /srv/acclimate
    """
    need("server", "sqlalchemy", "alembic")
    from acclimate import installation, log, restoring
    from acclimate.checkpoints import Copies
    from acclimate.store import Store

    settings = existing(data, file=config, database=database, blobs=blobs)
    with alone(settings):
        store = Store.open(settings)
        try:
            verifier = log.parse_vkey(installation.check(store, settings).log)
            steps = Copies.asking(settings, store.blobs, verifier).accept(store) + restoring.accept(settings)
        finally:
            store.close()
    emit({"steps": steps}, as_json=as_json, text=[f"accepted: {step}" for step in steps] or ["nothing is lost"])


@contextmanager
def alone(settings: "Settings") -> Iterator[None]:
    """Hold the data folder for all its parts: an older one would go on writing in the way of its own version.

    Raises:
        Refusal: busy, which names the process; config_invalid, data_version, no_space.
    """
    from acclimate import config

    config.claim(settings)
    with ExitStack() as held:
        # Of two upgrades the second waits, and finds nothing to do.
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                held.enter_context(config.lock(settings, "upgrade"))
                break
            except Refusal as refusal:
                if refusal.code != "busy" or time.monotonic() > until:
                    raise
                time.sleep(0.2)
        for part in ("up", "api", "dispatcher"):
            held.enter_context(config.lock(settings, part))
        yield


def existing(
    data: Path | None, *, file: Path | None, database: str | None, blobs: str | None, make: bool = False
) -> "Settings":
    """The settings, where their SQLite file is there: no command on a database makes one unasked, so that a wrong name is noticed.

    Raises:
        Refusal: config_invalid.
    """
    from acclimate import config, sqlite_urls

    settings = config.load(data, file=file, given={"database": database, "blobs": blobs})
    path = sqlite_urls.file(settings.database)
    if sqlite_urls.is_one(settings.database) and not path.is_file() and not make:
        raise Refusal(
            "config_invalid",
            f"no database here: {path}",
            hint="name its data folder with --data or ACCLIMATE_DATA; `acclimate api --data DIR` makes one on first use",
        )
    return settings
