"""What must not be read by others, taken out of text that is printed or logged.

The second line: whoever prints or logs leaves secrets out in the first place. Known are passwords in URLs and connection strings,
API tokens, invitations, Authorization headers, age identities and private keys. The lengths have bounds, as the time would grow with their
square: who writes what is logged may be a stranger.
"""

import re

_MARK = "…"
_RULES = (
    # scheme://USER:PASSWORD@HOST; to the last @, as a password may hold one that nobody escaped.
    (re.compile(r"(\b[a-z][a-z0-9+.-]{0,40}:/{1,3}[^\s:/@?#'\"]{0,200}):[^\s'\"]{0,300}@", re.IGNORECASE), rf"\1:{_MARK}@"),
    # The same without a scheme, such as USER:PASSWORD@HOST.
    (re.compile(r"(?<!\w)([\w.+-]{1,200}):(?!//)[^\s'\"@]{1,300}@(?=[\w.\[-])"), rf"\1:{_MARK}@"),
    # password=…, in queries and connection strings.
    (
        re.compile(r"\b(\w*(?:passw(?:or)?d|secret|token|credential)\w*)(\s*=\s*)('[^']*'|\"[^\"]*\"|[^\s&;'\"]+)", re.IGNORECASE),
        rf"\1\2{_MARK}",
    ),
    (re.compile(r"\b(Bearer|Basic)\s+[^\s'\"]+", re.IGNORECASE), rf"\1 {_MARK}"),
    (re.compile(r"\b(acc|inv)_[A-Za-z0-9_-]{8,}"), rf"\1_{_MARK}"),
    (re.compile(r"\bAGE-SECRET-KEY-1[0-9A-Z]+", re.IGNORECASE), _MARK),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL), _MARK),
)  # fmt: skip


def hidden(text: str) -> str:
    """The text with "…" in the place of every secret that is recognized."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
