"""How often a witness refused, by log and kind: for its operator's eyes, and worth as much as a log line.

It lies beside the memory and not in it: whoever may ask can be refused as often as they like, and must not make the witness write each time.
So it is counted at once, and written at most once a second, and when the witness ends; a killed witness forgets the last second.
"""

import contextlib
import json
import os
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

KINDS = {
    400: "no request of this protocol",
    403: "not signed by a known key of the log",
    404: "a log that is not known here",
    408: "too slow",
    409: "from another size than the newest cosigned",
    413: "too long",
    422: "no proof joins it to what was cosigned",
    503: "the clock, the disk, or too many at once",
}
_PAUSE = 1.0
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Count:
    """Refusals of one kind.

    Attributes:
        origin: the log; empty where the witness knows none of that name, or could not tell.
        status: as HTTP has it, a key of KINDS.
        count: how many.
        last: when the last one was, seconds since 1970.
        reason: of the last one.
    """

    origin: str
    status: int
    count: int
    last: int
    reason: str


class Tally:
    """The counts of a running witness.

    Args:
        path: their file, which goes on where it was; None keeps them in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._found = {(one.origin, one.status): one for one in read(path)} if path is not None else {}
        self._waiting: threading.Timer | None = None

    def add(self, origin: str, status: int, *, reason: str, at: int) -> None:
        """Count one; returns at once, and never raises."""
        with self._lock:
            before = self._found.get((origin, status))
            count = before.count + 1 if before else 1
            self._found[origin, status] = Count(origin, status, count, at, reason[:_LONGEST_REASON])
            if self._path is not None and self._waiting is None:
                self._waiting = threading.Timer(_PAUSE, self._write)
                self._waiting.daemon = True
                self._waiting.start()

    def counts(self) -> list[Count]:
        """All, by log and kind."""
        with self._lock:
            return sorted(self._found.values(), key=lambda one: (one.origin, one.status))

    def close(self) -> None:
        """Write what is not written yet."""
        with self._lock:
            waiting = self._waiting
        if waiting is not None:
            waiting.cancel()
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._waiting, found = None, list(self._found.values())
        assert self._path is not None
        draft = self._path.with_name(f".{self._path.name}")
        # A witness that can't count goes on.
        with contextlib.suppress(OSError):
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump([asdict(one) for one in found], file)
            draft.replace(self._path)


def read(path: Path) -> list[Count]:
    """The counts in a file, by log and kind; none where there is none, or something else."""
    if not path.exists():
        return []
    try:
        found = [Count(**item) for item in reading.document(path)]
        checked = [replace(one, count=int(one.count), last=int(one.last)) for one in found if one.status in KINDS]
        return sorted(checked, key=lambda one: (one.origin, one.status))
    except (Refusal, TypeError, ValueError):
        return []
