"""The keys of a log one after the other: a log's key may hand over to another, by a record in the log itself.

LogKeyRotated {old, new, reason, approvals} names both keys as vkeys of the log's origin. The old key signs it; the new key's approval, over the same
statement, shows that whoever hands over holds it. Where the record is log entry i, checkpoints of up to i entries are signed by the old
key, the one of i + 1 entries by both, and longer ones by the new key. So who knows any key of the log comes to every later one:
each hand-over stands in a checkpoint that the key before it signed.

A bundle's or mirror's entries hold all hand-overs (`chain`); who has no entries follows their receipts (`follow`).
"""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from acclimate import log
from acclimate.log import Receipt, SignedCheckpoint, Signer, Verifier, parse_vkey
from acclimate.notes import ED25519, parse_note
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

TYPE = "LogKeyRotated"
_MARK = f'"type":"{TYPE}"'.encode()


@dataclass(frozen=True)
class HandOver:
    """One hand-over.

    Attributes:
        index: the record's log index; the checkpoint of index + 1 entries is signed by both keys.
        old: the key before.
        new: the key after.
        reason: as the operator gave it.
        root: of the index + 1 entries, where a checkpoint of them was verified.
    """

    index: int
    old: Verifier
    new: Verifier
    reason: str
    root: bytes | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Chain:
    """The keys of a log.

    Attributes:
        first: the key that the log began with, as far as is known.
        hand_overs: the hand-overs from there on, in order.
    """

    first: Verifier
    hand_overs: tuple[HandOver, ...] = ()

    @property
    def last(self) -> Verifier:
        """The key in force at the end."""
        return self.hand_overs[-1].new if self.hand_overs else self.first

    @property
    def keys(self) -> tuple[Verifier, ...]:
        """All keys, in order."""
        return (self.first, *(hand_over.new for hand_over in self.hand_overs))

    def signers(self, size: int) -> tuple[Verifier, ...]:
        """The keys that sign a checkpoint of so many entries: one, or two where it is the first that holds a hand-over."""
        found: tuple[Verifier, ...] = (self.first,)
        for hand_over in self.hand_overs:
            if size > hand_over.index:
                found = (hand_over.old, hand_over.new) if size == hand_over.index + 1 else (hand_over.new,)
        return found

    def at(self, size: int) -> Verifier:
        """The key under which a checkpoint of so many entries is opened: of two the newer."""
        return self.signers(size)[-1]

    def of(self, note: str | bytes) -> Verifier:
        """The key under which a note is to be opened, by the size that it claims.

        Raises:
            Refusal: proof_invalid, where it is no checkpoint.
        """
        return self.at(log.parse_checkpoint(parse_note(note).text).size)

    def open(self, note: str | bytes, witnesses: Sequence[Verifier] = ()) -> SignedCheckpoint:
        """The checkpoint of a note, signed by every key that signs its size.

        Raises:
            Refusal: proof_invalid.
        """
        size = log.parse_checkpoint(parse_note(note).text).size
        *others, newest = self.signers(size)
        for other in others:
            log.open_checkpoint(note, other)
        return log.open_checkpoint(note, newest, witnesses)

    def between(self, known: str, wanted: str) -> tuple[HandOver, ...] | None:
        """The hand-overs that lead from one key to a later one; none where they are the same, None where they don't lead there."""
        texts = [key.text() for key in self.keys]
        if known not in texts or wanted not in texts or texts.index(known) > texts.index(wanted):
            return None
        return self.hand_overs[texts.index(known) : texts.index(wanted)]


def request(old: Signer, new: Signer, *, reason: str) -> dict[str, Any]:
    """The signed and approved request of a hand-over.

    Raises:
        Refusal: record_invalid, where the reason is blank or too long.
    """
    fields: dict[str, Any] = {"old": old.vkey, "new": new.vkey, "reason": reason}
    by = records.public_text(old.key.public_key())
    approval = records.approve(TYPE, "", fields, by=by, key=new.key)
    return records.sign(TYPE, "", {**fields, "approvals": [approval]}, key=old.key)


def check(record: Record, *, index: int) -> HandOver:
    """The hand-over of a record.

    1. Both keys are Ed25519 keys of one origin, and not the same.
    2. The old one signed it.
    3. The new one, and nobody else, approved it.

    Raises:
        Refusal: rotation_invalid, key_refused.
    """
    # 1
    if record.type != TYPE:
        raise _invalid(index, f"it is a {record.type}")
    old, new = parse_vkey(record["old"]), parse_vkey(record["new"])
    if (old.kind, new.kind) != (ED25519, ED25519) or old.name != new.name or old.public == new.public:
        raise _invalid(index, f"{old.text()} and {new.text()} are not two keys of one log")
    # 2
    if record.by != _public(old):
        raise _invalid(index, f"it is signed by {record.by}, the old key is {old.text()}")
    try:
        records.verify(record)
        # 3
        (approval,) = record["approvals"]
        if approval["by"] != _public(new):
            raise _invalid(index, f"it is approved by {approval['by']}, the new key is {new.text()}")
        covered = records.statement(TYPE, "", record.fields, by=record.by)
        records.check_signature(approval["by"], approval["sig"], covered, what=f"the approval of {TYPE}")
    except ValueError as error:
        raise _invalid(index, f"it has {len(record['approvals'])} approvals, the new key's alone is wanted") from error
    except Refusal as refusal:
        if refusal.code != "signature_invalid":
            raise
        raise _invalid(index, refusal.sentence) from refusal
    return HandOver(index, old, new, str(record["reason"]))


def check_entry(entry: bytes, *, index: int) -> HandOver:
    """The hand-over of a log entry's bytes.

    Raises:
        Refusal: rotation_invalid, key_refused, record_invalid, not_canonical.
    """
    return check(records.parse_entry(entry, index), index=index)


def chain(entries: Iterable[bytes], known: Verifier) -> Chain:
    """The keys of a log whose entries are at hand, from the first one on.

    Args:
        entries: all of them, from index 0.
        known: one of its keys; the only one where there was no hand-over.

    Raises:
        Refusal: rotation_invalid, where a hand-over is forged or does not follow the one before; key_refused; proof_invalid, where the
            known key is none of them.
    """
    # The mark may stand in a text, too: only the record's own type counts.
    marked = ((index, records.parse_entry(entry, index)) for index, entry in enumerate(entries) if _MARK in entry)
    hand_overs = [check(record, index=index) for index, record in marked if record.type == TYPE]
    found = _linked(Chain(hand_overs[0].old if hand_overs else known), hand_overs)
    if known not in found.keys:
        have = ", ".join(key.text() for key in found.keys)
        raise Refusal("proof_invalid", f"the log's keys were {have}, among them is not {known.text()}")
    return found


def follow(receipts: Iterable[str], known: Verifier) -> Chain:
    """The keys of a log from a known one on, by receipts of its hand-overs.

    1. A receipt's checkpoint is that of the record's index + 1 entries, and the inclusion proof leads into it.
    2. The record is a hand-over from the key before, and both keys signed the checkpoint. Hand-overs before the known key are passed over.

    Args:
        receipts: of LogKeyRotated, in the log's order, each as text.
        known: the key to begin with.

    Raises:
        Refusal: rotation_invalid, proof_invalid, key_refused, record_invalid.
    """
    found, reached = Chain(known), False
    parsed = [Receipt.parse(text) for text in receipts]
    for receipt in parsed:
        hand_over = check_entry(receipt.entry, index=receipt.index)
        if not reached and hand_over.old != known:
            continue
        reached = True
        # 1
        signed = receipt.open(hand_over.old)[1]
        if signed.checkpoint.size != receipt.index + 1:
            raise _invalid(receipt.index, f"its checkpoint is of {signed.checkpoint.size} entries, expected the next")
        # 2
        log.open_checkpoint(receipt.checkpoint, hand_over.new)
        found = _linked(found, [replace(hand_over, root=signed.checkpoint.root)])
    return found


def _public(key: Verifier) -> str:
    return base64.b64encode(key.public).decode()


def _linked(found: Chain, hand_overs: Iterable[HandOver]) -> Chain:
    for hand_over in hand_overs:
        if hand_over.old != found.last:
            raise _invalid(
                hand_over.index, f"it hands over from {hand_over.old.text()}, the key before it is {found.last.text()}"
            )
        if hand_over.new in found.keys:
            raise _invalid(hand_over.index, f"it hands back to {hand_over.new.text()}, a key that was given up")
        found = Chain(found.first, (*found.hand_overs, hand_over))
    return found


def _invalid(index: int, why: str) -> Refusal:
    return Refusal(
        "rotation_invalid",
        f"log entry {index} is no hand-over of this log's key: {why}",
        hint="trust neither key until the operator and others who know the log have been asked",
    )
