"""The demo's servers: `acclimate api` and `acclimate dispatch` as processes of their own, ended with the demo."""

import json
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from acclimate import locks, ports, supervision
from acclimate.client import connection
from acclimate.supervision import command as command
from acclimate.supervision import shown as shown
from acclimate_competitions.errors import Refusal

STARTED_WITHIN = 60.0


def answered(*arguments: str, ends: tuple[int, ...] = (0,)) -> Any:
    """What an `acclimate` command prints with --json.

    Args:
        arguments: the command, without --json.
        ends: exit codes with which it prints what was asked for.

    Raises:
        Refusal: the command's own; job_failed, where it ended without a word for programs.
    """
    done = subprocess.run(command(*arguments, "--json"), capture_output=True, check=False, text=True)
    try:
        document = json.loads(done.stdout)
        if isinstance(document, dict) and "error" in document:
            error = document["error"]
            raise Refusal(error["code"], error["sentence"], hint=error["hint"], problems=error["problems"])
        if done.returncode in ends:
            return document
    except ValueError:
        pass
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    name = " ".join(word for word in arguments[:2] if word.isalpha())
    raise Refusal(
        "job_failed",
        f"acclimate {name} ended with {done.returncode}: {last[-500:]}",
        hint="run the demo again: it goes on where it stopped",
    )


class Servers:
    """API and dispatcher over one data folder; a context manager that starts and stops both.

    No server outlives a demo that was killed, and none is started again: where one ends, the demo ends.
    """

    def __init__(self, data: Path, *, runner: str) -> None:
        self.data = data
        self.runner = runner
        self.port = _port(data / "port.json")
        self.url = f"http://127.0.0.1:{self.port}"
        self._supervisor = supervision.Supervisor(data / "logs")

    def __enter__(self) -> Self:
        try:
            # Those of a demo that was killed end by themselves once they notice, later while Ray starts.
            held = [self.data / "api.lock", self.data / "dispatcher.lock"]
            locks.await_free(held, within=STARTED_WITHIN)
            self._start("api", "--port", str(self.port))
            deadline = time.monotonic() + STARTED_WITHIN
            with connection.Client(self.url, patience=0) as client:
                while not client.ready():
                    self.check()
                    if time.monotonic() > deadline:
                        raise Refusal(
                            "server_unreachable",
                            f"the API did not start within {STARTED_WITHIN:.0f} s",
                            hint=f"see {self._supervisor.log_of('api')}",
                        )
                    time.sleep(0.1)
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
        if (found := self._supervisor.ended()) is not None:
            name, status, told = found
            hint = f"see {self._supervisor.log_of(name)}" + (f"; it says: {told}" if told else "")
            raise Refusal("server_unreachable", f"acclimate {name} ended with {status}", hint=hint)

    def stop(self) -> None:
        """End both, the dispatcher first, so that it can finish what it writes."""
        self._supervisor.stop(order=("dispatch", "api"))

    def _start(self, name: str, *arguments: str) -> None:
        line, environment = ("--data", str(self.data), *arguments), {"ACCLIMATE_RUNNER": self.runner}
        self._supervisor.start(supervision.server(name, *line, environment=environment))


def _port(path: Path) -> int:
    """The port of this data folder: the accounts' folders name it, so it stays the same."""
    if path.exists():
        return int(json.loads(path.read_text("utf-8"))["port"])
    port = ports.free("127.0.0.1", 0, option="--port")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"port": port}), "utf-8")
    return port
