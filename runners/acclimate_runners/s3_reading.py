"""Reading an object piece by piece: the same object from its first byte to its last, whoever stores another one meanwhile."""

import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, cast

from acclimate_competitions.errors import Refusal
from acclimate_runners import s3_answers
from acclimate_runners.bucket import Bucket


class Found(NamedTuple):
    """An object: its bytes in order, its size, its ETag."""

    pieces: Iterator[bytes]
    size: int
    etag: str


class Exchanged(Exception):
    """The object is another one than that which was found first."""


def found(bucket: Bucket, digest: str, *, ahead: int, piece: int) -> Found:
    """An object and its bytes in order, up to `ahead` pieces asked for before they are needed; asks for the first one at once.

    Raises:
        Refusal: blob_unknown, blobs_unreachable.
    """
    key = bucket.key(digest)
    first, size, etag = bucket.wait(bucket.begin(lambda: bucket.range(key, 0, piece)), digest)
    return Found(_following(bucket, digest, first, size, etag=etag, ahead=ahead, piece=piece), size, etag)


def _following(
    bucket: Bucket, digest: str, first: bytes, size: int, *, etag: str, ahead: int, piece: int
) -> Iterator[bytes]:
    key, asked = bucket.key(digest), deque[Future[tuple[bytes, int, str]]]()

    def ask(begin: int) -> None:
        count = min(piece, size - begin)
        asked.append(bucket.begin(lambda: bucket.range(key, begin, count, etag=etag)))

    def got() -> bytes:
        future = asked.popleft()
        try:
            return future.result()[0]
        except Exception as error:
            if s3_answers.code_of(error) in s3_answers.THERE_ALREADY:
                raise Exchanged from error
            return bucket.wait(future, digest)[0]

    begins = iter(range(len(first), size, piece))
    try:
        yield first
        for begin in begins:
            ask(begin)
            if len(asked) > ahead:
                yield got()
        while asked:
            yield got()
    finally:
        for future in asked:
            future.cancel()


class Reader(io.RawIOBase):
    """A stream over pieces."""

    def __init__(self, pieces: Iterator[bytes], place: str) -> None:
        self._pieces, self._place, self._rest = pieces, place, memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase; refuses blobs_unreachable."""
        while not self._rest:
            try:
                piece = next(self._pieces, None)
            except Exchanged as error:
                raise Refusal("blobs_unreachable", f"{self._place}: what was read was stored anew meanwhile") from error
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def close(self) -> None:
        """Ask for no more pieces."""
        cast(Any, self._pieces).close()
        super().close()
