"""The demo's servers: `acclimate api` and `acclimate dispatch` as processes of their own, ended with the demo."""

import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from acclimate.client import connection
from acclimate_competitions.errors import Refusal

STARTED_WITHIN = 60.0
STOPPED_WITHIN = 20.0


def shown(*arguments: str) -> str:
    """A command line as a person would type it here: with the path of `acclimate` where it is not on the search path."""
    beside = Path(sys.executable).with_name("acclimate")
    program = "acclimate" if shutil.which("acclimate") or not beside.exists() else str(beside)
    return shlex.join([program, *arguments])


def command(*arguments: str) -> list[str]:
    """The command line of an acclimate command, run by this interpreter."""
    return [sys.executable, "-m", "acclimate", *arguments]


class Servers:
    """API and dispatcher over one data folder; a context manager that starts and stops both.

    Each gets a pipe as standard input and stops when it ends, so that no server outlives a demo that was killed.
    """

    def __init__(self, data: Path, *, runner: str) -> None:
        self.data = data
        self.runner = runner
        self.port = _port(data / "port.json")
        self.url = f"http://127.0.0.1:{self.port}"
        self._running: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []

    def __enter__(self) -> Self:
        try:
            self._start("api", "--port", str(self.port))
            deadline = time.monotonic() + STARTED_WITHIN
            with connection.Client(self.url, patience=0) as client:
                while not client.ready():
                    self.check()
                    if time.monotonic() > deadline:
                        raise Refusal(
                            "server_unreachable",
                            f"the API did not start within {STARTED_WITHIN:.0f} s",
                            hint=self._hint("api"),
                        )
                    time.sleep(0.1)
            self._await_end_of_another()
            self._start("dispatch")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def check(self) -> None:
        """Refuse to go on where a server has ended.

        Raises:
            Refusal: server_unreachable.
        """
        for name, process, _ in self._running:
            if process.poll() is not None:
                raise Refusal(
                    "server_unreachable", f"acclimate {name} ended with {process.returncode}", hint=self._hint(name)
                )

    def stop(self) -> None:
        """End both, the dispatcher first, so that it can finish what it writes."""
        for _, process, log in reversed(self._running):
            process.terminate()
            try:
                process.wait(STOPPED_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
            log.close()
        self._running.clear()

    def _await_end_of_another(self) -> None:
        """Wait for the dispatcher of a demo that was killed: it ends by itself once it notices, later while Ray starts."""
        with (self.data / "dispatcher.lock").open("ab") as lock:
            deadline = time.monotonic() + STARTED_WITHIN
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise Refusal(
                            "busy", f"another dispatcher works on {self.data}", hint="stop it, or name another folder"
                        ) from None
                    time.sleep(0.2)

    def _start(self, name: str, *arguments: str) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        log = (self.data / f"{name}.log").open("ab")
        environment = {**os.environ, "ACCLIMATE_RUNNER": self.runner}
        line = command(name, "--data", str(self.data), "--stop-with-stdin", *arguments)
        process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        self._running.append((name, process, log))

    def _hint(self, name: str) -> str:
        path = self.data / f"{name}.log"
        lines = path.read_text("utf-8", "replace").strip().splitlines() if path.exists() else []
        told = [line for line in lines if line.startswith("error: ")] or lines
        return f"see {path}" + (f"; it says: {told[-1][:300]}" if told else "")


def _port(path: Path) -> int:
    """The port of this data folder: the accounts' folders name it, so it stays the same."""
    if path.exists():
        return int(json.loads(path.read_text("utf-8"))["port"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"port": port}), "utf-8")
    return port
