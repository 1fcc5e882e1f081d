"""Files that are written for good: whole or not at all, lasting, and refused by the right name where the disk gives no more."""

import contextlib
import errno
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

_IN_THE_WAY = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL),
    }
)
"""What the system says where a file or folder can't be made at a place that was named."""


def write(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file whole or not at all, in the place of one that is there; once it is written, it lasts.

    Raises:
        Refusal: no_space, file_unreadable.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _draft(path, data, mode=mode) as draft:
            draft.replace(path)
            sync_folder(path.parent)
    except OSError as error:
        raise failed(path, error) from error


def require_replaceable(path: Path, begins: bytes) -> None:
    """Refuse a name that somebody gave for a result, where something else has it: a key, a device, a link, another kind of file.

    Args:
        path: the name; where nothing is, it is free.
        begins: the first bytes of a file of the result's kind, which may be replaced.

    Raises:
        Refusal: conflict, file_unreadable.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file():
        raise _taken(path, "is no regular file")
    try:
        with path.open("rb") as stream:
            found = stream.read(len(begins))
    except OSError as error:
        raise failed(path, error) from error
    # An empty file has nothing to lose.
    if found and found.lower() != begins:
        raise _taken(path, "exists already and is something else")


def require_place(path: Path, *, folder: bool) -> None:
    """Refuse a place that could not be made before anything is asked of a server; nothing is left there.

    Args:
        path: where a file or a folder is to be.
        folder: it is to be a folder, so that no file may be there; what may be written over, `require_replaceable` knows.

    Raises:
        Refusal: no_space, file_unreadable.
    """
    with told(path):
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except FileNotFoundError:
            above = next(each for each in path.absolute().parents if each.is_dir())
            tempfile.TemporaryFile(dir=above).close()
            return
        if folder and not is_folder:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _taken(path: Path, why: str) -> Refusal:
    return Refusal("conflict", f"{path} {why}; nothing was written over", hint="name another file")


def write_new(path: Path, data: bytes) -> None:
    """Write a new file of mode 0600, whole or not at all; one that is there stays.

    Raises:
        FileExistsError: where one is there.
        Refusal: no_space, file_unreadable.
    """
    try:
        with _draft(path, data, mode=0o600) as draft:
            # A hard link fails where the name is taken; a rename would replace what another process just wrote.
            path.hardlink_to(draft)
    except FileExistsError:
        raise
    except OSError as error:
        raise failed(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON with mode 0600, whole or not at all.

    Raises:
        Refusal: no_space, file_unreadable.
    """
    write(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read what write_json wrote.

    Raises:
        Refusal: file_unreadable.
    """
    return reading.document(path)


def sync_folder(folder: Path) -> None:
    """Make new and changed names in a folder last, also where the power goes; Windows has no such call, and does so by itself.

    Raises:
        OSError: where the folder can't be opened.
    """
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Whether a file could not be written because the disk, a quota or the largest size of a file is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def failed(path: Path, error: OSError) -> Refusal:
    """The refusal for an error of the operating system on a path: no_space or file_unreadable."""
    if is_full(error):
        return Refusal("no_space", f"no space to write {path}", hint="free some space and repeat the command")
    return Refusal("file_unreadable", f"{path}: {error.strerror or error}", hint="check the name and who owns it")


def of_the_system(error: OSError) -> Refusal | None:
    """The refusal for an error of the operating system on a file or folder that a command was to read, make or write; None where it is of none."""
    if error.filename is not None and not isinstance(error.filename, int):
        path = Path(os.fsdecode(error.filename))
        refusal = failed(path, error)
        if refusal.code == "file_unreadable" and error.errno in _IN_THE_WAY:
            hint = "name another place: a folder that is there, or can be made, and that you may write"
            return Refusal("file_unreadable", refusal.sentence, hint=hint)
        return refusal
    if is_full(error):
        return Refusal("no_space", "no space to write a file", hint="free some space and repeat the command")
    return None


@contextlib.contextmanager
def told(place: Path) -> Iterator[None]:
    """Turn what the operating system says while a place is read or written into a refusal that names the file, else the place.

    Raises:
        Refusal: no_space, file_unreadable.
    """
    try:
        yield
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else str(place)
        raise failed(Path(name), error) from error


@contextlib.contextmanager
def _draft(path: Path, data: bytes, *, mode: int) -> Iterator[Path]:
    """A file beside `path` that holds the data, on the disk; what still has its name at the end is removed.

    Raises:
        OSError: whatever the system says.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)
