"""The embedded database: how SQLite is opened, and what its errors mean to us.

Foreign keys and WAL on; a transaction that writes begins IMMEDIATE, so that it never fails half way on a lock. Its own clock has
milliseconds, so `acclimate_now()` is registered on each connection. `INSERT OR REPLACE` deletes without firing delete triggers
unless recursive_triggers is on; the insert triggers refuse it on any connection, whoever opened it.
"""

import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url

from acclimate import sqlite_urls
from acclimate.contention import busy
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time

BEGIN = "acclimate_begin"
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_UNWRITABLE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})


def connect(url: str, *, clock: Callable[[], datetime], wait: int, **options: Any) -> Engine:
    """An engine for the file of `url`, which is made for its owner alone where it is not there.

    Args:
        url: sqlite:///FILE.
        clock: what `acclimate_now()` answers.
        wait: seconds to wait for a lock.
        options: further ones of create_engine.
    """
    # SQLite would make a file that everybody reads; its -wal and -shm get the mode of this one. What fails here fails again there.
    with suppress(OSError):
        os.close(os.open(sqlite_urls.file(url), os.O_CREAT | os.O_RDONLY, 0o600))
    engine = create_engine(
        make_url(url).set(database=str(sqlite_urls.file(url))),
        pool_size=8,
        max_overflow=120,
        pool_timeout=wait,
        **options,
    )

    def opened(connection: Any, _: object) -> None:
        # SQLAlchemy, not the driver, says when a transaction begins; see `begin` below.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout = {wait * 1000}",
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
            "recursive_triggers = ON",
        ):
            connection.execute(f"PRAGMA {pragma}").close()
        connection.create_function("acclimate_now", 0, lambda: format_time(clock()))

    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(BEGIN, "BEGIN"))

    event.listen(engine, "connect", opened)
    event.listen(engine, "begin", begin)
    return engine


def refusal(error: sqlite3.Error) -> Refusal | None:
    """What an error of SQLite means to who asked, or None where it is a fault of ours."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _BUSY:
        return busy(str(error))
    if code in _UNWRITABLE:
        return Refusal(
            "no_space",
            f"the database can't be written: {error}; nothing was lost",
            hint="see that its folder is there and may be written to, make room on the disk, and do the same again",
        )
    if code == sqlite3.SQLITE_NOTADB:
        return Refusal(
            "data_version",
            "the database's file is not one of SQLite",
            hint="name another file in the setting `database`, or restore it from a backup",
        )
    if code == sqlite3.SQLITE_CORRUPT:
        return Refusal(
            "data_version",
            f"the database's file is damaged: {error}",
            hint="restore it from a backup; nothing was changed",
        )
    return None
