"""MLflow's own tables in a database of SQLite: all of them or none.

SQLite commits each table by itself, and MLflow does not go on where a process that was making them was killed: it would say for ever that one
of them exists already. So they are made in a file beside, under a lock, and copied from there in one transaction: into the file that is there,
as another process may have it open. PostgreSQL makes all of them in one transaction itself.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
from pathlib import Path

from acclimate import sqlite_urls, tracking_places
from acclimate_competitions.errors import Refusal, installing

_PARTS = ("", "-journal", "-wal", "-shm")
_ANY_TABLE = "SELECT 1 FROM sqlite_master LIMIT 1"


def begin(uri: str, artifacts: Path | str | None) -> None:
    """Make MLflow's tables where they are to be in a database of SQLite that has none.

    Args:
        uri: MLflow tracking URI.
        artifacts: where its default experiment keeps artifacts.

    Raises:
        Refusal: extra_missing.
    """
    path = _file(uri)
    if path is None or _has_tables(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if _has_tables(path):
            return
        for part in _PARTS:
            # Of a process that was killed here.
            draft.with_name(f"{draft.name}{part}").unlink(missing_ok=True)
        _create(sqlite_urls.of(draft), "mlruns" if artifacts is None else tracking_places.location(artifacts))
        _copy(draft, path)
        draft.unlink()


def _copy(draft: Path, path: Path) -> None:
    """All that a database holds into one that has no tables; nothing where it got some meanwhile, as MLflow then makes them itself."""
    with (
        contextlib.closing(sqlite3.connect(draft)) as made,
        contextlib.closing(sqlite3.connect(path, timeout=60.0, isolation_level=None)) as database,
    ):
        database.execute("BEGIN EXCLUSIVE")
        if database.execute(_ANY_TABLE).fetchone() is None:
            for statement in made.iterdump():
                if statement not in ("BEGIN TRANSACTION;", "COMMIT;"):
                    database.execute(statement)
        database.execute("COMMIT")


def _create(uri: str, artifacts: str) -> None:
    try:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    except ModuleNotFoundError as error:
        raise Refusal(
            "extra_missing", "this needs mlflow, which is not installed", hint=installing("analysis")
        ) from error
    # It tells of every table it makes.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    with tracking_places.no_stray_folder(uri):
        SqlAlchemyStore(uri, artifacts).engine.dispose()


def _file(uri: str) -> Path | None:
    """The file of a database of SQLite."""
    return sqlite_urls.file(uri).absolute() if sqlite_urls.is_one(uri) else None


def _has_tables(path: Path) -> bool:
    if not path.is_file():
        return False
    with contextlib.closing(sqlite3.connect(path, timeout=60.0)) as connection:
        return connection.execute(_ANY_TABLE).fetchone() is not None
