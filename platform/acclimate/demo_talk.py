"""What the demo says while it waits, where its output is no terminal and nobody sees a bar."""

import time
from collections.abc import Callable
from datetime import datetime

from rich.console import Console

QUIET = 12.0
"""Seconds after which a line says what is waited for."""


class Talk:
    """What is said, and a line where nothing was said for QUIET seconds and no bar is seen."""

    def __init__(
        self, say: Callable[[str], None], *, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._console, self._clock = say, console, clock
        self._last = clock()

    def say(self, line: str) -> None:
        """Say it now."""
        self._last = self._clock()
        self._say(line)

    def still(self, line: str) -> None:
        """Say what is waited for, where it is time to."""
        if not self._console.is_terminal and self._clock() - self._last >= QUIET:
            self.say(line)


def open_still(closes: datetime, now: datetime) -> str:
    """What an open round that has all its models waits for."""
    if now < closes:
        return f"  all models are in; the round stays open until {closes:%H:%M:%S} UTC, as was announced"
    return f"  the close was due {closes:%H:%M:%S} UTC; the dispatcher logs it as soon as this machine lets it"
