"""A dispatcher is killed: how long until the one that stands by leads and has its runner, beside the time of the lease."""

import signal
import sys
import tempfile
import time
from pathlib import Path

import dispatching
import live as staging

LEASE = 2.0
"""Seconds, of dispatching.QUICK; only what comes on top of it is measured, so any other would do."""


def measure(folder: Path) -> list[tuple[str, float]]:
    """Seconds from the SIGKILL to leading, and to a runner that takes attempts, both without the lease's own time."""
    with staging.serve(folder / "served") as live:
        first = dispatching.Process(live, folder / "first", quick=True)
        second = None
        try:
            first.await_("runner ready")
            second = dispatching.Process(live, folder / "second", quick=True)
            second.await_("standby")
            first.signal(signal.SIGKILL)
            killed = time.monotonic()
            second.await_("leading")
            leads = time.monotonic() - killed
            second.await_("runner ready")
            ready = time.monotonic() - killed
        finally:
            for process in (first, second):
                if process is not None:
                    process.end()
    return [
        ("killed → another leads, beyond the lease", leads - LEASE),
        ("killed → it may start attempts", ready - LEASE),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, value in measure(Path(temporary)):
            sys.stdout.write(f"{name}: {value:.2f} s\n")
