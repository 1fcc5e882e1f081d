"""Dispatchers for tests, in this process and in processes of their own, and what a test does to them and asks of them."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import live as staging
import tiny
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from forked import Forked
from live import Actor, Live, Staged
from sqlalchemy import select
from waiting import WITHIN
from waiting import until as wait

from acclimate import config, files
from acclimate.dispatch import Dispatcher
from acclimate.event_history import Event
from acclimate.service import publish
from acclimate.store import events, stages, submissions
from acclimate_competitions import digests
from acclimate_runners.jobs import Job
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import BlobAccess, Demand, Handle, Machine, Status


def dispatcher(live: Live, *, finish: Callable[[str], None] | None = None) -> Dispatcher:
    return Dispatcher(
        live.store,
        live.store.blobs,
        live.settings,
        lambda: LocalRunner(live.settings.work, slots=2),
        finish_round=(lambda round_, _: finish(round_)) if finish is not None else None,
    )


class Said:
    """An attempt that has ended as it was told to."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def poll(self) -> Status:
        return self._status

    def cancel(self) -> None:
        pass


class Troubled:
    """A runner that first does what it was told to, one start after the other, and then what a local one does."""

    slots = 1

    def __init__(self, runner: LocalRunner, troubles: list[Status | Exception]) -> None:
        self._runner, self.troubles = runner, troubles

    def machines(self) -> tuple[Machine, ...]:
        return self._runner.machines()

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand) -> Handle:
        if not self.troubles:
            return self._runner.start(name, job, blobs, demand=demand)
        trouble = self.troubles.pop(0)
        if isinstance(trouble, Exception):
            raise trouble
        return Said(trouble)

    def find(self, name: str, job: Job, blobs: BlobAccess) -> Handle:
        return self._runner.find(name, job, blobs)

    def close(self, *, keep: bool = False) -> None:
        self._runner.close(keep=keep)


def troubled(live: Live, troubles: list[Status | Exception]) -> Dispatcher:
    return Dispatcher(
        live.store,
        live.store.blobs,
        live.settings,
        lambda: Troubled(LocalRunner(live.settings.work, slots=1), troubles),
    )


def step_until(running: Dispatcher, condition: Callable[[], bool], *, within: float = WITHIN) -> None:
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        running.step()
        time.sleep(0.05)


def rows(live: Live, kind: str) -> list:
    with live.store.snapshot() as tx:
        return list(tx.execute(select(stages).where(stages.c.kind == kind)).all())


def states(live: Live, kind: str) -> set[str]:
    return {row.state for row in rows(live, kind)}


def under_way(live: Live, kind: str) -> bool:
    """Whether all stages of a kind are held by tries that have not ended."""
    found = states(live, kind)
    return bool(found) and found <= {"starting", "running", "verifying"}


def state_of(live: Live, submission: str) -> tuple[str, str]:
    with live.store.snapshot() as tx:
        row = tx.execute(select(submissions).where(submissions.c.id == submission)).one()
        return row.state, row.reason


def send(staged: Staged, name: str, *, seed: int, poisoned: bool = False) -> tuple[Actor, str]:
    """A submission whose files are all there and which waits for its check."""
    entrant = staging.enter(staged, staged.live.actor(name))
    if poisoned:
        tiny.model(staged.folder / f"model-{seed}", seed=seed, poisoned=True)
    made, files = staging.commit(staged, entrant, seed=seed)
    staging.send_files(entrant, made, files)
    assert entrant.post(f"/v1/submissions/{made['submission']}/complete").json()["state"] == "checking"
    return entrant, made["submission"]


def give_shares(staged: Staged) -> None:
    documents = staged.share_documents(staged.seal, staged.envelopes)
    for index, custodian in list(enumerate(staged.live.custodians(), start=1))[:2]:
        fields = {"seal": staged.seal["seal"], "index": index, "document": digests.of_bytes(documents[index])}
        record = custodian.sign("ShareReleased", staged.round, **fields)
        body = {"record": record, "document": base64.b64encode(documents[index]).decode()}
        answer = custodian.post(f"{staged.path}/shares", body)
        assert answer.status_code == 200, answer.text


def children(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
            dead = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            if "acclimate_runners" in line and mark in line and not dead:
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def holding(mark: str) -> Iterator[set[int]]:
    """Stop each child as it comes: a tiny model's would have ended before anything is done to it. Yields their process ids."""
    held, over = set[int](), threading.Event()

    def hold() -> None:
        while not over.wait(0.005):
            for pid in set(children(mark)) - held:
                # Only once it is confined: one that is stopped on the way there can't do what confinement promises.
                with contextlib.suppress(OSError):
                    if "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text("utf-8"):
                        os.kill(pid, signal.SIGSTOP)
                        held.add(pid)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield held
    finally:
        over.set()
        thread.join()


def let_go(held: Iterable[int]) -> None:
    """Have those that are held, and still there, go on."""
    for pid in list(held):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def beside(live: Live, folder: Path, **given: Any) -> config.Settings:
    """Settings of another process of the same installation, with a data folder of its own."""
    settings = live.settings
    shared = {"database": settings.database, "blobs": settings.blobs, "server_keys": str(settings.keys)}
    shared["blobs_endpoint"] = settings.blobs_endpoint
    made = config.load(folder, environ={}, given={**shared, "runner": "local", "slots": 2, **given})
    config.claim(made)
    return made


QUICK = """
import signal, sys, threading
from pathlib import Path
from acclimate import config, files
from acclimate.dispatch import Dispatcher
from acclimate.hosting import runner_of
from acclimate.store import Store
settings, stop = config.load(Path(sys.argv[1])), threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
store = Store.open(settings)
Dispatcher(store, store.blobs, settings, lambda: runner_of(settings), lease_seconds=2.0).run(stop)
"""


class Process:
    """A dispatcher in a process of its own; reads what it says.

    Args:
        live: the installation.
        folder: its data folder.
        quick: whether its lease is short.
        script: a program of the test's own, and what follows the data folder in its arguments.
        forked: whether it is forked from a process that has imported what it needs (forked.py).
    """

    def __init__(
        self,
        live: Live,
        folder: Path,
        *,
        quick: bool = False,
        script: Sequence[str] = (),
        forked: bool = False,
        **environment: str,
    ) -> None:
        self.settings = beside(live, folder)
        command = ["-c", QUICK, str(folder)] if quick else ["-m", "acclimate", "dispatch", "--data", str(folder)]
        command = ["-c", script[0], str(folder), *script[1:]] if script else command
        environment = {
            **os.environ,
            "ACCLIMATE_DATABASE": live.settings.database,
            "ACCLIMATE_BLOBS": live.settings.blobs,
            "ACCLIMATE_BLOBS_ENDPOINT": live.settings.blobs_endpoint,
            "ACCLIMATE_SERVER_KEYS": str(live.settings.keys),
            "ACCLIMATE_RUNNER": "local",
            "ACCLIMATE_SLOTS": "2",
            **environment,
        }
        self.process: subprocess.Popen[str] | Forked
        if forked:
            self.process = Forked(command, environment)
        else:
            # It ends with whoever started it: a test run that is killed must leave no dispatcher.
            tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
            line = [*tied, sys.executable, *command]
            self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment)
        self.said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with contextlib.suppress(ValueError):
                self.said.append(json.loads(line))

    def events(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.said if line["event"] == event]

    def await_(self, event: str, *, count: int = 1) -> None:
        wait(lambda: len(self.events(event)) >= count or self.process.poll() is not None)
        assert len(self.events(event)) >= count, self.said

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def outcome(live: Live, round_: str) -> dict[str, Any]:
    """What must not depend on who did it, when, and how often it was interrupted."""
    with live.store.snapshot() as tx:
        state = tx.round(round_)
    return {
        "prepared": {key: record["prepared"] for key, record in state.prepared.items()},
        "evaluated": {key: record["predictions"] for key, record in state.evaluated.items()},
        "ranking": publish.ranking(live.store, round_).digest,
    }


def folder_of(actor: Actor, server: Live, folder: Path) -> Path:
    """The key folder of somebody who has an account."""
    folder.mkdir(mode=0o700)
    data = actor.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    files.write(folder / "ed25519.pem", data)
    account = {"server": server.url, "id": actor.name, "role": actor.role, "token": actor.token}
    files.write(folder / "account.json", json.dumps(account).encode())
    return folder


def history(server: Live) -> list[Event]:
    with server.store.snapshot() as tx:
        found = tx.execute(select(events).order_by(events.c.id)).all()
    return [Event(row.attempt, row.fence, row.epoch, row.event) for row in found]
