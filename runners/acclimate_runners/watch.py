"""Whether an attempt goes on: what moves in it, and since when nothing has.

An attempt that makes no progress for ten minutes, or for five times what its steps or its words take if that is longer, hangs. Progress is a
word of its child, which it says after each batch (words.py), a call of its blobs that begins or ends, and bytes that arrive. It is counted from the start, so inputs that never come
and a child that never says anything are found too. Only this process's monotonic clock is asked, so no jump of the wall clock counts.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from acclimate_competitions.errors import Refusal
from acclimate_runners.attempts import Attempt
from acclimate_runners.runner import BlobAccess, Status

_STEPS = 5
"""A step, or a word, may take so many times what the median one of its attempt took."""
_SLOWEST = 1 << 20
"""Bytes a second; a file on its way, and a blob that is re-hashed, is given the time it would need at this speed."""
_GAP = 60.0
"""Of the time between two looks no more than this counts: whoever did not look may have been stopped, and the attempt with it."""


@dataclass(frozen=True)
class Patience:
    """How long a runner waits, in seconds.

    Attributes:
        hang: for progress of an attempt, at least.
        unasked: for a dispatcher that asks after an attempt, before the attempt leaves its place to others.
        checkpoint: for a checkpoint of an attempt that must leave.
        end: for the end of a child that was told to end.
    """

    hang: float = 600.0
    unasked: float = 300.0
    checkpoint: float = 20.0
    end: float = 10.0


class Transfers:
    """Blobs as one attempt uses them, with a note of what moves.

    Attributes:
        store_full: whether the blobs' own place had no space left.
    """

    def __init__(self, blobs: BlobAccess) -> None:
        self._blobs = blobs
        self._calls = 0
        self._path: Path | None = None
        self._hashed = 0
        self.store_full = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*given: Any, **named: Any) -> Any:
            self._calls += 1
            self._path = next((one for one in (*given, *named.values()) if isinstance(one, Path)), None)
            try:
                if name == "check":
                    # Nothing is heard of what is only read.
                    self._hashed = self._blobs.size(*given)
                return getattr(self._blobs, name)(*given, **named)
            except Refusal as refusal:
                # What is fetched comes into the attempt's own folder; all else goes to the store.
                self.store_full = self.store_full or (refusal.code == "no_space" and name != "get")
                raise
            finally:
                self._calls += 1
                self._path, self._hashed = None, 0

        return call

    def moved(self) -> tuple[int, int]:
        """What changes as long as something moves: calls begun and ended, and bytes beside the file on its way."""
        return self._calls, self._bytes(whole=True)

    def size(self) -> int:
        """Bytes of the file on its way, or of the blob that is re-hashed; 0 for none."""
        return self._hashed or self._bytes(whole=False)

    def _bytes(self, *, whole: bool) -> int:
        path, count = self._path, 0
        if path is None:
            return 0
        try:
            for each in path.parent.iterdir() if whole else [path]:
                count += each.stat().st_size
        except OSError:
            # It comes and goes while it is looked at.
            return count
        return count


class Watched:
    """An attempt that is ended where it hangs.

    Args:
        attempt: begun by start().
        transfers: the blobs it was given.
        machine: where it runs, as the runner calls it.
        patience: of the runner.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        attempt: Attempt,
        transfers: Transfers,
        *,
        machine: str,
        patience: Patience,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.attempt, self.transfers = attempt, transfers
        self._machine, self._patience, self._clock = machine, patience, clock
        self._lock = threading.Lock()
        self._seen: object = None
        self._moved = self._looked = clock()
        self._quiet = 0.0
        self._paces = (_Paces(self._looked), _Paces(self._looked))
        self._hung = ""
        self._given_up = 0.0

    def start(self) -> None:
        """Begin; returns at once."""
        self.attempt.start()

    def cancel(self) -> None:
        """As Attempt's."""
        self.attempt.cancel()

    def join(self, timeout: float) -> bool:
        """As Attempt's."""
        return self.attempt.join(timeout)

    def poll(self) -> Status:
        """Where it stands; ends it where it hangs."""
        with self._lock:
            status = self.attempt.poll()
            now = self._clock()
            self._look(status, now)
            if status.state == "running" and not self._hung and self._quiet > self._bound():
                self._hung = (
                    f"it hung: no progress for {self._quiet:.0f} s at {status.step} of {status.total}, {status.what}"
                )
                self._given_up = now
                self.attempt.cancel()
            if self._hung and status.state == "running" and now - self._given_up > self._patience.end:
                # What waits for a store or a disk can't be ended; whoever asks ends the process, or leaves it.
                status = replace(status, state="failed")
            if self._hung and status.state == "failed":
                status = replace(status, code="hung", reason=self._hung)
            return replace(status, machine=self._machine, silent=now - self._moved)

    def _look(self, status: Status, now: float) -> None:
        seen = (
            status.state,
            status.step,
            status.total,
            status.what,
            status.network,
            status.words,
            self.transfers.moved(),
        )
        self._quiet += min(now - self._looked, _GAP)
        self._looked = now
        if seen != self._seen:
            self._seen, self._moved, self._quiet = seen, now, 0.0
        for paces, count in zip(self._paces, (status.step, status.words), strict=True):
            paces.look(count, now)

    def _bound(self) -> float:
        median = max(paces.median() for paces in self._paces)
        return max(self._patience.hang, _STEPS * median, self.transfers.size() / _SLOWEST)


class _Paces:
    """How long one of what is counted takes."""

    def __init__(self, now: float) -> None:
        self._count, self._changed = 0, now
        self._paces = deque[float](maxlen=101)

    def look(self, count: int, now: float) -> None:
        """So many there are now."""
        if count != self._count:
            # What comes before the first is no work of the same kind.
            if count > self._count > 0:
                self._paces.append((now - self._changed) / (count - self._count))
            self._count, self._changed = count, now

    def median(self) -> float:
        """In seconds; 0 while nothing is known."""
        return statistics.median(self._paces) if self._paces else 0.0


def watched(make: Callable[[BlobAccess], Attempt], blobs: BlobAccess, *, machine: str, patience: Patience) -> Watched:
    """An attempt, not begun yet, that is watched; `make` makes it with the blobs that it is given."""
    transfers = Transfers(blobs)
    return Watched(make(cast("BlobAccess", transfers)), transfers, machine=machine, patience=patience)
