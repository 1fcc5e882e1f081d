"""What the leading dispatcher does, for one term: makes due transitions, hands out work, and commits what comes back.

What is left to do is a set difference of the plan and the log, so whoever leads next just goes on: running stages went back to
pending, an attempt that still runs or has finished is adopted by its name, and nothing is committed twice because a commit is one
transaction that requires the stage to be this attempt's, and the lease to be this leader's.
"""

import contextlib
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from acclimate import assignments, commits, schedule, stages, table_blobs
from acclimate.assignments import Assignment
from acclimate.config import Settings
from acclimate.console import say
from acclimate.dispatch_health import Vitals
from acclimate.finishing import Finish, Finisher
from acclimate.hosting import NO_MACHINES, Host
from acclimate.opening import Opener
from acclimate.pool import PoolRow
from acclimate.service import clockwork, release
from acclimate.service.identity import Identity
from acclimate.store import Store, Tx, log_checkpoints, log_entries, rounds
from acclimate.sweeping import Sweeper
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_runners import placement
from acclimate_runners.blobs import Blobs
from acclimate_runners.runner import Handle, Machine, Runner, Status

TRIES = {"limit_exceeded": 3, "job_failed": 3}
"""How often an attempt is made that ends like this: what will hardly end differently. After that it is the entrant's outcome, or blocked."""
TRIES_OF_MACHINES = 10
OUTAGES = frozenset({"database_unreachable", "blobs_unreachable", "lease_lost"})
"""Refusals that say nothing of what was being done: the step ends, and a later one does it again."""
_PLAN_EVERY, _BEAT_EVERY, _BEAT_AT_LEAST = 0.5, 0.5, 5.0
_PAUSE, _BACKOFF = 5.0, 0.5
_LONG_BACKOFF = (5.0, 300.0)
_PASSING = frozenset({"no_space", "busy", "blobs_unreachable"})
_WORKING = frozenset({Phase.OPEN, Phase.CLOSED, Phase.OPENED})
_SOON = 5.0
"""Seconds in which the API signs a checkpoint, if it is there."""


@dataclass
class _Running:
    """An attempt under way; `ended` once it has, until that is written down."""

    assignment: Assignment
    handle: Handle
    runner: Runner
    ended: Status | None = None
    said: bool = False
    beat: float = 0.0
    told: tuple[int, int] = (-1, -1)


@dataclass(frozen=True)
class Watch:
    """What a leader tells of itself and is told while it works.

    Attributes:
        alive: called within long work: what shows life does not hang.
        still_leading: refuses lease_lost once its term is over; for work that no transaction fences.
    """

    alive: Callable[[], None]
    still_leading: Callable[[], None]


class Leader:
    """Leads for one term.

    Args:
        store: fenced by the term's lease.
        blobs: the store's, as runners see them.
        settings: of the installation.
        identity: whose evaluator key signs.
        host: holds the runner; whoever made it closes it.
        vitals: what is counted for the dispatcher's own metrics.
        watch: over this term.
        finish_round: as Dispatcher's.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        *,
        settings: Settings,
        identity: Identity,
        host: Host,
        vitals: Vitals,
        watch: Watch,
        finish_round: Finish | None,
    ) -> None:
        self._store, self._blobs, self._settings = store, blobs, settings
        self._identity, self._host, self._vitals, self._watch = identity, host, vitals, watch
        self._opener = Opener(store, settings)
        self._sweeper = Sweeper(blobs)
        self._finisher: Finisher | None = None
        if finish_round is not None:
            self._finisher = Finisher(store, finish_round, still_leading=watch.still_leading)
        self._pool = PoolRow(store, name="dispatch", runner=settings.runner)
        self._running: dict[str, _Running] = {}
        self._inputs: dict[str, dict[str, str]] = {}
        self._pinned: dict[str, str] = {}
        # What was last said of each event and round, and since when a round has waited for its checkpoint.
        self._said: dict[tuple[str, str], str] = {}
        self._awaited: dict[str, float] = {}
        # How often an attempt ended with a code, in this term.
        self._failures = Counter[tuple[str, str]]()
        # By the monotonic clock: when the last plan was made, and before when nothing, or one attempt, is started again.
        self._planned, self._paused, self._not_before = 0.0, 0.0, dict[str, float]()
        self._unmet = True

    @property
    def busy(self) -> bool:
        """Whether an attempt is under way that has not ended."""
        return any(running.ended is None for running in self._running.values())

    def begin(self) -> None:
        """Take over: what a killed process left of an opening is removed, and what was under way is pending again.

        Raises:
            Refusal: busy, lease_lost, database_unreachable, no_space.
        """
        release.clear(self._settings)
        with self._store.transaction() as tx:
            stages.resume(tx)

    def end(self) -> None:
        """Hand over in order: wait for what opens or finishes a round, and give back what runs; the host must be closed by then.

        Raises:
            Refusal: busy, lease_lost, database_unreachable, no_space.
        """
        self._opener.close()
        if self._finisher is not None:
            self._finisher.close()
        with self._store.transaction() as tx:
            stages.give_back(tx)

    def abandon(self) -> None:
        """Forget everything, as another leads: attempts that it may adopt are left alone."""
        self._running.clear()
        self._opener.close(patience=0.0)
        if self._finisher is not None:
            self._finisher.close(patience=0.0)

    def step(self) -> None:
        """Do all that can be done now: transitions, commits, starts, heartbeats.

        Raises:
            Refusal: busy, no_space, lease_lost, database_unreachable, blobs_unreachable; what was not done is done in a later step.
        """
        try:
            made = clockwork.tick(self._store, self._settings, opening=self._opener.begin)
        except Refusal as refusal:
            if refusal.code in OUTAGES:
                raise
            # What stops one transition must not keep finished work from being committed.
            self._say_once("no transition", code=refusal.code, reason=refusal.sentence)
            made = []
        made += self._opener.made()
        for line in made:
            self._vitals.transitions[line.rpartition(": ")[2]] += 1
            say("transition", made=line)
        settled = [self._settle(running) for running in list(self._running.values())]
        if made or any(settled) or time.monotonic() - self._planned > _PLAN_EVERY:
            self._planned = time.monotonic()
            self._plan()
        self._beat()
        self._pool.write(self._host)
        self._sweeper.step()
        if self._finisher is not None:
            self._finisher.step()
        self._vitals.running = len(self._running)

    # ---- what comes back -------------------------------------------------------------------------------------------

    def _settle(self, running: _Running) -> bool:
        """Take an attempt's end; whether it has ended."""
        status = self._poll(running)
        if status.state == "running":
            return False
        if status.state == "failed":
            self._failed(running, status)
        else:
            self._commit(running.assignment, status)
            self._forget(running.assignment.attempt)
        del self._running[running.assignment.attempt]
        return True

    def _forget(self, attempt: str) -> None:
        """No longer count the failures of an attempt that has come to something."""
        self._not_before.pop(attempt, None)
        for key in [key for key in self._failures if key[0] == attempt]:
            del self._failures[key]

    def _poll(self, running: _Running) -> Status:
        """Where an attempt stands; once it has ended, that stays its answer until it is written down."""
        if running.ended is not None:
            return running.ended
        if running.runner is not self._host.runner:
            reason = f"its runner was lost: {self._host.problem or 'it was made anew'}"
            status = Status("failed", reason=reason, code="runner_lost")
        else:
            try:
                status = running.handle.poll()
            except Exception as error:
                with contextlib.suppress(Exception):
                    running.handle.cancel()
                status = Status("failed", reason=f"{type(error).__name__}: {error}", code="runner_failed")
        if status.state != "running":
            running.ended = status
        return status

    def _commit(self, assignment: Assignment, status: Status) -> None:
        assert status.outcome is not None
        try:
            holdout = self._holdout(assignment.round) if assignment.kind == "evaluate" else {}
            alive = self._watch.alive
            commits.commit(self._store, self._identity, assignment, status, holdout=holdout, alive=alive)
        except Refusal as refusal:
            if refusal.code in _PASSING | OUTAGES:
                # It stays as it is, done, and is committed once that has passed.
                raise
            reason = f"not committed: {refusal.code}: {refusal.sentence}"
            with self._store.snapshot() as tx:
                held = stages.holds(tx, assignment)
            if held:
                self._block(assignment, reason)
            else:
                # The row is another's, or of a database that lost its last moments: the next plan sees what is left to do.
                say("dropped", **_ids(assignment), reason=reason)
        except Exception as error:
            say("error", **_ids(assignment), traceback=traceback.format_exc())
            self._block(assignment, f"not committed: {type(error).__name__}: {error}")
        else:
            outcome = status.outcome
            say("committed", **_ids(assignment), outcome=outcome.status, reason=outcome.reason, network=status.network)

    def _failed(self, running: _Running, status: Status) -> None:
        assignment = running.assignment
        keys = [stage.key for stage in assignment.stages]
        if not running.said:
            # Once, also where writing it down has to wait for the database.
            running.said = True
            self._vitals.failed[status.code or "runner_failed"] += 1
            self._failures[assignment.attempt, status.code] += 1
            say("attempt failed", **_ids(assignment), reason=status.reason, code=status.code, log=status.log)
        if status.code in _PASSING or status.code in ("cancelled", "runner_lost"):
            # Under the same number, so that what lives on where nobody sees it is adopted and not made beside it.
            with self._store.transaction() as tx:
                stages.give_back(tx, keys, reason=status.reason if status.code == "runner_lost" else None)
            if status.code in _PASSING:
                self._paused = time.monotonic() + _PAUSE
            return
        count = self._failures[assignment.attempt, status.code]
        tries = TRIES.get(status.code, TRIES_OF_MACHINES)
        if count < tries:
            with self._store.transaction() as tx:
                stages.try_again(tx, keys, reason=status.reason)
            wait = _BACKOFF * 4 ** (count - 1) if status.code in TRIES else _long(count)
            self._not_before[assignment.attempt] = time.monotonic() + wait
        elif status.code == "limit_exceeded":
            with self._store.snapshot() as tx:
                state = tx.round(assignment.round)
            self._commit(assignment, commits.outlasted(self._store, state, status, tries=tries))
        else:
            self._block(assignment, f"failed {tries} times, last: {status.reason}")

    def _not_started(self, assignment: Assignment, error: Exception) -> None:
        """The runner takes nothing now, which says nothing of the job: no try is counted, and everything waits a little."""
        reason = f"not started: {type(error).__name__}: {error}"
        say("not started", **_ids(assignment), reason=reason)
        self._host.suspect(error)
        self._paused = time.monotonic() + _PAUSE
        # Longer each time for this one, so that a job that no runner takes does not hold up the others.
        self._failures[assignment.attempt, "not started"] += 1
        self._not_before[assignment.attempt] = self._paused + _long(self._failures[assignment.attempt, "not started"])
        with self._store.transaction() as tx:
            stages.give_back(tx, [stage.key for stage in assignment.stages], reason=reason)

    def _block(self, assignment: Assignment, reason: str) -> None:
        with self._store.transaction() as tx:
            stages.block(tx, [stage.key for stage in assignment.stages], reason=reason)
        say("blocked", **_ids(assignment), reason=reason, hint="put it right and start the dispatcher again")

    # ---- what goes out ---------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        wanted: list[Assignment] = []
        waiting: set[str] = set()
        with self._store.snapshot() as tx:
            found = tx.execute(select(rounds.c.id).order_by(rounds.c.created, rounds.c.id)).scalars().all()
        for name in found:
            recalled = self._store.recall(name)
            if recalled is not None and recalled.phase in clockwork.TERMINAL:
                continue
            try:
                left = self._left(name)
            except Exception as error:
                if isinstance(error, Refusal) and error.code in OUTAGES:
                    raise
                # One round's fault must not stop the others.
                self._say_once("not planned", round=name, traceback=traceback.format_exc())
                left = None
            if left is None:
                waiting.add(name)
            else:
                wanted += left
        wanted.sort(key=lambda assignment: assignment.work.priority)
        keys = {stage.key for assignment in wanted for stage in assignment.stages}
        for running in self._running.values():
            # A withdrawn submission's check, a voided round's work: nobody waits for it any more.
            mine = {stage.key for stage in running.assignment.stages}
            if not mine <= keys and running.assignment.round not in waiting:
                running.handle.cancel()
        stages.end_stale_checks(self._store)
        if stray := stages.reclaim(self._store, self._running.keys()):
            say("given back", stages=stray, reason="they were written down as running, but nothing here runs them")
        known = stages.register(self._store, wanted)
        self._admit([a for a in wanted if all(known[stage.key] == "pending" for stage in a.stages)])

    def _left(self, name: str) -> list[Assignment] | None:
        """A round's work, in its order; None where that can't be told yet."""
        with self._store.snapshot() as tx:
            state = tx.round(name)
        if state.phase not in _WORKING:
            return []
        inputs = self._holdout_inputs(state) if state.phase is Phase.OPENED else {}
        with self._store.snapshot() as tx:
            left = assignments.outstanding(tx, state, holdout_inputs=inputs)
            drawn = "" if state.phase is Phase.OPEN else _closing_checkpoint(tx, state)
        if left and drawn is None:
            since = self._awaited.setdefault(name, time.monotonic())
            if time.monotonic() - since > _SOON:
                self._say_once("waiting", round=name, reason="no checkpoint holds RoundClosed yet; is the API up?")
            return None
        by_work = {id(assignment.work): assignment for assignment in left}
        return [by_work[id(w)] for w in schedule.order((a.work for a in left), checkpoint=drawn or "")]

    def _admit(self, ready: list[Assignment]) -> None:
        host, now = self._host, time.monotonic()
        machines, runner = host.machines, host.runner
        if host.problem:
            self._say_once("no runner" if runner is None else "no machines", reason=host.problem)
        if runner is None:
            return
        unmet = self._explain(ready, machines)
        if not machines:
            # Ray would take anything, and wait with it.
            return
        outstanding = [running.assignment.demand for running in self._running.values()]
        capacity = schedule.Capacity(machines, slots=runner.slots, outstanding=outstanding)
        for assignment in ready:
            if capacity.full or now < self._paused:
                return
            if assignment.round in unmet or now < self._not_before.get(assignment.attempt, 0.0):
                continue
            # What finds no room is passed over: something smaller may find some.
            if self._is_own_code(assignment) and capacity.take(assignment.demand):
                self._start(runner, assignment)

    def _explain(self, ready: list[Assignment], machines: tuple[Machine, ...]) -> dict[str, str]:
        """Round -> why no machine can ever take its work, also written down for everybody; it waits for a machine that can."""
        demands = {assignment.round: assignment.demand for assignment in ready}
        unmet = dict.fromkeys(demands, NO_MACHINES)
        if machines:
            unmet = {name: why for name, demand in demands.items() if (why := placement.refusal_of(demand, machines))}
        for name, why in unmet.items() if machines else ():
            self._say_once("infeasible", round=name, reason=why)
        if unmet or self._unmet:
            stages.explain(self._store, unmet)
        self._unmet = bool(unmet)
        return unmet

    def _is_own_code(self, assignment: Assignment) -> bool:
        """A round stays on the code that RoundDefined pins; a check is no result and may run on any."""
        if assignment.kind == "check":
            return True
        if assignment.round not in self._pinned:
            with self._store.snapshot() as tx:
                self._pinned[assignment.round] = tx.round(assignment.round).defined["code"]
        pinned = self._pinned[assignment.round]
        if pinned == self._identity.code:
            return True
        reason = f"{schedule.PINNED}{pinned}, this dispatcher runs {self._identity.code}"
        hint = "start the version with which the round was made"
        # The round's status tells of it; the dispatcher of the right version takes up what is blocked.
        with self._store.transaction() as tx:
            stages.block(tx, [stage.key for stage in assignment.stages], reason=f"{reason}: {hint}")
        self._say_once("other code", round=assignment.round, reason=reason, hint=hint)
        return False

    def _start(self, runner: Runner, assignment: Assignment) -> None:
        # Committed before the runner hears of it: whatever happens next, the row says that someone may be at it.
        with self._store.transaction() as tx:
            number = stages.claim(tx, assignment)
        if number is None:
            return
        name = f"{assignment.attempt}/{number}"
        try:
            handle = runner.start(name, assignment.job, self._blobs, demand=assignment.demand)
        except Exception as error:
            self._not_started(assignment, error)
            return
        self._host.trust()
        del self._failures[assignment.attempt, "not started"]
        self._running[assignment.attempt] = _Running(assignment, handle, runner)
        self._vitals.started[assignment.kind] += 1
        say("attempt started", **_ids(assignment), stages=len(assignment.stages), number=number)

    def _holdout(self, round_id: str) -> dict[str, str]:
        with self._store.snapshot() as tx:
            return release.holdout_files(tx, round_id)

    def _holdout_inputs(self, state: Round) -> dict[str, str]:
        """Task -> digest of the holdout's inputs, without targets; the same bytes however often they are made."""
        if state.id not in self._inputs:
            files, made = self._holdout(state.id), {}
            cluster = state.competition.ranking.cluster
            for task in state.competition.tasks:
                self._watch.alive()
                table = table_blobs.read(self._blobs, files[f"{task.name}.parquet"])
                kept = assignments.without_answers(table.column_names, task, cluster=cluster)
                made[task.name] = table_blobs.keep(self._blobs, table.select(kept).replace_schema_metadata(None))
            self._inputs[state.id] = made
        return self._inputs[state.id]

    # ---- what is said ----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Write down progress, for those that made some, and now and then for all; at most every half second."""
        now = time.monotonic()
        due: list[tuple[Assignment, float]] = []
        for running in self._running.values():
            status = self._poll(running)
            word, waited = (status.step, status.total), now - running.beat
            if waited > _BEAT_AT_LEAST or (word != running.told and waited > _BEAT_EVERY):
                running.beat, running.told = now, word
                due.append((running.assignment, status.step / status.total if status.total > 0 else 0.0))
        if due:
            with self._store.transaction() as tx:
                for assignment, progress in due:
                    stages.beat(tx, assignment, progress=progress)

    def _say_once(self, event: str, **facts: str) -> None:
        """Say something that is so at each step: once, and again where it is put otherwise."""
        key, words = (event, facts.get("round", "")), json.dumps(facts, sort_keys=True)
        if self._said.get(key) != words:
            self._said[key] = words
            say(event, **facts)


def _closing_checkpoint(tx: Tx, state: Round) -> str | None:
    """The text (origin, size, root) of the first checkpoint that contains the round's RoundClosed."""
    mine = (log_entries.c.round == state.id) & (log_entries.c.type == "RoundClosed")
    closed = tx.execute(select(log_entries.c.index).where(mine)).scalar_one()
    query = select(log_checkpoints.c.note).where(log_checkpoints.c.size > closed).order_by(log_checkpoints.c.size)
    note = tx.execute(query.limit(1)).scalar()
    return None if note is None else str(note).partition("\n\n")[0] + "\n"


def _long(count: int) -> float:
    """Seconds to wait after the count-th failure of a machine: up to a bound that doubles, drawn, so that not all come at once."""
    first, last = _LONG_BACKOFF
    return random.uniform(0.0, min(last, first * 2.0 ** min(count - 1, 16)))


def _ids(assignment: Assignment) -> dict[str, Any]:
    return {
        "kind": assignment.kind,
        "round": assignment.round,
        "entrant": assignment.entrant,
        "attempt": assignment.attempt,
    }
