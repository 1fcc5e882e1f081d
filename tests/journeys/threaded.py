"""Dispatchers in threads, each with a store of its own, over one server."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import live as staging
import pytest
from dispatching import beside
from live import Live
from sqlalchemy import select

from acclimate import config
from acclimate.dispatch import Dispatcher
from acclimate.store import Store, leases
from acclimate_runners.local import LocalRunner


@dataclass
class Threaded:
    """A dispatcher in a thread, with a store of its own."""

    settings: config.Settings
    store: Store
    dispatcher: Dispatcher
    stop: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def beside(cls, live: Live, folder: Path) -> "Threaded":
        settings = beside(live, folder)
        store = Store.open(settings, clock=live.clock)
        factory = lambda: LocalRunner(settings.work, slots=2)  # noqa: E731
        return cls(settings, store, Dispatcher(store, store.blobs, settings, factory))

    @contextlib.contextmanager
    def running(self) -> Iterator["Threaded"]:
        thread = threading.Thread(target=self.dispatcher.run, args=[self.stop])
        thread.start()
        try:
            yield self
        finally:
            self.stop.set()
            thread.join(60)
            self.store.close()
            assert not thread.is_alive()


def lease_of(live: Live) -> Any:
    with live.store.snapshot() as tx:
        return tx.execute(select(leases).where(leases.c.name == "dispatch")).one()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with staging.serve(tmp_path) as running:
        yield running
