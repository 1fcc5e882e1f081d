"""Changes of JSON data, chosen by bytes: what a fuzzer or a seeded draw does to a valid document."""

import contextlib
import copy
import io
from collections.abc import Sequence
from typing import Any

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal


class Bytes:
    """Choices read off the fuzzer's bytes, zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    def below(self, bound: int) -> int:
        """A number from 0 to bound − 1."""
        return int.from_bytes(self._stream.read(2), "big") % bound

    def one_of(self, values: Sequence[Any]) -> Any:
        """A copy of one of these."""
        return copy.deepcopy(values[self.below(len(values))])

    def rest(self) -> bytes:
        """What was not used."""
        return self._stream.read()


POOL: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 2**53 - 1, 1 - 2**53, 0.5, -0.5, 1e300, 5e-324, "", "x", "\x00", "é", "\U0001f600",
    "a" * 3000, "sha256:" + "5e" * 32, "sha256:" + "0" * 64, "2027-03-01T00:00:00.000000Z", "2027-03-01T00:00:00Z", "9999-12-31T23:59:59.999999Z",
    "0001-01-01T00:00:00.000000Z", "2027-02-30T00:00:00.000000Z", [], {}, [None], [[]], [{}], {"": None}, ["", ""], [0, 0],
)  # fmt: skip


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in JSON data."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] + [path for name, item in inside for path in paths(item, (*at, name))]


def edited(document: Any, choices: Bytes) -> Any:
    """The document with one to three changes: values replaced, moved, doubled, dropped or added."""
    document = copy.deepcopy(document)
    for _ in range(1 + choices.below(3)):
        places = [path for path in paths(document) if path]
        if not places:
            return document
        *before, name = choices.one_of(places)
        parent = document
        for step in before:
            parent = parent[step]
        act = choices.below(4)
        if act == 0:
            del parent[name]
        elif act == 1 and isinstance(parent, list):
            parent.insert(name, copy.deepcopy(parent[name]))
        elif act == 1:
            parent[choices.one_of(("v", "type", "round", "x", "\x00", "predecessor", "failed"))] = choices.one_of(POOL)
        elif act == 2:
            found = document
            for step in choices.one_of(places):
                with contextlib.suppress(KeyError, IndexError, TypeError):
                    found = found[step]
            parent[name] = copy.deepcopy(found)
        else:
            parent[name] = choices.one_of(POOL)
    return document


def written(document: Any) -> bytes | None:
    """Its canonical JSON, where it has one."""
    try:
        return digests.canonical(document)
    except Refusal:
        return None
