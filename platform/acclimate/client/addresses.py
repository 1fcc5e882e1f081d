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
    refused = Refusal(
        "round_unknown",
        f"{round_id[:80]!r} is no round's id: letters, digits, dots and hyphens, such as digits-2027-1-0a7b65ef6e43",
        hint="acclimate status --server URL shows the rounds that there are",
    )
    return f"/v1/rounds/{_segment(require_round(round_id), refused)}"


def stage_path(round_id: str, key: str) -> str:
    """The path of a round's stage, by its key or a beginning of it.

    Raises:
        Refusal: round_unknown; not_found, where the key is none.
    """
    what = f"{key[:80]!r} is no stage's key" if key.strip() else "the stage's key is empty"
    refused = Refusal("not_found", what, hint="acclimate stage list shows the keys that there are")
    return f"{round_path(round_id)}/stages/{_segment(key, refused)}"


def submission_path(submission: str) -> str:
    """The path of a submission's routes.

    Raises:
        Refusal: submission_unknown.
    """
    what = f"{submission[:80]!r} is no submission's id" if submission.strip() else "the submission's id is empty"
    return f"/v1/submissions/{_segment(submission, Refusal('submission_unknown', what))}"


def segment(word: str) -> str:
    """A word that somebody gave, such as a digest, as one part of a path: it leads neither elsewhere nor to what stands above it.

    Raises:
        Refusal: request_invalid, for an empty word, "." and "..", and one with a slash.
    """
    return _segment(word, Refusal("request_invalid", f"{word[:80]!r} can't be a part of an address"))


def below(name: str) -> str:
    """A name that may have folders, such as splits/digit/practice.parquet, as parts of a path.

    Raises:
        Refusal: request_invalid, where a part of it is empty, "." or "..".
    """
    return "/".join(map(segment, name.split("/")))


def _segment(word: str, refused: Refusal) -> str:
    # Servers take %2F for a slash, clients shorten dots, and an empty last part is the address above it.
    if not word.strip() or "/" in word or word in (".", ".."):
        raise refused
    return quote(word, safe="", errors="replace")
