"""A witness of logs (C2SP tlog-witness): bytes of a request in, bytes of an answer out.

A witness vouches for two things about a log that it knows by key: there is one history, and this much of it was there at this time. It
keeps of each log the newest checkpoint that it cosigned, and cosigns another only where a consistency proof leads from the one to
the other. It never sees an entry. Whoever has a checkpoint of the log may bring it: nothing is believed but signatures and proofs.
"""

import base64
import hashlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from acclimate import notes
from acclimate.clocks import since_boot
from acclimate.log import Checkpoint, parse_checkpoint, verify_consistency
from acclimate.notes import Note, Verifier
from acclimate.witness_state import Refused, Seen, State
from acclimate.witness_tally import Tally
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

LARGEST_REQUEST = 1 << 17
"""A request's bytes, at most: a proof has 63 hashes, the rest are signatures."""
MOST_HASHES = 63
CLOCK_STEP = 60
"""Seconds by which the clock may go back, as it does where it is set; the last time is said again meanwhile."""
CLOCK_JUMP = 86_400
"""Seconds by which the clock may get ahead of what has passed since the start: a time once said is never gone behind again."""
_OLD = re.compile(rb"old (0|[1-9][0-9]{0,18})")
_TEXT, _SIZE = "text/plain; charset=utf-8", "text/x.tlog.size"


@dataclass(frozen=True)
class Answer:
    """What is answered.

    Attributes:
        status: of HTTP.
        body: its bytes.
        kind: their media type.
        facts: for the witness's own log: origin, size, reason.
    """

    status: int
    body: bytes
    kind: str
    facts: dict[str, object]


@dataclass(frozen=True)
class Request:
    """An add-checkpoint request as parsed; nothing in it is verified yet.

    Attributes:
        old: the size that the proof starts from.
        proof: hashes of 32 bytes.
        note: the checkpoint with its signatures.
    """

    old: int
    proof: tuple[bytes, ...]
    note: Note

    def encode(self) -> bytes:
        """The request's body."""
        lines = (f"old {self.old}", *(base64.b64encode(node).decode() for node in self.proof), "")
        return ("".join(f"{line}\n" for line in lines) + self.note.encode()).encode()

    @classmethod
    def parse(cls, body: bytes) -> "Request":
        """A request; Request.encode gives the same bytes back.

        Raises:
            Refusal: request_invalid, proof_invalid.
        """
        if len(body) > LARGEST_REQUEST:
            raise Refusal("request_invalid", f"{len(body)} bytes, at most {LARGEST_REQUEST} are allowed")
        head, blank, note = body.partition(b"\n\n")
        first, *hashes = head.split(b"\n")
        if not blank or not (found := _OLD.fullmatch(first)) or int(found[1]) >= 2**63:
            raise Refusal(
                "request_invalid",
                f"the first line is {first[:40]!r}, expected `old`, a blank and a size below 2^63, and an empty line below the proof",
            )
        if len(hashes) > MOST_HASHES:
            raise Refusal("request_invalid", f"a proof of {len(hashes)} hashes, at most {MOST_HASHES} are allowed")
        return cls(int(found[1]), tuple(map(_hash, hashes)), notes.parse_note(note))


class Witness:
    """One witness: its key, the logs that it knows, its memory and its clock.

    Args:
        name: under which it signs.
        key: what it signs with.
        logs: keys of the logs; several of one name are the keys that this log has had, in their order.
        state: its memory.
        clock: seconds since 1970.
        steady: seconds that nobody sets.
        tally: where refusals are counted.

    Raises:
        Refusal: key_refused, where a log's key is not of kind 0x01.
    """

    def __init__(
        self,
        name: str,
        key: Ed25519PrivateKey,
        *,
        logs: Iterable[Verifier],
        state: State,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.verifier = Verifier(name, notes.COSIGNATURE, key.public_key().public_bytes_raw())
        self._key, self._state, self._clock, self._made = key, state, clock, state.made()
        self._steady = steady or since_boot
        self._start = clock() - self._steady()
        self.tally = tally or Tally()
        self.logs: dict[str, list[Verifier]] = {}
        for verifier in logs:
            if verifier.kind != notes.ED25519:
                kinds = f"kind {verifier.kind:#04x}, a log's is {notes.ED25519:#04x}"
                raise Refusal("key_refused", f"{verifier.name}: {kinds}", hint="name the log's key, not a witness's")
            self.logs.setdefault(verifier.name, []).append(verifier)
        self._named = {hashlib.sha256(origin.encode()).hexdigest(): origin for origin in self.logs}

    def add_checkpoint(self, body: bytes) -> Answer:
        """Cosign a checkpoint, or say why not, and count that; see `_decided`.

        Raises:
            Refusal: no_space, busy, data_version, where the memory can't be read or changed; nothing was cosigned.
        """
        return self.counted(self._decided(body))

    def counted(self, answer: Answer) -> Answer:
        """An answer to add-checkpoint; where it refuses, it is counted."""
        if answer.status != 200:
            origin = str(answer.facts.get("origin", ""))
            known = origin if origin in self.logs else ""  # strangers name any number of others
            self.tally.add(known, answer.status, reason=str(answer.facts.get("reason", "")), at=int(self._clock()))
        return answer

    def _decided(self, body: bytes) -> Answer:
        """Cosign a checkpoint, or say why not. The numbers of the statuses are the specification's.

        1. The request parses, else 400; where only the note does not, and its log is known, 403.
        2. Its log is known, else 404.
        3. A known key of the log signed, and no line of a known key is false, else 403; so it is where a later key has signed what was
           cosigned last: an earlier one is nobody's word any more, and may be a thief's. The text is a checkpoint, else 400.
        4. The old size is no larger than the checkpoint's, else 400.
        5. The old size is that of the newest checkpoint that was cosigned, else 409 with that.
        6. The proof leads from the one to the other, else 422, and the checkpoint is kept as evidence.
        7. The clock has neither gone back behind what was said before, nor leapt ahead since the start, else 503.
        8. The memory is changed, on the disk, if nobody else changed it since 5, else 409. Only then the cosignature is handed out.

        Raises:
            Refusal: no_space, busy, data_version, where the memory can't be read or changed; nothing was cosigned.
        """
        # 1
        try:
            asked = Request.parse(body)
        except Refusal as refusal:
            # What is no note is signed by nobody: of a known log that is 403, for whoever spells a signature in another way.
            first = body.partition(b"\n\n")[2].partition(b"\n")[0].decode("utf-8", "replace")
            known_log = {"origin": first} if first in self.logs else {}
            status = 403 if refusal.code == "proof_invalid" and known_log else 400
            return _no(status, refusal.sentence, **known_log)
        # 2
        origin = asked.note.text.partition("\n")[0]
        if (known := self.logs.get(origin)) is None:
            return _no(404, f"the log {origin[:200]!r} is not known here", origin=origin)
        # 3
        try:
            notes.open_note(asked.note.encode(), known)
        except Refusal as refusal:
            return _no(403, refusal.sentence, origin=origin)
        seen = self._state.seen(origin)
        in_force = known[_latest(seen, known) :]
        if not _of(asked.note, in_force):
            said = f"the log has signed with {in_force[0].text()} since; an earlier key of it counts no more"
            return _no(403, said, origin=origin)
        try:
            new = parse_checkpoint(asked.note.text)
        except Refusal as refusal:
            return _no(400, refusal.sentence, origin=origin)
        # 4
        if asked.old > new.size:
            return _no(400, f"old size {asked.old} is above the checkpoint's, {new.size}", origin=origin)
        # 5
        if asked.old != (seen.size if seen else 0):
            return self._conflict(origin, new.size)
        # 6
        try:
            _check_growth(seen, new, asked.proof)
        except Refusal as refusal:
            self._keep(asked.note, new, known, seen)
            return _no(422, refusal.sentence, origin=origin, size=new.size)
        # 7
        now = int(self._clock())
        last = seen.time if seen else self._made
        if now < last - CLOCK_STEP:
            said = f"the witness's clock says {now}, before {last}, which it has said already"
            return _no(503, said, origin=origin, size=new.size)
        if (ahead := now - self._start - self._steady()) > CLOCK_JUMP:
            said = f"the witness's clock has leapt ahead by {ahead:.0f} s since the start; where it is right now, start the witness again"
            return _no(503, said, origin=origin, size=new.size)
        now = max(now, last)
        # 8
        cosignature = notes.cosign(asked.note.text, name=self.verifier.name, key=self._key, time=now)
        kept = Note(new.body(), (*_of(asked.note, known), cosignature)).encode()
        if not self._state.advance(Seen(origin, new.size, new.root, now, kept), over=seen):
            return self._conflict(origin, new.size)
        facts: dict[str, object] = {"origin": origin, "size": new.size, "time": now}
        return Answer(200, cosignature.line().encode(), _TEXT, facts)

    def checkpoint(self, named: str) -> Answer:
        """The newest checkpoint of a log that was cosigned, with the signatures of both.

        Args:
            named: the lower-case hexadecimal SHA-256 of the log's origin.
        """
        origin = self._named.get(named)
        seen = self._state.seen(origin) if origin is not None else None
        if seen is None:
            return _no(404, "no checkpoint of such a log was cosigned here")
        return Answer(200, seen.note.encode(), _TEXT, {"origin": seen.origin, "size": seen.size})

    def about(self) -> Answer:
        """Who this is, and which logs it knows, for people."""
        keys = [verifier.text() for verifiers in self.logs.values() for verifier in verifiers]
        lines = ("a witness of transparency logs (c2sp.org/tlog-witness)", "", f"witness {self.verifier.text()}")
        return Answer(
            200, "".join(f"{line}\n" for line in (*lines, *(f"log {key}" for key in keys))).encode(), _TEXT, {}
        )

    def _conflict(self, origin: str, asked: int) -> Answer:
        seen = self._state.seen(origin)
        size = seen.size if seen else 0
        facts: dict[str, object] = {"origin": origin, "size": asked, "reason": f"the newest cosigned size is {size}"}
        return Answer(409, f"{size}\n".encode(), _SIZE, facts)

    def _keep(self, note: Note, new: Checkpoint, known: list[Verifier], seen: Seen | None) -> None:
        fork = seen is not None and seen.size == new.size and seen.root != new.root
        # Of a stranger's lines nothing is kept: they may be any number of other checkpoints.
        evidence = Note(note.text, _of(note, known)).encode()
        before = seen.note if seen else ""
        self._state.keep_refused(Refused(new.origin, new.size, new.root, fork, int(self._clock()), evidence, before))


def _check_growth(seen: Seen | None, new: Checkpoint, proof: tuple[bytes, ...]) -> None:
    """The step of a log from what was seen of it to a new checkpoint.

    Raises:
        Refusal: proof_invalid, log_inconsistent.
    """
    empty = digests.root_of_hashes([])
    if new.size == 0 and new.root != empty:
        raise Refusal("log_inconsistent", "a log of 0 entries has another root than an empty tree")
    first, first_root = (seen.size, seen.root) if seen else (0, empty)
    verify_consistency(proof, first=first, first_root=first_root, second=new.size, second_root=new.root)


def _latest(seen: Seen | None, known: list[Verifier]) -> int:
    """Place of the latest key that signed what was cosigned last; 0 where none of them did."""
    signed = _of(notes.parse_note(seen.note), known) if seen else ()
    ids = {signature.key_id for signature in signed}
    return max((place for place, verifier in enumerate(known) if verifier.key_id in ids), default=0)


def _of(note: Note, known: list[Verifier]) -> tuple[notes.Signature, ...]:
    """The signatures of known keys, one of each."""
    keys = {(verifier.name, verifier.key_id) for verifier in known}
    found: dict[tuple[str, bytes], notes.Signature] = {}
    for signature in note.signatures:
        if (signature.name, signature.key_id) in keys:
            found.setdefault((signature.name, signature.key_id), signature)
    return tuple(found.values())


def _no(status: int, reason: str, **facts: object) -> Answer:
    return Answer(status, f"{reason}\n".encode(), _TEXT, {**facts, "reason": reason})


def _hash(line: bytes) -> bytes:
    try:
        data = base64.b64decode(line, validate=True)
    except ValueError:
        data = b""
    if len(data) != 32 or base64.b64encode(data) != line:
        raise Refusal("request_invalid", f"{line[:60]!r} is not a hash of 32 bytes in base64")
    return data
