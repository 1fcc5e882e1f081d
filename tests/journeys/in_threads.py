"""Servers in threads of the test's own process."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from waiting import WITHIN

if TYPE_CHECKING:
    import uvicorn


@contextlib.contextmanager
def serving(server: "uvicorn.Server", listener: socket.socket) -> Iterator[None]:
    """Have it serve a bound socket, from when it takes connections; afterwards both are closed."""
    with listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            # A bound socket refuses connections until the server listens.
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            yield
        finally:
            server.should_exit = True
            thread.join(WITHIN)
            assert not thread.is_alive(), "the server did not end"
