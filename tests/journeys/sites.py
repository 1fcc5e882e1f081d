"""Installations under test: `acclimate up` or its parts as real processes, which can be ended and started again."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chosen_ports import free_port
from players import Players
from waiting import WITHIN

from acclimate import demo_servers
from acclimate.client import connection


@dataclass
class Part:
    """One `acclimate …` process; started again with the same words after it was ended."""

    words: Sequence[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Part":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                demo_servers.command(*self.words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        return self

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(WITHIN)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(WITHIN)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def alive(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text("utf-8", "replace")[-3000:]


@dataclass
class Site:
    """An installation under test: its parts, its addresses, how to get an invitation."""

    where: Path
    urls: list[str]
    data: Path
    environment: dict[str, str] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def part(self, name: str, *words: str, **environment: str) -> Part:
        own = {**self.environment, **environment}
        self.parts[name] = Part(words, own, self.where / f"{name}.out").start()
        return self.parts[name]

    def ready(self) -> None:
        until = time.monotonic() + WITHIN
        for url in self.urls:
            with connection.Client(url, patience=0) as client:
                while not client.ready():
                    self.alive()
                    assert time.monotonic() < until
                    time.sleep(0.1)

    def alive(self) -> None:
        for part in self.parts.values():
            part.alive()

    def invite(self, role: str) -> str:
        command = demo_servers.command("invite", "--data", str(self.data), "--role", role, "--json")
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, capture_output=True, check=True, env=environment)
        return str(json.loads(done.stdout)["invitation"])

    def players(self, **given: str) -> Players:
        folder = self.where / "people"
        folder.mkdir()
        return Players(folder, self.urls, self.invite, self.alive, **given)


@contextmanager
def site(where: Path, *, urls: int = 1, **environment: str) -> Iterator[Site]:
    addresses = [f"http://127.0.0.1:{free_port()}" for _ in range(urls)]
    made = Site(where, addresses, where / "data", environment)
    try:
        yield made
    finally:
        for part in reversed(list(made.parts.values())):
            part.close()


def port(url: str) -> str:
    return url.rpartition(":")[2]


@contextmanager
def up(where: Path, *words: str, **environment: str) -> Iterator[Site]:
    """`acclimate up` on a fresh data folder, ready."""
    with site(where, **environment) as made:
        made.part("up", "up", "--data", str(made.data), "--port", port(made.urls[0]), "--no-mlflow", *words)
        made.ready()
        yield made


def again(made: Site, number: int) -> None:
    """End `up` by a signal and start it again at once."""
    part = made.parts["up"]
    part.end(number)
    part.start()
    made.ready()


def busy(players: Players, kind: str) -> None:
    """Wait until an attempt of this kind is under way."""
    until = time.monotonic() + WITHIN
    while not any(s["kind"] == kind and s["state"] in ("starting", "running") for s in players.boss.stages(players.id)):
        assert time.monotonic() < until
        time.sleep(0.02)


def shared(where: Path, database: str, blobs: str, endpoint: str) -> dict[str, str]:
    """The settings that processes beside each other have in common."""
    return {
        "ACCLIMATE_DATABASE": database,
        "ACCLIMATE_BLOBS": blobs,
        "ACCLIMATE_BLOBS_ENDPOINT": endpoint,
        "ACCLIMATE_SERVER_KEYS": str(where / "keys"),
        "ACCLIMATE_TRACKING": f"sqlite:///{where / 'mlflow.db'}",
        "ACCLIMATE_ARTIFACTS": str(where / "mlartifacts"),
    }


def beside(made: Site, *, apis: int, dispatchers: int, runner: str) -> None:
    """So many APIs and dispatchers beside each other, each with a data folder of its own."""
    for number, url in zip(range(apis), made.urls, strict=True):
        data = made.data if number == 0 else made.where / f"api-{number}"
        made.part(f"api-{number}", "api", "--data", str(data), "--port", port(url))
        if number == 0:
            made.urls, kept = made.urls[:1], made.urls
            made.ready()  # it makes the installation
            made.urls = kept
    made.ready()
    for number in range(dispatchers):
        folder = str(made.where / f"dispatcher-{number}")
        made.part(f"dispatch-{number}", "dispatch", "--data", folder, "--runner", runner)


def leading(made: Site) -> str:
    """The name of the dispatcher that leads: it has said so."""
    names = [name for name in made.parts if name.startswith("dispatch")]
    return next(name for name in names if '"event": "leading"' in made.parts[name].log.read_text("utf-8"))
