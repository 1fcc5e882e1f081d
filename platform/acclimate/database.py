"""The connection to SQL: SQLite or PostgreSQL, by the URL; one way to write, one way to read, one clock.

- One writer at a time, on either; a reader sees one moment and waits for nobody.
- `acclimate_now()` is the database's clock in microseconds. Tests replace this one function.
- log_entries and results are insert-only by trigger (migrations/guards.py).
"""

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

# Threads of the finisher's import it through MLflow: two that import it at once see half of it.
import sqlalchemy.orm  # noqa: F401
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from acclimate import postgres, sqlite, sqlite_urls
from acclimate.contention import busy
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time

Clock = Callable[[], datetime]

WAIT_SECONDS = 20


def system_clock() -> datetime:
    """The real time; the one place that reads it for decisions where the database has no clock of its own."""
    return datetime.now(UTC)


def connect(url: str, *, clock: Clock | None = None) -> Engine:
    """An engine for the database at `url`; connects to nothing yet.

    Args:
        url: sqlite:///FILE or postgresql+psycopg://….
        clock: replaces the database's clock in `now`; for tests only.

    Raises:
        Refusal: config_invalid, for databases this version doesn't speak.
    """
    # The same values are storable on either: neither NaN in JSON, which is none, nor what PostgreSQL's text can't hold.
    # Errors go to the log, where what a statement was given has no place.
    options: dict[str, Any] = {"json_serializer": _json, "hide_parameters": True}
    if sqlite_urls.is_one(url):
        engine = sqlite.connect(url, clock=clock or system_clock, wait=WAIT_SECONDS, **options)
    elif url.startswith("postgresql+psycopg://"):
        engine = postgres.connect(url, clock=clock, wait=WAIT_SECONDS, **options)
    else:
        raise Refusal(
            "config_invalid",
            f"database {url.partition(':')[0]!r} is not supported by this version",
            hint="use sqlite:///FILE or postgresql://…, or leave the setting out",
        )
    event.listen(engine, "before_cursor_execute", _storable)
    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that may write, alone until it ends."""
    with engine.connect() as plain, written(plain) as connection:
        yield connection


@contextmanager
def written(plain: Connection) -> Iterator[Connection]:
    """A transaction that may write, on a connection that is in none."""
    if _is_sqlite(plain):
        plain = plain.execution_options(**{sqlite.BEGIN: "BEGIN IMMEDIATE"})
    with plain.begin():
        if not _is_sqlite(plain):
            postgres.serialize(plain)
        yield plain


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads, and sees one moment."""
    with engine.connect() as plain:
        snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        connection = plain if _is_sqlite(plain) else plain.execution_options(**snapshot)
        with connection.begin():
            yield connection


def _is_sqlite(connection: Connection) -> bool:
    return connection.dialect.name == "sqlite"


def now(connection: Connection) -> str:
    """The database's clock, as format_time writes it."""
    clock = connection.get_execution_options().get(postgres.CLOCK)
    return format_time(clock()) if clock else str(connection.exec_driver_sql("SELECT acclimate_now()").scalar_one())


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a database that is full, locked or out of reach into a refusal; any other error of it passes."""
    try:
        yield
    except PoolTimeout as error:
        raise busy("no connection became free") from error
    except StatementError as error:
        cause = error.orig
        if isinstance(cause, Refusal):
            raise cause from None
        if cause is None:
            raise
        refusal = sqlite.refusal(cause) if isinstance(cause, sqlite3.Error) else postgres.refusal(cause)
        if refusal is None:
            raise
        raise refusal from error


def _json(value: Any) -> str:
    try:
        return _dumps(value)
    except ValueError as error:
        raise Refusal(
            "request_invalid", f"JSON can't hold this: {error}", hint="NaN and infinity are not JSON"
        ) from None


_dumps = partial(json.dumps, allow_nan=False)


def _storable(
    _: Connection, __: object, ___: str, parameters: Any, ____: object, many: bool
) -> None:  # SQLAlchemy's order
    for row in parameters if many else (parameters,):
        for value in row.values() if isinstance(row, Mapping) else row or ():
            if isinstance(value, str) and "\0" in value:
                raise Refusal("request_invalid", "a text holds the character U+0000, which no name or reason may have")
