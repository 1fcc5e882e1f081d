"""What a key folder has seen of its log, and whether the server's log still goes on from there.

The newest checkpoint that any command saw is kept in `log.checkpoint`; receipts and a custodian's pins have theirs. A log that has fewer
entries, or others, went back: what is signed on it would stand beside what it signed before. So it is compared before anything is signed.
"""

import time
from contextlib import suppress
from pathlib import Path

from acclimate import files, log
from acclimate.client import key_chain
from acclimate.client.connection import Client
from acclimate.client.folder import LOG_KEY_FILE, PINS_FILE, kept_log_keys
from acclimate.log import Checkpoint
from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

CHECKPOINT_FILE = "log.checkpoint"
_PATIENCE, _LOOK = 3.0, 0.2
"""Seconds: another process of the same server may show a checkpoint that is a moment older."""

_AWAY = frozenset({"server_unreachable", "busy", "database_unreachable", "internal_error", "no_space"})


def require_grown(client: Client, folder: Path) -> None:
    """Refuse a server whose log does not go on from the newest checkpoint that a key folder has seen; else its newest one is kept.

    A folder without the log's key has nothing to compare by. Whatever keeps the two from being compared is refused as well: a server that answers
    for its checkpoint what is none, or one that another key signed, would else be signed for unasked.

    Raises:
        Refusal: log_inconsistent; file_unreadable, proof_invalid, server_unreachable, …, where they can't be compared.
    """
    if (folder / LOG_KEY_FILE).exists():
        _compare(client, folder)


def went_back(client: Client, folder: Path) -> Refusal | None:
    """The refusal of `require_grown`, for what is only read; None where the log goes on, or the server can't be asked, as the command will say itself."""
    try:
        require_grown(client, folder)
    except Refusal as refusal:
        return None if refusal.code in _AWAY else refusal
    return None


def newest(folder: Path, origin: str) -> tuple[Checkpoint, Path] | None:
    """The checkpoint of most entries of a log that a key folder keeps, and the file that has it; None where it keeps none."""
    notes = [(folder / CHECKPOINT_FILE, _text(folder / CHECKPOINT_FILE))]
    for path in (folder / "receipts").glob("*.tlog-proof"):
        with suppress(Refusal):
            notes.append((path, log.Receipt.parse(_text(path)).checkpoint))
    with suppress(Refusal, OSError, AttributeError, KeyError, TypeError):
        pins = files.read_json(folder / PINS_FILE) if (folder / PINS_FILE).exists() else {}
        notes += [(folder / PINS_FILE, str(pin["checkpoint"])) for pin in pins.values()]
    found = []
    for path, note in notes:
        with suppress(Refusal):
            seen = log.parse_checkpoint(log.parse_note(note).text)
            found += [(seen, path)] if seen.origin == origin else []
    return max(found, key=lambda each: each[0].size, default=None)


def _compare(client: Client, folder: Path) -> None:
    """1. What was seen is read first, then the server is asked, since the log grows. 2. It has as many entries. 3. They begin with the same."""
    # 1
    key = kept_log_keys(folder)[0]
    before = newest(folder, log.parse_vkey(key).name)
    until = time.monotonic() + _PATIENCE
    note, now = _shown(client, key, folder / LOG_KEY_FILE)
    # 2
    while before is not None and now.size < before[0].size:
        if time.monotonic() > until:
            raise _back(client, f"has {now.size} entries", *before)
        time.sleep(_LOOK)
        note, now = _shown(client, key, folder / LOG_KEY_FILE)
    # 3
    if before is not None and before[0].size:
        seen = before[0]
        proof = client.consistency(seen.size, now.size) if seen.size < now.size else []
        try:
            log.verify_consistency(proof, first=seen.size, first_root=seen.root, second=now.size, second_root=now.root)
        except Refusal as refusal:
            if refusal.code != "log_inconsistent":
                raise
            raise _back(client, f"has {now.size} entries, and not the same ones", *before) from refusal
    if before is None or now.size > before[0].size:
        with suppress(OSError, Refusal):
            files.write(folder / CHECKPOINT_FILE, note.encode())


def _shown(client: Client, key: str, path: Path) -> tuple[str, Checkpoint]:
    """The newest checkpoint of the log whose key is known, or that it was handed over to."""
    note, known = client.checkpoint(), log.parse_vkey(key)
    ids = {(signature.name, signature.key_id) for signature in log.parse_note(note).signatures}
    if (known.name, known.key_id) not in ids:
        try:
            known = key_chain.chain_to(client, key).of(note)
        except Refusal as refusal:
            raise Refusal(refusal.code, f"{refusal.sentence}; {path} keeps {key}", hint=refusal.hint) from refusal
    return note, log.open_checkpoint(note, known).checkpoint


def _back(client: Client, has: str, seen: Checkpoint, path: Path) -> Refusal:
    return Refusal(
        "log_inconsistent",
        f"the log at {client.url} went back: it {has}, and {path} has seen {seen.size}",
        hint="nothing was signed. Keep the key folder as it is, and ask the operator in public: was the database put back, and which entries are"
        f" lost? Once they are told, and you accept it: move {path.name}, and receipts of what is lost, out of the folder; then again",
    )


def _text(path: Path) -> str:
    return reading.text(path, log.LONGEST_RECEIPT) if path.exists() else ""
