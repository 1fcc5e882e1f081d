"""What a server process says to its operator: one JSON object a line, ids and reasons, never a key or a token.

A line is {"at": RFC 3339 in UTC, "level": debug | info | warning | error, "event": …} and what belongs to the event. What
libraries log goes the same way, with `logger`, and with `traceback` in one field where there is one. Lines go to standard error,
or to a file with rotation where the settings name one. Refusals at the start are not lines of this log: they stay `error:` and
`hint:` lines on standard error, for people.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from acclimate import locks
from acclimate.config import Settings
from acclimate.redaction import beginning, ending
from acclimate_competitions.errors import Refusal

FILE_BYTES, FILES = 10_000_000, 5
"""A log file's size, and how many old ones are kept."""
_LONGEST = 20_000
_NUMBERS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# These name addresses with their queries, or narrate; what they warn of is of interest.
_CHATTY = (
    "uvicorn",
    "httpx",
    "httpcore",
    "botocore",
    "aiobotocore",
    "boto3",
    "s3fs",
    "fsspec",
    "urllib3",
    "asyncio",
    "alembic",
)
_lock = threading.Lock()
_log = logging.getLogger("acclimate.process")


def say(event: str, *, level: str = "", **facts: Any) -> None:
    """Write one line, where its level is logged: by default error with a traceback, else info."""
    level = level or ("error" if "traceback" in facts else "info")
    number = _NUMBERS[level]
    handler = _handler()
    if handler is None:
        _put(sys.stderr, line(event, level=level, **facts))
    elif logging.getLogger().isEnabledFor(number):
        handler.write(line(event, level=level, **facts))


def line(event: str, *, level: str = "info", at: float | None = None, **facts: Any) -> str:
    """One line of the log, without its end; secrets that are recognized are taken out.

    Args:
        event: what happened.
        level: debug, info, warning or error.
        at: seconds since 1970; None for now.
        facts: what belongs to it; None values are left out.
    """
    moment = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    stamp = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    found = {name: _safe(value) for name, value in facts.items() if value is not None}
    return json.dumps({"at": stamp, "level": level, "event": _safe(event), **found}, default=_text)


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        return beginning(value, _LONGEST)
    if isinstance(value, Mapping):
        return {str(name): _safe(inner) for name, inner in value.items()}
    return [_safe(inner) for inner in value] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    return str(_safe(str(value)))


_ASYNCIO_EVERY = 60.0


class Handler(logging.Handler):
    """Python's logging as lines of this log, on standard error or in a file."""

    def __init__(self, file: "RotatingFile | None" = None) -> None:
        super().__init__()
        self._file = file
        self._said: dict[object, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; of what the event loop says over and over (no open file is left, say), one a minute."""
        if record.name == "asyncio":
            if record.created - self._said.get(record.msg, 0.0) < _ASYNCIO_EVERY:
                return
            if len(self._said) > 100:
                self._said.clear()
            self._said[record.msg] = record.created
        try:
            self.write(formatted(record))
        except Exception:
            # A line that can't be made must not end what it tells of; its arguments may be secrets.
            self.write(line("a line of the log could not be made", level="error", logger=record.name))

    def write(self, text: str) -> None:
        """Write one finished line."""
        if self._file is not None:
            self._file.write(text)
        else:
            _put(sys.stderr, text)


def formatted(record: logging.LogRecord) -> str:
    """A record of Python's logging as one line; `extra={"facts": {…}}` are its facts."""
    level = next((name for name in ("error", "warning", "info") if record.levelno >= _NUMBERS[name]), "debug")
    facts = dict(getattr(record, "facts", {}))
    if record.exc_info and record.exc_info[1] is not None:
        facts["traceback"] = ending("".join(traceback.format_exception(record.exc_info[1])), _LONGEST)
    return line(record.getMessage(), level=level, at=record.created, logger=record.name, **facts)


def _may_be_a_log(path: Path) -> bool:
    """Whether a file is missing, empty, or begins as our lines do: a key or a database must never get lines, nor be turned away."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        return file.read(1) in (b"", b"{")


class RotatingFile:
    """A file of lines that begins anew when it is full; its owner's alone. A full disk loses lines, never more.

    Args:
        path: the file; older ones are path.1 (the youngest) to path.N.
        size: bytes at which a new one begins.
        keep: how many older ones are kept.
        alone: refuse another process that wants the same file so; a lock file lies beside it.

    Raises:
        Refusal: config_invalid, where the file can't be made; busy, where another process has it.
    """

    def __init__(self, path: Path, *, size: int = FILE_BYTES, keep: int = FILES, alone: bool = False) -> None:
        self._path, self._size, self._keep = path, size, keep
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if alone and not _may_be_a_log(path):
                raise Refusal(
                    "config_invalid",
                    f"{path} holds something else than a log; nothing is written to it",
                    hint="name another with log_file or ACCLIMATE_LOG_FILE, or leave it out",
                )
            # Two processes that turn one file would lose each other's lines.
            self._held = locks.take(path.with_name(f"{path.name}.lock")) if alone else None
            if self._held is not None or not alone:
                self._file = self._open(path)
        except OSError as error:
            raise Refusal(
                "config_invalid",
                f"the log file {path} can't be written: {error.strerror}",
                hint="name another with log_file or ACCLIMATE_LOG_FILE, or leave it out",
            ) from error
        if alone and self._held is None:
            raise Refusal(
                "busy",
                f"the log file {path} is in use by another process",
                hint="give each process one of its own with ACCLIMATE_LOG_FILE",
            )

    def write(self, text: str) -> None:
        """Add one line."""
        with _lock:
            try:
                if self._file.tell() + len(text) >= self._size:
                    # Where that fails, the lines go on in the file that is full, and the next one tries again.
                    with contextlib.suppress(OSError):
                        self._turn()
                self._file.write(text.encode("utf-8", "backslashreplace") + b"\n")
            except (OSError, ValueError):
                return

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._held is not None:
            self._held.close()

    def _open(self, path: Path) -> IO[bytes]:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        opened = os.fdopen(handle, "ab", buffering=0)
        opened.seek(0, os.SEEK_END)
        return opened

    def _turn(self) -> None:
        # The new file is there before the old one is left.
        fresh = self._path.with_name(f".{self._path.name}.new")
        opened = self._open(fresh)
        try:
            for number in range(self._keep - 1, 0, -1):
                older = self._path.with_name(f"{self._path.name}.{number}")
                if older.exists():
                    older.replace(self._path.with_name(f"{self._path.name}.{number + 1}"))
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            fresh.replace(self._path)
        except BaseException:
            opened.close()
            raise
        self._file.close()
        self._file = opened


def configure(settings: Settings, *, part: str) -> None:
    """Make this process speak so: its own events, what libraries log and warn of, and what ends a thread or the process.

    Args:
        settings: level and file.
        part: api, dispatch, …; in the lines about the process itself.

    Raises:
        Refusal: config_invalid, where the log file can't be written; busy, where another process has it.
    """
    file = RotatingFile(settings.log_file, alone=True) if settings.log_file is not None else None
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(Handler(file))
    root.setLevel(_NUMBERS[settings.log_level])
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # MLflow would put handlers of its own, on the same stream, when it is imported.
    os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")
    warnings.showwarning = _warned
    sys.excepthook = lambda kind, error, trace: _ended(part, kind, error, trace)
    threading.excepthook = lambda found: _ended(
        f"{part}: thread {found.thread.name if found.thread else '?'}",
        found.exc_type,
        found.exc_value,
        found.exc_traceback,
    )


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    # Not logging's own, whose lines show the source code around the warning.
    facts = {"category": category.__name__, "where": f"{Path(filename).name}:{lineno}"}
    logging.getLogger("py.warnings").warning("%s", message, extra={"facts": facts})


def _ended(part: str, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is None or issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    _log.error("%s ended by %s", part, kind.__name__, exc_info=(kind, error, trace))


def _handler() -> Handler | None:
    return next((one for one in logging.getLogger().handlers if isinstance(one, Handler)), None)


def _put(stream: IO[str], text: str) -> None:
    # One write a line, so that lines of threads don't mix; who listens may be gone.
    with _lock:
        try:
            stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError):
            return
