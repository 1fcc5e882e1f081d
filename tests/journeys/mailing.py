"""What is mailed to a custodian before a release, and what the custodian has."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import rounds_made
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from rounds_made import START, Made, cosigned

from acclimate import files, keys, log
from acclimate.client import custodian, pins, requests
from acclimate.client.pins import Pin
from acclimate.client.requests import Mailed
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

NAMES = ("w1.example.org", "w2.example.org", "w3.example.org")
CLOSES = START + timedelta(days=30)
NOW = START + timedelta(days=32)
NAME = "custodian-b"
INDEX = 2
AUDITED = rounds_made.DEFINITION.replace("audits = 0", 'audits = 1\nauditor = "lab"\naudit_tolerance = 0.0')
EVERY_AUDITED = AUDITED.replace("audits = 1", "audits = 100")


def make(where: Path, *, definition: str = rounds_made.DEFINITION, quorum: int = 2, **more: Any) -> Made:
    """A round as far as PreparationFinished, with witnesses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "DEFINITION", definition)
        patch.setattr(rounds_made, "QUORUM", quorum)
        patch.setattr(rounds_made, "WITNESSES", NAMES if quorum else ())
        plain = rounds_made.defined_fields
        patch.setattr(rounds_made, "defined_fields", lambda made: plain(made) | more)
        for later in ("release", "evaluate_all"):
            patch.setattr(rounds_made, later, lambda made: None)
        patch.setattr(rounds_made, "rank", lambda made: {})
        return rounds_made.make(where, publish=False)


@dataclass
class Mail:
    """What is mailed to a custodian, and what the custodian has; a test changes one thing."""

    made: Made
    keys: keys.Keys
    mailed: Mailed
    now: datetime = NOW

    def change(self, **fields: Any) -> "Mail":
        return replace(self, mailed=replace(self.mailed, **fields))

    def until(self, size: int) -> "Mail":
        """The log as it was when it had so many entries."""
        return self.change(lines=self.made.entries[:size], note=self.made.notes[size])

    def with_entries(self, lines: list[bytes], *, at: datetime = NOW) -> "Mail":
        """Another log, signed by the log's key and cosigned."""
        root = log.root([digests.leaf_hash(line) for line in lines])
        note = log.sign_checkpoint(self.made.signer, len(lines), root)
        return self.change(lines=lines, note=cosigned(note, at=at, by=NAMES))

    def cosigned(self, *, at: datetime, by: tuple[str, ...] = NAMES) -> "Mail":
        size = len(self.mailed.lines)
        root = log.root([digests.leaf_hash(line) for line in self.mailed.lines])
        return self.change(note=cosigned(log.sign_checkpoint(self.made.signer, size, root), at=at, by=by))

    def release(self) -> tuple[requests.Answer, tuple[custodian.Check, ...]]:
        return custodian.answer(self.mailed, self.keys, self.made.round, now=self.now)

    def refuses(self, code: str, *words: str) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.release()
        assert caught.value.code == code, caught.value
        assert caught.value.hint, "what shall they do?"
        for word in words:
            assert word in caught.value.sentence + caught.value.hint, (word, caught.value)
        return caught.value

    def last(self) -> custodian.Check:
        return custodian.inspect(self.mailed, self.keys, self.made.round, now=self.now)[-1]


def mail(made: Made, where: Path) -> Mail:
    path = where / "keys"
    path.mkdir(mode=0o700)
    own = key_folder(made, path)
    size = next(i for i, data in enumerate(made.entries) if b'"HoldoutSealed"' in data) + 1
    pin = Pin(
        round=made.round,
        defined=digests.of_bytes(defined_in(made)),
        log=made.signer.vkey,
        organizer=rounds_made.public("organizer"),
        checkpoint=made.notes[size],
        seal=made.seal["seal"],
        index=INDEX,
        commitment=made.seal["shares"][INDEX - 1]["commitment"],
    )
    pins.keep(own, pin, envelope=made.envelopes[INDEX - 1])
    mailed = Mailed(
        where / "mailed",
        made.round,
        definition_of(made),
        made.notes[len(made.entries)],
        list(made.entries),
        made.envelopes,
    )
    return Mail(made, own, mailed)


def defined_in(made: Made) -> bytes:
    return next(entry for entry in made.entries if records.parse(entry).round == made.round)


def definition_of(made: Made) -> bytes:
    defined = next(r for r in map(records.parse, made.entries) if r.round == made.round)
    for text in (rounds_made.DEFINITION, AUDITED, EVERY_AUDITED):
        if digests.of_bytes(text.encode()) == defined["definition"]:
            return text.encode()
    raise AssertionError


def key_folder(made: Made, path: Path, name: str = NAME) -> keys.Keys:
    key = rounds_made.key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for file, data in (("ed25519.pem", key), ("age.txt", f"{made.identities[name]}\n".encode())):
        files.write(path / file, data)
    return keys.load(path)


def packed(mailed: Mailed, to: Path) -> Path:
    members = {
        "request.json": digests.canonical({"v": 1, "type": requests.REQUEST, "round": mailed.round}),
        "definition.toml": mailed.raw,
        "checkpoint": mailed.note.encode(),
        "entries.jsonl": b"".join(line + b"\n" for line in mailed.lines),
        **({"envelopes.json": digests.canonical(mailed.envelopes)} if mailed.envelopes is not None else {}),
    }
    to.write_bytes(requests.pack(members))
    return to
