"""A dispatcher on whose runner attempts crash whenever they are tried, and the stages that are blocked by it."""

from collections.abc import Sequence

from dispatching import Said, Troubled
from live import Live
from sqlalchemy import select

from acclimate.dispatch import Dispatcher
from acclimate.store import stages
from acclimate_runners.jobs import CheckJob, EvaluateJob, Job, PrepareJob
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import BlobAccess, Demand, Handle, Status

CRASHED = Status("failed", reason="killed by SIGSEGV", code="job_failed")
KINDS = {"check": CheckJob, "prepare": PrepareJob, "evaluate": EvaluateJob}


class Crashing(Troubled):
    """A runner on which the first attempts of a kind crash whenever they are tried."""

    def __init__(self, runner: LocalRunner, kind: type[Job], *, most: int, before: list[Status], spared: str) -> None:
        super().__init__(runner, [])
        self._kind, self._most, self._before, self._spared = kind, most, before, spared
        self.doomed = set[str]()

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand) -> Handle:
        attempt = name.partition("/")[0]
        if isinstance(job, self._kind) and getattr(job, "entrant", None) != self._spared:
            if len(self.doomed) < self._most:
                self.doomed.add(attempt)
            if attempt in self.doomed:
                return Said(self._before.pop(0) if self._before else CRASHED)
        return super().start(name, job, blobs, demand=demand)


def crashing(
    live: Live, kind: str, *, most: int = 1, before: Sequence[Status] = (), spared: str = "nobody"
) -> Dispatcher:
    """A dispatcher over such a runner.

    Args:
        live: the installation.
        kind: of the attempts.
        most: how many of them crash.
        before: what the first of their tries come to instead.
        spared: an entrant none of whose evaluations crash.
    """
    local = lambda: LocalRunner(live.settings.work, slots=1)  # noqa: E731
    runner = lambda: Crashing(local(), KINDS[kind], most=most, before=list(before), spared=spared)  # noqa: E731
    return Dispatcher(live.store, live.store.blobs, live.settings, runner)


def blocked(live: Live) -> list:
    with live.store.snapshot() as tx:
        return list(tx.execute(select(stages).where(stages.c.state == "blocked").order_by(stages.c.key)).all())
