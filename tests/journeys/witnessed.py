"""Witnesses for tests: `acclimate witness run` as a process of its own, and a log in memory that asks it, honestly or not."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from waiting import WITHIN

from acclimate import log, witness_client, witness_folder
from acclimate_competitions import digests

MADE = 1_700_000_000
"""When the tests' witnesses were made: before any clock that they have."""


class SmallLog:
    """A log of numbered entries. `fork(at)` is the same log that goes on differently from an index on."""

    def __init__(
        self, origin: str = "log.example/acclimate", size: int = 0, *, key: Ed25519PrivateKey | None = None
    ) -> None:
        self.signer = log.Signer(origin, key or Ed25519PrivateKey.generate())
        self.entries: list[bytes] = []
        self.grow(size)

    @property
    def vkey(self) -> str:
        return self.signer.vkey

    def grow(self, by: int, *, word: str = "entry") -> "SmallLog":
        self.entries += [f"{word} {number}".encode() for number in range(len(self.entries), len(self.entries) + by)]
        return self

    def fork(self, at: int, size: int) -> "SmallLog":
        other = SmallLog(self.signer.origin, key=self.signer.key)
        other.entries = self.entries[:at]
        return other.grow(size - at, word="another")

    def tree(self, size: int | None = None) -> log.Tree:
        return log.Tree(map(digests.leaf_hash, self.entries[:size]))

    def checkpoint(self, size: int | None = None) -> str:
        tree = self.tree(size)
        return log.sign_checkpoint(self.signer, len(tree), tree.root())

    def proof(self, first: int, second: int | None = None) -> list[bytes]:
        return self.tree(second).consistency_proof(first)

    def request(self, old: int, size: int | None = None) -> bytes:
        return witness_client.request(self.checkpoint(size), old=old, proof=self.proof(old, size) if old else [])


@dataclass
class Running:
    """A witness that runs as a process."""

    folder: Path
    process: "subprocess.Popen[str]"
    url: str
    vkey: str
    errors: Path
    http: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=WITHIN))

    @property
    def endpoint(self) -> witness_client.Endpoint:
        return witness_client.parse_endpoint(f"{self.url} {self.vkey}")

    def post(self, body: bytes) -> httpx.Response:
        return self.http.post(f"{self.url}/add-checkpoint", content=body)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WITHIN)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WITHIN)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WITHIN)
        assert self.process.stdout is not None
        self.process.stdout.close()


def acclimate(*words: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    command = [sys.executable, "-m", "acclimate", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, check=False, env=kept)


def make(folder: Path, name: str = "witness.example/w1") -> str:
    """A witness's folder, and its verifier key."""
    return witness_folder.create(folder, name, now=MADE).verifier.text()


def start(folder: Path, logs: Sequence[str], *words: str, before: Sequence[str] = ()) -> Running:
    """Run the witness of a folder on a free port, or on the one that the words name; `before` is put before the command."""
    errors = folder.with_name(f"{folder.name}.err")
    given = [word for vkey in logs for word in ("--log-key", vkey)]
    port = () if "--port" in words else ("--port", "0")
    command = [sys.executable, "-m", "acclimate", "witness", "run", "--keys", str(folder), *given, *port, *words]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    with errors.open("ab") as stream:
        process = subprocess.Popen(
            [*before, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stream, text=True, env=kept
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("Witness on "):
        process.wait(WITHIN)
        process.stdout.close()
        raise AssertionError(errors.read_text("utf-8"))
    url, vkey = line.removeprefix("Witness on ").split()
    return Running(folder, process, url, vkey, errors)


@contextlib.contextmanager
def witness(folder: Path, logs: Sequence[str], *words: str, name: str = "witness.example/w1") -> Iterator[Running]:
    """A witness as a process; its folder is made where it is not there."""
    if not folder.exists():
        make(folder, name)
    running = start(folder, logs, *words)
    try:
        yield running
    finally:
        running.close()
