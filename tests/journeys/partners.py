"""Real witnesses for tests of a server: each a folder of its own and an HTTP server in a thread, which can be stopped and started again."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import live
import pytest
from chosen_ports import free_port
from in_threads import serving

from acclimate import notes, witness_folder, witness_http
from acclimate.config import Settings
from acclimate.service import identity
from acclimate.store import Store
from acclimate.witness import Witness

NAMES = ("w1.example.org", "w2.example.org", "w3.example.org")


class Partner:
    """A witness at a partner institution."""

    def __init__(self, folder: Path, name: str) -> None:
        self.identity = witness_folder.create(folder, name, now=0)
        self.port = free_port()
        self._running = ExitStack()

    @property
    def verifier(self) -> notes.Verifier:
        return self.identity.verifier

    @property
    def text(self) -> str:
        """As the setting `witnesses` names it."""
        return f"http://127.0.0.1:{self.port} {self.verifier.text()}"

    def size(self, origin: str) -> int:
        """How many entries it has cosigned."""
        memory = self.identity.memory()
        try:
            seen = memory.seen(origin)
            return seen.size if seen is not None else 0
        finally:
            memory.close()

    def start(self, *logs: str, clock: Callable[[], float] = time.time) -> None:
        memory = self.identity.memory()
        known = [notes.parse_vkey(text) for text in logs]
        name, key = self.identity.verifier.name, self.identity.keys.ed25519
        listener = witness_http.listen("127.0.0.1", self.port)
        server = witness_http.server(witness_http.App(Witness(name, key, logs=known, state=memory, clock=clock)))
        self._running.callback(memory.close)
        self._running.enter_context(serving(server, listener))

    def stop(self) -> None:
        self._running.close()


@contextmanager
def partners(folder: Path, *names: str) -> Iterator[list[Partner]]:
    with ExitStack() as stack:
        made = [Partner(folder / name, name) for name in names]
        for partner in made:
            stack.callback(partner.stop)
        yield made


@contextmanager
def server(folder: Path, made: Sequence[Partner], *, quorum: int, **given: Any) -> Iterator[live.Live]:
    """A live server whose checkpoints these witnesses cosign."""
    words = {"witnesses": [partner.text for partner in made], "quorum": quorum, **given}
    with live.serve(folder, **words) as running:
        yield running


@contextmanager
def trickling(port: int) -> Iterator[None]:
    """What takes any request on a port and begins an answer that never ends: a byte of a header, and another, each in time."""
    ending = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not ending.wait(0.2):
                connection.sendall(b"x")

    def accept() -> None:
        while not ending.is_set():
            connection, _ = listener.accept()
            threading.Thread(target=answer, args=(connection,)).start()

    with witness_http.listen("127.0.0.1", port) as listener:
        listener.settimeout(None)
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            thread.join()


def log_key(settings: Settings, store: Store) -> str:
    return identity.load(settings, store).vkey


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Partner]]:
    with partners(tmp_path / "witnesses", *NAMES) as made:
        yield made
