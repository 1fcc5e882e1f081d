"""MLflow's own tables in a database of SQLite: all of them or none.

SQLite commits each table by itself, and MLflow does not go on where a process that was making them was killed: it would say for ever that one
of them exists already. So they are made in a file beside, under a lock, which then takes the place of the database. PostgreSQL makes all of
them in one transaction.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
from pathlib import Path

from acclimate import tracking_places
from acclimate_competitions.errors import Refusal, installing

_PARTS = ("", "-journal", "-wal", "-shm")


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
            # Of a process that was killed here; and of a database that is still empty, what was not written into it.
            draft.with_name(f"{draft.name}{part}").unlink(missing_ok=True)
            path.with_name(f"{path.name}{part}").unlink(missing_ok=True)
        _create(f"sqlite:///{draft}", "mlruns" if artifacts is None else tracking_places.location(artifacts))
        draft.replace(path)


def _create(uri: str, artifacts: str) -> None:
    try:
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    except ModuleNotFoundError as error:
        raise Refusal(
            "extra_missing", "this needs mlflow, which is not installed", hint=installing("analysis")
        ) from error
    # It tells of every table it makes.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    SqlAlchemyStore(uri, artifacts).engine.dispose()


def _file(uri: str) -> Path | None:
    """The file of a database of SQLite."""
    if not uri.startswith("sqlite"):
        return None
    from sqlalchemy.engine import make_url

    name = make_url(uri).database
    return Path(name).absolute() if name and not name.startswith((":", "file:")) else None


def _has_tables(path: Path) -> bool:
    if not path.is_file():
        return False
    with contextlib.closing(sqlite3.connect(path, timeout=60.0)) as connection:
        return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None
