"""The form of a bundle's ZIP: one content, whichever way it is read.

A ZIP says what it holds twice, in a header before each member and in a directory at its end, and most readers go by one of the two. So
that none finds another content, or bytes that no check reads:

1. The first member begins with the file, each next one where the one before it ends, in the order of the directory; the directory follows
   the last, and the end follows the directory.
2. A member's header says what the directory says of it: name, method, flags, time, checksum and both sizes. The sizes stand before the
   bytes, not behind them.
3. There are no comments, and of extra fields only sizes and offsets of large members (zip64), which say the same, and the timestamps and
   user numbers of Info-ZIP's `zip`.
4. A folder has no bytes. A file is stored or deflated, with no bytes behind what they unpack to.
"""

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from acclimate.verify.report import Failed

_END, _LOCATOR, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
_CENTRAL, _LOCAL = struct.Struct("<4s2HH10s8xHHHHH4xL"), struct.Struct("<4sHH10s8xHH")
_SIZES = struct.Struct("<LL")
_MOST16, _MOST32 = 0xFFFF, 0xFFFFFFFF
_FLAGS = 0x0806
"""How hard a member was deflated, and that its name is UTF-8."""
_ZIP64 = 0x0001
_HARMLESS = {0x5455: 13, 0x7875: 19}
"""Extra fields that only tell times, users and groups, and how long each can be."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class _Said:
    """What a header or the directory says of a member: its name, flags, [method, time, date, checksum], sizes, and offset."""

    name: bytes
    flags: int
    fixed: bytes
    compressed: int
    size: int
    offset: int


def require_one_content(stream: IO[bytes], where: str) -> None:
    """Refuse a ZIP that another reader may read otherwise, or that holds bytes which nobody reads.

    Args:
        stream: the ZIP, at any place.
        where: its name, for the report.

    Raises:
        Failed: naming the member.
    """
    begins, length, count, ends = _end(stream, where)
    at, members = 0, 0
    for said in _directory(stream, where, begins=begins, ends=ends):
        place = f"{where}, member {said.name.decode('utf-8', 'replace')!r}"
        if said.offset != at:
            raise Failed(
                place,
                f"it begins at byte {said.offset} of the ZIP, what stands before it ends at byte {at}: no check reads what no member is",
            )
        if said.flags & ~_FLAGS or b"\0" in said.name:
            raise Failed(
                place, "it is encrypted, has its sizes behind its bytes, or has a name that readers read differently"
            )
        stored = said.fixed[:2] == struct.pack("<H", zipfile.ZIP_STORED)
        if not stored and said.fixed[:2] != struct.pack("<H", zipfile.ZIP_DEFLATED):
            raise Failed(place, "it is neither stored nor deflated")
        if (stored and said.size != said.compressed) or (said.name.endswith(b"/") and said.size + said.compressed):
            raise Failed(place, f"{said.compressed} bytes of it stand in the ZIP, and {said.size} are its own")
        at = _header(stream, said, place) + said.compressed
        members += 1
    if (at, members) != (begins, count) or length != ends - begins:
        raise Failed(
            where,
            f"its {members} members end at byte {at}, its directory is of {count} and begins at byte {begins}: no check reads what no member is",
        )


def require_no_rest(stream: IO[bytes], member: zipfile.ZipInfo) -> None:
    """Refuse a deflated member with bytes behind the end of what it unpacks to; it was unpacked already.

    Raises:
        zipfile.BadZipFile, zlib.error: it has, or is damaged.
    """
    if member.compress_type != zipfile.ZIP_DEFLATED:
        return
    stream.seek(member.header_offset)
    _, *_, name, extra = _LOCAL.unpack(_read(stream, _LOCAL.size))
    stream.seek(name + extra, os.SEEK_CUR)
    left, unpacker = member.compress_size, zlib.decompressobj(-zlib.MAX_WBITS)
    while not unpacker.eof:
        chunk = unpacker.unconsumed_tail
        if not chunk:
            chunk = stream.read(min(left, _CHUNK))
            left -= len(chunk)
        # Without a byte to read, it may still hold some to write.
        if not unpacker.decompress(chunk, _CHUNK) and not chunk:
            break
    if left or unpacker.unused_data or not unpacker.eof:
        raise zipfile.BadZipFile("bytes stand behind what it unpacks to, or it is cut off")


def _end(stream: IO[bytes], where: str) -> tuple[int, int, int, int]:
    """Where the directory begins, its length, its number of members, and where it ends."""
    total = stream.seek(0, os.SEEK_END)
    ends = total - _END.size
    _, disk, first, here, count, length, begins, comment = found = _at(stream, _END, ends)
    if found[0] != b"PK\5\6" or comment:
        raise Failed(where, "bytes stand behind the end of the ZIP, or it has a comment: no check would read them")
    if ends >= _LOCATOR.size and _at(stream, _LOCATOR, ends - _LOCATOR.size)[0] == b"PK\6\7":
        _, at, large, disks = _at(stream, _LOCATOR, ends - _LOCATOR.size)[0:4]
        ends -= _LOCATOR.size + _END64.size
        record = _at(stream, _END64, max(ends, 0))
        sizes = record[6:10]
        short = zip((here, count, length, begins), sizes, (_MOST16, _MOST16, _MOST32, _MOST32), strict=True)
        agrees = all(one in (other, most) for one, other, most in short)
        if record[:2] != (b"PK\6\6", _END64.size - 12) or (at, large, disks) != (0, ends, 1) or not agrees:
            raise Failed(where, "the end of the ZIP says two things")
        (disk, first), (here, count, length, begins) = record[4:6], sizes
    if disk or first or here != count or begins + length != ends:
        raise Failed(where, f"the directory of the ZIP is not what stands before its end, at byte {ends}")
    return begins, length, count, ends


def _directory(stream: IO[bytes], where: str, *, begins: int, ends: int) -> Iterator[_Said]:
    at = begins
    while at < ends:
        mark, _, _, flags, fixed, name, extra, comment, disk, _, offset = _at(stream, _CENTRAL, at)
        compressed, size = _SIZES.unpack(_bytes(stream, at + 20, 8))
        if mark != b"PK\1\2":
            raise Failed(where, f"at byte {at} of the ZIP no member of its directory begins")
        raw = _bytes(stream, at + _CENTRAL.size, name + extra)
        place = f"{where}, member {raw[:name].decode('utf-8', 'replace')!r}"
        if comment or disk:
            raise Failed(place, "it has a comment, which no check would read, or lies in another ZIP")
        size, compressed, offset = _whole(raw[name:], place, size, compressed, offset)
        yield _Said(raw[:name], flags, fixed, compressed, size, offset)
        at += _CENTRAL.size + name + extra
    if at != ends:
        raise Failed(where, "the directory of the ZIP does not end where it says")


def _header(stream: IO[bytes], said: _Said, place: str) -> int:
    """Where the bytes of a member begin, behind its header, which says what the directory says."""
    mark, _, flags, fixed, name, extra = _at(stream, _LOCAL, said.offset)
    compressed, size = _SIZES.unpack(_bytes(stream, said.offset + 18, 8))
    raw = _bytes(stream, said.offset + _LOCAL.size, name + extra)
    size, compressed = _whole(raw[name:], place, size, compressed)
    if mark != b"PK\3\4" or _Said(raw[:name], flags, fixed, compressed, size, said.offset) != said:
        raise Failed(place, "its header says something else than the directory of the ZIP")
    return said.offset + _LOCAL.size + len(raw)


def _whole(extra: bytes, place: str, *values: int) -> list[int]:
    """Sizes and offset, those that are too large for their field from the extra field for them."""
    fields: dict[int, bytes] = {}
    while extra:
        kind, length = struct.unpack_from("<HH", extra) if len(extra) >= 4 else (0, _MOST16)
        field, extra = extra[4 : 4 + length], extra[4 + length :]
        if len(field) != length or kind in fields or length > _HARMLESS.get(kind, 24 if kind == _ZIP64 else -1):
            raise Failed(
                place,
                f"it has the extra field {kind:#06x}, doubled, cut off, or none that a bundle's may have: no check would read it",
            )
        fields[kind] = field
    large = fields.get(_ZIP64, b"")
    if len(large) != 8 * values.count(_MOST32):
        raise Failed(place, "its sizes in the extra field for large members are not those that its header lacks")
    whole = iter(struct.unpack(f"<{len(large) // 8}Q", large))
    return [next(whole) if value == _MOST32 else value for value in values]


def _at(stream: IO[bytes], form: struct.Struct, at: int) -> tuple[Any, ...]:
    return form.unpack(_bytes(stream, at, form.size))


def _bytes(stream: IO[bytes], at: int, count: int) -> bytes:
    if at < 0:
        raise zipfile.BadZipFile("it is cut off")
    stream.seek(at)
    return _read(stream, count)


def _read(stream: IO[bytes], count: int) -> bytes:
    found = stream.read(count)
    if len(found) != count:
        raise zipfile.BadZipFile("it is cut off")
    return found
