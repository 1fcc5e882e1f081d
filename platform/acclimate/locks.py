"""Lock files: who works on a data folder. The kernel gives a lock up with its process, however that ended, so none is ever stale.

Who only looks takes the lock for an instant, beside others who look. So whoever wants it tries for longer than an instant.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from acclimate_competitions.errors import Refusal

_INSTANT = 0.3
_LOOK = 0.05
Say = Callable[[str], None]


def take(path: Path) -> IO[str] | None:
    """Hold a lock for as long as the file that comes back is open; None where another process holds it.

    Raises:
        OSError: where the file can't be made or written.
    """
    # Its owner's alone: whoever may open it may hold it, and so keep everybody from starting.
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="ascii")
    try:
        deadline = time.monotonic() + _INSTANT
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                file.close()
                return None
            time.sleep(0.01)
        with contextlib.suppress(PermissionError):
            path.chmod(0o600)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def share(path: Path) -> IO[str] | None:
    """Hold a lock beside others who only read, for as long as the file that comes back is open; None where another process holds it alone.

    Raises:
        OSError: where the file is not there, or can't be read.
    """
    file = path.open("r", encoding="ascii", errors="replace")
    if not _locked(file, fcntl.LOCK_SH):
        file.close()
        return None
    return file


def holder(path: Path) -> str:
    """Who holds a lock: "process 123", or "another process" where it doesn't say; empty where nobody does, as far as can be seen."""
    with contextlib.suppress(OSError), path.open("r", encoding="ascii", errors="replace") as file:
        if not _locked(file, fcntl.LOCK_SH):
            found = file.read(20).strip()
            return f"process {found}" if found.isdecimal() else "another process"
    return ""


def await_free(
    paths: Sequence[Path],
    *,
    within: float,
    say: Say = lambda line: None,
    stop: threading.Event | None = None,
) -> None:
    """Wait until no process holds one of these lock files: parts whose supervisor was killed end by themselves, in seconds.

    Args:
        paths: the lock files; those that are not there are free.
        within: seconds after which it is no use waiting.
        say: told once, after two seconds.
        stop: ends the waiting early.

    Raises:
        Refusal: busy.
    """
    began, said = time.monotonic(), False
    while held := next(((path, who) for path in paths if (who := holder(path))), None):
        path, who = held
        waited = time.monotonic() - began
        if waited > within:
            raise Refusal(
                "busy",
                f"data folder in use by another process: {who} holds {path}",
                hint="stop it, or name another folder with --data",
            )
        if waited > 2.0 and not said:
            said = True
            say(f"waiting for {who}, which still runs on this data folder ({path.name})")
        if stop is not None and stop.is_set():
            return
        time.sleep(_LOOK)


def _locked(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
