"""A witness's answers, byte for byte: it cosigns a log that only grows, says no to anything else, and does not go back."""

import base64
import hashlib
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_witness import (
    DAY,
    KEY,
    NAME,
    VERIFIER,
    Hand,
    clock,
    cosigned,
    is_conflict,
    path,
    seen,
    small,
    state,
    witness,
    witness_of,
)
from witnessed import MADE, SmallLog

from acclimate import log, notes, witness_client
from acclimate.witness import LARGEST_REQUEST, Request, Witness
from acclimate.witness_state import State
from acclimate_competitions.errors import Refusal

__all__ = ["clock", "path", "small", "state", "witness"]


# ---- a log that grows ------------------------------------------------------------------------------------------------


def test_a_log_that_only_grows_is_cosigned_and_the_newest_checkpoint_is_shown(witness, state, small, clock):
    assert cosigned(witness.add_checkpoint(small.request(0)), small, 3) == clock.now
    small.grow(39)
    clock.now += 100
    assert cosigned(witness.add_checkpoint(small.request(3)), small, 42) == clock.now
    shown = witness.checkpoint(hashlib.sha256(small.signer.origin.encode()).hexdigest())
    opened = log.open_checkpoint(shown.body, small.signer.verifier, [VERIFIER])
    assert (opened.checkpoint.size, opened.cosigned) == (42, {VERIFIER.text(): clock.now})


def test_of_a_log_that_was_never_cosigned_nothing_is_shown(witness, small):
    for named in (hashlib.sha256(small.signer.origin.encode()).hexdigest(), hashlib.sha256(b"else").hexdigest(), "x"):
        assert witness.checkpoint(named).status == 404


def test_an_empty_log_may_begin_and_the_same_checkpoint_is_cosigned_again_with_a_new_time(witness, state, clock):
    small = SmallLog()
    witness = witness_of(state, clock, small.vkey)
    assert cosigned(witness.add_checkpoint(small.request(0)), small, 0) == clock.now
    clock.now += 5
    assert cosigned(witness.add_checkpoint(small.request(0)), small, 0) == clock.now
    small.grow(7)
    assert cosigned(witness.add_checkpoint(small.request(0)), small, 7) == clock.now
    clock.now += 5
    assert cosigned(witness.add_checkpoint(small.request(7)), small, 7) == clock.now


def test_signatures_of_strangers_are_ignored_and_not_kept(witness, state, small):
    stranger = log.Signer("stranger.example", Ed25519PrivateKey.generate())
    other = log.sign_note(log.parse_note(small.checkpoint()).text, stranger, small.signer)
    body = witness_client.request(other, old=0, proof=[])
    assert cosigned(witness.add_checkpoint(body), small, 3)
    assert "stranger" not in state.seen(small.signer.origin).note


def test_extension_lines_are_covered_by_the_cosignature(witness, small, clock):
    tree = small.tree()
    text = log.Checkpoint(small.signer.origin, 3, tree.root(), ("an extension",)).body()
    note = log.sign_note(text, small.signer)
    answer = witness.add_checkpoint(witness_client.request(note, old=0, proof=[]))
    assert "an extension" in log.open_note(note + answer.body.decode(), [VERIFIER]).text


def test_a_log_goes_on_under_a_new_key_where_the_witness_knows_both(state, clock):
    old = SmallLog(size=5)
    new = SmallLog(old.signer.origin, key=Ed25519PrivateKey.generate())
    new.entries = old.entries
    before = witness_of(state, clock, old.vkey)
    assert before.add_checkpoint(old.request(0)).status == 200
    assert before.add_checkpoint(new.grow(2).request(5)).status == 403
    both = witness_of(state, clock, old.vkey, new.vkey)
    assert cosigned(both.add_checkpoint(new.request(5)), new, 7)
    # The history is the log's, whatever its key: the new key can't begin another.
    assert is_conflict(both.add_checkpoint(new.request(0)), 7)
    assert both.add_checkpoint(new.fork(4, 9).request(7)).status == 422


def test_a_key_that_was_given_up_ends_nothing(state, path, clock):
    """Whoever has the old key could else have an entry of its own cosigned, and no entry of the log ever again."""
    old = SmallLog(size=5)
    new = SmallLog(old.signer.origin, key=Ed25519PrivateKey.generate())
    new.entries = [*old.entries]
    both = witness_of(state, clock, old.vkey, new.vkey)
    assert both.add_checkpoint(old.request(0)).status == 200
    # The hand-over is signed by both; from there on the new key counts.
    hand_over = log.sign_note(log.checkpoint(old.signer.origin, 7, new.grow(2).tree().root()), old.signer, new.signer)
    body = witness_client.request(hand_over, old=5, proof=new.proof(5))
    assert both.add_checkpoint(body).status == 200
    stolen = old.grow(2).grow(1, word="of a thief")
    for one in (both, witness_of(state, clock, old.vkey, new.vkey)):
        for body in (stolen.request(7), old.request(7, 7), stolen.request(0)):
            answer = one.add_checkpoint(body)
            assert answer.status == 403 and new.vkey in answer.facts["reason"]
    assert seen(state, new) == (7, new.tree().root()) and state.refused(new.signer.origin) == []
    assert cosigned(both.add_checkpoint(new.grow(2).request(7)), new, 9)
    # So it is for a witness that was told of the new key alone.
    alone = witness_of(state, clock, new.vkey)
    assert alone.add_checkpoint(stolen.request(7)).status == 403
    assert cosigned(alone.add_checkpoint(new.grow(1).request(9)), new, 10)


def test_of_two_signatures_at_one_moment_the_earlier_keys_does_not_come_last(state, path, clock):
    old = SmallLog(size=5)
    new = SmallLog(old.signer.origin, key=Ed25519PrivateKey.generate())
    new.entries = [*old.entries]
    witness, elsewhere = witness_of(state, clock, old.vkey, new.vkey), State.open(path, VERIFIER.text())
    assert witness.add_checkpoint(old.request(0)).status == 200
    other = witness_of(elsewhere, lambda: clock.now, old.vkey, new.vkey)
    # The same checkpoint by the new key, while the old key's is between the look and the change.
    clock.meanwhile.append(lambda: other.add_checkpoint(new.request(5)))
    assert is_conflict(witness.add_checkpoint(old.request(5)), 5)
    assert witness.add_checkpoint(old.request(5)).status == 403
    elsewhere.close()


def test_logs_are_apart(state, clock):
    one, two = SmallLog("one.example", 3), SmallLog("two.example", 8)
    witness = witness_of(state, clock, one.vkey, two.vkey)
    assert witness.add_checkpoint(one.request(0)).status == 200
    assert witness.add_checkpoint(two.request(0)).status == 200
    assert [(found.origin, found.size) for found in state.all_seen()] == [("one.example", 3), ("two.example", 8)]


# ---- what is refused, with the specification's numbers -----------------------------------------------------------------


def test_a_stale_old_size_is_told_the_newest(witness, small):
    witness.add_checkpoint(small.grow(4).request(0))
    small.grow(3)
    for old in (0, 1, 5, 8, 10):
        assert is_conflict(witness.add_checkpoint(small.request(old)), 7)
    # A log that is behind is told so, too: nothing is rolled back.
    assert is_conflict(witness.add_checkpoint(small.request(0, 3)), 7)
    assert is_conflict(witness.add_checkpoint(small.request(3, 3)), 7)


def test_before_anything_was_cosigned_the_size_is_zero(witness, small):
    assert is_conflict(witness.add_checkpoint(small.request(2)), 0)


def test_an_unknown_log_is_404_whoever_signed(witness, small):
    assert witness.add_checkpoint(SmallLog("else.example", 3).request(0)).status == 404
    other = log.sign_note(log.checkpoint("else.example", 3, bytes(32)), small.signer)
    assert witness.add_checkpoint(witness_client.request(other, old=0, proof=[])).status == 404


def test_a_known_log_must_have_signed(witness, state, small):
    impostor = SmallLog(small.signer.origin, 3)
    assert witness.add_checkpoint(impostor.request(0)).status == 403
    # A false line of a known key refuses the note, beside a good one too; the same name with another id is a stranger.
    good = log.parse_note(small.checkpoint())
    line = good.signatures[0]
    false = notes.Signature(line.name, line.key_id, bytes(64))
    for lines, status in (((false,), 403), ((line, false), 403), ((false, line), 403), ((line, line), 200)):
        note = notes.Note(good.text, lines).encode()
        assert witness.add_checkpoint(witness_client.request(note, old=0, proof=[])).status == status
        assert (seen(state, small) is None) == (status != 200)


def test_a_cosignature_is_no_signature_of_a_log(witness, small):
    text = log.parse_note(small.checkpoint()).text
    line = notes.cosign(text, name=small.signer.origin, key=small.signer.key, time=MADE)
    note = notes.Note(text, (line,)).encode()
    assert witness.add_checkpoint(witness_client.request(note, old=0, proof=[])).status == 403


def test_the_old_size_is_not_above_the_new_one(witness, small):
    answer = witness.add_checkpoint(witness_client.request(small.checkpoint(), old=4, proof=[]))
    assert answer.status == 400 and b"4" in answer.body and b"3" in answer.body


def bad_proofs(small):
    good = small.proof(3)
    yield "none", []
    yield "one too few", good[:-1]
    yield "one too many", [*good, bytes(32)]
    yield "one changed", [bytes([good[0][0] ^ 1]) + good[0][1:], *good[1:]]
    yield "reversed", good[::-1]
    yield "of another size", small.proof(2)


def test_a_proof_that_does_not_join_what_was_seen_is_422_and_nothing_moves(witness, state, small):
    witness.add_checkpoint(small.request(0))
    small.grow(8)
    before = state.seen(small.signer.origin)
    for what, proof in bad_proofs(small):
        answer = witness.add_checkpoint(witness_client.request(small.checkpoint(), old=3, proof=proof))
        assert answer.status == 422, what
    assert state.seen(small.signer.origin) == before
    assert cosigned(witness.add_checkpoint(small.request(3)), small, 11)


def test_a_proof_where_none_may_be_is_422(witness, small):
    assert witness.add_checkpoint(witness_client.request(small.checkpoint(), old=0, proof=[bytes(32)])).status == 422
    assert witness.add_checkpoint(small.request(0)).status == 200
    assert witness.add_checkpoint(witness_client.request(small.checkpoint(), old=3, proof=[bytes(32)])).status == 422


def test_an_empty_log_has_the_root_of_the_empty_tree(witness, state, clock):
    small = SmallLog()
    note = log.sign_checkpoint(small.signer, 0, bytes(32))
    answer = witness_of(state, clock, small.vkey).add_checkpoint(witness_client.request(note, old=0, proof=[]))
    assert answer.status == 422 and seen(state, small) is None


def test_the_same_size_with_another_root_is_422(witness, small):
    witness.add_checkpoint(small.request(0))
    answer = witness.add_checkpoint(witness_client.request(small.fork(1, 3).checkpoint(), old=3, proof=[]))
    assert answer.status == 422 and b"does not begin with" in answer.body


def test_what_is_wrong_first_is_what_is_said(witness, small):
    """Signature before sizes, the form of sizes before the memory, the memory before the proof: a stranger learns nothing of it."""
    witness.add_checkpoint(small.request(0))
    impostor = SmallLog(small.signer.origin, 9)
    assert witness.add_checkpoint(impostor.request(1)).status == 403
    assert witness.add_checkpoint(witness_client.request(small.checkpoint(), old=7, proof=[])).status == 400
    assert witness.add_checkpoint(witness_client.request(small.grow(5).checkpoint(), old=2, proof=[])).status == 409


def malformed(small):
    good = small.grow(5).request(3)
    head, note = good.split(b"\n\n", 1)
    old, *proof = head.split(b"\n")
    for first in (b"", b"old", b"old ", b"old -1", b"old 03", b"old +3", b"old 3 ", b"old  3", b"Old 3", b"old 3\r", b"old 0x3", b"3",
                  b"old 9223372036854775808", b"old " + b"9" * 100, "old ٣".encode()):  # fmt: skip
        yield b"\n".join([first, *proof]) + b"\n\n" + note
    for line in (b"x", proof[0][:-1], proof[0] + b"=", proof[0].replace(b"=", b""), b" " + proof[0], proof[0] + b"\r",
                 base64.b64encode(bytes(31)), base64.b64encode(bytes(33)), base64.urlsafe_b64encode(b"\xff" * 32)):  # fmt: skip
        yield b"\n".join([old, line, *proof]) + b"\n\n" + note
    yield b"\n".join([old, *[base64.b64encode(bytes(32))] * 64]) + b"\n\n" + note
    yield head + b"\n" + note
    yield note
    yield b""
    yield b"\n\n"
    yield head + b"\n\n"
    yield good.replace(b"log.example", b"log\xff.example")
    yield good + b"x" * LARGEST_REQUEST


def no_notes(small):
    good = small.grow(5).request(3)
    yield good[:-1]
    yield good + b"\n"
    yield good + b"x"
    yield good + "— x y\n".encode()
    yield good.replace(b"\n8\n", b"\n8\x00\n")
    # Base64 with bits that nobody reads: the signature would verify where it is read loosely.
    assert good.endswith(b"=\n")
    last = good[-3:-2]
    order = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    yield good[:-3] + order[order.index(last) + 1 :][:1] + b"=\n"


def test_what_does_not_parse_is_400(witness, state, small):
    for body in malformed(small):
        answer = witness.add_checkpoint(body)
        assert answer.status == 400 and answer.kind.startswith("text/plain") and len(answer.body) < 1000, body[:80]
    assert state.all_seen() == []
    # An empty line more, and the log's name is an empty one.
    assert witness.add_checkpoint(small.request(3).replace(b"\n\n", b"\n\n\n", 1)).status == 404


def test_what_is_no_note_is_signed_by_nobody_403(witness, state, small):
    for body in no_notes(small):
        assert witness.add_checkpoint(body).status == 403, body
    assert state.all_seen() == []


def test_a_signed_text_that_is_no_checkpoint_is_400(witness, small):
    root = base64.b64encode(bytes(32)).decode()
    for text in ("", "03\n" + root, "x\n" + root, "3\nx", "3", "-3\n" + root, f"3\n{root}\n"):
        note = log.sign_note(f"{small.signer.origin}\n{text}\n", small.signer)
        assert witness.add_checkpoint(witness_client.request(note, old=0, proof=[])).status == 400


def test_a_log_is_known_by_a_logs_key(state, clock):
    with pytest.raises(Refusal, match="kind 0x04") as caught:
        witness_of(state, clock, VERIFIER.text())
    assert caught.value.code == "key_refused"


# ---- two at a time -----------------------------------------------------------------------------------------------------


def test_of_two_that_start_from_one_size_the_second_is_told_and_nothing_is_rolled_back(
    witness, state, path, small, clock
):
    """The shorter one is checked first and written last: exactly the race of the specification, by another process's connection."""
    witness.add_checkpoint(small.request(0))
    small.grow(10)
    longer, shorter = small.request(3, 13), small.request(3, 5)
    elsewhere = State.open(path, VERIFIER.text())
    other = witness_of(elsewhere, lambda: clock.now, small.vkey)
    answers = []
    clock.meanwhile.append(lambda: answers.append(other.add_checkpoint(longer)))
    late = witness.add_checkpoint(shorter)
    elsewhere.close()
    assert cosigned(answers[0], small, 13)
    assert is_conflict(late, 13)
    assert seen(state, small) == (13, small.tree().root())


def test_of_two_first_checkpoints_one_is_the_first(witness, state, path, small, clock):
    elsewhere = State.open(path, VERIFIER.text())
    other = witness_of(elsewhere, lambda: clock.now, small.vkey)
    answers = []
    clock.meanwhile.append(lambda: answers.append(other.add_checkpoint(small.fork(1, 4).request(0))))
    late = witness.add_checkpoint(small.request(0))
    elsewhere.close()
    assert answers[0].status == 200 and is_conflict(late, 4)


def test_many_threads_get_one_history(path, small, clock):
    """Eight connections send forks and growths of each other as fast as they can; what was cosigned lies on one line."""
    small.grow(5)
    forks = [small, *(small.fork(number, 12 + number) for number in range(7))]
    small.grow(20)
    given: list[tuple[int, bytes]] = []

    def send(mine):
        state = State.open(path, VERIFIER.text())
        witness = witness_of(state, lambda: clock.now, small.vkey)
        try:
            for size in range(1, len(mine.entries)):
                found = state.seen(small.signer.origin)
                old = found.size if found else 0
                if old <= size and witness.add_checkpoint(mine.request(old, size)).status == 200:
                    given.append((size, mine.tree(size).root()))
        finally:
            state.close()

    threads = [threading.Thread(target=send, args=(mine,)) for mine in forks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = max(given)
    (line,) = (mine for mine in forks if len(mine.entries) >= last[0] and mine.tree(last[0]).root() == last[1])
    assert all(line.tree(size).root() == root for size, root in given)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20), st.integers(-100, 200)),
        min_size=1,
        max_size=25,
    )
)
def test_whatever_comes_what_was_cosigned_is_one_history_in_the_order_of_its_times(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("any")
    State.create(folder / "w.db", VERIFIER.text(), made=MADE)
    state = State.open(folder / "w.db", VERIFIER.text())
    trunk = SmallLog(size=20)
    logs = [trunk, *(trunk.fork(at, 20) for at in (2, 9, 15))]
    clock = Hand()
    witness = witness_of(state, clock, trunk.vkey)
    given: list[tuple[int, int, bytes]] = []
    for which, old, size, later in steps:
        clock.now += later
        mine = logs[which]
        old = (found.size if (found := state.seen(trunk.signer.origin)) else 0) if old > 15 else min(old, size)
        if old > size:
            continue
        answer = witness.add_checkpoint(mine.request(old, size))
        assert answer.status in (200, 409, 422, 503)
        if answer.status == 200:
            given.append((cosigned(answer, mine, size), size, mine.tree(size).root()))
    state.close()
    assert given == sorted(given, key=lambda one: one[:2])
    if given:
        _, size, root = given[-1]
        line = next(mine for mine in logs if mine.tree(size).root() == root)
        assert all(line.tree(at).root() == its for _, at, its in given)


# ---- the clock ---------------------------------------------------------------------------------------------------------


def test_a_clock_that_was_set_back_a_little_says_the_last_time_again(witness, small, clock):
    first = cosigned(witness.add_checkpoint(small.request(0)), small, 3)
    clock.now -= 30
    assert cosigned(witness.add_checkpoint(small.grow(1).request(3)), small, 4) == first


def test_a_clock_that_went_back_a_day_cosigns_nothing_and_says_so(witness, state, small, clock):
    witness.add_checkpoint(small.request(0))
    clock.now -= DAY
    answer = witness.add_checkpoint(small.grow(1).request(3))
    assert answer.status == 503 and str(clock.now) in answer.facts["reason"]
    assert seen(state, small)[0] == 3
    clock.now += DAY
    assert witness.add_checkpoint(small.request(3)).status == 200


def test_a_clock_that_leapt_ahead_is_not_believed_until_it_is_right_or_the_witness_starts_again(state, small, clock):
    steady = Hand()
    given = {"logs": [small.signer.verifier], "state": state, "clock": clock, "steady": steady}
    witness = Witness(NAME, KEY, **given)
    assert witness.add_checkpoint(small.request(0)).status == 200
    for _ in range(3):
        clock.now += DAY
        steady.now += DAY
        assert cosigned(witness.add_checkpoint(small.request(3)), small, 3) == clock.now
    clock.now += 400 * DAY
    answer = witness.add_checkpoint(small.grow(1).request(3))
    assert answer.status == 503 and str(400 * DAY) in answer.facts["reason"]
    clock.now -= 400 * DAY
    assert cosigned(witness.add_checkpoint(small.request(3)), small, 4) == clock.now
    # A machine that was asleep for long: its operator has looked at the clock, and starts it again.
    clock.now += 400 * DAY
    assert witness.add_checkpoint(small.request(4)).status == 503
    assert cosigned(Witness(NAME, KEY, **given).add_checkpoint(small.request(4)), small, 4) == clock.now


def test_no_time_before_the_witness_was_made_is_said(witness, small, clock):
    clock.now = MADE - DAY
    assert witness.add_checkpoint(small.request(0)).status == 503


# ---- bytes -------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**63 - 1), st.lists(st.binary(min_size=32, max_size=32), max_size=63), st.integers(1, 5))
def test_a_request_that_parses_is_written_again_as_the_same_bytes(old, proof, signatures):
    signers = [log.Signer(f"key{number}", Ed25519PrivateKey.generate()) for number in range(signatures)]
    note = log.sign_note(log.checkpoint("key0", 5, bytes(32)), *signers)
    body = witness_client.request(note, old=old, proof=proof)
    parsed = Request.parse(body)
    assert (parsed.old, list(parsed.proof), parsed.note.encode()) == (old, proof, note)
    assert parsed.encode() == body


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_request_is_refused_or_still_itself(data):
    body = bytearray(SmallLog(size=6, key=KEY).request(3))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        assert Request.parse(bytes(body)).encode() == bytes(body)
    except Refusal as refusal:
        assert refusal.code in ("request_invalid", "proof_invalid")
