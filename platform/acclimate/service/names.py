"""Names and texts that people give: what is refused before it reaches a page, a table or a log record."""

import re
import unicodedata

from acclimate_competitions.errors import Refusal

LONGEST = 200
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
# Marks that turn the direction of what follows, and so can make a name look like another one (UAX #9).
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# Control, format, surrogate, private, unassigned; line and paragraph separators.
_FORBIDDEN = frozenset({"Cc", "Cs", "Co", "Cn", "Zl", "Zp"})


def problem(value: object, *, longest: int = LONGEST) -> str | None:
    """What is wrong with a text that people will read, or None."""
    if not isinstance(value, str) or not value.strip():
        return "must be text that is not empty"
    if len(value) > longest:
        return f"has {len(value)} characters, at most {longest} are allowed"
    if unicodedata.normalize("NFC", value) != value:
        return "is not in Unicode normal form NFC"
    bad = [c for c in value if c in _BIDI or unicodedata.category(c) in _FORBIDDEN]
    if bad:
        return f"holds the character U+{ord(bad[0]):04X}, which can't be shown or changes how the rest is shown"
    return None


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
