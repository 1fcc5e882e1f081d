"""A witness answers anybody, so nobody gets much of it: silent, slow, greedy and many callers over raw sockets, and who else is served."""

import contextlib
import select
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from in_threads import serving
from waiting import WITHIN, until
from witnessed import MADE, SmallLog

from acclimate import log, notes, witness_http
from acclimate.witness import LARGEST_REQUEST, Witness
from acclimate.witness_http import Limits
from acclimate.witness_state import State

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
VERIFIER = notes.Verifier("witness.example/w1", notes.COSIGNATURE, KEY.public_key().public_bytes_raw())
SHORT = Limits(head=0.4, body=0.4)
HEAD = b"POST /add-checkpoint HTTP/1.1\r\nHost: w\r\n"


class Served:
    """A witness in a thread, and raw connections to it."""

    def __init__(self, port: int, server: uvicorn.Server, small: SmallLog) -> None:
        self.port, self.server, self.small = port, server, small

    def call(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WITHIN)
        if data:
            connection.sendall(data)
        return connection

    def answer(self, data: bytes) -> bytes:
        """All that comes until the server closes."""
        with self.call(data) as connection:
            return rest_of(connection)

    def post(self, body: bytes, more: bytes = b"Connection: close\r\n") -> bytes:
        return self.answer(HEAD + more + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)


def rest_of(connection: socket.socket) -> bytes:
    found = b""
    # A reset is an end, too: what the caller had sent beyond the end was never read.
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65_536):
            found += part
    return found


Serve = Callable[[Limits], Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with contextlib.ExitStack() as stack:

        def start(limits: Limits) -> Served:
            State.create(tmp_path / "witness.db", VERIFIER.text(), made=MADE)
            state = State.open(tmp_path / "witness.db", VERIFIER.text())
            stack.callback(state.close)
            small = SmallLog(size=5)
            mine = Witness(VERIFIER.name, KEY, logs=[log.parse_vkey(small.vkey)], state=state)
            listener = witness_http.listen("127.0.0.1", 0)
            server: uvicorn.Server = witness_http.server(witness_http.App(mine, limits=limits))
            stack.enter_context(serving(server, listener))
            return Served(listener.getsockname()[1], server, small)

        yield start


@pytest.mark.parametrize(
    "sent",
    [b"", b"P", HEAD[:-4], HEAD + b"X-Long: ", b"\r\n", b"GET / HTTP/1.1\r\nHost: w\r\n\r\nP"],
    ids=["nothing", "a byte", "half a line", "half a header", "an empty line", "a request and a byte"],
)
def test_who_says_nothing_is_left(serve: Serve, sent: bytes) -> None:
    served = serve(SHORT)
    with served.call(sent) as silent:
        rest_of(silent)
    until(lambda: not served.server.server_state.connections)


def test_a_request_of_two_lengths_is_refused_and_its_connection_ends(serve: Serve) -> None:
    served = serve(SHORT)
    second = b"GET / HTTP/1.1\r\nHost: w\r\n\r\n"
    both = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(second)
    with served.call(b"POST /add-checkpoint HTTP/1.1\r\nHost: w\r\n" + both + b"0\r\n\r\n" + second) as caller:
        answer = rest_of(caller)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1, answer


def test_a_head_that_drips_is_left_though_something_always_comes(serve: Serve) -> None:
    served = serve(SHORT)
    with served.call(HEAD) as slow:
        end = time.monotonic() + WITHIN
        with pytest.raises(ConnectionError):
            while time.monotonic() < end:
                slow.sendall(b"X")
                time.sleep(0.05)


def test_a_body_that_drips_is_told_408(serve: Serve) -> None:
    served = serve(SHORT)
    with served.call(HEAD + b"Content-Length: 1000\r\n\r\nold 0\n") as slow:
        assert rest_of(slow).startswith(b"HTTP/1.1 408 ")
    until(lambda: not served.server.server_state.connections)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_not_read_to_its_end(serve: Serve, chunked: bool) -> None:
    served = serve(Limits())
    head = b"Transfer-Encoding: chunked\r\n\r\nfffffff\r\n" if chunked else b"Content-Length: 268435455\r\n\r\n"
    sent = 0
    with served.call(HEAD + head) as greedy, contextlib.suppress(ConnectionError):
        # For as long as anything is taken: where nothing is any more, the answer is there.
        while sent < 1 << 28:
            answered, takes, _ = select.select([greedy], [greedy], [], WITHIN)
            if not takes:
                assert answered
                break
            sent += greedy.send(b"x" * 65_536)
        found = rest_of(greedy)
        assert not found or found.startswith(b"HTTP/1.1 413 ")
    # What the kernel's buffers took, and the limit.
    assert LARGEST_REQUEST <= sent < 1 << 27
    until(lambda: not served.server.server_state.connections)


def test_a_body_of_just_the_limit_is_read(serve: Serve) -> None:
    served = serve(Limits())
    assert served.post(b"x" * LARGEST_REQUEST).startswith(b"HTTP/1.1 400 ")
    assert served.post(b"x" * (LARGEST_REQUEST + 1)).startswith(b"HTTP/1.1 413 ")


def test_a_head_beyond_all_measure_is_400(serve: Serve) -> None:
    served = serve(Limits())
    assert served.answer(HEAD + b"X-Long: " + b"x" * 20_000).startswith(b"HTTP/1.1 400 ")
    assert served.answer(b"\x16\x03\x01 this is TLS\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_beyond_so_many_connections_a_further_one_is_closed_and_later_ones_are_served(serve: Serve) -> None:
    served = serve(Limits(connections=5, head=2 * WITHIN))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(served.call()) for _ in range(20)]
        until(lambda: len(served.server.server_state.connections) == 5)
        closed = [connection for connection in silent if is_closed(connection)]
        assert len(closed) == 15
    until(lambda: not served.server.server_state.connections)
    assert served.post(served.small.request(0)).startswith(b"HTTP/1.1 200 ")


def test_who_holds_the_last_place_loses_it_by_silence(serve: Serve) -> None:
    served = serve(replace(SHORT, connections=1))
    with served.call():
        until(lambda: served.post(served.small.request(0)).startswith(b"HTTP/1.1 200 "))


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_an_honest_log_is_served_beside_a_hundred_silent_callers(serve: Serve) -> None:
    served = serve(replace(Limits(), head=WITHIN, body=WITHIN))
    with contextlib.ExitStack() as stack:
        for number in range(100):
            stack.enter_context(served.call(HEAD + b"Content-Length: 1000\r\n\r\nold 0\n" if number % 2 else HEAD))
        until(lambda: len(served.server.server_state.connections) == 100)
        assert served.post(served.small.request(0)).startswith(b"HTTP/1.1 200 ")


def test_beyond_so_many_that_wait_a_further_one_is_told_503(tmp_path: Path, serve: Serve) -> None:
    """The memory is held by another, so that requests wait; none is lost that was taken, and none is taken that can't wait."""
    served = serve(Limits(waiting=3))
    body = served.small.request(0)
    request = HEAD + b"Connection: close\r\n" + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    holder = sqlite3.connect(tmp_path / "witness.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(served.call(request)) for _ in range(8)]
        until(lambda: len(select.select(callers, [], [], 0)[0]) == 5)
        turned_away = select.select(callers, [], [], 0)[0]
        assert all(rest_of(caller).startswith(b"HTTP/1.1 503 ") for caller in turned_away)
        holder.execute("ROLLBACK")
        holder.close()
        found = sorted(rest_of(caller).split(b" ")[1] for caller in callers if caller not in turned_away)
    assert found == [b"200", b"409", b"409"]


def test_a_connection_is_kept_between_requests_and_two_may_be_sent_at_once(serve: Serve) -> None:
    served = serve(Limits())
    first, second = served.small.request(0, 3), served.small.request(3, 5)
    requests = [HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body for body in (first, second)]
    with served.call() as connection:
        connection.sendall(requests[0])
        until(lambda: b"HTTP/1.1 200 " in connection.recv(65_536, socket.MSG_PEEK))
        connection.sendall(requests[1] + requests[1].replace(b"Host: w", b"Host: w\r\nConnection: close"))
        found = rest_of(connection)
    assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"409"]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /add-checkpoint", b"405"),
        (b"PUT /add-checkpoint", b"405"),
        (b"GET /", b"200"),
        (b"GET /nothing", b"404"),
        (b"POST /", b"404"),
        (b"POST /add-checkpoint/", b"404"),
        (b"GET /" + b"0" * 64 + b"/checkpoint", b"404"),
        (b"GET /" + b"A" * 64 + b"/checkpoint", b"404"),
        (b"GET /../witness.db", b"404"),
        (b"GET /ed25519.pem", b"404"),
    ],
)
def test_other_addresses_and_methods(serve: Serve, line: bytes, status: bytes) -> None:
    served = serve(Limits())
    found = served.answer(line + b" HTTP/1.1\r\nHost: w\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 " + status + b" ")
    assert b"content-type: text/plain; charset=utf-8" in found
