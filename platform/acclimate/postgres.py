"""The database for several machines: how PostgreSQL is opened, who writes, and what its errors mean to us.

- Every writing transaction first takes one advisory lock, whichever process it is of: one writer at a time, as on SQLite, so that
  the log has no gaps and what was checked still holds when it is written. Reads wait for nobody: they see a snapshot.
- No wait is endless: for the server to answer, for the lock, for a statement, for a client that stands still with the lock.
- A connection that the server or the network ended is noticed before it is used again; the pool then begins anew.
"""

import contextlib
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError

from acclimate.contention import busy
from acclimate.redaction import beginning
from acclimate_competitions.errors import Refusal

CLOCK = "acclimate_clock"
_WRITERS = 0x61636C69  # the advisory lock's number; of the database, not of the server
# Shorter than the dispatchers' lease and what follows: a leader that was stopped while it writes must not stop the next one.
_IDLE_WRITER_SECONDS = 15
_IDLE_READER_SECONDS = 300
_STATEMENT_SECONDS = 60
_CONNECTIONS, _MORE_CONNECTIONS = 8, 24

_BUSY = {
    "55P03": "another process is writing",
    "40001": "other requests came between",
    "40P01": "other requests came between",
    "57014": "the statement took too long",
    "25P03": "the transaction stood still for too long",
    "25P04": "the transaction took too long",
    "53300": "it has no connection left",
}
_DISK = {"53100": "its disk is full", "58030": "its disk fails"}
_UNWRITABLE = {
    "25006": "it is read-only; is it a standby? name the primary server",
    "42501": "the login may not do this; let it own the database: ALTER DATABASE … OWNER TO …",
}
# What PostgreSQL takes no text or number for, although it is one.
_VALUES = frozenset({"22001", "22003", "22021", "22P05"})
# The first that fits. libpq gives no code for a connection that never was, so its words must do; others get the last hint.
_CAUSES = (
    (r"too many (connections|clients)|remaining connection slots", ""),
    (
        r"password authentication failed|no password supplied|role .* does not exist|not permitted to log in|no pg_hba\.conf",
        "check user and password in the setting `database`, and that pg_hba.conf lets them in from here",
    ),
    (
        r"database .* does not exist",
        "make it: CREATE DATABASE name ENCODING 'UTF8' OWNER user, or correct the name in the setting `database`",
    ),
    (r"certificate|ssl", "check sslmode and sslrootcert in the setting `database`, and the server's certificate"),
    (
        r"translate host name|resolve host|name or service not known|nodename nor servname",
        "no such host: correct it in the setting `database`",
    ),
    (
        r"connection refused|no such file or directory",
        "nothing listens there: start PostgreSQL, or correct host and port in the setting `database`",
    ),
    (r"timeout|timed out|unreachable", "host, port and firewall right? nothing answered in time"),
    (r"starting up|shutting down|recovery mode|administrator command", "PostgreSQL is (re)starting: try again shortly"),
    (r"", "is PostgreSQL running, and is the setting `database` right? the same request again is safe"),
)


def connect(url: str, *, clock: Callable[[], datetime] | None, wait: int, **options: Any) -> Engine:
    """An engine for the database of `url`; what the URL itself says about connections wins over what is said here.

    Args:
        url: postgresql+psycopg://….
        clock: replaces the database's clock in `database.now`; for tests only.
        wait: seconds to wait for the writers' lock, for a free connection.
        options: further ones of create_engine.

    Raises:
        Refusal: config_invalid.
    """
    limits = {
        "lock_timeout": f"{wait}s",
        "statement_timeout": f"{_STATEMENT_SECONDS}s",
        "idle_in_transaction_session_timeout": f"{_IDLE_READER_SECONDS}s",
        "TimeZone": "UTC",
        # What was answered with a receipt is not lost by a crash, whatever the server's own setting says.
        "synchronous_commit": "on",
    }
    try:
        query = make_url(url).query
    except (ArgumentError, ValueError):
        # Without its words: they may hold the password.
        raise Refusal(
            "config_invalid",
            "the setting `database` is not a URL that can be read",
            hint="such as postgresql://USER:PASSWORD@HOST:5432/DATABASE, with %XX for special characters in them",
        ) from None
    arguments: dict[str, Any] = {
        "connect_timeout": 5,
        "application_name": "acclimate",
        "client_encoding": "utf8",
        "keepalives_idle": 20,
        "keepalives_interval": 5,
        "keepalives_count": 4,
        "tcp_user_timeout": 40_000,
    }
    arguments = {name: value for name, value in arguments.items() if name not in query}
    theirs = query.get("options", "")
    ours = " ".join(f"-c {name}={value}" for name, value in limits.items() if name not in theirs)
    engine = create_engine(
        url,
        pool_size=_CONNECTIONS,
        max_overflow=_MORE_CONNECTIONS,
        pool_timeout=wait,
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        connect_args={**arguments, "options": f"{ours} {theirs}".strip()},
        execution_options={CLOCK: clock},
        **options,
    )
    event.listen(engine, "after_cursor_execute", _watched_again)
    event.listen(engine, "checkin", _as_the_server_says)
    return engine


def _as_the_server_says(driver: Any, _record: object) -> None:
    """Let the server say again whether a transaction may write.

    SQLAlchemy leaves a connection that served a reading transaction with READ WRITE of its own. That is refused on a standby in words that
    nobody awaits, and would write where the database says default_transaction_read_only.
    """
    if driver is not None and driver.read_only is not None:
        driver.read_only = None


def _watched_again(
    connection: Connection, _cursor: object, _statement: str, _parameters: object, _context: object, executemany: bool
) -> None:
    """Ask one thing more after many rows at once.

    psycopg sends them as a pipeline, after which PostgreSQL does not count how long the transaction stands still: a process that stops there
    would keep the writers' lock for as long as it is stopped.
    """
    driver = connection.connection.dbapi_connection
    if executemany and driver is not None:
        with contextlib.closing(driver.cursor()) as cursor:
            cursor.execute("SELECT 1")


def serialize(connection: Connection) -> None:
    """Take the writers' lock, which the end of the transaction gives back; what is read afterwards holds until then."""
    idle = f"set_config('idle_in_transaction_session_timeout', '{_IDLE_WRITER_SECONDS}s', true)"
    connection.execute(text(f"SELECT {idle}, pg_advisory_xact_lock({_WRITERS})"))


def unhurried(connection: Connection) -> None:
    """Let this transaction's statements take their time: a migration may rewrite a table."""
    connection.execute(text("SET LOCAL statement_timeout = 0"))
    connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))


def refusal(error: BaseException) -> Refusal | None:
    """What an error of psycopg means to who asked, or None where it is a fault of ours. Never tells a password."""
    state, kind = getattr(error, "sqlstate", None) or "", type(error).__name__
    words = beginning(" ".join(str(error).partition("\nMultiple connection attempts")[0].split()), 300)
    if state in _BUSY:
        return busy(_BUSY[state])
    if state in _DISK:
        return Refusal(
            "no_space", f"the database can't be written: {_DISK[state]}; nothing was lost", hint="make room there"
        )
    if state in _UNWRITABLE:
        return Refusal("database_unreachable", f"the database refuses this: {words}", hint=_UNWRITABLE[state])
    if state in _VALUES:
        return Refusal("request_invalid", f"a value can't be stored: {words}")
    if kind == "ProgrammingError" and "invalid connection option" in words:
        return Refusal(
            "config_invalid",
            f"the setting `database`: {words}",
            hint="correct what follows `?` in it: only libpq's connection options may stand there",
        )
    if state[:2] in ("08", "57", "28", "3D") or (kind in ("OperationalError", "ConnectionTimeout") and not state):
        hint = next(hint for pattern, hint in _CAUSES if re.search(pattern, words, re.IGNORECASE))
        if not hint:
            return busy(_BUSY["53300"], hint="raise max_connections there")
        return Refusal("database_unreachable", f"no answer from the database: {words}", hint=hint)
    return None
