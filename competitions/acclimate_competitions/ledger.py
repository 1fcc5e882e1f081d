"""A mapping that only grows, as an immutable value: `plus` makes the next one without copying this one."""

import threading
from collections.abc import Iterator, Mapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

_lock = threading.Lock()


class Ledger(Mapping[K, V]):
    """An immutable mapping, in the order of growth.

    All values that grew from one another share one dict, and each sees as many of its first keys as it was made with; so growing
    the newest costs the same at any size. Growing an older one, as after a refused transaction, copies.
    """

    __slots__ = ("_length", "_shared")

    def __init__(self) -> None:
        self._shared: dict[K, tuple[int, V]] = {}
        self._length = 0

    def plus(self, key: K, value: V) -> "Ledger[K, V]":
        """This mapping with one key more.

        Raises:
            ValueError: for a key that is there already.
        """
        if key in self:
            raise ValueError(f"{key!r} is there already")
        grown: Ledger[K, V] = Ledger()
        with _lock:
            shared = self._shared
            if len(shared) != self._length:  # somebody grew it otherwise
                shared = {own: held for own, held in shared.items() if held[0] < self._length}
            shared[key] = (self._length, value)
        grown._shared, grown._length = shared, self._length + 1
        return grown

    def __getitem__(self, key: K) -> V:
        place, value = self._shared[key]
        if place >= self._length:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        held = self._shared.get(key)  # type: ignore[arg-type]
        return held is not None and held[0] < self._length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[K]:
        # A copy: another thread may be growing the shared dict meanwhile.
        with _lock:
            keys = list(self._shared)
        return iter(keys[: self._length])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and list(self.items()) == list(other.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ledger({dict(self)!r})"
