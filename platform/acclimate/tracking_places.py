"""Where MLflow's results lie: its databases and tracking servers by their URI, apart from MLflow itself."""

from pathlib import Path

import httpx

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
