"""Digests, canonical JSON (RFC 8785), and the root of an RFC 6962 Merkle tree.

A digest is the string `sha256:` and 64 lower-case hex digits, everywhere: records, manifests, file names, MLflow tags.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring
from pathlib import Path
from typing import IO, Any

from acclimate_competitions.errors import Refusal

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHUNK = 1 << 20
_LARGEST_INTEGER = 2**53 - 1

Json = Any
"""None, bool, int, float, str, list or dict of these: what JSON can say."""


def is_digest(value: object) -> bool:
    """Whether value is a well-formed digest string."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def of_bytes(data: bytes) -> str:
    """Digest of bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def of_stream(stream: IO[bytes]) -> tuple[str, int]:
    """Digest and size in bytes of what a binary stream still holds, in constant memory."""
    state, size = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK):
        state.update(chunk)
        size += len(chunk)
    return "sha256:" + state.hexdigest(), size


def of_file(path: Path) -> str:
    """Digest of a file's bytes, in constant memory."""
    with path.open("rb") as stream:
        return of_stream(stream)[0]


def of_json(value: Json) -> str:
    """Digest of a value's canonical JSON."""
    return of_bytes(canonical(value))


def of_tree(files: Iterable[tuple[str, Path]]) -> str:
    """Digest over named files: of the canonical JSON of {name: digest}."""
    return of_json({name: of_file(path) for name, path in files})


def canonical(value: Json) -> bytes:
    """RFC 8785 canonical JSON: no blanks, keys by UTF-16 code units, numbers as ECMAScript writes them.

    Raises:
        Refusal: not_canonical, for NaN, infinities, integers beyond ±(2^53 − 1), lone surrogates, and types JSON lacks.
    """
    parts: list[str] = []
    try:
        _write(value, parts)
        return "".join(parts).encode("utf-8")
    except RecursionError as error:
        raise Refusal("not_canonical", "the value is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise Refusal("not_canonical", f"a string holds a lone surrogate: {error.object[error.start]!r}") from error


def parse_canonical(data: bytes) -> Json:
    """The value of bytes that are canonical JSON.

    Raises:
        Refusal: not_canonical, where serializing the parsed value would not give the same bytes (doubled keys, blanks,
            another order, another spelling of a number or character).
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise Refusal("not_canonical", f"not JSON: {error}") from error
    if canonical(value) != data:
        raise Refusal("not_canonical", "the bytes are JSON, but not in canonical form (RFC 8785)")
    return value


def _integer(text: str) -> int | float:
    # ECMAScript writes floats below 10^21 without a point, so beyond 2^53 - 1 digits alone say a float.
    return value if len(text) < 18 and abs(value := int(text)) <= _LARGEST_INTEGER else float(text)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


def _write(value: Json, parts: list[str]) -> None:
    # Most values are plain text: asked first, as the order of the questions is what this costs.
    if type(value) is str:
        parts.append(encode_basestring(value))
    elif value is None or isinstance(value, bool):
        parts.append({None: "null", True: "true", False: "false"}[value])
    elif isinstance(value, str):
        parts.append(_string(value))
    elif isinstance(value, int):
        if abs(value) > _LARGEST_INTEGER:
            raise Refusal("not_canonical", f"integer {value} is beyond 2^53 - 1", hint="write it as a string")
        parts.append(int.__repr__(value))
    elif isinstance(value, float):
        parts.append(number(value))
    elif isinstance(value, list | tuple):
        parts.append("[")
        for position, item in enumerate(value):
            if position:
                parts.append(",")
            _write(item, parts)
        parts.append("]")
    elif isinstance(value, dict):
        parts.append("{")
        for position, key in enumerate(_sorted(value)):
            if position:
                parts.append(",")
            parts.append(_string(key))
            parts.append(":")
            _write(value[key], parts)
        parts.append("}")
    else:
        raise Refusal("not_canonical", f"JSON has no {type(value).__name__}")


def _sorted(keys: Iterable[object]) -> list[Any]:
    """Keys by their UTF-16 code units, which for ASCII is Python's order.

    Raises:
        Refusal: not_canonical.
    """
    known = list(keys)
    try:
        plain = "".join(known).isascii()  # type: ignore[arg-type]
    except TypeError:
        plain = False
    return sorted(known, key=None if plain else _utf16)


def _utf16(key: object) -> bytes:
    if not isinstance(key, str):
        raise Refusal("not_canonical", f"an object's key is {type(key).__name__}, not a string")
    return key.encode("utf-16-be", "surrogatepass")


def _string(value: str) -> str:
    # What json.dumps does with ensure_ascii=False: it escapes exactly what RFC 8785 escapes, in the same spelling.
    return encode_basestring(value)


def number(value: float) -> str:
    """A float as ECMAScript's Number.prototype.toString writes it (RFC 8785, 3.2.2.3).

    Raises:
        Refusal: not_canonical, for NaN and infinities.
    """
    if not math.isfinite(value):
        raise Refusal("not_canonical", f"JSON has no {value}")
    if value == 0:
        return "0"
    # Python's repr gives the same shortest round-trip digits; only their layout differs. float() turns NumPy's subclass into one that prints plainly.
    mantissa, _, exponent = repr(abs(float(value))).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len((whole + fraction).lstrip("0")))
    digits = digits.rstrip("0") or "0"
    count = len(digits)
    if count <= point <= 21:
        text = digits + "0" * (point - count)
    elif 0 < point <= 21:
        text = digits[:point] + "." + digits[point:]
    elif -6 < point <= 0:
        text = "0." + "0" * -point + digits
    else:
        power = point - 1
        text = digits[0] + ("." + digits[1:] if count > 1 else "") + f"e{'+' if power > 0 else '-'}{abs(power)}"
    return "-" + text if value < 0 else text


def leaf_hash(data: bytes) -> bytes:
    """RFC 6962 hash of a leaf: sha256(0x00 ‖ data)."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """RFC 6962 hash of an inner node: sha256(0x01 ‖ left ‖ right)."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def root_of_hashes(hashes: Sequence[bytes]) -> bytes:
    """RFC 6962 Merkle tree hash over leaf hashes (32 bytes each); sha256 of nothing for an empty tree."""
    if not hashes:
        return hashlib.sha256(b"").digest()
    level = list(hashes)
    while len(level) > 1:
        # Pairing from the left, with an odd last node carried up unchanged, gives RFC 6962's split at the largest power of two.
        paired = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + ([level[-1]] if len(level) % 2 else [])
    return level[0]


def root_of_leaves(leaves: Iterable[bytes]) -> str:
    """RFC 6962 root over leaves' data, as a digest string."""
    return "sha256:" + root_of_hashes([leaf_hash(leaf) for leaf in leaves]).hex()
