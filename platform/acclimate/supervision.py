"""Supervision: the parts of an installation as child processes, kept running, their lines in files, and ended in order.

A part is an `acclimate` command with `--stop-with-stdin`, in a session of its own, with a pipe as standard input: it ends by itself
once the supervisor is gone, however that ended. What it writes goes line by line into a file with rotation.

A part that ends is started again, after pauses that grow while it keeps ending. Two ends are not worth another try before the part was
ready once: a refusal, which needs the operator, and the fifth crash within a minute. They end the supervision.
"""

import contextlib
import ctypes
import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from acclimate.console import FILE_BYTES, FILES, RotatingFile
from acclimate_competitions.errors import CODES, Refusal

PAUSES = (0.5, 30.0)
"""Seconds before a part is started again: after its first end, and at most."""
GRACE = 20.0
"""Seconds that a part gets to end by itself, whether its supervisor asks it or is gone; an API gets those of the setting `drain` besides."""
HEALTHY_AFTER = 60.0
"""A part that ran for so many seconds is well, and its next end is a first one."""
CRASHES = 5
REFUSED = "refused at start"
"""Event of the line with which a supervised part says why it refuses, for the supervisor."""
_LONGEST_LINE = 1_000_000
_LOOK = 0.05
Say = Callable[[str], None]
Heard = Callable[[str, Mapping[str, Any]], None]
"""Called with a part's name and one of its events, in a thread of its own."""


def command(*arguments: str) -> list[str]:
    """The command line of an acclimate command, run by this interpreter."""
    return [sys.executable, "-m", "acclimate", *arguments]


def shown(*arguments: str) -> str:
    """A command line as a person would type it here: with the path of `acclimate` where it is not on the search path."""
    beside = Path(sys.executable).with_name("acclimate")
    program = "acclimate" if shutil.which("acclimate") or not beside.exists() else str(beside)
    return shlex.join([program, *arguments])


@dataclass(frozen=True)
class Part:
    """What to run.

    Attributes:
        name: of the part, and of its log file.
        line: its command line, see `server`.
        environment: what differs from this process's environment; passwords go this way, never through arguments.
        grace: seconds that it gets to end by itself.
    """

    name: str
    line: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    grace: float = GRACE


def server(name: str, *arguments: str, environment: Mapping[str, str], grace: float = GRACE) -> Part:
    """The part that an `acclimate` command is."""
    return Part(name, [*command(name, *arguments), "--stop-with-stdin"], environment, grace)


class Process:
    """One run of a part.

    Attributes:
        refusal: with which the part ended, where it did.
        last: the last lines that it wrote.
        killed: whether it had to be killed, as it did not end when it was asked.

    Raises:
        OSError: where the system has no process, no memory or no open file left for it.
    """

    def __init__(self, part: Part, log: RotatingFile, heard: Heard) -> None:
        self.part, self.began = part, time.monotonic()
        self.refusal: Refusal | None = None
        self.last = deque[str](maxlen=20)
        self.killed = False
        self._log, self._heard = log, heard
        self._child = subprocess.Popen(
            part.line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
            start_new_session=True,
        )
        self.pid = self._child.pid
        assert self._child.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._child.stdout,), name=part.name, daemon=True)
        try:
            self._reader.start()
        except RuntimeError as error:
            self._kill_group()
            self._child.wait()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.began

    def ended(self) -> int | None:
        """Its exit status, or None while it runs; negative: the signal that ended it. What it left behind in its group is killed."""
        if self._child.returncode is None and _has_ended(self.pid):
            # Before its number is given back, so that the group can be nobody else's.
            self._kill_group()
            self._child.wait()
            assert self._child.stdin is not None
            with contextlib.suppress(OSError):
                self._child.stdin.close()
            # A process of another session may hold the pipe open; its lines are not waited for.
            self._reader.join(2.0)
        return self._child.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        if self.ended() is None:
            # Not by Popen, which would give the number back before the group is ended: only `ended` does.
            os.kill(self.pid, signal.SIGTERM)

    def stop(self, *, hurry: threading.Event | None = None) -> None:
        """End it: SIGTERM, and SIGKILL for its whole group once its grace is over or somebody hurries."""
        self.terminate()
        deadline = time.monotonic() + self.part.grace
        while self.ended() is None:
            if not self.killed and (time.monotonic() > deadline or (hurry is not None and hurry.is_set())):
                self.killed = True
                self._kill_group()
            time.sleep(_LOOK)

    def told(self) -> str:
        """What it said last of why it ended."""
        lines = [line for line in self.last if line.startswith("error: ")] or list(self.last)
        return lines[-1][:300] if lines else ""

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            while piece := stream.readline(_LONGEST_LINE):
                cut = not piece.endswith(b"\n")
                while cut and (rest := stream.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                    pass
                line = piece.decode("utf-8", "replace").rstrip("\n") + (" …" if len(piece) == _LONGEST_LINE else "")
                self._log.write(line)
                # Whatever a part writes, it is read on: it would hang in a pipe that nobody reads.
                with contextlib.suppress(Exception):
                    self._take(line)

    def _take(self, line: str) -> None:
        if line.startswith("{"):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                if event["event"] == REFUSED:
                    self.refusal = _refusal(event)
                    return
                self._heard(self.part.name, event)
        if line:
            self.last.append(line)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _refusal(event: Mapping[str, Any]) -> Refusal | None:
    code, problems = event.get("code"), event.get("problems")
    if not isinstance(code, str) or code not in CODES:
        return None
    listed = [str(one) for one in problems] if isinstance(problems, list) else []
    return Refusal(code, str(event.get("sentence", "")), hint=str(event.get("hint", "")), problems=listed)


def reported(refusal: Refusal) -> dict[str, Any]:
    """The facts of the event REFUSED."""
    return dict(refusal.document())


@dataclass
class _Kept:
    """A part that is kept running."""

    part: Part
    log: RotatingFile
    process: Process | None = None
    established: bool = False
    pause: float = field(default_factory=lambda: PAUSES[0])
    due: float = 0.0
    crashes: deque[float] = field(default_factory=lambda: deque(maxlen=CRASHES))


class Supervisor:
    """Keeps parts running; for one thread.

    Args:
        logs: folder of the parts' log files; made where it is not there.
        say: told of each end and each new start.
        heard: told of the parts' events.
        size, keep: of the log files, see console.RotatingFile.
    """

    def __init__(
        self,
        logs: Path,
        *,
        say: Say = lambda line: None,
        heard: Heard = lambda part, event: None,
        size: int = FILE_BYTES,
        keep: int = FILES,
    ) -> None:
        self.logs, self._say, self._heard = logs, say, heard
        self._size, self._keep = size, keep
        self._kept: dict[str, _Kept] = {}

    def start(self, part: Part) -> None:
        """Start a part, once.

        Raises:
            Refusal: config_invalid, where its log file can't be made; server_unreachable, where the system has no room for its process.
        """
        log = RotatingFile(self.log_of(part.name), size=self._size, keep=self._keep)
        try:
            process = Process(part, log, self._heard)
        except OSError as error:
            log.close()
            raise Refusal(
                "server_unreachable",
                f"acclimate {part.name} can't be started: {error.strerror or error}",
                hint="close other programs, or allow more: `ulimit -u` says how many processes, `ulimit -n` how many open files",
            ) from error
        self._kept[part.name] = _Kept(part, log, process)

    def log_of(self, name: str) -> Path:
        """A part's log file."""
        return self.logs / f"{name}.log"

    def pid(self, name: str) -> int | None:
        """The process id of a part, or None while it waits for its next start."""
        process = self._kept[name].process
        return None if process is None else process.pid

    def establish(self, name: str) -> None:
        """A part is ready: from now on its ends are not taken for faults of its start."""
        self._kept[name].established = True

    def ended(self) -> tuple[str, int, str] | None:
        """A part that has ended, its exit status and what it said last; for who starts none again."""
        for name, kept in self._kept.items():
            if kept.process is not None and (status := kept.process.ended()) is not None:
                return name, status, kept.process.told()
        return None

    def step(self) -> None:
        """Look after every part: start again what has ended and is due.

        Raises:
            Refusal: of a part that refuses at its start; server_unreachable, where one ends again and again before it is ready.
        """
        for kept in self._kept.values():
            if kept.process is None:
                if time.monotonic() >= kept.due:
                    self._again(kept)
            elif (status := kept.process.ended()) is not None:
                self._ended(kept, kept.process, status)

    def stop(self, *, order: Sequence[str] = (), hurry: threading.Event | None = None) -> list[str]:
        """End all parts, one after another: those of `order` first, then the rest, the last started first.

        Returns:
            The names of those that had to be killed.
        """
        killed = []
        rest = [name for name in reversed(self._kept) if name not in order]
        for name in [*(name for name in order if name in self._kept), *rest]:
            kept = self._kept.pop(name)
            if kept.process is not None:
                kept.process.stop(hurry=hurry)
                if kept.process.killed:
                    killed.append(name)
                    self._say(f"{name} did not end in time and was killed (see {self.log_of(name)})")
            kept.log.close()
        return killed

    def _again(self, kept: _Kept) -> None:
        try:
            kept.process = Process(kept.part, kept.log, self._heard)
        except OSError as error:
            # The rest goes on, and room may come back.
            why = error.strerror or error
            self._say(f"{kept.part.name} can't be started: {why}; it is tried again in {kept.pause:g} s")
            self._put_off(kept)
            return
        self._say(f"{kept.part.name} started again (process {kept.process.pid})")

    def _put_off(self, kept: _Kept) -> None:
        kept.process, kept.due = None, time.monotonic() + kept.pause
        kept.pause = min(2 * kept.pause, PAUSES[1])

    def _ended(self, kept: _Kept, process: Process, status: int) -> None:
        name, how = kept.part.name, _how(status)
        if not kept.established:
            if process.refusal is not None:
                raise process.refusal
            kept.crashes.append(time.monotonic())
            if len(kept.crashes) == CRASHES and kept.crashes[-1] - kept.crashes[0] < HEALTHY_AFTER:
                raise Refusal(
                    "server_unreachable",
                    f"acclimate {name} ended {CRASHES} times at its start, the last time {how}",
                    hint=f"see {self.log_of(name)}; it says: {process.told()}",
                )
        if process.age >= HEALTHY_AFTER:
            kept.pause = PAUSES[0]
        why = process.refusal.sentence if process.refusal is not None else how
        self._say(f"{name} ended: {why}; it is started again in {kept.pause:g} s (see {self.log_of(name)})")
        self._put_off(kept)


def _how(status: int) -> str:
    if status >= 0:
        return f"with status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


# ---- the child's side ----------------------------------------------------------------------------------------------


def stop_with_stdin(*, grace: float = GRACE) -> None:
    """End this process as SIGTERM would once its standard input ends; by force, where that takes longer than its grace."""

    def wait() -> None:
        # A pipe ends when the other end's process does, however it ended.
        while os.read(0, 4096):
            pass
        # Who read this process's lines is gone as well; a line more must not be an error in what it still has to do.
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="stop-with-stdin", daemon=True).start()


_BIND = "import sys; from acclimate.supervision import bind; bind(int(sys.argv[1]), sys.argv[2:])"


def run_foreign(line: Sequence[str], *, environment: Mapping[str, str], grace: float = 10.0) -> int:
    """Run a program that is not ours until it ends or SIGTERM or SIGINT comes; for the main thread.

    It is in a group of its own, which is ended wholly; and it gets SIGTERM when this process dies.

    Returns:
        Its exit status; 0 where it was asked to end.

    Raises:
        OSError: where it can't be started.
    """
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    child = subprocess.Popen(
        [sys.executable, "-c", _BIND, str(os.getpid()), *line],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
        process_group=0,
    )
    while not _has_ended(child.pid) and not asked.wait(0.2):
        pass
    if asked.is_set() and not _has_ended(child.pid):
        os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while not _has_ended(child.pid) and time.monotonic() < deadline:
            time.sleep(_LOOK)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    return 0 if asked.is_set() else status


def bind(parent: int, line: list[str]) -> None:
    """Become another program, which gets SIGTERM once the parent dies; what PDEATHSIG says survives exec."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(1, int(signal.SIGTERM), 0, 0, 0)  # 1: PR_SET_PDEATHSIG
    if os.getppid() != parent:
        # It died before the kernel was asked.
        sys.exit(1)
    os.execv(line[0], line)
