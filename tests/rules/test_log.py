"""The log: proofs against published and own vectors, notes and receipts strict to the byte."""

import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import log
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "vectors"
REFERENCE = Path(os.environ.get("ACCLIMATE_REFERENCE_DATA", ROOT / ".." / "shared" / "data")) / "vectors" / "merkle"
ORIGIN = "log.example/acclimate"
SIGNER = log.Signer(ORIGIN, Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
EMPTY = hashlib.sha256(b"").digest()


def b64(text):
    return base64.b64decode(text) if text else b""


def leaf(i):
    return digests.leaf_hash(f"entry {i}".encode())


# ---- tree ----------------------------------------------------------------------------------------------------------


def reference_cases(name):
    path = REFERENCE / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"the reference data are not here: {path} (set ACCLIMATE_REFERENCE_DATA)")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_published_inclusion_cases_are_judged_as_published():
    cases = reference_cases("inclusion")
    assert len(cases) == 98
    for case in cases:
        proof = [b64(text) for text in case["proof"] or []]
        try:
            log.verify_inclusion(
                b64(case["leafHash"]), proof, index=case["leafIdx"], size=case["treeSize"], root=b64(case["root"])
            )
            refused = False
        except Refusal:
            refused = True
        assert refused == case["wantErr"], case["case"]


def test_the_published_consistency_cases_are_judged_as_published():
    cases = reference_cases("consistency")
    assert len(cases) == 98
    for case in cases:
        proof = [b64(text) for text in case["proof"] or []]
        try:
            log.verify_consistency(
                proof,
                first=case["size1"],
                first_root=b64(case["root1"]),
                second=case["size2"],
                second_root=b64(case["root2"]),
            )
            refused = False
        except Refusal:
            refused = True
        assert refused == case["wantErr"], case["case"]


def test_own_vectors_hold_for_roots_and_proofs():
    vectors = json.loads((VECTORS / "merkle.json").read_text())
    tree = log.Tree()
    hashes = [leaf(i) for i in range(21)]
    for size, text in enumerate(vectors["roots"]):
        assert tree.root() == log.root(hashes[:size]) == b64(text)
        if size < 21:
            tree.append(hashes[size])
    for case in vectors["inclusion"]:
        index, size = case["index"], case["size"]
        proof = tree.inclusion_proof(index, size)
        assert proof == log.inclusion_proof(hashes, index, size) == [b64(text) for text in case["proof"]]
        log.verify_inclusion(hashes[index], proof, index=index, size=size, root=b64(vectors["roots"][size]))
    for case in vectors["consistency"]:
        first, second = case["first"], case["second"]
        proof = tree.consistency_proof(first, second)
        assert proof == log.consistency_proof(hashes, first, second) == [b64(text) for text in case["proof"]]
        log.verify_consistency(
            proof,
            first=first,
            first_root=b64(vectors["roots"][first]),
            second=second,
            second_root=b64(vectors["roots"][second]),
        )


def test_every_entry_and_every_prefix_of_small_trees_is_proved_and_nothing_else():
    hashes = [leaf(i) for i in range(18)]
    tree = log.Tree(hashes)
    for size in range(1, 19):
        for index in range(size):
            proof = tree.inclusion_proof(index, size)
            log.verify_inclusion(hashes[index], proof, index=index, size=size, root=tree.root(size))
            refused_inclusion(hashes[index], proof, index=(index + 1) % 18, size=size, root=tree.root(size))
            refused_inclusion(leaf(99), proof, index=index, size=size, root=tree.root(size))
            refused_inclusion(hashes[index], [*proof, EMPTY], index=index, size=size, root=tree.root(size))
            if proof:
                refused_inclusion(hashes[index], proof[:-1], index=index, size=size, root=tree.root(size))
                refused_inclusion(
                    hashes[index], [proof[0][:31], *proof[1:]], index=index, size=size, root=tree.root(size)
                )
        for first in range(size + 1):
            proof = tree.consistency_proof(first, size)
            known = {"first": first, "first_root": tree.root(first), "second": size, "second_root": tree.root(size)}
            log.verify_consistency(proof, **known)
            refused_consistency([*proof, EMPTY], **known)
            refused_consistency(proof, **known | {"first_root": leaf(99)})
            if first:
                refused_consistency(proof, **known | {"second_root": leaf(99)})
            if proof:
                refused_consistency(proof[:-1], **known)
                refused_consistency([proof[0][:31], *proof[1:]], **known)


def refused_inclusion(*arguments, **known):
    with pytest.raises(Refusal) as caught:
        log.verify_inclusion(*arguments, **known)
    assert caught.value.code == "proof_invalid"


def refused_consistency(proof, **known):
    with pytest.raises(Refusal) as caught:
        log.verify_consistency(proof, **known)
    assert caught.value.code in ("proof_invalid", "log_inconsistent")


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_flipped_bit_anywhere_in_a_proof_is_refused(data):
    size = data.draw(st.integers(2, 200))
    index = data.draw(st.integers(0, size - 1))
    hashes = [leaf(i) for i in range(size)]
    tree = log.Tree(hashes)
    proof = tree.inclusion_proof(index, size)
    place, bit = data.draw(st.integers(0, len(proof) - 1)), data.draw(st.integers(0, 255))
    changed = bytearray(proof[place])
    changed[bit // 8] ^= 1 << bit % 8
    proof[place] = bytes(changed)
    refused_inclusion(hashes[index], proof, index=index, size=size, root=tree.root())


def test_a_fork_is_called_one():
    ours, theirs = (
        log.Tree(leaf(i) for i in range(7)),
        log.Tree([*(leaf(i) for i in range(4)), leaf(99), leaf(5), leaf(6), leaf(7)]),
    )
    with pytest.raises(Refusal, match="does not begin with") as caught:
        log.verify_consistency(
            theirs.consistency_proof(7, 8), first=7, first_root=ours.root(), second=8, second_root=theirs.root()
        )
    assert caught.value.code == "log_inconsistent"
    assert "keep both checkpoints" in caught.value.hint


@pytest.mark.parametrize(("index", "size"), [(-1, 3), (3, 3), (0, 0), (0, 99)])
def test_there_is_no_proof_of_what_is_not_in_the_tree(index, size):
    with pytest.raises(Refusal) as caught:
        log.Tree(leaf(i) for i in range(3)).inclusion_proof(index, size)
    assert caught.value.code == "entry_unknown"


def test_ten_thousand_appends_have_the_root_of_all():
    tree = log.Tree()
    for i in range(10_000):
        tree.append(i.to_bytes(32, "big"))
        tree.root()
    assert tree.root() == log.root([i.to_bytes(32, "big") for i in range(10_000)])


# ---- receipts ------------------------------------------------------------------------------------------------------


def record(index):
    request = records.sign("RoundVoided", "round-1", {"reason": f"reason {index}"}, key=SIGNER.key)
    return Record(
        "RoundVoided",
        "round-1",
        records.parse_time("2027-03-01T00:00:00.000000Z"),
        request["fields"],
        request["by"],
        request["sig"],
    )


ENTRIES = [record(i).encode() for i in range(11)]
TREE = log.Tree(map(digests.leaf_hash, ENTRIES))


def receipt(index, size=11):
    note = log.sign_checkpoint(SIGNER, size, TREE.root(size))
    return log.Receipt(index, ENTRIES[index], tuple(TREE.inclusion_proof(index, size)), note)


@pytest.mark.parametrize(("index", "size"), [(0, 1), (0, 11), (5, 6), (10, 11), (7, 8)])
def test_a_receipt_is_its_own_proof(index, size):
    text = receipt(index, size).text()
    parsed = log.Receipt.parse(text)
    assert parsed.text() == text
    assert log.Receipt.parse(text.encode()) == parsed
    assert parsed.verify(SIGNER.verifier) == record(index)
    assert parsed.open(SIGNER.verifier)[1].checkpoint.size == size


def test_a_receipt_has_the_layout_of_tlog_proof():
    text = receipt(2, 4).text().split("\n")
    assert text[0] == "c2sp.org/tlog-proof@v1"
    assert text[1] == "extra " + base64.b64encode(ENTRIES[2]).decode()
    assert text[2] == "index 2"
    assert [base64.b64decode(line) for line in text[3:5]] == TREE.inclusion_proof(2, 4)
    assert text[5:8] == ["", ORIGIN, "4"]


def refused_receipt(text, *, code="proof_invalid", verifier=SIGNER.verifier):
    with pytest.raises(Refusal) as caught:
        log.Receipt.parse(text).verify(verifier)
    assert caught.value.code == code


def test_a_receipt_of_another_log_entry_or_size_is_refused():
    good = receipt(3)
    refused_receipt(good.text(), verifier=log.Signer("other.example", Ed25519PrivateKey.generate()).verifier)
    refused_receipt(log.Receipt(4, good.entry, good.proof, good.checkpoint).text())
    refused_receipt(log.Receipt(3, ENTRIES[4], good.proof, good.checkpoint).text())
    refused_receipt(log.Receipt(3, good.entry, good.proof, receipt(3, 9).checkpoint).text())
    refused_receipt(log.Receipt(3, good.entry, good.proof[:-1], good.checkpoint).text())
    refused_receipt(log.Receipt(3, good.entry, (*good.proof, EMPTY), good.checkpoint).text())


def test_a_log_that_holds_what_is_no_record_has_no_valid_receipt_for_it():
    tree = log.Tree([digests.leaf_hash(b"{}")])
    proof = log.Receipt(0, b"{}", (), log.sign_checkpoint(SIGNER, 1, tree.root()))
    refused_receipt(proof.text(), code="record_invalid")


TEXT = receipt(3).text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        TEXT[1:],
        TEXT[:-1],
        TEXT + "\n",
        TEXT.replace("@v1", "@v2"),
        TEXT.replace("extra ", "extra  "),
        TEXT.replace("extra ", "Extra "),
        TEXT.replace("index 3", "index 03"),
        TEXT.replace("index 3", "index -3"),
        TEXT.replace("index 3", "index ٣"),
        TEXT.replace("index 3", "index 3 "),
        TEXT.replace("index 3\n", ""),
        TEXT.replace("index 3\n", "index 3\nindex 3\n"),
        TEXT.replace("index 3\n", "index 3\n\n"),
        TEXT.replace("\n", "\r\n"),
        "\n".join(line for line in TEXT.split("\n") if not line.startswith("extra")),
        TEXT.replace("extra " + base64.b64encode(ENTRIES[3]).decode(), "extra "),
        TEXT.replace("index 3\n", "index 3\n" + "A" * 43 + "=\n" + ("A" * 43 + "=\n") * 63),
        TEXT.replace(ORIGIN + "\n11", ORIGIN + "\n011"),
        b"\xff" + TEXT.encode(),
    ],
)
def test_other_spellings_of_a_receipt_are_refused(text):
    refused_receipt(text)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_flipped_bit_anywhere_in_a_receipt_is_refused(data):
    raw = bytearray(TEXT.encode())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Refusal) as caught:
        log.Receipt.parse(bytes(raw)).verify(SIGNER.verifier)
    assert caught.value.code == "proof_invalid"


@settings(deadline=None)
@given(
    st.integers(0, 2**63 - 1),
    st.binary(min_size=1, max_size=200),
    st.lists(st.binary(min_size=32, max_size=32), max_size=63),
)
def test_a_receipt_that_parses_is_written_again_as_the_same_bytes(index, entry, proof):
    text = log.Receipt(index, entry, tuple(proof), GOOD_CHECKPOINT).text()
    assert log.Receipt.parse(text).text() == text


GOOD_CHECKPOINT = log.sign_checkpoint(SIGNER, 5, leaf(5))
