"""Dispatchers that are forked from a process which has imported all they need: a chain of dozens pays for the imports once."""

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOTHER = """
import ctypes, json, os, signal, sys, threading
import acclimate.dispatch, acclimate.store, acclimate.hosting, acclimate.sweeping, acclimate_runners.local, acclimate_runners.nursery
libc, out = ctypes.CDLL(None), threading.Lock()
def say(**fact):
    with out:
        print(json.dumps(fact), flush=True)
def wait():
    # Without a thread of its own: who forks must have none.
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        say(pid=pid, code=os.waitstatus_to_exitcode(status))
import select
while True:
    wait()
    if not select.select([0], [], [], 0.02)[0]:
        continue
    line = b""
    while not line.endswith(b"\\n"):
        part = os.read(0, 1)
        if not part:
            sys.exit()
        line += part
    given = json.loads(line)
    mother = os.getpid()
    pid = os.fork()
    if pid == 0:
        libc.prctl(1, signal.SIGKILL)
        if os.getppid() != mother:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0), os.dup2(null, 1), os.dup2(os.open(given["said"], os.O_WRONLY), 2)
        os.environ.clear()
        os.environ.update(given["environment"])
        sys.argv[:] = given["arguments"]
        code = 0
        try:
            exec(compile(given["script"], "dispatcher", "exec"), {"__name__": "__main__"})
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)
    say(begun=pid)
"""


class Mother:
    """The process that has imported it all."""

    def __init__(self) -> None:
        tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        line = [*tied, sys.executable, "-c", MOTHER]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ended, self._begun = dict[int, int](), list[int]()
        self._told = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def fork(self, script: str, arguments: Sequence[str], environment: Mapping[str, str], said: Path) -> int:
        """A child that runs a script as `python -c` would, with these arguments; what it says goes to a pipe of this name."""
        assert self._process.stdin is not None
        given = {"script": script, "arguments": list(arguments), "environment": dict(environment), "said": str(said)}
        with self._told:
            self._process.stdin.write(json.dumps(given) + "\n")
            self._process.stdin.flush()
            assert self._told.wait_for(lambda: self._begun, timeout=120), "no process was begun"
            return self._begun.pop()

    def ended(self, pid: int, *, within: float | None = None) -> int | None:
        """A child's status, as subprocess gives it; None while it runs."""
        with self._told:
            self._told.wait_for(lambda: pid in self._ended, timeout=within)
            return self._ended.get(pid)

    def close(self) -> None:
        """With it go its children."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            fact = json.loads(line)
            with self._told:
                if "begun" in fact:
                    self._begun.append(fact["begun"])
                else:
                    self._ended[fact["pid"]] = fact["code"]
                self._told.notify_all()


MOTHERS: list[Mother] = []


class Forked:
    """What a test uses of subprocess.Popen, of a child of the mother."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if not MOTHERS:
            MOTHERS.append(Mother())
        (self._mother,) = MOTHERS
        flag, script, *arguments = command
        assert flag == "-c"
        with tempfile.TemporaryDirectory() as folder:
            pipe = Path(folder) / "said"
            os.mkfifo(pipe)
            # Opened for both, so that nobody waits for the other end; the child's own end is the last one open later.
            both = os.open(pipe, os.O_RDWR)
            self.pid = self._mother.fork(script, ["-c", *arguments], environment, pipe)
            reading = os.open(pipe, os.O_RDONLY)
            self._opened(both)
        self.stderr: Any = os.fdopen(reading, encoding="utf-8", errors="replace")

    def _opened(self, both: int) -> None:
        """Close this process's own end for writing, once the child has opened its own or is gone."""
        until = time.monotonic() + 60
        while time.monotonic() < until and self.poll() is None:
            with contextlib.suppress(OSError):
                if os.path.realpath(f"/proc/{self.pid}/fd/2") == os.path.realpath(f"/proc/self/fd/{both}"):
                    break
            time.sleep(0.005)
        os.close(both)

    def poll(self) -> int | None:
        return self._mother.ended(self.pid, within=0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._mother.ended(self.pid, within=timeout)
        if status is None:
            raise subprocess.TimeoutExpired("dispatcher", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)
