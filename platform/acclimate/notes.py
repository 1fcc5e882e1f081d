r"""Signed notes (C2SP signed-note): text with signature lines below, and the keys that verify them.

    example.org/log                                              the text: lines, the last one ended too
    3
    RcCI1Nk56ZcSmIEfIn0SleqtV7uvrlXNccFx595Iwl0=
                                                                 an empty line
    — example.org/log 9qOJvQ…                                    em dash, key's name, base64 of key id and signature

A signature is from the key whose name and id the line has; lines of unknown keys are ignored, a bad line of a known key refuses the whole
note. Two kinds of keys are known here: 0x01, Ed25519 over the text, for logs; and 0x04, a witness's cosignature/v1 of a
checkpoint, Ed25519 over "cosignature/v1\ntime <seconds>\n" ‖ text with the time before the signature (C2SP tlog-cosignature).
What parses is written again as the same bytes.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from acclimate_competitions import vkeys
from acclimate_competitions.errors import Refusal
from acclimate_competitions.vkeys import COSIGNATURE, ED25519, is_name

__all__ = [
    "COSIGNATURE", "ED25519", "LARGEST_NOTE", "MOST_SIGNATURES", "Note", "Opened", "Signature", "Signer", "Verifier", "cosign", "is_name",
    "open_note", "parse_note", "parse_vkey", "sign_note",
]  # fmt: skip

MOST_SIGNATURES = 100
LARGEST_NOTE = 1_000_000
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f]")


@dataclass(frozen=True)
class Verifier:
    """A public key with the name that its signatures carry.

    Attributes:
        name: the log's origin, or the witness's name.
        kind: ED25519 or COSIGNATURE.
        public: the 32 bytes of the Ed25519 public key.
    """

    name: str
    kind: int
    public: bytes

    @property
    def key_id(self) -> bytes:
        """The first 4 bytes of sha256(name ‖ newline ‖ kind ‖ public key)."""
        return vkeys.key_id(self.name, self.kind, self.public)

    def text(self) -> str:
        """The vkey: `<name>+<8 hex digits of the key id>+<base64 of kind and public key>`."""
        return vkeys.text(self.name, self.kind, self.public)

    def covered(self, text: str, signature: bytes) -> tuple[int | None, bytes, bytes]:
        """(time or None, the bytes that were signed, the Ed25519 signature) of a signature under a note's text."""
        if self.kind == ED25519:
            return None, text.encode(), signature
        time = int.from_bytes(signature[:8], "big")
        return time, f"cosignature/v1\ntime {time}\n{text}".encode(), signature[8:]

    def verify(self, text: str, signature: bytes) -> int | None:
        """Check one signature under a note's text.

        Returns:
            For a witness the time of its cosignature, seconds since 1970; for a log None.

        Raises:
            Refusal: proof_invalid.
        """
        time, covered, raw = self.covered(text, signature)
        try:
            if len(raw) != 64 or (time or 0) >= 2**63:
                raise ValueError
            Ed25519PublicKey.from_public_bytes(self.public).verify(raw, covered)
        except (InvalidSignature, ValueError) as error:
            raise Refusal(
                "proof_invalid",
                f"the signature of {self.name} (key {self.key_id.hex()}) does not verify",
                hint="the note was changed, or somebody else signed it",
            ) from error
        return time


def parse_vkey(text: str) -> Verifier:
    """The verifier of a vkey; Verifier.text gives the same text back.

    Raises:
        Refusal: key_refused, where it is malformed, of an unknown kind, or of low order.
    """
    return Verifier(*vkeys.parse(text))


@dataclass(frozen=True)
class Signer:
    """A log's key: signs notes under the log's origin.

    Attributes:
        origin: the log's name, such as `example.org/acclimate`.
        key: its Ed25519 key.
    """

    origin: str
    key: Ed25519PrivateKey = field(repr=False)

    def __post_init__(self) -> None:
        if not is_name(self.origin):
            raise Refusal(
                "config_invalid", f"origin {self.origin!r} is empty or holds a blank, plus or control character"
            )

    @property
    def verifier(self) -> Verifier:
        """The public side."""
        return Verifier(self.origin, ED25519, self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    @property
    def vkey(self) -> str:
        """The text by which others know this log's key."""
        return self.verifier.text()


@dataclass(frozen=True)
class Signature:
    """One signature line: the key's name, its id (4 bytes), and the bytes that its kind of key understands."""

    name: str
    key_id: bytes
    data: bytes

    def line(self) -> str:
        """The line with its newline."""
        return f"— {self.name} {base64.b64encode(self.key_id + self.data).decode()}\n"


@dataclass(frozen=True)
class Note:
    """A note as parsed; nothing in it is verified yet.

    Attributes:
        text: what is signed, with its final newline.
        signatures: in the order of their lines.
    """

    text: str
    signatures: tuple[Signature, ...]

    def encode(self) -> str:
        """The note."""
        return self.text + "\n" + "".join(signature.line() for signature in self.signatures)


@dataclass(frozen=True)
class Opened:
    """A note whose text is vouched for.

    Attributes:
        text: the signed text.
        signed: vkey -> time of the cosignature (None for keys of kind ED25519), for each known key that signed.
    """

    text: str
    signed: dict[str, int | None]


def sign_note(text: str, *signers: Signer) -> str:
    """The note of a text under one or more keys.

    Raises:
        Refusal: proof_invalid, where the text can't be a note's.
    """
    signatures = tuple(
        Signature(s.origin, s.verifier.key_id, s.key.sign(text.encode("utf-8", "surrogatepass"))) for s in signers
    )
    note = Note(text, signatures).encode()
    parse_note(note)
    return note


def cosign(text: str, *, name: str, key: Ed25519PrivateKey, time: int) -> Signature:
    """A witness's cosignature/v1 of a checkpoint's text at a time (seconds since 1970)."""
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    verifier = Verifier(name, COSIGNATURE, public)
    _, covered, _ = verifier.covered(text, time.to_bytes(8, "big"))
    return Signature(name, verifier.key_id, time.to_bytes(8, "big") + key.sign(covered))


def parse_note(note: str | bytes) -> Note:
    """A note's text and signatures, unverified; Note.encode gives the same text back.

    Raises:
        Refusal: proof_invalid.
    """
    whole = _text(note)
    text, blank, lines = whole.rpartition("\n\n")
    if not blank or not lines.endswith("\n"):
        raise _malformed("an empty line must part the text from its signatures, and the last line must end")
    signatures = tuple(_signature(line) for line in lines[:-1].split("\n"))
    if len(signatures) > MOST_SIGNATURES:
        raise _malformed(f"{len(signatures)} signatures, at most {MOST_SIGNATURES} are allowed")
    return Note(text + "\n", signatures)


def open_note(note: str | bytes, verifiers: Sequence[Verifier]) -> Opened:
    """The text of a note that at least one known key signed.

    1. The note parses.
    2. Every line whose name and key id are a known key's verifies; one that does not refuses the note.
    3. Lines of other keys are ignored, but at least one of a known key is there.

    Raises:
        Refusal: proof_invalid.
    """
    # 1
    parsed = parse_note(note)
    # 2
    known = {(verifier.name, verifier.key_id): verifier for verifier in verifiers}
    signed: dict[str, int | None] = {}
    for signature in parsed.signatures:
        verifier = known.get((signature.name, signature.key_id))
        if verifier is not None:
            signed.setdefault(verifier.text(), verifier.verify(parsed.text, signature.data))
    # 3
    if not signed:
        have = ", ".join(sorted(signature.name for signature in parsed.signatures))
        wanted = ", ".join(verifier.text() for verifier in verifiers) or "none"
        raise Refusal("proof_invalid", f"no known key signed this note: signed by {have}; known: {wanted}")
    return Opened(parsed.text, signed)


def _signature(line: str) -> Signature:
    dash, _, rest = line.partition(" ")
    name, _, encoded = rest.partition(" ")
    if dash != "—" or not is_name(name):
        raise _malformed(f"{line[:80]!r} is no signature line")
    data = _unbase64(encoded, f"the signature of {name}")
    if len(data) < 5:
        raise _malformed(f"the signature of {name} is too short")
    return Signature(name, data[:4], data[4:])


def _text(note: str | bytes) -> str:
    try:
        encoded = note.encode() if isinstance(note, str) else note
        if len(encoded) > LARGEST_NOTE:
            raise _malformed(f"{len(encoded)} bytes, at most {LARGEST_NOTE} are allowed")
        text = encoded.decode()
    except UnicodeError as error:
        raise _malformed("it is not UTF-8") from error
    if found := _CONTROL.search(text):
        raise _malformed(f"it holds the control character {found[0]!r}")
    return text


def _unbase64(text: str, what: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal("proof_invalid", f"{what} is not base64") from error
    if base64.b64encode(data).decode() != text:
        raise Refusal("proof_invalid", f"{what} is not base64 in its one form")
    return data


def _malformed(why: str) -> Refusal:
    return Refusal("proof_invalid", f"malformed note: {why}")
