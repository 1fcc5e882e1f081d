"""How a database comes to the schema of this version, on SQLite and PostgreSQL alike, by Alembic.

- An empty database gets all of it, in one transaction; of two processes that find it empty the second waits, and finds it made.
- An older one is refused: `acclimate db upgrade` brings it up, also in one transaction. A newer one, and one that holds other
  tables than ours, is refused.
- SQLite databases of the releases before Alembic carry `user_version` 1: they stand at revision 0001. Later revisions write
  their number there too, so that those releases refuse them.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, inspect, text

from acclimate import database, postgres
from acclimate.migrations import guards
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007")
HEAD = REVISIONS[-1]
_VERSIONS = "alembic_version"
_NUMBER = re.compile(r"[0-9]{4}")
_OURS = {"log_entries", "log_checkpoints"}
# Alembic keeps the migration under way in a global.
_one_at_a_time = threading.Lock()


def version(connection: Connection) -> str | None:
    """The revision at which a database stands; None where it is empty.

    Raises:
        Refusal: data_version, for a newer one and for one that is not ours.
    """
    sqlite = connection.dialect.name == "sqlite"
    names = set(inspect(connection).get_table_names())
    marked = int(connection.exec_driver_sql("PRAGMA user_version").scalar_one()) if sqlite else 0
    if marked > len(REVISIONS):
        raise _newer(str(marked))
    if not names and not marked:
        return None
    if names >= _OURS | {_VERSIONS}:
        return _one_of_ours(stated(connection))
    if names >= _OURS and marked == 1:
        return "0001"
    raise Refusal(
        "data_version",
        f"the database is not empty, and not one of Acclimate: it has {', '.join(sorted(names)[:5]) or 'no table'}",
        hint="name an empty database of its own in the setting `database`",
    )


def stated(connection: Connection) -> list[str]:
    """What a database says of its schema, sorted; one revision, where nobody has changed it by hand or mixed two."""
    found = connection.execute(text(f"SELECT version_num FROM {_VERSIONS}")).scalars()
    return sorted(map(str, found))


def _one_of_ours(found: list[str]) -> str:
    if len(found) == 1 and found[0] in REVISIONS:
        return found[0]
    if len(found) == 1 and _NUMBER.fullmatch(found[0]) and found[0] > HEAD:
        raise _newer(found[0])
    said = ", ".join(repr(one) for one in found[:3]) if found else "nothing"
    raise Refusal(
        "data_version",
        f"the database's table {_VERSIONS} says {said} of its schema; it must be one of {REVISIONS[0]} to {HEAD}",
        hint="it was changed by hand, holds two databases, or another program wrote it: restore it from a backup",
    )


def _newer(found: str) -> Refusal:
    return Refusal(
        "data_version",
        f"the database has schema {found}, this version of Acclimate reads {HEAD}: a newer version wrote it",
        hint="use the version that wrote it, or another database",
    )


def ready(engine: Engine) -> None:
    """Make the schema where the database is empty, or check that it is this version's.

    Raises:
        Refusal: data_version, database_unreachable, no_space, busy.
    """
    with database.refusing():
        with database.reading(engine) as connection:
            found = version(connection)
        if found == HEAD or (found is None and _migrate(engine, only_empty=True) == HEAD):
            return
    raise Refusal(
        "data_version",
        f"the database has schema {found}, this version of Acclimate reads {HEAD}",
        hint="back it up with the version that wrote it, stop what uses it, then `acclimate db upgrade` (with the same settings)",
    )


def upgrade(engine: Engine) -> list[str]:
    """Bring a database to this version's schema; what was done, a line each; nothing where there was nothing to do.

    Raises:
        Refusal: data_version, database_unreachable, no_space; busy, also where a dispatcher leads that an upgrade would pull the schema from.
    """
    steps: list[str] = []
    with database.refusing():
        _migrate(engine, steps=steps)
    return steps


def fill(engine: Engine, revision: str, put: Callable[[Connection], None]) -> None:
    """Make the schema of a revision in an empty database and have it filled, all in one transaction.

    Raises:
        Refusal: backup_invalid, where the database is not empty; data_version, for a revision that this version does not know.
    """
    if revision not in REVISIONS:
        raise _newer(revision)
    with database.refusing(), _one_at_a_time, engine.connect() as outer, _unchecked(outer):
        with database.written(outer) as connection:
            if (found := version(connection)) is not None:
                raise Refusal(
                    "backup_invalid",
                    f"the database to restore into is not empty: it has schema {found}",
                    hint="name an empty one in the setting `database`",
                )
            _run(connection, None, steps=[], to=revision)
            put(connection)
            _check_references(connection)


def _migrate(engine: Engine, *, only_empty: bool = False, steps: list[str] | None = None) -> str:
    """All steps in one transaction, which begins with the writers' lock; the revision at the end."""
    steps = [] if steps is None else steps
    with _one_at_a_time, engine.connect() as outer, _unchecked(outer):
        with database.written(outer) as connection:
            found = version(connection)
            if only_empty and found is not None:
                return found
            if found not in (None, HEAD):
                _check_unled(connection)
            _run(connection, found, steps=steps)
    return HEAD


@contextmanager
def _unchecked(outer: Connection) -> Iterator[None]:
    """Without SQLite's looking after references: a rebuilt table is dropped on the way. The check comes before the transaction's end."""
    if outer.dialect.name == "sqlite":
        # This can't be said inside a transaction.
        _driver(outer).execute("PRAGMA foreign_keys = OFF")
    try:
        yield
    finally:
        if outer.dialect.name == "sqlite":
            _driver(outer).execute("PRAGMA foreign_keys = ON")


def _check_references(connection: Connection) -> None:
    if connection.dialect.name == "sqlite" and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").all()):
        raise Refusal("data_version", f"the database refers to rows that it lacks: {broken[:3]}; nothing was changed")


def _run(connection: Connection, found: str | None, *, steps: list[str], to: str = HEAD) -> None:
    from alembic import command

    sqlite = connection.dialect.name == "sqlite"
    settings = _settings(connection)
    if not sqlite:
        postgres.unhurried(connection)
        _check_encoding(connection)
    if sqlite and found == "0001" and not inspect(connection).has_table(_VERSIONS):
        command.stamp(settings, found)
    if found != to:
        command.upgrade(settings, to)
        steps += [f"{number}: {what}" for number, what in _described(settings) if found is None or number > found]
    put_back = guards.install(connection)
    steps += [f"{what} was missing or altered: made" for what in put_back]
    _check_references(connection)


def _check_unled(connection: Connection) -> None:
    if not inspect(connection).has_table("leases"):
        return
    now = database.now(connection)
    found = connection.execute(
        text("SELECT holder, expires FROM leases WHERE expires > :now AND name <> 'cosigning'"), {"now": now}
    ).first()
    if found is not None:
        raise Refusal(
            "busy",
            f"the dispatcher {found.holder} leads over this database, of an older version; nothing was changed",
            hint=f"stop it and all others, and every API; if it was killed, its lease ends at {found.expires}",
        )


def _settings(connection: Connection) -> Any:
    from alembic.config import Config

    logging.getLogger("alembic").setLevel(logging.WARNING)
    settings = Config()
    settings.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    settings.attributes["connection"] = connection
    return settings


def _described(settings: Any) -> list[tuple[str, str]]:
    from alembic.script import ScriptDirectory

    found = ScriptDirectory.from_config(settings).walk_revisions()
    return sorted((script.revision, script.doc.rstrip(".")) for script in found)


def _check_encoding(connection: Connection) -> None:
    encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
    if encoding != "UTF8":
        raise Refusal(
            "config_invalid",
            f"the database has encoding {encoding}, names and texts need UTF8",
            hint="CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0",
        )


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection


def unfinished(engine: Engine, code: str) -> list[str]:
    """The rounds of an older database that are under way and pinned to other code: this version can't finish them.

    Args:
        engine: of the database.
        code: the digest of this version's code.

    Raises:
        Refusal: data_version, database_unreachable, busy.
    """
    ended = "SELECT round FROM log_entries WHERE type IN ('RankingPublished', 'RoundVoided')"
    query = f"SELECT data FROM log_entries WHERE type = 'RoundDefined' AND round NOT IN ({ended}) ORDER BY \"index\""
    with database.refusing(), database.reading(engine) as connection:
        if version(connection) in (None, HEAD):
            return []
        defined = [records.parse(bytes(data)) for data in connection.exec_driver_sql(query).scalars()]
    return [record.round for record in defined if record["code"] != code]


def missing(found: MetaData, expected: MetaData) -> list[str]:
    """Tables and columns, as table.column, that a database of this version's schema must have and lacks."""
    lacking = []
    for name, table in expected.tables.items():
        there = found.tables.get(name)
        if there is None:
            lacking.append(name)
        else:
            lacking += [f"{name}.{column.name}" for column in table.columns if column.name not in there.columns]
    return sorted(lacking)


def problems(engine: Engine, metadata: MetaData) -> list[str]:
    """What of a database is not as this version leaves it: schema, triggers, the log's numbering; empty where all is well.

    Raises:
        Refusal: database_unreachable, no_space, busy.
    """
    with database.refusing(), database.reading(engine) as connection:
        try:
            found = version(connection)
        except Refusal as refusal:
            return [refusal.sentence]
        if found != HEAD:
            return [f"the database has schema {found or 'none'}, this version reads {HEAD}: `acclimate db upgrade`"]
        return [
            *_differences(connection, metadata),
            *(f"{what} is missing or altered: `acclimate db upgrade` makes it" for what in guards.wrong(connection)),
            *_collations(connection),
            *_log(connection),
        ]


def _differences(connection: Connection, metadata: MetaData) -> list[str]:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    options = {"compare_type": True, "compare_server_default": True}
    found = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
    return [f"schema: {' '.join(_words(change))}" for change in found]


def _words(change: Any) -> list[str]:
    if isinstance(change, (tuple, list)):
        return [word for part in change for word in _words(part)]
    return [] if change is None or isinstance(change, dict) else [str(getattr(change, "name", None) or change)]


def _collations(connection: Connection) -> list[str]:
    if connection.dialect.name == "sqlite":
        return []
    query = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
    query += f" AND data_type IN ('text', 'character varying') AND collation_name IS DISTINCT FROM 'C' AND table_name <> '{_VERSIONS}'"
    return [
        f"schema: {row.table_name}.{row.column_name} is not compared by code points"
        for row in connection.execute(text(query))
    ]


def _log(connection: Connection) -> list[str]:
    query = 'SELECT COUNT(*) AS count, COALESCE(MAX("index") + 1, 0) AS size FROM log_entries'
    entries = connection.execute(text(query)).one()
    signed = connection.execute(text("SELECT COALESCE(MAX(size), 0) FROM log_checkpoints")).scalar_one()
    found = []
    if entries.count != entries.size:
        found.append(f"the log has {entries.count} entries, the last one's index is {entries.size - 1}: a gap")
    if signed > entries.size:
        found.append(f"the newest checkpoint holds {signed} entries, the log has {entries.size}: it was cut")
    return found
