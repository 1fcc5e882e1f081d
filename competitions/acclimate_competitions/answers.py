"""What of a generated text is the answer, and when two answers are one: extraction, normalization, token F1.

Extraction is declared, never guessed, and applied to the text and to the target alike: a text that is the target scores 1. Expressions are those of
RE2, which takes time in proportion to a text's length whatever the expression; it has neither look-around nor references back.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LONGEST = 65_536
"""Characters of a text that are looked at."""
LONGEST_PATTERN = 500

# Private characters that mark a find; those of a text itself are replaced first.
_OPEN, _CLOSE = "\ue000", "\ue001"
_FOUND = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_UNMARKED = str.maketrans({_OPEN: "\ufffd", _CLOSE: "\ufffd"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)

NORMALIZATIONS: Mapping[str, Callable[[str], str]] = {
    "nfc": lambda text: unicodedata.normalize("NFC", text),
    "lower": str.lower,
    "punctuation": lambda text: text.translate(_PUNCTUATION),
    "blanks": lambda text: " ".join(text.split()),
    "strip": str.strip,
}
"""Name -> what it does; in this order, whatever the order of their declaration. punctuation removes that of ASCII, blanks makes one of several."""


def pattern_problem(pattern: str) -> str:
    """What is wrong with an expression to extract by; "" where nothing is."""
    if len(pattern) > LONGEST_PATTERN:
        return f"has {len(pattern)} characters: must be at most {LONGEST_PATTERN}"
    import pyarrow as pa

    try:
        _replaced([""], pattern, "")
        _replaced([""], pattern, r"\1")
    except pa.ArrowInvalid as error:
        if "Rewrite schema requests" in str(error):
            return "has no group: write the answer's part in parentheses, such as (-?[0-9]+)"
        return f"is no regular expression of RE2: {str(error).removeprefix('Invalid regular expression: ')}"
    try:
        _replaced([""], pattern, r"\2")
    except pa.ArrowInvalid:
        return ""
    return "has several groups: write those that are not the answer as (?:…)"


def answers(texts: Sequence[str | None], *, extract: str, take: str, normalize: Sequence[str]) -> list[str | None]:
    """The answer in each text, normalized; None where the expression finds nothing, or there is no text."""
    found: list[str | None] = [None if text is None else text[:LONGEST] for text in texts]
    if extract:
        marked = _replaced([(text or "").translate(_UNMARKED) for text in found], extract, rf"{_OPEN}\1{_CLOSE}")
        place = 0 if take == "first" else -1
        finds = [_FOUND.findall(text) for text in marked]
        found = [None if t is None or not f else f[place] for t, f in zip(found, finds, strict=True)]
    return [None if text is None else normalized(text, normalize) for text in found]


def normalized(text: str, names: Sequence[str]) -> str:
    """A text under the named normalizations."""
    for name, change in NORMALIZATIONS.items():
        if name in names:
            text = change(text)
    return text


def token_f1(said: str, target: str) -> float:
    """Harmonic mean of precision and recall over words, as SQuAD counts them: without case, punctuation and articles."""
    one, other = _words(said), _words(target)
    shared = sum((Counter(one) & Counter(other)).values())
    return 2 * shared / (len(one) + len(other)) if one and other else float(one == other)


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _replaced(texts: list[str], pattern: str, replacement: str) -> list[str]:
    """Each text with every find replaced; ArrowInvalid for what is no expression, or has fewer groups than the replacement names."""
    import pyarrow as pa
    from pyarrow import compute

    changed: Any = compute.replace_substring_regex(
        pa.array(texts, pa.string()), pattern=pattern, replacement=replacement
    )
    made: list[str] = changed.to_pylist()
    return made
