"""Reading files that a stranger may have sent, or that somebody named by mistake: regular ones, and no more of them than they may hold."""

import json
import stat
from pathlib import Path
from typing import Any

from acclimate_competitions.errors import Refusal

LONGEST_KEY = 1 << 16
"""Bytes of a file that holds a key: it is a line, and some words beside it."""
LONGEST_DOCUMENT = 1 << 26
"""Bytes of a JSON document that somebody sent."""
_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def regular(path: Path, *, hint: str = "check the name and who owns it") -> Path:
    """The path, where a regular file is: anything else may keep whoever opens it waiting, or never end.

    Raises:
        Refusal: file_unreadable.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = error.strerror if isinstance(error, OSError) else None
        raise Refusal("file_unreadable", f"{path}: {why or error}", hint=hint) from error
    if kind != stat.S_IFREG:
        raise Refusal(
            "file_unreadable", f"{path} is no regular file, but {_KINDS.get(kind, 'something else')}", hint=hint
        )
    return path


def read(path: Path, most: int, *, hint: str = "check the name and who owns it") -> bytes:
    """The bytes of a regular file that holds at most so many.

    Raises:
        Refusal: file_unreadable.
    """
    try:
        with regular(path, hint=hint).open("rb") as stream:
            data = stream.read(most + 1)
    except OSError as error:
        raise Refusal("file_unreadable", f"{path}: {error.strerror or error}", hint=hint) from error
    if len(data) > most:
        raise Refusal(
            "file_unreadable", f"{path} has more than {most} bytes, which is too long for what it should be", hint=hint
        )
    return data


def text(path: Path, most: int, *, hint: str = "check the name and who owns it") -> str:
    """The text (UTF-8) of a regular file that holds at most so many bytes.

    Raises:
        Refusal: file_unreadable.
    """
    try:
        return read(path, most, hint=hint).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal("file_unreadable", f"{path} is not UTF-8 text: byte {error.start}", hint=hint) from error


def document(path: Path, *, hint: str = "check that it is the file that was meant, and whole") -> Any:
    """The value of a JSON file, however deep or odd what is in it.

    Raises:
        Refusal: file_unreadable.
    """
    found = text(path, LONGEST_DOCUMENT, hint=hint)
    try:
        return json.loads(found)
    except RecursionError as error:
        raise Refusal(
            "file_unreadable", f"{path} is not JSON that can be read: it is nested too deeply", hint=hint
        ) from error
    except ValueError as error:
        raise Refusal("file_unreadable", f"{path} is not JSON: {error}", hint=hint) from error
