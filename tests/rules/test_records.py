"""Records: one form, signatures that cover what they must, and public keys that can be trusted to sign one message."""

import base64
import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import rounds_made
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import log
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

VECTORS = Path(__file__).parents[1] / "vectors"
DIGEST = "sha256:" + "ab" * 32
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
AT = datetime(2027, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def logged(kind="ShareAcknowledged", fields=None, *, key=KEY, at=AT, round_id="digits-1-0123456789ab"):
    request = records.sign(kind, round_id, fields or {"seal": DIGEST, "index": 1, "commitment": DIGEST}, key=key)
    return Record(kind, request["round"], at, request["fields"], request["by"], request["sig"])


def test_a_record_parses_to_itself_and_its_signature_verifies():
    record = logged()
    parsed = records.parse(record.encode())
    assert parsed == record
    records.verify(parsed)


moments = st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30), timezones=st.just(UTC))  # noqa: DTZ001
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(deadline=None)
@given(moments, texts, texts)
def test_what_parses_is_written_again_as_the_same_bytes(at, round_id, reason):
    record = logged("RoundVoided", {"reason": reason}, at=at, round_id=round_id)
    assert records.parse(record.encode()).encode() == record.encode()


@settings(deadline=None)
@given(moments)
def test_times_are_written_one_way(moment):
    text = records.format_time(moment)
    assert len(text) == 27
    assert records.parse_time(text) == moment
    assert records.format_time(moment.astimezone(timezone(timedelta(hours=5, minutes=45)))) == text


@pytest.mark.parametrize(
    "text",
    [
        "2027-03-01T00:00:00Z",
        "2027-03-01T00:00:00.000000+00:00",
        "2027-03-01T00:00:00.000000z",
        "2027-02-30T00:00:00.000000Z",
        "2027-03-01T24:00:00.000000Z",
        "0000-03-01T00:00:00.000000Z",
        "٢٠٢٧-03-01T00:00:00.000000Z",
        "2027-03-01T00:00:00.000000Z\n",
        None,
        5,
    ],
)
def test_other_spellings_of_time_are_refused(text):
    with pytest.raises(Refusal) as caught:
        records.parse_time(text)
    assert caught.value.code == "record_invalid"


def test_a_naive_time_is_never_written():
    with pytest.raises(ValueError, match="time zone"):
        records.format_time(datetime(2027, 3, 1))  # noqa: DTZ001


def _document(**changes):
    document = json.loads(logged().encode()) | changes
    return digests.canonical({name: value for name, value in document.items() if value is not ...})


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"v": True},
        {"v": ...},
        {"type": "ShareForged"},
        {"type": ["ShareAcknowledged"]},
        {"round": ...},
        {"round": 7},
        {"at": "today"},
        {"at": ...},
        {"by": ...},
        {"sig": None},
        {"extra": 1},
        {"seal": ...},
        {"seal": "sha256:abc"},
        {"seal": [DIGEST]},
        {"index": "1"},
        {"index": True},
        {"index": -1},
        {"index": 1.5},
        {"commitment": None},
    ],
)
def test_a_record_of_another_form_is_refused(changes):
    with pytest.raises(Refusal) as caught:
        records.parse(_document(**changes))
    assert caught.value.code == "record_invalid"


PREPARED = {
    "submission": 7, "task": "digit", "seed": 11, "recipe": DIGEST, "base": DIGEST, "code": DIGEST, "hardware": "cpu/x86_64",
}  # fmt: skip
FITTED = {
    "prepared": DIGEST,
    "candidates": [{"lr": None, "epoch": 0, "validation": 1.5}, {"lr": 0.002, "epoch": 6, "validation": None}],
    "selected": {"lr": None, "epoch": 0},
    "cost": {"tokens": 1},
}
NO_LIBRARIES = [
    None,
    {},
    [],
    "torch 2.13.0",
    {"torch": None},
    {"torch": 2},
    {"torch": ""},
    {"torch": "2.13 "},
    {"torch": "٢.13"},
    {"torch": "2" * 65},
    {"": "2.13.0"},
    {"to/rch": "2.13.0"},
    {f"l{n}": "1" for n in range(33)},
]
FAILED = {"failed": {"reason": "out of memory", "log": DIGEST}}


@pytest.mark.parametrize(
    "fields",
    [
        FITTED,
        FITTED | {"selected": None, "diverged": "the loss is NaN"},
        FITTED | {"micro_batch": 8},
        FITTED | {"libraries": {"torch": "2.13.0+cpu", "python": "3.13.0rc1", "jinja2": "1!3.1"}},
        FAILED,
        FAILED | {"micro_batch": 1},
        {"failed": FAILED["failed"] | {"given_up": True}},
    ],
)
def test_a_preparation_has_its_form(fields):
    record = logged("ModelPrepared", PREPARED | fields)
    assert records.parse(record.encode()) == record


@pytest.mark.parametrize(
    "fields",
    [
        {"failed": None},
        {"failed": {}},
        {"failed": "out of memory"},
        {"failed": {"reason": "", "log": DIGEST}},
        {"failed": {"reason": " ", "log": DIGEST}},
        {"failed": {"reason": "out of memory", "log": ""}},
        {"failed": {"reason": "out of memory"}},
        {"failed": {"reason": "out of memory", "log": DIGEST, "blame": "ada"}},
        *({"failed": FAILED["failed"] | {"given_up": other}} for other in (False, None, 1, "the organizer")),
        {"failed": {"reason": "out of memory", "given_up": True}},
        FITTED | {"diverged": ""},
        FITTED | {"diverged": None},
        FITTED | {"diverged": True},
        FITTED | {"prepared": None},
        FITTED | {"prepared": "sha256:ab"},
        FITTED | {"selected": {"lr": None}},
        FITTED | {"selected": {"lr": "0.002", "epoch": 6}},
        FITTED | {"selected": [0.002, 6]},
        FITTED | {"candidates": None},
        FITTED | {"candidates": [{"lr": 0.002, "epoch": 6}]},
        FITTED | {"candidates": [{"lr": 0.002, "epoch": True, "validation": 1.0}]},
        FITTED | {"candidates": [{"lr": 0.002, "epoch": 6, "validation": "low"}]},
        FITTED | {"cost": None},
        FITTED | {"base": None},
        FITTED | {"base": "model"},
        FITTED | {"recipe": 7},
        FITTED | {"code": ""},
        FITTED | {"micro_batch": None},
        FITTED | {"micro_batch": -1},
        FITTED | {"micro_batch": True},
        *({"libraries": other} | FITTED for other in NO_LIBRARIES),
        FITTED | {"hardware": None},
        FITTED | {"hardware": ""},
    ],
)
def test_a_preparation_of_another_form_is_refused(fields):
    document = json.loads(logged("ModelPrepared", PREPARED | FITTED).encode())
    document = {name: value for name, value in document.items() if name not in FITTED}
    for refused in (
        lambda: records.check_fields("ModelPrepared", PREPARED | fields, signed=True),
        lambda: records.parse(digests.canonical(document | fields)),
    ):
        with pytest.raises(Refusal, match="expected") as caught:
            refused()
        assert caught.value.code == "record_invalid"


EVALUATED = {
    "submission": 7, "task": "digit", "seed": None, "protocol": "direct", "prepared": DIGEST, "predictions": DIGEST, "count": 4,
}  # fmt: skip


def test_an_evaluation_that_was_given_up_says_why():
    plain, given_up = (logged("ModelEvaluated", EVALUATED | more) for more in ({}, {"given_up": "x" * 2000}))
    assert records.parse(given_up.encode()) == given_up
    assert b"given_up" not in plain.encode()
    assert [records.was_given_up(record) for record in (plain, given_up)] == [False, True]
    failed = [
        logged("ModelPrepared", PREPARED | {"failed": FAILED["failed"] | more}) for more in ({}, {"given_up": True})
    ]
    assert [records.was_given_up(record) for record in failed] == [False, True]


@pytest.mark.parametrize("libraries", NO_LIBRARIES, ids=range(len(NO_LIBRARIES)))
def test_an_evaluation_names_libraries_and_their_versions(libraries):
    record = logged("ModelEvaluated", EVALUATED | {"libraries": {"torch": "2.13.0+cpu"}})
    assert records.parse(record.encode()) == record
    with pytest.raises(Refusal, match="libraries is .* expected"):
        records.check_fields("ModelEvaluated", EVALUATED | {"libraries": libraries}, signed=True)


@pytest.mark.parametrize("reason", ["", " ", None, True, 7, "x" * 2001, ["crashes"]])
def test_an_evaluation_that_was_given_up_for_no_reason_is_refused(reason):
    with pytest.raises(Refusal, match="expected text that is not blank, of at most 2000 characters") as caught:
        records.check_fields("ModelEvaluated", EVALUATED | {"given_up": reason}, signed=True)
    assert caught.value.code == "record_invalid"


@pytest.mark.parametrize("value", [[], None, {"count": 1}, {"count": -1, "root": DIGEST}, {"count": 1, "root": "x"}])
def test_forfeited_commitments_are_a_count_and_a_root(value):
    fields = {"count": 1, "entries_root": DIGEST, "forfeited": {"count": 1, "root": DIGEST}}
    records.check_fields("RoundClosed", fields, signed=False)
    with pytest.raises(Refusal, match="expected an object of count and root"):
        records.check_fields("RoundClosed", fields | {"forfeited": value}, signed=False)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'{"v":1}', logged().encode() + b"\n", b"\xff"])
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(Refusal) as caught:
        records.parse(data)
    assert caught.value.code in ("record_invalid", "not_canonical")


@pytest.mark.parametrize("predecessor", [["digits-2027-1"], None, {"round": "digits-2027-1"}])
def test_a_predecessor_is_text(predecessor):
    with pytest.raises(Refusal, match="predecessor is .* expected text"):
        records.check_fields("RoundVoided", {"reason": "because", "predecessor": predecessor}, signed=True)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("HoldoutSealed", {"shares": [{"index": 1}]}),
        ("HoldoutSealed", {"shares": "none"}),
        ("RoundVoided", {"approvals": [1]}),
    ],
)
def test_a_list_of_other_objects_is_refused(kind, fields):
    required = dict.fromkeys("seal ciphertext block_root row_root".split(), DIGEST) | {
        "format": "x",
        "size": 1,
        "rows": 1,
    }
    fields = (required if kind == "HoldoutSealed" else {"reason": "because"}) | fields
    with pytest.raises(Refusal, match="expected a list of objects"):
        records.check_fields(kind, fields, signed=True)


def test_a_record_longer_than_parse_takes_is_not_written():
    with pytest.raises(Refusal, match="at most 65535"):
        logged("RoundVoided", {"reason": "x" * 70_000}).encode()
    with pytest.raises(Refusal, match="at most 65535"):
        records.parse(b'"' + b"x" * 70_000 + b'"')


def test_the_receipt_time_and_the_approvals_are_outside_the_signature_and_all_else_is_inside():
    record = logged("RoundVoided", {"reason": "flood"})
    approval = records.approve(
        "RoundVoided", record.round, record.fields, by=record.by, key=Ed25519PrivateKey.generate()
    )
    records.verify(
        Record(
            record.type,
            record.round,
            AT + timedelta(1),
            {**record.fields, "approvals": [approval]},
            record.by,
            record.sig,
        )
    )
    for changed in (
        Record(record.type, "another-round", AT, record.fields, record.by, record.sig),
        Record(record.type, record.round, AT, {"reason": "fire"}, record.by, record.sig),
        Record(record.type, record.round, AT, {**record.fields, "predecessor": "x"}, record.by, record.sig),
        Record("RankingRevised", record.round, AT, record.fields, record.by, record.sig),
        logged_by_another(record),
    ):
        with pytest.raises(Refusal) as caught:
            records.verify(changed)
        assert caught.value.code == "signature_invalid"


def logged_by_another(record):
    other = records.public_text(Ed25519PrivateKey.generate().public_key())
    return Record(record.type, record.round, record.at, record.fields, other, record.sig)


def test_each_bit_of_a_signature_matters():
    record = logged()
    raw = base64.b64decode(record.sig)
    for bit in range(0, 512, 7):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        sig = base64.b64encode(bytes(changed)).decode()
        with pytest.raises(Refusal) as caught:
            records.verify(Record(record.type, record.round, record.at, record.fields, record.by, sig))
        assert caught.value.code == "signature_invalid"


def test_a_signature_has_one_spelling():
    record = logged()
    last = record.sig[-3]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    other = record.sig[:-3] + alphabet[alphabet.index(last) ^ 1] + "=="
    assert base64.b64decode(other) == base64.b64decode(record.sig)
    for sig in (other, record.sig + "\n", record.sig.rstrip("="), "", None):
        with pytest.raises(Refusal) as caught:
            records.verify(Record(record.type, record.round, record.at, record.fields, record.by, sig))
        assert caught.value.code == "signature_invalid"


def _ed25519_cases():
    return json.loads((VECTORS / "ed25519.json").read_text())["cases"]


@pytest.mark.parametrize("case", _ed25519_cases(), ids=lambda case: str(case["case"]))
def test_the_signature_vectors_of_wycheproof_hold(case):
    key, sig, message = (bytes.fromhex(case[name]) for name in ("key", "signature", "message"))
    arguments = (base64.b64encode(key).decode(), base64.b64encode(sig).decode(), message)
    if case["valid"]:
        records.check_signature(*arguments, what="a vector")
    else:
        with pytest.raises(Refusal):
            records.check_signature(*arguments, what="a vector")


# ---- low order: Edwards arithmetic of its own, after RFC 8032, 5.1 --------------------------------------------------

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
ORDER = 2**252 + 27742317777372353535851937790883648493


def _decode(encoded):
    number = int.from_bytes(encoded, "little")
    y, sign = number % 2**255 % P, number >> 255
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    if x * x % P != square:
        return None
    return (P - x) % P if x % 2 != sign else x, y


def _add(a, b):
    (x1, y1), (x2, y2) = a, b
    product = D * x1 * x2 * y1 * y2 % P
    return (x1 * y2 + x2 * y1) * pow(1 + product, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - product, -1, P) % P


def _times(scalar, point):
    result = (0, 1)
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point, scalar = _add(point, point), scalar >> 1
    return result


def test_there_are_14_keys_of_low_order_and_each_is_one():
    assert len(records.LOW_ORDER) == 14
    for encoded in records.LOW_ORDER:
        assert _times(8, _decode(encoded)) == (0, 1)


def test_every_point_of_low_order_is_in_the_list_in_every_encoding():
    # ORDER times any point has an order that divides 8; some of these small multiples of it are all eight points.
    points, y = set(), 2
    while len(points) < 8:
        point = _decode(y.to_bytes(32, "little"))
        if point is not None:
            torsion = _times(ORDER, point)
            points |= {_times(i, torsion) for i in range(8)}
        y += 1
    for x, y in points:
        for spelled in (y, y + P):
            if spelled < 2**255:
                for sign in {x % 2} if x else {0, 1}:  # with x = 0 some decoders take either sign
                    assert (spelled | sign << 255).to_bytes(32, "little") in records.LOW_ORDER


@pytest.mark.parametrize("encoded", sorted(records.LOW_ORDER), ids=lambda encoded: encoded.hex()[:8])
def test_keys_of_low_order_are_refused(encoded):
    with pytest.raises(Refusal, match="low order") as caught:
        records.public_key(base64.b64encode(encoded).decode())
    assert caught.value.code == "key_refused"


def test_why_one_signature_serves_two_messages_under_a_key_of_low_order():
    identity = (1).to_bytes(32, "little")
    signature = identity + bytes(32)
    for message in (b"I withdraw", b"I submit"):
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, message)


@pytest.mark.parametrize("text", ["", "AAAA", "!" * 44, "A" * 44, base64.b64encode(bytes(33)).decode(), None, 7])
def test_malformed_keys_are_refused(text):
    with pytest.raises(Refusal) as caught:
        records.public_key(text)
    assert caught.value.code == "key_refused"


def test_the_id_of_a_round_follows_from_its_content():
    fields = {"competition": "digits", "name": "spring"}
    # Of a round that was defined before there was id_digits.
    assert records.round_id_of(fields) == "digits-spring-" + digests.of_json(fields)[7:19]
    assert records.round_id_of(fields) != records.round_id_of(fields | {"k": 2})
    bound = fields | {"id_digits": 32}
    assert records.round_id_of(bound) == "digits-spring-" + digests.of_json(bound)[7:39]


@pytest.mark.parametrize("value", [12, 31, 33, 64, 32.0, "32", True, None])
def test_a_round_has_no_other_id_digits_than_32(tmp_path, value):
    made = rounds_made.Made(tmp_path, log.Signer(rounds_made.ORIGIN, rounds_made.key("log")), None)
    fields = rounds_made.defined_fields(made) | {"id_digits": value}
    with pytest.raises(Refusal, match="id_digits is .*, expected 32") as caught:
        records.check_fields("RoundDefined", fields, signed=True)
    assert caught.value.code == "record_invalid"
