"""A whole round over dispatchers in processes of their own, which a test may kill, and what must be true of it whatever was killed.

The clock is the machine's and a number of seconds that the test adds: leases run out, and a round closes when the test says so.
"""

import contextlib
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dispatching
import live as staging
from dispatching import Process
from live import Live, Staged
from sqlalchemy import select

from acclimate import event_history
from acclimate.event_history import Event
from acclimate.service import publish
from acclimate.store import events, leases, outbox, results, stages, submissions, timestamp
from acclimate_competitions import digests
from acclimate_runners import failpoints

LEASE = 4.0
SHARED = Path(__file__).parent
DISPATCHER = """
import signal, sys, threading
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from acclimate import config
from acclimate.dispatch import Dispatcher
from acclimate.hosting import runner_of
from acclimate.store import Store
from acclimate_runners import local
from acclimate_runners.nursery import Nursery

# Imports take a child seconds: the dispatchers of a test share them, as the actors of a machine do.
local._NURSERY = Nursery(shared=Path(sys.argv[5]), linger=20.0)
settings, ahead, stop = config.load(Path(sys.argv[1])), Path(sys.argv[2]), threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
store = Store.open(settings, clock=lambda: datetime.now(UTC) + timedelta(seconds=float(ahead.read_text())))
finish = None
if sys.argv[4] == "tracked":
    from acclimate import publisher
    finish = partial(publisher.finish, store, settings)
runner = partial(runner_of, settings)
Dispatcher(store, store.blobs, settings, runner, finish_round=finish, lease_seconds=float(sys.argv[3])).run(stop)
"""


class Clock(staging.Clock):
    """The machine's, and so many seconds ahead of it as a file says, which other processes read, too."""

    def __init__(self, file: Path) -> None:
        self.file, self._ahead = file, timedelta()
        self.now = staging.START

    @property
    def now(self) -> datetime:  # type: ignore[override]
        return datetime.now(UTC) + self._ahead

    @now.setter
    def now(self, moment: datetime) -> None:
        self._ahead = moment - datetime.now(UTC)
        temporary = self.file.with_suffix(".new")
        temporary.write_text(str(self._ahead.total_seconds()))
        temporary.replace(self.file)


@dataclass
class Play:
    """A round, moved on by what people do, and the dispatchers that work on it.

    Attributes:
        folder: of all that belongs to it.
        environment: of its dispatchers.
        sent: entrant -> submission.
    """

    live: Live
    staged: Staged
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def begun(
        cls, folder: Path, *, entrants: int, compute: str = "", environment: dict[str, str] | None = None, **given: Any
    ) -> "Iterator[Play]":
        """An open round with so many submissions, that asks for these lines of machines."""
        folder.mkdir(parents=True, exist_ok=True)
        with staging.serve(folder, clock=Clock(folder / "ahead"), **given) as live:
            staged = staging.open_round(live, folder, compute=compute)
            play = cls(live, staged, folder, environment or {})
            play.submit(entrants)
            try:
                yield play
            finally:
                for process in play.processes:
                    process.end()

    def submit(self, entrants: int) -> None:
        """Submissions that wait for their checks; the last one's model is no good."""
        for number in range(1, entrants + 1):
            name, poisoned = f"entrant-{number:02}", number == entrants
            self.sent[name] = dispatching.send(self.staged, name, seed=number, poisoned=poisoned)[1]

    def close(self, entrants: int, until: Callable[[], object]) -> None:
        """Submissions and the round's close, with one dispatcher, until the leader is where a test wants it or has its lease again.

        The clock leaps to the close, and every lease looks expired until it is renewed: a standby might take that of a leader that lives.
        """
        self.submit(entrants)
        self.until(lambda: self.phase != "open")
        self.until(lambda: until() or self.leased())

    def start(self, name: str, *, at: str = "", lease: float = LEASE, tracked: bool = False) -> Process:
        """A dispatcher with a data folder of its own, which kills itself at a point where one is given."""
        given = {"ACCLIMATE_FAILPOINT": at, "ACCLIMATE_FAILPOINT_KILLS": "this-process"} if at else {}
        if tracked:
            settings = self.live.settings
            given |= {"ACCLIMATE_TRACKING": settings.tracking, "ACCLIMATE_ARTIFACTS": str(settings.artifacts)}
        clock = self.live.clock
        assert isinstance(clock, Clock) and at.partition(":")[0] in ("", *failpoints.POINTS)
        script = (DISPATCHER, str(clock.file), str(lease), "tracked" if tracked else "untracked", str(SHARED))
        process = Process(self.live, self.folder / name, script=script, forked=True, **{**self.environment, **given})
        self.processes.append(process)
        return process

    @property
    def phase(self) -> str:
        with self.live.store.snapshot() as tx:
            return str(tx.round(self.staged.round).phase)

    def step(self) -> str:
        """What people do in a phase, once its work is done; the phase then."""
        phase = self.phase
        if phase == "open":
            with self.live.store.snapshot() as tx:
                states = set(tx.execute(select(submissions.c.state)).scalars())
            if not states & {"uploading", "checking"}:
                self.live.clock.set(self.staged.fields["closes"], seconds=61)
        elif phase == "prepared":
            dispatching.give_shares(self.staged)
        return phase

    def publish(self) -> None:
        """What the organizer does in the end."""
        organizer = self.live.organizer()
        document = organizer.get(f"{self.staged.path}/ranking").json()
        fields = {"ranking": digests.of_json(document), "policy": self.staged.fields["policy"], "reason": ""}
        body = {"record": organizer.sign("RankingPublished", self.staged.round, **fields), "ranking": document}
        answer = organizer.post(f"{self.staged.path}/ranking", body)
        assert answer.status_code == 200, answer.text

    def until(self, condition: Callable[[], object], *, within: float = 240.0) -> None:
        """Go on until it is so."""
        last = time.monotonic() + within
        while not condition():
            assert time.monotonic() < last, f"it did not happen; the round is {self.phase}, {self.told()}"
            self.step()
            time.sleep(0.05)

    def told(self) -> list[Any]:
        return [(process.process.poll(), process.said[-3:]) for process in self.processes]

    def outcome(self) -> dict[str, Any]:
        """What must not depend on who did it, when, and how often it was interrupted."""
        with self.live.store.snapshot() as tx:
            state = tx.round(self.staged.round)
        names = {entry.submission: entry.entrant for entry in state.entries}
        return {
            "prepared": {(names[key[0]], *key[1:]): record["prepared"] for key, record in state.prepared.items()},
            "evaluated": {(names[key[0]], *key[1:]): record["predictions"] for key, record in state.evaluated.items()},
            "ranking": publish.ranking(self.live.store, self.staged.round).digest,
        }

    def wrong(self) -> list[str]:
        """What is not as it must be, however the round was disturbed; empty where all is well."""
        with self.live.store.snapshot() as tx:
            rows = tx.execute(select(events).order_by(events.c.id)).all()
            found = event_history.problems(Event(row.attempt, row.fence, row.epoch, row.event) for row in rows)
            done = {row.stage for row in tx.execute(select(results.c.stage))}
            all_stages = tx.execute(select(stages)).all()
            records = [record for _, record in tx.records(self.staged.round)]
            marks = Counter(row.stage for row in tx.execute(select(outbox.c.stage)))
            ended = {row.id: row.state for row in tx.execute(select(submissions))}
        for row in all_stages:
            if row.state not in ("committed", "failed"):
                found.append(f"stage {row.kind} of {row.submission} is {row.state}: {row.reason}")
            elif row.key not in done and row.kind != "check":
                # Of a check that was settled before its dispatcher died there is none: the submission itself says what came of it.
                found.append(f"stage {row.kind} of {row.submission} is {row.state}, and its result is missing")
        said = Counter(identity(record) for record in records)
        found += [f"the log has {count} of {what}" for what, count in said.items() if count > 1]
        found += [f"the outbox has {count} of {mark}" for mark, count in marks.items() if count > 1]
        found += [
            f"submission {name} is {state}" for name, state in ended.items() if state not in ("accepted", "refused")
        ]
        return found

    def leader(self) -> str:
        """Who has the lease, by the name that it says at its start; empty before anybody has."""
        with self.live.store.snapshot() as tx:
            return str(tx.execute(select(leases.c.holder).where(leases.c.name == "dispatch")).scalar() or "")

    def leased(self) -> bool:
        """Whether somebody's lease has not expired, by the clock as it is now."""
        with self.live.store.snapshot() as tx:
            ends = tx.execute(select(leases.c.expires).where(leases.c.name == "dispatch")).scalar()
            return bool(ends) and ends > timestamp(tx)

    def marks(self) -> list[str]:
        """What was finished of the round: its preparations, if there was time before it was published, and what was published."""
        with self.live.store.snapshot() as tx:
            return [payload["phase"] for payload in tx.execute(select(outbox.c.payload)).scalars()]

    def events(self, event: str) -> list[Any]:
        return [row for row in self.rows() if row.event == event]

    def running(self) -> bool:
        """Whether a child is at work."""
        with self.live.store.snapshot() as tx:
            return bool(tx.execute(select(stages.c.key).where(stages.c.state == "running")).first())

    def rows(self) -> list[Any]:
        """The events, in their order."""
        with self.live.store.snapshot() as tx:
            return list(tx.execute(select(events).order_by(events.c.id)).all())

    def tracked(self, database: Path | None = None) -> Counter[str]:
        """How many runs MLflow has of each stage, by its own database."""
        query = "SELECT t.value FROM tags t JOIN runs r ON r.run_uuid = t.run_uuid"
        query += " WHERE t.key = 'acclimate.stage_key' AND r.lifecycle_stage = 'active'"
        with contextlib.closing(sqlite3.connect(database or self.live.settings.data / "mlflow.db")) as connection:
            return Counter(row[0] for row in connection.execute(query))


def identity(record: Any) -> tuple[Any, ...]:
    """What a round's log may hold once."""
    fields = record.fields
    names = ("commitment", "entrant", "submission", "task", "seed", "protocol", "index")
    return (record.type, *(str(fields.get(name)) for name in names))


def undisturbed(folder: Path, *, entrants: int) -> dict[str, Any]:
    """The outcome of a round whose one dispatcher nobody disturbs."""
    with Play.begun(folder, entrants=entrants) as play:
        play.start("only")
        play.until(lambda: play.phase == "evaluated")
        assert play.wrong() == []
        return play.outcome()


def killed(process: Process) -> bool:
    return process.process.poll() == -signal.SIGKILL
