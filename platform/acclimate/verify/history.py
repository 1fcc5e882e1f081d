"""The log: one history, signed, in which every receipt of the round lies.

1. checkpoint: the last checkpoint is signed by the log that keys.json names, under whichever of its keys was in force (hand_overs.py).
2. entries: the bytes in entries.jsonl have the checkpoint's size and root.
3. earlier checkpoints: each is signed and is the root of the same entries' beginning; the first that holds a hand-over of the log's key is
   there, signed by both keys.
4. records: each entry is a record in canonical form, in the order of time.
5. whose log: that is the log which the auditor knows from elsewhere, by its key or by a witness's cosignature over the round's last record.
6. receipts: each accepted submission has one, and it leads to the same entries.

Who else has seen this history, and when, is in witnesses.py.

A root alone says that something was changed, not what. The earlier checkpoints narrow it down to a few entries, and
check `rules` names the record where a signature or a guard no longer holds.
"""

from collections.abc import Sequence

from acclimate import hand_overs, log, notes
from acclimate.quorum import Quorum, parse_witness
from acclimate.verify.audit import Audit
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal


def checkpoint(audit: Audit) -> str:
    """The last checkpoint is a signed note of the log that keys.json names, under whichever of its keys was in force."""
    keys = audit.bundle.json("keys.json")
    vkey = keys.get("log") if isinstance(keys, dict) else None
    if not isinstance(vkey, str):
        raise Failed("keys.json, log", "it must be the log's vkey")
    try:
        audit.log = log.parse_vkey(vkey)
    except Refusal as refusal:
        raise Failed("keys.json, log", refusal.sentence) from refusal
    try:
        audit.chain = hand_overs.chain(audit.leaves, audit.log)
    except Refusal as refusal:
        raise Failed("entries.jsonl", refusal.sentence) from refusal
    audit.note = _open(audit, "checkpoint")
    later = "".join(f", key handed over at log entry {hand_over.index}" for hand_over in audit.chain.hand_overs)
    return f"{audit.note.origin}, {audit.note.size} entries{later}"


def signed(audit: Audit, name: str, witnesses: Sequence[log.Verifier] = ()) -> log.SignedCheckpoint:
    """The checkpoint in a file of the bundle, a receipt's included, with the cosignatures of these witnesses.

    Raises:
        Failed: the log did not sign it, or a witness's line does not verify.
    """
    try:
        if name.startswith("receipts/"):
            receipt = log.Receipt.parse(audit.bundle.read(name))
            return receipt.open(audit.chain.of(receipt.checkpoint), witnesses)[1]
        return audit.chain.open(audit.bundle.text(name), witnesses)
    except Refusal as refusal:
        raise Failed(name, refusal.sentence) from refusal


def _open(audit: Audit, name: str) -> log.Checkpoint:
    return signed(audit, name).checkpoint


def whose(audit: Audit) -> str:
    """The log's key is the one that the auditor got elsewhere, or a witness whose key they got elsewhere cosigned all of the round.

    A cosignature is over size and root, not over the log's key: it vouches for the entries that it covers, and for no entry after them.
    """
    if audit.log_key is None:
        if cosigned := whole(audit):
            return f"{audit.log.text()}, cosigned by {', '.join(sorted(cosigned))}"
        raise NotChecked(
            "no --log-key was given"
            + (", and no witness whose key you gave has cosigned the round's last record" if audit.witnesses else "")
            + ", so this may be anyone's log of the right form; get the key from a custodian or an entrant whom you trust"
        )
    if doubt := _doubt(audit):
        if cosigned := whole(audit):
            return f"{audit.log.text()}, which was given up since, cosigned by {', '.join(sorted(cosigned))}"
        raise NotChecked(doubt)
    # A later key speaks for the entries before it, too, where it signed the checkpoint over all of them.
    if audit.log_key == audit.log.text() or audit.log_key == audit.chain.at(audit.note.size).text():
        return audit.log_key
    followed = audit.chain.between(audit.log_key, audit.log.text())
    if followed is None:
        raise Failed("keys.json, log", f"it is {audit.log.text()}, the key given is {audit.log_key}{_way_out(audit)}")
    for hand_over in followed:
        # Signed by both keys: who knew the old one's log is shown its successor in that log.
        begins(audit, _open(audit, f"checkpoints/{hand_over.index + 1}"), f"checkpoints/{hand_over.index + 1}")
    told = "; ".join(
        f'at log entry {hand_over.index} to {hand_over.new.text()} ("{hand_over.reason}")' for hand_over in followed
    )
    return f"{audit.log_key}, which handed over {told}"


def _doubt(audit: Audit) -> str:
    """What the log's signature leaves open because its key was given up since; empty where it leaves nothing open."""
    assert audit.log_keys is not None
    try:
        return audit.log_keys.doubt(audit.chain, audit.note.size)
    except Refusal as refusal:
        raise Failed("checkpoint", refusal.sentence) from refusal


def _way_out(audit: Audit) -> str:
    given = log.parse_vkey(audit.log_key or "")
    if given.kind != notes.ED25519:
        return ", which is a witness's: give it with --witness"
    if given.name != audit.log.name:
        return ""
    return (
        "; if the log was handed over from the first to the second, the bundle is checked with the first:"
        f" `acclimate log keys --server URL --log-key '{audit.log.text()}'` shows whether it was"
    )


def whole(audit: Audit) -> set[str]:
    """Those witnesses, of those whose keys the auditor brought, that cosigned a checkpoint with the round's last record in it.

    None where it is not known which round it is.

    Raises:
        Failed: the line of one does not verify, or is under another history.
    """
    known = [parse_witness(text) for text in audit.witnesses]
    found: set[str] = set()
    for name in ["checkpoint", *audit.bundle.under("checkpoints")] if known and audit.last is not None else []:
        note = signed(audit, name, known)
        if note.cosigned:
            begins(audit, note.checkpoint, name)
            found |= set(note.cosigned) if note.checkpoint.size > (audit.last or 0) else set()
    return found


def entries(audit: Audit) -> str:
    """The entries are those that the checkpoint signs: none changed, added, dropped or moved."""
    if len(audit.leaves) != audit.note.size:
        raise Failed("entries.jsonl", f"{len(audit.leaves)} entries, the checkpoint counts {audit.note.size}")
    if audit.tree.root() != audit.note.root:
        place = f"entries.jsonl, {_narrowed(audit)}"
        raise Failed(place, "the root over the entries is not the one that the checkpoint signs")
    return f"{len(audit.leaves)} entries"


def _narrowed(audit: Audit) -> str:
    """The fewest entries, between two signed checkpoints, among which the first changed one is."""
    notes = []
    for name in audit.bundle.under("checkpoints"):
        try:
            notes.append(_open(audit, name))
        except Failed:
            continue
    before = 0
    for note in sorted([*notes, audit.note], key=lambda note: note.size):
        if note.size > len(audit.leaves) or audit.tree.root(note.size) != note.root:
            return (
                f"log entry {before}" if note.size == before + 1 else f"among log entries {before} to {note.size - 1}"
            )
        before = note.size
    return "the last entry"


def earlier(audit: Audit) -> str:
    """Each earlier checkpoint is signed and covers the beginning of the same entries: the log was only ever added to."""
    names = audit.bundle.under("checkpoints")
    for name in names:
        note = _open(audit, name)
        if name != f"checkpoints/{note.size}":
            raise Failed(name, f"it counts {note.size} entries")
        begins(audit, note, name)
    if not names:
        raise Failed("checkpoints", "the bundle has none; one a phase is expected")
    for hand_over in audit.chain.hand_overs:
        # Whose key was given up must have seen its successor in the log: `_open` wants both signatures here.
        audit.bundle.path(f"checkpoints/{hand_over.index + 1}")
    return f"{len(names)} checkpoints"


def begins(audit: Audit, note: log.Checkpoint, name: str) -> None:
    """Fail where a checkpoint is not the root of the entries' beginning."""
    if note.size > len(audit.leaves) or audit.tree.root(note.size) != note.root:
        raise Failed(
            name, f"its root is not that of the first {note.size} of {len(audit.leaves)} entries: another history"
        )


def parsed(audit: Audit) -> str:
    """Each entry is a record in canonical form, received no earlier than the one before it."""
    audit.records = []
    for index, leaf in enumerate(audit.leaves):
        try:
            record = records.parse(leaf)
        except Refusal as refusal:
            raise Failed(f"log entry {index}", refusal.sentence) from refusal
        if audit.records and record.at < audit.records[-1].at:
            before = records.format_time(audit.records[-1].at)
            raise Failed(f"log entry {index}", f"received {records.format_time(record.at)}, the entry before {before}")
        audit.records.append(record)
    return f"{len(audit.records)} records"


def receipts(audit: Audit) -> str:
    """Each accepted submission has a receipt; each receipt is signed, and proves the entry that stands in the log."""
    names, cosigned = audit.bundle.under("receipts"), 0
    quorum = Quorum.of(audit.round.defined.fields)
    accepted = {submission.accepted for submission in audit.round.submissions.values()} - {None}
    for name in names:
        try:
            receipt = log.Receipt.parse(audit.bundle.read(name))
        except Refusal as refusal:
            raise Failed(name, refusal.sentence) from refusal
        checkpoint = signed(audit, name, quorum.witnesses)
        if name != f"receipts/{receipt.index}.tlog-proof":
            raise Failed(name, f"it is the receipt of log entry {receipt.index}")
        if audit.leaves[receipt.index : receipt.index + 1] != [receipt.entry]:
            raise Failed(name, f"it proves another entry than entry {receipt.index} of entries.jsonl")
        begins(audit, checkpoint.checkpoint, name)
        if receipt.index not in accepted:
            record = audit.records[receipt.index]
            raise Failed(
                name,
                f"it is of {record.type} of {record.round}, the bundle's receipts are of accepted submissions of"
                f" {audit.round.id}",
            )
        cosigned += quorum.reached(checkpoint)
    for submission in audit.round.submissions.values():
        if submission.accepted is not None:
            audit.bundle.path(f"receipts/{submission.accepted}.tlog-proof")
    return f"{len(names)} receipts" + (f", {cosigned} cosigned by the quorum" if quorum.needed else "")
