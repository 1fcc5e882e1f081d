"""What the dispatcher asks of whoever runs jobs: this machine (local.py) or Ray (cluster.py), with equal bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from acclimate_runners.jobs import Job, Outcome


@dataclass(frozen=True)
class Status:
    """Where an attempt stands.

    Attributes:
        state: running; done (outcome is set, its files are in the blobs); failed (no outcome: a fault of the platform or the
            machine, which may be tried again).
        step, total: progress of the child, 0 of 0 before it said anything.
        what: what the child is at, in its own words.
        reason: for failed, what happened, with the end of the child's log.
        code: for failed: limit_exceeded (the model's time did not suffice), out_of_memory (nor its memory), machine_memory (the
            machine had less than it is allowed), no_space (try again later), runner_failed (the machine's fault), runner_lost (nothing is known of it any more; it may go on, and is found by its name),
            job_failed (our code's), cancelled, or another refusal's code.
        log: digest of the child's output, once it has ended.
        network: what the child said of its network: none, open; empty before it said anything. Once done, as the outcome has it.
        machine: where it runs or ran, as machines() names it; empty before that is known.
        words: how many the child has said; it says one again where it goes on with the same.
        silent: seconds since it last showed a sign of life: a word of its child, a file that came or went.
        unfit: for failed, what the runner calls the machine that can't take any attempt; empty where it isn't the machine.
    """

    state: Literal["running", "done", "failed"]
    step: int = 0
    total: int = 0
    what: str = ""
    outcome: Outcome | None = None
    reason: str = ""
    code: str = ""
    log: str = ""
    network: str = ""
    unfit: str = ""
    machine: str = ""
    silent: float = 0.0
    words: int = 0


@dataclass(frozen=True)
class Demand:
    """What one attempt takes of a machine.

    Attributes:
        cpus, gpus: whole CPUs; GPUs, of which a fraction is a share of one.
        memory: bytes of main memory set aside; 0 for none.
        labels: label -> value that the machine must carry.
        avoid: names of machines to stay away from, where another could take it.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Machine:
    """A machine of the pool, with all it has, whether free or in use; units as in Demand."""

    name: str
    cpus: float
    gpus: float = 0.0
    memory: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


class BlobAccess(Protocol):
    """Content-addressed bytes as a runner sees them; picklable, as it travels to another machine."""

    def has(self, digest: str) -> bool:
        """Whether a blob is stored."""

    def size(self, digest: str) -> int:
        """A blob's size in bytes; refuses blob_unknown."""

    def get(self, digest: str, to: Path) -> None:
        """Copy a blob to a file, re-hashing it."""

    def keep(self, digest: str) -> bool:
        """Whether a blob is stored; if so, garbage collection takes it for one stored just now."""

    def check(self, digest: str) -> None:
        """Re-hash a blob; refuses blob_unknown, blob_corrupt."""

    def put(self, path: Path) -> str:
        """Store a file and return its digest; storing the same bytes again changes nothing."""

    def remove(self, digest: str, *, older_than: float) -> bool:
        """Remove a blob that was neither stored nor kept for so many seconds; whether it is removed."""

    def note(self, name: str) -> bytes | None:
        """A small text by its name, such as attempts/<hex>/1/manifest.json; None where there is none."""

    def put_note(self, name: str, data: bytes) -> None:
        """Write such a text, whole, in the place of what it was before."""

    def notes(self, prefix: str) -> list[str]:
        """The names, sorted, below a prefix that ends in a slash."""

    def drop_note(self, name: str) -> None:
        """Remove such a text, if it is there."""


class Handle(Protocol):
    """One attempt under way."""

    def poll(self) -> Status:
        """Where it stands now; never blocks for long, and keeps its answer once it is done or failed."""

    def cancel(self) -> None:
        """Kill it with all its processes; doing so twice changes nothing."""


class Absent:
    """The handle of an attempt that was looked for and is nowhere."""

    def poll(self) -> Status:
        """Failed, with code not_found."""
        return Status("failed", reason="it goes on nowhere", code="not_found")

    def cancel(self) -> None:
        """Nothing is there to be killed."""


class Runner(Protocol):
    """Runs jobs, each in a child process of its own."""

    @property
    def slots(self) -> int:
        """How many jobs at once."""

    def machines(self) -> tuple[Machine, ...]:
        """The pool as it is now; empty where it has no machine; any exception where it can't be told, ConnectionError where it is lost."""

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand = ...) -> Handle:
        """Start an attempt, or adopt the one of this name that already runs or has finished; returns at once."""

    def find(self, name: str, job: Job, blobs: BlobAccess) -> Handle:
        """Take up the attempt of this name where it goes on or has finished; else the handle says failed with code not_found."""

    def close(self, *, keep: bool = False) -> None:
        """Give back what the runner holds. What still runs is killed; with `keep` it goes on where it can, for another to adopt."""


@runtime_checkable
class Pool(Runner, Protocol):
    """A runner of several machines, which come and go."""

    def aside(self) -> dict[str, str]:
        """The machines that are there and take no attempt for now: name -> why."""

    def keep_only(self, names: frozenset[str]) -> list[str]:
        """End the attempts that go on under none of these names; returns those that were found and ended since the last call."""
