"""A request for a release as one file that can be mailed, and the answer to it.

A custodian's machine need not reach the server: a request is a ZIP of

    request.json     {v: 1, type: "ReleaseRequest", round}
    definition.toml  the definition, as RoundDefined names it
    checkpoint       a signed checkpoint, with the cosignatures of the round's quorum
    entries.jsonl    every log entry up to it
    envelopes.json   the seal's envelopes, where whoever made the request may have them; else the custodian uses the one that it kept

Anybody can make one, since nothing in it is taken for true: a custodian checks all of it as if a server had sent it. The answer is a file
{v: 1, type: "ReleaseAnswer", round, record, document}: a signed ShareReleased and the share document. It is as secret as the share, until it is sent.
"""

import base64
import binascii
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate import files, hand_overs, log
from acclimate.client import evidence
from acclimate.client.connection import Client, Progress
from acclimate.client.definitions import check_definition
from acclimate.client.history import Online, of_index, read_history
from acclimate.hand_overs import Chain
from acclimate.verify import files as bundles
from acclimate.verify.report import Failed
from acclimate_competitions import digests, reading, records, rounds
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

REQUEST, ANSWER = "ReleaseRequest", "ReleaseAnswer"
_SLACK = 1 << 26
"""Bytes that a request may unpack to, beside a hundred times its own: a small one that claims to hold a gigabyte is none."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_AN_ANSWER = "it is the file that `acclimate custodian release --request FILE --out ANSWER` writes"
_MAKE = "ask whoever mailed it to make it anew: acclimate round request ROUND --out FILE"


@dataclass(frozen=True)
class Mailed:
    """A mailed request as a source of evidence (history.Source); nothing in it is verified yet.

    Attributes:
        path: its file, for what is said about it.
        round: the round that it says it is about.
        raw: the definition's bytes.
        note: the checkpoint.
        lines: the log's entries.
        envelopes: the seal's envelopes, or None.
    """

    path: Path
    round: str
    raw: bytes
    note: str
    lines: list[bytes]
    envelopes: list[dict[str, Any]] | None

    def definition(self, round_id: str) -> tuple[Record, Competition]:
        """See Source."""
        for index, data in enumerate(self.lines):
            try:
                record = records.parse(data)
            except Refusal as refusal:
                raise refusal.of(f"{self.path}, log entry {index}", hint=_MAKE) from refusal
            if record.type == "RoundDefined" and record.round == round_id:
                return record, check_definition(record, self.raw, where=str(self.path))
        raise Refusal("log_inconsistent", f"{self.path} has no RoundDefined of {round_id}", hint=_MAKE)

    def chain(self, known: log.Verifier) -> Chain:
        """See Source."""
        return hand_overs.chain(self.lines, known)

    def checkpoint(self, defined: Record) -> str:
        """See Source."""
        return self.note

    def newest(self) -> str | None:
        """See Source."""
        return None

    def entries(self, size: int) -> Iterator[bytes]:
        """See Source."""
        return iter(self.lines[:size])

    def envelope(self, round_id: str, index: int) -> dict[str, Any] | None:
        """See Source."""
        return of_index(self.envelopes, index) if self.envelopes is not None else None


def make(client: Client, round_id: str, out: Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Write a request of a prepared round; {round, entries, envelopes: whether they are in it}.

    Args:
        client: a connection to the server.
        round_id: the round, or a prefix of its id.
        out: the file to write.
        progress: told (log entries read, of how many).

    Raises:
        Refusal: too_early, where the round is not prepared yet; quorum_missing; conflict, where a fuller one is there; proof_invalid, log_inconsistent, no_space, …
    """
    _require_a_request_or_none(out)
    source = Online(client, progress)
    defined, competition = source.definition(round_id)
    history = read_history(source, defined)
    evidence.require_quorum(history, defined)
    state = rounds.fold(history.numbered, competition)
    if state.finished is None:
        raise Refusal(
            "too_early",
            f"the log has no PreparationFinished of {defined.round} yet; the round is {state.phase}",
            hint="custodians release nothing before it: make the request then",
        )
    given = _envelopes(client, defined.round)
    if given is None:
        _require_none_with_envelopes(out, defined.round)
    members = {
        "request.json": digests.canonical({"v": 1, "type": REQUEST, "round": defined.round}),
        "definition.toml": client.definition(defined.round),
        "checkpoint": history.note.encode(),
        "entries.jsonl": b"".join(data + b"\n" for data in history.entries),
        **({"envelopes.json": digests.canonical(given)} if given is not None else {}),
    }
    files.write(out, pack(members), mode=0o644)
    return {"round": defined.round, "entries": len(history.hashes), "envelopes": given is not None}


def _require_a_request_or_none(out: Path) -> None:
    """Refuse a name that anything but a request has: a key would be lost for good.

    Raises:
        Refusal: conflict.
    """
    files.require_replaceable(out, b"pk")
    if out.exists():
        try:
            read(out)
        except Refusal as refusal:
            raise Refusal(
                "conflict",
                f"{out} exists already and is no request; nothing was written over",
                hint="name another file",
            ) from refusal


def _require_none_with_envelopes(out: Path, round_id: str) -> None:
    """Refuse to write over a request that holds more: who mails that one spares the custodians their backups.

    Raises:
        Refusal: conflict.
    """
    try:
        kept = read(out)
    except Refusal:
        return
    if kept.envelopes is not None and kept.round == round_id:
        raise Refusal(
            "conflict",
            f"{out} is a request for {round_id} with the seal's envelopes; this one would be without, and is not written over it",
            hint="mail the one that is there, name another file, or make it as organizer or custodian: --keys DIR",
        )


def pack(members: Mapping[str, bytes]) -> bytes:
    """A ZIP of these files; the same bytes each time."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return whole.getvalue()


def _envelopes(client: Client, round_id: str) -> list[dict[str, Any]] | None:
    try:
        found: list[dict[str, Any]] = client.envelopes(round_id)["real"]["envelopes"]
    except Refusal as refusal:
        if refusal.code not in ("role_missing", "token_invalid"):
            raise
        return None
    return found


def read(path: Path) -> Mailed:
    """A request, as it was mailed.

    Raises:
        Refusal: file_unreadable.
    """
    reading.regular(path, hint="save the mail's attachment, and name it")
    if not zipfile.is_zipfile(path):
        raise Refusal(
            "file_unreadable",
            f"{path} is no request for a release: it is no ZIP, or one that was cut off",
            hint="save the mail's attachment, not the mail; else " + _MAKE,
        )
    try:
        with bundles.opened(path, slack=_SLACK) as found:
            about = found.json("request.json")
            if not isinstance(about, dict) or set(about) != {"v", "type", "round"} or about["type"] != REQUEST:
                raise Failed("request.json", f"it does not say {REQUEST!r}, and of which round")
            if type(about["v"]) is not int or about["v"] != 1:
                raise Failed("request.json", f"it is of version {about['v']!r}, this is a client of version 1")
            if not records.is_round_id(about["round"]):
                raise Failed("request.json", f"{str(about['round'])[:80]!r} is no round's id")
            envelopes = found.json("envelopes.json") if "envelopes.json" in found else None
            if envelopes is not None and not (isinstance(envelopes, list) and all(map(_is_envelope, envelopes))):
                raise Failed("envelopes.json", "it must be a list of envelopes")
            return Mailed(
                path,
                about["round"],
                found.read("definition.toml"),
                found.text("checkpoint"),
                found.lines("entries.jsonl"),
                envelopes,
            )
    except Failed as failed:
        raise Refusal("file_unreadable", f"{path} is no request for a release: {failed}", hint=_MAKE) from failed


def _is_envelope(value: object) -> bool:
    return isinstance(value, dict) and type(value.get("index")) is int


@dataclass(frozen=True)
class Answer:
    """A custodian's release, made and not yet sent.

    Attributes:
        round: the round's id.
        share: which share it is.
        record: the signed ShareReleased.
        document: the share document.
    """

    round: str
    share: int
    record: dict[str, Any]
    document: bytes

    def write(self, path: Path) -> None:
        """Write it to a file that only its owner may read."""
        document = base64.b64encode(self.document).decode()
        value = {"v": 1, "type": ANSWER, "round": self.round, "record": self.record, "document": document}
        files.write_json(path, value)


def read_answer(path: Path) -> Answer:
    """An answer, as `release --out` wrote it.

    Raises:
        Refusal: file_unreadable.
    """
    found = reading.text(path, reading.LONGEST_DOCUMENT, hint=_AN_ANSWER)
    try:
        value = reading.parse_json(found)
        if set(value) != {"v", "type", "round", "record", "document"} or value["type"] != ANSWER:
            raise ValueError
        if type(value["v"]) is not int or value["v"] != 1:
            raise ValueError
        document = base64.b64decode(value["document"], validate=True)
        if not records.is_round_id(value["round"]):
            raise ValueError
        share = value["record"]["fields"]["index"]
        if type(share) is not int:
            raise ValueError
        return Answer(value["round"], share, value["record"], document)
    except (TypeError, ValueError, KeyError, binascii.Error) as error:
        raise Refusal(
            "file_unreadable",
            f"{path} is no answer to a request for a release",
            hint=_AN_ANSWER,
        ) from error
