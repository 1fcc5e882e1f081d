"""How much longer the steps of a tokenizer before or behind its model can make a text, told from its JSON alone.

Patterns are Oniguruma's. Of one that can match nothing, a replacement comes before each character; of one that takes so many characters at least,
instead of as many. How many is told of plain patterns alone, such as runs of blanks: each piece is a character, a class or a kind of
characters, with one repetition at most. Whatever else stands in a pattern, groups above all, may match nothing as far as is known here.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from acclimate_runners import charsmaps, unicode_forms
from acclimate_runners.unicode_forms import Forms

_PIECE = re.compile(
    r'(?P<one>\\[sSdDwWnrt]|\\[-.,:;/#&!=@%~"()\[\]{}|*+?^$\\]|\\[pP]\{\^?\w+\}|\[\^?(?:[^\[\]\\&]|\\[^\W\d_]|\\[^\w\s])+\]|[^\\\[\](){}.*+?^$|]|\.)'
    r"(?P<times>[*+?]|\{\d{1,4}(?:,\d{0,4})?\})?"
    r"|(?P<edge>[\^$])|(?P<either>\|)"
)


_BY_FIELD = ("precompiled_charsmap", "handle_chinese_chars")
"""Fields of steps that may stand without a type, and do what Unicode's forms do."""
_VALUE = ""
"""The name under which a value stands that is no step, where steps stand."""


def growth(part: Any) -> float:
    """How many times longer the steps of a normalizer, pre-tokenizer or decoder can make a text, one after the other.

    What a step is, is told by its fields: the library reads some without a type, or with one that it does not know. Some it reads as a list of their
    values, too, which no program writes: that is growth without end.

    Where Unicode's forms are among the steps, texts are weighed by what all of these forms together can make of them (unicode_forms.py). So the forms
    count once, however many there are; a replacement counts by the weight of what it writes, which the forms behind it may unfold; and a map of
    characters that does what NFKC does counts nothing beside it. What a step puts before a text is added, and the next ones make it longer.
    """
    steps = list(_steps(part))
    kinds = {step["type"] for step in steps if isinstance(step.get("type"), str)}
    kinds |= {name for step in steps for name in _BY_FIELD if name in step}
    forms: Forms | None = None
    if kinds & {"NFKC", "NFKD", "precompiled_charsmap"}:
        forms = "compatible"
    elif kinds & {"NFC", "NFD", "Lowercase", "handle_chinese_chars"}:
        forms = "canonical"
    times, more = unicode_forms.LONGEST[forms] if forms else 1.0, 0.0
    for step in steps:
        factor = math.prod(_factors(step, forms))
        # Nothing stays nothing, also without end.
        times, more = times * factor, (more * factor if more else 0.0) + _weight(step.get("prepend"), forms)
    return times + more


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for each in part.values():
            if isinstance(each, dict | list):
                yield from _steps(each)
    elif isinstance(part, list):
        for each in part:
            yield from _steps(each) if isinstance(each, dict | list) else [{_VALUE: each}]


def _factors(step: dict[str, Any], forms: Forms | None) -> Iterator[float]:
    """How many times heavier a step can make a text of one byte or more, beside the forms, by each thing that it may be."""
    if _VALUE in step:
        yield math.inf
    if "pattern" in step and "content" in step:
        yield _replaced(step["pattern"], _weight(step["content"], forms), forms)
    if "precompiled_charsmap" in step:
        charsmap = step["precompiled_charsmap"]
        yield charsmaps.growth(charsmap) if isinstance(charsmap, str) else math.inf
    if step.get("handle_chinese_chars"):
        # A blank on either side of each Chinese character, of three bytes or more; the next one does so again.
        yield 5 / 3
    if step.get("type") == "ByteLevel":
        # Each byte as a character, of two bytes for all that is not ASCII, which the next one does with what the first wrote; and a blank.
        yield 3.0 if step.get("add_prefix_space") is True else 2.0
    if "replacement" in step:  # Metaspace: for each blank, and before each piece
        yield 1.0 + max(1, written(step["replacement"]))
    if "prefix" in step:  # WordPiece's decoder puts a blank before each token
        yield 2.0
    if "" in (step.get("suffix"), step.get("word_delimiter_token")):
        # BPE's decoder and CTC's put a blank in the place of a text: before each character of a token and behind the last, where that is empty.
        yield 3.0


def _replaced(pattern: Any, content: float, forms: Forms | None) -> float:
    given = pattern if isinstance(pattern, dict) else {}
    least = _weight(given.get("String"), forms) or shortest(given.get("Regex"))
    return max(1.0, content / least) if least else 1.0 + content


def _weight(text: Any, forms: Forms | None) -> float:
    if forms is None or not isinstance(text, str):
        return written(text)
    return unicode_forms.weight(text, forms)


def shortest(pattern: Any) -> int:
    """Bytes that a pattern takes at least wherever it matches; 0 where it may match nothing, or that is not told here."""
    if not isinstance(pattern, str):
        return 0
    found, at = [0], 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        if piece is None:
            return 0
        at = piece.end()
        if piece["either"]:
            found.append(0)
        elif piece["one"]:
            found[-1] += _least(piece["times"] or "")
    return min(found)


def _least(times: str) -> int:
    if times.startswith("{"):
        # Of {2,1} Oniguruma takes the smaller as the least.
        return min(int(number) for number in times[1:-1].split(",") if number)
    return 0 if times in ("*", "?") else 1


def written(text: Any) -> int:
    """Bytes of a text in UTF-8; JSON may hold halves of characters."""
    return unicode_forms.written(text) if isinstance(text, str) else 0
