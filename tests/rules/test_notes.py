"""Signed notes and checkpoints: the examples of C2SP open, and no other spelling does."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import log, notes
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

ORIGIN = "log.example/acclimate"
SIGNER = log.Signer(ORIGIN, Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
WITNESS_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
WITNESS = notes.Verifier("witness.example/w1", notes.COSIGNATURE, WITNESS_KEY.public_key().public_bytes_raw())


def leaf(i):
    return digests.leaf_hash(f"entry {i}".encode())


# ---- notes ---------------------------------------------------------------------------------------------------------

# The example of c2sp.org/signed-note
FOO = "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k"
FOO_NOTE = (
    "This is an example message.\n\n"
    "— example.com/foo Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=\n"
)


def refused_note(note, *verifiers, match=None):
    with pytest.raises(Refusal, match=match) as caught:
        log.open_note(note, verifiers)
    assert caught.value.code == "proof_invalid"


def test_the_example_of_the_specification_opens():
    opened = log.open_note(FOO_NOTE, [log.parse_vkey(FOO)])
    assert opened.text == "This is an example message.\n"
    assert log.parse_vkey(FOO).text() == FOO


def test_the_checkpoint_example_of_the_specification_parses():
    note = (
        "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
        "— example.com/behind-the-sofa Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
        "— witness.example.com/w1 jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2oyin1nPZqhf5nNo0xUe+mbIUBkBIfZ+qnA==\n"
    )
    parsed = log.parse_note(note)
    assert parsed.encode() == note
    assert log.parse_checkpoint(parsed.text).size == 20852163
    assert int.from_bytes(parsed.signatures[1].data[:8], "big") == 1679315147


def test_lines_of_unknown_keys_are_ignored_and_bad_lines_of_known_ones_are_not():
    other = log.Signer("other.example", Ed25519PrivateKey.generate())
    both = log.sign_note("text\n", other, SIGNER)
    assert list(log.open_note(both, [SIGNER.verifier]).signed) == [SIGNER.vkey]
    assert set(log.open_note(both, [SIGNER.verifier, other.verifier]).signed) == {SIGNER.vkey, other.vkey}
    refused_note(both, log.Signer("third.example", other.key).verifier, match="no known key")
    refused_note(both, match="no known key")
    forged = both.replace(
        log.parse_note(both).signatures[0].line(), log.parse_note(log.sign_note("else\n", other)).signatures[0].line()
    )
    assert list(log.open_note(forged, [SIGNER.verifier]).signed) == [SIGNER.vkey]
    refused_note(forged, SIGNER.verifier, other.verifier, match=r"other\.example.*does not verify")


def test_a_name_alone_or_a_key_alone_makes_no_known_key():
    note = log.sign_note("text\n", SIGNER)
    refused_note(note, log.Signer(ORIGIN, Ed25519PrivateKey.generate()).verifier, match="no known key")
    refused_note(note, log.Signer("elsewhere.example", SIGNER.key).verifier, match="no known key")


def test_sixteen_signatures_are_accepted_and_a_hundred_and_one_are_not():
    many = [log.Signer(f"s{i}.example", Ed25519PrivateKey.generate()) for i in range(16)]
    assert len(log.open_note(log.sign_note("text\n", *many), [s.verifier for s in many]).signed) == 16
    note = log.sign_note("text\n", SIGNER)
    refused_note(note + log.parse_note(note).signatures[0].line() * 100, SIGNER.verifier, match="at most 100")


GOOD = log.sign_note("one\ntwo\n", SIGNER)
LINE = GOOD.split("\n\n")[1]


@pytest.mark.parametrize(
    "note",
    [
        "",
        "\n",
        "\n\n",
        "one\n",
        "one\n\n",
        GOOD[:-1],
        GOOD + "\n",
        GOOD + " ",
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("one", "o\tne"),
        GOOD.replace("one", "o\x00ne"),
        GOOD.replace("— ", "- "),
        GOOD.replace("— ", "—  "),
        GOOD.replace("— ", "—"),
        GOOD.replace(ORIGIN + " ", ORIGIN + "  "),
        GOOD.replace(ORIGIN + " ", " "),
        GOOD.replace(ORIGIN + " ", "a+b "),
        GOOD.replace(ORIGIN + " ", "a\u00a0b "),
        GOOD.replace(ORIGIN + " ", "a\u2003b "),
        GOOD.replace(LINE, f"— {ORIGIN} \n"),
        GOOD.replace(LINE, f"— {ORIGIN} AAAA\n"),
        GOOD.replace(LINE, LINE[:-1] + "=\n"),
        GOOD.replace(LINE, LINE[:-2] + "\n"),
        GOOD.replace(LINE, LINE.replace("\n", " \n")),
        "one\ntwo\n" + LINE,
        GOOD.encode() + b"\xff\n",
        GOOD.replace("one", "\ud800"),
        "x" * 1_000_001 + GOOD,
    ],
)
def test_other_spellings_of_a_note_are_refused(note):
    refused_note(note, SIGNER.verifier)


lines = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
names = st.from_regex(r"[a-z0-9./é-]{1,12}", fullmatch=True)


@settings(deadline=None)
@given(
    st.lists(lines, min_size=1, max_size=5),
    st.lists(
        st.tuples(names, st.binary(min_size=4, max_size=4), st.binary(min_size=1, max_size=80)), min_size=1, max_size=4
    ),
)
def test_a_note_that_parses_is_written_again_as_the_same_bytes(text, signatures):
    note = notes.Note("".join(f"{line}\n" for line in text), tuple(notes.Signature(*s) for s in signatures))
    assert log.parse_note(note.encode()) == note
    assert log.parse_note(note.encode().encode()).encode() == note.encode()


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_changed_note_is_refused_or_another_note_but_never_the_same_text_signed(data):
    raw = bytearray(GOOD.encode())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Refusal) as caught:
        log.open_note(bytes(raw), [SIGNER.verifier])
    assert caught.value.code == "proof_invalid"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name",
        FOO.replace("530d903a", "530d903b"),
        FOO.replace("530d903a", "530D903A"),
        FOO.replace("example.com/foo", "example.com/bar"),
        FOO.replace("example.com/foo", "exa mple"),
        FOO[:-1] + "l",
        FOO + "=",
        FOO.replace("+Ae", "+Ce"),
        FOO + "\n",
        notes.Verifier("low", notes.ED25519, bytes(32)).text(),
        notes.Verifier("kind", 2, bytes(range(32))).text(),
        notes.Verifier("short", 1, bytes(range(31))).text(),
        None,
    ],
)
def test_malformed_verifier_keys_are_refused(text):
    with pytest.raises(Refusal) as caught:
        log.parse_vkey(text)
    assert caught.value.code == "key_refused"


@pytest.mark.parametrize("origin", ["", "a b", "a+b", "a\nb", "a\tb"])
def test_an_origin_that_no_key_can_carry_is_refused(origin):
    with pytest.raises(Refusal) as caught:
        log.Signer(origin, SIGNER.key)
    assert caught.value.code == "config_invalid"


# ---- checkpoints and cosignatures ----------------------------------------------------------------------------------


def cosigned(size=5, seconds=1_800_000_000, key=WITNESS_KEY, name=WITNESS.name):
    body = log.checkpoint(ORIGIN, size, leaf(size))
    return log.sign_note(body, SIGNER) + notes.cosign(body, name=name, key=key, time=seconds).line()


def test_a_checkpoint_opens_with_the_times_of_known_witnesses():
    opened = log.open_checkpoint(cosigned(), SIGNER.verifier, [WITNESS])
    assert (opened.checkpoint.size, opened.checkpoint.root) == (5, leaf(5))
    assert opened.cosigned == {WITNESS.text(): 1_800_000_000}
    assert log.open_checkpoint(cosigned(), SIGNER.verifier).cosigned == {}
    assert log.parse_vkey(WITNESS.text()) == WITNESS


def test_a_cosignature_covers_its_time_and_the_whole_text():
    note = cosigned()
    good = log.parse_note(note).signatures[1]
    moved = notes.Signature(good.name, good.key_id, (1_700_000_000).to_bytes(8, "big") + good.data[8:])
    late = notes.Signature(good.name, good.key_id, b"\xff" + good.data[1:])
    for bad in (moved, late, notes.Signature(good.name, good.key_id, good.data[:-1])):
        with pytest.raises(Refusal, match=r"witness\.example/w1.*does not verify"):
            log.open_checkpoint(note.replace(good.line(), bad.line()), SIGNER.verifier, [WITNESS])
        log.open_checkpoint(note.replace(good.line(), bad.line()), SIGNER.verifier)


def test_one_key_under_two_names_is_one_witness():
    alias = notes.Verifier("witness.example/w2", notes.COSIGNATURE, WITNESS.public)
    body = log.checkpoint(ORIGIN, 5, leaf(5))
    second = notes.cosign(body, name=alias.name, key=WITNESS_KEY, time=1_800_000_001).line()
    assert log.open_checkpoint(cosigned() + second, SIGNER.verifier, [WITNESS, alias]).cosigned == {
        WITNESS.text(): 1_800_000_000
    }
    assert log.open_checkpoint(log.sign_note(body, SIGNER) + second, SIGNER.verifier, [WITNESS, alias]).cosigned == {
        alias.text(): 1_800_000_001
    }


def test_a_checkpoint_that_only_witnesses_or_another_log_signed_is_refused():
    body = log.checkpoint(ORIGIN, 5, leaf(5))
    cosignature = notes.cosign(body, name=WITNESS.name, key=WITNESS_KEY, time=1).line()
    other = log.Signer("other.example", SIGNER.key)
    for note in (f"{body}\n{cosignature}", log.sign_note(body, other) + cosignature):
        with pytest.raises(Refusal, match="not signed by the log"):
            log.open_checkpoint(note, SIGNER.verifier, [WITNESS])
    with pytest.raises(Refusal, match=r"of the log 'log\.example/acclimate', not 'other\.example'"):
        log.open_checkpoint(log.sign_note(body, other), other.verifier)
    with pytest.raises(Refusal, match="not signed by the log"):
        log.open_checkpoint(f"{body}\n{cosignature}", WITNESS)


ROOT64 = base64.b64encode(leaf(1)).decode()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "\n",
        "a\n1\n",
        f"a\n1\n{ROOT64}",
        f"\n1\n{ROOT64}\n",
        f"a\n01\n{ROOT64}\n",
        f"a\n-1\n{ROOT64}\n",
        f"a\n+1\n{ROOT64}\n",
        f"a\n1.0\n{ROOT64}\n",
        f"a\n١\n{ROOT64}\n",
        f"a\n \n{ROOT64}\n",
        f"a\n9223372036854775808\n{ROOT64}\n",
        f"a\n1\n{ROOT64[:-1]}\n",
        f"a\n1\n{ROOT64} \n",
        "a\n1\nAAAA\n",
        f"a\n1\n{ROOT64}\n\n",
        f"a\n1\n{ROOT64}\nx\n\ny\n",
    ],
)
def test_other_spellings_of_a_checkpoint_are_refused(body):
    with pytest.raises(Refusal) as caught:
        log.parse_checkpoint(body)
    assert caught.value.code == "proof_invalid"


@settings(deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
    st.integers(0, 2**63 - 1),
    st.binary(min_size=32, max_size=32),
    st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), max_size=3),
)
def test_a_checkpoint_that_parses_is_written_again_as_the_same_text(origin, size, root, extensions):
    checkpoint = log.Checkpoint(origin, size, root, tuple(extensions))
    assert log.parse_checkpoint(checkpoint.body()) == checkpoint
