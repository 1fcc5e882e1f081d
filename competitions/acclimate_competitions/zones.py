"""Time zones by name: UTC everywhere, others where the machine has a database of them."""

from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo


def zone(name: str) -> tzinfo:
    """The zone of a name such as Europe/Berlin.

    Raises:
        zoneinfo.ZoneInfoNotFoundError: this machine knows none of that name, perhaps as it has no database of zones.
    """
    return UTC if name in ("UTC", "") else ZoneInfo(name)
