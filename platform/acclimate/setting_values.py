"""How a setting's value is read, from a text of the environment or from a value of the TOML file.

Each reader gets the value and the folder from which relative paths are meant, and gives the value in force. It raises ValueError with
the end of a sentence that begins with the value.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from acclimate import sqlite_urls
from acclimate_competitions.errors import Refusal

MOST_WITNESSES = 32
_ORIGIN = re.compile(r"[A-Za-z0-9.:-]+(/[A-Za-z0-9._-]+)*")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://[^\s]+")
_TRACKING = ("postgresql", "mysql", "mssql", "http://", "https://", "file:")


def text(value: Any, _: Path) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be text that is not empty")
    return value


def integer(low: int, high: int) -> Callable[[Any, Path], int]:
    """A reader of whole numbers from `low` to `high`."""

    def read(value: Any, _: Path) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return read


def one_of(*choices: str) -> Callable[[Any, Path], str]:
    """A reader of one of some words."""

    def read(value: Any, _: Path) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return read


def origin(value: Any, _: Path) -> str:
    """A log's name."""
    if not isinstance(value, str) or not _ORIGIN.fullmatch(value) or len(value) > 200:
        raise ValueError("must look like a host with an optional path, such as acclimate.example.org/log")
    return value


def host(value: Any, _: Path) -> str:
    """A host's name or address."""
    if not isinstance(value, str) or not _HOST.fullmatch(value):
        raise ValueError("must be a host name or an address without a port, such as 127.0.0.1 or ::")
    return value


def path(value: Any, folder: Path) -> Path:
    """A path, from the folder where it is relative."""
    return plainly(folder / Path(text(value, folder)).expanduser())


def plainly(path: Path) -> Path:
    """A path without `..` and `.`, as it is shown and kept; as it stands where a link in it makes that another place."""
    plain = Path(os.path.normpath(path))
    try:
        return plain if plain.resolve() == path.resolve() else path
    except (OSError, ValueError, RuntimeError):
        return path


def file_or_none(value: Any, folder: Path) -> Path | None:
    """A file's path; None where it is empty."""
    return None if value == "" else path(value, folder)


def folder_or_uri(value: Any, folder: Path) -> str:
    """A folder, made absolute, or a URI as it stands."""
    given = text(value, folder)
    if "://" in given and not _URI.fullmatch(given):
        raise ValueError("must be a folder, or a URI such as s3://BUCKET/PREFIX")
    return given if "://" in given else str(path(given, folder))


def blobs(value: Any, folder: Path) -> str:
    """A folder, or a place in S3."""
    place = folder_or_uri(value, folder)
    if "://" in place and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._-]+)*", place):
        raise ValueError("must be a folder, or s3://BUCKET or s3://BUCKET/PREFIX")
    return place


def _sqlite(text: str, folder: Path) -> str:
    """A SQLite URL, its file made absolute: the processes of an installation need not share a current folder."""
    return sqlite_urls.of(folder / sqlite_urls.file(text).expanduser(), text.partition("?")[2])


def _one_at(url: str) -> None:
    """Refuse what would be read as another host, and named in messages: the rest of a password that holds an @."""
    if url.partition("://")[2].partition("/")[0].count("@") > 1:
        raise ValueError("has more than one @ before its host: write %40 for one in a password")


def database(value: Any, folder: Path) -> str:
    """A database's URL, its file made absolute."""
    given = text(value, folder)
    for scheme in ("postgresql://", "postgres://"):
        if given.startswith(scheme):
            given = "postgresql+psycopg://" + given.removeprefix(scheme)
    if sqlite_urls.is_one(given):
        return _sqlite(given, folder)
    _one_at(given)
    if not re.fullmatch(r"postgresql\+psycopg://[^\s/]*/[^\s/?]+(\?\S+)?", given):
        raise ValueError("must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    return given


def tracking(value: Any, folder: Path) -> str:
    """An MLflow tracking URI."""
    given = text(value, folder)
    if given.startswith("sqlite:"):
        if not sqlite_urls.is_one(given):
            raise ValueError("must be sqlite:///FILE, or sqlite:////FILE from the root")
        return _sqlite(given, folder)
    if not given.startswith(_TRACKING) or re.search(r"\s", given):
        raise ValueError("must be sqlite:///FILE, http(s)://HOST:PORT, or another database's URL")
    if given.startswith("http") and not _is_address(given):
        raise ValueError(
            "is no address that can be read: characters of a password such as / ? # @ are written %2F %3F %23 %40"
        )
    _one_at(given)
    return given


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0 and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:
        return False


def endpoint(value: Any, _: Path) -> str:
    """An address of an S3 server, or empty."""
    if not isinstance(value, str) or not re.fullmatch(r"(https?://[^\s/@?#]+/?)?", value):
        raise ValueError("must be an address such as http://s3.example.org:8333, or empty")
    return value


def ray_address(value: Any, _: Path) -> str:
    """A Ray cluster's address, or local."""
    if not isinstance(value, str) or not re.fullmatch(
        r"local|[^\s:/@]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}", value
    ):
        raise ValueError("must be local, or HOST:PORT of the cluster's head")
    return value


def witnesses(value: Any, _: Path) -> tuple[str, ...]:
    """Addresses and keys of witnesses: a list, or a text with one a line or a semicolon between them."""
    # What asks them brings a whole HTTP client along, which most commands that read settings don't need.
    from acclimate import witness_client

    given = re.split(r"[;\n]", value) if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
        raise ValueError("must be a list of witnesses, each an address, a blank and a key")
    try:
        found = witness_client.parse_endpoints([one for one in map(str.strip, given) if one])
    except Refusal as refusal:
        raise ValueError(f"can't be read: {refusal.sentence}; {refusal.hint}") from refusal
    if len(found) > MOST_WITNESSES:
        raise ValueError(f"names {len(found)} witnesses, at most {MOST_WITNESSES} are possible")
    return tuple(one.text() for one in found)
