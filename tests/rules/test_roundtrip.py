"""What parses is written again as the same bytes: for whatever we write, and for whatever else a parser takes."""

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import pyrage
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from acclimate import custody, log, notes
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SIGNER = log.Signer("log.example/acclimate", KEY)
PUBLIC = KEY.public_key().public_bytes_raw()

plain = st.text(st.characters(exclude_categories=["Cs", "Cc"]))
names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"], exclude_characters="+"), min_size=1, max_size=20)
hashes = st.binary(min_size=32, max_size=32)
sizes = st.integers(0, 2**63 - 1)
checkpoints = st.builds(
    log.Checkpoint, plain.filter(bool), sizes, hashes, st.lists(plain.filter(bool), max_size=3).map(tuple)
)

# ---- signed text ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(names, st.sampled_from([notes.ED25519, notes.COSIGNATURE]))
def test_a_verifier_key(name: str, kind: int) -> None:
    assume(notes.is_name(name))
    verifier = notes.Verifier(name, kind, PUBLIC)
    assert log.parse_vkey(verifier.text()) == verifier


@settings(deadline=None)
@given(checkpoints, st.lists(st.tuples(names, st.integers(0, 2**63 - 1)), max_size=4))
def test_a_cosigned_checkpoint(checkpoint: log.Checkpoint, witnesses: list[tuple[str, int]]) -> None:
    assume(all(notes.is_name(name) for name, _ in witnesses))
    text = log.sign_note(checkpoint.body(), SIGNER)
    text += "".join(notes.cosign(checkpoint.body(), name=name, key=KEY, time=time).line() for name, time in witnesses)
    parsed = log.parse_note(text)
    assert parsed.encode() == text
    assert log.parse_checkpoint(parsed.text) == checkpoint
    assert log.parse_checkpoint(parsed.text).body() == parsed.text
    for (name, time), line in zip(witnesses, parsed.signatures[1:], strict=True):
        assert notes.Verifier(name, notes.COSIGNATURE, PUBLIC).verify(parsed.text, line.data) == time


@settings(deadline=None)
@given(sizes, st.binary(min_size=1, max_size=300), st.lists(hashes, max_size=63), checkpoints)
def test_a_receipt(index: int, entry: bytes, proof: list[bytes], checkpoint: log.Checkpoint) -> None:
    receipt = log.Receipt(index, entry, tuple(proof), log.sign_note(checkpoint.body(), SIGNER))
    parsed = log.Receipt.parse(receipt.text())
    assert parsed == receipt
    assert parsed.text() == receipt.text()


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_a_proof_survives_its_base64(size: int, data: st.DataObject) -> None:
    leaves = [digests.leaf_hash(number.to_bytes(2, "big")) for number in range(size)]
    tree, index = log.Tree(leaves), data.draw(st.integers(0, size - 1))
    receipt = log.Receipt(
        index, b"entry", tuple(tree.inclusion_proof(index)), log.sign_note("a\n1\n" + "A" * 43 + "=\n", SIGNER)
    )
    again = log.Receipt.parse(receipt.text())
    log.verify_inclusion(leaves[index], again.proof, index=again.index, size=size, root=tree.root())


# ---- entries -------------------------------------------------------------------------------------------------------

json_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(0, 2**53 - 1)
digest_texts = hashes.map(lambda value: "sha256:" + value.hex())
measures = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53) + 1, 2**53 - 1)
times = st.datetimes().map(lambda moment: moment.isoformat(timespec="microseconds") + "Z")
anything = st.recursive(
    st.none() | st.booleans() | measures | json_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_texts, inner, max_size=3),
    max_leaves=6,
)


def objects(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.fixed_dictionaries(parts), max_size=3)


library_parts = st.from_regex(r"\A[0-9A-Za-z][0-9A-Za-z._+!-]{0,63}\Z")

# By the form that records.py says a field has.
FORMS: dict[str, st.SearchStrategy[Any]] = {
    "digest": digest_texts,
    "digest or null": st.none() | digest_texts,
    "time": times,
    "number": counts,
    "number or null": st.none() | counts,
    "id digits": st.just(32),
    "text": json_texts,
    "texts": st.lists(json_texts, max_size=3),
    "words": json_texts.filter(str.strip),
    "reason": json_texts.filter(str.strip),
    "long reason": json_texts.filter(str.strip),
    "boolean": st.booleans(),
    "amount": st.floats(0, allow_infinity=False) | counts,
    "object": st.dictionaries(json_texts, anything, max_size=3),
    "digests": st.dictionaries(json_texts, digest_texts, max_size=3),
    "organizer": st.fixed_dictionaries({"ed25519": json_texts}, optional={"name": json_texts}),
    "auditor": st.fixed_dictionaries({"name": json_texts, "ed25519": json_texts, "draw": digest_texts}),
    "libraries": st.dictionaries(library_parts, library_parts, min_size=1, max_size=3),
    "checks": st.fixed_dictionaries({"ok": counts, "failed": counts, "not_checked": counts}),
    "tally": st.fixed_dictionaries({"count": counts, "root": digest_texts}),
    "failure": st.fixed_dictionaries({"reason": json_texts.filter(str.strip), "log": digest_texts}),
    "choice or null": st.none() | st.fixed_dictionaries({"lr": measures, "epoch": st.none() | counts}),
    "candidates": objects(lr=measures, epoch=counts, validation=measures),
    "custodians": objects(name=json_texts, age=json_texts, ed25519=json_texts, backup=st.none() | json_texts),
    "shares": objects(index=counts, to=json_texts, commitment=digest_texts, envelope=digest_texts),
    "approvals": objects(by=json_texts, sig=json_texts),
}


@st.composite
def entries(draw: st.DrawFn) -> Record:
    """A record of any type, all of its fields of their forms and otherwise anything; its signature need not verify."""
    kind = draw(st.sampled_from(sorted(records.FIELDS)))
    required, optional, signed = records.FIELDS[kind]
    chosen = sorted(required | draw(st.sets(st.sampled_from(sorted(optional)))) if optional else required)
    forms = {name: records._FORMS_OF.get((kind, name), records._FORMS.get(name)) for name in chosen}
    fields = {name: draw(FORMS[form] if form is not None else anything) for name, form in forms.items()}
    round_id = records.round_id_of(fields) if kind == "RoundDefined" else ""
    round_id = draw(json_texts) if kind not in records.ROUNDLESS else round_id
    proof = {name: draw(json_texts) for name in ("by", "sig")} if signed else {}
    return Record(kind, round_id, records.parse_time(draw(times)), fields, **proof)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(entries())
def test_an_entry(record: Record) -> None:
    data = record.encode()
    parsed = records.parse(data)
    assert parsed == record
    assert parsed.encode() == data


def test_every_form_of_a_field_is_made_above() -> None:
    assert {*records._FORMS.values(), *records._FORMS_OF.values()} <= set(FORMS)


# ---- custody -------------------------------------------------------------------------------------------------------


@st.composite
def share_documents(draw: st.DrawFn, *, shortest: int = 1, longest: int = 64) -> custody.Share:
    n = draw(st.integers(1, 255))
    index, k = draw(st.integers(1, n)), draw(st.integers(1, n))
    share = draw(st.binary(min_size=shortest, max_size=longest))
    round_id = draw(st.one_of(st.none(), json_texts.filter(bool)))
    return custody.Share(round_id, draw(digest_texts), index, k, n, share, draw(st.booleans()))


@given(share_documents())
def test_a_share_document(share: custody.Share) -> None:
    document = share.encode()
    assert custody.parse_document(document, rehearsal=share.rehearsal) == share
    assert custody.parse_document(document, rehearsal=share.rehearsal).encode() == document
    with pytest.raises(Refusal) as refused:
        custody.parse_document(document, rehearsal=not share.rehearsal)
    assert refused.value.code == "share_false"


IDENTITIES = [pyrage.x25519.Identity.generate() for _ in range(2)]


@settings(deadline=None, max_examples=30)
@given(share_documents(shortest=32, longest=32), json_texts, st.booleans())
def test_an_envelope(share: custody.Share, to: str, backup: bool) -> None:
    document = share.encode()
    main, other = (str(identity.to_public()) for identity in IDENTITIES)
    made = custody.envelope(document, index=share.index, to=to, main=main, backup=other if backup else None)
    again = digests.parse_canonical(digests.canonical(made))
    assert again == made and custody.envelope_digest(again) == digests.of_bytes(digests.canonical(made))
    named = {
        "index": share.index,
        "to": to,
        "commitment": digests.of_bytes(document),
        "envelope": digests.of_json(made),
    }
    for identity in IDENTITIES[: 1 + backup]:
        of = custody.Split(share.round or "any", share.seal, share.k, share.n, share.rehearsal, share.round is None)
        opened = custody.open_envelope(again, str(identity), share=named, of=of)
        assert opened == document


# ---- whatever else is taken ----------------------------------------------------------------------------------------


def _checkpoint(data: bytes) -> bytes:
    note = log.parse_note(data)
    return (log.parse_checkpoint(note.text).body() + note.encode()[len(note.text) :]).encode()


TREE = log.Tree([digests.leaf_hash(bytes([i])) for i in range(9)])
NOTE = log.sign_checkpoint(SIGNER, 9, TREE.root()) + notes.cosign(log.checkpoint(SIGNER.origin, 9, TREE.root()), name="w", key=KEY, time=1).line()  # fmt: skip
ENTRY = (
    json.dumps({"at": "2027-03-01T00:00:00.000000Z", "by": "x", "fields": 1}, separators=(",", ":"))
    .encode()
    .replace(
        b'"fields":1', b'"closes":"2027-03-01T00:00:00.000000Z","round":"r","sig":"y","type":"ClosingExtended","v":1'
    )
)
SHARE = custody.Share("r", "sha256:" + "5e" * 32, 2, 2, 3, b"share").encode()
PARSERS: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "note": (NOTE.encode(), lambda data: log.parse_note(data).encode().encode()),
    "checkpoint": (NOTE.encode(), _checkpoint),
    "vkey": (SIGNER.vkey.encode(), lambda data: log.parse_vkey(data.decode("utf-8", "surrogateescape")).text().encode()),
    "receipt": (
        log.Receipt(4, b"entry", tuple(TREE.inclusion_proof(4)), NOTE).text().encode(),
        lambda data: log.Receipt.parse(data).text().encode(),
    ),
    "entry": (digests.canonical(json.loads(ENTRY)), lambda data: records.parse(data).encode()),
    "share document": (SHARE, lambda data: custody.parse_document(data).encode()),
    "JSON": (
        b'{"a":[1,-0.5,1e+21,null],"b":"\\u0001"}', lambda data: digests.canonical(digests.parse_canonical(data))
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PARSERS)
def test_what_a_parser_takes_of_changed_bytes_it_writes_the_same(what: str) -> None:
    """A few bytes replaced, put in, taken out or moved, 3,000 times: most are refused, and what isn't comes back the same."""
    good, through = PARSERS[what]
    assert through(good) == good
    draw, taken = random.Random(what), 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 3)):
            start = draw.randrange(len(data))
            end = min(len(data), start + draw.randrange(4))
            data[start:end] = draw.choice([b"", draw.randbytes(1), bytes([draw.choice(good)]), data[end : end + 3] + data[start:end]])  # fmt: skip
        try:
            again = through(bytes(data))
        except Refusal:
            continue
        assert again == bytes(data)
        taken += bytes(data) != good
    assert taken < 3000


@given(st.binary(max_size=200))
def test_no_bytes_are_anything_but_taken_or_refused(data: bytes) -> None:
    for _, through in PARSERS.values():
        for given_ in (data, base64.b64encode(data), NOTE.encode() + data):
            try:
                assert through(given_) == given_
            except Refusal as refusal:
                assert refusal.code and refusal.sentence
