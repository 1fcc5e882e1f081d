"""Strict TOML: typed values, every problem of a file at once, each with its line.

`tomllib` gives values without positions. `Scan` walks the same text and finds the line of every key, table and array item; its
only claim is about text that tomllib takes (a test compares the two). A key or table that stands twice is
blanked and reported, so that one doubled key does not hide the other problems.
"""

import bisect
import re
import tomllib
from dataclasses import dataclass

from acclimate_competitions import reading
from acclimate_competitions.errors import Refusal

Path = tuple[str | int, ...]
"""Where a value stands: keys, and indices of arrays from 0."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACES = re.compile(r"[ \t]*")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
_LONG_BASIC = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL)
_LONG_LITERAL = re.compile(r"'''.*?'{3,5}", re.DOTALL)
_SCALAR = re.compile(r"[^,\]}#\n]+")
_POSITION = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")


def dotted(path: Path) -> str:
    """A path as text, such as tasks[0].choices[2]."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Double:
    """A key or table that stands a second time, and the span of text to leave out."""

    path: Path
    line: int
    first: int
    start: int
    end: int


class _Unscannable(ValueError):
    """The text is not TOML; tomllib says why."""


class Scan:
    """Lines of all keys, tables and array items of a TOML text.

    Attributes:
        lines: path -> line number from 1, of the key, header or item.
        doubles: keys and tables that stand a second time.
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._newlines = [i for i, char in enumerate(text) if char == "\n"]
        self._arrays: dict[Path, int] = {}
        self._headers: dict[Path, int] = {}
        self.lines: dict[Path, int] = {}
        self.doubles: list[Double] = []
        self._run()

    def _run(self) -> None:
        table: Path = ()
        skipped: Double | None = None
        while True:
            self._skip(_BLANK)
            if self._at == len(self._text) or self._text[self._at] == "[":
                if skipped is not None:
                    self.doubles.append(skipped)
                    skipped = None
                if self._at == len(self._text):
                    return
                start = self._at
                table, first = self._header()
                if first is not None:
                    skipped = Double(table, self._line(start), first, start, len(self._text))
            elif skipped is not None:
                self._pair(None)
                skipped = Double(skipped.path, skipped.line, skipped.first, skipped.start, self._at)
            else:
                self._pair(table)

    def _header(self) -> tuple[Path, int | None]:
        """The table of a header, and the line of its first occurrence where this is the second."""
        line, double = self._line(self._at), self._text.startswith("[[", self._at)
        self._at += 2 if double else 1
        keys = self._keys()
        self._expect("]]" if double else "]")
        path = self._resolve(keys[:-1])
        if double:
            name = (*path, keys[-1])
            index = self._arrays.get(name, 0)
            self._arrays[name] = index + 1
            self.lines.setdefault(name, line)
            path = (*name, index)
        else:
            path = self._resolve(keys)
            if path in self._headers:
                return path, self._headers[path]
            self._headers[path] = line
        for end in range(1, len(path) + 1):
            self.lines.setdefault(path[:end], line)
        return path, None

    def _resolve(self, keys: list[str]) -> Path:
        path: Path = ()
        for key in keys:
            path = (*path, key)
            if path in self._arrays:
                path = (*path, self._arrays[path] - 1)
        return path

    def _pair(self, table: Path | None) -> None:
        """One `key = value`; table None reads over it."""
        start = self._at
        keys = self._keys()
        self._expect("=")
        if table is None:
            self._value(None)
            return
        path = (*table, *keys)
        first = self.lines.get(path)
        if first is not None:
            self._value(None)
            self.doubles.append(Double(path, self._line(start), first, start, self._at))
            return
        for end in range(len(table) + 1, len(path) + 1):
            self.lines.setdefault(path[:end], self._line(start))
        self._value(path)

    def _keys(self) -> list[str]:
        keys = []
        while True:
            self._skip(_SPACES)
            if found := _BARE_KEY.match(self._text, self._at):
                keys.append(found.group())
            elif found := _BASIC.match(self._text, self._at) or _LITERAL.match(self._text, self._at):
                keys.append(_unquote(found.group()))
            else:
                raise _Unscannable
            self._at = found.end()
            self._skip(_SPACES)
            if not self._text.startswith(".", self._at):
                return keys
            self._at += 1

    def _value(self, path: Path | None) -> None:
        self._skip(_SPACES)
        start = self._text[self._at : self._at + 1]
        if start == "[":
            self._array(path)
        elif start == "{":
            self._inline(path)
        elif start == '"':
            self._take(_LONG_BASIC if self._text.startswith('"""', self._at) else _BASIC)
        elif start == "'":
            self._take(_LONG_LITERAL if self._text.startswith("'''", self._at) else _LITERAL)
        else:
            self._take(_SCALAR)

    def _array(self, path: Path | None) -> None:
        self._at += 1
        index = 0
        while True:
            self._skip(_BLANK)
            if self._text.startswith("]", self._at):
                self._at += 1
                return
            item = None if path is None else (*path, index)
            if item is not None:
                self.lines[item] = self._line(self._at)
            self._value(item)
            index += 1
            self._skip(_BLANK)
            if self._text.startswith(",", self._at):
                self._at += 1
            elif not self._text.startswith("]", self._at):
                raise _Unscannable

    def _inline(self, path: Path | None) -> None:
        self._at += 1
        while True:
            self._skip(_BLANK)
            if self._text.startswith("}", self._at):
                self._at += 1
                return
            start = self._at
            keys = self._keys()
            self._expect("=")
            item = None if path is None else (*path, *keys)
            if item is not None:
                for end in range(len(item) - len(keys) + 1, len(item) + 1):
                    self.lines.setdefault(item[:end], self._line(start))
            self._value(item)
            self._skip(_BLANK)
            if self._text.startswith(",", self._at):
                self._at += 1
            elif not self._text.startswith("}", self._at):
                raise _Unscannable

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _take(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise _Unscannable
        self._at = found.end()

    def _expect(self, token: str) -> None:
        if not self._text.startswith(token, self._at):
            raise _Unscannable
        self._at += len(token)

    def _line(self, position: int) -> int:
        return bisect.bisect_left(self._newlines, position) + 1


def _unquote(quoted: str) -> str:
    try:
        return str(tomllib.loads(f"key = {quoted}")["key"])
    except tomllib.TOMLDecodeError as error:
        raise _Unscannable from error


@dataclass(frozen=True)
class Parsed:
    """A TOML text as read: values, lines, and the problems of its form (line, sentence)."""

    values: dict[str, object]
    lines: dict[Path, int]
    problems: tuple[tuple[int, str], ...]


def parse(raw: bytes) -> Parsed:
    """Values and lines of a TOML file; values are empty where it is not TOML at all.

    Raises:
        Refusal: definition_invalid, where the bytes are not UTF-8.
    """
    try:
        text = reading.decoded(raw).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise Refusal(
            "definition_invalid", "the definition is not UTF-8 text", problems=[f"line {line}: a byte is not UTF-8"]
        ) from error
    except ValueError as error:
        raise Refusal(
            "definition_invalid", "the definition is not UTF-8 text", problems=[f"line 1: {error}"]
        ) from error
    problems: list[tuple[int, str]] = []
    lines: dict[Path, int] = {}
    try:
        scan = Scan(text)
    except (_Unscannable, RecursionError):
        pass
    else:
        lines = scan.lines
        for double in reversed(scan.doubles):
            problems.append((double.line, f"{dotted(double.path)} stands twice, first on line {double.first}"))
            kept = "".join(char for char in text[double.start : double.end] if char == "\n")
            text = text[: double.start] + kept + text[double.end :]
    try:
        return Parsed(tomllib.loads(text), lines, tuple(problems))
    except (ValueError, RecursionError) as error:
        found = _POSITION.search(str(error))
        line = int(found.group(1)) if found and found.group(1) else text.rstrip("\n").count("\n") + 1
        problems.append((line, f"not TOML: {_POSITION.sub('', str(error)).lower()}"))
        return Parsed({}, lines, tuple(problems))
