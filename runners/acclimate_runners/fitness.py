"""Whether a machine is fit for attempts, and which are left alone for a while because they were not.

An unfit machine refuses in no time and is idle again, so whatever places attempts on a cluster gives it the next one, too: without
this it would take all of them.
"""

import os
import time
from collections import Counter
from pathlib import Path

from acclimate_runners.code import code_digest
from acclimate_runners.runner import Status

_ENOUGH = 2
_ASIDE = 300.0
"""Seconds for which a machine is left alone; found unfit once more after that, it is for as long again."""


def unfit(workdir: Path, code: str, *, machine: str) -> Status | None:
    """Why this machine can't take an attempt: it has other code than the dispatcher, or no folder for the attempt; else None.

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
        return Status("failed", reason=reason, code="runner_failed", unfit=machine)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the machine {name} can't make the folder {workdir}: {error.strerror}; set node_work to one it can"
        return Status("failed", reason=reason, code="runner_failed", unfit=machine)
    return None


class SetAside:
    """Machines that were unfit for two attempts, left alone for five minutes."""

    def __init__(self) -> None:
        self._found = Counter[str]()
        self._until = dict[str, float]()

    def note(self, machine: str) -> None:
        """A machine was unfit for an attempt."""
        self._found[machine] += 1
        if self._found[machine] >= _ENOUGH:
            self._until[machine] = time.monotonic() + _ASIDE

    def now(self) -> tuple[str, ...]:
        """The machines to be left alone."""
        return tuple(sorted(machine for machine, until in self._until.items() if time.monotonic() < until))
