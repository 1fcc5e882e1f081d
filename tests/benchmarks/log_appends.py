"""How many log entries a second are appended durably, by several threads at once: on SQLite, and on a PostgreSQL of its own.

Each append is what a request does: a signed record, put through the round's rules, in a transaction that is on the disk when it ends. Beside it
stands what the disk itself takes: how often a second a small file can be written and synced.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

JOURNEYS = Path(__file__).resolve().parent.parent / "journeys"
THREADS = 16
SECONDS = 4.0


def appends(store, made, *, threads: int = THREADS, seconds: float = SECONDS) -> float:
    """Entries a second in an open round, with a sequencer that signs meanwhile."""
    import rounds_made
    import stored

    from acclimate.sequencer import Sequencer
    from acclimate_competitions import records

    kinds = [records.parse(entry).type for entry in made.entries]
    there = kinds.index("RoundOpened") + 1
    stored.fill(store, made, entries=there)
    # Signed before the clock runs, as by the entrants on their own machines.
    signed = [_registration(records, rounds_made, made.round, number) for number in range(int(seconds * 2000))]
    sequencer = Sequencer(store, made.signer)
    sequencer.start()
    waiting, done, end = iter(signed), [0] * threads, threading.Event()
    lock, begin = threading.Lock(), threading.Barrier(threads + 1)

    def work(number: int) -> None:
        begin.wait()
        while not end.is_set():
            with lock:
                one = next(waiting, None)
            if one is None:
                return
            with store.transaction() as tx:
                tx.append(one)
            done[number] += 1

    started = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    begin.wait()
    began = time.perf_counter()
    end.wait(seconds)
    end.set()
    for thread in started:
        thread.join()
    took = time.perf_counter() - began
    sequencer.close()
    with store.snapshot() as tx:
        assert tx.size() == sum(done) + there > there
    return sum(done) / took


def _registration(records, rounds_made, round_id: str, number: int):
    name = f"e{number}"
    fields = {"entrant": name, "ed25519": rounds_made.public(name), "conflicts": []}
    return records.sign("EntrantRegistered", round_id, fields, key=rounds_made.key(name))


def syncs(folder: Path, *, seconds: float = 1.0) -> float:
    """How often a second a block can be appended to a file and synced here."""
    with (folder / "block").open("wb", buffering=0) as file:
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            file.write(b"\0" * 4096)
            os.fdatasync(file.fileno())
            count += 1
    return count / (time.perf_counter() - began)


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """The URL of a database in a server that syncs what it commits, as in earnest."""
    import engines

    engines._QUICK.update(fsync="on", full_page_writes="on", shared_buffers="128MB")
    server = engines.Server.begin()
    try:
        yield server.fresh()
    finally:
        server.end()


def measure(folder: Path) -> list[tuple[str, float]]:
    """(what, how many a second)."""
    sys.path.insert(0, str(JOURNEYS))
    import rounds_made

    from acclimate import config
    from acclimate.store import Store

    (folder / "made").mkdir(parents=True)
    made = rounds_made.make(folder / "made", publish=False)
    rows = [("syncs of 4 KiB", syncs(folder))]
    with postgresql() as url:
        for name, given in (("SQLite", {}), ("PostgreSQL", {"database": url})):
            # The made round lies in the future.
            settings = config.load(folder / name, environ={}, given={"clock_behind": 10**9, **given})
            store = Store.open(settings)
            rows.append((f"log appends, {name}, {THREADS} threads", appends(store, made)))
            store.close()
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for what, rate in measure(Path(temporary)):
            sys.stdout.write(f"{what}: {rate:.0f}/s\n")
