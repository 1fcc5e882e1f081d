r"""The records of the log: their fields, their bytes, their signatures.

A record is canonical JSON with `v` (1), `type`, `round` (absent in RoundDefined, whose id is made from its own content, and in LogKeyRotated), `at`
(receipt time by the database's clock, RFC 3339, UTC, microseconds) and the fields of its type. A signed record also has
`by` (the signer's Ed25519 public key, base64) and `sig`, the signature over

    "acclimate/" + type + "/v1\n" ‖ canonical JSON of the record without `at`, `sig` and `approvals`

`at` is outside the signature because the server sets it when it accepts the record (decision 0002).
"""

import base64
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

MAX_BYTES = 65_535

# type -> (fields it must have, fields it may have, whether it is signed)
FIELDS: dict[str, tuple[frozenset[str], frozenset[str], bool]] = {
    name: (frozenset(required.split()), frozenset(optional.split()), signed)
    for name, required, optional, signed in [
        (
            "RoundDefined",
            "competition name definition files recipe scorer policy code opens closes closes_latest grace release_by"
            " k custodians log witnesses quorum organizer evaluators",
            "predecessor auditor id_digits",
            True,
        ),
        ("HoldoutSealed", "seal format size ciphertext block_root rows row_root shares", "", True),
        ("ShareAcknowledged", "seal index commitment", "", True),
        ("RoundOpened", "seal", "", False),
        ("ClosingExtended", "closes", "", True),
        ("EntrantRegistered", "entrant ed25519 conflicts", "", True),
        ("SubmissionCommitted", "entrant commitment", "", True),
        ("SubmissionAccepted", "entrant commitment", "", True),
        ("SubmissionRefused", "entrant commitment reason", "", True),
        ("SubmissionWithdrawn", "entrant commitment", "", True),
        ("RoundClosed", "count entries_root forfeited", "", False),
        (
            "ModelPrepared",
            "submission task seed recipe base code hardware",
            "prepared candidates selected cost diverged failed micro_batch libraries",
            True,
        ),
        ("PreparationFinished", "count root", "", False),
        ("AuditDrawn", "secret", "", True),
        ("PreparationAudited", "submission task seed prepared agrees tolerance hardware reason", "", True),
        ("ShareReleased", "seal index document", "", True),
        ("HoldoutOpened", "key plaintext row_root", "", False),
        (
            "ModelEvaluated",
            "submission task seed protocol prepared predictions count",
            "hardware given_up libraries",
            True,
        ),
        ("EvaluationFinished", "count root", "", False),
        ("RankingPublished", "ranking policy reason", "", True),
        ("RankingRevised", "ranking policy reason", "correction", True),
        ("RoundAudited", "bundle ranking checks", "", True),
        ("RoundVoided", "reason", "predecessor phase approvals", True),
        ("LogKeyRotated", "old new reason approvals", "", True),
    ]
}

ROUNDLESS = frozenset({"RoundDefined", "LogKeyRotated"})
"""Types without a field `round`: one makes the round's id, the other is about the log."""
ID_DIGITS = 32
"""RoundDefined's id_digits, and so many digits its round's id has: two contents of one id can't be found (decision 0013)."""
_OLDER_ID_DIGITS = 12
_ROUND_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}-[a-z0-9][a-z0-9.-]{0,31}-[0-9a-f]{12,32}")
LONGEST_ROUND_ID = 63 + 1 + 32 + 1 + 32
MOST_LIBRARIES = 32
_LIBRARY = re.compile(r"[0-9A-Za-z][0-9A-Za-z._+!-]{0,63}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")
_UNSIGNED = ("at", "sig", "approvals")
LONGEST_REASON = 2000
"""Characters that the reason of a SubmissionRefused may have."""
LONGEST_LIST = 40_000
"""Characters of the reason of a hand-over of the log's key, which names each round that is given up with it."""


def _form(value: object, form: str) -> bool:
    """Whether a field's value has the form that the rules may rely on."""
    match form:
        case "digest":
            return digests.is_digest(value)
        case "digest or null":
            return value is None or digests.is_digest(value)
        case "boolean":
            return isinstance(value, bool)
        case "amount":
            return _form(value, "measure") and value is not None and value >= 0  # type: ignore[operator]
        case "auditor":
            return _object(value, name="text", ed25519="text", draw="digest")
        case "checks":
            return _object(value, ok="number", failed="number", not_checked="number")
        case "time":
            return isinstance(value, str) and _TIME.fullmatch(value) is not None
        case "number":
            return type(value) is int and value >= 0
        case "id digits":
            return type(value) is int and value == ID_DIGITS
        case "number or null":
            return value is None or (type(value) is int and value >= 0)
        case "text":
            return isinstance(value, str)
        case "texts":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "object":
            return isinstance(value, dict)
        case "words" | "reason" | "long reason":
            most = {"reason": LONGEST_REASON, "long reason": LONGEST_LIST}.get(form, MAX_BYTES)
            return isinstance(value, str) and bool(value.strip()) and len(value) <= most
        case "tally":
            return _object(value, count="number", root="digest")
        case "failure":
            return isinstance(value, dict) and _object(
                {"given_up": True, **value}, reason="words", log="digest", given_up="true"
            )
        case "true":
            return value is True
        case "choice or null":
            return value is None or _object(value, lr="measure", epoch="number or null")
        case "custodians" | "shares" | "approvals" | "candidates":
            return isinstance(value, list) and all(_object(item, **_LISTS[form]) for item in value)
        case "digests":
            return isinstance(value, dict) and all(digests.is_digest(item) for item in value.values())
        case "libraries":
            parts = [*value, *value.values()] if isinstance(value, dict) else []
            fits = 0 < len(parts) <= 2 * MOST_LIBRARIES
            return fits and all(isinstance(part, str) and _LIBRARY.fullmatch(part) for part in parts)
        case "organizer":
            return isinstance(value, dict) and _object({"name": "", **value}, name="text", ed25519="text")
        case "text or null":
            return value is None or isinstance(value, str)
        case "measure":
            if isinstance(value, int | float) and not isinstance(value, bool):
                return math.isfinite(value)
            return value is None
        case _:
            raise AssertionError(f"no form {form}")


# What the objects of a list have: field -> a name of _form.
_LISTS: dict[str, dict[str, str]] = {
    "custodians": {"name": "text", "age": "text", "ed25519": "text", "backup": "text or null"},
    "shares": {"index": "number", "to": "text", "commitment": "digest", "envelope": "digest"},
    "approvals": {"by": "text", "sig": "text"},
    "candidates": {"lr": "measure", "epoch": "number", "validation": "measure"},
}


def _object(value: object, **parts: str) -> bool:
    """Whether a value is an object of exactly these fields, each of its form."""
    return (
        isinstance(value, dict)
        and set(value) == set(parts)
        and all(_form(value[name], form) for name, form in parts.items())
    )


# What each field holds, where the rules rely on it: a name of _form.
_FORMS: dict[str, str] = {
    name: form
    for form, names in {
        "digest": "definition recipe scorer policy seal ciphertext block_root row_root commitment document entries_root root key"
        " plaintext predictions ranking prepared base code bundle correction",
        "time": "opens closes closes_latest release_by",
        "number": "k quorum grace size rows index submission count micro_batch",
        "number or null": "seed",
        "id digits": "id_digits",
        "text": "competition name log entrant ed25519 task protocol reason format secret old new predecessor phase",
        "texts": "witnesses evaluators conflicts",
        "object": "cost",
        "digests": "files",
        "organizer": "organizer",
        "words": "hardware diverged",
        "libraries": "libraries",
        "reason": "given_up",
        "tally": "forfeited",
        "failure": "failed",
        "choice or null": "selected",
        "candidates": "candidates",
        "boolean": "agrees",
        "amount": "tolerance",
        "auditor": "auditor",
        "checks": "checks",
        "custodians": "custodians",
        "shares": "shares",
        "approvals": "approvals",
    }.items()
    for name in names.split()
}
# A field that holds something else in one type of record than in the others.
_FORMS_OF: dict[tuple[str, str], str] = {
    ("SubmissionRefused", "reason"): "reason",
    ("PreparationAudited", "prepared"): "digest or null",
    ("LogKeyRotated", "reason"): "long reason",
}


@dataclass(frozen=True)
class Record:
    """One record, as parsed from or about to become a log entry's bytes.

    Attributes:
        type: a key of FIELDS.
        round: the round's id; for RoundDefined the id that follows from its content; empty where a record is of no round.
        at: receipt time, UTC.
        fields: the fields of its type.
        by: signer's public key, base64, or None.
        sig: signature, base64, or None.
    """

    type: str
    round: str
    at: datetime
    fields: Mapping[str, Any]
    by: str | None = None
    sig: str | None = None

    def document(self) -> dict[str, Any]:
        """The record as JSON-ready data."""
        return assemble(self.type, self.round, self.fields, by=self.by) | {
            "at": format_time(self.at),
            **({"sig": self.sig} if self.sig is not None else {}),
        }

    def encode(self) -> bytes:
        """The log entry's bytes.

        Raises:
            Refusal: not_canonical; record_invalid, where they are more than parse takes.
        """
        data = digests.canonical(self.document())
        if len(data) > MAX_BYTES:
            raise Refusal("record_invalid", f"{self.type} has {len(data)} bytes, at most {MAX_BYTES} are allowed")
        return data

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def assemble(kind: str, round_id: str, fields: Mapping[str, Any], *, by: str | None) -> dict[str, Any]:
    """The record's document without `at` and `sig`."""
    document: dict[str, Any] = {"v": 1, "type": kind, **fields}
    if kind not in ROUNDLESS:
        document["round"] = round_id
    if by is not None:
        document["by"] = by
    return document


def statement(kind: str, round_id: str, fields: Mapping[str, Any], *, by: str) -> bytes:
    """The bytes that a signature of this record covers."""
    document = assemble(kind, round_id, fields, by=by)
    covered = {name: value for name, value in document.items() if name not in _UNSIGNED}
    return f"acclimate/{kind}/v1\n".encode() + digests.canonical(covered)


def request_statement(path: str, query: str, *, by: str, log: str, challenge: str) -> bytes:
    """The bytes that the signature of a GET request covers; path without escapes, query as it is sent, without its question mark."""
    covered = {"method": "GET", "path": path, "query": query, "ed25519": by, "log": log, "challenge": challenge}
    return b"acclimate/request/v1\n" + digests.canonical(covered)


def sign(kind: str, round_id: str, fields: Mapping[str, Any], *, key: Ed25519PrivateKey) -> dict[str, Any]:
    """A signed request: {type, round, fields, by, sig}; the server adds `at` and appends it as a record.

    For RoundDefined give the empty string as round_id; the result's round is the id that follows from the content.
    """
    by = public_text(key.public_key())
    check_fields(kind, fields, signed=True)
    if kind == "RoundDefined":
        round_id = round_id_of(fields)
    sig = base64.b64encode(key.sign(statement(kind, round_id, fields, by=by))).decode()
    return {"type": kind, "round": round_id, "fields": dict(fields), "by": by, "sig": sig}


def approve(kind: str, round_id: str, fields: Mapping[str, Any], *, by: str, key: Ed25519PrivateKey) -> dict[str, str]:
    """A custodian's approval {by, sig} of a record that `by` signs (RoundVoided, by the organizer or another custodian)."""
    sig = base64.b64encode(key.sign(statement(kind, round_id, fields, by=by))).decode()
    return {"by": public_text(key.public_key()), "sig": sig}


def round_id_of(fields: Mapping[str, Any]) -> str:
    """A round's id: competition, name and the first 32 hex digits of the digest of RoundDefined's fields.

    A RoundDefined without id_digits is of a round that was defined before there was this field: 12 digits then.
    """
    count = ID_DIGITS if "id_digits" in fields else _OLDER_ID_DIGITS
    return f"{fields['competition']}-{fields['name']}-{digests.of_json(dict(fields)).removeprefix('sha256:')[:count]}"


def is_round_id(value: object) -> bool:
    """Whether a value that somebody gave can be a round's id."""
    return isinstance(value, str) and _ROUND_ID.fullmatch(value) is not None


def parse(data: bytes) -> Record:
    """The record of a log entry's bytes; Record.encode gives the same bytes back.

    Raises:
        Refusal: not_canonical or record_invalid.
    """
    if len(data) > MAX_BYTES:
        raise Refusal("record_invalid", f"a record has {len(data)} bytes, at most {MAX_BYTES} are allowed")
    document = digests.parse_canonical(data)
    if not isinstance(document, dict) or document.get("v") != 1 or isinstance(document.get("v"), bool):
        raise Refusal("record_invalid", "a record must be a JSON object with v = 1")
    kind = document.get("type")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise Refusal("record_invalid", f"unknown record type {kind!r}")
    known = {"v", "type", "at", "by", "sig"} | (set() if kind in ROUNDLESS else {"round"})
    fields = {name: value for name, value in document.items() if name not in known}
    signed = FIELDS[kind][2]
    check_fields(kind, fields, signed=signed)
    for name in ("by", "sig"):
        if isinstance(document.get(name), str) != signed or (name in document) != signed:
            raise Refusal("record_invalid", f"{kind}: field {name!r} must be {'text' if signed else 'absent'}")
    if kind not in ROUNDLESS and not isinstance(document.get("round"), str):
        raise Refusal("record_invalid", f"{kind}: field 'round' must be text")
    return Record(
        type=kind,
        round=round_id_of(fields) if kind == "RoundDefined" else document.get("round", ""),
        at=parse_time(document.get("at")),
        fields=fields,
        by=document.get("by"),
        sig=document.get("sig"),
    )


def parse_entry(data: bytes, index: int) -> Record:
    """The record of a log entry that somebody shows; where it is none, the refusal says which entry it is.

    Raises:
        Refusal: record_invalid, not_canonical, key_refused, …
    """
    try:
        return parse(data)
    except Refusal as refusal:
        hint = "whoever shows this shows no log of Acclimate: sign nothing, keep the message, and ask the server's operator"
        raise refusal.of(f"log entry {index}, as it was shown", hint=hint) from refusal


def check_fields(kind: str, fields: Mapping[str, Any], *, signed: bool) -> None:
    """Refuse fields that are missing or unknown for a record type.

    Raises:
        Refusal: record_invalid.
    """
    if kind not in FIELDS:
        raise Refusal("record_invalid", f"unknown record type {kind!r}")
    required, optional, must_sign = FIELDS[kind]
    if signed != must_sign:
        raise Refusal("record_invalid", f"{kind} must {'' if must_sign else 'not '}be signed")
    missing, extra = required - set(fields), set(fields) - required - optional
    if missing or extra:
        raise Refusal("record_invalid", f"{kind}: missing {sorted(missing)}, unknown {sorted(extra)}")
    for name, value in fields.items():
        form = _FORMS_OF.get((kind, name), _FORMS.get(name))
        if form is not None and not _form(value, form):
            raise Refusal("record_invalid", f"{kind}: {name} is {str(value)[:80]!r}, expected {_expected(form)}")


def _expected(form: str) -> str:
    known = {
        "digest": "a digest (sha256: and 64 hex digits)",
        "digest or null": "a digest (sha256: and 64 hex digits), or null",
        "boolean": "true or false",
        "amount": "a number from 0",
        "auditor": "an object of name, ed25519 and draw (a digest)",
        "checks": "an object of ok, failed and not_checked (whole numbers from 0)",
        "time": "a time such as 2027-03-01T00:00:00.000000Z",
        "number": "a whole number from 0",
        "number or null": "a whole number from 0, or null",
        "id digits": str(ID_DIGITS),
        "texts": "a list of texts",
        "object": "an object",
        "text": "text",
        "words": "text that is not blank",
        "reason": f"text that is not blank, of at most {LONGEST_REASON} characters",
        "long reason": f"text that is not blank, of at most {LONGEST_LIST} characters",
        "tally": "an object of count and root",
        "failure": "an object of reason (text that is not blank) and log (a digest), and given_up, if there, true",
        "libraries": f"an object of 1 to {MOST_LIBRARIES} names and their versions",
        "choice or null": "an object of lr and epoch, or null",
        "candidates": "a list of objects of lr, epoch, validation",
        "custodians": "a list of objects of name, age, ed25519, backup (a text, or null)",
        "shares": "a list of objects of index (a whole number from 0), to, commitment, envelope (two digests)",
        "approvals": "a list of objects of by and sig",
        "digests": "an object of digests",
        "organizer": "an object of ed25519 and, if wanted, name",
    }
    return known[form]


def was_given_up(record: Record) -> bool:
    """Whether a ModelPrepared or ModelEvaluated says that its round's organizer gave that work up."""
    return "given_up" in record.fields or "given_up" in record.fields.get("failed", {})


def verify(record: Record) -> None:
    """Check a signed record's signature against its own `by`; who may sign it is decided in rounds.py.

    Raises:
        Refusal: signature_invalid or key_refused.
    """
    if record.by is None or record.sig is None:
        raise Refusal("signature_invalid", f"{record.type} of round {record.round} is not signed")
    covered = statement(record.type, record.round, record.fields, by=record.by)
    check_signature(record.by, record.sig, covered, what=f"{record.type} of round {record.round}")


def check_signature(by: str, sig: str, covered: bytes, *, what: str) -> None:
    """Check one base64 signature by one base64 public key.

    Raises:
        Refusal: signature_invalid or key_refused.
    """
    key = public_key(by)
    try:
        raw = base64.b64decode(sig, validate=True)
        # The last character of 64 bytes' base64 has spare bits: one signature must have one spelling.
        if base64.b64encode(raw).decode() != sig:
            raise ValueError("another spelling")
        key.verify(raw, covered)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise Refusal("signature_invalid", f"the signature under {what} does not verify") from error


def public_text(key: Ed25519PublicKey) -> str:
    """A public key as base64 of its 32 bytes."""
    return base64.b64encode(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def public_key(text: str) -> Ed25519PublicKey:
    """The public key of base64 text.

    Raises:
        Refusal: key_refused, for malformed keys and those of low order (one fixed signature verifies for them under many
            messages, and the library accepts them).
    """
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
        if base64.b64encode(raw).decode() != text or len(raw) != 32:
            raise ValueError("not the base64 of 32 bytes")
        if raw in LOW_ORDER:
            raise ValueError("it is of low order")
        return Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise Refusal("key_refused", f"Ed25519 public key {text!r}: {error}") from error


def _low_order() -> frozenset[bytes]:
    # The torsion points' y coordinates, and those below 2^255 that are congruent to them, each with either sign bit.
    p = 2**255 - 19
    y8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
    ys = [0, 1, p - 1, p, p + 1, y8, p - y8]
    return frozenset((y | sign << 255).to_bytes(32, "little") for y in ys for sign in (0, 1))


LOW_ORDER = _low_order()
"""The 14 encodings of Ed25519 points of low order (RFC 8032 arithmetic; canonical and not)."""


def format_time(moment: datetime) -> str:
    """RFC 3339 in UTC with microseconds and Z."""
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no time zone")
    # Not strftime: its %Y writes the year 999 with three digits.
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def parse_time(text: object) -> datetime:
    """The moment of text as format_time writes it.

    Raises:
        Refusal: record_invalid.
    """
    try:
        if not isinstance(text, str) or not _TIME.fullmatch(text):
            raise ValueError("not RFC 3339 in UTC with microseconds")
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise Refusal(
            "record_invalid", f"time {text!r}: {error}", hint="such as 2027-03-01T00:00:00.000000Z"
        ) from error
