"""`acclimate up` and `acclimate mlflow` as operators run them: real processes, and what is left of them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from waiting import WITHIN

PATIENCE = WITHIN
NEXT_TO_PYTHON = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCLIMATE_", "MLFLOW_"))}
    return {**clean, "PATH": f"{NEXT_TO_PYTHON}{os.pathsep}{os.environ['PATH']}", **more}


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (result := found()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)
    return result


def processes() -> dict[int, tuple[int, int]]:
    """pid -> (parent, session) of all that runs; what has ended and waits for its parent doesn't."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if state != "Z":
                table[int(entry.name)] = (int(parent), int(session))
    return table


def children(pid: int) -> set[int]:
    return {one for one, (parent, _) in processes().items() if parent == pid}


def of_sessions(sessions: set[int]) -> set[int]:
    return {pid for pid, (_, session) in processes().items() if session in sessions}


@dataclass
class Up:
    """`acclimate up` under way."""

    process: subprocess.Popen[str]
    out: Path
    err: Path
    sessions: set[int] = field(default_factory=set)

    @property
    def told(self) -> str:
        return self.err.read_text("utf-8")

    @property
    def printed(self) -> str:
        return self.out.read_text("utf-8")

    def ready(self) -> "Up":
        def there() -> bool:
            assert self.process.poll() is None, self.told + self.printed
            # Of the JSON line and of the page for people, the end is written last.
            return self.printed.endswith("\n") and ("Ctrl-C" in self.printed or self.printed.startswith("{"))

        until(there, "ready")
        self.look()
        return self

    def look(self) -> None:
        """Remember the sessions of its parts."""
        self.sessions |= children(self.process.pid)

    @property
    def facts(self) -> Any:
        return json.loads(self.printed)

    def end(self, number: int) -> int:
        self.look()
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def assert_gone(self) -> None:
        """Nothing of it is left: no part, and nothing that a part started."""
        assert self.sessions
        until(lambda: not of_sessions(self.sessions), f"the end of {of_sessions(self.sessions)}")


class Starter:
    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, list[Up]()

    def __call__(self, data: Path, *arguments: object, **more: str) -> Up:
        number = len(self.made)
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        line = [sys.executable, "-m", "acclimate", "up", "--data", data, "--port", "0", *arguments]
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [str(word) for word in line],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment(**more),
                text=True,
            )
        self.made.append(Up(process, out, err))
        return self.made[-1]

    def close(self) -> None:
        for one in self.made:
            if one.process.poll() is None:
                one.look()
                one.process.kill()
                one.process.wait()
            if one.sessions:
                one.assert_gone()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("ups"))
    yield starter
    starter.close()
