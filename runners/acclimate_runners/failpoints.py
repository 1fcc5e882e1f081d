"""Points at which a test kills this process: what it leaves behind must be enough for whoever goes on.

For tests only. Nothing happens unless the environment has both

- ACCLIMATE_FAILPOINT=NAME, NAME:N or NAME:N:stop, one of POINTS, at whose N-th passage (the first) the process kills itself by SIGKILL, or
  stops itself by SIGSTOP, and
- ACCLIMATE_FAILPOINT_KILLS=this-process.

The first without the second is refused by every command, as a setting that there is not.
"""

import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping

POINTS = (
    "claimed",
    "started",
    "done",
    "settled",
    "committing",
    "committed",
    "moving",
    "moved",
    "opened",
    "opening",
    "ranked",
    "publishing",
    "finishing",
    "marking",
    "ended",
    "stored",
    "noted",
)
"""claimed: a try has its fence, its runner hasn't heard of it; started: it has, nobody has asked yet; done: its outcome was heard of, nothing
of it is written; settled: a submission is accepted or refused, its check not closed; committing, committed: an outcome's transaction
before and after its end; moving, moved: a transition's; opened: a holdout's files are blobs, opening: its transaction before its end;
ranked: a ranking is a blob, publishing: its transaction before its end; finishing: a round is finished, marking: the outbox's mark before its end; ended: a child's manifest is there, none of its files is a blob
yet; stored: all are; noted: so is the outcome's note."""
_POINT, _SURE = "ACCLIMATE_FAILPOINT", "ACCLIMATE_FAILPOINT_KILLS"
VARIABLES = frozenset({_POINT, _SURE})
_lock = threading.Lock()
_passed: Counter[str] = Counter()


def armed(environ: Mapping[str, str]) -> bool:
    """Whether this environment's process kills itself somewhere."""
    return _POINT in environ and environ.get(_SURE) == "this-process"


def reach(point: str) -> None:
    """Pass a point, which only a test's process may not survive."""
    if not armed(os.environ):
        return
    name, number, how = [*os.environ[_POINT].split(":"), "", ""][:3]
    if point == name:
        with _lock:
            _passed[point] += 1
            if _passed[point] == int(number or 1):
                os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
