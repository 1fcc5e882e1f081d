"""One command at a time: what two of them read, change and write at once in a key folder would be lost for one of the two.

The lock is the kernel's, given up with its process however that ended.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from acclimate_competitions.errors import Refusal

_WITHIN = 30.0
_LOOK = 0.02


@contextmanager
def alone(path: Path, *, doing: str, within: float = _WITHIN) -> Iterator[None]:
    """Hold a lock file, made where there is none, for as long as the context lasts.

    Args:
        path: the file.
        doing: what another one may be at, for what is said.
        within: seconds after which it is no use waiting.

    Raises:
        Refusal: busy; file_unreadable, where it can't be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    except OSError as error:
        raise Refusal(
            "file_unreadable", f"{path}: {error.strerror}", hint="check the folder and who owns it"
        ) from error
    try:
        until = time.monotonic() + within
        while not _locked(descriptor):
            if time.monotonic() > until:
                raise Refusal("busy", f"another command is {doing}", hint="let it end, then repeat this one")
            time.sleep(_LOOK)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
