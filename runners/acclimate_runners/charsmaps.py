"""How much longer SentencePiece's precompiled map of characters (a step `Precompiled` of a normalizer) can make a text.

The map is a number of bytes, so many bytes of a double array (Darts), and the replacements, each ended by a zero byte. A key of the array leads to the
place of its replacement. What the maps of SentencePiece do is NFKC, with other things besides; so a replacement weighs as much as its key, by
unicode_forms.py, and no more.
"""

import base64
import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from acclimate_runners import unicode_forms

_UNITS = 1 << 18
"""Units of a double array that is walked; SentencePiece's own have 45 thousand."""
_NODES = 1 << 19
"""Ways through it that are gone, since ends of keys may share their units."""
_DEEPEST = 64
"""Bytes of the longest key; those of SentencePiece have twelve."""
_ROWS = 4096
_VALUE = (1 << 31) - 1
_LABEL = 1 << 31 | 0xFF
Units = npt.NDArray[np.int64]


@lru_cache(maxsize=8)
def growth(charsmap: str) -> float:
    """How many times heavier a map makes a text at most, weights being those of unicode_forms.py with all forms.

    Of a map that is none, or has no end, it is the weight of the longest replacement there may be; of what is no base64, without end.
    """
    try:
        data = base64.b64decode(charsmap, validate=True)
    except ValueError:
        return math.inf
    size = int.from_bytes(data[:4], "little")
    texts = data[4 + size :] if size <= len(data) - 4 else data
    found = _entries(data[4 : 4 + size], texts) if size <= len(data) - 4 else None
    if found is None:
        return max(1.0, max(map(_weight, texts.split(b"\0"))))
    return max([1.0, *(_weight(value) / max(1.0, _weight(key)) for key, value in found)])


def _weight(text: bytes) -> float:
    try:
        return unicode_forms.weight(text.decode("utf-8"), "compatible")
    except UnicodeDecodeError:
        # A key may be a part of a character, and weighs no less than it has bytes; a wrong byte becomes a sign of three.
        return 3.0 * len(text)


def _entries(array: bytes, texts: bytes) -> list[tuple[bytes, bytes]] | None:
    """Each key with its replacement; None where the array is none, has a circle or too many ways, or is longer than _UNITS."""
    if not array or len(array) % 4 or len(array) // 4 > _UNITS:
        return None
    units = np.frombuffer(array, "<u4").astype(np.int64)
    found, walked = [], 0
    keys, places = [b""], _offset(units[:1])
    while keys:
        deeper: list[bytes] = []
        reached = []
        for parent, labels, at in _children(units, places):
            walked += len(at)
            if walked > _NODES or len(keys[0]) >= _DEEPEST:
                return None
            own = [keys[row] + bytes([label]) for row, label in zip(parent, labels, strict=True)]
            below = at ^ _offset(units[at])
            leaf = ((units[at] >> 8) & 1 == 1) & (below < len(units))
            for number in np.flatnonzero(leaf):
                start = int(units[below[number]]) & _VALUE
                found.append((own[number], texts[start:].partition(b"\0")[0]))
            deeper += own
            reached.append(below)
        keys, places = deeper, np.concatenate([np.empty(0, np.int64), *reached])
    return found


def _children(units: Units, places: Units) -> Iterator[tuple[Units, Units, Units]]:
    """(row of the parent, label, unit) of the nodes below places of the array."""
    labels = np.arange(1, 256)
    for start in range(0, len(places), _ROWS):
        at = places[start : start + _ROWS, None] ^ labels
        there = at < len(units)
        there &= (units[np.where(there, at, 0)] & _LABEL) == labels
        rows, columns = np.nonzero(there)
        yield rows + start, labels[columns], at[rows, columns]


def _offset(units: Units) -> Units:
    return (units >> 10) << ((units & (1 << 9)) >> 6)
