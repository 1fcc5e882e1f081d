"""A fork-server: one process that has torch and transformers imported, and forks a child per job from there.

What it is: a saving. Imports cost a child seconds of CPU, a fork milliseconds. The child is the one of isolation.py and runs the same
`main`: own session, cleared environment, its four file descriptors and none else, confined before it reads a byte.

- It only imports. It reads no job and runs no torch operation (a process that ran one hangs its forks). It is a program of its own,
  started as a child is, not a fork of the runner: what a child finds in its memory is the imports.
- Numeric libraries take their threads when they load, so there is a server for each environment, and for each state of the code.
- A child dies with the server (parent-death signal) and with its owner (end of file on standard input; the server also kills it
  when the owner's end of its status socket closes). It is reaped once the owner, told how it ended, closes that socket: until then its
  number can't become another's.
- A process has a server of its own, which dies with it. Processes that live for one attempt each (Ray's actors) share one for a
  machine and folder: it listens on an abstract socket, out of reach of a child without network, for its own user only. Either ends
  itself when it had no child for a while.

What it is not: containment. Children of one server share the layout of their memory, so that one could know another's addresses;
those of a shared server count to the control group of whoever started it.

It is never needed: where it can't be had (not Linux, no pidfd) or fails, the caller starts a plain process. So it does for a child
that is given GPUs: an import may touch the driver, which doesn't survive a fork.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import logging
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

import acclimate_competitions
from acclimate_runners import importing, isolation

LINGER = 60.0
"""Seconds without a child after which a server ends."""
_PATIENCE = 60.0
_LOOK = 0.1
_MODULES = "acclimate_runners.__main__ acclimate_runners.evaluation acclimate_runners.checking jinja2 pyarrow safetensors.torch tokenizers torch.profiler"
_log = logging.getLogger(__name__)


# ---- the owner's side ----------------------------------------------------------------------------------------------


class Forked:
    """A forked child, as much like a subprocess.Popen as isolation.Child needs.

    Attributes:
        returncode: as of Popen; None until wait() has returned.
    """

    def __init__(self, status: socket.socket, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = 0, stdin, stdout
        self.returncode: int | None = None
        self._status = status
        self._code: int | None = None

    def born(self, timeout: float) -> bool:
        """Whether it has been forked; raises OSError where it won't be."""
        self._status.settimeout(timeout)
        with contextlib.suppress(TimeoutError):
            self.pid = int(self._status.recv(16) or b"0")
            if self.pid <= 0:
                raise ConnectionResetError("it ended or could not fork")
        return self.pid > 0

    def exited(self, timeout: float = 0.0) -> bool:
        """Whether it has ended; this does not reap it."""
        if self._code is None:
            self._status.settimeout(timeout)
            with contextlib.suppress(BlockingIOError, TimeoutError):
                # At the end of file the server is dead, and the kernel kills its children.
                self._code = int(self._status.recv(16) or -signal.SIGKILL)
        return self._code is not None

    def wait(self) -> int:
        """Exit status once it has ended, or the signal's number negated; lets the server reap it."""
        self.exited(_PATIENCE)
        self.returncode = -signal.SIGKILL if self._code is None else self._code
        self._status.close()
        return self.returncode


class Nursery:
    """Where a runner's children are forked; may be used by several threads.

    Args:
        shared: folder whose processes share one server on this machine; None for a server of this process's own.
        linger: seconds without a child after which a server ends.
    """

    def __init__(self, *, shared: Path | None = None, linger: float = LINGER) -> None:
        self._shared, self._linger = shared, linger
        self._lock = threading.Lock()
        self._connections: dict[str, socket.socket] = {}
        self._not_before = 0.0

    def start(
        self, folder: Path, *, environment: Mapping[str, str], memory: int, words: int, stop: threading.Event
    ) -> Forked | None:
        """Fork a child for a job, waiting for the server's imports where it is new; None: start a plain process.

        Args:
            folder: the job's folder.
            environment: all that the child sees.
            memory: limit on its private memory in bytes; 0 for none.
            words: file descriptor of its progress lines.
            stop: ends the waiting.
        """
        if not _possible() or time.monotonic() < self._not_before:
            return None
        request = json.dumps({"folder": str(folder), "environment": dict(environment), "memory": memory}).encode()
        fixed = _fixed(environment)
        key, reason, until = self._key(fixed), "", time.monotonic() + _PATIENCE
        # Twice, as a server may have ended itself just now.
        for _turn in range(2):
            connection = None
            try:
                connection = self._connection(key, fixed)
                return _ask(connection, request, words, stop, until)
            except InterruptedError:
                return None
            except OSError as error:
                reason = str(error)
                with self._lock:
                    if connection is not None and self._connections.get(key) is connection:
                        self._connections.pop(key).close()
        self._not_before = time.monotonic() + _PATIENCE
        _log.warning("no fork-server (%s): children are started without one, which costs them seconds", reason)
        return None

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start the server, where there is none, before a child is wanted: its imports take seconds. Returns at once.

        Args:
            environment: all that a child will see.
        """
        if _possible():
            fixed = _fixed(environment)
            # What keeps it from coming is met again, and told, when a child is wanted.
            with contextlib.suppress(OSError):
                self._connection(self._key(fixed), fixed)

    def __del__(self) -> None:
        # Let go of the servers: one of this process's own ends once its children have.
        for connection in self._connections.values():
            connection.close()

    def _key(self, environment: Mapping[str, str]) -> str:
        spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("mnt", "pid")]
        # A server is never older than what a plain child would import.
        folders = [Path(__file__).parent, *map(Path, acclimate_competitions.__path__)]
        files = [Path(sysconfig.get_path("purelib")), *sorted(p for folder in folders for p in folder.glob("*.py"))]
        code = [(str(path), path.stat().st_mtime_ns) for path in files]
        owner = os.getpid() if self._shared is None else str(self._shared)
        said = json.dumps([os.geteuid(), spaces, owner, sys.executable, environment, code])
        return sha256(said.encode()).hexdigest()

    def _connection(self, key: str, environment: Mapping[str, str]) -> socket.socket:
        with self._lock:
            if key not in self._connections:
                if self._shared is None:
                    made, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self._launch("own", end, environment)
                else:
                    made = self._joined(f"\0acclimate-nursery-{key}", environment)
                made.settimeout(_PATIENCE)
                self._connections[key] = made
            return self._connections[key]

    def _joined(self, name: str, environment: Mapping[str, str]) -> socket.socket:
        made, listener = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
        try:
            # Who can bind the name starts the server; to all others the name says that it is there.
            listener.bind(name)
            listener.listen(128)
            self._launch("shared", listener, environment)
        except OSError:
            listener.close()
        try:
            made.settimeout(_PATIENCE)
            made.connect(name)
            if _user(made) != os.geteuid():
                raise PermissionError("another user holds its name")
        except OSError:
            made.close()
            raise
        return made

    def _launch(self, kind: str, end: socket.socket, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-P", "-m", "acclimate_runners.nursery", kind, str(end.fileno()), str(os.getpid())]
        # Room for the title of a child.
        command += [str(self._linger), " " * 1024]
        files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        files["pass_fds"] = (end.fileno(),)

        def keep() -> None:
            # This thread lives as long as the server, whose parent-death signal follows it, and reaps the server.
            with contextlib.suppress(OSError):
                with end:
                    process = subprocess.Popen(command, cwd="/", env=environment, start_new_session=True, **files)
                process.wait()

        threading.Thread(target=keep, name="nursery", daemon=True).start()


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """What all children of a server have in common."""
    return {**environment, "HOME": "/nonexistent", "TMPDIR": "/nonexistent"}


def _ask(connection: socket.socket, request: bytes, words: int, stop: threading.Event, until: float) -> Forked:
    (its_in, stdin), (stdout, its_out) = os.pipe(), os.pipe()
    status, its_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forked = Forked(status, os.fdopen(stdin, "wb", buffering=0), os.fdopen(stdout, "rb", buffering=0))
    try:
        with its_status, os.fdopen(its_in, "rb", buffering=0), os.fdopen(its_out, "wb", buffering=0):
            socket.send_fds(connection, [request], [its_in, its_out, words, its_status.fileno()])
        while not forked.born(_LOOK):
            if stop.is_set():
                raise InterruptedError
            if time.monotonic() > until:
                raise TimeoutError("it does not answer")
    except BaseException:
        # Whatever comes of it dies.
        for end in (status, forked.stdin, forked.stdout):
            end.close()
        raise
    return forked


def _possible() -> bool:
    with contextlib.suppress(AttributeError, OSError):
        os.close(os.pidfd_open(os.getpid()))
        return sys.platform == "linux"
    return False


def _user(connection: socket.socket) -> int:
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


# ---- the server's side ---------------------------------------------------------------------------------------------


class _Server:
    def __init__(self, end: socket.socket, linger: float) -> None:
        self._linger, self._children = linger, 0
        self._selector = selectors.PollSelector()
        listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        self._selector.register(end, selectors.EVENT_READ, self._accept if listens else self._request)

    def serve(self) -> None:
        used = time.monotonic()
        while self._selector.get_map() and time.monotonic() - used < self._linger:
            for key, _ in self._selector.select(min(1.0, self._linger)):
                key.data(key.fileobj)
            if self._children:
                used = time.monotonic()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        if _user(connection) == os.geteuid():
            self._selector.register(connection, selectors.EVENT_READ, self._request)
        else:
            connection.close()

    def _request(self, connection: socket.socket) -> None:
        data, given = b"", list[int]()
        with contextlib.suppress(OSError):
            data, given, _, _ = socket.recv_fds(connection, 1 << 16, 4)
        if not data or len(given) != 4:
            self._selector.unregister(connection)
            connection.close()
        else:
            status = socket.socket(fileno=given.pop())
            status.setblocking(False)
            try:
                # There can only be the end of file to read: an owner that no longer waits gets no child.
                status.recv(1)
                status.close()
            except BlockingIOError:
                self._fork(json.loads(data), given, status)
        for descriptor in given:
            os.close(descriptor)

    def _fork(self, request: dict[str, Any], given: list[int], status: socket.socket) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            status.close()
            return
        if pid == 0:
            _become(request, given, server, status)
        self._children += 1
        process, gone = os.pidfd_open(pid), set[str]()

        def on_event(what: object) -> None:
            self._selector.unregister(what)  # type: ignore[arg-type]
            if what == process:
                found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert found is not None
                _tell(status, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
            elif "process" not in gone:
                # The process too, as it may lead no group yet.
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
            gone.add("process" if what == process else "owner")
            if len(gone) == 2:
                os.waitpid(pid, 0)
                os.close(process)
                status.close()
                self._children -= 1

        self._selector.register(process, selectors.EVENT_READ, on_event)
        self._selector.register(status, selectors.EVENT_READ, on_event)


def _tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        status.send(str(number).encode())


def _become(request: dict[str, Any], given: list[int], server: int, told: socket.socket) -> NoReturn:
    """In the fork: be what `python -m acclimate_runners FOLDER` is, started by the server."""
    status = 1
    try:
        # 1. A session of its own, of which the owner hears only now that it can kill the group; and four files, first out of the way
        # of each other. The server's objects stay referenced by its frames, so none closes a number that is another file's by then.
        os.setsid()
        # Until it confines itself, which asks again: the way there must not outlive the server either.
        isolation.die_with(server)
        _tell(told, os.getpid())
        stdin, stdout, words = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in given)
        for number, descriptor in enumerate((stdin, stdout, stdout, words)):
            os.dup2(descriptor, number)
        for path in list(Path("/proc/self/fd").iterdir()):
            if int(path.name) > 3:
                with contextlib.suppress(OSError):
                    os.close(int(path.name))
        # 2. Its folder, environment and title.
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        arguments = [request["folder"], "--parent", str(server), "--progress", "3", "--memory", str(request["memory"])]
        _entitle(f"{sys.executable} -m acclimate_runners {' '.join(arguments)}".encode())
        # 3. From here on as any child, which confines itself first.
        status = import_module("acclimate_runners.__main__").main(arguments)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


def _entitle(title: bytes) -> None:
    """Show an operator's `ps` what this process is, in the place of the server's arguments."""
    start, end = map(int, Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[45:47])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, min(len(title), end - start - 1))


def main(kind: str, descriptor: int, parent: int, linger: float) -> None:
    """Import, then fork until nobody needs it."""
    if kind == "own":
        isolation.die_with(parent)
    elif os.fork():
        # An actor's child would end with the actor.
        os._exit(0)
    importing.lean()
    importing.transformers()
    with importing.quickly():
        for name in _MODULES.split():
            import_module(name)
    # What is there now stays: the collector need not write to pages that the children share.
    gc.freeze()
    _Server(socket.socket(fileno=descriptor), linger).serve()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
