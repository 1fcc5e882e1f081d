"""What a client fetches of a log: nothing before the checkpoint is signed by the log's key and not behind what was seen; then just so much."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
import rounds_made
from rounds_made import START, Made

from acclimate import files, keys, log, mirror
from acclimate.client import Client, auditor, custodian, folder, history, pins, requests, voiding
from acclimate.client.history import Known, Online
from acclimate.client.pins import Pin
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

INDEX = 2
MOMENT = "2027-03-01T00:00:00.000000Z"
SERVER = {"now": MOMENT, "code": digests.of_bytes(b"a wheel"), "evaluators": [], "witnesses": [], "quorum": 0}
SUMMARY = {
    **{"competition": "marbles", "title": "Marbles", "phase": "prepared", "closes": MOMENT, "now": MOMENT, "next": ""},
    **{"data_is_public": True, "entrants": 3, "submissions": 4, "threshold": 2, "tracked": None},
}
DRAW = digests.of_bytes(b"the auditor's secret: 32 bytes..")
ASKED = 'audits = 1\nauditor = "lab"\naudit_tolerance = 0.0'
DEFINITION = rounds_made.DEFINITION.replace("audits = 0", ASKED)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A prepared round without witnesses, which names an auditor."""
    lab = {"name": "lab", "ed25519": rounds_made.public("lab"), "draw": DRAW}
    with pytest.MonkeyPatch.context() as patch:
        plain = rounds_made.defined_fields
        patch.setattr(rounds_made, "DEFINITION", DEFINITION)
        patch.setattr(rounds_made, "defined_fields", lambda made: plain(made) | {"auditor": lab})
        for later in ("release", "evaluate_all"):
            patch.setattr(rounds_made, later, lambda made: None)
        patch.setattr(rounds_made, "rank", lambda made: {})
        return rounds_made.make(tmp_path_factory.mktemp("round"), publish=False)


@dataclass
class Shown:
    """A server of a log, of which a test changes one thing; `asked` is what it was asked for.

    Attributes:
        made: the round.
        note: the checkpoint.
        entries: what it gives of the entries start ≤ index < end.
    """

    made: Made
    note: str
    entries: Callable[[int, int], Iterator[bytes]]
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, query: dict[str, list[str]]) -> Iterator[bytes]:
        whole = f"/v1/rounds/{self.made.round}"
        index, entry = next(
            (i, e) for i, e in enumerate(self.made.entries) if records.parse(e).round == self.made.round
        )
        if path == "/v1/log/entries":
            yield from self.entries(int(query["start"][0]), int(query["end"][0]))
        elif path == "/v1/log/checkpoint":
            yield self.note.encode()
        else:
            told = {
                "/v1/server": SERVER | {"log": self.made.signer.vkey},
                "/v1/log/rotations": {"receipts": []},
                "/v1/log/consistency": {"proof": []},
                f"{whole}/records": [{"index": index, "record": json.loads(entry)}],
                whole: SUMMARY | {"round": self.made.round},
            }
            yield DEFINITION.encode() if path.endswith("/definition") else json.dumps(told[path]).encode()


@contextmanager
def serving(shown: Shown) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the library's name
            asked = urlparse(self.path)
            shown.asked.append(asked.path)
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for piece in shown.answer(asked.path, parse_qs(asked.query)):
                    self.wfile.write(piece)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the library's name)
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


@pytest.fixture
def honest(made: Made) -> Shown:
    return Shown(made, made.notes[len(made.entries)], lambda start, end: (e + b"\n" for e in made.entries[start:end]))


def pin(made: Made, *, checkpoint: str | None = None) -> Pin:
    size = next(i for i, data in enumerate(made.entries) if b'"HoldoutSealed"' in data) + 1
    defined = next(entry for entry in made.entries if records.parse(entry).round == made.round)
    return Pin(
        round=made.round,
        defined=digests.of_bytes(defined),
        log=made.signer.vkey,
        organizer=rounds_made.public("organizer"),
        checkpoint=checkpoint or made.notes[size],
        seal=made.seal["seal"],
        index=INDEX,
        commitment=made.seal["shares"][INDEX - 1]["commitment"],
    )


def key_folder(where: Path, name: str) -> keys.Keys:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    where.mkdir(mode=0o700)
    data = rounds_made.key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files.write(where / "ed25519.pem", data)
    return keys.load(where)


def release(client: Client, made: Made, where: Path) -> None:
    own = key_folder(where / "custodian", "custodian-b")
    pins.keep(own, pin(made), envelope=made.envelopes[INDEX - 1])
    custodian.answer(Online(client), own, made.round, now=START)


def approve(client: Client, made: Made, where: Path) -> None:
    own = key_folder(where / "custodian", "custodian-b")
    pins.keep(own, pin(made), envelope=made.envelopes[INDEX - 1])
    voiding.approve_void(client, own, made.round, reason="a machine burnt")


def audit(client: Client, made: Made, where: Path) -> None:
    own = key_folder(where / "lab", "lab")
    folder.keep_log_key(own.folder, made.signer.vkey)
    auditor.evidence(client, own, made.round)


def request(client: Client, made: Made, where: Path) -> None:
    requests.make(client, made.round, where / "request")


def mirrored(client: Client, made: Made, where: Path) -> None:
    with mirror.opened(where / "mirror", made.signer.vkey) as kept:
        mirror.follow(client, kept)


READERS = [release, approve, audit, request, mirrored]


def refusal_of(call: Callable[[Client, Made, Path], None], shown: Shown, where: Path) -> Refusal:
    with serving(shown) as url, Client(url, patience=0) as client, pytest.raises(Refusal) as caught:
        call(client, shown.made, where)
    assert caught.value.hint, caught.value
    return caught.value


def forged(made: Made, size: int, *, by: str) -> str:
    signer = made.signer if by == "log" else log.Signer(rounds_made.ORIGIN, rounds_made.key(by))
    return log.sign_checkpoint(signer, size, b"\x07" * 32)


def without_end(start: int, end: int) -> Iterator[bytes]:
    while True:
        yield b"x" * 60_000 + b"\n"


@pytest.mark.parametrize("call", READERS)
def test_an_honest_log_is_read_as_far_as_its_checkpoint(
    call: Callable[[Client, Made, Path], None], honest: Shown, tmp_path: Path
) -> None:
    if call is release:
        # The auditor has not drawn yet: that is found in the entries.
        assert "has not drawn" in refusal_of(call, honest, tmp_path).sentence
    else:
        with serving(honest) as url, Client(url, patience=0) as client:
            if call is request:
                with suppress(Refusal, KeyError):  # the envelopes are nobody's here
                    call(client, honest.made, tmp_path)
            else:
                call(client, honest.made, tmp_path)
    assert "/v1/log/entries" in honest.asked
    assert honest.asked.index("/v1/log/checkpoint") < honest.asked.index("/v1/log/entries")


@pytest.mark.parametrize("call", READERS)
@pytest.mark.parametrize("size", [1 << 40, 3])
def test_of_a_checkpoint_that_the_logs_key_did_not_sign_no_entry_is_asked_for(
    call: Callable[[Client, Made, Path], None], size: int, honest: Shown, tmp_path: Path
) -> None:
    shown = replace(honest, note=forged(honest.made, size, by="a thief"), entries=without_end, asked=[])
    refusal = refusal_of(call, shown, tmp_path)
    assert refusal.code == "proof_invalid" and honest.made.signer.vkey in refusal.sentence
    assert "/v1/log/checkpoint" in shown.asked and "/v1/log/entries" not in shown.asked


@pytest.mark.parametrize("call", [release, approve])
def test_of_a_checkpoint_behind_the_pinned_one_no_entry_is_asked_for(
    call: Callable[[Client, Made, Path], None], honest: Shown, tmp_path: Path
) -> None:
    shown = replace(honest, note=honest.made.notes[2], asked=[])
    refusal = refusal_of(call, shown, tmp_path)
    assert refusal.code == "log_inconsistent" and "pins.json" in refusal.sentence
    assert "the log of 2 entries does not extend the pinned checkpoint of 3" in refusal.sentence
    assert "/v1/log/entries" not in shown.asked


def test_of_a_checkpoint_behind_what_the_auditor_saw_no_entry_is_asked_for(honest: Shown, tmp_path: Path) -> None:
    own, size = key_folder(tmp_path / "lab", "lab"), len(honest.made.entries)
    with serving(honest) as url, Client(url, patience=0) as client:
        auditor.evidence(client, own, honest.made.round)
    path = own.folder / "checkpoints" / f"{honest.made.round}.txt"
    assert path.read_text() == honest.note
    # Fewer entries, and as many with another root.
    for note in (honest.made.notes[size - 1], forged(honest.made, size, by="log")):
        shown = replace(honest, note=note, asked=[])
        with serving(shown) as url, Client(url, patience=0) as client, pytest.raises(Refusal) as caught:
            auditor.evidence(client, own, honest.made.round)
        assert caught.value.code == "log_inconsistent" and str(path) in caught.value.sentence
        assert "/v1/log/entries" not in shown.asked and path.read_text() == honest.note


@pytest.mark.parametrize("call", READERS)
def test_more_entries_than_the_checkpoint_has_are_refused(
    call: Callable[[Client, Made, Path], None], honest: Shown, tmp_path: Path
) -> None:
    def one_more(start: int, end: int) -> Iterator[bytes]:
        yield b"".join(e + b"\n" for e in [*honest.made.entries[start:end], honest.made.entries[0]])

    shown = replace(honest, entries=one_more)
    size = len(honest.made.entries)
    refusal = refusal_of(call, shown, tmp_path)
    assert (
        refusal.code == "entry_unknown"
        and f"gave {size + 1} log entries from 0 on, not up to {size}" in refusal.sentence
    )


@pytest.mark.parametrize("call", READERS)
def test_entries_without_end_are_left(
    call: Callable[[Client, Made, Path], None], honest: Shown, tmp_path: Path
) -> None:
    refusal = refusal_of(call, replace(honest, entries=without_end), tmp_path)
    assert refusal.code == "server_unreachable" and "/v1/log/entries with more than" in refusal.sentence


def test_an_entry_that_is_longer_than_a_record_is_refused(honest: Shown, tmp_path: Path) -> None:
    shown = replace(honest, entries=lambda start, end: iter([b"x" * (records.MAX_BYTES + 1) + b"\n"]))
    refusal = refusal_of(audit, shown, tmp_path)
    assert refusal.code == "record_invalid" and "log entry 0" in refusal.sentence
    assert str(records.MAX_BYTES + 1) in refusal.sentence


def test_whoever_has_the_logs_key_makes_nobody_hold_a_log_without_end(
    honest: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of more entries than there ever were, signed; and entries as long as somebody asks."""
    monkeypatch.setattr(history, "LONGEST_LOG", 1 << 20)
    entry = honest.made.entries[0] + b"\n"
    shown = replace(
        honest,
        note=forged(honest.made, 1 << 40, by="log"),
        entries=lambda start, end: iter([entry * min(end - start, 1000)]),
    )
    refusal = refusal_of(audit, shown, tmp_path)
    assert (
        refusal.code == "server_unreachable" and str(1 << 40) in refusal.sentence and str(1 << 20) in refusal.sentence
    )
    assert shown.asked.count("/v1/log/entries") <= (1 << 20) // (1000 * len(entry)) + 2


def test_a_kept_key_of_another_log_is_told_before_anything_is_read(honest: Shown, tmp_path: Path) -> None:
    other = log.Signer(rounds_made.ORIGIN, rounds_made.key("another")).vkey
    own = key_folder(tmp_path / "lab", "lab")
    folder.keep_log_key(own.folder, other)
    with serving(honest) as url, Client(url, patience=0) as client, pytest.raises(Refusal) as caught:
        auditor.evidence(client, own, honest.made.round)
    assert caught.value.code == "log_inconsistent" and other in caught.value.sentence and caught.value.hint
    assert "/v1/log/entries" not in honest.asked
    assert Known.of(own).keys == (other,)
