"""Custody: k of n recover, fewer learn nothing, a false share and an inconsistent dealer are named."""

import base64
import itertools
import secrets

import pyrage
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import custody
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

SEAL = "sha256:" + "5e" * 32
ROUND = "digits-spring-" + "0a" * 16
SECRET = bytes(range(100, 132))


def documents(k=2, n=3, secret=SECRET, seal=SEAL, round_id=ROUND, rehearsal=False):
    shares = custody.split(secret, k=k, n=n, random=secrets.token_bytes)
    return [
        custody.Share(round_id, seal, i, k, n, share, rehearsal).encode() for i, share in enumerate(shares, start=1)
    ]


def split(k=2, n=3, **more):
    return custody.Split(ROUND, SEAL, k, n, **more)


def commitments(given_):
    return [custody.document_digest(document) for document in given_]


def recovered(given_):
    return custody.recover([custody.parse_document(document) for document in given_])


# An independent reference: logarithms to the generator 3, and Lagrange's formula at 0 written out over the field.
EXP = [1]
for _ in range(254):
    doubled = EXP[-1] << 1
    EXP.append((doubled ^ (0x11B if doubled > 255 else 0)) ^ EXP[-1])
LOG = {value: power for power, value in enumerate(EXP)}


def by_logarithms(points):
    """The secret of points {x: bytes}."""
    result = []
    for place in range(len(next(iter(points.values())))):
        total = 0
        for i, share in points.items():
            if share[place]:
                power = LOG[share[place]]
                for j in points:
                    if j != i:
                        power += LOG[j] - LOG[i ^ j]
                total ^= EXP[power % 255]
        result.append(total)
    return bytes(result)


def test_the_logarithms_of_the_reference_cover_the_field():
    assert sorted(EXP) == list(range(1, 256))
    assert (
        EXP[LOG[0x57] + LOG[0x83] - 255 if LOG[0x57] + LOG[0x83] >= 255 else LOG[0x57] + LOG[0x83]] == 0xC1
    )  # FIPS 197, 4.2


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 3), (2, 2), (2, 3), (3, 5), (5, 5), (4, 7)])
def test_any_k_shares_recover_the_secret_and_an_independent_interpolation_agrees(k, n):
    shares = custody.split(SECRET, k=k, n=n, random=secrets.token_bytes)
    for chosen in itertools.combinations(range(1, n + 1), k):
        points = {x: shares[x - 1] for x in chosen}
        assert custody.interpolate(points, 0) == SECRET
        assert by_logarithms(points) == SECRET


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_what_is_split_is_recovered(data):
    n = data.draw(st.integers(1, 255))
    k = data.draw(st.integers(1, min(n, 6)))
    secret = data.draw(st.binary(min_size=1, max_size=8))
    source = data.draw(st.randoms(use_true_random=False))
    given_ = [
        custody.Share(ROUND, SEAL, x, k, n, share).encode()
        for x, share in enumerate(custody.split(secret, k=k, n=n, random=source.randbytes), start=1)
    ]
    chosen = data.draw(st.permutations(given_)) if n < 12 else given_[-k:]
    assert recovered(chosen[:k]) == secret


def test_fewer_than_k_shares_fit_every_secret_equally_often():
    """Exhaustive for one byte and k = 2: over all coefficients each share takes each value once, whatever the secret."""
    for secret in (0, 1, 77, 255):
        dealt = [custody.split(bytes([secret]), k=2, n=3, random=lambda _, c=c: bytes([c])) for c in range(256)]
        for x in range(3):
            assert sorted(shares[x][0] for shares in dealt) == list(range(256))


def test_one_share_of_two_is_compatible_with_every_secret():
    share = custody.split(b"\x2a", k=2, n=3, random=secrets.token_bytes)[1]
    secrets_ = {custody.interpolate({2: share, 3: bytes([other])}, 0) for other in range(256)}
    assert len(secrets_) == 256


def test_the_coefficients_are_fresh_for_each_byte_and_each_degree():
    asked = []

    def random(count):
        asked.append(count)
        return secrets.token_bytes(count)

    custody.split(SECRET, k=4, n=5, random=random)
    assert asked == [32, 32, 32]
    with pytest.raises(ValueError, match="another number of bytes"):
        custody.split(SECRET, k=2, n=2, random=lambda count: bytes(count - 1))


@pytest.mark.parametrize(("k", "n"), [(0, 1), (3, 2), (1, 256), (-1, 3), (1, 0)])
def test_impossible_thresholds_are_refused(k, n):
    with pytest.raises(Refusal) as caught:
        custody.split(SECRET, k=k, n=n, random=secrets.token_bytes)
    assert caught.value.code == "definition_invalid"


@pytest.mark.parametrize(
    ("chosen", "code"),
    [
        (lambda a, b: [], "share_missing"),
        (lambda a, b: a[:1], "share_missing"),
        (lambda a, b: [a[0], a[0]], "share_false"),
        (lambda a, b: [a[0], b[1]], "share_false"),
        (lambda a, b: [a[0], documents(k=3)[1]], "share_false"),
        (lambda a, b: [a[0], documents(n=4)[1]], "share_false"),
        (lambda a, b: [a[0], documents(secret=b"short")[1]], "share_false"),
        (lambda a, b: [a[0], documents(round_id="another")[1]], "share_false"),
        (lambda a, b: [a[0], documents(round_id=None)[1]], "share_false"),
        (lambda a, b: [a[0], a[1], documents()[2]], "share_false"),
    ],
)
def test_shares_that_do_not_belong_together_are_refused(chosen, code):
    with pytest.raises(Refusal) as caught:
        recovered(chosen(documents(), documents(seal="sha256:" + "6e" * 32)))
    assert caught.value.code == code


def test_the_dealer_is_found_consistent_from_any_k_documents():
    given_ = documents(k=3, n=5)
    for chosen in itertools.permutations(given_, 3):
        custody.consistent(chosen, commitments(given_), of=split(3, 5))
    custody.consistent(given_, commitments(given_), of=split(3, 5))


def test_a_false_share_is_named():
    given_ = documents()
    raw = bytearray(custody.parse_document(given_[1]).share)
    raw[0] ^= 1
    false = custody.Share(ROUND, SEAL, 2, 2, 3, bytes(raw)).encode()
    with pytest.raises(Refusal, match="^share 2 has digest") as caught:
        custody.consistent([given_[0], false], commitments(given_), of=split())
    assert caught.value.code == "share_false"


def test_an_inconsistent_dealer_is_named_with_the_shares_he_dealt_wrongly():
    given_ = documents()
    given_[2] = documents()[2]  # committed to, but on another polynomial
    with pytest.raises(Refusal, match="shares 1, 2 match their commitments, but imply other shares for 3") as caught:
        custody.consistent(given_[:2], commitments(given_), of=split())
    assert caught.value.code == "seal_mismatch"
    with pytest.raises(Refusal, match="imply other shares for 2"):
        custody.consistent([given_[0], given_[2]], commitments(given_), of=split())


def test_documents_of_another_threshold_and_too_few_of_them_are_refused():
    given_ = documents()
    for k, n, code in ((3, 3, "share_false"), (2, 4, "seal_mismatch")):
        with pytest.raises(Refusal) as caught:
            custody.consistent(given_, commitments(given_), of=split(k, n))
        assert caught.value.code == code
    with pytest.raises(Refusal, match="1 of the 2 shares") as caught:
        custody.consistent(given_[:1], commitments(given_), of=split())
    assert caught.value.code == "share_missing"


# ---- documents -----------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 255),
    st.integers(1, 255),
    st.integers(1, 255),
    st.binary(min_size=1, max_size=64),
    st.binary(min_size=32, max_size=32),
)
@settings(deadline=None)
def test_a_document_that_parses_is_written_again_as_the_same_bytes(a, b, c, share, seal):
    index, k, n = sorted((a, b))[0], sorted((a, b, c))[1], 255
    for round_id in (ROUND, None):
        document = custody.Share(round_id, "sha256:" + seal.hex(), index, k, n, share).encode()
        parsed = custody.parse_document(document)
        assert parsed.encode() == document
        assert (parsed.round, parsed.index, parsed.k, parsed.n, parsed.share) == (round_id, index, k, n, share)


def test_a_document_is_the_canonical_json_that_the_protocol_names():
    document = custody.Share("r", SEAL, 1, 2, 3, b"\x01\x02").encode()
    begin, end = b'{"index":1,"k":2,"n":3,', b'"seal":"' + SEAL.encode() + b'","share":"AQI=","type":"Share","v":%d}'
    assert document == begin + b'"round":"r",' + end % 2
    assert custody.Share(None, SEAL, 1, 2, 3, b"\x01\x02").encode() == begin + end % 1


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 1},
        {"v": 3},
        {"v": True},
        {"v": 2.5},
        {"round": ""},
        {"round": None},
        {"round": 7},
        {"type": "share"},
        {"type": None},
        {"type": ["Share"]},
        {"index": 0},
        {"index": 4},
        {"index": "1"},
        {"index": 1.5},
        {"k": 4},
        {"k": 0},
        {"n": 256},
        {"seal": "x"},
        {"seal": None},
        {"share": ""},
        {"share": "AQI"},
        {"share": "AQJ="},
        {"share": 5},
        {"more": 1},
    ],
)
def test_a_document_of_another_form_is_refused(changes):
    good = {"v": 2, "type": "Share", "round": "r", "seal": SEAL, "index": 1, "k": 2, "n": 3, "share": "AQI="}
    custody.parse_document(digests.canonical(good))
    with pytest.raises(Refusal) as caught:
        custody.parse_document(digests.canonical(good | changes))
    assert caught.value.code == "share_unreadable"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"round_id": "digits-autumn"}, f"the round digits-autumn for {ROUND}"),
        ({"seal": "sha256:" + "6e" * 32}, f"the seal sha256:{'6e' * 32} for {SEAL}"),
        ({"k": 1}, "the threshold 1 of 3 for 2 of 3"),
        ({"n": 4}, "the threshold 2 of 4 for 2 of 3"),
        ({"secret": b"x"}, "the length in bytes 1 for 32"),
    ],
)
def test_a_share_of_another_round_seal_threshold_or_length_is_no_share_of_this_one(made, words):
    """Committed to by the seal's record, all of them: it is the document that must say so."""
    identity, recipient = person()
    document = documents(**made)[0]
    envelope = custody.envelope(document, index=1, to="ada", main=recipient, backup=None)
    share = {"index": 1, "to": "ada", "commitment": custody.document_digest(document)}
    share["envelope"] = custody.envelope_digest(envelope)
    for call in (
        lambda: custody.open_envelope(envelope, identity, share=share, of=split()),
        lambda: custody.consistent([document], commitments(documents(**made))[:3], of=split()),
    ):
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.code == "share_false" and words in caught.value.sentence and caught.value.hint


def test_a_document_that_names_no_round_is_read_in_rounds_of_its_age_only():
    given_ = documents(round_id=None)
    custody.consistent(given_[:2], commitments(given_), of=split(unbound=True))
    with pytest.raises(Refusal, match="version 1, which names no round") as caught:
        custody.consistent(given_[:2], commitments(given_), of=split())
    assert caught.value.code == "share_unreadable"
    # Rounds of that age take bound shares, too, but not those of another round.
    bound, others = documents(), documents(round_id="another")
    custody.consistent(bound[:2], commitments(bound), of=split(unbound=True))
    with pytest.raises(Refusal, match="the round another for"):
        custody.consistent(others[:2], commitments(others), of=split(unbound=True))


def test_a_rehearsals_share_and_a_real_one_never_pass_for_each_other():
    real, dummy = documents(), documents(rehearsal=True)
    assert custody.parse_document(dummy[0], rehearsal=True).encode() == dummy[0]
    assert b'"type":"RehearsalShare"' in dummy[0]
    custody.consistent(dummy[:2], commitments(dummy), of=split(rehearsal=True))
    identity, recipient = person()
    for given_, rehearsal in ((real, True), (dummy, False)):
        envelope = custody.envelope(given_[0], index=1, to="ada", main=recipient, backup=None)
        share = {"index": 1, "to": "ada", "commitment": custody.document_digest(given_[0])}
        share["envelope"] = custody.envelope_digest(envelope)
        for call in (
            lambda r, d=given_: custody.parse_document(d[0], rehearsal=r),
            lambda r, d=given_: custody.consistent(d[:2], commitments(d), of=split(rehearsal=r)),
            lambda r, e=envelope, s=share: custody.open_envelope(e, identity, share=s, of=split(rehearsal=r)),
        ):
            with pytest.raises(Refusal, match="only a") as caught:
                call(rehearsal)
            assert caught.value.code == "share_false"
            call(not rehearsal)


def test_shares_of_both_types_do_not_recover_together():
    dummy = custody.parse_document(documents(rehearsal=True)[0], rehearsal=True)
    with pytest.raises(Refusal, match="not of the same seal"):
        custody.recover([dummy, custody.parse_document(documents()[1])])


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"null", b"\xff", b'{"a": 1}'])
def test_bytes_that_are_no_document_are_refused(data):
    with pytest.raises(Refusal) as caught:
        custody.parse_document(data)
    assert caught.value.code == "share_unreadable"


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_flipped_bit_anywhere_in_a_document_is_refused_at_the_opening(data):
    given_ = documents()
    raw = bytearray(given_[0])
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Refusal) as caught:
        custody.consistent([bytes(raw), given_[1]], commitments(given_), of=split())
    assert caught.value.code in ("share_unreadable", "share_false")


# ---- envelopes -----------------------------------------------------------------------------------------------------


def person():
    identity = pyrage.x25519.Identity.generate()
    return str(identity), str(identity.to_public())


def enveloped(backup=True):
    document = documents()[0]
    main, spare = person(), person()
    envelope = custody.envelope(document, index=1, to="ada", main=main[1], backup=spare[1] if backup else None)
    share = {
        "index": 1,
        "to": "ada",
        "commitment": custody.document_digest(document),
        "envelope": custody.envelope_digest(envelope),
    }
    return document, envelope, share, main[0], spare[0]


def test_main_and_backup_identity_open_the_envelope_and_no_other_does():
    document, envelope, share, main, spare = enveloped()
    assert custody.open_envelope(envelope, main, share=share, of=split()) == document
    assert custody.open_envelope(envelope, spare, share=share, of=split()) == document
    with pytest.raises(Refusal, match="does not open") as caught:
        custody.open_envelope(envelope, person()[0], share=share, of=split())
    assert caught.value.code == "share_unreadable"
    _, alone, share, main, spare = enveloped(backup=False)
    assert alone["backup"] is None
    custody.open_envelope(alone, main, share=share, of=split())
    with pytest.raises(Refusal, match="does not open"):
        custody.open_envelope(alone, spare, share=share, of=split())


def test_an_envelope_is_an_age_file():
    _, envelope, *_ = enveloped()
    for name in ("main", "backup"):
        assert base64.b64decode(envelope[name]).startswith(b"age-encryption.org/v1\n-> X25519 ")


def test_an_envelope_other_than_the_committed_one_is_refused():
    _, envelope, share, main, _ = enveloped()
    other = custody.envelope(documents()[0], index=1, to="ada", main=person()[1], backup=None)
    for changed in (other, envelope | {"backup": None}, envelope | {"index": 2}):
        with pytest.raises(Refusal) as caught:
            custody.open_envelope(changed, main, share=share, of=split())
        assert caught.value.code == "share_false"
    for changed in ({**envelope, "more": 1}, {"index": 1}, {}):
        with pytest.raises(Refusal) as caught:
            custody.open_envelope(changed, main, share=share, of=split())
        assert caught.value.code == "share_unreadable"


def test_a_share_of_another_seal_or_commitment_in_the_right_envelope_is_refused():
    _, envelope, share, main, _ = enveloped()
    for changed in (share | {"commitment": custody.document_digest(b"x")}, share | {"index": 2}):
        with pytest.raises(Refusal, match="not the one that the seal commits to") as caught:
            custody.open_envelope(envelope, main, share=changed, of=split())
        assert caught.value.code == "share_false"
    with pytest.raises(Refusal, match="the seal sha256:5e"):
        custody.open_envelope(envelope, main, share=share, of=custody.Split(ROUND, "sha256:" + "00" * 32, 2, 3))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6))
def test_a_flipped_bit_anywhere_in_an_age_file_is_refused(place):
    identity, recipient = person()
    raw = bytearray(custody.wrap(b"share", recipient))
    bit = place % (len(raw) * 8)
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Refusal) as caught:
        custody.unwrap(bytes(raw), identity)
    assert caught.value.code == "share_unreadable"


def test_malformed_recipients_and_identities_are_refused_without_repeating_a_secret():
    with pytest.raises(Refusal) as caught:
        custody.wrap(b"share", "age1nobody")
    assert caught.value.code == "key_refused"
    secret = person()[0]
    with pytest.raises(Refusal) as caught:
        custody.unwrap(custody.wrap(b"share", person()[1]), secret[:-1])
    assert caught.value.code == "key_refused"
    assert secret[20:40] not in str(caught.value)
