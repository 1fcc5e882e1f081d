"""URLs of SQLite's databases: from a file's path and back, by one rule.

A URL means a character by %XX, so a path that goes into one as it stands names another file where it holds a percent sign, and loses its
end where it holds a question mark. SQLAlchemy 2.1 reads %XX in a path, 2.0 didn't: so we read our own.
"""

from pathlib import Path
from urllib.parse import quote, unquote

_SCHEME = "sqlite:///"
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) not in "%?#:")


def of(file: Path, query: str = "") -> str:
    """The URL of a file, which must be absolute; blanks and letters of all languages stand in it as they are."""
    name = "".join(one if one in _PLAIN or ord(one) > 0x7F else quote(one, safe="") for one in str(file))
    return f"{_SCHEME}{name}{'?' if query else ''}{query}"


def is_one(url: str) -> bool:
    """Whether a database's URL names a file of SQLite."""
    return url.startswith(_SCHEME) and not url.startswith(f"{_SCHEME}:memory:") and file(url) != Path()


def file(url: str) -> Path:
    """The file that a URL of SQLite names."""
    return Path(unquote(url.removeprefix(_SCHEME).partition("?")[0], errors="surrogateescape"))
