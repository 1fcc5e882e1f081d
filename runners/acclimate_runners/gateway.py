"""A process of its own that talks to a Ray cluster, and what this process holds of it.

Ray's calls hang where the cluster's head is gone, and end their process after a minute. So the calls to a cluster are made by a
child, which tells ten times a second how its attempts stand and every two seconds which machines there are. Nothing here waits for Ray:
answers are the last ones told. A child that tells nothing for twenty seconds, or ends, is a lost cluster: it is killed, its attempts
are `runner_lost`, and whoever wants to go on makes another runner. The actors are detached and go on without it as long as their
machines do: that runner finds them by their names.

The child ends with this process (end of file on its standard input), and then leaves the actors alone.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from acclimate_competitions.errors import Refusal
from acclimate_runners.jobs import Job
from acclimate_runners.runner import BlobAccess, Demand, Machine, Status

_IMPORTS, _CONNECTS, _ANSWERS, _ENDS = 60.0, 20.0, 20.0, 30.0
"""Seconds for the child's imports, for the connection, between two words of the child, and for its end."""
_EVERY, _LOOK_EVERY = 0.1, 2.0


class Gateway:
    """The parent's side.

    Args:
        workdir: folder for the attempts, on each machine.
        address: the cluster's, HOST:PORT.
        settings: resources, namespace and patience, as of RayRunner.

    Raises:
        Refusal: as RayRunner.
    """

    def __init__(self, workdir: Path, address: str, settings: dict[str, Any]) -> None:
        self._address, self._lock = address, threading.Lock()
        # Words of two threads must not run into each other.
        self._sending = threading.Lock()
        self._machines: tuple[Machine, ...] = ()
        self._aside: dict[str, str] = {}
        self._ended: list[str] = []
        self._handles: dict[int, RemoteHandle] = {}
        self._started, self._lost, self._closing = 0, "", False
        self._words, end = Pipe()
        # A session of its own: an interrupt from the terminal is the dispatcher's to act on.
        with end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "acclimate_runners.gateway", str(end.fileno())],
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(end.fileno(),),
            )
        try:
            self._words.send((str(workdir), address, settings))
            self._await("imported", _IMPORTS, f"the process that talks to Ray at {address} did not start")
            self._await("connected", _CONNECTS, f"there is no answer from a Ray cluster at {address}")
        except BaseException:
            self._end()
            raise
        self._reader = threading.Thread(target=self._read, name="ray gateway", daemon=True)
        self._reader.start()

    def machines(self) -> tuple[Machine, ...]:
        """The machines as last told.

        Raises:
            ConnectionError: the cluster is lost.
        """
        with self._lock:
            self._check()
            return self._machines

    def aside(self) -> dict[str, str]:
        """As RayRunner.aside, as last told."""
        with self._lock:
            return self._aside

    def keep_only(self, names: frozenset[str]) -> list[str]:
        """As RayRunner.keep_only; what comes of it is told at the next call.

        Raises:
            ConnectionError: the cluster is lost.
        """
        self._send(("keep only", names))
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand) -> "RemoteHandle":
        """Start or adopt an attempt; what comes of it is in the handle's status.

        Raises:
            ConnectionError: the cluster is lost.
        """
        handle = self._new_handle()
        self._send(("start", handle.number, name, job, blobs, demand))
        return handle

    def find(self, name: str) -> "RemoteHandle":
        """Take up an attempt that goes on; its handle's status says not_found where none of this name does.

        Raises:
            ConnectionError: the cluster is lost.
        """
        handle = self._new_handle()
        self._send(("find", handle.number, name))
        return handle

    def _new_handle(self) -> "RemoteHandle":
        with self._lock:
            self._check()
            self._started += 1
            handle = RemoteHandle(self, self._started)
            self._handles[handle.number] = handle
            return handle

    def cancel(self, number: int) -> None:
        """Kill an attempt."""
        with self._lock:
            known = self._handles.pop(number, None)
        if known is not None:
            with contextlib.suppress(ConnectionError):
                self._send(("cancel", number))

    def close(self, *, keep: bool = False) -> None:
        """As RayRunner.close."""
        self._closing = True
        told = False
        with contextlib.suppress(ConnectionError):
            self._send(("close", keep))
            told = True
        # Before the child ends, which would look like a loss.
        self._lose("the runner was closed", code="cancelled")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS if told else 0)
        self._end()
        self._reader.join(_ENDS)
        self._words.close()

    def _check(self) -> None:
        if self._lost:
            raise ConnectionError(self._lost)

    def _send(self, word: tuple[Any, ...]) -> None:
        try:
            self._check()
            with self._sending:
                self._words.send(word)
        except (OSError, ValueError) as error:
            raise ConnectionError(self._lost or f"the process that talks to Ray is gone: {error}") from error

    def _await(self, wanted: str, seconds: float, otherwise: str) -> None:
        hint = "see that `ray status` works on this machine, and that ray_address is the head's HOST:PORT"
        word: tuple[Any, ...] = ()
        with contextlib.suppress(EOFError, OSError):
            word = self._words.recv() if self._words.poll(seconds) else ()
        if word[:1] == ("refused",):
            raise Refusal(word[1], word[2], hint=word[3])
        if word[:1] != (wanted,):
            raise Refusal("runner_failed", otherwise, hint=hint)
        if wanted == "connected":
            self._machines = word[1]

    def _read(self) -> None:
        while not self._lost:
            try:
                if not self._words.poll(_ANSWERS):
                    self._lose(
                        f"the Ray cluster at {self._address} has not answered for {_ANSWERS:.0f} s: its head is gone"
                    )
                    break
                word = self._words.recv()
            except Exception:
                self._lose(f"the process that talks to the Ray cluster at {self._address} ended")
                break
            pool, statuses, ended = word
            with self._lock:
                self._machines, self._aside = pool or (self._machines, self._aside)
                self._ended += ended
                for number, status in statuses.items():
                    handle = self._handles.get(number)
                    if handle is not None:
                        handle.status = status
                        if status.state != "running":
                            del self._handles[number]
        if not self._closing:
            self._end()

    def _lose(self, reason: str, *, code: str = "runner_lost") -> None:
        with self._lock:
            self._lost = self._lost or reason
            handles, self._handles, self._machines = self._handles, {}, ()
        for handle in handles.values():
            handle.status = Status("failed", reason=self._lost, code=code)

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


class RemoteHandle:
    """An attempt of the child's."""

    def __init__(self, gateway: Gateway, number: int) -> None:
        self.number, self.status = number, Status("running", what="waiting for a machine")
        self._gateway = gateway

    def poll(self) -> Status:
        """What was told last."""
        return self.status

    def cancel(self) -> None:
        """Kill it."""
        if self.status.state == "running":
            self.status = Status("failed", reason="cancelled", code="cancelled")
            self._gateway.cancel(self.number)


# ---- the child's side ----------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Connect, then carry messages until told to close; ends at once with whoever started it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    words = Connection(descriptor)
    workdir, address, settings = words.recv()
    from acclimate_runners import cluster, pod

    cluster.prepare()
    words.send(("imported",))
    try:
        cluster.check(address)
        pod.find_nodes_by_address(address)
        driver = cluster.Driver(Path(workdir), address, **settings)
        words.send(("connected", driver.machines()))
    except Exception as error:
        refusal = error if isinstance(error, Refusal) else cluster.not_joined(error, address)
        words.send(("refused", refusal.code, refusal.sentence, refusal.hint))
        return
    _carry(words, driver)


def _carry(words: Connection, driver: Any) -> None:
    handles: dict[int, Any] = {}
    looked = time.monotonic()
    while True:
        statuses: dict[int, Status] = {}
        ended: list[str] = []
        if words.poll(_EVERY):
            kind, *rest = words.recv()
            if kind == "close":
                driver.close(keep=rest[0])
                return
            if kind == "keep only":
                ended = driver.keep_only(rest[0])
            if kind == "cancel" and rest[0] in handles:
                handles.pop(rest[0]).cancel()
            if kind in ("start", "find"):
                number, name, *more = rest
                try:
                    if kind == "find":
                        handles[number] = driver.find(name)
                    else:
                        job, blobs, demand = more
                        handles[number] = driver.start(name, job, blobs, demand=demand)
                except Exception as error:
                    reason = f"Ray does not take it: {type(error).__name__}: {error}"
                    statuses[number] = Status("failed", reason=reason[:1000], code="runner_failed")
        for number, handle in list(handles.items()):
            statuses[number] = handle.poll()
            if statuses[number].state != "running":
                del handles[number]
        pool = None
        if time.monotonic() - looked > _LOOK_EVERY:
            pool, looked = (driver.machines(), driver.aside()), time.monotonic()
        words.send((pool, statuses, ended))


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
