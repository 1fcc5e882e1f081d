"""Addresses of the API's routes."""

from urllib.parse import quote

from acclimate_competitions.errors import Refusal


def require_round(round_id: str) -> str:
    """A round's id or its beginning, as it was given; an empty one means none, never the only round that there is.

    Raises:
        Refusal: round_unknown.
    """
    if not round_id.strip():
        raise Refusal(
            "round_unknown", "the round's id is empty: is $ROUND set in this terminal?", hint="export ROUND=… sets it"
        )
    return round_id


def round_path(round_id: str) -> str:
    """The path of a round's routes.

    Raises:
        Refusal: round_unknown.
    """
    # What follows it in an address must stay below the round: a name with a slash or of dots is one that somebody mailed, or made up.
    if "/" in round_id or round_id in (".", ".."):
        raise Refusal(
            "round_unknown",
            f"{round_id[:80]!r} is no round's id: letters, digits, dots and hyphens, such as digits-2027-1-0a7b65ef6e43",
            hint="acclimate status --server URL shows the rounds that there are",
        )
    return f"/v1/rounds/{quote(require_round(round_id), safe='', errors='replace')}"
