"""Canonical JSON against the published sequence of 100 million numbers, and the documents published beside it."""

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "rfc8785.json").read_text("utf-8"))


def sequence() -> Iterator[int]:
    """The bits of the published numbers: chosen ones, 2,000 in a row from 2^-1022, then finite halves of a chain of SHA-256."""
    yield from (int(text, 16) for text in VECTORS["numbers"])
    yield from range(0x0010_0000_0000_0000, 0x0010_0000_0000_0000 + 2000)
    block = bytes(32)
    while True:
        block = hashlib.sha256(block).digest()
        for bits in struct.unpack("<4Q", block):
            value = struct.unpack("<d", struct.pack("<Q", bits))[0]
            if value != 0.0 and math.isfinite(value):
                yield bits


def sum_of(count: int) -> str:
    state = hashlib.sha256()
    for bits in islice(sequence(), count):
        value = struct.unpack("<d", struct.pack("<Q", bits))[0]
        state.update(f"{bits:x},{digests.canonical(value).decode()}\n".encode())
    return state.hexdigest()


@pytest.mark.parametrize("count", [1_000, 10_000, 100_000])
def test_the_first_published_numbers_are_written_as_published(count: int) -> None:
    assert sum_of(count) == VECTORS["sums"][str(count)]


@pytest.mark.slow
def test_a_million_published_numbers_are_written_as_published() -> None:
    assert sum_of(1_000_000) == VECTORS["sums"]["1000000"]


def test_each_of_the_first_numbers_is_read_back_from_the_bytes_written() -> None:
    for bits in islice(sequence(), 5_000):
        value = struct.unpack("<d", struct.pack("<Q", bits))[0]
        once = digests.canonical(value)
        assert digests.parse_canonical(once) == value
        assert digests.canonical(digests.parse_canonical(once)) == once


@pytest.mark.parametrize("case", VECTORS["documents"], ids=lambda case: case["name"])
def test_the_published_documents_are_written_as_published(case: dict[str, str]) -> None:
    given, expected = bytes.fromhex(case["input"]), bytes.fromhex(case["output"])
    assert digests.canonical(json.loads(given)) == expected
    assert digests.canonical(digests.parse_canonical(expected)) == expected
    if given != expected:
        with pytest.raises(Refusal) as refused:
            digests.parse_canonical(given)
        assert refused.value.code == "not_canonical"
