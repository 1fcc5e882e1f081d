"""How long a text can become by any sequence of Unicode's forms and of lower case, told character by character.

Each form makes a text longer, U+FDFA eleven times in NFKD, but not again and again: what it wrote stays as it is. So a text has a weight, the sum of
its characters' weights: of each the most bytes of UTF-8 that any sequence of forms makes of it. No form makes a text's weight larger, no text is
longer than its weight, and no weight is more than LONGEST of a text's bytes.
"""

import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

Forms = Literal["canonical", "compatible"]
LONGEST: dict[Forms, float] = {"canonical": 3.0, "compatible": 11.0}
"""The most that a text's weight can be, in its own bytes: by NFC, NFD and lower case; by NFKC and NFKD, too."""
_WEIGHED = 1 << 16


def weight(text: str, forms: Forms) -> float:
    """Bytes of UTF-8 that any sequence of the forms makes of a text at most; of a very long one a bound on them."""
    if text.isascii():
        return float(len(text))
    if len(text) > _WEIGHED:
        return LONGEST[forms] * written(text)
    return float(sum(_reached(character, forms) for character in text))


def written(text: str) -> int:
    """Bytes of a text in UTF-8; JSON may hold halves of characters."""
    return len(text.encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=1 << 17)
def _reached(character: str, forms: Forms) -> int:
    found, left = {character}, [character]
    while left:
        text = left.pop()
        for step in _STEPS[forms]:
            if (made := step(text)) not in found:
                found.add(made)
                left.append(made)
    return max(map(written, found))


def _lower(text: str) -> str:
    # Each by itself: a library may or may not look at the letters around a sigma.
    return "".join(character.lower() for character in text)


_CANONICAL: tuple[Callable[[str], str], ...] = (
    lambda text: unicodedata.normalize("NFC", text),
    lambda text: unicodedata.normalize("NFD", text),
    _lower,
)
_STEPS: dict[Forms, tuple[Callable[[str], str], ...]] = {
    "canonical": _CANONICAL,
    "compatible": (
        *_CANONICAL,
        lambda text: unicodedata.normalize("NFKC", text),
        lambda text: unicodedata.normalize("NFKD", text),
    ),
}
