"""Where a request's body ends: of one that says so in two ways, nobody can tell (RFC 9112, 6.3)."""

from collections.abc import Iterable

_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


def is_ambiguous(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether these headers, with names in lower case, say two lengths; a proxy before us may have seen two requests in such a one."""
    return _LENGTHS <= {name for name, _ in headers}
