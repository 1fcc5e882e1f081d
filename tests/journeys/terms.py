"""Dispatchers that a test steps itself, and what becomes of their lease."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import live as staging
import pytest
from dispatching import beside
from live import Live
from sqlalchemy import select, update
from waiting import WITHIN

from acclimate.dispatch import Dispatcher
from acclimate.lease import Lease
from acclimate.store import Store, leases, outbox, stages
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import Runner


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with staging.serve(tmp_path) as running:
        yield running


class Placed:
    """A dispatcher in a data folder of its own; stepped by the test."""

    def __init__(self, live: Live, folder: Path, *, runner: Callable[[], Runner] | None = None, **more: Any) -> None:
        self.settings = beside(live, folder)
        self.store = Store.open(self.settings, clock=live.clock)
        factory = runner or (lambda: LocalRunner(self.settings.work, slots=2))
        self.dispatcher = Dispatcher(self.store, self.store.blobs, self.settings, factory, **more)

    def __enter__(self) -> Dispatcher:
        return self.dispatcher.__enter__()

    def __exit__(self, *error: object) -> None:
        self.dispatcher.__exit__()
        self.store.close()


def driven(running: Dispatcher, condition: Callable[[], object], *, within: float = WITHIN) -> set[str]:
    """Step until it is so, through refusals, which come back as codes."""
    codes, until = set[str](), time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, f"it did not happen; {codes}"
        try:
            running.step()
        except Refusal as refusal:
            codes.add(refusal.code)
        time.sleep(0.02)
    return codes


def holder(live: Live) -> str:
    with live.store.snapshot() as tx:
        return str(tx.execute(select(leases.c.holder).where(leases.c.name == "dispatch")).scalar_one())


def depose(live: Live) -> None:
    """The lease runs out and is another's, and the one that led has not heard of it."""
    with live.store.transaction() as tx:
        ended = format_time(tx.now() - timedelta(seconds=1))
        tx.execute(update(leases).where(leases.c.name == "dispatch").values(expires=ended))
    assert Lease(live.store, holder="another").take()


def written(live: Live) -> Any:
    """All that a leader writes: the log, the stages, and what was finished."""
    with live.store.snapshot() as tx:
        rows = [tuple(row) for row in tx.execute(select(stages).order_by(stages.c.key))]
        return tx.size(), rows, len(tx.execute(select(outbox)).all())
