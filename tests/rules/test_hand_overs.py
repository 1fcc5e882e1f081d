"""A log's key hands over to another: what is one, what is forged, and which key signs what."""

import hashlib
from datetime import UTC, datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from acclimate import hand_overs, log
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record

ORIGIN = "log.example.org"
AT = datetime(2027, 3, 1, tzinfo=UTC)


def signer(name, origin=ORIGIN):
    return log.Signer(origin, Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))


A, B, C = map(signer, "abc")


def record(request):
    return Record(request["type"], request["round"], AT, request["fields"], request["by"], request["sig"])


def handed(old, new):
    return record(hand_overs.request(old, new, reason="a new machine"))


def forged(old, new, *, by=None, approvals=None, **fields):
    """A hand-over as somebody makes it who has the key `by`, approved by whoever is given."""
    by = by or old
    fields = {"old": old.vkey, "new": new.vkey, "reason": "x", **fields}
    public = records.public_text(by.key.public_key())
    given = [records.approve(hand_overs.TYPE, "", fields, by=public, key=one.key) for one in approvals or [new]]
    return record(records.sign(hand_overs.TYPE, "", {**fields, "approvals": given}, key=by.key))


def refused(code, call, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        call(*arguments, **named)
    assert caught.value.code == code, caught.value
    return caught.value


class Log:
    """A log that hands over now and then; what it shows is what its operator signs."""

    def __init__(self, *keys):
        self.entries, self.receipts, self.key = [b"entry 0"], [], A
        for new in keys:
            self.hand_over(handed(self.key, new), new)

    def hand_over(self, made, new, *, both=True, more=0):
        index, old = len(self.entries), self.key
        self.entries += [made.encode(), *(b"more" for _ in range(more))]
        tree = log.Tree(map(log.leaf_hash, self.entries))
        signers = (old, new) if both else (new,)
        note = log.sign_note(log.checkpoint(ORIGIN, len(tree), tree.root()), *signers)
        self.receipts.append(log.Receipt(index, made.encode(), tuple(tree.inclusion_proof(index)), note).text())
        self.entries.append(b"after")
        self.key = new

    def note(self, size, *signers):
        return log.sign_note(
            log.checkpoint(ORIGIN, size, log.Tree(map(log.leaf_hash, self.entries)).root(size)), *signers
        )


def test_a_hand_over_is_signed_by_the_old_key_and_approved_by_the_new_one():
    made = hand_overs.check(handed(A, B), index=7)
    assert (made.index, made.old.text(), made.new.text(), made.reason) == (7, A.vkey, B.vkey, "a new machine")
    assert records.parse(handed(A, B).encode()) == handed(A, B)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (forged(A, B, by=C), "the old key is"),
        (forged(A, B, by=B), "the old key is"),
        (forged(A, B, approvals=[C]), "it is approved by"),
        (forged(A, B, approvals=[A]), "it is approved by"),
        (forged(A, B, approvals=[B, B]), "2 approvals"),
        (forged(A, A), "two keys of one log"),
        (forged(A, signer("b", "log.elsewhere.org")), "two keys of one log"),
        (Record("RoundVoided", "r", AT, {"reason": "x"}), "it is a RoundVoided"),
    ],
)
def test_a_forged_hand_over_is_refused(made, words):
    assert words in refused("rotation_invalid", hand_overs.check, made, index=3).sentence


def test_a_signature_of_another_statement_is_none():
    made = handed(A, B)
    for fields in ({**made.fields, "reason": "another"}, {**made.fields, "new": C.vkey}):
        changed = Record(made.type, "", AT, fields, made.by, made.sig)
        refused("rotation_invalid", hand_overs.check, changed, index=0)
    other = handed(A, C)
    swapped = Record(made.type, "", AT, {**made.fields, "approvals": other["approvals"]}, made.by, made.sig)
    refused("rotation_invalid", hand_overs.check, swapped, index=0)
    none = Record(made.type, "", AT, {**made.fields, "approvals": []}, made.by, made.sig)
    assert "0 approvals" in refused("rotation_invalid", hand_overs.check, none, index=0).sentence


def test_each_key_signs_its_part_of_the_log_and_both_the_hand_over():
    made = Log(B, C)  # hand-overs at entries 1 and 3
    found = hand_overs.chain(made.entries, A.verifier)
    by = {size: [key.text() for key in found.signers(size)] for size in range(6)}
    assert by == {
        0: [A.vkey], 1: [A.vkey], 2: [A.vkey, B.vkey], 3: [B.vkey], 4: [B.vkey, C.vkey], 5: [C.vkey],
    }  # fmt: skip
    for size, allowed in ((1, [A]), (2, [A, B]), (3, [B]), (4, [B, C]), (5, [C])):
        assert found.open(made.note(size, *allowed)).checkpoint.size == size
        for other in {A, B, C} - set(allowed):
            refused("proof_invalid", found.open, made.note(size, other))
        if len(allowed) == 2:
            for one in allowed:
                refused("proof_invalid", found.open, made.note(size, one))
    assert found.last == C.verifier and found.between(A.vkey, C.vkey) == found.hand_overs
    assert found.between(B.vkey, C.vkey) == found.hand_overs[1:] and found.between(B.vkey, B.vkey) == ()
    assert found.between(C.vkey, A.vkey) is None and found.between(signer("d").vkey, C.vkey) is None


def test_entries_give_the_same_chain_from_any_of_its_keys_and_none_from_another():
    made = Log(B, C)
    for known in (A, B, C):
        assert [key.text() for key in hand_overs.chain(made.entries, known.verifier).keys] == [A.vkey, B.vkey, C.vkey]
    refused("proof_invalid", hand_overs.chain, made.entries, signer("d").verifier)
    assert hand_overs.chain([b"entry"], A.verifier) == hand_overs.Chain(A.verifier)
    # A text that looks like one is none.
    assert hand_overs.chain([b'{"reason":"\\"type\\":\\"LogKeyRotated\\""}'], A.verifier).hand_overs == ()


def test_hand_overs_follow_each_other():
    first, second = handed(A, B), handed(A, C)
    error = refused("rotation_invalid", hand_overs.chain, [first.encode(), second.encode()], A.verifier)
    assert "log entry 1" in error.sentence and A.vkey in error.sentence and B.vkey in error.sentence
    back = [first.encode(), handed(B, A).encode()]
    assert "given up" in refused("rotation_invalid", hand_overs.chain, back, A.verifier).sentence


def test_receipts_lead_from_a_known_key_to_the_newest():
    receipts = Log(B, C).receipts
    for known, count in ((A, 2), (B, 1), (C, 0)):
        found = hand_overs.follow(receipts, known.verifier)
        assert found.last == C.verifier and len(found.hand_overs) == count
    # Who is known to none of them comes nowhere.
    assert hand_overs.follow(receipts, signer("d").verifier).last == signer("d").verifier
    assert hand_overs.follow([], A.verifier) == hand_overs.Chain(A.verifier)


def test_receipts_that_do_not_hold_are_refused():
    made = Log()
    made.hand_over(handed(A, B), B, both=False)
    refused("proof_invalid", hand_overs.follow, made.receipts, A.verifier)
    made = Log()
    made.hand_over(handed(A, B), B, more=1)
    assert "expected the next" in refused("rotation_invalid", hand_overs.follow, made.receipts, A.verifier).sentence
    made = Log()
    made.hand_over(forged(A, B, by=C), B)
    refused("rotation_invalid", hand_overs.follow, made.receipts, A.verifier)
    first, second = Log(B, C).receipts
    refused("rotation_invalid", hand_overs.follow, [first, Log(C).receipts[0]], A.verifier)
    refused("rotation_invalid", hand_overs.follow, [second, first], B.verifier)
