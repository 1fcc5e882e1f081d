"""Servers that answer with what no server of Acclimate sends."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def answering(
    body: bytes, *, status: int = 200, headers: dict[str, str] | None = None, endless: bool = False, pause: float = 0.0
) -> Iterator[str]:
    """A server that answers everything like this; endless: over and over; 204 has no body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the library's name
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)
                while endless:
                    time.sleep(pause)
                    self.wfile.write(body)

        do_PUT = do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
