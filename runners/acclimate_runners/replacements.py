"""How much longer the steps of a tokenizer before or behind its model can make a text, told from its JSON alone.

Patterns are Oniguruma's. Of one that can match nothing, a replacement comes before each character; of one that takes so many characters at least,
instead of as many. How many is told of plain patterns alone, such as runs of blanks: each piece is a character, a class or a kind of
characters, with one repetition at most. Whatever else stands in a pattern, groups above all, may match nothing as far as is known here.
"""

import base64
import math
import re
from collections.abc import Iterator
from typing import Any

_PIECE = re.compile(
    r'(?P<one>\\[sSdDwWnrt]|\\[-.,:;/#&!=@%~"()\[\]{}|*+?^$\\]|\\[pP]\{\^?\w+\}|\[\^?(?:[^\[\]\\&]|\\[^\W\d_]|\\[^\w\s])+\]|[^\\\[\](){}.*+?^$|]|\.)'
    r"(?P<times>[*+?]|\{\d{1,4}(?:,\d{0,4})?\})?"
    r"|(?P<edge>[\^$])|(?P<either>\|)"
)


def growths(part: Any) -> Iterator[float]:
    """How many times longer each replacement of a normalizer, pre-tokenizer or decoder can make a text.

    - What a step is, is told by its fields: the library reads some without a type, or with one that it does not know.
    - ByteLevel writes each byte as a character, of two bytes for all that is not ASCII, and the next one does so with what the first wrote.
    - Prepend writes a text before each text, were it of one byte.
    - A precompiled map of characters writes one of its texts for a byte at least.
    - BERT's normalizer puts blanks around Chinese characters, of three bytes, and the next one does so again.
    """
    if isinstance(part, list):
        for each in part:
            yield from growths(each)
    elif isinstance(part, dict):
        if "pattern" in part and "content" in part:
            yield _growth(part["pattern"], written(part["content"]))
        elif part.get("type") == "ByteLevel":
            yield 2.0
        elif "prepend" in part:
            yield 1.0 + written(part["prepend"])
        elif "precompiled_charsmap" in part:
            yield max(1.0, _longest(part["precompiled_charsmap"]))
        elif part.get("handle_chinese_chars"):
            yield 5 / 3
        for each in part.values():
            if isinstance(each, dict | list):
                yield from growths(each)


def _growth(pattern: Any, content: int) -> float:
    given = pattern if isinstance(pattern, dict) else {}
    least = written(given.get("String")) or shortest(given.get("Regex"))
    return max(1.0, content / least) if least else 1.0 + content


def _longest(charsmap: Any) -> float:
    """Bytes of the longest text that a precompiled map of characters writes: behind its trie they stand, each with a zero at its end."""
    try:
        raw = base64.b64decode(charsmap, validate=True)
    except (ValueError, TypeError):
        return math.inf
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return float(max(map(len, texts.split(b"\0"))))


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
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0
