"""What stands in a bundle and no other check looks at: files of no known kind, empty folders, signatures by keys that nobody named."""

from collections.abc import Iterator, Sequence

from acclimate import hand_overs
from acclimate.log import Receipt, Verifier, parse_checkpoint, parse_vkey
from acclimate.notes import Note, Signature, parse_note
from acclimate.quorum import parse_witness
from acclimate.verify import files
from acclimate.verify.audit import Audit
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions.errors import Refusal

_MOST = 10
"""Strangers that the report names."""


def nothing_else(audit: Audit) -> str:
    """Nothing stands in the bundle that no check reads.

    1. Each file is of a known kind, and no folder is empty.
    2. Under its checkpoints, receipts' included, are signatures of no other keys than the log's, its witnesses' by keys.json and those of
       witnesses whose keys the auditor brought. A verifier of a note ignores the others, so they speak neither for nor against the bundle.
    3. Those that no other check verifies are genuine: of the witnesses that the auditor brought, and of a key of the log that need not have
       signed this checkpoint.
    """
    # 1
    counted = files.known(audit.bundle)
    # 2
    chain, declared = _named(audit)
    own = [*chain.keys, *map(parse_witness, audit.witnesses)]
    strangers: dict[str, str] = {}
    signatures = 0
    for name, note in _notes(audit):
        size = parse_checkpoint(note.text).size
        opened = [*declared, *([chain.at(size)] if name.startswith("receipts/") else chain.signers(size))]
        for signature in note.signatures:
            signatures += 1
            if _of(signature, opened) is not None:
                continue
            verifier = _of(signature, own)
            if verifier is None:
                strangers.setdefault(f"{signature.name} (key {signature.key_id.hex()})", name)
                continue
            # 3
            try:
                verifier.verify(note.text, signature.data)
            except Refusal as refusal:
                raise Failed(name, refusal.sentence) from refusal
    if strangers:
        named = ", ".join(f"{who} in {name}" for who, name in list(strangers.items())[:_MOST])
        more = f" and {len(strangers) - _MOST} more" if len(strangers) > _MOST else ""
        raise NotChecked(
            f"there are signatures of keys that are neither the log's nor a witness's of this round: {named}{more}; whether they are"
            " genuine nobody has looked at, and they count for nothing. If you know such a witness, give its key with --witness"
        )
    return f"{counted}, {signatures} signatures under checkpoints"


def _of(signature: Signature, verifiers: Sequence[Verifier]) -> Verifier | None:
    """The key that a signature line names."""
    for verifier in verifiers:
        if (verifier.name, verifier.key_id) == (signature.name, signature.key_id):
            return verifier
    return None


def _named(audit: Audit) -> tuple[hand_overs.Chain, list[Verifier]]:
    """The log's keys, and the witnesses that keys.json names, which other checks hold against the log."""
    try:
        keys = audit.bundle.json("keys.json")
        return hand_overs.chain(audit.leaves, parse_vkey(keys["log"])), [*map(parse_witness, keys["witnesses"])]
    except (Failed, Refusal, TypeError, KeyError, AttributeError) as error:
        raise NotChecked(f"whose signatures stand under the checkpoints can't be told: {error}") from error


def _notes(audit: Audit) -> Iterator[tuple[str, Note]]:
    """The checkpoints by the files that hold them; what is malformed, the checks that open it say."""
    bundle = audit.bundle
    for name in ["checkpoint", *bundle.under("checkpoints"), *bundle.under("receipts")]:
        try:
            text: str | bytes = bundle.read(name)
            note = parse_note(Receipt.parse(text).checkpoint if name.startswith("receipts/") else text)
            parse_checkpoint(note.text)
            yield name, note
        except (Failed, Refusal):
            continue
