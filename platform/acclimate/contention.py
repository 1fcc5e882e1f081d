"""A database that others keep busy, SQLite or PostgreSQL: one refusal."""

from acclimate_competitions.errors import Refusal

AGAIN = "the same request again in a moment will do"


def busy(why: str, *, hint: str = AGAIN) -> Refusal:
    """The refusal of a database that is locked, or has no connection left."""
    return Refusal("busy", f"the database is busy: {why}", hint=hint)
