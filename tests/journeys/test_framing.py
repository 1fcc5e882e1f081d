"""Where a request's body ends, on a connection that goes on (RFC 9112, 6 and 9.3.2): nothing sent is ever read as a request that was not one."""

import re
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import live
import pytest
from waiting import WITHIN

from acclimate.api.server import configure

HOST = b"Host: x\r\n"
PROBE = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
LAST = b"GET /healthz HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
POST = b"POST /v1/accounts HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
UPLOAD = b"PUT /v1/blobs/sha256:" + b"0" * 64 + b" HTTP/1.1\r\n" + HOST
CHUNKED, LENGTH = b"Transfer-Encoding: chunked\r\n", b"Content-Length: 2\r\n"
SMUGGLED = b"GET /v1/rounds HTTP/1.1\r\n" + HOST + b"\r\n"


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with live.serve(tmp_path_factory.mktemp("framing")) as running:
        yield int(running.url.rpartition(":")[2])


def statuses(port: int, sent: bytes) -> list[int]:
    """Of all answers that come before the server ends the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=WITHIN) as caller:
        caller.sendall(sent)
        answer = b"".join(iter(lambda: caller.recv(65536), b""))
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        pytest.param(PROBE + PROBE, [200, 200], id="two requests at once"),
        pytest.param(POST + CHUNKED + b"\r\n" + chunks(b"{", b"}"), [422], id="a chunked body"),
        pytest.param(POST + CHUNKED + b"\r\n2;name=value\r\n{}\r\n0\r\n\r\n", [422], id="a chunk with an extension"),
        pytest.param(POST + LENGTH * 2 + b"\r\n{}", [422], id="one length twice"),
        pytest.param(
            UPLOAD + CHUNKED + b"\r\n" + chunks(*[SMUGGLED * 1000] * 30), [401], id="a refused upload in chunks"
        ),
        pytest.param(
            b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
            [404],
            id="a body that nobody reads",
        ),
        pytest.param(
            b"GET /healthz HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
            [200],
            id="a GET with a body",
        ),
    ],
)
def test_a_connection_goes_on_behind_a_body_that_has_an_end(sent: bytes, told: list[int], port: int) -> None:
    """What stands in the body is answered by nobody, read or not."""
    assert statuses(port, sent + LAST) == [*told, 200]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(POST + LENGTH + CHUNKED + b"\r\n" + chunks(b"{}"), id="length and chunks"),
        pytest.param(POST + CHUNKED + LENGTH + b"\r\n" + chunks(b"{}"), id="chunks and length"),
        pytest.param(POST + LENGTH + b"Content-Length: 3\r\n\r\n{}", id="two lengths"),
        pytest.param(POST + LENGTH + b"Transfer-Encoding: identity\r\n\r\n{}", id="length and identity"),
        pytest.param(POST + LENGTH + b"Transfer-Encoding: \x0bchunked\r\n\r\n{}", id="length and a disguised coding"),
        pytest.param(POST + b"Content-Length: +2\r\n\r\n{}", id="a length with a sign"),
        pytest.param(POST + CHUNKED * 2 + b"\r\n" + chunks(b"{}"), id="chunked twice"),
        pytest.param(POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks(b"{}"), id="another coding"),
        pytest.param(POST + b"Transfer-Encoding : chunked\r\n\r\n" + chunks(b"{}"), id="a blank before the colon"),
        pytest.param(POST + CHUNKED + b"\r\n2\n{}\r\n0\r\n\r\n", id="a chunk's line without CR"),
        pytest.param(POST + CHUNKED + b"\r\n0x2\r\n{}\r\n0\r\n\r\n", id="a chunk's size with a prefix"),
        pytest.param(POST + CHUNKED + b"\r\n2\r\n{}XX0\r\n\r\n", id="more in a chunk than it says"),
    ],
)
def test_behind_a_body_whose_end_is_doubtful_nothing_is_read(sent: bytes, port: int) -> None:
    assert statuses(port, sent + LAST) == [400]


def test_the_parser_is_the_same_one_whatever_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Uvicorn takes httptools by itself where it is there, which reads some of these otherwise."""
    monkeypatch.setitem(sys.modules, "httptools", types.ModuleType("httptools"))
    config = configure(lambda: None)
    config.load()
    assert config.http_protocol_class.__module__ == "uvicorn.protocols.http.h11_impl"
