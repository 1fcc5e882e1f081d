"""Files that become blobs or copies of them: whole or not there, on the disk before they are visible, their owner's alone."""

import errno
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from acclimate_competitions.errors import Refusal

if TYPE_CHECKING:
    from acclimate_runners.blobs import FolderBlobs

# EFBIG: the process's own limit on file sizes, which is a full disk to whoever set it.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FolderIncoming:
    """A blob on its way into a folder: written to tmp/, flushed, renamed into place."""

    def __init__(self, blobs: "FolderBlobs", *, digest: str | None, size: int | None) -> None:
        if digest is not None:
            blobs.path(digest)
        self._blobs, self._digest, self._declared = blobs, digest, size
        self._hash, self._size = hashlib.sha256(), 0
        self._temporary = blobs.scratch / uuid.uuid4().hex
        with space(self._temporary):
            self._file = self._temporary.open("xb")

    def __enter__(self) -> "FolderIncoming":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, data: bytes) -> None:
        """Take the next piece.

        Raises:
            Refusal: upload_mismatch where it would exceed the declared size, no_space.
        """
        if self._declared is not None and self._size + len(data) > self._declared:
            raise Refusal("upload_mismatch", f"more bytes came than the {self._declared} declared")
        with space(self._temporary):
            self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> tuple[str, int]:
        """Check what was declared and make the blob visible; returns digest and size.

        Raises:
            Refusal: upload_mismatch, no_space.
        """
        found = "sha256:" + self._hash.hexdigest()
        if self._declared is not None and self._size != self._declared:
            raise Refusal("upload_mismatch", f"{self._size} bytes came, {self._declared} were declared")
        if self._digest is not None and found != self._digest:
            raise Refusal("upload_mismatch", f"the bytes hash to {found}, {self._digest} was declared")
        target = self._blobs.path(found)
        with space(self._temporary):
            flush(self._file)
            self._temporary.chmod(0o400)
            private(target.parent, below=self._blobs.root)
            self._temporary.replace(target)
            flush_folder(target.parent)
        return found, self._size

    def abort(self) -> None:
        """Remove what came so far, unless it is stored already."""
        # Closing flushes what is buffered, and may meet the full disk again; the bytes are dropped anyway.
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


@contextmanager
def written(to: Path) -> Iterator[IO[bytes]]:
    """A temporary file beside `to` that becomes it when the block ends well, and vanishes when it doesn't.

    Raises:
        Refusal: no_space.
    """
    temporary = to.parent / f".{uuid.uuid4().hex}"
    try:
        with space(temporary):
            to.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as stream:
                yield stream
            temporary.replace(to)
    finally:
        temporary.unlink(missing_ok=True)


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk is full; libraries that write by themselves say it in words alone."""
    words = str(error)
    known = "No space left on device" in words or any(f"(os error {number})" in words for number in _FULL)
    return known or (isinstance(error, OSError) and error.errno in _FULL)


@contextmanager
def space(path: Path) -> Iterator[None]:
    """Turn a full disk into the refusal no_space."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise Refusal(
            "no_space",
            f"no space is left for {path.parent}; nothing was lost",
            hint="free some space and do the same again",
        ) from error


def private(folder: Path, *, below: Path) -> Path:
    """Make a folder, and those above it down from `below`, for their owner alone, whatever the mask says."""
    for made in (below, *(below / part for part in reversed(folder.relative_to(below).parents[:-1])), folder):
        if not made.is_dir():
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def swept(folder: Path, *, older_than: float, but: str = "\0") -> int:
    """Remove files that were not written to for so many seconds, but those whose name begins so; returns how many."""
    removed = 0
    for path in folder.glob("*"):
        if path.name.startswith(but):
            continue
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > older_than:
                path.unlink()
                removed += 1
    return removed


def flush(stream: IO[bytes]) -> None:
    """Have what was written on the disk, and close the file."""
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def flush_folder(folder: Path) -> None:
    """The same for the names in a folder."""
    # A rename survives a power cut only once its folder is flushed too.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
