"""The log as a client reads it for itself: what its checkpoint says is verified first, then just so many entries are fetched and hashed.

Before an entry is asked for, the checkpoint is signed by the log's key, which is one that the key folder keeps, and is not behind what the folder
has seen. So a server without the log's key decides neither which log is read nor how much of it; and whoever has the key is stopped at LONGEST_LOG.
A Source only says where bytes come from: a server, or a mailed file.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from acclimate import hand_overs, log
from acclimate.client import key_chain
from acclimate.client.connection import Client, Progress
from acclimate.client.definitions import definition_of
from acclimate.client.folder import kept_log_keys
from acclimate.hand_overs import Chain
from acclimate.keys import Keys
from acclimate.quorum import Quorum
from acclimate_competitions import digests, records, untimely
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record, format_time

CHECKPOINT_PATIENCE = 5.0
LONGEST_LOG = 1 << 31
"""Bytes of memory that a log which is read may take: many a custodian's machine has 4 GiB."""
_BESIDES = 256  # an entry's leaf hash, and its objects
_PARSED = 8  # how much more a parsed record takes than its bytes, at least
LATE = "a witness is late or down: repeat it in some minutes; if it stays so, tell the server's operator which one"
_NOT_SIGNED = "no entry was asked for: go on with nothing, keep what you have of the log, and ask the operator and the others which key it has"
_COMES = {
    "HoldoutSealed": "the organizer has not sealed the holdout yet, or the log is not cosigned yet: wait for the organizer's mail, and repeat it"
}


class Source(Protocol):
    """Where the evidence comes from."""

    def definition(self, round_id: str) -> tuple[Record, Competition]:
        """RoundDefined and definition of a round, checked against each other and the round's id."""

    def chain(self, known: log.Verifier) -> Chain:
        """The log's keys from a known one on, by hand-overs that each key before signed; that key alone where none begins with it."""

    def checkpoint(self, defined: Record) -> str:
        """The newest checkpoint, with the cosignatures of the quorum that the round asks for; unverified."""

    def newest(self) -> str | None:
        """The newest checkpoint, whoever cosigned it; unverified. None where the source has no other."""

    def entries(self, size: int) -> Iterator[bytes]:
        """The first entries of the log, so many of them."""

    def envelope(self, round_id: str, index: int) -> dict[str, Any] | None:
        """The envelope of a share, unverified; None where the source has none."""


@dataclass(frozen=True)
class Online:
    """A server as the source.

    Attributes:
        client: a connection to it.
        progress: told (entries read, of how many).
    """

    client: Client
    progress: Progress | None = None

    def definition(self, round_id: str) -> tuple[Record, Competition]:
        """See Source."""
        return definition_of(self.client, round_id)

    def chain(self, known: log.Verifier) -> Chain:
        """See Source."""
        return hand_overs.follow(key_chain.receipts(self.client), known)

    def checkpoint(self, defined: Record) -> str:
        """See Source."""
        if defined["quorum"] == 0:
            return self.client.checkpoint()
        return self.client.checkpoint(cosigned=True, round_id=defined.round)

    def newest(self) -> str | None:
        """See Source."""
        return self.client.checkpoint()

    def entries(self, size: int) -> Iterator[bytes]:
        """See Source."""
        for number, entry in enumerate(self.client.entries(start=0, end=size), start=1):
            if self.progress is not None:
                self.progress(number, size)
            yield entry

    def envelope(self, round_id: str, index: int) -> dict[str, Any] | None:
        """See Source."""
        return of_index(self.client.envelopes(round_id)["real"]["envelopes"], index)


@dataclass(frozen=True)
class Known:
    """What a client knows of a log before it reads it.

    Attributes:
        folder: the key folder that says so; None where there is none.
        keys: log keys that it keeps, as text; where it keeps none, the round's own key is the one.
        seen: a checkpoint that it saw before, a note; empty where it saw none.
        where: the file that it is kept in.
    """

    folder: Path | None = None
    keys: tuple[str, ...] = ()
    seen: str = ""
    where: str = ""

    @classmethod
    def of(cls, keys: Keys, *, seen: str = "", where: str = "") -> "Known":
        """What a key folder keeps.

        Raises:
            Refusal: file_unreadable.
        """
        return cls(keys.folder, tuple(kept_log_keys(keys.folder)), seen, where)

    def require_log(self, source: Source, chain: Chain, defined: Record) -> None:
        """Refuse another log than the one whose key the folder keeps since it registered; a hand-over of the key is followed.

        Raises:
            Refusal: log_inconsistent.
        """
        if self.keys and not any(_leads(source, kept, chain) for kept in self.keys):
            raise Refusal(
                "log_inconsistent",
                f"round {defined.round} is of the log {defined['log']}, {self.folder} keeps {', '.join(self.keys)}",
                hint="ask the operator, and the others, before you go on",
            )

    def require_grown(self, shown: log.Checkpoint) -> None:
        """Refuse a checkpoint of fewer entries than the one that was seen, or of as many with another root.

        That a longer one goes on from it, its entries show (`require_growth`).

        Raises:
            Refusal: log_inconsistent.
        """
        seen = log.parse_checkpoint(log.parse_note(self.seen).text) if self.seen else None
        if seen is not None and (shown.size < seen.size or (shown.size == seen.size and shown.root != seen.root)):
            raise self.not_grown(shown.size, seen.size)

    def require_growth(self, history: "History") -> int:
        """The size of the checkpoint that was seen, which the log must extend.

        Raises:
            Refusal: log_inconsistent.
        """
        seen = history.chain.open(self.seen).checkpoint
        if seen.size > len(history.hashes) or digests.root_of_hashes(history.hashes[: seen.size]) != seen.root:
            raise self.not_grown(len(history.hashes), seen.size)
        return seen.size

    def not_grown(self, size: int, before: int) -> Refusal:
        """The refusal of a log that went back, or goes on otherwise."""
        return Refusal(
            "log_inconsistent",
            f"the log of {size} entries does not extend the pinned checkpoint of {before}, kept in {self.where}",
            hint=f"the server shows another history than before: keep {self.where}, and tell the other custodians and the auditor",
        )


NOTHING = Known()


@dataclass(frozen=True)
class History:
    """The log up to a checkpoint, read and hashed by the client itself.

    Attributes:
        note: the signed checkpoint.
        entries: the log's entries up to it, as they were hashed.
        hashes: the leaf hash of each entry.
        numbered: the round's records with their log indices.
        chain: the log's keys, by the hand-overs among the entries.
        seals: seal id -> round, of each seal's first HoldoutSealed.
        draws: digest of an auditor's secret -> round, of the first RoundDefined that names it.
    """

    note: str
    entries: list[bytes]
    hashes: list[bytes]
    numbered: list[tuple[int, Record]]
    chain: Chain
    seals: dict[str, str]
    draws: dict[str, str]


def of_index(envelopes: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The one envelope of a share.

    Raises:
        Refusal: share_false.
    """
    found = [envelope for envelope in envelopes if envelope["index"] == index]
    if len(found) != 1:
        raise Refusal("share_false", f"there are {len(found)} envelopes for share {index}, expected 1")
    return found[0]


def read_history(
    source: Source, defined: Record, *, known: Known = NOTHING, holding: str = "", size: int = 0
) -> History:
    """Read the log up to its newest checkpoint, which is verified before.

    Args:
        source: where it is read from.
        defined: the round's RoundDefined, which names the log's key.
        known: what this machine knows of the log.
        holding: a record type of the round that the checkpoint must cover; waited for during CHECKPOINT_PATIENCE seconds.
        size: how many entries it must cover at least; waited for likewise.

    Raises:
        Refusal: proof_invalid; rotation_invalid; log_inconsistent; phase_wrong, where the log has no such record, or not so many entries.
    """
    until, history, chain = time.monotonic() + CHECKPOINT_PATIENCE, None, None
    while True:
        note = source.checkpoint(defined)
        # What was read once is read again only where the log has grown.
        if history is None or size_of(note) != len(history.entries):
            # Hand-overs are rare: they are asked for again where the keys don't fit.
            if chain is None or not _signed(chain, note):
                chain = _own_chain(source, defined, known)
            known.require_grown(opened(chain, note))
            history = read(source, defined, note)
        there = not holding or any(record.type == holding for _, record in history.numbered)
        if there and len(history.entries) >= size:
            return history
        if time.monotonic() > until:
            seen = f"the newest checkpoint{' that the quorum cosigned' if defined['quorum'] else ''}"
            late = behind(source, defined, history)
            lacks = f"not log entry {size - 1}" if there else f"not {untimely.told(holding)} of {defined.round}"
            raise Refusal(
                "phase_wrong",
                f"{seen} has {len(history.hashes)} entries, and {lacks} yet" + also(late),
                hint=LATE if late else _COMES.get(holding, f"acclimate status {defined.round} --keys DIR shows when"),
            )
        time.sleep(0.2)


def vouched(source: Source, defined: Record, note: str, *, known: Known = NOTHING) -> log.Checkpoint:
    """What a checkpoint says, before any entry is asked for.

    1. The log is the one whose key the folder keeps: it leads to the round's, or the round's to it.
    2. The key in force at the checkpoint's size, by hand-overs from there, signed it; at a hand-over both keys did.

    Raises:
        Refusal: log_inconsistent, proof_invalid, rotation_invalid, key_refused.
    """
    # 1, 2
    return opened(_own_chain(source, defined, known), note)


def _own_chain(source: Source, defined: Record, known: Known) -> Chain:
    """The log's keys, of the log whose key the folder keeps."""
    chain = source.chain(log.parse_vkey(defined["log"]))
    known.require_log(source, chain, defined)
    return chain


def _signed(chain: Chain, note: str) -> bool:
    try:
        chain.open(note)
    except Refusal:
        return False
    return True


def opened(chain: Chain, note: str) -> log.Checkpoint:
    """What a checkpoint says that the log's key signed; the refusal of another says what to do.

    Raises:
        Refusal: proof_invalid.
    """
    try:
        return chain.open(note).checkpoint
    except Refusal as refusal:
        raise Refusal(refusal.code, refusal.sentence, hint=refusal.hint or _NOT_SIGNED) from refusal


def _leads(source: Source, kept: str, chain: Chain) -> bool:
    """Whether a kept key is one of the log's, by hand-overs in either direction."""
    key = log.parse_vkey(kept)
    if key in chain.keys:
        return True
    if key.name != chain.first.name:
        return False
    try:
        return chain.first in source.chain(key).keys
    except Refusal as refusal:
        if refusal.code not in ("proof_invalid", "rotation_invalid"):
            raise
        return False


def behind(source: Source, defined: Record, history: History) -> str:
    """What the server shows beyond the history that the round's quorum has seen, in words; empty where that is all.

    It explains why the round stands further back here than on the server's own pages. Nothing in it is verified, and nothing is decided by it.
    """
    note = source.newest() if defined["quorum"] else None
    if note is None or (size := size_of(note)) <= len(history.hashes):
        return ""
    quorum = Quorum.of(defined.fields)
    at = quorum.at(history.chain.open(history.note, quorum.witnesses))
    signed = {(signature.name, signature.key_id) for signature in log.parse_note(note).signatures}
    late = [witness.name for witness in quorum.witnesses if (witness.name, witness.key_id) not in signed]
    when = f", {format_time(at)} or later" if at is not None else ""
    return (
        f"{quorum.needed} of {len(quorum.witnesses)} witnesses must have seen a record, and they have seen {len(history.hashes)} of the"
        f" {size} log entries that the server shows{when}; not yet the newest: {', '.join(late) or 'none of them'}"
    )


def also(late: str) -> str:
    """What `behind` said, as the end of a sentence."""
    return f"; {late}" if late else ""


def size_of(note: str) -> int:
    """How many entries a checkpoint claims."""
    return log.parse_checkpoint(log.parse_note(note).text).size


def read(source: Source, defined: Record, note: str) -> History:
    """The log up to a checkpoint that was vouched for, hashed to its root.

    Raises:
        Refusal: log_inconsistent; proof_invalid; rotation_invalid; record_invalid; server_unreachable, where it is longer than LONGEST_LOG.
    """
    entries, hashes, numbered, held = list[bytes](), list[bytes](), list[tuple[int, Record]](), 0
    seals, draws = dict[str, str](), dict[str, str]()
    size, before, disorder = size_of(note), None, None
    for index, entry in enumerate(source.entries(size)):
        entries.append(entry)
        hashes.append(digests.leaf_hash(entry))
        record = records.parse_entry(entry, index)
        disorder = disorder or _disorder(before, record, index)
        # Of other rounds' records nothing is held but this.
        before = record.type, record.at
        if record.type == "HoldoutSealed":
            seals.setdefault(record["seal"], record.round)
        elif record.type == "RoundDefined" and "auditor" in record.fields:
            draws.setdefault(record["auditor"]["draw"], record.round)
        mine = record.round == defined.round
        if mine:
            numbered.append((index, record))
        held += len(entry) * (_PARSED if mine else 1) + _BESIDES
        if held > LONGEST_LOG:
            raise Refusal(
                "server_unreachable",
                f"the checkpoint is of {size} entries; the first {len(entries)} of them take more than {LONGEST_LOG} bytes of memory",
                hint="no log of Acclimate is so long: keep the checkpoint, which the log's key signed, and ask the operator in public",
            )
    # The round's own key, or one to which it was handed over once the round was done.
    chain = hand_overs.chain(entries, log.parse_vkey(defined["log"]))
    checkpoint = chain.open(note).checkpoint
    if len(hashes) != checkpoint.size or digests.root_of_hashes(hashes) != checkpoint.root:
        raise Refusal(
            "log_inconsistent",
            f"the log's {len(hashes)} entries do not hash to the root of its checkpoint of {checkpoint.size}",
        )
    if disorder is not None:
        raise disorder
    # Quorum, custodians and dates are read from the RoundDefined that was shown: it must be the log's own.
    if numbered and numbered[0][1].encode() != defined.encode():
        raise Refusal(
            "log_inconsistent",
            f"the RoundDefined of {defined.round} that was shown is {definition_digest(defined)}, log entry {numbered[0][0]}"
            f" is {definition_digest(numbered[0][1])}",
            hint="somebody shows you other terms than everybody else: sign nothing, and phone the others",
        )
    return History(note, entries, hashes, numbered, chain, seals, draws)


def require_beginning(history: History, entries: Sequence[bytes], *, of: Path, holding: int) -> None:
    """Refuse a bundle whose entries are not the beginning of the log that this machine has read.

    Who has the log's key can make a bundle of another history for one reader alone: round, key and ranking may be the same.

    Args:
        history: what was read.
        entries: the bundle's.
        of: the bundle, for what is said.
        holding: the index of an entry that the bundle must hold.

    Raises:
        Refusal: log_inconsistent; bundle_invalid, where it ends before that entry.
    """
    if list(entries) != history.entries[: len(entries)]:
        pairs = enumerate(zip(entries, history.entries, strict=False))
        index = next((i for i, (one, other) in pairs if one != other), len(history.entries))
        raise Refusal(
            "log_inconsistent",
            f"{of} is of another history than the log of {len(history.entries)} entries that was read here: they differ at log entry {index}",
            hint="nothing was signed; keep the bundle and the key folder, and phone the others: somebody shows two histories",
        )
    if len(entries) <= holding:
        raise Refusal(
            "bundle_invalid",
            f"{of} ends before log entry {holding}: it has {len(entries)} entries",
            hint="nothing was signed; download the bundle again",
        )


def _disorder(before: tuple[str, datetime] | None, record: Record, index: int) -> Refusal | None:
    """The refusal of a log whose times run back, whatever round it is in: a record dated ahead would hide behind a later one dated honestly."""
    if before is None or record.at >= before[1]:
        return None
    return Refusal(
        "log_inconsistent",
        f"log entry {index}, {record.type}, is dated {format_time(record.at)}, before log entry {index - 1}, {before[0]},"
        f" {format_time(before[1])}",
        hint="no honest server dates a record before its predecessor: sign nothing, keep the log, and phone the others",
    )


def definition_digest(defined: Record) -> str:
    """The digest of RoundDefined as it stands in the log: more than the round's id says of it."""
    return digests.of_bytes(defined.encode())
