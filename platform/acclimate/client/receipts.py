"""What a receipt shows, alone and beside something else that is known of the log: a bundle, a saved checkpoint, the log as it is now.

A receipt alone shows that whoever has the log's key vouched for the entry. That everybody is shown the same log, it doesn't: for that it
is compared. Two checkpoints that contradict each other are proof against the log's operator, and both are to be kept.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from acclimate import hand_overs, log
from acclimate.client import key_chain
from acclimate.client.connection import Client
from acclimate.client.evidence import Check
from acclimate.hand_overs import Chain
from acclimate.log import LONGEST_RECEIPT, Receipt, SignedCheckpoint, Verifier
from acclimate.log_keys import LogKeys
from acclimate.notes import ED25519
from acclimate.quorum import Quorum, moment
from acclimate.verify import files as bundles
from acclimate.verify.report import Failed
from acclimate_competitions import reading, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record, format_time

_SAVED = "a receipt is a file *.tlog-proof, as `acclimate submit` keeps them in the key folder's receipts/"
_A_BUNDLE = "name a published round's bundle (acclimate round bundle ROUND --out FILE), or a mirror's folder"
_KEEP = "keep both: together they prove that the log was changed, or shown differently to different people"


@dataclass(frozen=True)
class Bundle:
    """What a bundle's or a mirror's files say of the log.

    Attributes:
        key: the log's key that it names; None where it names none.
        entries: the log's entries.
        rounds: the rounds that it can be about, by definition and ciphertext; none for a mirror.
    """

    key: str | None
    entries: list[bytes]
    rounds: frozenset[str]


def read(path: Path) -> Receipt:
    """The receipt in a file, unverified.

    Raises:
        Refusal: file_unreadable, proof_invalid.
    """
    data = _bytes(path)
    try:
        return Receipt.parse(data)
    except Refusal as refusal:
        raise refusal.of(str(path), hint=_SAVED) from refusal


def read_checkpoint(path: Path) -> str:
    """The signed checkpoint in a file: a checkpoint as it was saved, or that of somebody's receipt.

    Raises:
        Refusal: file_unreadable, proof_invalid.
    """
    data = _bytes(path)
    try:
        if data.startswith(b"c2sp.org/tlog-proof@"):
            return Receipt.parse(data).checkpoint
        return log.parse_note(data).encode()
    except Refusal as refusal:
        raise refusal.of(
            str(path), hint="name a checkpoint as it was saved, or somebody's receipt, *.tlog-proof"
        ) from refusal


def read_bundle(path: Path) -> Bundle:
    """The log's part of a bundle, folder or ZIP, or of a mirror's folder.

    Raises:
        Refusal: bundle_invalid, record_invalid.
    """
    try:
        with bundles.opened(path) as found:
            key = found.json("keys.json")["log"] if "keys.json" in found else None
            entries = found.lines("entries.jsonl")
            if key is None:
                found.path("checkpoint")  # a mirror has that, at least
                return Bundle(None, entries, frozenset())
            named = {name: found.digest(name) for name in ("definition.toml", "holdout.sealed")}
    except Failed as failed:
        raise Refusal("bundle_invalid", f"{path}: {failed}", hint=_A_BUNDLE) from failed
    except (KeyError, TypeError) as error:
        raise Refusal("bundle_invalid", f"{path}: keys.json names no log", hint=_A_BUNDLE) from error
    parsed = [_entry(path, entry, index) for index, entry in enumerate(entries)]
    defined = {r.round for r in parsed if r.type == "RoundDefined" and r["definition"] == named["definition.toml"]}
    sealed = {r.round for r in parsed if r.type == "HoldoutSealed" and r["ciphertext"] == named["holdout.sealed"]}
    return Bundle(str(key), entries, frozenset(defined & sealed))


def _entry(path: Path, entry: bytes, index: int) -> Record:
    try:
        return records.parse(entry)
    except Refusal as refusal:
        raise refusal.of(f"{path}, entries.jsonl, line {index + 1}", hint=_A_BUNDLE) from refusal


def signing(receipt: Receipt, known: Sequence[str]) -> str | None:
    """The one of these keys whose signature the receipt's checkpoint claims to have."""
    ids = {(signature.name, signature.key_id) for signature in log.parse_note(receipt.checkpoint).signatures}
    keys = (log.parse_vkey(text) for text in known)
    return next((key.text() for key in keys if (key.name, key.key_id) in ids), None)


def origin(receipt: Receipt) -> str:
    """The name of the receipt's log."""
    return log.parse_checkpoint(log.parse_note(receipt.checkpoint).text).origin


def whose(
    keys: LogKeys, chain: Chain, signed: SignedCheckpoint, *, bundle: Bundle | None, client: Client | None
) -> list[Check]:
    """What a receipt leaves open whose key was given up since; nothing where it is the newest key's, or that one's log goes on from there.

    Raises:
        Refusal: rotation_invalid, where it was signed after the key was given up, or beside a bundle of another history.
    """
    if client is not None:
        # `against_log` holds it against the log of now, which the key of now signs.
        keys.require_now(chain, signed.checkpoint.size)
        return []
    entries = bundle.entries if bundle is not None else []
    if not (doubt := keys.doubt(chain, signed.checkpoint.size, entries)) or signed.cosigned:
        return []
    return [Check("whose log", "NOT CHECKED", doubt)]


def alone(
    receipt: Receipt, chain: Chain, witnesses: Sequence[Verifier]
) -> tuple[Record, SignedCheckpoint, list[Check]]:
    """The record and checkpoint of a receipt, signed by the log and by witnesses whose keys are known.

    Raises:
        Refusal: proof_invalid, naming the key whose signature does not verify; record_invalid, not_canonical.
    """
    key = chain.of(receipt.checkpoint)
    if signing(receipt, [key.text()]) is None:
        raise _not_signed(receipt, key)
    record, signed = receipt.open(key, witnesses)
    size = signed.checkpoint.size
    found = [
        Check("signature", "ok", f"the checkpoint of {size} entries is signed by {key.text()}"),
        Check("inclusion", "ok", f"entry {receipt.index} leads to the checkpoint's root"),
    ]
    for witness in witnesses:
        seconds = signed.cosigned.get(witness.text())
        if seconds is None:
            found.append(Check("witness", "NOT CHECKED", f"{witness.name} has not cosigned this checkpoint"))
        else:
            found.append(Check("witness", "ok", f"{witness.name} saw this checkpoint {format_time(moment(seconds))}"))
    return record, signed, found


def require_round(record: Record, wanted: str) -> None:
    """Refuse a receipt of another round than the one wanted, or one that begins so.

    Raises:
        Refusal: proof_invalid.
    """
    if not record.round.startswith(wanted):
        raise Refusal(
            "proof_invalid",
            f"the receipt is of {record.type} of {record.round or 'no round'}, wanted is {wanted}",
            hint="it shows nothing about that round: look for another receipt",
        )


def against_bundle(receipt: Receipt, record: Record, signed: SignedCheckpoint, bundle: Bundle) -> list[Check]:
    """A receipt beside the entries of a bundle: its round, the entry itself, the history before its checkpoint, the round's quorum.

    Raises:
        Refusal: proof_invalid, log_inconsistent.
    """
    entries, size, found = bundle.entries, signed.checkpoint.size, []
    if bundle.rounds and record.round not in bundle.rounds:
        about = ", ".join(sorted(bundle.rounds))
        reason = (
            f"the receipt is of {record.round or record.type}, the bundle of {about}: it shows nothing about that round"
        )
        found.append(Check("round", "NOT CHECKED", reason))
    if receipt.index >= len(entries):
        reason = f"the bundle's log ends at {len(entries)} entries, before entry {receipt.index}"
        found.append(Check("bundle", "NOT CHECKED", reason))
    elif entries[receipt.index] != receipt.entry:
        raise Refusal(
            "proof_invalid",
            f"the bundle's log has something else as entry {receipt.index} of {len(entries)}",
            hint="keep both: the log has signed two histories",
        )
    else:
        found.append(Check("bundle", "ok", f"entry {receipt.index} of the bundle has the same bytes"))
    if size > len(entries):
        reason = f"the receipt's checkpoint is of {size} entries, the bundle's log ends at {len(entries)}: whether"
        found.append(Check("same history", "NOT CHECKED", f"{reason} it goes on to that checkpoint is not shown"))
    elif log.root([log.leaf_hash(entry) for entry in entries[:size]]) != signed.checkpoint.root:
        raise Refusal(
            "log_inconsistent",
            f"the bundle's first {size} entries have another root than the receipt's checkpoint",
            hint=_KEEP,
        )
    else:
        told = f"the bundle's first {size} entries have the root of the receipt's checkpoint"
        found.append(Check("same history", "ok", told))
    return found + _quorum(receipt, record, bundle)


def _quorum(receipt: Receipt, record: Record, bundle: Bundle) -> list[Check]:
    """Whether the quorum that the receipt's round asks for cosigned; nothing where it asks for none."""
    parsed = (records.parse_entry(entry, index) for index, entry in enumerate(bundle.entries))
    of_round = (r for r in parsed if r.type == "RoundDefined" and r.round == record.round)
    defined = next(of_round, None)
    if defined is None or defined["quorum"] == 0:
        return []
    quorum = Quorum.of(defined.fields)
    key = hand_overs.chain(bundle.entries, log.parse_vkey(defined["log"])).of(receipt.checkpoint)
    cosigned = log.open_checkpoint(receipt.checkpoint, key, quorum.witnesses)
    by = quorum.by(cosigned)
    if by is None:
        have = (
            f"{len(cosigned.cosigned)} of the round's witnesses cosigned this checkpoint, {quorum.needed} are asked for"
        )
        return [Check("quorum", "NOT CHECKED", f"{have}; missing: {', '.join(quorum.missing(cosigned))}")]
    return [Check("quorum", "ok", f"{quorum.needed} of the round's witnesses saw this checkpoint by {format_time(by)}")]


def against_checkpoint(signed: SignedCheckpoint, note: str, chain: Chain) -> list[Check]:
    """A receipt beside another checkpoint of the log, which somebody saved.

    Raises:
        Refusal: proof_invalid, log_inconsistent.
    """
    other, mine = log.open_checkpoint(note, chain.of(note)).checkpoint, signed.checkpoint
    if other.size != mine.size:
        reason = (
            f"the saved checkpoint is of {other.size} entries, the receipt's of {mine.size}: whether the one goes on from the"
            " other is not shown by them alone; --log URL asks for the proof"
        )
        return [Check("same history", "NOT CHECKED", reason)]
    log.verify_consistency([], first=mine.size, first_root=mine.root, second=other.size, second_root=other.root)
    return [Check("same history", "ok", f"both checkpoints are of {mine.size} entries with the same root")]


def against_log(client: Client, signed: SignedCheckpoint, chain: Chain) -> list[Check]:
    """A receipt beside the log as its server shows it now.

    Raises:
        Refusal: log_inconsistent, proof_invalid, server_unreachable.
    """
    note = client.checkpoint()
    now, mine = log.open_checkpoint(note, chain.of(note)).checkpoint, signed.checkpoint
    if now.size < mine.size:
        raise Refusal(
            "log_inconsistent",
            f"the log at {client.url} has {now.size} entries now, the receipt's checkpoint has {mine.size}: it went back",
            hint="an old checkpoint, or entries were lost; keep the receipt, and ask the operator in public",
        )
    proof = client.consistency(mine.size, now.size) if mine.size else []
    log.verify_consistency(proof, first=mine.size, first_root=mine.root, second=now.size, second_root=now.root)
    told = (
        f"the log at {client.url}, of {now.size} entries now, begins with the {mine.size} of the receipt's checkpoint"
    )
    return [Check("same history", "ok", told)]


def chain_of(key: str | None, *, bundle: Bundle | None, client: Client | None) -> Chain:
    """The log's keys, from the one that is known, else the one that the bundle or the server names.

    Raises:
        Refusal: proof_invalid, where nothing names a key, or the bundle is of another log; log_inconsistent, rotation_invalid, key_refused.
    """
    if client is not None:
        return key_chain.chain_to(client, key)
    if bundle is None:
        assert key is not None
        return Chain(log.parse_vkey(key))
    if bundle.key is None and key is None:
        raise Refusal("proof_invalid", "a mirror names no key: whose log is it?", hint="--log-key KEY")
    known = log.parse_vkey(key or str(bundle.key))
    found = hand_overs.chain(bundle.entries, log.parse_vkey(bundle.key or known.text()))
    if known not in found.keys:
        raise Refusal("proof_invalid", f"the bundle is of the log {bundle.key}, the key given is {key}")
    return found


def _bytes(path: Path) -> bytes:
    # A mark that an editor put before it is none of its text.
    return reading.read(path, LONGEST_RECEIPT, hint=_SAVED).removeprefix(codecs.BOM_UTF8)


def _not_signed(receipt: Receipt, key: Verifier) -> Refusal:
    by = ", ".join(sorted(signature.name for signature in log.parse_note(receipt.checkpoint).signatures))
    hint = "it is of another log, or forged: ask whoever gave you the receipt, and whoever gave you the key"
    if key.kind != ED25519:
        hint = "that is a witness's key: give it with --witness, and the log's own with --log-key"
    elif any(signature.name == key.name for signature in log.parse_note(receipt.checkpoint).signatures):
        hint = (
            "the log may have been handed over from one key to the other: `acclimate log keys --server URL --log-key KEY` shows all keys"
            " from an older one on; a receipt of before needs the older one, which --log-key DIR takes where the key folder kept it"
        )
    return Refusal("proof_invalid", f"no known key signed this note: signed by {by}; known: {key.text()}", hint=hint)
