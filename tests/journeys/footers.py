"""Parquet footers and page headers taken apart and put together again, so that tests can write what no writer would: Thrift's compact protocol."""

import struct
from pathlib import Path
from typing import Any

BINARY, I32, I64, LIST, STRUCT = 8, 5, 6, 9, 12
Field = list[Any]
"""[number, type, value] of a struct, to be changed in place; the value of a list is (type, values), of a struct [Field, …]."""


def load(path: Path) -> tuple[bytes, list[Field]]:
    """What stands before a file's footer, and the footer."""
    data = path.read_bytes()
    (length,) = struct.unpack("<I", data[-8:-4])
    body = len(data) - 8 - length
    return data[:body], _Reader(data, body).value(STRUCT)


def save(path: Path, body: bytes, footer: list[Field]) -> None:
    """Write a file of pages and a footer."""
    written = encoded(footer, STRUCT)
    path.write_bytes(body + written + struct.pack("<I", len(written)) + b"PAR1")


def get(found: list[Field], number: int) -> Field:
    """A struct's field."""
    return next(field for field in found if field[0] == number)


def page(size: int, packed: int, values: int) -> bytes:
    """The header of a data page."""
    about = [[1, I32, values], [2, I32, 0], [3, I32, 3], [4, I32, 3]]
    return encoded([[1, I32, 0], [2, I32, size], [3, I32, packed], [5, STRUCT, about]], STRUCT)


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def _unsigned(self) -> int:
        found = shift = 0
        while True:
            byte = self._byte()
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found

    def value(self, kind: int) -> Any:
        if kind in (4, I32, I64):
            number = self._unsigned()
            return (number >> 1) ^ -(number & 1)
        if kind in (1, 2, 3):
            return self._byte()
        if kind == BINARY:
            return self._take(self._unsigned())
        if kind == LIST:
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._unsigned()
            return head & 15, [self.value(head & 15) for _ in range(count)]
        assert kind == STRUCT, kind
        fields: list[Field] = []
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self.value(4)
            own = head & 15
            fields.append([number, own, None if own in (1, 2) else self.value(own)])
        return fields


def _unsigned(number: int) -> bytes:
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def _signed(number: int) -> bytes:
    return _unsigned(2 * number if number >= 0 else -2 * number - 1)


def encoded(value: Any, kind: int) -> bytes:
    """A value's bytes."""
    if kind in (4, I32, I64):
        return _signed(value)
    if kind in (1, 2, 3):
        return bytes([value])
    if kind == BINARY:
        return _unsigned(len(value)) + bytes(value)
    if kind == LIST:
        own, values = value
        head = bytes([len(values) << 4 | own]) if len(values) < 15 else bytes([15 << 4 | own]) + _unsigned(len(values))
        return head + b"".join(encoded(one, own) for one in values)
    found, last = b"", 0
    for number, own, one in value:
        near = 0 < number - last < 16
        found += bytes([number - last << 4 | own]) if near else bytes([own]) + _signed(number)
        found, last = found + (b"" if own in (1, 2) else encoded(one, own)), number
    return found + b"\0"
