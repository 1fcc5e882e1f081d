"""Whether the database takes what would be written: looked at by writing something that is undone at once, beside all that others do."""

from typing import Any

from sqlalchemy import Connection, Engine, text

from acclimate import database, sqlite
from acclimate_competitions.errors import Refusal

ROOM = 1 << 18
"""Bytes that are written and undone: more than the database has at hand without asking its disk."""
_PATIENCE_MS = 200


def look(engine: Engine) -> None:
    """Write and undo.

    Raises:
        Refusal: database_unreachable, where it is out of reach, read-only or a standby; no_space, where its disk is full.
    """
    try:
        with database.refusing(), engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                _sqlite(connection.execution_options(**{sqlite.BEGIN: "BEGIN IMMEDIATE"}))
            else:
                _postgresql(connection)
    except Refusal as refusal:
        # Somebody else writes, or waits for it: it can be written.
        if refusal.code != "busy":
            raise


def _sqlite(connection: Connection) -> None:
    driver: Any = connection.connection.driver_connection
    patience = driver.execute("PRAGMA busy_timeout").fetchone()[0]
    driver.execute(f"PRAGMA busy_timeout = {_PATIENCE_MS}").close()
    try:
        with connection.begin() as began:
            connection.execute(text("CREATE TABLE acclimate_room (bytes BLOB)"))
            connection.execute(text(f"INSERT INTO acclimate_room VALUES (zeroblob({ROOM}))"))
            began.rollback()
    finally:
        driver.execute(f"PRAGMA busy_timeout = {patience}").close()


def _postgresql(connection: Connection) -> None:
    with connection.begin() as began:
        query = "SELECT pg_is_in_recovery() AS standby, current_setting('transaction_read_only') AS closed"
        found = connection.execute(text(f"{query}, has_database_privilege(current_database(), 'TEMP') AS may")).one()
        if found.standby or found.closed == "on":
            what = "a standby" if found.standby else "read-only"
            hint = "name the primary server in the setting `database`, or end its default_transaction_read_only"
            raise Refusal("database_unreachable", f"the database is {what}: nothing can be written", hint=hint)
        if found.may:
            # Its pages are asked of the disk at once, seen by nobody else, and gone with the transaction.
            connection.execute(text("CREATE TEMPORARY TABLE acclimate_room (bytes TEXT) ON COMMIT DROP"))
            connection.execute(
                text(f"INSERT INTO acclimate_room SELECT repeat('x', 1000) FROM generate_series(1, {ROOM // 1000})")
            )
        began.rollback()
