"""What the guards of a round's transitions are made of."""

import base64

from acclimate_competitions.errors import Refusal


def require(condition: bool, sentence: str, code: str = "guard_failed") -> None:
    """Refuse unless the condition holds.

    Raises:
        Refusal: of this code.
    """
    if not condition:
        raise Refusal(code, sentence)


def secret_of(text: str) -> bytes:
    """The 32 bytes of an auditor's secret, given as base64.

    Raises:
        Refusal: record_invalid.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        raw = b""
    require(
        len(raw) == 32 and base64.b64encode(raw).decode() == text,
        "a secret is the base64 of 32 bytes",
        "record_invalid",
    )
    return raw
