"""The seal's secret, split among custodians: any k of n recover it, fewer learn nothing about it.

Shamir's scheme over GF(2^8) with the polynomial x^8 + x^4 + x^3 + x + 1 (0x11B): for each byte of the secret a polynomial of
degree k − 1 whose constant term is that byte and whose other coefficients are uniform; custodian i of 1…n holds its value at x = i.

A share travels as a *share document*, canonical JSON {v: 2, type: "Share", round, seal, index, k, n, share (base64)}, whose SHA-256 is
the commitment in HoldoutSealed. A share of the rehearsal's dummy seal has the type "RehearsalShare" instead: custodians send that one back
in clear before the round opens, so it must say of itself, inside its envelope, that it protects nothing (decision 0006). It names its
round for the same reason: a seal's record is public, so another round can show it, and the share must not be released for that one
(decision 0013). Whoever reads a document says of which split it must be. Version 1 named no round; it is read in rounds that were defined
before there was version 2, and nowhere else. The document is wrapped as an age v1 file for each of the custodian's recipients; an *envelope* is
{index, to, main, backup} with the age files as base64 (backup null where there is none). The platform never sees a document
before the custodian releases it.

Limits: arithmetic in Python takes time that depends on its values, so splitting and recovering belong on a machine of the
person whose secret it is; a dealer who deals shares of no common polynomial is found at the opening only (`consistent`).
"""

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyrage

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

MOST_SHARES = 255
SECRET_BYTES = 32
"""How long a seal's secret is, and so each share of it."""
REAL, REHEARSAL = "Share", "RehearsalShare"
_UNBOUND_FIELDS = {"v", "type", "seal", "index", "k", "n", "share"}
_FIELDS = _UNBOUND_FIELDS | {"round"}


# ---- the field and the scheme --------------------------------------------------------------------------------------


def split(secret: bytes, *, k: int, n: int, random: Callable[[int], bytes]) -> list[bytes]:
    """Split a secret into n shares, each as long as the secret; the share at position i belongs to x = i + 1.

    Args:
        secret: the bytes to split, at least one.
        k: how many shares recover it, from 1 to n.
        n: how many shares to make, at most 255.
        random: gives that many uniform bytes; secrets.token_bytes in earnest.

    Raises:
        Refusal: definition_invalid, for impossible k and n.
    """
    if not 1 <= k <= n <= MOST_SHARES or not secret:
        raise Refusal("definition_invalid", f"{k} of {n} is no threshold: 1 ≤ k ≤ n ≤ {MOST_SHARES} must hold")
    coefficients = [secret, *(random(len(secret)) for _ in range(k - 1))]
    if any(len(row) != len(secret) for row in coefficients):
        raise ValueError("the source of randomness gave another number of bytes than asked for")
    return [bytes(_evaluate(column, x) for column in zip(*coefficients, strict=True)) for x in range(1, n + 1)]


def interpolate(points: Mapping[int, bytes], x: int) -> bytes:
    """The values at x of the byte-wise polynomials of least degree through points {x: bytes of one length} (Lagrange)."""
    weights = {
        i: _product(_multiply(x ^ j, _inverse(i ^ j)) for j in points if j != i) for i in points
    }  # subtraction is exclusive or
    length = len(next(iter(points.values())))
    return bytes(_sum(_multiply(weights[i], values[place]) for i, values in points.items()) for place in range(length))


def _evaluate(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):  # Horner's rule
        value = _multiply(value, x) ^ coefficient
    return value


def _multiply(a: int, b: int) -> int:
    product = 0
    while b:
        product ^= a if b & 1 else 0
        a = (a << 1) ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def _inverse(a: int) -> int:
    # The multiplicative group has 255 elements, so a^254 · a = 1.
    return _product(a for _ in range(254))


def _product(factors: Iterable[int]) -> int:
    result = 1
    for factor in factors:
        result = _multiply(result, factor)
    return result


def _sum(terms: Iterable[int]) -> int:
    result = 0
    for term in terms:
        result ^= term
    return result


# ---- share documents -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What a share document says: share `index` of n, of which k open `seal` of `round`; `rehearsal`: of a dummy seal.

    `round` is None in a document of version 1, which names none.
    """

    round: str | None
    seal: str
    index: int
    k: int
    n: int
    share: bytes
    rehearsal: bool = False

    def encode(self) -> bytes:
        """The share document's bytes."""
        return digests.canonical(
            {
                "type": REHEARSAL if self.rehearsal else REAL,
                **({"v": 1} if self.round is None else {"v": 2, "round": self.round}),
                "seal": self.seal,
                "index": self.index,
                "k": self.k,
                "n": self.n,
                "share": base64.b64encode(self.share).decode(),
            }
        )


@dataclass(frozen=True)
class Split:
    """What all shares of one seal have in common, as the round and its seal's record say it, not the shares.

    Attributes:
        round: the round's id.
        seal: the seal's id.
        k: the threshold in RoundDefined.
        n: the number of custodians in RoundDefined.
        rehearsal: whether the seal is a rehearsal's; shares of the other kind are refused.
        unbound: whether documents of version 1, which name no round, are read as well.
    """

    round: str
    seal: str
    k: int
    n: int
    rehearsal: bool = False
    unbound: bool = False

    @classmethod
    def of(cls, defined: Record, seal: str, *, rehearsal: bool = False) -> "Split":
        """The split of a round's seal: documents of version 1 are read only where the round itself is of that age."""
        unbound = "id_digits" not in defined.fields
        return cls(defined.round, seal, defined["k"], len(defined["custodians"]), rehearsal, unbound)

    def read(self, document: bytes) -> Share:
        """What a share document says, which must be one of this split.

        Raises:
            Refusal: share_unreadable; share_false, with what it is a share of instead.
        """
        share = parse_document(document, rehearsal=self.rehearsal)
        if share.round is None and not self.unbound:
            raise Refusal(
                "share_unreadable",
                f"a share document of version 1, which names no round; shares of {self.round} have version 2",
                hint="it was made by an older version of acclimate: the organizer must make the seal with this one",
            )
        said: dict[str, tuple[object, object]] = {
            "round": (share.round or self.round, self.round),
            "seal": (share.seal, self.seal),
            "threshold": (f"{share.k} of {share.n}", f"{self.k} of {self.n}"),
            "length in bytes": (len(share.share), SECRET_BYTES),
        }
        wrong = [f"{what} {found} for {wanted}" for what, (found, wanted) in said.items() if found != wanted]
        if wrong:
            raise Refusal(
                "share_false",
                f"share {share.index} is not one of {self.round}: it has the {', the '.join(wrong)}",
                hint="the organizer dealt a share that can't open this round, or somebody shows you another round's seal:"
                " release nothing, and tell the other custodians",
            )
        return share


def document_digest(document: bytes) -> str:
    """A share document's digest: its commitment in HoldoutSealed."""
    return digests.of_bytes(document)


def parse_document(document: bytes, *, rehearsal: bool = False) -> Share:
    """What a share document says; Share.encode gives the same bytes back.

    Args:
        document: its bytes.
        rehearsal: whether it must be a share of a rehearsal; the other of the two types is refused.

    Raises:
        Refusal: share_unreadable; share_false, where it is a share of the other type.
    """
    try:
        content = digests.parse_canonical(document)
    except Refusal as refusal:
        raise Refusal("share_unreadable", f"not a share document: {refusal.sentence}") from refusal
    known = {1: _UNBOUND_FIELDS, 2: _FIELDS}
    version = content.get("v") if isinstance(content, dict) else None
    if type(version) is not int or set(content) != known.get(version):
        raise Refusal("share_unreadable", "not a share document: it has other fields than those of version 1 or 2")
    if content["type"] not in (REAL, REHEARSAL):
        raise Refusal("share_unreadable", f"not a share document: it has the type {content['type']!r}")
    wanted = REHEARSAL if rehearsal else REAL
    if content["type"] != wanted:
        raise Refusal(
            "share_false",
            f"the document is a {content['type']}, and only a {wanted} will do here",
            hint="somebody passes a real seal off as a rehearsal: send it nowhere, and tell the other custodians"
            if rehearsal
            else "",
        )
    numbers = [content[name] for name in ("index", "k", "n")]
    if not all(type(number) is int for number in numbers):
        raise Refusal("share_unreadable", "a share document's index, k and n must be whole numbers")
    index, k, n = numbers
    if not (1 <= k <= n <= MOST_SHARES and 1 <= index <= n):
        raise Refusal("share_unreadable", f"share {index} of {k} of {n} is impossible")
    if not digests.is_digest(content["seal"]):
        raise Refusal("share_unreadable", f"a share document names the seal {content['seal']!r}")
    round_id = content.get("round")
    if version == 2 and (not isinstance(round_id, str) or not round_id):
        raise Refusal("share_unreadable", f"a share document names the round {round_id!r}")
    share = _unbase64(content["share"], what="a share document's share")
    if not share:
        raise Refusal("share_unreadable", "a share document's share is empty")
    return Share(round_id, content["seal"], index, k, n, share, rehearsal)


def recover(shares: Sequence[Share]) -> bytes:
    """The secret that at least k shares of one seal recover; shares beyond k must agree with the first k.

    Raises:
        Refusal: share_missing, where they are too few; share_false, where they don't belong together.
    """
    return interpolate(_points(shares), 0)


def consistent(documents: Sequence[bytes], commitments: Sequence[str], *, of: Split) -> None:
    """Check share documents against their commitments, and the dealer: all n commitments must follow from any k documents.

    1. Each document is one of the split, and has the digest that its index was committed to.
    2. At least k different documents are there.
    3. The documents that the first k imply for every index 1…n have the n commitments.

    Args:
        documents: the released share documents, in any order.
        commitments: the n commitments of HoldoutSealed, in the order of their index.
        of: what they must be shares of.

    Raises:
        Refusal: share_unreadable; share_missing; share_false, naming the share that its custodian did not get from the
            dealer; seal_mismatch, naming the shares that the dealer dealt inconsistently.
    """
    # 1
    if len(commitments) != of.n:
        raise Refusal(
            "seal_mismatch", f"the seal commits to {len(commitments)} shares, the round has {of.n} custodians"
        )
    shares = [of.read(document) for document in documents]
    for share, document in zip(shares, documents, strict=True):
        if document_digest(document) != commitments[share.index - 1]:
            raise Refusal(
                "share_false",
                f"share {share.index} has digest {document_digest(document)}, committed was {commitments[share.index - 1]}",
                hint="its custodian sent another share than the one acknowledged; use another custodian's",
            )
    # 2
    points = _points(shares)
    # 3
    derived = [replace(shares[0], index=x, share=interpolate(points, x)).encode() for x in range(1, of.n + 1)]
    wrong = [x for x, (d, c) in enumerate(zip(derived, commitments, strict=True), start=1) if document_digest(d) != c]
    if wrong:
        given = ", ".join(str(x) for x in sorted(points))
        raise Refusal(
            "seal_mismatch",
            f"the dealer was inconsistent: shares {given} match their commitments, but imply other shares for"
            f" {', '.join(map(str, wrong))} than were committed to",
            hint="the organizer made the seal with a wrong program or will; the round can't be trusted and should be voided",
        )


def _points(shares: Sequence[Share]) -> dict[int, bytes]:
    """The first k points by index; all shares must be of one seal, of different indices, of one length, on one polynomial."""
    if not shares:
        raise Refusal("share_missing", "there are no shares")
    first = shares[0]
    for share in shares[1:]:
        split = [(s.round, s.seal, s.k, s.n, len(s.share), s.rehearsal) for s in (first, share)]
        if split[0] != split[1]:
            raise Refusal("share_false", f"shares {first.index} and {share.index} are not of the same seal and split")
    points = {share.index: share.share for share in sorted(shares, key=lambda share: share.index)}
    if len(points) != len(shares):
        raise Refusal("share_false", "the same share stands there twice")
    if len(points) < first.k:
        raise Refusal(
            "share_missing",
            f"{len(points)} of the {first.k} shares that open seal {first.seal} are there",
            hint="ask a further custodian to release",
        )
    used = dict(list(points.items())[: first.k])
    for x, value in list(points.items())[first.k :]:
        if interpolate(used, x) != value:
            raise Refusal("share_false", f"share {x} does not agree with shares {', '.join(map(str, used))}")
    return used


# ---- envelopes -----------------------------------------------------------------------------------------------------


def wrap(document: bytes, recipient: str) -> bytes:
    """A share document as a binary age v1 file for one X25519 recipient `age1…`.

    Raises:
        Refusal: key_refused.
    """
    try:
        return bytes(pyrage.encrypt(document, [pyrage.x25519.Recipient.from_str(recipient)]))
    except pyrage.RecipientError as error:
        raise Refusal("key_refused", f"{recipient!r} is not an age recipient") from error


def unwrap(envelope: bytes, identity: str) -> bytes:
    """The share document in an age file.

    Args:
        envelope: the age file's bytes.
        identity: the secret text `AGE-SECRET-KEY-1…`, as keys.Keys.age_identity.

    Raises:
        Refusal: key_refused, where identity is malformed; share_unreadable, where the file does not open with it.
    """
    try:
        key = pyrage.x25519.Identity.from_str(identity)
    except pyrage.IdentityError as error:
        raise Refusal("key_refused", "the age identity is malformed (AGE-SECRET-KEY-1…)") from error
    try:
        return bytes(pyrage.decrypt(envelope, [key]))
    except pyrage.DecryptError as error:
        raise Refusal(
            "share_unreadable",
            f"the envelope does not open with the identity of {key.to_public()}",
            hint="is this the key folder of the custodian whom the envelope is for? or use the backup identity",
        ) from error


def envelope(document: bytes, *, index: int, to: str, main: str, backup: str | None) -> dict[str, Any]:
    """The envelope {index, to, main, backup} of a share document for a custodian's recipients."""
    return {
        "index": index,
        "to": to,
        "main": base64.b64encode(wrap(document, main)).decode(),
        "backup": base64.b64encode(wrap(document, backup)).decode() if backup else None,
    }


def envelope_digest(envelope: Mapping[str, Any]) -> str:
    """What HoldoutSealed's shares say of an envelope: the digest of its canonical JSON."""
    return digests.of_json({name: envelope[name] for name in ("index", "to", "main", "backup")})


def open_envelope(envelope: Mapping[str, Any], identity: str, *, share: Mapping[str, Any], of: Split) -> bytes:
    """The share document in an envelope, opened with the main or the backup identity and checked against round and seal.

    1. The envelope is the one that the seal's record names.
    2. One of its age files opens with the identity.
    3. The document is one of the split (round, seal, type, k of n), of this index, and has the committed digest.

    Args:
        envelope: {index, to, main, backup}.
        identity: the custodian's secret text.
        share: this custodian's element of HoldoutSealed's shares: {index, to, commitment, envelope}.
        of: what it must be a share of; of a rehearsal, a share of any real seal is refused.

    Raises:
        Refusal: key_refused, share_unreadable, share_false.
    """
    # 1
    if set(envelope) != {"index", "to", "main", "backup"}:
        raise Refusal(
            "share_unreadable", f"the envelope for {share['to']} has other fields than index, to, main, backup"
        )
    if envelope_digest(envelope) != share["envelope"]:
        raise Refusal("share_false", f"the envelope for {share['to']} is not the one that the seal's record names")
    # 2
    files = [_unbase64(envelope[name], what="an age file") for name in ("main", "backup") if envelope[name] is not None]
    if not files:
        raise Refusal("share_unreadable", f"the envelope for {share['to']} holds no age file, neither main nor backup")
    document: bytes | None = None
    for position, file in enumerate(files):
        try:
            document = unwrap(file, identity)
            break
        except Refusal:
            if position == len(files) - 1:
                raise
    assert document is not None
    # 3
    content = of.read(document)
    if document_digest(document) != share["commitment"] or content.index != share["index"]:
        raise Refusal(
            "share_false",
            f"the share in the envelope for {share['to']} is not the one that the seal commits to",
            hint="tell the organizer before the round opens: this seal can't be opened with your share",
        )
    return document


def _unbase64(text: object, *, what: str) -> bytes:
    try:
        if isinstance(text, str):
            data = base64.b64decode(text, validate=True)
            if base64.b64encode(data).decode() == text:
                return data
    except (binascii.Error, ValueError):
        pass
    raise Refusal("share_unreadable", f"{what} is not base64")
