"""Dates on the command line: read with an offset or relative to now, shown in UTC and in the zone of this machine."""

import re
from datetime import UTC, datetime, timedelta

from acclimate_competitions.errors import Refusal

_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_NAIVE = re.compile(r"\d{4}-\d\d-\d\d([Tt ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)?", re.ASCII)
_RELATIVE = re.compile(r"\+(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", re.ASCII)


def clock() -> datetime:
    """The time by this machine's clock."""
    return datetime.now(UTC)


def parse(text: str, *, now: datetime) -> datetime:
    """The moment that text names: now, RFC 3339 with an offset, or +2d, +2h, +1h30m, +30s from now.

    Raises:
        Refusal: time_invalid, for dates without an offset too: nobody can tell which moment they mean.
    """
    if text == "now":
        return now
    relative = _RELATIVE.fullmatch(text)
    if relative and len(text) > 1:
        days, hours, minutes, seconds = (int(number or 0) for number in relative.groups())
        try:
            return now + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        except OverflowError as error:
            raise Refusal("time_invalid", f"{text!r} is beyond the year 9999") from error
    try:
        if _RFC_3339.fullmatch(text):
            return datetime.fromisoformat(text.upper()).astimezone(UTC)
        if _NAIVE.fullmatch(text):
            raise _naive(text, datetime.fromisoformat(text.upper()))
    except (ValueError, OverflowError) as error:
        raise Refusal("time_invalid", f"{text!r} is no date that exists: {error}") from error
    raise Refusal(
        "time_invalid",
        f"{text!r} is neither a date with an offset nor a time from now",
        hint="such as now, 2027-03-01T12:00:00Z, 2027-03-01T13:00:00+01:00, +2h, +30d",
    )


def _naive(text: str, moment: datetime) -> Refusal:
    here = moment.astimezone()
    return Refusal(
        "time_invalid",
        f"{text!r} has no offset, so it is another moment in each time zone",
        hint=f"{moment.isoformat()}Z is UTC; {here.isoformat()} is {here.tzname()}, the zone of this machine",
    )


def show(moment: datetime, *, now: datetime) -> str:
    """A moment for people: UTC, this machine's zone where that differs, and how far it is from now."""
    utc = moment.astimezone(UTC)
    text = utc.strftime("%Y-%m-%d %H:%M:%S UTC")
    local = moment.astimezone()
    if local.utcoffset():
        day = "" if local.date() == utc.date() else "%Y-%m-%d "
        text += local.strftime(f" ({day}%H:%M:%S %Z)")
    return f"{text}, {distance(moment - now)}"


def distance(delta: timedelta) -> str:
    """How far something is from now, in its two largest units: in 2 h 5 min, 3 d 4 h ago."""
    seconds = round(abs(delta.total_seconds()))
    if seconds == 0:
        return "now"
    parts: list[tuple[int, str]] = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if seconds >= length or parts:
            parts.append((seconds // length, unit))
            seconds %= length
    text = " ".join(f"{count} {unit}" for count, unit in parts[:2] if count)
    return f"in {text}" if delta > timedelta(0) else f"{text} ago"
