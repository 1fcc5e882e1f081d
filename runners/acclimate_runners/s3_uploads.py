"""Blobs on their way into a bucket: sent as they come where digest and size are declared, else gathered on this machine first."""

import hashlib
import uuid
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from acclimate_competitions.errors import Refusal
from acclimate_runners import s3_answers, s3_keeping
from acclimate_runners.blobs import Incoming, space

if TYPE_CHECKING:
    from acclimate_runners.s3 import S3Blobs

# S3 takes parts of 5 MiB at least, and 10,000 of them.
_PART, _PARTS = 8 << 20, 10_000
_SENT_AHEAD = 2


class Sent:
    """A blob of declared digest and size on its way into the bucket: one request, or parts of which a few are under way at once."""

    def __init__(self, blobs: "S3Blobs", *, digest: str, size: int) -> None:
        self._blobs, self._digest, self._declared = blobs, digest, size
        self._key = blobs.bucket.key(digest)
        self._hash, self._size, self._rest = hashlib.sha256(), 0, bytearray()
        self._part = max(_PART, -(-size // _PARTS))
        self._upload = ""
        self._parts: list[Future[Any]] = []

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, data: bytes) -> None:
        """Take the next piece.

        Raises:
            Refusal: upload_mismatch, no_space, blobs_unreachable.
        """
        if self._size + len(data) > self._declared:
            raise Refusal("upload_mismatch", f"more bytes came than the {self._declared} declared")
        self._hash.update(data)
        self._size += len(data)
        self._rest += data
        while len(self._rest) >= self._part and self._declared > self._part:
            self._send(bytes(self._rest[: self._part]))
            del self._rest[: self._part]

    def finish(self) -> tuple[str, int]:
        """Check what was declared and make the blob visible; returns digest and size.

        Raises:
            Refusal: upload_mismatch, no_space, blobs_unreachable.
        """
        found = "sha256:" + self._hash.hexdigest()
        if self._size != self._declared:
            raise Refusal("upload_mismatch", f"{self._size} bytes came, {self._declared} were declared")
        if found != self._digest:
            raise Refusal("upload_mismatch", f"the bytes hash to {found}, {self._digest} was declared")
        if not self._upload:
            self._blobs.bucket.ask("put_object", Key=self._key, Body=bytes(self._rest))
        else:
            if self._rest:
                self._send(bytes(self._rest))
            self._complete()
        self._outlast_removal()
        self._rest.clear()
        return found, self._size

    def _outlast_removal(self) -> None:
        """Store it again where who was removing the same blob took this one away."""
        bucket = self._blobs.bucket
        while s3_keeping.waited_for_removal(bucket, self._digest) and not self._blobs.stored(self._digest, self._size):
            if self._parts:
                sentence = f"{bucket}: blob {self._digest} was removed as old in the moment in which it was stored anew"
                raise Refusal("blobs_unreachable", sentence, hint="store it again")
            bucket.ask("put_object", Key=self._key, Body=bytes(self._rest))

    def abort(self) -> None:
        """Drop what came so far, unless it is stored already; what can't be dropped now is left to sweep()."""
        self._rest.clear()
        if self._upload:
            for future in self._parts:
                future.cancel()
            upload = {"Key": self._key, "UploadId": self._upload}
            with suppress(Refusal):
                bucket = self._blobs.bucket
                bucket.wait(bucket.begin(lambda: bucket.call("abort_multipart_upload", **upload), attempts=2))
            self._upload = ""

    def _send(self, data: bytes) -> None:
        if not self._upload:
            self._upload = self._blobs.bucket.ask("create_multipart_upload", Key=self._key)["UploadId"]
        number = len(self._parts) + 1
        if number > _SENT_AHEAD:
            self._blobs.bucket.wait(self._parts[number - 1 - _SENT_AHEAD])
        part = {"Key": self._key, "UploadId": self._upload, "PartNumber": number}
        self._parts.append(self._blobs.bucket.begin(lambda: self._blobs.bucket.call("upload_part", **part, Body=data)))

    def _complete(self) -> None:
        etags = [self._blobs.bucket.wait(future)["ETag"] for future in self._parts]
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, start=1)]
        upload = {"Key": self._key, "UploadId": self._upload, "MultipartUpload": {"Parts": parts}}
        try:
            self._blobs.bucket.begin(lambda: self._blobs.bucket.call("complete_multipart_upload", **upload)).result()
        except Exception as error:
            # The answer to the first try may have been lost: then the upload is gone, because the blob is there.
            gone = s3_answers.code_of(error) in s3_answers.MISSING
            if not (gone and self._blobs.stored(self._digest, self._size)):
                raise self._blobs.bucket.refusal(error) from error
        self._upload = ""


class Gathered:
    """A blob of which digest or size is not declared: written to a file of this machine, then stored."""

    def __init__(self, blobs: "S3Blobs", *, digest: str | None, size: int | None) -> None:
        self._blobs, self._digest, self._declared = blobs, digest, size
        self._hash, self._size = hashlib.sha256(), 0
        self._path = blobs.scratch / uuid.uuid4().hex
        with space(self._path):
            self._file = self._path.open("xb")

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def write(self, data: bytes) -> None:
        """Take the next piece.

        Raises:
            Refusal: upload_mismatch, no_space.
        """
        if self._declared is not None and self._size + len(data) > self._declared:
            raise Refusal("upload_mismatch", f"more bytes came than the {self._declared} declared")
        with space(self._path):
            self._file.write(data)
        self._hash.update(data)
        self._size += len(data)

    def finish(self) -> tuple[str, int]:
        """Check what was declared and store it.

        Raises:
            Refusal: upload_mismatch, no_space, blobs_unreachable.
        """
        with space(self._path):
            self._file.close()
        found = "sha256:" + self._hash.hexdigest()
        digest = self._digest or found
        size = self._size if self._declared is None else self._declared
        with self._path.open("rb") as stream:
            return self._blobs.put_stream(stream, digest=digest, size=size)

    def abort(self) -> None:
        """Remove the file."""
        # Closing flushes what is buffered, and may meet the full disk again; the bytes are dropped anyway.
        with suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)
