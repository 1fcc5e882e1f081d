"""A day without work, played by the database's clock: nothing grows, in the database, on the disk or in memory."""

import gc
import os
import threading
import tracemalloc
from collections import Counter
from datetime import timedelta
from pathlib import Path

import live as staging
import pytest
from live import START, Live
from sqlalchemy import func, select

from acclimate.dispatch import Dispatcher
from acclimate.store import metadata
from acclimate_competitions.records import format_time
from acclimate_runners.local import LocalRunner

MINUTES, EACH = 24 * 60, 2
SEEN = ("/healthz", "/readyz", "/metrics", "/v1/rounds", "/v1/log/checkpoint", "/v1/pool")


def grown(live: Live, *, others: set[threading.Thread]) -> dict[str, int]:
    """What might grow: rows of each table, bytes on the disk, open files, threads; but not the threads of other tests."""
    with live.store.snapshot() as tx:
        found = {
            name: tx.execute(select(func.count()).select_from(t)).scalar_one() for name, t in metadata.tables.items()
        }
    files = [
        path
        for path in live.settings.data.rglob("*")
        # The copy of a checkpoint is made once half a minute has passed by the wall's clock.
        if path.is_file() and not path.name.endswith(("-wal", "-shm")) and not path.name.startswith("CHECKPOINT")
    ]
    # A checkpoint of SQLite's journal moves pages into the file, which may take one of them more.
    found["MiB"] = sum(path.stat().st_size for path in files) >> 20
    found["files"] = len(files)
    found["open files"] = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    # Those of a look at the server's health come and go.
    own = set(threading.enumerate()) - others
    lasting = [t.name.split("_")[0] for t in own if t.name not in ("health", "blobs probe")]
    found |= {f"thread {name}": n for name, n in Counter(lasting).items()}
    return found


@pytest.mark.slow
def test_a_day_without_work_leaves_no_growth(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    with staging.serve(tmp_path, metrics="on") as live:
        staged = staging.open_round(live, tmp_path, closes=format_time(START + timedelta(days=2)))
        staging.submit_model(staged, staging.enter(staged, live.actor("ada")), seed=1)
        visitor = live.anyone()

        def pass_time(minutes: int) -> None:
            for minute in range(0, minutes, EACH):
                live.clock.forward(minutes=EACH)
                running.step()
                if minute % 10 == 0:
                    for path in (*SEEN, staged.path, f"{staged.path}/stages"):
                        assert visitor.get(path).status_code == 200, path

        runner = lambda: LocalRunner(live.settings.work, slots=1)  # noqa: E731
        with Dispatcher(live.store, live.store.blobs, live.settings, runner) as running:
            pass_time(60)
            before = grown(live, others=others)
            gc.collect()
            tracemalloc.start()
            # Caches fill in the first half of the day.
            pass_time(MINUTES // 2)
            gc.collect()
            held = tracemalloc.get_traced_memory()[0]
            pass_time(MINUTES // 2)
            gc.collect()
            more = tracemalloc.get_traced_memory()[0] - held
            tracemalloc.stop()
            after = grown(live, others=others)
            # A pool of connections breathes by a few.
            after["open files"] -= 24
            assert {name: n for name, n in after.items() if n > before.get(name, 0)} == {}
            assert set(after) >= set(before), "a thread has ended"
    # What is held of a moment changes a little; a leak of one small object a step would be hundreds of them.
    assert more < 100 * MINUTES // EACH // 2, f"{more} bytes more after half a day"
