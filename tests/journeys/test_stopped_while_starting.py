"""A dispatcher that is told to end while its runner still starts ends at once, and takes what was started along."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ups import Starter, environment, of_sessions, start
from waiting import WITHIN, until

from acclimate import hosting
from acclimate.hosting import Host
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import Runner

__all__ = ["start"]


@pytest.mark.parametrize("leaving", [True, False])
def test_a_runner_in_the_making_is_left_alone_only_where_the_process_ends(
    leaving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "_PATIENCE", 10 * WITHIN)
    making, made = threading.Event(), threading.Event()

    def factory() -> Runner:
        making.set()
        made.wait()
        raise ConnectionError("nobody waits for it any more")

    host = Host(factory)
    host.start()
    assert making.wait(WITHIN)
    closed = threading.Event()
    closing = threading.Thread(target=lambda: (host.close(leaving=leaving), closed.set()), daemon=True)
    closing.start()
    if leaving:
        assert closed.wait(WITHIN)
        assert not made.is_set()
    made.set()
    assert closed.wait(WITHIN)
    assert host.left is leaving


def test_a_runner_that_is_there_is_closed_also_where_the_process_ends(tmp_path: Path) -> None:
    host = Host(lambda: LocalRunner(tmp_path / "work", 1))
    host.start()
    until(lambda: host.runner is not None)
    host.close(leaving=True)
    assert host.runner is None
    assert not host.left


def gcs_of(session: int) -> int | None:
    for pid in of_sessions({session}):
        try:
            if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                return pid
        except OSError:
            continue
    return None


@pytest.mark.slow
def test_a_dispatcher_whose_ray_does_not_come_up_ends_with_all_that_it_started(start: Starter, tmp_path: Path) -> None:
    """Alone, so that nobody else ends what it leaves behind; its Ray is held still in the midst of its start."""
    pytest.importorskip("ray")
    begun = start(tmp_path / "data", "--runner", "local", "--no-mlflow", "--json").ready()
    assert begun.end(signal.SIGTERM) == 0
    line = [sys.executable, "-m", "acclimate", "dispatch", "--data", str(tmp_path / "data")]
    log = tmp_path / "dispatch.log"
    with log.open("w") as out:
        process = subprocess.Popen(line, stdout=out, stderr=out, env=environment(), start_new_session=True)
    try:
        os.kill(until(lambda: gcs_of(process.pid)), signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN) == 0
        told = log.read_text("utf-8")
        assert '"event": "stopped"' in told
        assert '"event": "runner ready"' not in told
        assert '"event": "no runner"' not in told
        until(lambda: not of_sessions({process.pid}))
    finally:
        for pid in of_sessions({process.pid}):
            os.kill(pid, signal.SIGKILL)
        process.wait()
