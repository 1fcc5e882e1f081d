"""How the process of a command goes on once it has begun (`__main__.py`), and how it ends.

SIGTERM and SIGHUP end a command as Ctrl-C does, by an exception: what it unpacked in the temporary folder is removed with it.
Commands that serve take the signals themselves.
"""

import codecs
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_PLAIN = {
    "→": "->",
    "–": "-",
    "−": "-",
    "—": "-",
    "…": "...",
    "·": "-",
    "×": "x",
    "≤": "<=",
    "≥": ">=",
    "±": "+-",
    "─": "-",
    "█": "#",
    "●": "*",
}
"""What stands for characters of ours where the terminal's encoding has none of them."""
_TRIALS = ("check", "prepare", "evaluate")
"""Commands that are tried over and over, and are given no values of pandas."""
UNWRITTEN = 4
"""Exit code where standard output takes no more: what the command found is not said by it."""


def carry_out() -> None:
    """Carry out the command line of this process, and end it."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # What whoever started this process has it ignore (nohup) stays ignored.
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)
    codecs.register_error("acclimate", _in_plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "backslashreplace"):
            stream.reconfigure(errors="acclimate")
    if sys.stdout is not None:
        sys.stdout = cast(TextIO, _Output(sys.stdout))
    if sys.argv[1:2] and sys.argv[1] in _TRIALS:
        from acclimate_runners import importing

        importing.without_pandas()
    from acclimate.cli.main import run

    run()


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks, in characters that each has; as an escape of JSON where we have no other word for it."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(one) or _escaped(one) for one in lacking), error.end


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")


class _Output:
    """Standard output; where it takes no more, the process ends with one line and a code of its own. A pipe that ends is no such case."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text."""
        with self._telling():
            return self._stream.write(text)

    def flush(self) -> None:
        """Hand on what was written."""
        with self._telling():
            self._stream.flush()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            # The interpreter flushes once more at its end.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            _say(f"error: the result can't be written to standard output: {error.strerror or error}")
            _say("hint: send it where there is room; what the command did otherwise stays done")
            sys.exit(UNWRITTEN)
