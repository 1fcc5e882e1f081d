"""The child process of a job: what it is kept from, what it is not, and how it ends.

Contained, on Linux:
- It runs no code of an entrant: models are safetensors and JSON, read by our code (models.py). All below is the second line.
- It knows nothing of the platform: a cleared environment (no token, no address, no key), no inherited file descriptor beyond
  its two pipes, a job folder that holds its own inputs only. Holdout labels are in none of its inputs.
- It has no network, where the kernel lets this process make a network namespace (as root, or by user namespaces). Where it
  doesn't, the child runs with the network open, and says so: see `Isolation.network`.
- It gains no rights by running other programs (no_new_privs), leaves no core dump, and is bounded in memory, time and log.
- It dies with whoever started it, for three reasons that don't rely on each other: the kernel's parent-death signal, the end
  of file on a pipe that the parent holds, and being killed as a whole process group.

Not contained:
- The file system: the child runs as the same user, and could read and write what that user can. There is no chroot, no mount or
  process namespace, no seccomp filter, no Landlock.
- Other processes of the same user: code that ran in a child could read /proc/<pid>/environ of the worker or dispatcher that started it, and
  with it the AWS login or a token that is kept there. PR_SET_DUMPABLE would not help where both are root, and hides a worker's memory
  from Ray's monitor. So give worker machines a login of their own, for the blobs only, and best one that expires.
- The GPU: a child that is given a device can use all of its memory; jobs on one GPU are not shielded from each other.
- Memory is watched every tenth of a second and the child killed beyond its limit, because an address-space limit that is low
  enough to help breaks torch. Between two looks it may exceed the limit; a single allocation beyond it by 4 GiB fails at once
  (RLIMIT_DATA; not set where GPUs are given, whose driver reserves far more). Off Linux memory is not watched.
- Time on the CPU beyond the threads it is told to use.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from acclimate_runners.jobs import Limits
from acclimate_runners.oom_kills import OomKills

LOG_BYTES = 1 << 20
"""How much of a child's output is kept, from its beginning; of the rest only the last 4 KiB."""
_TAIL = 4096
_LOOK = 0.1
_HEADROOM = 4 << 30
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1

NO_MEMORY, NO_SPACE = 71, 74
"""Exit statuses of a child that was refused memory or space on the disk."""
_CODES = {NO_MEMORY: "out_of_memory", NO_SPACE: "no_space"}
_ABORTS_FOR_MEMORY = re.compile(r"std::bad_alloc|memory allocation of \d+ bytes failed")
"""What C++ and Rust say before they abort."""
# A bus error is what a full disk under a mapped file looks like; the others are the kernel's or an operator's killing.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGBUS})


@dataclass(frozen=True)
class Isolation:
    """What a child could be kept from on this machine.

    Attributes:
        network: none, or open where no network namespace could be made.
        parent_death: whether the kernel kills the child when its parent dies.
    """

    network: str
    parent_death: bool


@dataclass(frozen=True)
class Progress:
    """The child's last word: step of total, and what it is at."""

    step: int = 0
    total: int = 0
    what: str = ""


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        reason: in words; empty where it exited by itself with status 0.
        code: limit_exceeded where time did not suffice, out_of_memory where memory did not, machine_memory where the kernel ended it for
            want of memory before it had used what is allowed, no_space where the disk did not suffice, runner_failed where the machine
            killed it, cancelled, job_failed for all else; empty where it exited by itself with status 0.
    """

    reason: str
    code: str = ""


# ---- the parent's side ---------------------------------------------------------------------------------------------


def environment(folder: Path, *, threads: int, devices: str = "") -> dict[str, str]:
    """All variables that a child sees.

    Args:
        folder: the job's folder; the child's HOME and TMPDIR.
        threads: of the numeric libraries; part of the recipe, as it can change the last bits of a sum.
        devices: GPUs as CUDA_VISIBLE_DEVICES names them; empty for none.
    """
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_VISIBLE_DEVICES": devices,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
    }


PROGRAM = ("-m", "acclimate_runners")


class Process(Protocol):
    """A child that is not a plain subprocess.Popen (nursery.py); its number stays its own until wait() has returned."""

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    returncode: int | None

    def exited(self) -> bool:
        """Whether it has ended; doesn't reap it."""

    def wait(self) -> int:
        """Exit status, or the signal's number negated, as Popen gives it."""


def spawn(
    folder: Path,
    *,
    limits: Limits,
    threads: int,
    devices: str = "",
    program: Sequence[str] = PROGRAM,
    fork: Callable[..., Process | None] | None = None,
) -> "Child":
    """Start `python -m acclimate_runners FOLDER`, which confines itself before it reads anything.

    Call it from a thread that lives until the child has ended, and let that thread call `supervise`: the parent-death signal
    follows the thread that started the child, not its process.

    Args:
        folder: the job's folder.
        limits: what the child may use.
        threads: of the numeric libraries.
        devices: GPUs that it may use; empty for none.
        program: what Python runs with the folder and the arguments that `confine` needs.
        fork: tried first for a child without GPUs that runs the usual program: the same child, sooner.
    """
    read_end, write_end = os.pipe()
    memory = 0 if devices else limits.memory + _HEADROOM
    variables = environment(folder, threads=threads, devices=devices)
    process: subprocess.Popen[bytes] | Process | None = None
    # -P keeps the current folder off the module path, where a folder named `platform` would hide the standard library's.
    command = [sys.executable, "-P", *program, str(folder)]
    command += ["--parent", str(os.getpid()), "--progress", str(write_end), "--memory", str(memory)]
    try:
        if fork is not None and program == PROGRAM and not devices:
            process = fork(folder, environment=variables, memory=memory, words=write_end)
        process = process or subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(write_end,),
        )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return Child(process, os.fdopen(read_end, "rb", buffering=0), folder=folder, limits=limits)


class Child:
    """A running child process and the pipes that tie it to this one.

    Attributes:
        pid: its process id, which is also its process group's.
        progress: its last word.
        words: how many it has said of its progress.
        isolation: what it said it is kept from; None before it said anything.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes] | Process", words: IO[bytes], *, folder: Path, limits: Limits
    ) -> None:
        self.pid = process.pid
        self.progress, self.words = Progress(), 0
        self.isolation: Isolation | None = None
        self._process, self._words, self._limits = process, words, limits
        self._kills = OomKills(process.pid)
        self._log = Log(folder / "child.log")
        self._pending = b""
        self._started = time.monotonic()

    def supervise(self, stop: threading.Event) -> Ended:
        """Follow the child to its end: read what it says, keep its limits, kill it when `stop` is set.

        Returns when no process of its group is left.
        """
        assert self._process.stdout is not None and self._process.stdin is not None
        with selectors.DefaultSelector() as selector, self._words, self._process.stdout as output, self._log:
            for stream, take in ((self._words, self._listen), (output, self._log.write)):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, take)
            ended: Ended | None = None
            try:
                while ended is None and not self._exited():
                    self._read(selector, _LOOK)
                    ended = Ended("cancelled", "cancelled") if stop.is_set() else self._over_limit()
            finally:
                self.kill()
                status = self._process.wait()
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            self._read(selector, 0)
        return ended or self._by_itself(status)

    def kill(self) -> None:
        """Kill the child and all that it started."""
        # The leader is not reaped before this, so its process group's number can't have become another's.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _exited(self) -> bool:
        if not isinstance(self._process, subprocess.Popen):
            return self._process.exited()
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _read(self, selector: selectors.BaseSelector, timeout: float) -> None:
        if not selector.get_map():
            time.sleep(min(timeout, 0.02))
            return
        for key, _ in selector.select(timeout):
            # Not until it is empty: a child that never stops talking must not keep its limits from being looked at.
            for _turn in range(16):
                try:
                    data = os.read(key.fd, 65536)
                except BlockingIOError:
                    break
                if not data:
                    selector.unregister(key.fileobj)
                    break
                key.data(data)

    def _listen(self, data: bytes) -> None:
        *lines, self._pending = (self._pending + data).split(b"\n")
        # A line that never ends is dropped, not collected.
        self._pending = self._pending[-65536:]
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, LookupError):
                word = json.loads(line)
                if "network" in word:
                    self.isolation = Isolation(str(word["network"]), bool(word["parent_death"]))
                else:
                    self.progress = Progress(int(word["step"]), int(word["total"]), str(word.get("what", ""))[:200])
                    self.words += 1

    def _over_limit(self) -> Ended | None:
        used, allowed = sum(map(resident_bytes, _family(self.pid))), self._limits.memory
        if used > allowed:
            reason = f"used {used / 2**30:.2f} GiB of memory, {allowed / 2**30:.2f} GiB are allowed"
            return Ended(reason, "out_of_memory")
        self._kills.look()
        if time.monotonic() - self._started > self._limits.wall_seconds:
            return Ended(f"ran longer than the {self._limits.wall_seconds:.0f} s allowed", "limit_exceeded")
        return None

    def _by_itself(self, status: int) -> Ended:
        if status == 0:
            return Ended("")
        last = self._log.tail.decode("utf-8", "replace").strip().splitlines()[-1:]
        said = f": {last[0][:300]}" if last else ""
        if status < 0:
            if -status == signal.SIGKILL and self._kills.grown():
                return Ended(f"killed by the kernel, as the machine ran out of memory{said}", "machine_memory")
            if -status == signal.SIGABRT and _ABORTS_FOR_MEMORY.search(self._log.tail.decode("utf-8", "replace")):
                status = NO_MEMORY
        if status < 0:
            code = "runner_failed" if -status in _FROM_OUTSIDE else "job_failed"
            return Ended(f"killed by {signal.Signals(-status).name}{self._killer(-status)}{said}", code)
        if status == NO_MEMORY:
            allowed = self._limits.memory / 2**30
            return Ended(f"needed more memory than the {allowed:.2f} GiB allowed{said}", "out_of_memory")
        return Ended(f"exited with status {status}{said}", _CODES.get(status, "job_failed"))

    def _killer(self, number: int) -> str:
        """What is known of who sent a signal."""
        if number not in _FROM_OUTSIDE:
            return ""
        if number == signal.SIGBUS or (number == signal.SIGKILL and not self._kills.known):
            return ", perhaps because the machine ran out of memory"
        return ", by somebody else than the kernel for want of memory"


class Log:
    """A child's output in a file of bounded size; `tail` holds its last bytes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._size = 0
        self.tail = b""

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: object) -> None:
        if self._size > LOG_BYTES:
            left_out = f"\n[{self._size - LOG_BYTES} bytes more; the end of them:]\n".encode()
            self._put(left_out + self.tail)
        self._file.close()

    def write(self, data: bytes) -> None:
        """Take the child's next bytes."""
        self._put(data[: max(0, LOG_BYTES - self._size)])
        self._size += len(data)
        self.tail = (self.tail + data)[-_TAIL:]

    def _put(self, data: bytes) -> None:
        # A full disk must not stop the child from being supervised; its log is then short.
        with contextlib.suppress(OSError):
            self._file.write(data)


def resident_bytes(pid: int) -> int:
    """Memory that a process holds, in bytes; 0 where this machine doesn't say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * resource.getpagesize()


def _family(pid: int) -> Iterator[int]:
    """A process and all that it started."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            started = path.read_text("ascii").split()
        except OSError:
            # The thread has just ended, or this kernel doesn't say.
            continue
        for child in started:
            yield from _family(int(child))


# ---- the child's side ----------------------------------------------------------------------------------------------


def confine(*, parent: int, memory: int) -> Isolation:
    """Confine this process; called first thing in a child, before it has threads or has read anything.

    Args:
        parent: process id of whoever started it.
        memory: limit on private memory in bytes; 0 for none.
    """
    # 1. Signals: none blocked or ignored, whatever the parent had set.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    # 2. Limits.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with contextlib.suppress(OSError):
        # Where the machine runs out of memory, the child goes before whoever started it.
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    # 3. Network, then rights. The user namespace clears the parent-death signal, so that comes after it.
    network = "none" if _leave_network() else "open"
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # 4. Death with the parent: from the kernel, and by the end of file on standard input.
    told = die_with(parent)
    threading.Thread(target=_die_at_end_of_file, daemon=True).start()
    return Isolation(network, parent_death=told)


def die_with(parent: int) -> bool:
    """Ask the kernel to kill this process when its parent dies; says whether it will."""
    told = _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It died before the kernel was asked.
        os._exit(1)
    return told


def _die_at_end_of_file() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _leave_network() -> bool:
    libc = _libc()
    if not hasattr(libc, "unshare"):
        return False
    if libc.unshare(_CLONE_NEWNET) == 0:
        _loopback_up()
        return True
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    # Stay the same user inside, so that files keep their owner.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with contextlib.suppress(OSError):
            Path(f"/proc/self/{name}").write_text(text, "ascii")
    _loopback_up()
    return True


def _loopback_up() -> None:
    """Switch on the one interface of a new network namespace, over which the processes of one child talk: it leads nowhere else."""
    request = struct.pack("16sh14x", b"lo", _IFF_UP)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def _prctl(option: int, value: int) -> bool:
    libc = _libc()
    return hasattr(libc, "prctl") and libc.prctl(option, value, 0, 0, 0) == 0


def _libc() -> Any:
    return ctypes.CDLL(None)


def tell(words: int | None, word: Mapping[str, Any]) -> None:
    """Write one line to the parent; a parent that is gone is not an error here, as the child is about to die."""
    if words is None:
        return
    try:
        os.write(words, json.dumps(word).encode() + b"\n")
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
