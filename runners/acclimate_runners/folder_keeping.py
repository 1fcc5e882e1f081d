"""What a folder of blobs keeps: its notes, the list of its blobs, and which of them may go."""

import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from acclimate_competitions import digests
from acclimate_runners.placing import flush, flush_folder, private, space, swept

if TYPE_CHECKING:
    from acclimate_runners.blobs import FolderBlobs

_ASIDE = "removing-"
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_NOTE = re.compile(rf"(?!tmp(/|$)|quarantine(/|$)|[0-9a-f]{{2}}(/|$)){_PART}(/{_PART})*")


@dataclass(frozen=True)
class Stored:
    """A blob as a listing has it.

    Attributes:
        digest: the blob's.
        size: in bytes.
        age: seconds since it was stored or kept, by the store's clock.
    """

    digest: str
    size: int
    age: float


def note_name(name: str) -> str:
    """The name of a note, which lies where no blob lies, nor what is on its way or set aside; raises ValueError for another."""
    if not _NOTE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a note, such as attempts/0a1b/1/manifest.json")
    return name


def note(root: Path, name: str) -> bytes | None:
    """See blobs.Blobs.note."""
    try:
        return (root / note_name(name)).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def put_note(blobs: "FolderBlobs", name: str, data: bytes) -> None:
    """See blobs.Blobs.put_note.

    Raises:
        Refusal: no_space.
    """
    path, temporary = blobs.root / note_name(name), blobs.scratch / uuid.uuid4().hex
    try:
        with space(temporary):
            with temporary.open("xb") as stream:
                stream.write(data)
                temporary.chmod(0o600)
                flush(stream)
            for last in (False, True):
                private(path.parent, below=blobs.root)
                try:
                    temporary.replace(path)
                    break
                except FileNotFoundError:
                    # drop_note of its only neighbour has just taken the folder away.
                    if last:
                        raise
            flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def notes(root: Path, prefix: str) -> list[str]:
    """See blobs.Blobs.notes."""
    below = root / note_name(prefix.removesuffix("/"))
    return sorted(path.relative_to(root).as_posix() for path in below.rglob("*") if path.is_file())


def drop_note(root: Path, name: str) -> None:
    """Remove a note, and the folders that are empty then."""
    path = root / note_name(name)
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
    for folder in path.parents:
        if folder == root:
            break
        with suppress(OSError):
            folder.rmdir()


def listing(root: Path) -> Iterator[Stored]:
    """See blobs.Blobs.listing."""
    for folder in sorted(root.glob("[0-9a-f][0-9a-f]")):
        now = clock(root)
        for path in sorted(folder.iterdir()):
            digest = f"sha256:{folder.name}{path.name}"
            with suppress(FileNotFoundError):
                if digests.is_digest(digest):
                    found = path.stat()
                    yield Stored(digest, found.st_size, now - found.st_mtime)


def keep(blobs: "FolderBlobs", digest: str) -> bool:
    """See blobs.Blobs.keep."""
    path = blobs.path(digest)
    # Where removal has moved the file away before this, it is missed; where it does afterwards, it sees the new time. Who may only read
    # the folder (or reads one of another user's) can't keep anything.
    with suppress(OSError):
        os.utime(path)
    return path.is_file()


def remove(blobs: "FolderBlobs", digest: str, *, older_than: float) -> bool:
    """See blobs.Blobs.remove."""
    path, aside = blobs.path(digest), blobs.scratch / f"{_ASIDE}{digest[7:]}-{uuid.uuid4().hex[:8]}"
    try:
        now = clock(blobs.root)
        if not _older(path, older_than, now=now):
            return False
        path.rename(aside)
    except FileNotFoundError:
        return False
    # It was kept between the look and the move. Whoever comes later misses it, and stores it again.
    if not _older(aside, older_than, now=now):
        put_back(blobs.root, aside)
        return False
    aside.unlink()
    return True


def put_back(root: Path, aside: Path) -> None:
    """Put back what a removal moved away and did not remove, for it was kept or the process was killed."""
    digest = aside.name.removeprefix(_ASIDE).partition("-")[0]
    with suppress(FileExistsError):
        private(root / digest[:2], below=root)
        (root / digest[:2] / digest[2:]).hardlink_to(aside)
    aside.unlink()


def sweep(root: Path, *, older_than: float) -> int:
    """Remove what crashed writers left in root/tmp, and put back what a crashed removal did; how many files."""
    done = 0
    for aside in (root / "tmp").glob(f"{_ASIDE}*"):
        # By when it was moved: the file's other time says when the blob was stored.
        with suppress(OSError):
            if clock(root) - aside.stat().st_ctime > older_than:
                put_back(root, aside)
                done += 1
    return done + swept(root / "tmp", older_than=older_than, but=_ASIDE)


def clock(root: Path) -> float:
    """What time it is where the blobs lie, as the times of their files are: a file server's clock may be another than this machine's."""
    try:
        with tempfile.TemporaryFile(dir=root / "tmp") as stream:
            return os.fstat(stream.fileno()).st_mtime
    except OSError:
        # It may only be read, or takes no file more; garbage must still be collected where a disk is full.
        return time.time()


def _older(path: Path, seconds: float, *, now: float) -> bool:
    return now - path.stat().st_mtime > seconds
