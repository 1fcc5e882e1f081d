"""Two more things to fuzz: what a witness is asked, and what a log makes of a witness's answer."""

import contextlib
import tempfile
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from acclimate import log, notes, witness_client
from acclimate.witness import Request, Witness
from acclimate.witness_state import State
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

SIGNER = log.Signer("log.example/acclimate", Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
WITNESS = notes.Verifier("witness.example/w1", notes.COSIGNATURE, KEY.public_key().public_bytes_raw())
ENDPOINT = witness_client.Endpoint("http://witness.example", WITNESS)
TREE = log.Tree(digests.leaf_hash(bytes([i])) for i in range(40))
NOW = 1_800_000_000
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


def note_of(size: int) -> str:
    """A checkpoint of the log."""
    return log.sign_checkpoint(SIGNER, size, TREE.root(size))


def request_of(old: int, size: int) -> bytes:
    """A request that a witness with the old size cosigns."""
    return witness_client.request(note_of(size), old=old, proof=TREE.consistency_proof(old, size))


def asked(data: bytes) -> None:
    """A witness that has cosigned 8 entries: whatever comes, it answers by the specification, and cosigns only this log."""
    with contextlib.suppress(Refusal):
        if Request.parse(data).encode() != data:
            raise AssertionError("a request is written again as other bytes")
    if not _WITNESSES:
        _WITNESSES.append(fresh())
    folder, witness, state = _WITNESSES[0]
    answer = witness.add_checkpoint(data)
    seen = state.seen(SIGNER.origin)
    if answer.status == 200 or seen is None or seen.size != 8:
        _WITNESSES.pop()
        state.close()
        folder.cleanup()
    if answer.status not in (200, 400, 403, 404, 409, 422):
        raise AssertionError(f"answers {answer.status}")
    if seen is None or not 8 <= seen.size <= 40 or seen.root != TREE.root(seen.size):
        raise AssertionError(f"has cosigned {seen}")


Folder = tempfile.TemporaryDirectory[str]


def fresh() -> tuple[Folder, Witness, State]:
    """A witness that has cosigned 8 entries, and the folder of its memory."""
    folder = tempfile.TemporaryDirectory(dir=MEMORY)
    path = Path(folder.name) / "witness.db"
    State.create(path, WITNESS.text(), made=NOW)
    state = State.open(path, WITNESS.text())
    witness = Witness(WITNESS.name, KEY, logs=[SIGNER.verifier], state=state, clock=lambda: NOW)
    if (answer := witness.add_checkpoint(request_of(0, 8))).status != 200:
        raise AssertionError(f"answers {answer}")
    return folder, witness, state


_WITNESSES: list[tuple[Folder, Witness, State]] = []


def answered(data: bytes) -> None:
    """An answer of a witness: its status by the first byte, the rest its body. Only the witness's own cosignature is taken."""
    status = (200, 200, 200, 409, 422, 500)[data[0] % 6] if data else 200
    kind = "text/x.tlog.size" if status == 409 else "text/plain"

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"Content-Type": kind}, content=data[1:])

    with httpx.Client(transport=httpx.MockTransport(answer)) as client, contextlib.suppress(Refusal):
        found = witness_client.ask(
            ENDPOINT,
            note_of(20),
            old=8,
            proof_of=lambda old: TREE.consistency_proof(old, 20),
            client=client,
            clock=lambda: NOW,
        )
        opened = log.open_checkpoint(note_of(20) + found.line(), SIGNER.verifier, [WITNESS])
        if abs(opened.cosigned[WITNESS.text()] - NOW) > witness_client.CLOCK_TOLERANCE:
            raise AssertionError("a cosignature of another day was taken")


def line_of(size: int, *, at: int = NOW) -> bytes:
    """A witness's answer."""
    text = log.checkpoint(SIGNER.origin, size, TREE.root(size))
    return notes.cosign(text, name=WITNESS.name, key=KEY, time=at).line().encode()


def requests() -> list[bytes]:
    """Requests to begin with."""
    return [request_of(8, 20), request_of(8, 8), request_of(0, 8), request_of(3, 7), request_of(8, 40)]


def answers() -> list[bytes]:
    """Answers to begin with."""
    return [
        b"\x00" + line_of(20),
        b"\x00" + line_of(19),
        b"\x00" + line_of(20, at=0),
        b"\x0312\n",
        b"\x04no\n",
        b"\x05",
    ]


WORDS = ("old ", "\\x0a\\x0a", "=\\x0a", "\\xe2\\x80\\x94 ", SIGNER.origin, WITNESS.name)
