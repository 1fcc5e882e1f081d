"""The API for tests of its operation: in this process, and `acclimate api` as a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import live
import pytest
from live import Live
from waiting import WITHIN, until

SECRET = "geheim"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Live]:
    with live.serve(tmp_path, metrics="on") as server:
        yield server


def acclimate(*words: str, code: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    program = ["-c", code] if code else ["-m", "acclimate"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    return subprocess.run(
        [sys.executable, *program, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**kept, **environment},
    )


class Api:
    """`acclimate api` as a process of its own."""

    def __init__(self, data: Path, *words: str, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
        self.errors = data.with_name(f"{data.name}.err")
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "acclimate", "api", "--data", str(data), "--port", "0", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**kept, **environment},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " on http://" in line, self.errors.read_text("utf-8")
        self.url = line.split(" on ")[1].split(" ")[0]
        self.port = int(self.url.rpartition(":")[2])
        until(self.answers)

    def answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.get("/healthz").status_code == 200
        return False

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=WITHIN, **options)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors.read_text("utf-8").splitlines()]

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(WITHIN)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@contextlib.contextmanager
def api(data: Path, *words: str, **environment: str) -> Iterator[Api]:
    started = Api(data, *words, **environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait()
        assert started.process.stdout is not None
        started.process.stdout.close()
