"""Content-addressed bytes in a bucket, on Amazon S3 or any server that speaks its protocol.

Layout as in the folder: PREFIX/ab/cdef…, one object a blob.

- Nothing partial is visible: S3 shows an object once its one request, or the last request of a multipart upload, has succeeded. An upload
  in parts is completed only if its bytes are those declared; bytes without a declared digest are first written to `folder`.
- Who gets a blob looks twice before it is put into quarantine/: what was changed on the way, not where it lies, is read again. What was
  stored again meanwhile has another ETag, and stays where it is.
- Requests that fail in passing are made again for a minute at most (bucket.py); then blobs_unreachable.
- Credentials are those of the machine that uses the store: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or another of the standard ways.
  A pickled store holds none.

A process needs s3:ListBucket (else a missing object can't be told from a forbidden one), GetObject, PutObject, DeleteObject,
AbortMultipartUpload, ListMultipartUploadParts and ListBucketMultipartUploads.
"""

import hashlib
import io
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners import s3_answers, s3_keeping, s3_uploads
from acclimate_runners.blobs import MARKER, Incoming, Stored, note_name, space, swept, written
from acclimate_runners.bucket import Bucket
from acclimate_runners.s3_reading import Exchanged, Reader
from acclimate_runners.s3_reading import found as found_at

_CHUNK = 1 << 20
_PIECE = 8 << 20
_READ_AHEAD = 3
_LOOKS, _TURNS, _PROBES = 2, 3, 4
_Result = TypeVar("_Result")


def at(place: str, *, endpoint: str, scratch: Path) -> "S3Blobs":
    """The store at s3://BUCKET or s3://BUCKET/PREFIX; see blobs.blobs_at."""
    name, _, prefix = place.removeprefix("s3://").strip("/").partition("/")
    return S3Blobs(Bucket(name, prefix + "/" if prefix else "", endpoint), scratch)


@dataclass(frozen=True)
class S3Blobs:
    """Blobs in a bucket.

    Attributes:
        bucket: where they lie.
        folder: of this machine, for files being made; on machines that only get and put, never touched.
    """

    bucket: Bucket
    folder: Path

    @property
    def scratch(self) -> Path:
        """A folder of this machine for files being made.

        Raises:
            Refusal: no_space.
        """
        with space(self.folder):
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.folder

    # ---- reading -----------------------------------------------------------------------------------------------------

    def has(self, digest: str) -> bool:
        """Whether the blob is stored.

        Raises:
            Refusal: blob_unknown, for text that is no digest; blobs_unreachable.
        """
        self.bucket.key(digest)
        try:
            self.size(digest)
        except Refusal as refusal:
            if refusal.code != "blob_unknown":
                raise
            return False
        return True

    def keep(self, digest: str) -> bool:
        """Whether the blob is stored; if so, `remove` takes it for one stored just now.

        Raises:
            Refusal: blob_unknown, for text that is no digest; blobs_unreachable.
        """
        return s3_keeping.keep(self.bucket, digest)

    def size(self, digest: str) -> int:
        """The blob's size in bytes.

        Raises:
            Refusal: blob_unknown, blobs_unreachable.
        """
        key = self.bucket.key(digest)
        try:
            answer = self.bucket.begin(lambda: self.bucket.call("head_object", Key=key)).result()
        except Exception as error:
            if s3_answers.code_of(error) != s3_answers.BARE:
                raise self.bucket.refusal(error) from error
            # Another kind of request gets the reason, too: the blob may be missing, or the whole bucket.
            return self._range(key, 1, digest)[1]
        return int(answer["ContentLength"])

    def open(self, digest: str) -> BinaryIO:
        """The blob's bytes for reading from the beginning, not re-hashed.

        Raises:
            Refusal: blob_unknown, blobs_unreachable.
        """
        return self.sized(digest)[0]

    def sized(self, digest: str) -> tuple[BinaryIO, int]:
        """As open, with the size, by one request; about 2 MiB in memory, and nothing is asked for before it is read.

        Raises:
            Refusal: blob_unknown, blobs_unreachable.
        """
        found = found_at(self.bucket, digest, ahead=0, piece=_CHUNK)
        return cast(BinaryIO, io.BufferedReader(Reader(found.pieces, str(self.bucket)), 1 << 16)), found.size

    @contextmanager
    def local(self, digest: str, *, first: int | None = None) -> Iterator[Path]:
        """A copy of the blob on this machine, removed afterwards; re-hashed where it is whole.

        Raises:
            Refusal: blob_unknown, blob_corrupt, no_space, blobs_unreachable.
        """
        path = self.scratch / uuid.uuid4().hex
        try:
            if first is None:
                self.get(digest, path)
            else:
                data, total, _ = self._range(self.bucket.key(digest), first, digest)
                with written(path) as target:
                    target.write(data)
                    target.truncate(total)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def read(self, digest: str) -> bytes:
        """The blob's bytes, re-hashed.

        Raises:
            Refusal: blob_unknown, blob_corrupt, blobs_unreachable.
        """

        def look(pieces: Iterator[bytes]) -> tuple[bytes, str]:
            data = b"".join(pieces)
            return data, digests.of_bytes(data)

        return self._looked(digest, look)

    def check(self, digest: str) -> None:
        """Re-hash the blob.

        Raises:
            Refusal: blob_unknown, blob_corrupt, blobs_unreachable.
        """

        def look(pieces: Iterator[bytes]) -> tuple[None, str]:
            state = hashlib.sha256()
            for piece in pieces:
                state.update(piece)
            return None, "sha256:" + state.hexdigest()

        self._looked(digest, look)

    def get(self, digest: str, to: Path) -> None:
        """Copy the blob to a file, re-hashing it; the file appears whole or not at all.

        Raises:
            Refusal: blob_unknown, blob_corrupt, no_space, blobs_unreachable.
        """

        def look(pieces: Iterator[bytes]) -> tuple[None, str]:
            found = ""
            with suppress(_OtherBytes), written(to) as target:
                state = hashlib.sha256()
                for piece in pieces:
                    state.update(piece)
                    target.write(piece)
                found = "sha256:" + state.hexdigest()
                if found != digest:
                    raise _OtherBytes
            return None, found

        self._looked(digest, look)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def put(self, path: Path) -> str:
        """Store a file; returns its digest.

        Raises:
            Refusal: file_unreadable, also for a file that changes meanwhile; no_space, blobs_unreachable.
        """
        try:
            with path.open("rb") as stream:
                digest, size = digests.of_stream(stream)
                if not s3_keeping.keep(self.bucket, digest, size):
                    stream.seek(0)
                    self.put_stream(stream, digest=digest, size=size)
                return digest
        except FileNotFoundError as error:
            raise Refusal("file_unreadable", f"{path.name}: there is no such file") from error
        except Refusal as refusal:
            if refusal.code != "upload_mismatch":
                raise
            sentence = f"{path.name} changed while it was stored: {refusal.sentence}"
            raise Refusal("file_unreadable", sentence) from refusal

    def put_bytes(self, data: bytes) -> str:
        """Store bytes; returns their digest.

        Raises:
            Refusal: no_space, blobs_unreachable.
        """
        digest = digests.of_bytes(data)
        if not s3_keeping.keep(self.bucket, digest, len(data)):
            self.put_stream(io.BytesIO(data), digest=digest, size=len(data))
        return digest

    def put_stream(self, stream: IO[bytes], *, digest: str | None = None, size: int | None = None) -> tuple[str, int]:
        """Store what a stream still holds, in constant memory; returns digest and size in bytes.

        Raises:
            Refusal: upload_mismatch where the bytes are not those declared, no_space, blobs_unreachable; nothing is stored then.
        """
        with self.incoming(digest=digest, size=size) as incoming:
            while chunk := stream.read(_CHUNK):
                incoming.write(chunk)
            return incoming.finish()

    def incoming(self, *, digest: str | None = None, size: int | None = None) -> Incoming:
        """A blob that arrives in pieces; without a declared digest and size it is gathered in `folder` first."""
        if digest is not None:
            self.bucket.key(digest)
        if digest is None or size is None:
            return s3_uploads.Gathered(self, digest=digest, size=size)
        return s3_uploads.Sent(self, digest=digest, size=size)

    def sweep(self, *, older_than: float = 3600.0) -> int:
        """Give up uploads in parts that nobody continues, and remove what crashed processes left in tmp/.

        Args:
            older_than: seconds, by the server's clock, since the last part came.

        Raises:
            Refusal: blobs_unreachable.
        """
        removed = 0
        for found, now in self.bucket.listed(
            "list_multipart_uploads", "Uploads", "KeyMarker", "UploadIdMarker", Prefix=self.bucket.prefix
        ):
            at_hand = {"Key": found["Key"], "UploadId": found["UploadId"]}
            if (now - found["Initiated"]).total_seconds() <= older_than:
                continue
            parts = self.bucket.listed("list_parts", "Parts", "PartNumberMarker", **at_hand)
            with suppress(Refusal):
                last = max((part["LastModified"] for part, _ in parts), default=found["Initiated"])
                if (now - last).total_seconds() > older_than:
                    self.bucket.ask("abort_multipart_upload", **at_hand)
                    removed += 1
        for found, now in self.bucket.listed(
            "list_objects_v2", "Contents", "ContinuationToken", Prefix=self.bucket.prefix + "tmp/"
        ):
            if (now - found["LastModified"]).total_seconds() > older_than:
                self.bucket.ask("delete_object", Key=found["Key"])
                removed += 1
        return removed

    def sweep_local(self, *, older_than: float = 3600.0) -> int:
        """Remove what crashed processes left in `folder`."""
        return swept(self.folder, older_than=older_than)

    def free(self) -> None:
        """Nobody can say how much a bucket still takes."""
        return None

    # ---- whose it is, and whether it works ---------------------------------------------------------------------------

    def marker(self) -> str | None:
        """The id of the installation whose blobs these are, if they are marked.

        Raises:
            Refusal: blobs_unreachable.
        """
        found = self.note(MARKER)
        return found.decode("utf-8", "replace").strip() if found is not None else None

    def note(self, name: str) -> bytes | None:
        """A small text by its name; refuses blobs_unreachable."""
        return s3_keeping.note(self.bucket, name)

    def put_note(self, name: str, data: bytes) -> None:
        """Write it, whole; refuses blobs_unreachable, no_space."""
        self.bucket.ask("put_object", Key=self.bucket.prefix + note_name(name), Body=data)

    def notes(self, prefix: str) -> list[str]:
        """The names, sorted, below a prefix; refuses blobs_unreachable."""
        return s3_keeping.notes(self.bucket, prefix)

    def drop_note(self, name: str) -> None:
        """Remove it; refuses blobs_unreachable."""
        self.bucket.ask("delete_object", Key=self.bucket.prefix + note_name(name))

    def listing(self) -> Iterator[Stored]:
        """All blobs; refuses blobs_unreachable."""
        return s3_keeping.listing(self.bucket)

    def remove(self, digest: str, *, older_than: float) -> bool:
        """Remove a blob that was neither stored nor kept for so many seconds; refuses blobs_unreachable."""
        return s3_keeping.remove(self.bucket, digest, older_than=older_than)

    def mark(self, installation: str) -> None:
        """Write the installation's id, unless there is one already.

        Raises:
            Refusal: blobs_unreachable.
        """
        body: dict[str, Any] = {"Key": self.bucket.prefix + MARKER, "Body": installation.encode()}
        try:
            self.bucket.begin(lambda: self.bucket.call("put_object", **body, IfNoneMatch="*")).result()
        except Exception as error:
            if s3_answers.code_of(error) in s3_answers.THERE_ALREADY:
                return
            if s3_answers.code_of(error) not in s3_answers.NOT_OFFERED:
                raise self.bucket.refusal(error) from error
            # A server without conditional writes: two first starts in the same instant are all that could go wrong.
            if self.marker() is None:
                self.bucket.ask("put_object", **body)

    def probe(self) -> None:
        """Write, read and remove a small object.

        Raises:
            Refusal: blobs_unreachable, with the cause: no such bucket, a login that is refused or may only read, no answer, another kind
                of server, a clock that is wrong; no_space.
        """
        key, data = f"{self.bucket.prefix}tmp/probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
        try:
            self._a_few_times("put_object", Key=key, Body=data)
        except Exception as error:
            reads = False
            with suppress(Refusal):
                reads = self._lists()
            raise self.bucket.refusal(error, doing="write", reads=reads) from error
        try:
            found, *_ = self.bucket.begin(lambda: self.bucket.range(key, 0, _CHUNK), attempts=_PROBES).result()
        except Exception as error:
            raise self.bucket.refusal(error, doing="read") from error
        if found != data:
            raise Refusal("blobs_unreachable", f"{self.bucket} gave back other bytes than were written")
        try:
            self._a_few_times("delete_object", Key=key)
        except Exception as error:
            raise self.bucket.refusal(error, doing="delete") from error
        if not self._lists():
            sentence = (
                f"{self.bucket}: the login may not list the bucket, so that a missing object looks like a forbidden one"
            )
            raise Refusal("blobs_unreachable", sentence, hint="allow it s3:ListBucket on the bucket")

    def _lists(self) -> bool:
        """Whether a missing object is told to be missing, and not to be forbidden."""
        nothing = self.bucket.prefix + "tmp/nothing"
        try:
            self.bucket.begin(lambda: self.bucket.range(nothing, 0, 1), attempts=_PROBES).result()
        except Exception as error:
            if s3_answers.code_of(error) in s3_answers.DENIED:
                return False
            if s3_answers.code_of(error) != s3_answers.NO_KEY:
                raise self.bucket.refusal(error, doing="read") from error
        return True

    def stored(self, digest: str, size: int) -> bool:
        """Whether the blob is stored, whole.

        Raises:
            Refusal: blobs_unreachable.
        """
        try:
            return self.size(digest) == size
        except Refusal as refusal:
            if refusal.code != "blob_unknown":
                raise
            return False

    def _looked(self, digest: str, look: Callable[[Iterator[bytes]], tuple[_Result, str]]) -> _Result:
        """What a look at the blob's bytes gives, once it finds its digest; what doesn't, twice, is set aside.

        Raises:
            Refusal: blob_unknown, blob_corrupt, blobs_unreachable.
        """
        for _ in range(_TURNS):
            found = etag = ""
            for _ in range(_LOOKS):
                opened = found_at(self.bucket, digest, ahead=_READ_AHEAD, piece=_PIECE)
                with suppress(Exchanged):
                    result, found = look(opened.pieces)
                    etag = opened.etag
                    if found == digest:
                        return result
            if found:
                self._set_aside(digest, found, etag=etag)
        raise Refusal(
            "blobs_unreachable", f"{self.bucket}: blob {digest} is stored anew again and again while it is read"
        )

    def _set_aside(self, digest: str, found: str, *, etag: str) -> None:
        """Move the object that was read into quarantine/; returns where another one is in its place by now.

        Raises:
            Refusal: blob_corrupt.
        """
        aside, source = f"{self.bucket.prefix}quarantine/{digest[7:]}-{uuid.uuid4().hex[:8]}", self.bucket.key(digest)
        done = f"the object was moved to {aside}"
        try:
            self.bucket.begin(lambda: self.bucket.copy(source, aside, etag=etag)).result()
            s3_keeping.delete(self.bucket, source, etag=etag)
        except Exchanged:
            return
        except Exception as error:
            if s3_answers.code_of(error) in s3_answers.THERE_ALREADY:
                return
            if s3_answers.code_of(error) not in s3_answers.MISSING:
                done = f"the object could not be set aside: {self.bucket.refusal(error).sentence}"
        raise Refusal(
            "blob_corrupt",
            f"blob {digest} holds bytes that hash to {found}; {done}",
            hint="store the bytes again from where they came; check the server's disks",
        )

    def _range(self, key: str, count: int, digest: str) -> tuple[bytes, int, str]:
        return self.bucket.wait(self.bucket.begin(lambda: self.bucket.range(key, 0, count)), digest)

    def _a_few_times(self, method: str, **arguments: Any) -> None:
        self.bucket.begin(lambda: self.bucket.call(method, **arguments), attempts=_PROBES).result()


class _OtherBytes(Exception):
    """The bytes are not those of the digest."""
