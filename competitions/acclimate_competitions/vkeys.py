"""Verifier keys as text (C2SP signed-note): `<name>+<8 hex digits of the key id>+<base64 of kind and public key>`.

The key id is the first 4 bytes of sha256(name ‖ newline ‖ kind ‖ public key). Kinds known here: 0x01, Ed25519, of logs; 0x04, of witnesses that cosign.
"""

import base64
import binascii
import hashlib
import re

from acclimate_competitions import records
from acclimate_competitions.errors import Refusal

ED25519 = 0x01
COSIGNATURE = 0x04
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f]")
_BLANK_OR_PLUS = re.compile(r"[\s+]")  # \s takes every Unicode space
_SURROGATE = re.compile("[\ud800-\udfff]")  # what Python makes of a command line that is not UTF-8


_WHOLE = "copy it again, whole: one line, name+8 hex digits+base64, as a key folder keeps it in log.vkey"
LONGEST = 200
"""Characters of a vkey that a RoundDefined may name."""
LONGEST_NAME = LONGEST - len("+00000000+") - 44
"""Characters of its name, then: the id has 8, kind and key 33 bytes, in base64."""


def is_name(name: str) -> bool:
    """Whether a key may have this name: not empty, UTF-8, no space of any kind, no plus, no control character."""
    return bool(name) and not any(kind.search(name) for kind in (_BLANK_OR_PLUS, _CONTROL, _SURROGATE))


def key_id(name: str, kind: int, public: bytes) -> bytes:
    """The 4 bytes by which signature lines name a key."""
    return hashlib.sha256(name.encode() + b"\n" + bytes([kind]) + public).digest()[:4]


def text(name: str, kind: int, public: bytes) -> str:
    """The vkey of a key."""
    return f"{name}+{key_id(name, kind, public).hex()}+{base64.b64encode(bytes([kind]) + public).decode()}"


def parse(vkey: str) -> tuple[str, int, bytes]:
    """(name, kind, public key) of a vkey; `text` gives the same text back.

    Raises:
        Refusal: key_refused, where it is malformed, of an unknown kind, or of low order.
    """
    parts = vkey.split("+", 2) if isinstance(vkey, str) else []
    if len(parts) != 3 or not is_name(parts[0]):
        raise Refusal("key_refused", f"{vkey!r} is no verifier key", hint=_WHOLE)
    raw = _unbase64(parts[2])
    if len(raw) != 33 or raw[0] not in (ED25519, COSIGNATURE):
        raise Refusal(
            "key_refused",
            f"verifier key of {parts[0]}: neither an Ed25519 key nor an Ed25519 cosignature key",
            hint=_WHOLE,
        )
    name, kind, public = parts[0], raw[0], raw[1:]
    records.public_key(base64.b64encode(public).decode())
    if text(name, kind, public) != vkey:
        raise Refusal(
            "key_refused",
            f"verifier key of {name}: key id {parts[1]}, expected {key_id(name, kind, public).hex()}",
            hint=_WHOLE,
        )
    return name, kind, public


def parse_witness(vkey: str) -> tuple[str, bytes]:
    """(name, public key) of a witness's vkey.

    Raises:
        Refusal: key_refused, as `parse`, and where it is not of the kind that cosigns.
    """
    name, kind, public = parse(vkey)
    if kind != COSIGNATURE:
        raise Refusal(
            "key_refused",
            f"the key of {name} is of kind {kind:#04x}, a witness's is of kind {COSIGNATURE:#04x}",
            hint="`acclimate witness keygen` prints a witness's key; a log's key cosigns nothing",
        )
    return name, public


def _unbase64(encoded: str) -> bytes:
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal("key_refused", "a verifier key is not base64: a part of it is missing", hint=_WHOLE) from error
    if base64.b64encode(data).decode() != encoded:
        raise Refusal("key_refused", "a verifier key is not base64 in its one form", hint=_WHOLE)
    return data
