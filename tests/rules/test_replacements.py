"""How much longer a tokenizer's replacements make a text: never less than the library makes of it, and honest ones are let through."""

import base64
import json
import math
import struct
import unicodedata
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

from acclimate_runners import charsmaps, replacements, unicode_forms

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
    growth = replacements.growth({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    for text in TEXTS:
        made = len(replace.normalize_str(text).encode())
        # A pattern that matches nothing matches once more, behind the last character.
        assert made <= growth * (len(text.encode()) + 1), (text, made)


def charsmap(entries: dict[str, str]) -> str:
    """A map as SentencePiece writes it, in a double array that is no smaller than is simple."""
    nodes = sorted({key.encode()[:end] for key in entries for end in range(len(key.encode()) + 1)})
    block = {node: 256 * (place + 1) for place, node in enumerate(nodes)}
    units, texts = [0] * (256 * (len(nodes) + 1)), b""
    for node in nodes:
        at = (block[node[:-1]] ^ node[-1]) if node else 0
        value = next((value for key, value in entries.items() if key.encode() == node), None)
        units[at] = (at ^ block[node]) << 10 | (value is not None) << 8 | (node[-1] if node else 0)
        if value is not None:
            units[block[node]] = 1 << 31 | len(texts)
            texts += value.encode() + b"\0"
    array = struct.pack(f"<{len(units)}I", *units)
    return base64.b64encode(struct.pack("<I", len(array)) + array + texts).decode()


def normalized(step: Any, text: str) -> str:
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
    ({"type": "Precompiled", "precompiled_charsmap": charsmap({"a": "b" * 70})}, 770.0),
    ({"type": "Precompiled", "precompiled_charsmap": charsmap({"a": ""})}, 11.0),
    (
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        5.0,
    ),
]


@pytest.mark.parametrize(("step", "told"), STEPS, ids=[str(list(step)) + str(told) for step, told in STEPS])
def test_each_step_that_the_library_reads_is_told_with_or_without_its_type(step: dict[str, Any], told: float) -> None:
    assert replacements.growth(step) == pytest.approx(told)
    for text in (*TEXTS, "\u4e00\u4e01"):
        assert len(normalized(step, text).encode()) <= told * max(1, len(text.encode())), text


@pytest.mark.parametrize("step", [["NFKD"], [{"String": "a"}, "b" * 50], {"normalizers": [["b" * 50]]}])
def test_a_step_as_a_list_of_its_values_is_growth_without_end(step: Any) -> None:
    """The library reads it, and no program writes it."""
    normalized(step, "a")
    assert replacements.growth(step) == math.inf


@pytest.mark.parametrize("charsmap", ["no base64!", "AAA", None, 7])
def test_a_map_of_characters_that_is_none_is_growth_without_end(charsmap: object) -> None:
    assert replacements.growth({"precompiled_charsmap": charsmap}) == math.inf


def test_many_replacements_of_blanks_are_no_growth() -> None:
    steps = [
        {"type": "Replace", "pattern": {"Regex": pattern}, "content": " "} for pattern in (r"\s+", " {2,}", r"\n+") * 10
    ]
    assert replacements.growth({"type": "Sequence", "normalizers": steps}) == 1.0
    assert decoders.Sequence([decoders.Replace(Regex(r"\s+"), " ")] * 3).decode(["a  b"]) == "a b"
    # Each of these doubles a text.
    assert replacements.growth([{"pattern": {"String": "r"}, "content": "rr"}] * 5000) == math.inf
    doubled = [{"type": "Replace", "pattern": {"Regex": "r"}, "content": "rr"}] * 7
    assert replacements.growth(doubled) == 2.0**7


def test_bytes_as_characters_again_and_again_are_growth() -> None:
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    for count in (1, 4, 8):
        made = normalizers.Sequence([normalizers.ByteLevel() for _ in range(count)]).normalize_str("é" * 10)
        assert replacements.growth({"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * count}) == 2.0**count
        assert replacements.growth({"type": "Sequence", "pretokenizers": [step] * count}) == 2.0**count
    # The bound is reached: it is none of caution.
    assert len(made.encode()) == 2**8 * 20
    # Behind a split each piece gets a blank, too, which is a character of two bytes then.
    split, prefixed = pre_tokenizers.Split("a", "isolated"), pre_tokenizers.ByteLevel(True, use_regex=False)
    pieces = pre_tokenizers.Sequence([split, prefixed, prefixed]).pre_tokenize_str("aaaa")
    assert (
        sum(len(piece.encode()) for piece, _ in pieces)
        == 4 * 7
        <= 4 * replacements.growth([step | {"add_prefix_space": True}] * 2)
    )


CHARACTERS = [chr(number) for number in range(0x110000) if not 0xD800 <= number < 0xE000]
FORMS = {
    "canonical": [normalizers.NFC(), normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()],
    "compatible": [normalizers.NFKC(), normalizers.NFKD(), normalizers.Nmt()],
}


@pytest.mark.parametrize("forms", FORMS)
def test_no_form_of_unicode_makes_a_text_heavier_than_it_was(forms: unicode_forms.Forms) -> None:
    """For each character there is; the library's forms, not Python's."""
    weights = {one: unicode_forms.weight(one, forms) for one in CHARACTERS}
    assert max(weight / len(one.encode()) for one, weight in weights.items()) == unicode_forms.LONGEST[forms]
    printable = [one for one in CHARACTERS if one.isprintable()]
    for step in FORMS[forms]:
        assert [o for o in printable if unicode_forms.weight(step.normalize_str(o), forms) > weights[o]] == []
    # A character that NFC makes of several weighs no more than they do.
    composed = [
        one for one in CHARACTERS if unicodedata.normalize("NFD", one) != one == unicodedata.normalize("NFC", one)
    ]
    assert len(composed) > 10_000
    for one in composed:
        assert weights[one] <= unicode_forms.weight(unicodedata.normalize("NFD", one), forms)


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
@pytest.mark.parametrize(("short", "long"), [("ل", "ﷺ"), ("x", "ΐ"), ("i", "İ"), ("y", "\U0001d1c0"), ("z", "Ⱥ")])
def test_a_form_beside_a_replacement_is_growth_as_often_as_both_are_there(form: str, short: str, long: str) -> None:
    """What one unfolds the other folds again: eight times both made a text a million times longer, and counted as 26."""
    for count in (1, 2, 4):
        steps = [replace(short, long), {"type": form}] * count
        made = [normalizers.Replace(short, long), getattr(normalizers, form)()] * count
        bytes_ = len(normalizers.Sequence(made).normalize_str(short * 10).encode())
        assert bytes_ <= replacements.growth({"type": "Sequence", "normalizers": steps}) * 10 * len(short.encode())
    # Forms alone are none, however many.
    assert replacements.growth([{"type": form}] * 50) in (3.0, 11.0)


def test_the_form_that_unfolds_most_compounds() -> None:
    # Five of the eighteen characters that it unfolds to are the letter that it is written for.
    steps = [replace("ل", "ﷺ"), {"type": "NFKD"}] * 8
    assert replacements.growth(steps) > 1_513_669


@pytest.mark.parametrize(
    ("entries", "growth"),
    [
        ({"ﷺ": unicodedata.normalize("NFKC", "ﷺ"), "ﬁ": "fi", "\u200b": " ", "①": "1"}, 1.0),
        ({"a": "b"}, 1.0),
        ({"a": "bb"}, 2.0),
        ({"e\u0301": "c" * 10, "é": "d"}, 10 / 3),
        ({"x": "ﷺ"}, 33.0),
    ],
)
def test_a_precompiled_map_counts_by_what_it_does_beyond_the_forms(entries: dict[str, str], growth: float) -> None:
    text = charsmap(entries)
    library = normalizers.Precompiled(base64.b64decode(text))
    for key, value in entries.items():
        assert library.normalize_str(key) == value
    assert charsmaps.growth(text) == pytest.approx(growth)


def test_a_map_that_does_not_end_or_is_none_counts_by_its_longest_text() -> None:
    # Each of these units leads to where it was reached from: by one character, or by any.
    for labels in ([1], range(1, 256)):
        units = [label << 10 | label if label in labels else 0 for label in range(256)]
        circle = struct.pack("<257I", 1024, *units) + b"x" * 70 + b"\0"
        assert charsmaps.growth(base64.b64encode(circle).decode()) == 70.0
    assert charsmaps.growth(base64.b64encode(b"\xff\xff\xff\xff" + b"y" * 30).decode()) >= 30.0


NMT = {"type": "Precompiled", "precompiled_charsmap": charsmap({"ﷺ": unicodedata.normalize("NFKC", "ﷺ"), "\t": " "})}
BLANKS = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
HONEST = {
    "albert": [
        replace("``", '"'),
        replace("''", '"'),
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        NMT,
    ],
    "xlnet": [replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, NMT, BLANKS],
    "t5": [NMT, {"type": "Strip", "strip_left": False, "strip_right": True}, BLANKS],
    "nfkc and a map": [{"type": "NFKC"}, NMT, BLANKS],
    "bert": [{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}],
    "clip": [{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}, {"type": "Lowercase"}],
    "llama": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")],
    "all of it": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"), {"type": "Lowercase"}],
}


@pytest.mark.parametrize("name", HONEST)
def test_normalizers_of_public_tokenizers_are_let_through(name: str) -> None:
    assert replacements.growth({"type": "Sequence", "normalizers": HONEST[name]}) <= 100


@pytest.mark.parametrize(
    ("step", "made"),
    [
        ({"type": "BPEDecoder", "suffix": ""}, decoders.BPEDecoder(suffix="")),
        ({"type": "CTC", "word_delimiter_token": ""}, decoders.CTC(word_delimiter_token="")),
        ({"type": "WordPiece", "prefix": "##"}, decoders.WordPiece(prefix="##", cleanup=False)),
    ],
)
def test_blanks_that_a_decoder_puts_between_again_and_again_are_growth(step: dict[str, Any], made: Any) -> None:
    for count in (1, 3, 6):
        text = decoders.Sequence([made] * count).decode(["ab", "c", "d"])
        assert len(text) <= replacements.growth([step] * count) * 5
    assert replacements.growth([step] * 7) > 100


def test_blanks_as_characters_before_each_piece_are_growth() -> None:
    steps = [{"type": "Metaspace", "replacement": sign, "prepend_scheme": "always", "split": False} for sign in "▁xyz"]
    made = [pre_tokenizers.Split("a", "isolated")] + [pre_tokenizers.Metaspace(s, "always", False) for s in "▁xyz"]
    pieces = pre_tokenizers.Sequence(made).pre_tokenize_str("aaaa")
    assert 4 < sum(len(piece.encode()) for piece, _ in pieces) <= 4 * replacements.growth(steps)
