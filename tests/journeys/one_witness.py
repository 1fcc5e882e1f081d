"""One witness with its memory and a clock that a test sets, and what is asked of its answers."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from witnessed import MADE, SmallLog

from acclimate import log, notes
from acclimate.witness import Witness
from acclimate.witness_state import State

NAME = "witness.example/w1"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
VERIFIER = notes.Verifier(NAME, notes.COSIGNATURE, KEY.public_key().public_bytes_raw())
DAY = 86_400


class Hand:
    """A clock that the test sets; what is hung on it happens when it is read."""

    def __init__(self):
        self.now, self.meanwhile = MADE + DAY, []

    def __call__(self):
        if self.meanwhile:
            self.meanwhile.pop()()
        return self.now


@pytest.fixture
def clock():
    return Hand()


@pytest.fixture
def path(tmp_path):
    State.create(tmp_path / "witness.db", VERIFIER.text(), made=MADE)
    return tmp_path / "witness.db"


@pytest.fixture
def state(path):
    opened = State.open(path, VERIFIER.text())
    yield opened
    opened.close()


@pytest.fixture
def small():
    return SmallLog(size=3)


def witness_of(state, clock, *logs):
    return Witness(NAME, KEY, logs=[log.parse_vkey(vkey) for vkey in logs], state=state, clock=clock)


@pytest.fixture
def witness(state, clock, small):
    return witness_of(state, clock, small.vkey)


def cosigned(answer, small, size):
    """Time of a cosignature, which must be this witness's over exactly this checkpoint."""
    assert (answer.status, answer.kind) == (200, "text/plain; charset=utf-8"), answer
    note = small.checkpoint(size) + answer.body.decode()
    opened = log.open_checkpoint(note, small.signer.verifier, [VERIFIER])
    assert opened.checkpoint.size == size
    return opened.cosigned[VERIFIER.text()]


def is_conflict(answer, size):
    return (answer.status, answer.kind, answer.body) == (409, "text/x.tlog.size", f"{size}\n".encode())


def seen(state, small):
    found = state.seen(small.signer.origin)
    return found and (found.size, found.root)
