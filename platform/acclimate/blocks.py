"""A ciphertext as anyone can measure it without the key: digest, size, and the hashes of its blocks of 1 MiB."""

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from acclimate_competitions import digests, reading
from acclimate_competitions.errors import Refusal

BLOCK = 1 << 20
_WAITING = 4  # pieces of at most a block that wait for a hash

Piece = bytes | memoryview


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


def measure(path: Path, *, progress: Callable[[int, int], None] = lambda done, total: None) -> Measured:
    """Measure a file in one pass and constant memory.

    Args:
        path: the file.
        progress: told (bytes read, of how many).

    Raises:
        Refusal: file_unreadable.
    """
    try:
        ring, done = Ring(BLOCK), 0
        with Tally() as tally, reading.regular(path).open("rb", buffering=0) as stream:
            total = path.stat().st_size
            while size := stream.readinto(ring.current):
                tally.feed(memoryview(ring.current)[:size])
                ring.turn()
                done += size
                progress(done, total)
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


class Ring:
    """Buffers used in turn, since new ones for each piece would cost as much as a third of its hash.

    The next one is free as soon as each piece before it was handed to an Aside (or to the same several): its bounded queue has room for
    a piece only once the one `_WAITING` before it was taken, and that one is taken only once the one before was done.
    """

    def __init__(self, size: int) -> None:
        self._buffers = [bytearray(size) for _ in range(_WAITING + 2)]
        self._turn = 0

    @property
    def current(self) -> bytearray:
        """The buffer to fill now."""
        return self._buffers[self._turn]

    def turn(self) -> None:
        """Go on to the next buffer, after the current one was handed over."""
        self._turn = (self._turn + 1) % len(self._buffers)


class Aside:
    """Work on pieces in a thread of its own, in their order; used in a `with` block.

    hashlib and the operating system work without the interpreter's lock, so that several such threads cost little more than the longest.
    """

    def __init__(self, work: Callable[[Piece], None], *, waiting: int = _WAITING) -> None:
        self._work = work
        self._queue = queue.Queue[Piece | None](waiting)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._drain, daemon=True)

    def __enter__(self) -> "Aside":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def put(self, piece: Piece) -> None:
        """Hand over the next piece, which must not change until it was worked on; waits while too many wait."""
        self._queue.put(piece)

    def finish(self) -> None:
        """Wait until all is done; nothing may be handed over after.

        Raises:
            Exception: what the work raised.
        """
        self._stop()
        if self._failure is not None:
            raise self._failure

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _drain(self) -> None:
        while (piece := self._queue.get()) is not None:
            # After a failure pieces are taken and dropped, so that whoever hands them over does not wait for ever.
            if self._failure is None:
                try:
                    self._work(piece)
                except BaseException as failure:
                    self._failure = failure


class Tally:
    """Measures bytes that come in pieces, in two threads beside the caller's work; used in a `with` block."""

    def __init__(self) -> None:
        self._whole, self._block = hashlib.sha256(), hashlib.sha256(b"\x00")
        self._size = self._filled = 0
        self._hashes: list[bytes] = []
        self._asides = (Aside(self._whole.update), Aside(self._blocks))

    def __enter__(self) -> "Tally":
        for aside in self._asides:
            aside.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for aside in self._asides:
            aside.__exit__()

    def feed(self, piece: Piece) -> None:
        """Take the next piece; it must not change until it was hashed (as a Ring sees to)."""
        self._size += len(piece)
        for aside in self._asides:
            aside.put(piece)

    def result(self) -> Measured:
        """What was fed; nothing may be fed after."""
        for aside in self._asides:
            aside.finish()
        hashes = [*self._hashes, self._block.digest()] if self._filled else self._hashes
        return Measured("sha256:" + self._whole.hexdigest(), self._size, tuple(hashes))

    def _blocks(self, piece: Piece) -> None:
        view = memoryview(piece)
        while view:
            part, view = view[: BLOCK - self._filled], view[BLOCK - self._filled :]
            self._block.update(part)
            self._filled += len(part)
            if self._filled == BLOCK:
                self._hashes.append(self._block.digest())
                self._block, self._filled = hashlib.sha256(b"\x00"), 0


class Digests:
    """Digest and size of each of several files that come in pieces one after the other, in a thread; used in a `with` block."""

    def __init__(self) -> None:
        self._state, self._size = hashlib.sha256(), 0
        self._name = ""
        self._names: list[str] = []
        self._found: dict[str, tuple[str, int]] = {}
        self._aside = Aside(self._take)

    def __enter__(self) -> "Digests":
        self._aside.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._aside.__exit__()

    def begin(self, name: str) -> None:
        """Pieces fed from now on are of this file."""
        self._names.append(name)
        self._aside.put(b"")

    def feed(self, piece: Piece) -> None:
        """Take the next piece of the file begun last; it must not change until it was hashed (as a Ring sees to)."""
        if piece:
            self._aside.put(piece)

    def result(self) -> dict[str, tuple[str, int]]:
        """Name -> (digest, size); nothing may be fed after."""
        self._aside.finish()
        self._end()
        return self._found

    def _take(self, piece: Piece) -> None:
        if piece:
            self._state.update(piece)
            self._size += len(piece)
            return
        self._end()
        self._name, self._state, self._size = self._names[len(self._found)], hashlib.sha256(), 0

    def _end(self) -> None:
        if self._name:
            self._found[self._name] = ("sha256:" + self._state.hexdigest(), self._size)
