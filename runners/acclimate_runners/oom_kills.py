"""Whether the kernel has killed a process for want of memory."""

import contextlib
import time
from pathlib import Path

_KILLED_WITHIN = 5.0
"""Seconds."""


class OomKills:
    """How many processes of a process's control group the kernel has killed for want of memory; unknown where it doesn't say.

    Args:
        pid: the process, which may have ended by the time that one asks.
    """

    def __init__(self, pid: int) -> None:
        self._files = _oom_files(pid)
        self._looked = time.monotonic()
        # A kill is counted a moment before the process has ended: what the last look saw may be this one's.
        self._before = self._last = self._count()

    def look(self) -> None:
        """Called again and again, so that what others were killed for long ago is not taken for this one's."""
        if time.monotonic() - self._looked > _KILLED_WITHIN:
            self._looked = time.monotonic()
            self._before, self._last = self._last, self._count()

    @property
    def known(self) -> bool:
        """Whether the kernel says how many there were."""
        return self._read() is not None

    def grown(self) -> bool:
        """Whether there was one in the last seconds."""
        return self._count() > self._before

    def _count(self) -> int:
        return self._read() or 0

    def _read(self) -> int | None:
        for path, name in self._files:
            with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
                return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == name)
        return None


def _oom_files(pid: int) -> list[tuple[Path, str]]:
    """Where to look for a process's kills: of its control group of either version, else of the whole machine."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found.append((Path(f"/sys/fs/cgroup/{path}/memory.events"), "oom_kill"))
            elif "memory" in controllers.split(","):
                found.append((Path(f"/sys/fs/cgroup/memory/{path}/memory.oom_control"), "oom_kill"))
    return [each for each in found if each[0].exists()] or [(Path("/proc/vmstat"), "oom_kill")]
