"""Content-addressed bytes: what every store of them promises (Blobs), and the store that is a folder (FolderBlobs; s3.py is the other).

- Nothing partial is ever visible.
- Storing the same bytes twice is one blob, whoever races; a blob is never changed afterwards.
- Whoever gets a blob gets bytes that hash to its digest: what doesn't is put into quarantine and refused.
- Where there is no room the store refuses and leaves nothing behind.

- Only what nobody has stored or kept for a while can be removed, whoever races.

Beside them lie notes: small texts by name, which may be replaced and dropped, such as the manifests of attempts.

The folder's layout is root/ab/cdef…, one file a blob, named by its own sha256. Bytes go to root/tmp, are flushed to the disk, and only
then renamed into place.
"""

import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal, installing
from acclimate_runners import folder_keeping
from acclimate_runners.folder_keeping import Stored as Stored
from acclimate_runners.folder_keeping import note_name as note_name
from acclimate_runners.placing import FolderIncoming, flush, private
from acclimate_runners.placing import space as space
from acclimate_runners.placing import swept as swept
from acclimate_runners.placing import written as written

MARKER = "INSTALLATION"
"""Name of the object, at a store's root, that says whose blobs these are."""
_CHUNK = 1 << 20


class Incoming(Protocol):
    """A blob on its way in: write pieces, then finish(); leaving the `with` block before that stores nothing."""

    def __enter__(self) -> "Incoming": ...

    def __exit__(self, *_: object) -> None: ...

    def write(self, data: bytes) -> None:
        """Take the next piece; refuses upload_mismatch where it would exceed the declared size."""

    def finish(self) -> tuple[str, int]:
        """Check what was declared and make the blob visible; returns digest and size."""

    def abort(self) -> None:
        """Drop what came so far, unless it is stored already."""


class Blobs(Protocol):
    """A store of blobs, for any number of threads, processes and machines at once; picklable, and without any secret then.

    A store that does not answer, refuses the login or can't be written refuses with blobs_unreachable, each of its methods.
    """

    @property
    def scratch(self) -> Path:
        """A folder of this machine for files being made, which exists; sweep() takes what a crash leaves there."""

    def has(self, digest: str) -> bool:
        """Whether the blob is stored."""

    def keep(self, digest: str) -> bool:
        """Whether the blob is stored; if so, `remove` takes it for one stored just now. For whoever is about to name it."""

    def size(self, digest: str) -> int:
        """The blob's size in bytes; refuses blob_unknown."""

    def open(self, digest: str) -> BinaryIO:
        """The blob's bytes for reading, in constant memory, not re-hashed; refuses blob_unknown."""

    def sized(self, digest: str) -> tuple[BinaryIO, int]:
        """As `open`, with the blob's size; little is kept in memory, so that many may be open at once."""

    def check(self, digest: str) -> None:
        """Re-hash the blob, as `get` does; refuses blob_unknown, blob_corrupt."""

    def local(self, digest: str, *, first: int | None = None) -> AbstractContextManager[Path]:
        """The blob as a file of this machine for as long as the block lasts, for reading only.

        Args:
            digest: the blob's.
            first: where only so many bytes are needed: the file has the blob's size, but behind them may be zeros.
        """

    def read(self, digest: str) -> bytes:
        """The blob's bytes, re-hashed, for blobs that fit into memory; refuses blob_unknown, blob_corrupt."""

    def get(self, digest: str, to: Path) -> None:
        """Copy the blob to a file, re-hashing it; the file appears whole or not at all; refuses blob_unknown, blob_corrupt, no_space."""

    def put(self, path: Path) -> str:
        """Store a file; returns its digest; refuses file_unreadable, no_space."""

    def put_bytes(self, data: bytes) -> str:
        """Store bytes; returns their digest."""

    def put_stream(self, stream: IO[bytes], *, digest: str | None = None, size: int | None = None) -> tuple[str, int]:
        """Store what a stream still holds, in constant memory; digest and size in bytes; refuses upload_mismatch."""

    def incoming(self, *, digest: str | None = None, size: int | None = None) -> Incoming:
        """A blob that arrives in pieces, of the digest and size that were declared."""

    def sweep(self, *, older_than: float = 3600.0) -> int:
        """Remove what crashed writers left in the store, not written to for so many seconds; returns how many things."""

    def sweep_local(self, *, older_than: float = 3600.0) -> int:
        """The same for what they left on this machine."""

    def free(self) -> int | None:
        """Bytes that still fit; None where nobody can say."""

    def marker(self) -> str | None:
        """The id of the installation whose blobs these are; None where nobody has marked them."""

    def mark(self, installation: str) -> None:
        """Write the installation's id, unless there is one already."""

    def note(self, name: str) -> bytes | None:
        """A small text by its name, such as attempts/<hex>/1/manifest.json; None where there is none."""

    def put_note(self, name: str, data: bytes) -> None:
        """Write such a text, whole and on the disk, in the place of what it was before; refuses no_space."""

    def notes(self, prefix: str) -> list[str]:
        """The names, sorted, that begin with a prefix, which ends in a slash."""

    def drop_note(self, name: str) -> None:
        """Remove such a text, if it is there."""

    def listing(self) -> Iterator[Stored]:
        """All blobs; which of those that come or go meanwhile are among them is open."""

    def remove(self, digest: str, *, older_than: float) -> bool:
        """Remove a blob that was neither stored nor kept for so many seconds; whether it is removed.

        A bucket's blob counts as stored for s3_keeping.KEPT_SECONDS without being marked again: `older_than` is longer for what others keep.
        """

    def probe(self) -> None:
        """Write, read and remove a small object; refuses blobs_unreachable with the cause, no_space."""


def blobs_at(place: str, *, endpoint: str = "", scratch: Path) -> Blobs:
    """The store of blobs at a place.

    Args:
        place: a folder, or s3://BUCKET or s3://BUCKET/PREFIX.
        endpoint: address of an S3 server that is not Amazon's.
        scratch: a folder of this machine for files being made, where the store has none of its own.

    Raises:
        Refusal: extra_missing, where s3fs is not installed.
    """
    if "://" not in place:
        return FolderBlobs(Path(place))
    try:
        from acclimate_runners.s3 import at
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("acclimate"):
            raise
        sentence = f"{place} needs {error.name}, which is not installed"
        raise Refusal("extra_missing", sentence, hint=installing("server")) from error
    return at(place, endpoint=endpoint, scratch=scratch)


@dataclass(frozen=True)
class FolderBlobs:
    """A folder of blobs; several threads, processes and machines (over a shared file system) may use it at once.

    Attributes:
        root: the folder; made when the first blob is stored.
    """

    root: Path

    def path(self, digest: str) -> Path:
        """Where the blob lies or would lie.

        Raises:
            Refusal: blob_unknown, for text that is no digest.
        """
        if not digests.is_digest(digest):
            raise Refusal("blob_unknown", f"{digest!r} is not a digest", hint="sha256: and 64 lower-case hex digits")
        return self.root / digest[7:9] / digest[9:]

    @property
    def scratch(self) -> Path:
        """Beside the blobs, whose disk must have room for what becomes a blob anyway.

        Raises:
            Refusal: no_space.
        """
        folder = self.root / "tmp"
        with space(folder):
            return private(folder, below=self.root)

    def has(self, digest: str) -> bool:
        """Whether the blob is stored."""
        return self.path(digest).is_file()

    def keep(self, digest: str) -> bool:
        """Whether the blob is stored; if so, `remove` takes it for one stored just now."""
        return folder_keeping.keep(self, digest)

    def size(self, digest: str) -> int:
        """The blob's size in bytes.

        Raises:
            Refusal: blob_unknown.
        """
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError as error:
            raise unknown(digest) from error

    def open(self, digest: str) -> BinaryIO:
        """The blob's bytes for reading, not re-hashed; `get` and `read` are.

        Raises:
            Refusal: blob_unknown.
        """
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError as error:
            raise unknown(digest) from error

    def sized(self, digest: str) -> tuple[BinaryIO, int]:
        """As open, with the size.

        Raises:
            Refusal: blob_unknown.
        """
        stream = self.open(digest)
        return stream, os.fstat(stream.fileno()).st_size

    def check(self, digest: str) -> None:
        """Re-hash the blob.

        Raises:
            Refusal: blob_unknown, blob_corrupt.
        """
        right = False
        while not right:
            with self.open(digest) as stream:
                right = self._is(digest, digests.of_stream(stream)[0], stream)

    @contextmanager
    def local(self, digest: str, *, first: int | None = None) -> Iterator[Path]:
        """The blob's own file, for reading only; not re-hashed.

        Raises:
            Refusal: blob_unknown.
        """
        if not self.has(digest):
            raise unknown(digest)
        yield self.path(digest)

    def read(self, digest: str) -> bytes:
        """The blob's bytes, re-hashed, for blobs that fit into memory.

        Raises:
            Refusal: blob_unknown, blob_corrupt.
        """
        while True:
            with self.open(digest) as stream:
                data = stream.read()
                if self._is(digest, digests.of_bytes(data), stream):
                    return data

    def get(self, digest: str, to: Path) -> None:
        """Copy the blob to a file, re-hashing it; the file appears whole or not at all.

        Raises:
            Refusal: blob_unknown, blob_corrupt, no_space.
        """
        right = False
        while not right:
            with self.open(digest) as source, suppress(_Exchanged), written(to) as target:
                found, _size = _copy(source, target)
                if not self._is(digest, found, source):
                    raise _Exchanged
                right = True

    def put(self, path: Path) -> str:
        """Store a file; returns its digest.

        Raises:
            Refusal: file_unreadable, no_space.
        """
        try:
            with path.open("rb") as stream:
                digest, size = digests.of_stream(stream)
                if self._stored(digest, size):
                    return digest
                stream.seek(0)
                return self.put_stream(stream)[0]
        except FileNotFoundError as error:
            raise Refusal("file_unreadable", f"{path.name}: there is no such file") from error

    def put_bytes(self, data: bytes) -> str:
        """Store bytes; returns their digest.

        Raises:
            Refusal: no_space.
        """
        digest = digests.of_bytes(data)
        if not self._stored(digest, len(data)):
            self.put_stream(io.BytesIO(data))
        return digest

    def put_stream(self, stream: IO[bytes], *, digest: str | None = None, size: int | None = None) -> tuple[str, int]:
        """Store what a stream still holds, in constant memory.

        Args:
            stream: the bytes.
            digest: what they were declared to hash to.
            size: how many were declared; a longer stream is refused before more than that many bytes are stored.

        Returns:
            Digest and size in bytes.

        Raises:
            Refusal: upload_mismatch where the bytes are not those declared, no_space; nothing is stored then.
        """
        with self.incoming(digest=digest, size=size) as incoming:
            while chunk := stream.read(_CHUNK):
                incoming.write(chunk)
            return incoming.finish()

    def incoming(self, *, digest: str | None = None, size: int | None = None) -> Incoming:
        """A blob that arrives in pieces, for callers that are handed the pieces (an upload)."""
        return FolderIncoming(self, digest=digest, size=size)

    def sweep(self, *, older_than: float = 3600.0) -> int:
        """Remove what crashed writers left in root/tmp, and put back what a crashed removal moved there; returns how many files.

        Args:
            older_than: seconds since a file was last written to; younger ones may still be in use.
        """
        return folder_keeping.sweep(self.root, older_than=older_than)

    def sweep_local(self, *, older_than: float = 3600.0) -> int:
        """Nothing: files being made lie in the store."""
        return 0

    def free(self) -> int:
        """Bytes free on the folder's disk."""
        self.root.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.root).free

    def marker(self) -> str | None:
        """The id of the installation whose blobs these are, if they are marked."""
        found = self.note(MARKER)
        return found.decode("utf-8", "replace").strip() if found is not None else None

    def note(self, name: str) -> bytes | None:
        """A small text by its name."""
        return folder_keeping.note(self.root, name)

    def put_note(self, name: str, data: bytes) -> None:
        """Write it, whole; refuses no_space."""
        folder_keeping.put_note(self, name, data)

    def notes(self, prefix: str) -> list[str]:
        """The names, sorted, below a prefix."""
        return folder_keeping.notes(self.root, prefix)

    def drop_note(self, name: str) -> None:
        """Remove it."""
        folder_keeping.drop_note(self.root, name)

    def listing(self) -> Iterator[Stored]:
        """All blobs."""
        return folder_keeping.listing(self.root)

    def remove(self, digest: str, *, older_than: float) -> bool:
        """Remove a blob that was neither stored nor kept for so many seconds; whether it is removed."""
        return folder_keeping.remove(self, digest, older_than=older_than)

    def mark(self, installation: str) -> None:
        """Write the installation's id, unless there is one already.

        Raises:
            Refusal: no_space.
        """
        temporary = self.scratch / uuid.uuid4().hex
        try:
            with space(temporary), temporary.open("xb") as stream:
                stream.write(installation.encode())
                temporary.chmod(0o600)
                flush(stream)
            # A link, unlike a rename, leaves what another process has put there first.
            with suppress(FileExistsError):
                (self.root / MARKER).hardlink_to(temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def probe(self) -> None:
        """Write, read and remove a small file.

        Raises:
            Refusal: blobs_unreachable, no_space.
        """
        data = uuid.uuid4().bytes
        try:
            path = self.scratch / f"probe-{uuid.uuid4().hex}"
            try:
                with space(path):
                    path.write_bytes(data)
                    found = path.read_bytes()
            finally:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise Refusal(
                "blobs_unreachable",
                f"the folder of blobs {self.root} can't be used: {error.strerror or error}",
                hint="the account that runs this server must be able to write there; or choose another folder (blobs)",
            ) from error
        if found != data:
            raise Refusal(
                "blobs_unreachable", f"the folder of blobs {self.root} gave back other bytes than were written"
            )

    def _stored(self, digest: str, size: int) -> bool:
        try:
            return self.keep(digest) and self.size(digest) == size
        except Refusal:
            return False

    def _is(self, digest: str, found: str, stream: IO[bytes]) -> bool:
        """Whether what was read is right; False where another file is in its place by now, which stays there.

        Raises:
            Refusal: blob_corrupt, the file set aside.
        """
        if found == digest:
            return True
        path, read = self.path(digest), os.fstat(stream.fileno())
        aside = private(self.root / "quarantine", below=self.root) / f"{digest[7:]}-{uuid.uuid4().hex[:8]}"
        with suppress(FileNotFoundError):
            if not os.path.samestat(path.stat(), read):
                return False
            path.rename(aside)
            if not os.path.samestat(aside.stat(), read):
                # It was stored again in between: back to its place, unless that was taken once more.
                with suppress(FileExistsError):
                    path.hardlink_to(aside)
                aside.unlink()
                return False
        raise Refusal(
            "blob_corrupt",
            f"blob {digest} holds bytes that hash to {found}; the file was moved to quarantine/{aside.name}",
            hint="store the bytes again from where they came; check the disk",
        )


def _copy(source: IO[bytes], target: IO[bytes]) -> tuple[str, int]:
    state, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        state.update(chunk)
        target.write(chunk)
        size += len(chunk)
    target.flush()
    return "sha256:" + state.hexdigest(), size


class _Exchanged(Exception):
    """Another file is in the place of that which was read."""


def unknown(digest: str) -> Refusal:
    """blob_unknown."""
    return Refusal("blob_unknown", f"there is no blob {digest}")
