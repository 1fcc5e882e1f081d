"""Whether a machine is fit for attempts, and which are left alone for a while because they were not.

An unfit machine refuses in no time and is idle again, so whatever places attempts on a cluster gives it the next one, too: without
this it would take all of them.
"""

import contextlib
import errno
import os
import time
import uuid
from collections import Counter
from pathlib import Path

from acclimate_runners.code import code_digest
from acclimate_runners.runner import Status

_ENOUGH = 2
_ASIDE = 300.0
"""Seconds for which a machine is left alone; found unfit once more after that, it is for as long again."""
LEAST = 16 << 20
"""Bytes that must be free where attempts are to be; what one really needs shows when it is there."""


def unfit(workdir: Path, code: str, *, machine: str) -> Status | None:
    """Why this machine can't take an attempt: other code than the dispatcher's, no folder for the attempt, a full disk; else None.

    Args:
        workdir: folder for the attempts.
        code: digest of the dispatcher's code.
        machine: what the runner calls this machine.
    """
    name = os.uname().nodename
    if code_digest() != code:
        reason = (
            f"the machine {name} has other code, {code_digest()}; the dispatcher has {code}: install the same version"
        )
        return Status("failed", reason=reason, code="runner_failed", unfit=machine, machine=machine)
    if why := without_folder(workdir):
        reason = f"the machine {name} {why}; set node_work to one it can"
        return Status("failed", reason=reason, code="runner_failed", unfit=machine, machine=machine)
    free = free_bytes(workdir)
    if free < LEAST:
        reason = f"the machine {name} has {free >> 20} MiB free in {workdir}: free some space there"
        return Status("failed", reason=reason, code="no_space", unfit=machine, machine=machine)
    return None


def without_folder(workdir: Path) -> str:
    """Why this machine has no folder that can be written to; empty where it has, be it full or not."""
    probe = workdir / f".{uuid.uuid4().hex}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        try:
            probe.touch()
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ""
        return f"can't make the folder {workdir} or write to it: {error.strerror}"
    return ""


def free_bytes(workdir: Path) -> int:
    """Bytes that are free for this process in a folder; without end where the machine doesn't say."""
    try:
        found = os.statvfs(workdir)
    except OSError:
        return 1 << 62
    return found.f_bavail * found.f_frsize


class SetAside:
    """Machines that were unfit for two attempts, or are full, left alone for five minutes."""

    def __init__(self) -> None:
        self._found = Counter[str]()
        self._until = dict[str, float]()
        self._why = dict[str, str]()

    def note(self, machine: str, *, reason: str = "", enough: int = _ENOUGH) -> None:
        """A machine was unfit for an attempt; it is left alone after so many times."""
        self._found[machine] += 1
        self._why[machine] = reason
        if self._found[machine] >= enough:
            self._until[machine] = time.monotonic() + _ASIDE

    def now(self) -> tuple[str, ...]:
        """The machines to be left alone."""
        return tuple(sorted(machine for machine, until in self._until.items() if time.monotonic() < until))

    def why(self, machine: str) -> str:
        """What was last found there."""
        return self._why.get(machine, "")
