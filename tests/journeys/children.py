"""Real children of a runner, each with a folder's job."""

import threading
from pathlib import Path

from acclimate_runners import isolation, jobs


def started(folder: Path, *, memory: int = 4 << 30) -> isolation.Child:
    limits = jobs.Limits((), 0, 0, memory=memory, wall_seconds=280.0)
    return isolation.spawn(folder, limits=limits, threads=1)


def ran(folder: Path) -> jobs.Outcome:
    ended = started(folder).supervise(threading.Event())
    assert not ended.reason, (ended, (folder / "child.log").read_text("utf-8")[-3000:])
    outcome = jobs.read_outcome(folder)
    assert outcome is not None and outcome.status == "done"
    return outcome
