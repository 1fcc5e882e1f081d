"""A log asks its witnesses, over real sockets: what it gets, and what it makes of witnesses that are behind, ahead, false or silent."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import witnessed
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from in_threads import serving
from waiting import WITHIN
from witnessed import MADE, SmallLog

from acclimate import log, notes, witness_client, witness_http
from acclimate.witness import Witness
from acclimate.witness_state import State
from acclimate_competitions.errors import Refusal

DAY = 86_400
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
VERIFIER = notes.Verifier("witness.example/w1", notes.COSIGNATURE, KEY.public_key().public_bytes_raw())


@contextlib.contextmanager
def here(
    folder: Path, *logs: str, clock: Callable[[], float] = time.time, prefix: str = ""
) -> Iterator[witness_client.Endpoint]:
    """A witness in a thread of this process, whose clock the test has."""
    path = folder / "witness.db"
    State.create(path, VERIFIER.text(), made=MADE)
    state = State.open(path, VERIFIER.text())
    mine = Witness(VERIFIER.name, KEY, logs=[log.parse_vkey(vkey) for vkey in logs], state=state, clock=clock)
    with served(witness_http.App(mine, prefix)) as url:
        yield witness_client.parse_endpoint(f"{url}{prefix} {VERIFIER.text()}")
    state.close()


@contextlib.contextmanager
def served(app: witness_http.App) -> Iterator[str]:
    listener = witness_http.listen("127.0.0.1", 0)
    with serving(witness_http.server(app), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=WITHIN) as made:
        yield made


@pytest.fixture
def small() -> SmallLog:
    return SmallLog(size=5)


def asked(endpoint: witness_client.Endpoint, small: SmallLog, client: httpx.Client, *, old: int = 0) -> int:
    """The time of the cosignature."""
    found = witness_client.ask(endpoint, small.checkpoint(), old=old, proof_of=small.proof, client=client)
    # A cosigned checkpoint is the note with the line below the log's.
    opened = log.open_checkpoint(small.checkpoint() + found.line(), small.signer.verifier, [endpoint.verifier])
    assert opened.checkpoint.size == len(small.entries)
    return opened.cosigned[endpoint.verifier.text()]


def refused(
    code: str,
    endpoint: witness_client.Endpoint,
    small: SmallLog,
    client: httpx.Client,
    *,
    match: str = ".",
    old: int = 0,
) -> Refusal:
    with pytest.raises(Refusal, match=match) as caught:
        witness_client.ask(endpoint, small.checkpoint(), old=old, proof_of=small.proof, client=client)
    assert caught.value.code == code and caught.value.hint
    assert endpoint.verifier.name in caught.value.sentence
    # What anybody may read has neither its address nor what it, or a library, said.
    shown = witness_client.for_anybody(endpoint, caught.value)
    assert shown == code or shown.startswith(f"{code}: ")
    assert not any(secret in shown for secret in (endpoint.url, "127.0.0.1", "localhost", " '", "\\x", "Errno"))
    return caught.value


# ---- addresses ---------------------------------------------------------------------------------------------------------


def test_a_witness_is_named_by_address_and_key() -> None:
    found = witness_client.parse_endpoint(f" https://w.example.org/x/  {VERIFIER.text()}\n")
    assert (found.url, found.verifier) == ("https://w.example.org/x", VERIFIER)
    assert witness_client.parse_endpoint(found.text()) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "https://w.example.org",
        "https://user:secret@w.example.org",
        VERIFIER.text(),
        f"{VERIFIER.text()} https://w.example.org",
        f"w.example.org {VERIFIER.text()}",
        f"ftp://w.example.org {VERIFIER.text()}",
        f"https:// {VERIFIER.text()}",
        f"https://user:secret@w.example.org {VERIFIER.text()}",
        f"https://w.example.org/?x=1 {VERIFIER.text()}",
        f"https://w.example.org/#x {VERIFIER.text()}",
        f"https://[::g] {VERIFIER.text()}",
        f"https://w.example.org:99999 {VERIFIER.text()}",
        f"https://w.example.org:0 {VERIFIER.text()}",
        f"https://\ud800.example.org {VERIFIER.text()}",
        f"https://w.example.org {VERIFIER.text()[:-1]}",
        f"https://w.example.org {SmallLog().vkey}",
        f"https://w.example.org {VERIFIER.text()} {VERIFIER.text()}",
    ],
    ids=lambda text: f"{len(text)} characters",
)
def test_another_text_is_no_witness(text: str) -> None:
    with pytest.raises(Refusal) as caught:
        witness_client.parse_endpoint(text)
    assert caught.value.code == "config_invalid" and caught.value.hint
    assert "secret" not in caught.value.sentence


def test_a_key_is_one_witness_whatever_its_names() -> None:
    """A cosignature does not cover its witness's name, so one key under two names would count twice."""
    other = notes.Verifier("w2.example", notes.COSIGNATURE, VERIFIER.public)
    texts = [f"https://w1.example {VERIFIER.text()}", f"https://w2.example {other.text()}"]
    assert len(witness_client.parse_endpoints(texts[:1])) == 1
    with pytest.raises(Refusal, match="two witnesses have one key"):
        witness_client.parse_endpoints(texts)


# ---- what an honest witness answers ------------------------------------------------------------------------------------


def test_a_log_gets_cosignatures_as_it_grows(tmp_path: Path, small: SmallLog, client: httpx.Client) -> None:
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        before = int(time.time())
        assert asked(running.endpoint, small, client) >= before
        assert asked(running.endpoint, small.grow(30), client, old=5) >= before
        # The same one again, as after an answer that was lost.
        assert asked(running.endpoint, small, client, old=5) >= before
        kept = witness_client.latest(running.endpoint, small.signer.origin, client=client)
        opened = log.open_checkpoint(kept, small.signer.verifier, [running.endpoint.verifier])
        assert opened.checkpoint.size == 35 and opened.cosigned


def test_a_witness_with_another_size_is_asked_again_from_there(
    tmp_path: Path, small: SmallLog, client: httpx.Client
) -> None:
    asked_from: list[int] = []

    def proof_of(first: int) -> list[bytes]:
        asked_from.append(first)
        return small.proof(first)

    with here(tmp_path, small.vkey) as endpoint:
        asked(endpoint, small, client)
        small.grow(20)
        witness_client.ask(endpoint, small.checkpoint(), old=0, proof_of=proof_of, client=client)
        small.grow(1)
        # What the log remembers of it may be from another database: too much as well as too little.
        witness_client.ask(endpoint, small.checkpoint(), old=26, proof_of=proof_of, client=client)
        small.grow(1)
        witness_client.ask(endpoint, small.checkpoint(), old=99, proof_of=proof_of, client=client)
    assert asked_from == [5, 25, 26]


def test_a_witness_behind_a_path_of_a_proxy(tmp_path: Path, small: SmallLog, client: httpx.Client) -> None:
    with here(tmp_path, small.vkey, prefix="/witness/1") as endpoint:
        assert asked(endpoint, small, client)
        assert client.get(f"{endpoint.url}/").text.splitlines()[2:] == [
            f"witness {VERIFIER.text()}",
            f"log {small.vkey}",
        ]


# ---- a witness that has seen something else ----------------------------------------------------------------------------


def test_a_fork_shown_to_two_parties_is_found_by_the_witness_that_saw_one(
    tmp_path: Path, small: SmallLog, client: httpx.Client
) -> None:
    """The thief of a log's key shows one history to the entrants and another to the auditor; the witness has seen the first."""
    small.grow(10)
    fork = small.fork(7, 22)
    with witnessed.witness(tmp_path / "w1", [small.vkey]) as running:
        asked(running.endpoint, small, client)
        found = refused(
            "witness_disagrees", running.endpoint, fork, client, match="15 entries with root .* 22 entries with root"
        )
        for tree in (small.tree(), fork.tree()):
            assert log.checkpoint("x", 0, tree.root()).split("\n")[2] in found.sentence
        assert "keep both" in found.hint
        # At the same size the two checkpoints alone prove it, and the witness keeps them.
        refused("witness_disagrees", running.endpoint, small.fork(7, 15), client, old=15)
        assert running.end() == 0
    done = witnessed.acclimate("witness", "status", "--keys", str(tmp_path / "w1"))
    assert done.returncode == 1 and "FORK of log.example/acclimate: at 15 entries" in done.stdout
    for one in (small, small.fork(7, 15)):
        assert log.parse_note(one.checkpoint(15)).text.splitlines()[2] in done.stdout


def test_two_witnesses_cannot_be_told_two_histories_where_both_are_asked(
    tmp_path: Path, small: SmallLog, client: httpx.Client
) -> None:
    fork = small.fork(2, 8)
    with (
        witnessed.witness(tmp_path / "w1", [small.vkey], name="one.example") as one,
        witnessed.witness(tmp_path / "w2", [small.vkey], name="two.example") as two,
    ):
        asked(one.endpoint, small, client)
        asked(two.endpoint, fork, client)
        refused("witness_disagrees", one.endpoint, fork, client)
        # The honest log is behind what the second has seen: it is told so, and can compare.
        refused("witness_ahead", two.endpoint, small, client, match="8 entries .* asked for 5")
        seen = log.open_checkpoint(
            witness_client.latest(two.endpoint, small.signer.origin, client=client),
            small.signer.verifier,
            [two.endpoint.verifier],
        )
        assert seen.checkpoint.root != small.grow(3).tree().root()
        refused("witness_disagrees", two.endpoint, small, client)


def test_a_log_that_was_put_back_is_told_that_the_witness_is_ahead(
    tmp_path: Path, small: SmallLog, client: httpx.Client
) -> None:
    with here(tmp_path, small.vkey) as endpoint:
        asked(endpoint, small.grow(4), client)
        del small.entries[6:]
        found = refused("witness_ahead", endpoint, small, client, match="9 entries .* asked for 6", old=9)
        assert "put back" in found.hint
        # It goes on as if nothing had been: from here on it is a fork.
        refused("witness_disagrees", endpoint, small.grow(5, word="again"), client)


def test_a_witness_that_does_not_know_the_log_or_its_key(tmp_path: Path, small: SmallLog, client: httpx.Client) -> None:
    with here(tmp_path, SmallLog("else.example").vkey, SmallLog("known.example").vkey) as endpoint:
        found = refused("witness_unreachable", endpoint, small, client, match="404")
        assert "give its operator the log's key" in found.hint
        found = refused("witness_unreachable", endpoint, SmallLog("known.example", 3), client, match="403")
        assert "another key" in found.hint


def test_a_witness_under_another_key_than_the_known_one(tmp_path: Path, small: SmallLog, client: httpx.Client) -> None:
    stranger = notes.Verifier(
        VERIFIER.name, notes.COSIGNATURE, Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    )
    with here(tmp_path, small.vkey) as endpoint:
        wrong = witness_client.Endpoint(endpoint.url, stranger)
        refused(
            "witness_unreachable",
            wrong,
            small,
            client,
            match=f"{VERIFIER.key_id.hex()}, expected .*{stranger.key_id.hex()}",
        )


@pytest.mark.parametrize("off", [-DAY, DAY])
def test_a_witness_whose_clock_is_off_by_a_day_is_told_apart(
    tmp_path: Path, small: SmallLog, client: httpx.Client, off: int
) -> None:
    with here(tmp_path, small.vkey, clock=lambda: time.time() + off) as endpoint:
        found = refused("witness_unreachable", endpoint, small, client, match="s apart, at most 300 are allowed")
        assert "clocks is wrong" in found.hint


def test_a_witness_whose_clock_was_a_day_ahead_says_nothing_until_then(
    tmp_path: Path, small: SmallLog, client: httpx.Client
) -> None:
    ahead = [DAY]
    with here(tmp_path, small.vkey, clock=lambda: time.time() + ahead[0]) as endpoint:
        refused("witness_unreachable", endpoint, small, client, match="apart")
        ahead[0] = 0
        refused("witness_unreachable", endpoint, small.grow(1), client, match="503: .*which it has said already")


def test_who_asks_with_a_wrong_clock_is_told_so_too(tmp_path: Path, small: SmallLog, client: httpx.Client) -> None:
    with here(tmp_path, small.vkey) as endpoint, pytest.raises(Refusal, match="apart"):
        witness_client.ask(
            endpoint, small.checkpoint(), old=0, proof_of=small.proof, client=client, clock=lambda: time.time() - DAY
        )


# ---- what is no witness at all -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(*parts: bytes, pause: float = 0.0) -> Iterator[witness_client.Endpoint]:
    """A server that reads something of a request and sends these bytes, whatever it was asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ending = threading.Event()

        def answer() -> None:
            while not ending.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65_536)
                        for part in parts:
                            connection.sendall(part)
                            if ending.wait(pause):
                                return

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield witness_client.parse_endpoint(f"http://127.0.0.1:{listener.getsockname()[1]} {VERIFIER.text()}")
        finally:
            ending.set()
            with contextlib.suppress(OSError):
                socket.create_connection(listener.getsockname(), timeout=5).close()
            thread.join()


def http(status: int, body: bytes, kind: str = "text/plain; charset=utf-8", more: str = "") -> bytes:
    return (
        f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n".encode()
        + body
    )


def lines_of(small: SmallLog, *, at: int | None = None, size: int | None = None, key: Ed25519PrivateKey = KEY) -> bytes:
    text = log.parse_note(small.checkpoint(size)).text
    return notes.cosign(text, name=VERIFIER.name, key=key, time=int(time.time()) if at is None else at).line().encode()


def test_a_closed_port_is_a_witness_that_does_not_answer(small: SmallLog, client: httpx.Client) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = witness_client.parse_endpoint(f"http://127.0.0.1:{free.getsockname()[1]} {VERIFIER.text()}")
        refused("witness_unreachable", endpoint, small, client, match="does not answer")


def test_a_witness_that_takes_the_request_and_is_silent(small: SmallLog) -> None:
    with answering(b"HTTP/1.1 200 OK\r\n", pause=60) as endpoint, httpx.Client(trust_env=False, timeout=0.5) as client:
        refused("witness_unreachable", endpoint, small, client, match="does not answer")


TRICKLES = {
    "its body": (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"x"),
    "a body without an end": (b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    "its headers": (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
    "its status": (b"HTTP/1.1 200 ", b"O"),
    "a TLS handshake": (b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc\x03\x03", b"x"),
}


@pytest.mark.parametrize("what", TRICKLES)
def test_a_witness_that_answers_a_byte_at_a_time_is_left(
    small: SmallLog, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """No timeout of the connection ends it: each byte comes in time."""
    monkeypatch.setattr(witness_client, "_PATIENCE", 0.5)
    head, byte = TRICKLES[what]
    with answering(head, *[byte] * 1000, pause=0.05) as endpoint:
        if "TLS" in what:
            endpoint = dataclasses.replace(endpoint, url=endpoint.url.replace("http:", "https:"))
        refused("witness_unreachable", endpoint, small, client, match="not finished its answer")


ODD = {
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer"),
    "a redirect": (http(302, b"", more="Location: http://127.0.0.1:1/\r\n"), "answers 302"),
    "a page": (http(200, b"<html>Welcome to nginx</html>"), "no valid cosignature"),
    "nothing": (http(200, b""), "no valid cosignature"),
    "too much": (http(200, b"x" * 70_000), "more than 65536 bytes"),
    "an error": (http(500, b"\x1b[31mfailed\n"), "answers 500: '\\\\x1b"),
    "a conflict without a type": (http(409, b"3\n"), "expected text/x.tlog.size"),
    "a conflict without a size": (http(409, b"three\n", "text/x.tlog.size"), "expected text/x.tlog.size"),
    "a conflict with a size beyond all": (http(409, b"9223372036854775808\n", "text/x.tlog.size"), "and a size"),
    "a conflict with more": (http(409, b"3\n\n", "text/x.tlog.size"), "and a size"),
    "a conflict for ever": (http(409, b"3\n", "text/x.tlog.size"), "answers 409"),
    "a bad request": (http(400, b"no\n"), "answers 400"),
}


@pytest.mark.parametrize("what", ODD)
def test_an_answer_that_is_none_of_a_witness(small: SmallLog, client: httpx.Client, what: str) -> None:
    body, match = ODD[what]
    with answering(body) as endpoint:
        found = refused("witness_unreachable", endpoint, small, client, match=match)
    shown = witness_client.for_anybody(endpoint, found)
    assert shown.startswith("witness_unreachable: ") and not any(word in shown for word in ("SSH", "nginx", "failed"))


def test_a_cosignature_must_verify_for_this_checkpoint_and_this_key(small: SmallLog, client: httpx.Client) -> None:
    good = lines_of(small)
    forged = (
        notes.Signature(VERIFIER.name, VERIFIER.key_id, int(time.time()).to_bytes(8, "big") + bytes(64)).line().encode()
    )
    short = notes.Signature(VERIFIER.name, VERIFIER.key_id, b"x").line().encode()
    for body in (
        forged,
        short,
        lines_of(small, size=4),
        lines_of(small.fork(1, 5)),
        forged + good,
        good[:-1],
        good + b"x",
    ):
        with answering(http(200, body)) as endpoint:
            refused("witness_unreachable", endpoint, small, client, match="no valid cosignature")
    for body in (lines_of(small, key=Ed25519PrivateKey.generate()),):
        with answering(http(200, body)) as endpoint:
            refused("witness_unreachable", endpoint, small, client, match="signed as .*expected")
    for at in (0, 2**63 - 1):
        with answering(http(200, lines_of(small, at=at))) as endpoint:
            refused("witness_unreachable", endpoint, small, client, match="apart")
    # Lines of other keys beside it are ignored, as of a witness that changes its key.
    for body in (good, lines_of(small, key=Ed25519PrivateKey.generate()) + good):
        with answering(http(200, body)) as endpoint:
            assert asked(endpoint, small, client)


def test_a_witness_that_says_no_and_shows_nothing_is_believed_so_far(small: SmallLog, client: httpx.Client) -> None:
    """What it refuses with is its word; the sentence says that it showed no proof of it."""
    with answering(http(422, b"no\n")) as endpoint:
        refused("witness_disagrees", endpoint, small, client, match="doesn't show it")
