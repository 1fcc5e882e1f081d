"""A ciphertext as anyone can measure it without the key: digest, size, and the hashes of its blocks of 1 MiB."""

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

BLOCK = 1 << 20
_WAITING = 4  # pieces of at most a block that wait for a hash


@dataclass(frozen=True)
class Measured:
    """What a ciphertext measures.

    Attributes:
        digest: of all its bytes.
        size: bytes.
        block_hashes: RFC 6962 leaf hashes of its blocks, the last one may be shorter than 1 MiB.
    """

    digest: str
    size: int
    block_hashes: tuple[bytes, ...]

    @property
    def block_root(self) -> str:
        """RFC 6962 root over the blocks, as a digest."""
        return "sha256:" + digests.root_of_hashes(self.block_hashes).hex()


def measure(path: Path) -> Measured:
    """Measure a file in one pass and constant memory.

    Raises:
        Refusal: file_unreadable.
    """
    try:
        with Tally() as tally, path.open("rb") as stream:
            while piece := stream.read(BLOCK):
                tally.feed(piece)
            return tally.result()
    except OSError as error:
        raise Refusal("file_unreadable", f"{path}: {error.strerror or error}") from error


def bad_blocks(path: Path, block_hashes: Sequence[bytes], *, block_root: str) -> list[int]:
    """Numbers (from 0) of a file's blocks that differ from hashes which the block root commits to; needs no key.

    Raises:
        Refusal: seal_mismatch, where the hashes are not those of block_root; file_unreadable.
    """
    if "sha256:" + digests.root_of_hashes(block_hashes).hex() != block_root:
        raise Refusal("seal_mismatch", f"the block hashes do not lead to the block root {block_root}")
    found = measure(path).block_hashes
    numbers = range(max(len(found), len(block_hashes)))
    return [i for i in numbers if found[i : i + 1] != tuple(block_hashes[i : i + 1])]


class Tally:
    """Measures bytes that come in pieces, in two threads beside the caller's work; used in a `with` block.

    hashlib works without the interpreter's lock, so both hashes together cost little more than the longer of them.
    """

    def __init__(self) -> None:
        self._whole, self._block = hashlib.sha256(), hashlib.sha256(b"\x00")
        self._size = self._filled = 0
        self._hashes: list[bytes] = []
        self._queues = (queue.Queue[bytes | None](_WAITING), queue.Queue[bytes | None](_WAITING))
        works = (self._whole.update, self._blocks)
        self._threads = [
            threading.Thread(target=_drain, args=(source, work), daemon=True)
            for source, work in zip(self._queues, works, strict=True)
        ]

    def __enter__(self) -> "Tally":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def feed(self, piece: bytes) -> None:
        """Take the next piece; it must not change afterwards."""
        self._size += len(piece)
        for target in self._queues:
            target.put(piece)

    def result(self) -> Measured:
        """What was fed; nothing may be fed after."""
        self._stop()
        hashes = [*self._hashes, self._block.digest()] if self._filled else self._hashes
        return Measured("sha256:" + self._whole.hexdigest(), self._size, tuple(hashes))

    def _blocks(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            part, view = view[: BLOCK - self._filled], view[BLOCK - self._filled :]
            self._block.update(part)
            self._filled += len(part)
            if self._filled == BLOCK:
                self._hashes.append(self._block.digest())
                self._block, self._filled = hashlib.sha256(b"\x00"), 0

    def _stop(self) -> None:
        for target, thread in zip(self._queues, self._threads, strict=True):
            if thread.is_alive():
                target.put(None)
                thread.join()


def _drain(source: "queue.Queue[bytes | None]", work: Callable[[bytes], None]) -> None:
    while (piece := source.get()) is not None:
        work(piece)
