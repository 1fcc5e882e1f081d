"""The connection to SQL: how SQLite is opened, what it must refuse, and what its errors mean to us.

- Foreign keys and WAL on; a transaction that writes begins IMMEDIATE, so that it never fails half way on a lock.
- `acclimate_now()` is the database's clock in microseconds; SQLite's own has milliseconds. Tests replace this one function.
- log_entries and results are insert-only by trigger. `INSERT OR REPLACE` deletes without firing delete triggers unless
  recursive_triggers is on; the insert triggers refuse it on any connection, whoever opened it.
"""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, create_engine, event, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time

Clock = Callable[[], datetime]

WAIT_SECONDS = 20
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_UNWRITABLE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})

_TRIGGERS = """
CREATE TRIGGER IF NOT EXISTS log_entries_no_update BEFORE UPDATE ON log_entries
  BEGIN SELECT RAISE(ABORT, 'log_entries is insert-only'); END;
CREATE TRIGGER IF NOT EXISTS log_entries_no_delete BEFORE DELETE ON log_entries
  BEGIN SELECT RAISE(ABORT, 'log_entries is insert-only'); END;
CREATE TRIGGER IF NOT EXISTS log_entries_in_order BEFORE INSERT ON log_entries
  WHEN NEW."index" <> COALESCE((SELECT MAX("index") + 1 FROM log_entries), 0)
  BEGIN SELECT RAISE(ABORT, 'log_entries is insert-only and without gaps'); END;
CREATE TRIGGER IF NOT EXISTS results_no_update BEFORE UPDATE ON results
  BEGIN SELECT RAISE(ABORT, 'results is insert-only'); END;
CREATE TRIGGER IF NOT EXISTS results_no_delete BEFORE DELETE ON results
  BEGIN SELECT RAISE(ABORT, 'results is insert-only'); END;
CREATE TRIGGER IF NOT EXISTS results_no_replace BEFORE INSERT ON results
  WHEN EXISTS (SELECT 1 FROM results WHERE stage = NEW.stage)
  BEGIN SELECT RAISE(ABORT, 'results is insert-only: this stage has a result'); END;
"""


def system_clock() -> datetime:
    """The real time; the one place that reads it for decisions."""
    return datetime.now(UTC)


def connect(url: str, *, clock: Clock) -> Engine:
    """An engine for the database at `url`.

    Raises:
        Refusal: config_invalid, for databases this version doesn't speak.
    """
    if not url.startswith("sqlite:///") or ":memory:" in url:
        raise Refusal(
            "config_invalid",
            f"database {url.partition(':')[0]!r} is not supported by this version",
            hint="use sqlite:///FILE, or leave the setting out",
        )
    # SQLite would make a file that everybody reads; its -wal and -shm get the mode of this one. What fails here fails again there.
    with suppress(OSError):
        os.close(os.open(make_url(url).database or "", os.O_CREAT | os.O_RDONLY, 0o600))
    engine = create_engine(url, pool_size=8, max_overflow=120, pool_timeout=WAIT_SECONDS)

    def opened(connection: Any, _: object) -> None:
        # SQLAlchemy, not the driver, says when a transaction begins; see `begin` below.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout = {WAIT_SECONDS * 1000}",
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "recursive_triggers = ON",
        ):
            connection.execute(f"PRAGMA {pragma}").close()
        connection.create_function("acclimate_now", 0, lambda: format_time(clock()))

    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("acclimate_begin", "BEGIN"))

    event.listen(engine, "connect", opened)
    event.listen(engine, "begin", begin)
    return engine


def create(engine: Engine, metadata: MetaData, *, version: int) -> None:
    """Make tables and triggers where they are missing, and check the schema's version.

    Raises:
        Refusal: data_version.
    """
    with engine.connect().execution_options(acclimate_begin="BEGIN IMMEDIATE") as connection, connection.begin():
        found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        if found == version:
            return
        if found != 0:
            raise Refusal(
                "data_version",
                f"the database has schema {found}, this version of Acclimate reads {version}",
                hint="use the version that wrote it, or another data folder",
            )
        metadata.create_all(connection)
        for statement in _TRIGGERS.split("END;"):
            if statement.strip():
                connection.exec_driver_sql(statement + "END")
        connection.exec_driver_sql(f"PRAGMA user_version = {version}")


def now(connection: Connection) -> str:
    """The database's clock, as format_time writes it."""
    return str(connection.execute(text("SELECT acclimate_now()")).scalar_one())


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a full or locked database into a refusal; any other database error passes."""
    try:
        yield
    except PoolTimeout as error:
        raise busy("no connection became free") from error
    except DBAPIError as error:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        if code in _BUSY:
            raise busy(str(error.orig)) from error
        if code in _UNWRITABLE:
            raise Refusal(
                "no_space",
                f"the database can't be written: {error.orig}; nothing was lost",
                hint="make room on the disk (or make the data folder writable) and do the same again",
            ) from error
        raise


def busy(why: str) -> Refusal:
    """The refusal of a locked database."""
    return Refusal("busy", f"the database is busy: {why}", hint="the same request again in a moment will do")


def is_full(error: OSError) -> bool:
    """Whether a file could not be written because the disk is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
