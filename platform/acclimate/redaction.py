"""What must not be read by others, taken out of what is printed or logged.

Two ways. A place that is known to be a URL or a folder, such as a setting, is taken apart, and only what may be read is put together again
(`place`). Free text is the second line, as whoever prints or logs leaves secrets out in the first place: there known forms are found
(`hidden`): logins in URLs, passwords in connection strings, in JSON, in options and after a colon, API tokens, invitations, headers that
carry them, age identities and private keys. It takes more than is needed rather than less, in time that grows with the text's length: a
stranger may have written it. Of what is long only so much is looked at as may be shown (`beginning`, `ending`).
"""

import re
from urllib.parse import unquote, urlsplit

_MARK = "…"
_OPEN = frozenset(
    {"sslmode", "application_name", "connect_timeout", "target_session_attrs", "charset", "timeout", "mode"}
)
"""Parameters of a URL's query whose values may be read."""
_FILES = ("sqlite", "file")
_TIMES = 4
"""How much more of a long text is looked at than is shown: what is taken out makes it shorter."""
_KEY_ENDS = re.compile(r"-----(BEGIN|END) [A-Z ]*PRIVATE KEY-----")
_SECRET = re.compile(
    r"passw(?:or)?d|passphrase|pwd|secret|token|credential|api[_-]?key|access[_-]?key|private[_-]?key", re.IGNORECASE
)
_NAMES_ONE = re.compile(rf"(?:{_SECRET.pattern})$", re.IGNORECASE)
"""What may be a word of a sentence, too: there only a name that ends so is taken for one."""
_KEY = re.compile(
    r"(?<![\w%-])(?:"
    r"(?P<word>--[\w-]++)[ \t]++(?![-\s])"
    r"|(?P<name>[\w%-]++)(?:\s*+=\s*+|\\?['\"]\s*+[:=]\s*+|(?P<colon>[ \t]*+:[ \t]*+(?!//))))"
)
_VALUE = re.compile(r"(?:\\?'(?:\\.|[^'\\])*+'?|\\?\"(?:\\.|[^\"\\])*+\"?)?(?:(?!&[\w%]+=)\S)*+", re.DOTALL)
_ESCAPED = re.compile(r"(passw(?:or)?d|pwd|secret|token|credential)(\w{0,40}+%3D)(?:(?!%3B|&)\S)*+", re.IGNORECASE)
_WORD = re.compile(r"\S++")
_UNQUOTED_PASSWORD = re.compile(r"://[^\s/@:]*+:(?![0-9]+(?:\W|$))")
_RULES = (
    (re.compile(r"\b(Bearer|Basic)\s+[^\s'\"]+", re.IGNORECASE), rf"\1 {_MARK}"),
    (re.compile(rf"\b((?:Proxy-)?Authorization|(?:Set-)?Cookie)([ \t]*+:[ \t]*+)(?!(?:Bearer|Basic) {_MARK})[^\r\n'\"]++", re.IGNORECASE), rf"\1\2{_MARK}"),
    (re.compile(r"\b(acc|inv)_[A-Za-z0-9_-]{8,}"), rf"\1_{_MARK}"),
    (re.compile(r"\bAGE-SECRET-KEY-1[0-9A-Z]+", re.IGNORECASE), _MARK),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL), _MARK),
)  # fmt: skip


def place(text: str) -> str:
    """A folder, or a URL's scheme, host, port and path, with "…" for its login and for the values of its query; more where in doubt."""
    scheme, mark, _ = text.partition("://")
    if not mark:
        return hidden(text)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return _MARK
    nothing = f"{scheme}://{_MARK}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return nothing
    rest = "".join((parts.path, parts.query, parts.fragment))
    if "@" in rest and scheme not in _FILES or re.search(r"\s", parts.netloc):
        # A password that holds a character which nobody escaped: where it ends can't be told.
        return nothing
    login, _, host = parts.netloc.rpartition("@")
    shown = f"{scheme}://{f'{_MARK}@' if login else ''}{host}{parts.path}"
    if port is None and ":" in host and not host.endswith("]"):
        return nothing
    if parts.query:
        shown += "?" + "&".join(_parameter(one) for one in parts.query.split("&"))
    return shown + (f"#{_MARK}" if parts.fragment else "")


def holds_login(text: str) -> bool:
    """Whether there is something in a place that others must not read."""
    return place(text) != text


def _parameter(text: str) -> str:
    name, mark, value = text.partition("=")
    if name in _OPEN and re.fullmatch(r"[\w.-]{0,40}", value):
        return text
    return f"{name}={_MARK}" if mark and re.fullmatch(r"\w{1,40}", name) else _MARK


def hidden(text: str) -> str:
    """The text with "…" in the place of every secret that is recognized."""
    return _hidden(text, cut=False)


def beginning(text: str, longest: int) -> str:
    """At most so many characters of the text's beginning, as `hidden`; what a cut divided is left out, as half a secret is not recognized."""
    if len(text) <= _TIMES * longest:
        return hidden(text)[:longest]
    # Back to the last blank: nothing after it is whole.
    whole = _words(text[: _TIMES * longest])
    return (_hidden(whole, cut=True) + _MARK)[:longest]


def ending(text: str, longest: int) -> str:
    """At most so many characters of the text's end, in whole lines where it is long, as `hidden`."""
    if len(text) > _TIMES * longest:
        text = text[-_TIMES * longest :].partition("\n")[2]
        first = _KEY_ENDS.search(text)
        if first is not None and first[1] == "END":
            text = text[first.end() :]
    return hidden(text)[-longest:]


def _words(text: str) -> str:
    """The text up to its last blank."""
    end = len(text)
    while end and not text[end - 1].isspace():
        end -= 1
    return text[:end]


def _hidden(text: str, *, cut: bool) -> str:
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return _without_logins(_ESCAPED.sub(rf"\1\2{_MARK}", _without_values(text)), cut=cut)


def _without_values(text: str) -> str:
    """Without the values of what is named password, secret, token, …: `name=value`, "name": "value", name: value, --name value."""
    found, done, at = [], 0, 0
    while key := _KEY.search(text, at):
        at = key.end()
        name, sure = unquote(key["name"] or key["word"]), key["name"] is not None and key["colon"] is None
        if not (_SECRET if sure else _NAMES_ONE).search(name):
            continue
        value = _VALUE.match(text, at)
        assert value is not None
        if value[0]:
            found += [text[done:at], _MARK]
            done = at = value.end()
    return "".join([*found, text[done:]])


def _without_logins(text: str, *, cut: bool) -> str:
    """Without USER:PASSWORD and TOKEN before an @, with a scheme or without; to the last @, as a password may hold one.

    Where the text was cut, what may be a password whose @ was to come is one.
    """
    found, done, opened, before, newline = list[str](), 0, -1, 0, -1
    for word in _WORD.finditer(text):
        here = word[0]
        newline = max(newline, text.rfind("\n", before, word.start()))
        before = word.end()
        if newline > opened:
            opened = -1
        last = here.rfind("@")
        scheme = here.find("://")
        if last > 0 and (opened >= 0 or 0 <= scheme < last or 0 <= here.find(":") < last):
            first = scheme + 3 if 0 <= scheme < last else here.find(":") + 1 if 0 <= here.find(":") < last else 0
            start = opened if opened >= 0 else word.start() + first
            if start < word.start() + last:
                found += [text[done:start], _MARK]
                done = word.start() + last
            opened = -1
        elif last < 0 and (password := _UNQUOTED_PASSWORD.search(here)):
            # The password may hold a space, and the @ comes later.
            opened = word.start() + password.start() + 3
    if cut and opened >= 0 and "\n" not in text[before:]:
        return "".join([*found, text[done:opened], _MARK])
    return "".join([*found, text[done:]])
