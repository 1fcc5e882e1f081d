"""Reading files that a stranger may have sent, or that somebody named by mistake: regular ones, and no more of them than they may hold."""

import codecs
import errno
import json
import math
import stat
from pathlib import Path
from typing import Any

from acclimate_competitions.errors import Refusal

LONGEST_KEY = 1 << 16
"""Bytes of a file that holds a key: it is a line, and some words beside it."""
LONGEST_DOCUMENT = 1 << 26
"""Bytes of a JSON document that somebody sent."""
_OTHERS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""How a text of another encoding begins, the longer mark first."""
_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}
_OF_THE_MACHINE = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM),
    }
)


def of_the_machine(error: BaseException | None) -> BaseException | None:
    """What the machine lacked (space, memory, open files, a permission), where an exception, or one that it was raised from, says so.

    It tells nothing about a file that was to be read or written: nobody is to be blamed for it.
    """
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE):
            return error
        if isinstance(error, Refusal) and error.code == "no_space" and error.__cause__ is None:
            return error
        error = error.__cause__
    return None


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


def decoded(data: bytes) -> str:
    """Bytes as UTF-8 text; the mark (BOM) that some editors put before it is none of its characters.

    Raises:
        ValueError: they are not UTF-8; a UnicodeDecodeError, with the place, unless they say themselves what else they are.
    """
    for mark, name in _OTHERS.items():
        if data.startswith(mark):
            raise ValueError(f"it is text in {name}, not UTF-8: save it as UTF-8")
    if data[1:2] == b"\0" or data[:1] == b"\0":
        raise ValueError("it is no text in UTF-8, but perhaps in UTF-16: save it as UTF-8")
    return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")


def text(path: Path, most: int, *, hint: str = "check the name and who owns it") -> str:
    """The text (UTF-8) of a regular file that holds at most so many bytes.

    Raises:
        Refusal: file_unreadable.
    """
    try:
        return decoded(read(path, most, hint=hint))
    except UnicodeDecodeError as error:
        raise Refusal("file_unreadable", f"{path} is not UTF-8 text: byte {error.start}", hint=hint) from error
    except ValueError as error:
        raise Refusal("file_unreadable", f"{path}: {error}", hint=hint) from error


def parse_json(data: str | bytes) -> Any:
    """The value of JSON that a stranger sent: every number in it is a finite one, as JSON has no other.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or says a number that is too large for one.
    """
    try:
        return json.loads(data, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON, or too large for one")
    return number


def document(path: Path, *, hint: str = "check that it is the file that was meant, and whole") -> Any:
    """The value of a JSON file, however deep or odd what is in it.

    Raises:
        Refusal: file_unreadable.
    """
    found = text(path, LONGEST_DOCUMENT, hint=hint)
    try:
        return parse_json(found)
    except ValueError as error:
        raise Refusal("file_unreadable", f"{path} is not JSON: {error}", hint=hint) from error
