"""A witness over HTTP: a thin ASGI shell around witness.py, and the server that runs it.

    POST <prefix>/add-checkpoint                      a cosignature
    GET  <prefix>/<sha256 of the origin>/checkpoint   the newest checkpoint that was cosigned
    GET  <prefix>/                                    who this is, for people

Anybody may call; so what a caller can take is bounded: connections, bytes and seconds of a request, requests that wait for the disk. TLS and
limits for each address are a reverse proxy's part. One thread works on the memory, so requests are answered in the order they came.
"""

import asyncio
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from socket import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from acclimate import console, framing, ports
from acclimate.console import say
from acclimate.witness import LARGEST_REQUEST, Answer, Witness
from acclimate_competitions.errors import Refusal

OPTION = "--port"
_SHOWN = re.compile(r"/([0-9a-f]{64})/checkpoint")
_PLAIN = "text/plain; charset=utf-8"

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """What one caller, and all together, can take.

    Attributes:
        connections: open at once; a further one is closed.
        waiting: requests that wait for the witness; a further one is told 503.
        head: seconds until a request's line and headers are there, also on a connection that is kept.
        body: seconds until its body is there.
        ending: seconds for what is under way when the server stops.
    """

    connections: int = 256
    waiting: int = 64
    head: float = 15.0
    body: float = 15.0
    ending: int = 10


@dataclass
class App:
    """The ASGI application.

    Attributes:
        witness: who answers.
        prefix: path before every address, such as `/x`, or empty.
        limits: what callers can take.
    """

    witness: Witness
    prefix: str = ""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "witness")
        self._waiting = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        began, path, method = time.monotonic(), str(scope["path"]), str(scope["method"])
        if framing.is_ambiguous(scope["headers"]):
            # Nobody can say where it ends; a proxy before us may have seen two requests in it.
            said = "Content-Length and Transfer-Encoding say two lengths of one body: send one of them"
            what, answer = "", _plain(400, said)
        else:
            what, answer = await self._answer(path.removeprefix(self.prefix), method, receive)
        # A body that was not read to its end would be taken for the next request.
        last = [(b"connection", b"close")] if answer.status in (408, 413, 503) or what == "" else []
        length = str(len(answer.body)).encode()
        headers = [(b"content-type", answer.kind.encode()), (b"content-length", length), *last]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
        if what == "add-checkpoint":
            took = round((time.monotonic() - began) * 1000, 1)
            say(what, level="error" if answer.status >= 500 else "", status=answer.status, ms=took, **answer.facts)

    async def _answer(self, path: str, method: str, receive: Receive) -> tuple[str, Answer]:
        """(what was asked, the answer); what is empty where nothing of ours was."""
        shown = _SHOWN.fullmatch(path)
        if path == "/add-checkpoint":
            if method != "POST":
                return "", _plain(405, "POST a checkpoint here")
            try:
                body = await asyncio.wait_for(_read(receive), self.limits.body)
            except TimeoutError:
                late = _plain(408, f"the request was not there within {self.limits.body:.0f} s")
                return "add-checkpoint", self.witness.counted(late)
            if body is None:
                return "add-checkpoint", self.witness.counted(
                    _plain(413, f"at most {LARGEST_REQUEST} bytes are allowed")
                )
            return "add-checkpoint", await self._work(lambda: self.witness.add_checkpoint(body), self.witness.counted)
        if method == "GET" and shown:
            return "checkpoint", await self._work(lambda: self.witness.checkpoint(shown[1]))
        if method == "GET" and path in ("", "/"):
            return "about", self.witness.about()
        return "", _plain(404, "there is nothing at this address")

    async def _work(self, call: Callable[[], Answer], refused: Callable[[Answer], Answer] = lambda one: one) -> Answer:
        """What the witness answers, from its thread. A request whose caller is gone is finished all the same.

        Args:
            call: what it does.
            refused: what is done with an answer that is not the witness's own: too many wait, or its memory failed.
        """
        if self._waiting >= self.limits.waiting:
            return refused(_plain(503, f"{self._waiting} requests wait already; try again"))
        self._waiting += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, _told, call)
            return refused(_FAILED) if answer is None else answer
        finally:
            self._waiting -= 1


def _told(call: Callable[[], Answer]) -> Answer | None:
    try:
        return call()
    except Refusal as refusal:
        # Where the memory lies on this machine is the operator's to know.
        say("memory failed", level="error", code=refusal.code, reason=refusal.sentence)
        return None


async def _read(receive: Receive) -> bytes | None:
    """The request's body, or None where it is too long or its caller went away."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += bytes(message.get("body", b""))
        if len(body) > LARGEST_REQUEST:
            return None
        if not message.get("more_body", False):
            return body


def _plain(status: int, reason: str) -> Answer:
    return Answer(status, f"{reason}\n".encode(), _PLAIN, {"reason": reason})


_FAILED = _plain(503, "the witness can't write down what it would cosign; its operator has been told")


def protocol(limits: Limits) -> type:
    """Uvicorn's HTTP/1.1 with an end to silence: by itself it waits for ever for the first byte, and between any two of a head."""

    class Bounded(H11Protocol):  # type: ignore[misc]
        silence: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            self._listen()

        def connection_lost(self, exc: Exception | None) -> None:
            self._heard()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._heard()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.cycle.response_complete and not self.transport.is_closing():
                self._listen()

        def _listen(self) -> None:
            self._heard()
            self.silence = self.loop.call_later(limits.head, self.transport.abort)

        def _heard(self) -> None:
            if self.silence is not None:
                self.silence.cancel()
                self.silence = None

    return Bounded


def server(app: App) -> uvicorn.Server:
    """The server, not running yet."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            http=protocol(app.limits),
            timeout_keep_alive=int(app.limits.head),
            timeout_graceful_shutdown=app.limits.ending,
            h11_max_incomplete_event_size=16_384,
        )
    )


def listen(host: str, port: int) -> socket:
    """A socket that accepts.

    Raises:
        Refusal: config_invalid, where host or port can't be used.
    """
    try:
        listener = ports.bound(host, port)
        try:
            listener.listen(512)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ports.unusable(error, host, port, option=OPTION) from error
    return listener


def serve(app: App, listener: socket) -> None:
    """Serve until SIGINT or SIGTERM; what is under way is finished, and the process was not ended by the signal.

    Log lines go to standard error, one JSON object each.
    """
    root = logging.getLogger()
    root.addHandler(console.Handler())
    root.setLevel(logging.INFO)
    # It tells of every line that is no HTTP; strangers send as many as they like.
    for name in ("uvicorn", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)
    running = server(app)

    def end(number: int, frame: object) -> None:
        running.force_exit = running.should_exit
        running.should_exit = True

    running.handle_exit = end
    host, port = listener.getsockname()[:2]
    url = f"http://{ports.name(host, port)}{app.prefix}"
    sys.stdout.write(f"Witness on {url} {app.witness.verifier.text()}\n")
    sys.stdout.flush()
    say("started", url=url, witness=app.witness.verifier.text(), logs=sorted(app.witness.logs))
    running.run(sockets=[listener])
    say("stopped")
