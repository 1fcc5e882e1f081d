"""Canonical JSON against the numbers and strings of RFC 8785, and Merkle roots against their recursive definition."""

import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

# RFC 8785, appendix B: IEEE 754 bits and their text
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(("bits", "text"), NUMBERS.items())
def test_numbers_are_written_as_rfc_8785_says(bits, text):
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert digests.canonical(value) == text.encode()
    assert digests.canonical(digests.parse_canonical(text.encode())) == text.encode()


@pytest.mark.parametrize("bits", ["7fffffffffffffff", "7ff0000000000000", "fff0000000000000"])
def test_what_json_has_no_number_for_is_refused(bits):
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    with pytest.raises(Refusal, match="JSON has no"):
        digests.canonical({"score": [value]})


def test_strings_and_order_are_written_as_rfc_8785_says():
    given_ = (
        r'{"numbers":[333333333.33333329,1E30,4.50,2e-3,0.000000000000000000000000001],'
        r'"string":"\u20ac$\u000F\u000aA\u0027\u0042\u0022\u005c\\\"\/","literals":[null,true,false]}'
    )
    expected = (
        r'{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        r'"string":"€$\u000f\nA'
        r"'"
        r'B\"\\\\\"/"}'
    )
    assert digests.canonical(json.loads(given_)).decode() == expected


def test_keys_are_ordered_by_utf_16_code_units():
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\u0080", "\u00f6"]
    text = digests.canonical(dict.fromkeys(keys)).decode()
    assert list(json.loads(text)) == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a":1,"a":1}', "stands twice"),
        (b'{"b":1,"a":2}', "canonical form"),
        (b'{"a": 1}', "canonical form"),
        (b'{"a":1}\n', "canonical form"),
        (b"1.0", "canonical form"),
        (b"1e2", "canonical form"),
        (b"-0", "canonical form"),
        (b'"\\u0041"', "canonical form"),
        (b'"\\/"', "canonical form"),
        (b'"\\u000F"', "canonical form"),
        (b"9007199254740993", "canonical form"),
        (b"1" * 5000, "JSON has no inf"),
        (b"NaN", "JSON has no nan"),
        (b"1e999", "JSON has no inf"),
        (b'"\\ud800"', "lone surrogate"),
        (b"\xef\xbb\xbf1", "not JSON"),
        (b"\xff", "not JSON"),
        (b"", "not JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "not JSON|too deeply"),
    ],
)
def test_bytes_that_are_json_in_another_spelling_are_refused(text, why):
    with pytest.raises(Refusal, match=why) as caught:
        digests.parse_canonical(text)
    assert caught.value.code == "not_canonical"


@pytest.mark.parametrize("value", [2**53, -(2**53), b"bytes", {1: 2}, {"a": {3}}, np.int64(1), object()])
def test_values_that_json_can_not_say_exactly_are_refused(value):
    with pytest.raises(Refusal) as caught:
        digests.canonical(value)
    assert caught.value.code == "not_canonical"


def test_a_value_nested_too_deeply_is_refused():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(Refusal, match="too deeply"):
        digests.canonical(value)
    while value:  # taken apart by hand: letting go of it at once would recurse as deeply
        value = value.pop()


def test_a_float_of_numpy_is_written_like_any_float():
    assert digests.canonical(np.float64(0.1)) == b"0.1"


@settings(deadline=None)
@given(JSON)
def test_what_is_written_parses_to_the_same_bytes(value):
    data = digests.canonical(value)
    assert digests.canonical(digests.parse_canonical(data)) == data
    assert digests.parse_canonical(data) == value


def _root(leaves):
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return hashlib.sha256(b"\1" + _root(leaves[:k]) + _root(leaves[k:])).digest()


@pytest.mark.parametrize("size", [*range(18), 31, 32, 33, 100])
def test_roots_follow_the_recursive_definition(size):
    leaves = [f"leaf {i}".encode() for i in range(size)]
    assert digests.root_of_leaves(leaves) == "sha256:" + _root(leaves).hex()


def test_a_digest_has_one_form():
    assert digests.is_digest(digests.of_bytes(b""))
    for text in (
        "",
        "sha256:",
        "sha256:" + "A" * 64,
        "sha256:" + "a" * 63,
        "sha256:" + "a" * 64 + "\n",
        None,
        5,
        b"sha256:",
    ):
        assert not digests.is_digest(text)
