"""A server that gives just the answers that a test has written down for it, and notes what it was asked."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from acclimate.client.connection import CHUNK


class Script(BaseHTTPRequestHandler):
    """Answers from a list of (status, headers, body), and remembers what came."""

    answers: list[tuple[int, dict[str, str], bytes]]
    seen: list[tuple[str, str, dict[str, str], int]]
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        got = 0
        while got < length:
            piece = self.rfile.read(min(CHUNK, length - got))
            if not piece:
                break
            got += len(piece)
        self.seen.append((self.command, self.path, dict(self.headers), got))
        status_code, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status_code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = answer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
        pass


@contextmanager
def scripted(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[tuple[str, type[Script]]]:
    handler = type("Handler", (Script,), {"answers": list(answers), "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


BUSY = (503, {"Content-Type": "application/problem+json"}, as_json({"status": 503, "code": "busy", "detail": "taken"}))
SERVER = (200, {}, as_json({"version": "1", "log": "log", "now": "2027-03-01T00:00:00.000000Z"}))
