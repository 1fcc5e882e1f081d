"""Whether a database's clock can be believed, as far as one process can tell: by its machine's clock, and by what nobody sets.

What is logged at a wrong time can't be taken back: one reading far ahead would close every open round, and no later record could say an
earlier time. One far back would let in what comes late, dated like the newest record. So a process that sees the clock leap, stand far from its
own machine's or behind the log, logs nothing until all are right again.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time

APART = 3600.0
"""Seconds by which the database's clock and this machine's may differ."""
BEHIND = 3600
"""Seconds by which the database's clock may be behind the log's newest record, where the setting `clock_behind` says nothing else."""
LEAP = 86_400.0
"""Seconds by which the database's clock may get ahead of what has passed since the process began; a machine may have slept for a while."""


class Clocks:
    """This process's view of the clocks, from now on.

    Args:
        machine: this machine's clock, seconds since 1970.
        steady: seconds that nobody sets.
        behind: seconds by which the database's clock may be behind the newest record.
    """

    def __init__(
        self,
        *,
        machine: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
        behind: float = BEHIND,
    ) -> None:
        self._machine, self._steady, self._behind = machine, steady or since_boot, behind
        self._start = self._machine() - self._steady()

    def check(self, now: datetime, *, last: datetime | None = None) -> None:
        """Refuse a reading of the database's clock that can't be right.

        Args:
            now: the reading.
            last: the time of the log's newest record; None where there is none.

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
        if last is not None and (last - now).total_seconds() > self._behind:
            raise Refusal(
                "busy",
                f"the database's clock says {format_time(now)}, the log's newest record {format_time(last)}: "
                "nothing is logged until the clock has caught up",
                hint="where the clock was set back, set it right, and it goes on by itself; where the record is ahead, "
                "wait, or let the operator raise the setting `clock_behind`",
            )


def since_boot() -> float:
    """Seconds that nobody sets; those that the machine slept are among them where the system counts them."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)
