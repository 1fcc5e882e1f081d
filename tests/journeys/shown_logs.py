"""A server that shows the log of a made round, as whoever has the log's key may have changed it; it takes whatever is sent, and notes it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import rounds_made
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from rounds_made import Made, cosigned

from acclimate import files, keys, log
from acclimate.client.pins import Pin
from acclimate.client.requests import Mailed
from acclimate_competitions import digests, records

WITNESSES = ("w1.example.org", "w2.example.org", "w3.example.org")


def prepared(where: Path, *, definition: str = rounds_made.DEFINITION, quorum: int = 2, **more: Any) -> Made:
    """A round as far as PreparationFinished; `more` goes into RoundDefined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "release", lambda made: None)
        patch.setattr(rounds_made, "evaluate_all", lambda made: None)
        patch.setattr(rounds_made, "rank", lambda made: {})
        return played(where, definition=definition, quorum=quorum, publish=False, **more)


def played(
    where: Path, *, definition: str = rounds_made.DEFINITION, quorum: int = 2, publish: bool = True, **more: Any
) -> Made:
    """A whole round with witnesses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "DEFINITION", definition)
        patch.setattr(rounds_made, "QUORUM", quorum)
        patch.setattr(rounds_made, "WITNESSES", WITNESSES if quorum else ())
        plain = rounds_made.defined_fields
        patch.setattr(rounds_made, "defined_fields", lambda made: plain(made) | more)
        return rounds_made.make(where, publish=publish)


def signed(made: Made, entries: list[bytes], *, at: datetime, by: tuple[str, ...] = WITNESSES) -> str:
    """A checkpoint over any entries, by the log's key, cosigned."""
    root = log.root([digests.leaf_hash(entry) for entry in entries])
    return cosigned(log.sign_checkpoint(made.signer, len(entries), root), at=at, by=by)


def dated(entry: bytes, at: datetime) -> bytes:
    """An entry with another receipt time; no signature covers it."""
    return replace(records.parse(entry), at=at).encode()


def key_folder(where: Path, name: str, *, age: str | None = None) -> keys.Keys:
    where.mkdir(mode=0o700, parents=True)
    data = rounds_made.key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files.write(where / "ed25519.pem", data)
    if age is not None:
        files.write(where / "age.txt", f"{age}\n".encode())
    return keys.load(where)


def pin(made: Made, index: int) -> Pin:
    """What the custodian of a share pinned, having acknowledged right after the seal."""
    size = next(i for i, data in enumerate(made.entries) if b'"HoldoutSealed"' in data) + 1
    return Pin(
        round=made.round,
        defined=digests.of_bytes(defined_in(made)),
        log=made.signer.vkey,
        organizer=rounds_made.public("organizer"),
        checkpoint=made.notes[size],
        seal=made.seal["seal"],
        index=index,
        commitment=made.seal["shares"][index - 1]["commitment"],
    )


def defined_in(made: Made) -> bytes:
    return next(entry for entry in made.entries if records.parse(entry).round == made.round)


def mailed(made: Made, where: Path, *, definition: str, entries: list[bytes], note: str) -> Mailed:
    return Mailed(where / "mailed", made.round, definition.encode(), note, entries, made.envelopes)


_ROUND = {
    **{
        "competition": "marbles",
        "title": "Marbles",
        "phase": "open",
        "next": "",
        "closes": "",
        "now": "",
        "tracked": False,
    },
    **{"data_is_public": True, "entrants": 0, "submissions": 0, "threshold": 2},
}


@dataclass
class Shown:
    """What a server shows of a log.

    Attributes:
        made: the round.
        definition: its definition's text.
        entries: the log's entries.
        note: the checkpoint over them.
        round: what it says of the round, besides its id.
        files: path below the round's -> bytes, such as its bundle.
        posted: what was sent, with its path.
    """

    made: Made
    definition: str
    entries: list[bytes]
    note: str
    round: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    posted: list[tuple[str, Any]] = field(default_factory=list)

    def answer(self, path: str, query: dict[str, list[str]]) -> bytes:
        whole = f"/v1/rounds/{self.made.round}"
        if path == "/v1/log/entries":
            return b"".join(e + b"\n" for e in self.entries[int(query["start"][0]) : int(query["end"][0])])
        if path == "/v1/log/checkpoint":
            return self.note.encode()
        if path == f"{whole}/definition":
            return self.definition.encode()
        if path.removeprefix(whole) in self.files:
            return self.files[path.removeprefix(whole)]()
        parsed = enumerate(map(records.parse, self.entries))
        own = [(i, entry) for (i, r), entry in zip(parsed, self.entries, strict=True) if r.round == self.made.round]
        start, limit = int(query.get("start", ["0"])[0]), int(query.get("limit", ["100"])[0])
        listed = [{"index": i, "record": json.loads(entry)} for i, entry in own if i >= start][:limit]
        told = {
            "/v1/server": {
                **{"log": self.made.signer.vkey, "now": records.format_time(self.made.now), "code": rounds_made.CODE},
                **{"evaluators": [], "witnesses": [], "quorum": 0},
            },
            "/v1/log/rotations": {"receipts": []},
            f"{whole}/records": listed,
            whole: {**_ROUND, "round": self.made.round, **self.round},
        }
        return json.dumps(told[path]).encode()


@contextmanager
def serving(shown: Shown) -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the library's name
            asked = urlparse(self.path)
            self.reply(shown.answer(asked.path, parse_qs(asked.query)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            shown.posted.append((urlparse(self.path).path, body))
            self.reply(b'{"index": 999}')

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

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
