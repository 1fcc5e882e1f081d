"""Typed fields of a strict TOML file: each reader returns a value of its type and notes a problem where the file has none.

After a problem a reader returns a harmless stand-in, so that reading goes on; nothing is built from a file with problems.
"""

import difflib
import math
import re
import zoneinfo
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, TypeVar, cast

from acclimate_competitions.parsing import Parsed, Path, dotted

LARGEST = 2**53 - 1
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NAME_MEANING = "lower-case letters, digits and hyphens, at most 63, beginning with a letter or digit"

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_SIZE = re.compile(r"([0-9]{1,12})(B|kB|MB|GB|KiB|MiB|GiB|TiB)")
# Control characters, and characters that reorder or hide the text around them.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

REQUIRED: Final = object()
_ABSENT: Final = object()
T = TypeVar("T")

_SOME_MOMENT = datetime(2000, 1, 1, tzinfo=UTC)


class Document:
    """One file being read: its problems (line, sentence) and where each value came from."""

    def __init__(self, parsed: Parsed) -> None:
        self.lines = parsed.lines
        self.problems = list(parsed.problems)
        self.origins: dict[str, str] = {}
        self.root = Table(self, (), parsed.values)

    def line(self, path: Path) -> int:
        """Line of a path, or of the nearest thing around it that has one."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def problem(self, path: Path, sentence: str) -> None:
        """Note a problem at a path."""
        self.problems.append((self.line(path), sentence))

    def sentences(self) -> list[str]:
        """All problems, by line: "line 12: …"."""
        return [f"line {line}: {sentence}" for line, sentence in sorted(dict.fromkeys(self.problems))]


class Table:
    """One table being read; finish() reports the keys that nobody asked for."""

    def __init__(self, document: Document, path: Path, values: dict[str, Any], *, absent: bool = False) -> None:
        self._document, self._path, self._values, self._absent = document, path, values, absent
        self._asked: list[str] = []
        self._bad: set[str] = set()

    def good(self, *keys: str) -> bool:
        """Whether these keys were read without a problem."""
        return not self._bad.intersection(keys) and not self._absent

    def problem(self, key: str, sentence: str, *, index: int | None = None) -> None:
        """Note a problem of a key, or of one item of its array; the sentence follows the key's name."""
        path = self._at(key) if index is None else (*self._at(key), index)
        self._bad.add(key)
        self._document.problem(path, f"{dotted(path)} {sentence}")

    def finish(self) -> None:
        """Report unknown keys."""
        for key in self._values:
            if key not in self._asked:
                near = difflib.get_close_matches(key, self._asked, n=1)
                meant = f"; did you mean {dotted(self._at(near[0]))}?" if near else ""
                self._document.problem(self._at(key), f"{dotted(self._at(key))} is not a known key{meant}")

    def text(
        self,
        key: str,
        default: Any = REQUIRED,
        *,
        pattern: re.Pattern[str] | None = None,
        form: str = "",
        most: int = 2000,
        lines: bool = False,
    ) -> str:
        """Text without control characters, on one line or on several; form says in words what the pattern takes."""

        def check(value: Any) -> str | None:
            if not isinstance(value, str):
                return None
            shown = value.replace("\n", "").replace("\t", "") if lines else value
            if not value.strip() or len(value) > most or _UNPRINTABLE.search(shown):
                return self._fail(key, f"must be text of 1 to {most} characters without control characters", "")
            if pattern is not None and not pattern.fullmatch(value):
                return self._fail(key, f"= {value!r}: must be {form}", "")
            return value

        return self._read(key, default, check, "text", "")

    def word(self, key: str, carried: Sequence[Any], *, default: Any = REQUIRED) -> Any:
        """One of a few values."""

        def check(value: Any) -> Any:
            return value if self._allowed(key, value, carried) else carried[0]

        return self._read(key, default, check, "", carried[0])

    def words(self, key: str, carried: Sequence[str], *, default: Any = REQUIRED) -> tuple[Any, ...]:
        """A list of different words, each one of a few; at least one."""
        values = self.list_(key, str, default)
        for index, value in enumerate(values):
            self._allowed(key, value, carried, index=index)
        if not values and self.good(key):
            self.problem(key, "must not be empty")
        return values

    def names(self, key: str, default: Any = REQUIRED) -> tuple[str, ...]:
        """A list of different names."""
        values = self.list_(key, str, default)
        for index, value in enumerate(values):
            if not NAME.fullmatch(value):
                self.problem(key, f"= {value!r}: must be {NAME_MEANING}", index=index)
        return values

    def list_(self, key: str, kind: type[T], default: Any = REQUIRED) -> tuple[T, ...]:
        """A list of different values of one type (str, int or float; an int counts as float)."""

        def check(value: Any) -> tuple[T, ...] | None:
            if not isinstance(value, list):
                return None
            found: dict[T, None] = {}
            for index, item in enumerate(value):
                if isinstance(item, bool) or not isinstance(item, (int, float) if kind is float else kind):
                    self.problem(key, f"must be {_NAMES[kind]}, not {_said(item)}", index=index)
                elif isinstance(item, int) and abs(item) > LARGEST:
                    self.problem(key, "must be at most 2^53 - 1", index=index)
                elif item in found:
                    self.problem(key, f"= {_said(item)} stands twice", index=index)
                else:
                    found[kind(item)] = None  # type: ignore[call-arg]
            return tuple(found)

        return self._read(key, default, check, "a list", ())

    def boolean(self, key: str, default: Any = REQUIRED) -> bool:
        """True or false."""
        return self._read(key, default, lambda v: v if isinstance(v, bool) else None, "true or false", False)

    def integer(self, key: str, default: Any = REQUIRED, *, least: int = 0, most: int = LARGEST) -> int:
        """A whole number from least to most."""

        def check(value: Any) -> int | None:
            if isinstance(value, bool) or not isinstance(value, int):
                return None
            if not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most}"
                return self._fail(key, f"= {value}: must be {bound}", least)
            return value

        return self._read(key, default, check, "a whole number", least)

    def number(
        self, key: str, default: Any = REQUIRED, *, above: float | None = None, below: float = math.inf
    ) -> float:
        """A finite number, at least 0, or above a bound, and below another."""

        def check(value: Any) -> float | None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                return None
            if reason := out_of_bounds(value, above=above, below=below):
                return self._fail(key, f"= {value}: {reason}", 1.0)
            return float(value)

        return self._read(key, default, check, "a number", 1.0)

    def duration(self, key: str, default: Any = REQUIRED, *, least: int = 0) -> timedelta:
        """A duration such as "6h"; least in seconds."""

        def check(value: Any) -> timedelta | None:
            found = _DURATION.fullmatch(value) if isinstance(value, str) else None
            if found is None:
                return None
            seconds = int(found.group(1)) * _UNITS[found.group(2)]
            if not least <= seconds <= 3660 * 86400:
                return self._fail(key, f"= {value!r}: must be from {least}s to ten years", timedelta(1))
            return timedelta(seconds=seconds)

        return self._read(
            key, default, check, 'a duration, a whole number and s, m, h or d, such as "30m"', timedelta(1)
        )

    def size(self, key: str, default: Any = REQUIRED, *, zero: bool = False) -> int:
        """A size in bytes, written such as "2GiB"; "0" where zero is allowed."""

        def check(value: Any) -> int | None:
            if zero and value == "0":
                return 0
            found = _SIZE.fullmatch(value) if isinstance(value, str) else None
            if found is None:
                return None
            size = int(found.group(1)) * _SIZES[found.group(2)]
            return size if 0 < size <= LARGEST else self._fail(key, f"= {value!r}: must be above 0", 1)

        form = f'a size, a whole number and one of {", ".join(_SIZES)}: "2GiB"{", or 0 as text" if zero else ""}'
        return self._read(key, default, check, form, 1)

    def texts(self, key: str, *, names: re.Pattern[str], values: re.Pattern[str], form: str) -> dict[str, str]:
        """A table of texts, empty where it is absent; form says in words what names and values must be."""
        if key not in self._values:
            return self._read(key, {}, lambda _: None, "a table", {})
        table = self.table(key)
        found = {}
        for name in table._values:
            if names.fullmatch(name):
                found[name] = table.text(name, pattern=values, form=form)
            else:
                table.text(name)
                table.problem(name, f"is not a name that is allowed here: {form}")
        if not found:
            self._document.origins[dotted(self._at(key))] = f"line {self._document.line(self._at(key))}"
        return found

    def moment(self, key: str) -> datetime | None:
        """A moment in UTC, or None where the key is absent: RFC 3339 with offset, or {local, zone}."""

        def check(value: Any) -> datetime | None:
            local = value.get("local") if isinstance(value, dict) else value
            if isinstance(local, date) and not 2000 <= local.year <= 2999:
                return self._fail(key, f"= {local.isoformat()}: must be in the years 2000 to 2999", _SOME_MOMENT)
            if isinstance(value, dict):
                return self._local(key, value)
            if isinstance(value, datetime) and value.tzinfo is not None:
                return value.astimezone(UTC)
            if isinstance(value, date):
                naive = value if isinstance(value, datetime) else datetime.combine(value, time())
                text = naive.isoformat()
                return self._fail(
                    key,
                    f"= {value.isoformat()} has no offset: write {text}Z (or another offset),"
                    f' or {{ local = {text}, zone = "Europe/Berlin" }}',
                    _SOME_MOMENT,
                )
            return None

        none: datetime | None = None
        return self._read(key, None, check, "a time, such as 2027-03-01T00:00:00Z", none)

    def table(self, key: str, *, required: bool = False) -> "Table":
        """A table below this one; where it is absent its keys have their defaults."""
        self._asked.append(key)
        value = self._values.get(key)
        if isinstance(value, dict):
            return Table(self._document, self._at(key), value)
        if value is not None:
            self.problem(key, "must be a table")
        elif required and not self._absent:
            self.problem(key, f"is missing: write a table [{dotted(self._at(key))}]")
        return Table(self._document, self._at(key), {}, absent=required or self._absent or value is not None)

    def optional(self, key: str) -> "Table | None":
        """A table below this one; None where it is absent."""
        if key in self._values:
            return self.table(key)
        self._asked.append(key)
        self._document.origins[dotted(self._at(key))] = "default"
        return None

    def tables(self, key: str, *, least: int = 1) -> list["Table"]:
        """An array of tables, at least one; or none, where least is 0."""
        self._asked.append(key)
        value = self._values.get(key, [])
        if least == 0:
            there = key in self._values
            self._document.origins[key] = f"line {self._document.line(self._at(key))}" if there else "default"
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.problem(key, f"must be tables: write [[{dotted(self._at(key))}]]")
            return []
        if not value and least:
            self.problem(key, f"is missing: write at least one [[{dotted(self._at(key))}]]")
        return [Table(self._document, (*self._at(key), index), item) for index, item in enumerate(value)]

    # ---- what all readers share --------------------------------------------------------------------------------

    def _read(self, key: str, default: Any, check: Callable[[Any], T | None], kind: str, stand_in: T) -> T:
        self._asked.append(key)
        path = self._at(key)
        if key not in self._values:
            if default is REQUIRED:
                self._bad.add(key)
                if not self._absent:
                    self._document.problem(path, f"{dotted(path)} is missing")
                return stand_in
            self._document.origins[dotted(path)] = "default"
            return cast(T, default)
        self._document.origins[dotted(path)] = f"line {self._document.line(path)}"
        value = check(self._values[key])
        if value is None:
            return self._fail(key, f"must be {kind}, not {_said(self._values[key])}", stand_in)
        return value

    def _allowed(self, key: str, value: Any, carried: Sequence[Any], *, index: int | None = None) -> bool:
        if value in carried and type(value) is type(carried[0]):
            return True
        only = ", ".join(_said(item) for item in carried)
        near = difflib.get_close_matches(str(value), [str(item) for item in carried], n=1)
        self.problem(
            key,
            f"= {_said(value)} is unknown: {f'did you mean {near[0]!r}? ' if near else ''}allowed is {only}",
            index=index,
        )
        return False

    def _local(self, key: str, value: dict[str, Any]) -> datetime:
        local, zone = value.get("local"), value.get("zone")
        if set(value) != {"local", "zone"} or not isinstance(local, datetime) or local.tzinfo is not None:
            return self._fail(key, 'must be { local = 2027-04-01T12:00:00, zone = "Europe/Berlin" }', _SOME_MOMENT)
        try:
            info = zoneinfo.ZoneInfo(zone)  # type: ignore[arg-type]
        except (ValueError, TypeError, OSError, zoneinfo.ZoneInfoNotFoundError):
            return self._fail(key, f"= …: zone {_said(zone)} is unknown", _SOME_MOMENT)
        first, second = (local.replace(tzinfo=info, fold=fold) for fold in (0, 1))
        if first.utcoffset() == second.utcoffset():
            return first.astimezone(UTC)
        exists = first.astimezone(UTC).astimezone(info).replace(tzinfo=None) == local
        what = "stands twice on the clock" if exists else "does not exist: the clock jumps over it"
        early, late = sorted(moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for moment in (first, second))
        return self._fail(key, f"= {local.isoformat()} {what} in {zone}: write {early} or {late}", _SOME_MOMENT)

    def _fail(self, key: str, sentence: str, stand_in: T) -> T:
        self.problem(key, sentence)
        return stand_in

    def _at(self, key: str) -> Path:
        return (*self._path, key)


def out_of_bounds(value: float, *, above: float | None = None, below: float = math.inf) -> str:
    """Why a number is not finite and in its bounds (at least 0 where no lower one is given); empty where it is."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return "must be at most 2^53 - 1"
    if not math.isfinite(value):
        return "must be finite"
    if above is None and value < 0:
        return "must not be negative"
    if above is not None and value <= above:
        return f"must be above {above:g}"
    return f"must be below {below:g}" if value >= below else ""


def rfc3339(moment: datetime) -> str:
    """A moment in UTC as text, with microseconds only where it has some."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def flat(values: Mapping[str, Any], prefix: str = "", *, duration: Callable[[int], int | str] = int) -> dict[str, Any]:
    """Nested values by dotted key, JSON-ready: times as RFC 3339, durations as `duration` makes them of seconds."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.", duration=duration)
        elif isinstance(value, datetime):
            found[prefix + name] = rfc3339(value)
        elif isinstance(value, timedelta):
            found[prefix + name] = duration(int(value.total_seconds()))
        else:
            found[prefix + name] = list(value) if isinstance(value, tuple) else value
    return found


def duration_text(seconds: int) -> str:
    """A duration as a file has it, in the largest unit that gives a whole number: "10m"."""
    unit = max(
        (unit for unit in _UNITS if seconds and seconds % _UNITS[unit] == 0), key=_UNITS.__getitem__, default="s"
    )
    return f"{seconds // _UNITS[unit]}{unit}"


def size_text(size: int) -> str:
    """A size of so many bytes as a file has it, in the largest unit that gives a whole number: "2GiB"; "0" for none."""
    unit = max((unit for unit in _SIZES if size and size % _SIZES[unit] == 0), key=_SIZES.__getitem__, default="")
    return f"{size // _SIZES[unit]}{unit}" if unit else "0"


_NAMES: dict[type, str] = {str: "text", int: "a whole number", float: "a number"}


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"' if len(value) <= 60 else f'"{value[:57]}…"'
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    return value.isoformat() if isinstance(value, date | time) else str(value)
