"""The log: one history, signed, in which every receipt of the round lies.

1. checkpoint: the last checkpoint is signed by the log that keys.json names.
2. whose log: that is the log which the auditor knows from elsewhere.
3. entries: the bytes in entries.jsonl have the checkpoint's size and root.
4. earlier checkpoints: each is signed and is the root of the same entries' beginning.
5. records: each entry is a record in canonical form, in the order of time.
6. receipts: each accepted submission has one, and it leads to the same entries.

Who else has seen this history, and when, is in witnesses.py.

A root alone says that something was changed, not what. The earlier checkpoints narrow it down to a few entries, and
check `rules` names the record where a signature or a guard no longer holds.
"""

from acclimate import log
from acclimate.verify.audit import Audit
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal


def checkpoint(audit: Audit) -> str:
    """The last checkpoint is a signed note of the log that keys.json names."""
    keys = audit.bundle.json("keys.json")
    vkey = keys.get("log") if isinstance(keys, dict) else None
    if not isinstance(vkey, str):
        raise Failed("keys.json, log", "it must be the log's vkey")
    try:
        audit.log = log.parse_vkey(vkey)
    except Refusal as refusal:
        raise Failed("keys.json, log", refusal.sentence) from refusal
    audit.note = _open(audit, "checkpoint")
    return f"{audit.note.origin}, {audit.note.size} entries"


def _open(audit: Audit, name: str) -> log.Checkpoint:
    text = audit.bundle.text(name)
    try:
        return log.open_checkpoint(text, audit.log).checkpoint
    except Refusal as refusal:
        raise Failed(name, refusal.sentence) from refusal


def whose(audit: Audit) -> str:
    """The log's key is the one that the auditor got elsewhere."""
    if audit.log_key is None:
        raise NotChecked(
            "no --log-key was given, so this may be anyone's log of the right form; get the key from a custodian or an entrant"
            " whom you trust"
        )
    if audit.log_key != audit.log.text():
        raise Failed("keys.json, log", f"it is {audit.log.text()}, the key given is {audit.log_key}")
    return audit.log_key


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
        _begins(audit, note, name)
    if not names:
        raise Failed("checkpoints", "the bundle has none; one a phase is expected")
    return f"{len(names)} checkpoints"


def _begins(audit: Audit, note: log.Checkpoint, name: str) -> None:
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
    names = audit.bundle.under("receipts")
    for name in names:
        try:
            receipt = log.Receipt.parse(audit.bundle.read(name))
            signed = receipt.open(audit.log)[1]
        except Refusal as refusal:
            raise Failed(name, refusal.sentence) from refusal
        if name != f"receipts/{receipt.index}.tlog-proof":
            raise Failed(name, f"it is the receipt of log entry {receipt.index}")
        if audit.leaves[receipt.index : receipt.index + 1] != [receipt.entry]:
            raise Failed(name, f"it proves another entry than entry {receipt.index} of entries.jsonl")
        _begins(audit, signed.checkpoint, name)
    for submission in audit.round.submissions.values():
        if submission.accepted is not None:
            audit.bundle.path(f"receipts/{submission.accepted}.tlog-proof")
    return f"{len(names)} receipts"
