"""What people see of a name is all that there is of it, wherever it comes in."""

import sys
import unicodedata

import pytest

from acclimate import notes, witness_client
from acclimate.service import names
from acclimate_competitions import records, vkeys
from acclimate_competitions.errors import Refusal

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
SEED = bytes(range(32))


def vkey(name: str) -> str:
    verifier = notes.Verifier(name, notes.COSIGNATURE, PUBLIC)
    return verifier.text()


def public() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw()


PUBLIC = public()


@pytest.mark.parametrize("category", HIDDEN)
def test_no_character_of_a_category_that_nobody_sees_is_taken(category: str) -> None:
    found = [chr(i) for i in range(sys.maxunicode + 1) if unicodedata.category(chr(i)) == category]
    for character in found[:: max(1, len(found) // 3000)] + found[-1:]:
        assert names.problem(f"lab{character}"), hex(ord(character))
        assert names.problem(f"l{character}ab"), hex(ord(character))


@pytest.mark.parametrize(
    "name",
    ["lab\u200b", "lab\u00ad", "lab\u2060", "la\U000e0062b", "la\u200db", "lab\ufe0f", "l\u034fab", "lab\u3164", "lab\u2800", "lab\u200e", "\u200cab"],
)  # fmt: skip
def test_what_looks_like_another_name_is_refused(name: str) -> None:
    with pytest.raises(Refusal) as caught:
        names.check(name, what="the name")
    assert caught.value.code == "name_invalid" and "U+" in caught.value.sentence


@pytest.mark.parametrize(
    "name", ["lab", "Lab 7", "Universität", "大学", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\u0915\u094d\u200d\u0937", "I \u2764\ufe0f ML", "😀"]
)  # fmt: skip
def test_what_people_write_is_taken(name: str) -> None:
    assert names.check(name, what="the name") == name


@pytest.mark.parametrize(
    "name", ["w.example\u200b.org", "w\u00ad.example.org", "w\u202e.example.org", "w\u0085", "w" * 150]
)
def test_a_witness_with_such_a_name_is_in_no_settings(name: str) -> None:
    with pytest.raises(Refusal) as caught:
        witness_client.parse_endpoint(f"https://w.example.org {vkey(name)}")
    assert caught.value.code == "config_invalid"


def test_the_longest_name_of_a_witness_gives_the_longest_key_that_a_round_names() -> None:
    text = vkey("w" * vkeys.LONGEST_NAME)
    assert len(text) == vkeys.LONGEST
    assert witness_client.parse_endpoint(f"https://w.example.org {text}").verifier.text() == text


def test_the_longest_id_of_a_round_is_one() -> None:
    longest = f"{'c' * 63}-{'n' * 32}-{'0' * 32}"
    assert len(longest) == records.LONGEST_ROUND_ID and records.is_round_id(longest)
