"""A network between a program and PostgreSQL that breaks at the COMMIT of a transaction that a test names: before it arrives, or after it was done."""

import contextlib
import selectors
import socket
import threading
from typing import Literal

COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
"""As the driver sends it: a simple query, its length, its text."""
_MOST = 4 << 20


class Network:
    """Listens on a port of its own and passes everything on.

    Args:
        port: of the database.

    Attributes:
        cut: how often it broke.
    """

    def __init__(self, port: int) -> None:
        self._to, self.cut = port, 0
        self._mark, self._when = b"", ""
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def through(self, url: str) -> str:
        """The URL of a database behind it."""
        return url.replace(f":{self._to}/", f":{self.port}/")

    def break_at(self, mark: str, *, when: Literal["before", "after"]) -> None:
        """Break the next connection whose transaction has sent this, once it sends COMMIT: before that arrives, or after the answer came."""
        with self._lock:
            self._mark, self._when = mark.encode(), when

    @property
    def broken(self) -> bool:
        """Whether it broke since it was last told to."""
        return not self._mark

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=[client], daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        sent = b""
        with contextlib.suppress(OSError), client, selectors.DefaultSelector() as selector:
            with socket.create_connection(("127.0.0.1", self._to)) as server:
                selector.register(client, selectors.EVENT_READ, server)
                selector.register(server, selectors.EVENT_READ, client)
                while True:
                    for key, _ in selector.select():
                        data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                        if not data:
                            return
                        if key.fileobj is client:
                            sent = (sent + data)[-_MOST:]
                            if sent.endswith(COMMIT):
                                when, sent = self._take(sent), b""
                                if when:
                                    if when == "after":
                                        server.sendall(data)
                                        server.recv(1 << 16)
                                    return
                        key.data.sendall(data)

    def _take(self, sent: bytes) -> str:
        """When to break the transaction that sent this; empty for not at all."""
        with self._lock:
            if not self._mark or self._mark not in sent:
                return ""
            self._mark, self.cut = b"", self.cut + 1
            return self._when
