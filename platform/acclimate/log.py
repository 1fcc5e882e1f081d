"""The transparency log: an append-only Merkle tree (RFC 6962), its signed checkpoints (C2SP tlog-checkpoint), and receipts (tlog-proof).

An entry is a record's bytes; a leaf's hash is sha256(0x00 ‖ entry), a node's sha256(0x01 ‖ left ‖ right). A checkpoint is a signed note over

    example.org/acclimate                            the log's origin
    4                                                how many entries
    RcCI1Nk56ZcSmIEfIn0SleqtV7uvrlXNccFx595Iwl0=     the root over them

and a receipt carries entry, proof and checkpoint, so that it is checked offline against the log's key alone:

    c2sp.org/tlog-proof@v1
    extra eyJhdCI6…                                  the entry
    index 2
    jj5r7bQuTz…                                      the inclusion proof, from the leaf's sibling up, none or more lines

    example.org/acclimate
    …                                                the checkpoint as signed, cosignatures of witnesses included

Proofs and roots are bytes of 32; sizes and indices are below 2^63. The log is the installation's; rounds share it.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from acclimate.notes import (
    ED25519,
    LARGEST_NOTE,
    Note,
    Opened,
    Signer,
    Verifier,
    open_note,
    parse_note,
    parse_vkey,
    sign_note,
)
from acclimate_competitions import digests, records
from acclimate_competitions.digests import leaf_hash, node_hash
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

__all__ = [
    "LONGEST_RECEIPT", "Checkpoint", "Note", "Opened", "Receipt", "SignedCheckpoint", "Signer", "Tree", "Verifier", "checkpoint", "consistency_proof",
    "inclusion_proof", "leaf_hash", "open_checkpoint", "open_note", "parse_checkpoint", "parse_note", "parse_vkey", "root", "sign_checkpoint",
    "sign_note", "verify_consistency", "verify_inclusion",
]  # fmt: skip

LONGEST_RECEIPT = 2 * records.MAX_BYTES + LARGEST_NOTE
"""Bytes of the longest receipt, and some more: an entry in base64, a proof, a note."""
_PROOF_HEADER = "c2sp.org/tlog-proof@v1"
_LARGEST = 2**63 - 1
_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


# ---- tree ----------------------------------------------------------------------------------------------------------


class Tree:
    """A growing tree that keeps the hash of every complete subtree: roots and proofs at any size in O(log² size)."""

    def __init__(self, hashes: Iterable[bytes] = ()) -> None:
        # levels[h][i] covers the leaves from i · 2^h to (i + 1) · 2^h
        self._levels: list[list[bytes]] = [[]]
        for leaf in hashes:
            self.append(leaf)

    def __len__(self) -> int:
        return len(self._levels[0])

    def append(self, leaf: bytes) -> None:
        """Add a leaf's hash."""
        height, node = 0, leaf
        self._levels[0].append(leaf)
        while len(self._levels[height]) % 2 == 0:
            node = node_hash(self._levels[height][-2], node)
            height += 1
            if height == len(self._levels):
                self._levels.append([])
            self._levels[height].append(node)

    def root(self, size: int | None = None) -> bytes:
        """The root over the first `size` leaves, all of them by default."""
        size = len(self) if size is None else size
        self._check(size)
        return self._hash(0, size) if size else digests.root_of_hashes([])

    def hashes(self, height: int, start: int, end: int) -> list[bytes]:
        """The hashes start ≤ i < end of complete subtrees of 2^height leaves, the i-th from leaf i · 2^height on.

        Raises:
            Refusal: entry_unknown.
        """
        have = len(self._levels[height]) if height < len(self._levels) else 0
        if not 0 <= start < end <= have:
            raise Refusal(
                "entry_unknown", f"a tree of {len(self)} entries has {have} complete subtrees of 2^{height}, not {end}"
            )
        return self._levels[height][start:end]

    def inclusion_proof(self, index: int, size: int | None = None) -> list[bytes]:
        """The hashes that lead from leaf `index` to the root over the first `size` leaves (RFC 6962, 2.1.1).

        Raises:
            Refusal: entry_unknown.
        """
        size = len(self) if size is None else size
        self._check(size)
        if not 0 <= index < size:
            raise Refusal("entry_unknown", f"a tree of {size} entries has no entry {index}")
        return self._path(index, 0, size)

    def consistency_proof(self, first: int, second: int | None = None) -> list[bytes]:
        """The hashes that show the tree of size `first` to be the beginning of that of size `second` (RFC 6962, 2.1.2).

        Raises:
            Refusal: entry_unknown.
        """
        second = len(self) if second is None else second
        self._check(second)
        if not 0 <= first <= second:
            raise Refusal("entry_unknown", f"a tree of {second} entries does not begin with one of {first}")
        if first in (0, second):
            return []
        return self._subproof(first, 0, second)

    def _check(self, size: int) -> None:
        if not 0 <= size <= len(self):
            raise Refusal("entry_unknown", f"the tree has {len(self)} entries, not {size}")

    def _hash(self, start: int, end: int) -> bytes:
        """The root over leaves start … end − 1, where start is a multiple of the least power of two ≥ end − start."""
        size = end - start
        if size & (size - 1) == 0:
            height = size.bit_length() - 1
            return self._levels[height][start >> height]
        middle = start + _split(size)
        return node_hash(self._hash(start, middle), self._hash(middle, end))

    def _path(self, index: int, start: int, end: int) -> list[bytes]:
        if end - start == 1:
            return []
        middle = start + _split(end - start)
        if index < middle:
            return [*self._path(index, start, middle), self._hash(middle, end)]
        return [*self._path(index, middle, end), self._hash(start, middle)]

    def _subproof(self, first: int, start: int, end: int) -> list[bytes]:
        # Where the old tree is exactly this subtree the verifier knows its hash only if it began at leaf 0.
        if first == end:
            return [self._hash(start, end)] if start else []
        middle = start + _split(end - start)
        if first <= middle:
            return [*self._subproof(first, start, middle), self._hash(middle, end)]
        return [*self._subproof(first, middle, end), self._hash(start, middle)]


def _split(size: int) -> int:
    """The largest power of two below size."""
    return 1 << (size - 1).bit_length() - 1


def root(hashes: Sequence[bytes]) -> bytes:
    """The root over leaf hashes."""
    return digests.root_of_hashes(hashes)


def inclusion_proof(hashes: Sequence[bytes], index: int, size: int) -> list[bytes]:
    """As Tree.inclusion_proof, over the first `size` of these leaf hashes."""
    return Tree(hashes[:size]).inclusion_proof(index, size)


def consistency_proof(hashes: Sequence[bytes], first: int, second: int) -> list[bytes]:
    """As Tree.consistency_proof, over the first `second` of these leaf hashes."""
    return Tree(hashes[:second]).consistency_proof(first, second)


def verify_inclusion(leaf: bytes, proof: Sequence[bytes], *, index: int, size: int, root: bytes) -> None:
    """Check that a leaf's hash stands at an index of the tree with this size and root (RFC 9162, 2.1.3.2).

    Raises:
        Refusal: proof_invalid.
    """
    _check_lengths([leaf, root, *proof])
    if not 0 <= index < size <= _LARGEST:
        raise Refusal("proof_invalid", f"entry {index} can't be in a tree of {size} entries")
    position, last, node = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            raise Refusal("proof_invalid", f"the inclusion proof of entry {index} has {len(proof)} hashes, too many")
        if position & 1 or position == last:
            node = node_hash(sibling, node)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            node = node_hash(node, sibling)
        position, last = position >> 1, last >> 1
    if last != 0:
        raise Refusal("proof_invalid", f"the inclusion proof of entry {index} has {len(proof)} hashes, too few")
    if node != root:
        raise Refusal(
            "proof_invalid",
            f"entry {index} is not in this tree: the proof leads to root {_base64(node)}, the checkpoint has {_base64(root)}",
        )


def verify_consistency(
    proof: Sequence[bytes], *, first: int, first_root: bytes, second: int, second_root: bytes
) -> None:
    """Check that the tree (first, first_root) is the beginning of the tree (second, second_root) (RFC 9162, 2.1.4.2).

    An empty first tree is the beginning of every tree; it needs the root of an empty tree and no proof.

    Raises:
        Refusal: proof_invalid, where the proof has a wrong form; log_inconsistent, where it leads to another root.
    """
    if not 0 <= first <= second <= _LARGEST:
        raise Refusal("proof_invalid", f"a tree of {second} entries does not begin with one of {first}")
    if first == 0:
        _check_lengths([second_root])
        if first_root != digests.root_of_hashes([]):
            raise Refusal("log_inconsistent", "a tree of 0 entries has another root than an empty tree")
    if first in (0, second):
        if proof:
            raise Refusal("proof_invalid", "a consistency proof from nothing, or to the same size, must be empty")
        if first == second and first_root != second_root:
            raise _fork(first, first_root, second, second_root)
        return
    _check_lengths([first_root, second_root, *proof])
    path = [first_root, *proof] if first & (first - 1) == 0 else list(proof)
    if not path:
        raise Refusal("proof_invalid", "the consistency proof is empty")
    position, last = first - 1, second - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    old = new = path[0]
    for sibling in path[1:]:
        if last == 0:
            raise Refusal("proof_invalid", f"the consistency proof has {len(proof)} hashes, too many")
        if position & 1 or position == last:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
            while not position & 1 and position:
                position, last = position >> 1, last >> 1
        else:
            new = node_hash(new, sibling)
        position, last = position >> 1, last >> 1
    if last != 0:
        raise Refusal("proof_invalid", f"the consistency proof has {len(proof)} hashes, too few")
    if old != first_root or new != second_root:
        raise _fork(first, first_root, second, second_root)


def _fork(first: int, first_root: bytes, second: int, second_root: bytes) -> Refusal:
    return Refusal(
        "log_inconsistent",
        f"the log of {second} entries with root {_base64(second_root)} does not begin with that of {first} entries with"
        f" root {_base64(first_root)}",
        hint="keep both checkpoints: together they show that the log was changed, or shown differently to different people",
    )


def _check_lengths(hashes: Iterable[bytes]) -> None:
    for value in hashes:
        if len(value) != 32:
            raise Refusal("proof_invalid", f"a hash of {len(value)} bytes in a proof, expected 32")


# ---- checkpoints ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """What a log vouches for at a size: the text of a checkpoint's note.

    Attributes:
        origin: the log's name.
        size: how many entries.
        root: the root over them, 32 bytes.
        extensions: further lines, opaque, none of them empty.
    """

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()

    def body(self) -> str:
        """The note's text."""
        return "".join(f"{line}\n" for line in (self.origin, self.size, _base64(self.root), *self.extensions))


@dataclass(frozen=True)
class SignedCheckpoint:
    """A checkpoint whose log signature verified.

    Attributes:
        checkpoint: what it says.
        cosigned: vkey of each known witness that signed it too -> time, seconds since 1970.
    """

    checkpoint: Checkpoint
    cosigned: Mapping[str, int]


def checkpoint(origin: str, size: int, root: bytes) -> str:
    """The text of a checkpoint's note."""
    return Checkpoint(origin, size, root).body()


def sign_checkpoint(signer: Signer, size: int, root: bytes) -> str:
    """A signed checkpoint of a log: a note."""
    return sign_note(checkpoint(signer.origin, size, root), signer)


def parse_checkpoint(body: str) -> Checkpoint:
    """What a checkpoint's text says; Checkpoint.body gives the same text back.

    Raises:
        Refusal: proof_invalid.
    """
    lines = body.split("\n")
    if len(lines) < 4 or lines.pop() != "" or "" in lines:
        raise Refusal("proof_invalid", "a checkpoint must have three lines or more, none of them empty, each ended")
    size, node = _number(lines[1], "a checkpoint's size"), _hash(lines[2], "a checkpoint's root")
    return Checkpoint(lines[0], size, node, tuple(lines[3:]))


def open_checkpoint(note: str | bytes, log: Verifier, witnesses: Sequence[Verifier] = ()) -> SignedCheckpoint:
    """The checkpoint of a log, with the times at which known witnesses cosigned it.

    1. The log's own signature, of kind 0x01, is there and verifies; a known witness's that does not verify refuses the note.
    2. The text is a checkpoint of this log: its origin is the key's name.
    3. A key counts once, whatever names it has, since a cosignature does not cover the witness's name.

    How many witnesses are enough is for the caller to say.

    Raises:
        Refusal: proof_invalid.
    """
    # 1
    opened = open_note(note, [log, *witnesses])
    if log.kind != ED25519 or log.text() not in opened.signed:
        raise Refusal("proof_invalid", f"the checkpoint is not signed by the log {log.text()}")
    # 2
    parsed = parse_checkpoint(opened.text)
    if parsed.origin != log.name:
        raise Refusal("proof_invalid", f"the checkpoint is of the log {parsed.origin!r}, not {log.name!r}")
    # 3
    cosigned: dict[bytes, tuple[str, int]] = {}
    for witness in witnesses:
        if (time := opened.signed.get(witness.text())) is not None:
            cosigned.setdefault(witness.public, (witness.text(), time))
    return SignedCheckpoint(parsed, dict(cosigned.values()))


# ---- receipts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Receipt:
    """Shows that an entry is in the log, to anyone who knows the log's key.

    Attributes:
        index: the entry's index.
        entry: the record's bytes, in the `extra` line.
        proof: inclusion proof, 32 bytes each.
        checkpoint: the signed checkpoint, verbatim.
    """

    index: int
    entry: bytes
    proof: tuple[bytes, ...]
    checkpoint: str

    def text(self) -> str:
        """The receipt as a tlog-proof file."""
        head = (_PROOF_HEADER, f"extra {_base64(self.entry)}", f"index {self.index}", *map(_base64, self.proof), "")
        return "".join(f"{line}\n" for line in head) + self.checkpoint

    @classmethod
    def parse(cls, text: str | bytes) -> "Receipt":
        """A receipt, unverified; Receipt.text gives the same text back.

        Raises:
            Refusal: proof_invalid.
        """
        try:
            whole = text.encode().decode() if isinstance(text, str) else text.decode()
        except UnicodeError as error:
            raise Refusal("proof_invalid", "a receipt must be UTF-8") from error
        head, blank, note = whole.partition("\n\n")
        lines = head.split("\n")
        if not blank or len(lines) < 3 or lines[0] != _PROOF_HEADER:
            raise Refusal("proof_invalid", f"not a receipt: it must begin with {_PROOF_HEADER!r}, extra and index")
        if not lines[1].startswith("extra ") or not lines[2].startswith("index "):
            raise Refusal("proof_invalid", "a receipt's second line must be its extra line, its third the index")
        entry = _unbase64(lines[1][6:], "a receipt's entry")
        if not 0 < len(entry) <= records.MAX_BYTES:
            raise Refusal(
                "proof_invalid", f"a receipt's entry has {len(entry)} bytes, 1 to {records.MAX_BYTES} are allowed"
            )
        index = _number(lines[2][6:], "a receipt's index")
        if len(lines) - 3 > 63:
            raise Refusal("proof_invalid", f"a proof of {len(lines) - 3} hashes, at most 63 are possible")
        proof = tuple(_hash(line, "a hash of a receipt's proof") for line in lines[3:])
        parse_checkpoint(parse_note(note).text)
        return cls(index, entry, proof, note)

    def open(self, log: Verifier, witnesses: Sequence[Verifier] = ()) -> tuple[Record, SignedCheckpoint]:
        """The record of the entry and the checkpoint that holds it.

        1. The checkpoint is signed by the log.
        2. The inclusion proof leads from the entry to the checkpoint's root.
        3. The entry is a well-formed record. Its own signature is checked where the round is folded.

        Raises:
            Refusal: proof_invalid; record_invalid or not_canonical, where the log holds no record there.
        """
        # 1
        signed = open_checkpoint(self.checkpoint, log, witnesses)
        # 2
        size, node = signed.checkpoint.size, signed.checkpoint.root
        verify_inclusion(leaf_hash(self.entry), self.proof, index=self.index, size=size, root=node)
        # 3
        return records.parse(self.entry), signed

    def verify(self, verifier: Verifier) -> Record:
        """The record of the entry, checked against the log's key.

        Raises:
            Refusal: as `open`.
        """
        return self.open(verifier)[0]


def _number(text: str, what: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > _LARGEST:
        raise Refusal("proof_invalid", f"{what} is {text[:40]!r}, not a number below 2^63 without leading zeros")
    return int(text)


def _hash(text: str, what: str) -> bytes:
    data = _unbase64(text, what)
    _check_lengths([data])
    return data


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unbase64(text: str, what: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise Refusal("proof_invalid", f"{what} is not base64") from error
    if _base64(data) != text:
        raise Refusal("proof_invalid", f"{what} is not base64 in its one form")
    return data
