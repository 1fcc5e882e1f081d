"""A world in which time, machines and deaths are imagined, and everything that decides or records is the real thing.

The real dispatcher, with its leader, admission, settling and commits, works on a real SQLite file and real blobs. Only what it stands on is made
here: the database's clock and the process's own (`Clock`, `Moments`), and a cluster whose attempts come to outcomes that follow
from their jobs, without any model being run. A process dies by being cut off: whatever it still tries, nothing of it reaches the
database or the cluster.
"""

import contextlib
import hashlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import live as staging
import pyarrow as pa
import pyarrow.parquet as pq
from live import START, Clock
from sqlalchemy import select

from acclimate import config, event_history
from acclimate.dispatch import Dispatcher
from acclimate.event_history import Event
from acclimate.lead import Moments
from acclimate.sequencer import Sequencer
from acclimate.service import identity, publish, release
from acclimate.service.accounts import Account
from acclimate.store import Store, Tx, events, results, stages, submissions
from acclimate_competitions import digests, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_runners.blobs import Blobs
from acclimate_runners.jobs import CheckJob, EvaluateJob, Job, Outcome, PrepareJob
from acclimate_runners.runner import Absent, BlobAccess, Demand, Handle, Machine, Status

DURATIONS = {"check": 2.0, "prepare": 6.0, "evaluate": 3.0}
LEASE = 600.0
"""Seconds: longer than any test takes, as leases are renewed by a thread of the real clock."""


@dataclass(frozen=True)
class Beginning:
    """An open round whose submissions wait for their checks, as a server left it; each run begins with a copy.

    Attributes:
        data: the installation's folder.
        shares: (custodian's account, signed ShareReleased, share document), enough of them to open the holdout.
    """

    data: Path
    round: str
    closes: str
    clock: Any
    shares: tuple[tuple[Account, dict[str, Any], bytes], ...]


def begin(folder: Path, *, entrants: int, **changes: Any) -> Beginning:
    """Stage a round by the real API."""
    with staging.serve(folder) as live:
        staged = staging.open_round(live, folder, **changes)
        for number in range(entrants):
            entrant = staging.enter(staged, live.actor(f"team-{number}"))
            made, files = staging.commit(staged, entrant, seed=number + 1)
            staging.send_files(entrant, made, files)
            assert entrant.post(f"/v1/submissions/{made['submission']}/complete").json()["state"] == "checking"
        documents, shares = staged.share_documents(staged.seal, staged.envelopes), []
        for index, custodian in list(enumerate(live.custodians(), start=1))[: staged.fields["k"]]:
            fields = {"seal": staged.seal["seal"], "index": index, "document": digests.of_bytes(documents[index])}
            record = custodian.sign("ShareReleased", staged.round, **fields)
            shares.append((Account(custodian.name, "custodian", custodian.public), record, documents[index]))
        return Beginning(live.settings.data, staged.round, staged.fields["closes"], live.clock.now, tuple(shares))


class Gate:
    """What stands between a process and all that outlives it; closed when it dies.

    Attributes:
        dies_at: before the how manieth of its writes and calls of the cluster it dies; 0 for never.
        passed: what it did so far.
    """

    def __init__(self, dies_at: int = 0) -> None:
        self.dies_at, self.dead = dies_at, False
        self.passed: list[str] = []

    def check(self) -> None:
        if self.dead:
            raise Refusal("database_unreachable", "this process is dead")

    def go(self, what: str) -> None:
        self.check()
        self.passed.append(what)
        if len(self.passed) == self.dies_at:
            self.dead = True
            self.check()


class Cut(Store):
    """A store whose process may die before any of its writes."""

    gate: Gate

    @contextmanager
    def transaction(self) -> Iterator[Tx]:
        self.gate.go("write")
        with super().transaction() as tx:
            yield tx

    @contextmanager
    def snapshot(self) -> Iterator[Tx]:
        self.gate.check()
        with super().snapshot() as tx:
            yield tx


@dataclass
class Attempt:
    """What goes on in the cluster under a name."""

    name: str
    job: Job
    began: float
    seconds: float
    machine: str
    fate: Status | None
    ended: Status | None = None


@dataclass
class Cluster:
    """Runs attempts by an imagined clock; outlives dispatchers.

    Attributes:
        fates: asked for each attempt that is started: how it ends, None for its outcome, and after how many seconds.
        slots: how many attempts a dispatcher may start at once.
        imagining: real seconds that it took to make up outcomes; computing: those of the processor.
        started, asked: what was started, and what was asked for it, in their order.
    """

    now: Callable[[], float]
    blobs: Blobs
    machines: tuple[Machine, ...]
    fates: Callable[[str, Job], tuple[Status | None, float]]
    slots: int = 4
    imagining: float = 0.0
    computing: float = 0.0
    attempts: dict[str, Attempt] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    asked: list[Demand] = field(default_factory=list)

    def start(self, name: str, job: Job, demand: Demand) -> None:
        if name not in self.attempts:
            self.asked.append(demand)
            fate, seconds = self.fates(name, job)
            machine = self.machines[len(self.started) % len(self.machines)].name
            self.started.append(name)
            self.attempts[name] = Attempt(name, job, self.now(), seconds, machine, fate)

    def poll(self, name: str) -> Status:
        one = self.attempts.get(name)
        if one is None:
            return Status("failed", reason="its actor is gone", code="runner_lost")
        if one.ended is None and self.now() >= one.began + one.seconds:
            began, before = time.perf_counter(), time.thread_time()
            made = {"outcome": outcome(one.job, self.blobs), "log": self.blobs.put_bytes(b"said\n")}
            one.ended = one.fate or Status("done", network="none", machine=one.machine, **made)
            self.imagining += time.perf_counter() - began
            self.computing += time.thread_time() - before
        share = (self.now() - one.began) / max(one.seconds, 1e-9)
        return one.ended or Status("running", int(10 * share), 10, network="none", machine=one.machine)

    def lose(self, name: str) -> None:
        self.attempts.pop(name, None)


class Actor:
    """The handle of an attempt, in one process."""

    def __init__(self, cluster: Cluster, gate: Gate, name: str) -> None:
        self._cluster, self._gate, self._name = cluster, gate, name

    def poll(self) -> Status:
        self._gate.check()
        return self._cluster.poll(self._name)

    def cancel(self) -> None:
        self._gate.go("cancel")
        one = self._cluster.attempts.get(self._name)
        if one is not None and one.ended is None:
            one.ended = Status("failed", reason="it was cancelled", code="cancelled")


class Pauses:
    """How the thread that looks after a process's runner waits: by the imagined clock.

    Attributes:
        until: the moment until which it waits; before all moments while it does not.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self.until = now, -math.inf
        self._for: threading.Event | None = None

    def __call__(self, event: threading.Event, seconds: float) -> None:
        self._for, self.until = event, self._now() + seconds
        while self._now() < self.until and not event.wait(0.002):
            pass
        self.until = -math.inf

    @property
    def resting(self) -> bool:
        """Whether that thread has done all that there is to do at this moment."""
        return self._now() < self.until and self._for is not None and not self._for.is_set()


class ImaginedRunner:
    """A process's way to the cluster."""

    def __init__(self, cluster: Cluster, gate: Gate) -> None:
        self._cluster, self._gate = cluster, gate

    @property
    def slots(self) -> int:
        return self._cluster.slots

    def machines(self) -> tuple[Machine, ...]:
        return self._cluster.machines

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand) -> Handle:
        self._gate.go("start")
        self._cluster.start(name, job, demand)
        return Actor(self._cluster, self._gate, name)

    def find(self, name: str, job: Job, blobs: BlobAccess) -> Handle:
        self._gate.go("find")
        return Actor(self._cluster, self._gate, name) if name in self._cluster.attempts else Absent()

    def close(self, *, keep: bool = False) -> None:
        pass


def outcome(job: Job, blobs: Blobs) -> Outcome:
    """What a job comes to: bytes that follow from its inputs, in the form in which a child gives them back."""
    files: dict[str, str] = {}
    match job:
        case CheckJob():
            results: dict[str, Any] = {"architecture": "llama", "parameters": 1000, "losses": [1.0, 0.9, 0.8]}
        case PrepareJob():
            results = _prepared(job, blobs, files)
        case EvaluateJob():
            results = _predicted(job, blobs, files)
    return Outcome("done", "", files, results, hardware="cpu", versions={})


def _prepared(job: PrepareJob, blobs: Blobs, files: dict[str, str]) -> dict[str, Any]:
    cost = {"tokens": 10, "steps": 2, "seconds": 1.5, "flops": 60}
    prepared = []
    for task, seed in job.stages:
        name = f"{task}-{seed}.safetensors"
        files[name] = blobs.put_bytes(json.dumps([job.model.digest, task, seed]).encode())
        entry = {"task": task, "seed": seed, "file": name, "prepared": files[name], "base": False}
        prepared.append(entry | {"losses": [1.0], "loss_steps": [1], "validation": 0.5, "cost": cost, "note": ""})
    candidates = [{"lr": 0.02, "epoch": 2, "validation": 0.5}]
    chosen = {"candidates": candidates, "selected": {"lr": 0.02, "epoch": 2}, "cost": cost}
    selections = [{"task": data.task.name, "seed": 0, **chosen} for data in job.tasks]
    return {"selections": selections, "prepared": prepared}


def _predicted(job: EvaluateJob, blobs: Blobs, files: dict[str, str]) -> dict[str, Any]:
    data, predictions = {data.task.name: data for data in job.tasks}, []
    for task, seed, protocol in job.stages:
        of, choices = data[task], data[task].task.choices
        weights = job.prepared[f"{task}/{seed}"] if protocol == "prepared" else job.model.digest
        examples = table_of(blobs, of.holdout_inputs).column("example").to_pylist()
        rows = [
            {
                "entrant": job.entrant,
                "protocol": protocol,
                "task": task,
                "seed": seed,
                "example": example,
                "loglikelihoods": [-_drawn(weights, example, choice) for choice in choices],
                "text": None,
            }
            for example in examples
        ]
        name = f"{protocol}-{task}-{seed}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema=tables.PREDICTIONS), sink)
        files[name] = blobs.put_bytes(sink.getvalue().to_pybytes())
        shown = {"task": task, "seed": seed, "protocol": protocol, "file": name, "count": len(rows), "seconds": 0.1}
        predictions.append(shown)
    return {"predictions": predictions}


def table_of(blobs: Blobs, digest: str | None) -> pa.Table:
    assert digest is not None
    return pq.read_table(pa.BufferReader(blobs.read(digest)))


def _drawn(*parts: str) -> float:
    return 0.1 + int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:4]) / 2**32


class Process:
    """A dispatcher of its own, until it dies."""

    def __init__(self, world: "World", folder: Path, *, dies_at: int = 0) -> None:
        self.gate, self.folder = Gate(dies_at), folder
        settings = world.settings_of(folder)
        store = Cut.open(settings, clock=world.clock)
        assert isinstance(store, Cut)
        store.gate, self._store = self.gate, store
        self._pauses = Pauses(world.now)
        moments = Moments(monotonic=world.now, uniform=lambda low, high: (low + high) / 2, pause=self._pauses)
        runner = ImaginedRunner(world.cluster, self.gate)
        self.dispatcher = Dispatcher(store, store.blobs, settings, lambda: runner, lease_seconds=LEASE, moments=moments)
        with contextlib.suppress(Refusal):
            self.dispatcher.__enter__()

    def step(self) -> None:
        """As dispatch.run: what one step could not do, a later one does."""
        with contextlib.suppress(Refusal):
            self.dispatcher.step()
        self._settle()

    def _settle(self) -> None:
        """Wait for what this process does in threads, so that a run is the same each time."""
        term = self.dispatcher._term
        if term is None or term._leader is None:
            return
        until = time.monotonic() + 20
        aside, scorer = term._leader._aside, term._leader._settling.scorer
        while not (self._pauses.resting and aside.idle and scorer.idle) and time.monotonic() < until:
            time.sleep(0.001)

    def die(self) -> None:
        """All at once, with nothing handed over."""
        self.gate.dead = True
        dispatcher, term = self.dispatcher, self.dispatcher._term
        dispatcher._term = None
        if term is not None:
            term.abandon(keep=True)
        if dispatcher._lock is not None:
            dispatcher._lock.close()
        self._store.close()

    def stop(self) -> None:
        """In order: it hands over."""
        with contextlib.suppress(Refusal):
            self.dispatcher.__exit__()
        self._store.close()


class World:
    """A copy of a beginning, a cluster, and whoever dispatches."""

    def __init__(
        self,
        beginning: Beginning,
        folder: Path,
        *,
        fates: Callable[[str, Job], tuple[Status | None, float]] | None = None,
        slots: int = 4,
    ) -> None:
        self._beginning, self._folder = beginning, folder
        shutil.copytree(beginning.data, folder / "data")
        self.clock = Clock()
        self.clock.now = beginning.clock
        self.settings = self.settings_of(folder / "data")
        self.store = Store.open(self.settings, clock=self.clock)
        machines = tuple(Machine(f"node-{i}", cpus=slots / 2) for i in range(2))
        fates = fates or (lambda name, job: (None, seconds(job)))
        self.cluster = Cluster(self.now, self.store.blobs, machines, fates, slots=slots)
        self._signer = Sequencer(self.store, identity.load(self.settings, self.store).signer)
        self.processes: list[Process] = []

    def settings_of(self, folder: Path) -> config.Settings:
        """Of a process with a data folder of its own, over the one database; what it starts outlives it."""
        home = self._folder / "data"
        given = {"runner": "ray", "ray_address": "imagined:1", "database": f"sqlite:///{home / 'acclimate.db'}"}
        given |= {"blobs": str(home / "blobs"), "server_keys": str(home / "keys")}
        settings = config.load(folder, environ={}, given=given)
        config.claim(settings)
        return settings

    def now(self) -> float:
        return (self.clock.now - START).total_seconds()

    def process(self, name: str = "data", *, dies_at: int = 0) -> Process:
        made = Process(self, self._folder / name, dies_at=dies_at)
        self.processes.append(made)
        return made

    def state(self) -> Round:
        with self.store.snapshot() as tx:
            return tx.round(self._beginning.round)

    def others(self) -> None:
        """What servers and people do: sign the log, close in time, release shares once the round is prepared."""
        self._signer.advance()
        state = self.state()
        if state.phase is Phase.OPEN and not self.checking():
            self.clock.set(self._beginning.closes, seconds=61)
        if state.phase is Phase.PREPARED:
            for account, record, document in self._beginning.shares:
                release.share(self.store, account, state.id, record, document=document)

    def checking(self) -> bool:
        """Whether a submission waits for its check."""
        with self.store.snapshot() as tx:
            return tx.execute(select(submissions.c.id).where(submissions.c.state == "checking")).first() is not None

    def finish(self, *, dies_at: int = 0, limit: int = 400) -> Process:
        """One process after the other until the round is evaluated; the first dies where it is told to."""
        running = self.process(dies_at=dies_at)
        first = running
        for _ in range(limit):
            if running.gate.dead:
                running.die()
                self.processes.remove(running)
                running = self.process()
            running.step()
            self.others()
            if self.state().phase is Phase.EVALUATED:
                return first
            self.clock.forward(seconds=1)
        raise AssertionError(f"the round is {self.state().phase} after {limit} steps: {self.told()}")

    def told(self) -> list[str]:
        """What became of the stages, for whoever looks for a fault."""
        with self.store.snapshot() as tx:
            rows = tx.execute(select(stages)).all()
        return [f"{row.kind} {row.task} {row.seed}: {row.state} {row.code} {row.reason}" for row in rows]

    def check(self) -> None:
        """What must be true of any history.

        1. Nothing was done twice, and nobody wrote who had lost the right to.
        2. Each stage has at most one result, and as many records as the plan asks for.
        """
        with self.store.snapshot() as tx:
            found = [
                Event(row.attempt, row.fence, row.epoch, row.event)
                for row in tx.execute(select(events).order_by(events.c.id))
            ]
            ended = list(tx.execute(select(results.c.stage)).scalars())
            state = tx.round(self._beginning.round)
        assert event_history.problems(found) == []
        assert len(ended) == len(set(ended))
        assert len(state.prepared) <= len(state.preparations) and len(state.evaluated) <= len(state.models)

    def ranking(self) -> str:
        return publish.ranking(self.store, self._beginning.round).digest

    def close(self) -> None:
        for process in self.processes:
            process.stop()
        self.processes.clear()
        self.store.close()


def seconds(job: Job) -> float:
    return DURATIONS[job.kind]
