"""How much longer a tokenizer's replacements make a text: never less than the library makes of it, and honest ones are let through."""

import base64
import json
import math
import struct
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers

from acclimate_runners import replacements

LEAST = {
    " {2,}": 2,
    " +": 1,
    r"\s+": 1,
    r"[^\S\n]+": 1,
    "^ +| +$": 1,
    r"\.{3}": 3,
    r"[\]a]b?": 1,
    "é": 1,
    r"\p{Z}{2}": 2,
    # By Oniguruma's own reading the smaller of both.
    "x{2,1}": 1,
    # What may match nothing.
    "": 0,
    "a*": 0,
    "a?b*": 0,
    "a{0,}": 0,
    "a{,3}": 0,
    "^": 0,
    "a|": 0,
    "a{2}{0}": 0,
    # What is not told: in Ruby's syntax the second means "a thrice or not at all".
    "(a)": 0,
    "a{3}?": 0,
    "a+?": 0,
    r"\b": 0,
    r"\K": 0,
    "[[:space:]]": 0,
    "[a&&b]": 0,
}
TEXTS = ["", "a", "aaa", "  a  b\n\n c...", "xx é  é", "aaaaaa bbb"]


@pytest.mark.parametrize(("pattern", "least"), LEAST.items())
def test_the_shortest_match_of_a_pattern_is_told_where_it_is_plain(pattern: str, least: int) -> None:
    assert replacements.shortest(pattern) == least


@pytest.mark.parametrize("pattern", LEAST)
@pytest.mark.parametrize("content", ["", "▁", "0123456789" * 10])
def test_the_library_makes_no_text_longer_than_is_told(pattern: str, content: str) -> None:
    try:
        replace = normalizers.Replace(Regex(pattern), content)
    except Exception:  # the library's own kind: a pattern that it does not read does nothing
        return
    (growth,) = replacements.growths({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    for text in TEXTS:
        made = len(replace.normalize_str(text).encode())
        # A pattern that matches nothing matches once more, behind the last character.
        assert made <= growth * (len(text.encode()) + 1), (text, made)


def charsmap(key: str, text: str) -> str:
    """A precompiled map that writes a text for one ASCII character: a trie as darts-clone makes it, and the text behind it."""
    units, at = [0] * 0x400, 0x100 ^ ord(key)
    units[0], units[at] = 0x100 << 10, ord(key) | 1 << 8 | 0x200 << 10
    trie = struct.pack(f"<{len(units)}I", *units)
    return base64.b64encode(struct.pack("<I", len(trie)) + trie + text.encode() + b"\0").decode()


def normalized(step: dict[str, Any], text: str) -> str:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    empty = dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder"))
    document = {"version": "1.0", "added_tokens": [], "normalizer": step, "model": model, **empty}
    made = Tokenizer.from_str(json.dumps(document)).normalizer
    assert made is not None
    return str(made.normalize_str(text))


REPLACE = {"pattern": {"String": "a"}, "content": "b" * 50}
STEPS: list[tuple[dict[str, Any], float]] = [
    ({"type": "Replace", **REPLACE}, 50.0),
    (REPLACE, 50.0),
    ({"type": "replace", **REPLACE}, 50.0),
    ({"type": None, **REPLACE}, 50.0),
    ({"normalizers": [REPLACE]}, 50.0),
    ({"type": "Prepend", "prepend": "b" * 99}, 100.0),
    ({"prepend": "\u2581"}, 4.0),
    ({"type": "Precompiled", "precompiled_charsmap": charsmap("a", "b" * 70)}, 70.0),
    ({"type": "Precompiled", "precompiled_charsmap": charsmap("a", "")}, 1.0),
    (
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        5 / 3,
    ),
]


@pytest.mark.parametrize(("step", "told"), STEPS, ids=[str(list(step)) + str(told) for step, told in STEPS])
def test_each_step_that_the_library_reads_is_told_with_or_without_its_type(step: dict[str, Any], told: float) -> None:
    assert list(replacements.growths(step)) == [told]
    for text in (*TEXTS, "\u4e00\u4e01"):
        assert len(normalized(step, text).encode()) <= told * max(1, len(text.encode())), text


@pytest.mark.parametrize("charsmap", ["no base64!", "AAA", None, 7])
def test_a_map_of_characters_that_is_none_is_growth_without_end(charsmap: object) -> None:
    assert list(replacements.growths({"precompiled_charsmap": charsmap})) == [math.inf]


def test_many_replacements_of_blanks_are_no_growth() -> None:
    steps = [
        {"type": "Replace", "pattern": {"Regex": pattern}, "content": " "} for pattern in (r"\s+", " {2,}", r"\n+") * 10
    ]
    assert all(growth == 1.0 for growth in replacements.growths({"type": "Sequence", "normalizers": steps}))
    assert decoders.Sequence([decoders.Replace(Regex(r"\s+"), " ")] * 3).decode(["a  b"]) == "a b"
    # Each of these doubles a text.
    doubled = [{"type": "Replace", "pattern": {"Regex": "r"}, "content": "rr"}] * 7
    assert list(replacements.growths(doubled)) == [2.0] * 7


def test_bytes_as_characters_again_and_again_are_growth() -> None:
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (twice,) = replacements.growths(step)
    for count in (1, 4, 8):
        made = normalizers.Sequence([normalizers.ByteLevel() for _ in range(count)]).normalize_str("é" * 10)
        assert len(made.encode()) <= twice**count * 20
        assert len(list(replacements.growths({"type": "Sequence", "pretokenizers": [step] * count}))) == count
    # The bound is reached: it is none of caution.
    assert len(made.encode()) == 2**8 * 20
