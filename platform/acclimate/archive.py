"""The holdout's archive: files in one byte sequence that has exactly one form, so that equal files give equal bytes.

Layout (POSIX.1-1988 ustar, readable by any `tar`): for each member a header block and its data, then two zero blocks.

    header, 512 bytes                                   data
    0    name, ASCII, padded with NUL to 100            the member's bytes, padded with NUL to a multiple of 512
    100  mode "0000644" NUL
    108  uid, gid "0000000" NUL, each
    124  size, 11 octal digits, NUL
    136  mtime "00000000000" NUL
    148  checksum: the sum of the header's bytes with this field as 8 blanks; 6 octal digits, NUL, blank
    156  type "0"; then 100 NUL for the link's name
    257  "ustar" NUL "00"; then 247 NUL

The first member is `row_key` (32 bytes); the others follow in bytewise order of their names. Names are made of A–Z a–z 0–9 . _ / -, at
most 100 characters, with no empty, `.` or `..` part; no name is another's folder, and no two differ in case only. Nothing else is
an archive: the reader builds each header again from what it read and compares.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from acclimate_competitions.errors import Refusal

ROW_KEY = "row_key"
BLOCK = 512
CHUNK = 1 << 20
LARGEST_MEMBER = 8**11 - 1
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


def ordered(names: Iterable[str]) -> list[str]:
    """Names in bytewise order.

    Raises:
        Refusal: splits_invalid, where a name or two of them can't stand in an archive.
    """
    result = sorted(names, key=str.encode)
    folded = {name.lower() for name in result}
    folders = {folder for name in result for folder in _folders(name)}
    for name in result:
        if not is_name(name):
            raise Refusal(
                "splits_invalid",
                f"{name!r} can't be a file of a holdout",
                hint="use A-Z a-z 0-9 . _ - and / between folders, at most 100 characters; row_key is reserved",
            )
    if len(folded) != len(result) or folded & folders:
        raise Refusal("splits_invalid", "two files of the holdout have the same name, or one is the other's folder")
    return result


def is_name(name: str) -> bool:
    """Whether a member may have this name."""
    plain = _NAME.fullmatch(name) is not None and len(name) <= 100 and name.lower() != ROW_KEY
    return plain and not any(part in (".", "..") for part in name.split("/"))


def _folders(name: str) -> list[str]:
    parts = name.lower().split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def header(name: str, size: int) -> bytes:
    """A member's header block."""
    fields = [
        name.encode("ascii").ljust(100, b"\0"),
        b"0000644\0" + b"0000000\0" * 2,
        b"%011o\0" % size + b"0" * 11 + b"\0",
        b" " * 8,
        b"0" + b"\0" * 100,
        b"ustar\x0000" + b"\0" * 247,
    ]
    fields[3] = b"%06o\0 " % sum(b"".join(fields))
    return b"".join(fields)


def size_of(sizes: Mapping[str, int]) -> int:
    """Bytes of the archive of files with these names and sizes."""
    return sum(BLOCK + size + -size % BLOCK for size in (32, *sizes.values())) + 2 * BLOCK


def write(
    files: Mapping[str, Path],
    row_key: bytes,
    *,
    watch: Callable[[str], Callable[[memoryview], None] | None] = lambda _: None,
    room: Callable[[], bytearray] = lambda: bytearray(CHUNK),
) -> Iterator[bytes | memoryview]:
    """The archive's bytes, in pieces of at most 1 MiB.

    Args:
        files: name -> file.
        row_key: 32 bytes.
        watch: asked before each file for what is to be called with each piece of it, if anything.
        room: gives the buffer of the next piece of a file.

    Raises:
        Refusal: splits_invalid; file_unreadable, where a file can't be read or changes while it is.
    """
    yield header(ROW_KEY, len(row_key)) + _padded(row_key)
    for name in ordered(files):
        path = files[name]
        try:
            with path.open("rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                yield member_header(name, size)
                told, left = watch(name), size
                while count := stream.readinto(buffer := room()):
                    left -= count
                    if left < 0:
                        break
                    piece = memoryview(buffer)[:count]
                    if told is not None:
                        told(piece)
                    yield piece
                if left:
                    raise Refusal(
                        "file_unreadable",
                        f"{name} changed while it was read; {size} bytes were expected",
                        hint="seal again",
                    )
                yield b"\0" * (-size % BLOCK)
        except OSError as error:
            raise Refusal("file_unreadable", f"{path}: {error.strerror or error}") from error
    yield b"\0" * (2 * BLOCK)


def member_header(name: str, size: int) -> bytes:
    """A member's header block, of a size that its field can say.

    Raises:
        Refusal: splits_invalid.
    """
    if size > LARGEST_MEMBER:
        raise Refusal(
            "splits_invalid",
            f"{name} has {size} bytes, at most {LARGEST_MEMBER} fit into an archive",
            hint="split it into several Parquet files",
        )
    return header(name, size)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % BLOCK)


def extract(pieces: Iterable[bytes], folder: Path) -> tuple[bytes, list[str]]:
    """Write an archive's members below a folder, and give its row_key and their names.

    1. The first member is row_key, of 32 bytes.
    2. Each header is exactly the one that `header` builds for the name and size it states; names rise; paddings are zero.
    3. No name leads out of the folder, nor into another member; files are made new, never opened.
    4. Two zero blocks end it, and nothing follows.

    Args:
        pieces: the archive's bytes, cut anywhere.
        folder: an empty folder.

    Raises:
        Refusal: seal_mismatch, where the bytes are not an archive.
        OSError: where a file can't be written.
    """
    source = _Source(pieces)
    # 1
    key = _take_row_key(source)
    source.skip_padding(32)
    # 2, 3
    names: list[str] = []
    taken, folders = set[str](), set[str]()
    while any(block := source.take(BLOCK)):
        name = block[:100].rstrip(b"\0").decode("ascii", "replace")
        size = int(block[124:135], 8) if re.fullmatch(rb"[0-7]{11}", block[124:135]) else -1
        if not is_name(name) or size < 0 or header(name, size) != block:
            raise _not_an_archive(f"the header of member {name!r} is not of the layout")
        if names and name.encode() <= names[-1].encode():
            raise _not_an_archive(f"member {name!r} is out of order")
        # Names of one archive may not meet on a file system that ignores case either.
        if name.lower() in taken or name.lower() in folders or not taken.isdisjoint(_folders(name)):
            raise _not_an_archive(f"member {name!r} has the name of another one or of its folder")
        names.append(name)
        taken.add(name.lower())
        folders.update(_folders(name))
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as stream:
            for piece in source.pieces(size):
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        source.skip_padding(size)
    # 4
    if any(source.take(BLOCK)) or not source.at_end():
        raise _not_an_archive("something follows its end")
    return key, names


def row_key(pieces: Iterable[bytes]) -> bytes:
    """The row_key of an archive, from its beginning alone.

    Args:
        pieces: the archive's bytes, cut anywhere; no more of them are taken than are needed.

    Raises:
        Refusal: seal_mismatch, where it does not begin with one.
    """
    return _take_row_key(_Source(pieces))


def _take_row_key(source: "_Source") -> bytes:
    if source.take(BLOCK) != header(ROW_KEY, 32):
        raise _not_an_archive("it does not begin with row_key")
    return source.take(32)


class _Source:
    """Bytes that come in pieces, taken in other pieces."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def pieces(self, size: int) -> Iterator[memoryview]:
        while size:
            while not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    raise _not_an_archive("it ends in the middle")
                self._rest = memoryview(piece)
            part, self._rest = self._rest[:size], self._rest[size:]
            size -= len(part)
            yield part

    def take(self, size: int) -> bytes:
        return b"".join(self.pieces(size))

    def skip_padding(self, size: int) -> None:
        if any(self.take(-size % BLOCK)):
            raise _not_an_archive("a padding is not zero")

    def at_end(self) -> bool:
        return not self._rest and not any(map(len, self._pieces))


def _not_an_archive(why: str) -> Refusal:
    return Refusal("seal_mismatch", f"what the seal holds is not a holdout's archive: {why}")
