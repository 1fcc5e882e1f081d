"""Where MLflow's results lie: its databases and tracking servers by their URI, apart from MLflow itself."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx

from acclimate import sqlite_urls
from acclimate.redaction import place
from acclimate_competitions.errors import Refusal

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_server(uri: str) -> bool:
    """Whether a tracking server has the results, which keeps the artifacts too."""
    return uri.startswith(("http://", "https://"))


def driver(uri: str) -> str:
    """The URI with the database driver that this package brings."""
    scheme, mark, rest = uri.partition("://")
    return f"postgresql+psycopg{mark}{rest}" if scheme in ("postgresql", "postgres") else uri


def location(artifacts: Path | str) -> str:
    """The URI of a folder of artifacts, or the URI that is given."""
    if isinstance(artifacts, str) and "://" in artifacts:
        return artifacts.rstrip("/")
    return Path(artifacts).absolute().as_uri()


def reach(uri: str) -> None:
    """Knock at a tracking server, so that an address where nobody answers is told in a sentence and at once.

    Raises:
        Refusal: server_unreachable.
    """
    if not is_server(uri):
        return
    try:
        # A proxy is never the way to this machine itself.
        httpx.get(f"{uri.rstrip('/')}/health", timeout=10.0, trust_env=httpx.URL(uri).host not in _LOOPBACK)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Refusal(
            "server_unreachable",
            f"the MLflow server {place(uri)} does not answer: {type(error).__name__}",
            hint="is `acclimate mlflow` running there? `acclimate up` prints its address",
        ) from error


@contextlib.contextmanager
def no_stray_folder(uri: str) -> Iterator[None]:
    """Remove the folder that MLflow makes meanwhile in the place of one whose name has a percent sign.

    It makes sure of a SQLite file's folder by the letters of the URL, where a percent sign is written %25, and opens the right one.
    """
    made: list[Path] = []
    if sqlite_urls.is_one(uri) and (stray := Path(uri.removeprefix("sqlite:///"))) != sqlite_urls.file(uri):
        made = [folder for folder in stray.parents if not folder.exists()]
    try:
        yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def journal(uri: str) -> None:
    """Let SQLite write ahead: a commit waits for the disk once instead of four times, and readers never wait."""
    if uri.startswith("sqlite"):
        _execute(uri, "PRAGMA journal_mode = WAL")


def analyze(uri: str) -> None:
    """Give the database its statistics: MLflow's search by metric is a hundred times slower without."""
    if uri.startswith(("sqlite", "postgresql")):
        _execute(uri, "ANALYZE")


def _execute(uri: str, statement: str) -> None:
    from sqlalchemy import create_engine

    engine = create_engine(driver(uri))
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql(statement)
    finally:
        engine.dispose()
