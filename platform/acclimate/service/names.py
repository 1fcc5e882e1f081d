"""Names and texts that people give: what is refused before it reaches a page, a table or a log record."""

import re
import unicodedata

from acclimate_competitions.errors import Refusal

LONGEST = 200
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
# Marks that turn the direction of what follows, and so can make a name look like another one (UAX #9).
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# Control, format, surrogate, private, unassigned; line and paragraph separators.
_FORBIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Letters, marks and symbols that nobody sees, though their category is that of what is seen: fillers, joiners, a blank of Braille, selectors.
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0xFE00, 0xFE0F), *range(0xE0100, 0xE01F0)))
)
_EMOJI = "\ufe0f"
_JOINERS = frozenset("\u200c\u200d")
# Scripts in which a joiner between two letters changes what is seen, and so is part of how words are spelled.
_JOINED = frozenset(
    "ARABIC BENGALI DEVANAGARI GUJARATI GURMUKHI KANNADA KHMER MALAYALAM MONGOLIAN MYANMAR ORIYA SINHALA SYRIAC TAMIL TELUGU".split()
)


def problem(value: object, *, longest: int = LONGEST) -> str | None:
    """What is wrong with a text that people will read, or None."""
    if not isinstance(value, str) or not value.strip():
        return "must be text that is not empty"
    if len(value) > longest:
        return f"has {len(value)} characters, at most {longest} are allowed"
    if unicodedata.normalize("NFC", value) != value:
        return "is not in Unicode normal form NFC"
    bad = next((at for at in range(len(value)) if not _is_seen(value, at)), None)
    if bad is not None:
        return f"holds the character U+{ord(value[bad]):04X}, which can't be shown or changes how the rest is shown"
    return None


def _is_seen(text: str, at: int) -> bool:
    """Whether people see that a character is there: two texts that look alike must not differ by it."""
    character = text[at]
    if character in _JOINERS:
        beside = [unicodedata.name(c, "").partition(" ")[0] for c in (text[at - 1 : at], text[at + 1 : at + 2]) if c]
        return len(beside) == 2 and beside[0] == beside[1] and beside[0] in _JOINED
    if character == _EMOJI:
        # It makes a sign a picture; after anything else it does nothing.
        return at > 0 and unicodedata.category(text[at - 1]) == "So"
    return character not in _BIDI and character not in _UNSEEN and unicodedata.category(character) not in _FORBIDDEN


def check(value: object, *, what: str, longest: int = LONGEST) -> str:
    """The text, where people can read it safely.

    Raises:
        Refusal: name_invalid.
    """
    wrong = problem(value, longest=longest)
    if wrong is not None or not isinstance(value, str):
        raise Refusal("name_invalid", f"{what} {wrong}", hint=f"use visible characters, at most {longest}, in form NFC")
    return value


def check_id(value: object, *, what: str) -> str:
    """The text, where it can be an id for good: small letters, digits, hyphens.

    Raises:
        Refusal: name_invalid.
    """
    if isinstance(value, str) and _ID.fullmatch(value):
        return value
    shown = value[:LONGEST] if isinstance(value, str) else value
    folded = unicodedata.normalize("NFKD", str(shown)).encode("ascii", "ignore").decode().lower()
    suggestion = re.sub(r"[^a-z0-9]+", "-", folded).strip("-")[:63]
    raise Refusal(
        "name_invalid",
        f"{what} {shown!r} may have small letters, digits and hyphens, at most 63, beginning with a letter or digit",
        hint=f"such as {suggestion}" if suggestion else "",
    )
