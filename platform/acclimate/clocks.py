"""Whether a database's clock can be believed, as far as one process can tell: by its machine's clock, and by what nobody sets.

What is logged at a wrong time can't be taken back: one reading far ahead would close every open round, and no later record could say an
earlier time. So a process that sees the clock leap, or stand far from its own machine's, logs nothing until both are right again.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time

APART = 3600.0
"""Seconds by which the database's clock and this machine's may differ."""
LEAP = 86_400.0
"""Seconds by which the database's clock may get ahead of what has passed since the process began; a machine may have slept for a while."""


class Clocks:
    """This process's view of the clocks, from now on.

    Args:
        machine: this machine's clock, seconds since 1970.
        steady: seconds that nobody sets.
    """

    def __init__(self, *, machine: Callable[[], float] = time.time, steady: Callable[[], float] | None = None) -> None:
        self._machine, self._steady = machine, steady or since_boot
        self._start = self._machine() - self._steady()

    def check(self, now: datetime) -> None:
        """Refuse a reading of the database's clock that can't be right.

        Raises:
            Refusal: busy, as it may be right in a moment.
        """
        here = self._machine()
        apart, leapt = now.timestamp() - here, now.timestamp() - self._start - self._steady()
        if abs(apart) > APART:
            other = format_time(datetime.fromtimestamp(here, UTC))
            raise Refusal(
                "busy",
                f"the database's clock says {format_time(now)}, this machine's {other}: nothing is logged while they are so far apart",
                hint="one of the two is wrong: set it right (NTP), and it goes on by itself",
            )
        if leapt > LEAP:
            raise Refusal(
                "busy",
                f"the database's clock says {format_time(now)}, {leapt:.0f} s more than have passed since this process began: nothing is logged",
                hint="where it is wrong, set it right, and it goes on by itself; where it is right, as after a long sleep, start the process again",
            )


def since_boot() -> float:
    """Seconds that nobody sets; those that the machine slept are among them where the system counts them."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)
