"""Artifacts of MLflow's runs, as they are read back: from a folder where they lie, or from whatever store keeps them."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from acclimate.redaction import place
from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    import pyarrow as pa


def content(root: str, name: str, *, uri: str) -> bytes | None:
    """An artifact's bytes; None where it is not there, and only then: what is missing is written anew, and its run deleted before.

    Args:
        root: URI of the run's artifacts.
        name: of the artifact.
        uri: of MLflow, with its driver.

    Raises:
        Refusal: file_unreadable, server_unreachable.
    """
    if (file := _file(root, name)) is not None:
        try:
            return file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refusal("file_unreadable", f"the artifact {file}: {error.strerror or error}") from error
    import mlflow.artifacts

    try:
        with tempfile.TemporaryDirectory() as temporary:
            return Path(_fetched(root, name, uri=uri, folder=temporary)).read_bytes()
    except Exception as failed:
        # Each store says in words of its own that something is missing, or that it can't be reached; a list it gives only where it can.
        try:
            listed = mlflow.artifacts.list_artifacts(artifact_uri=root, tracking_uri=uri)
        except Exception as error:
            raise _unreachable(root, error) from error
        if name in [Path(one.path).name for one in listed]:
            raise _unreachable(f"{root}/{name}", failed) from failed
        return None


def parquet(root: str, name: str, *, uri: str) -> "pa.Table | None":
    """A table that is an artifact of a run, None where it is not there; arguments and refusals as content.

    Raises:
        pa.ArrowException: it is no table.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if (file := _file(root, name)) is not None and file.is_file():
        # A local artifact is read where it lies; others are fetched.
        return pq.ParquetFile(file).read()
    found = content(root, name, uri=uri)
    return None if found is None else pq.ParquetFile(pa.BufferReader(found)).read()


def _file(root: str, name: str) -> Path | None:
    return Path(url2pathname(urlsplit(f"{root}/{name}").path)) if root.startswith("file:") else None


def _fetched(root: str, name: str, *, uri: str, folder: str) -> str:
    import mlflow.artifacts

    found: str = mlflow.artifacts.download_artifacts(artifact_uri=f"{root}/{name}", dst_path=folder, tracking_uri=uri)
    return found


def _unreachable(what: str, error: Exception) -> Refusal:
    return Refusal(
        "server_unreachable",
        f"MLflow's artifacts {place(what)} can't be read: {type(error).__name__}",
        hint="see that the store of the artifacts answers, then again; nothing was changed",
    )
