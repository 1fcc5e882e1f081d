"""What the leader hands out: which work is left, in which order, and how much of it at once."""

import traceback
from dataclasses import replace
from itertools import islice
from typing import Any

from sqlalchemy import select

from acclimate import assignments, commits, granting, schedule, stages, stale_checks
from acclimate.assignments import Assignment, Held
from acclimate.console import say
from acclimate.hosting import NO_MACHINES
from acclimate.lead import OUTAGES, TOGETHER, Lead, Running, ids, passes
from acclimate.schedule import HandedOut
from acclimate.service import clockwork
from acclimate.settling import Settling
from acclimate.store import Tx, log_checkpoints, log_entries, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_runners import failpoints, placement
from acclimate_runners.placement import Outstanding
from acclimate_runners.runner import Absent, Machine, Runner, Status

_WORKING = frozenset({Phase.OPEN, Phase.CLOSED, Phase.OPENED})
_ADOPTIONS = 3
"""How often a try is taken up over one runner: what it loses each time is begun anew, under a fence of its own."""
_SOON = 5.0
"""Seconds in which the API signs a checkpoint, if it is there."""


class Admission:
    """Hands out work, for one term."""

    def __init__(self, lead: Lead, settled: Settling) -> None:
        self._lead, self._settled = lead, settled
        self._pinned: dict[str, str] = {}
        # Since when a round has waited for its checkpoint.
        self._awaited: dict[str, float] = {}
        self._unmet = True
        self._planned: dict[str, assignments.Planned] = {}
        # Attempt -> (fence, runner, how often that try was taken up over that runner).
        self._adopted: dict[str, tuple[int, Runner, int]] = {}
        # What schedule.py counts of those that wait here, and on the cluster.
        self._overtaken: dict[str, int] = {}
        self._passed: dict[str, set[str]] = {}

    def plan(self) -> None:
        """See what is left to do, end what nobody waits for any more, and start what has room.

        Raises:
            Refusal: busy, no_space, lease_lost, database_unreachable, blobs_unreachable.
        """
        places: list[tuple[tuple[Any, ...], Assignment]] = []
        waiting: set[str] = set()
        with self._lead.store.snapshot() as tx:
            found = tx.execute(select(rounds.c.id).order_by(rounds.c.created, rounds.c.id)).scalars().all()
        for name in found:
            recalled = self._lead.store.recall(name)
            if recalled is not None and recalled.phase in clockwork.TERMINAL:
                continue
            try:
                left = self._left(name)
            except Exception as error:
                if isinstance(error, Refusal) and error.code in OUTAGES:
                    raise
                # One round's fault must not stop the others.
                self._lead.say_once("not planned", round=name, traceback=traceback.format_exc())
                left = None
            if left is None:
                waiting.add(name)
            else:
                places += left
        wanted = [assignment for _, assignment in sorted(places, key=lambda placed: placed[0])]
        keys = {stage.key for assignment in wanted for stage in assignment.stages}
        for running in self._lead.running.values():
            # A withdrawn submission's check, a voided round's work: nobody waits for it any more.
            mine = {stage.key for stage in running.held.assignment.stages}
            if not mine <= keys and running.held.assignment.round not in waiting:
                running.handle.cancel()
        stale_checks.end(self._lead.store)
        self._let_go_of_strays()
        stages.end_lost(self._lead.store, epoch=self._lead.watch.epoch)
        known = stages.register(self._lead.store, wanted)
        self._admit([a for a in wanted if all(known[stage.key] == "pending" for stage in a.stages)])

    def _let_go_of_strays(self) -> None:
        with self._lead.store.snapshot() as tx:
            strays = stages.strays(tx, self._lead.running.keys())
        if strays:
            epoch, reason = self._lead.watch.epoch, "it was written down as under way, but nothing here follows it"
            with self._lead.store.transaction() as tx:
                for row in stages.strays(tx, self._lead.running.keys()):
                    stages.lost(tx, row, epoch=epoch, reason=reason, adoptable=True, code="let_go")
            say("given back", attempts=len(strays), reason=reason)

    def _left(self, name: str) -> list[tuple[tuple[Any, ...], Assignment]] | None:
        """A round's work, with its places in the order of all; None where they can't be told yet."""
        with self._lead.store.snapshot() as tx:
            state = tx.round(name)
        if state.phase not in _WORKING:
            return []
        inputs = self._settled.inputs.of(state) if state.phase is Phase.OPENED else {}
        if inputs is None:
            return None
        with self._lead.store.snapshot() as tx:
            left = self._planned.setdefault(name, assignments.Planned()).outstanding(tx, state, holdout_inputs=inputs)
            drawn = "" if state.phase is Phase.OPEN else _closing_checkpoint(tx, state)
        if left and drawn is None:
            since = self._awaited.setdefault(name, self._lead.moments.monotonic())
            if self._lead.moments.monotonic() - since > _SOON:
                self._lead.say_once("waiting", round=name, reason="no checkpoint holds RoundClosed yet; is the API up?")
            return None
        return [((*schedule.place(one.work, checkpoint=drawn or ""), name), one) for one in left]

    def _admit(self, ready: list[Assignment]) -> None:
        self._give_up([one for one in ready if one.attempt in self._settled.given_up])
        ready = [one for one in ready if one.attempt not in self._settled.given_up]
        host, now = self._lead.host, self._lead.moments.monotonic()
        machines, runner = host.machines, host.runner
        if runner is None:
            return
        unmet = self._explain(ready, machines)
        if not machines:
            # Ray would take anything, and wait with it.
            return
        ready = [self._keeping_off(one) for one in ready]
        self._adopt(runner, ready)
        if now < self._lead.paused:
            return
        ready = [one for one in ready if one.attempt not in self._lead.running]
        if held := self._held_for(machines):
            ready = [one for one in ready if held.isdisjoint(placement.able(one.demand, machines))]
        given = schedule.admit(
            ready,
            machines,
            slots=runner.slots,
            # What is being scored takes nothing of a machine any more.
            outstanding=[
                Outstanding(one.held.assignment.demand, one.machine)
                for one in self._lead.running.values()
                if one.ended is None
            ],
            overtaken=self._overtaken,
            may=lambda one: one.round not in unmet and self._may_begin(one, now),
        )
        while group := list(islice(given, TOGETHER)):
            self._start(runner, self._claim([one for one in group if self._settled.inputs.there(one)]))
            if now < self._lead.paused:
                return

    def _give_up(self, wanted: list[Assignment]) -> None:
        """Have what organizers gave up end as its entrant's outcome, which needs no machine: the next step commits it."""
        for start in range(0, len(wanted), TOGETHER):
            self._lead.watch.alive()
            group = wanted[start : start + TOGETHER]
            with self._lead.store.snapshot() as tx:
                found = [(one, tx.round(one.round), granting.failed_tries(tx, one.attempt)) for one in group]
            ended: dict[str, Status] = {}
            for one, state, tries in found:
                reason = self._settled.given_up[one.attempt]
                try:
                    ended[one.attempt] = commits.given_up(self._lead.store, state, tries=tries, reason=reason)
                except Refusal as refusal:
                    # It waits for the store, as it is; what needs no store goes on.
                    self._lead.say_once("not given up yet", round=one.round, code=refusal.code, reason=refusal.sentence)
            for held in self._claim([one for one in group if one.attempt in ended]):
                attempt = held.assignment.attempt
                self._lead.running[attempt] = Running(held, Absent(), None, ended=ended[attempt], begun=True)

    def _keeping_off(self, assignment: Assignment) -> Assignment:
        """An assignment that stays away from the machines on which it failed."""
        avoid = self._settled.avoid.get(assignment.attempt)
        return replace(assignment, demand=replace(assignment.demand, avoid=avoid)) if avoid else assignment

    def _held_for(self, machines: tuple[Machine, ...]) -> frozenset[str]:
        """As schedule.held_for, of what is under way; what was taken up and has not answered yet neither waits nor has passed."""
        handed_out = [
            HandedOut(attempt, placement.able(running.held.assignment.demand, machines), running.machine)
            for attempt, running in self._lead.running.items()
            if running.machine or not (running.placed or running.begun)
        ]
        return schedule.held_for(handed_out, self._passed)

    def _may_begin(self, assignment: Assignment, now: float) -> bool:
        return now >= self._settled.not_before.get(assignment.attempt, 0.0) and self._is_own_code(assignment)

    def _adopt(self, runner: Runner, ready: list[Assignment]) -> None:
        """Take up what goes on although its dispatcher or the way to it was lost; a handle says later whether it does."""
        with self._lead.store.snapshot() as tx:
            lost = stages.adoptable(tx)
        for assignment in ready if lost else ():
            if assignment.attempt not in lost or not self._may_adopt(runner, assignment, lost[assignment.attempt]):
                continue
            if not self._is_own_code(assignment):
                # It stays lost, for a leader of the round's code to take up.
                continue
            with self._lead.store.transaction() as tx:
                held = stages.adopt(tx, assignment, fence=lost[assignment.attempt], epoch=self._lead.watch.epoch)
            if held is not None:
                name = f"{assignment.attempt}/{held.fence}"
                try:
                    handle = runner.find(name, held.assignment.job, self._lead.blobs)
                except Exception as error:
                    # The way there is cut: it may go on all the same, and is looked for again.
                    self._not_started(held, error, looked_for=True)
                    return
                self._lead.running[assignment.attempt] = Running(held, handle, runner, begun=True)
                say("adopted", **ids(held))

    def _may_adopt(self, runner: Runner, assignment: Assignment, fence: int) -> bool:
        before = self._adopted.get(assignment.attempt)
        count = before[2] if before is not None and before[0] == fence and before[1] is runner else 0
        self._adopted[assignment.attempt] = (fence, runner, count + 1)
        return count < _ADOPTIONS

    def _explain(self, ready: list[Assignment], machines: tuple[Machine, ...]) -> dict[str, str]:
        """Round -> why no machine can ever take its work, also written down for everybody; it waits for a machine that can."""
        demands = {assignment.round: assignment.demand for assignment in ready}
        unmet = dict.fromkeys(demands, NO_MACHINES)
        if machines:
            unmet = {name: why for name, demand in demands.items() if (why := placement.refusal_of(demand, machines))}
        for name, why in unmet.items() if machines else ():
            self._lead.say_once("infeasible", round=name, reason=why)
        if unmet or self._unmet:
            stages.explain(self._lead.store, unmet)
        self._unmet = bool(unmet)
        return unmet

    def _is_own_code(self, assignment: Assignment) -> bool:
        """A round stays on the code that RoundDefined pins; a check is no result and may run on any."""
        if assignment.kind == "check":
            return True
        if assignment.round not in self._pinned:
            with self._lead.store.snapshot() as tx:
                self._pinned[assignment.round] = tx.round(assignment.round).defined["code"]
        pinned = self._pinned[assignment.round]
        if pinned == self._lead.identity.code:
            return True
        reason = f"{schedule.PINNED}{pinned}, this dispatcher runs {self._lead.identity.code}"
        hint = "start the version with which the round was made"
        # The round's status tells of it; the dispatcher of the right version takes up what is blocked.
        with self._lead.store.transaction() as tx:
            held = Held(assignment, fence=stages.newest_fence(tx, assignment), epoch=self._lead.watch.epoch)
            stages.block(tx, held, code="code_pinned", reason=f"{reason}: {hint}")
        self._lead.say_once("other code", round=assignment.round, reason=reason, hint=hint)
        return False

    def _claim(self, wanted: list[Assignment]) -> list[Held]:
        """New tries of these, in one transaction; where that fails, each by itself, so that what is wrong with one stops no other."""
        if not wanted:
            return []
        try:
            with self._lead.store.transaction() as tx:
                found = stages.claim(tx, wanted, epoch=self._lead.watch.epoch)
        except Exception as error:
            if passes(error):
                raise
            if len(wanted) > 1:
                return [held for one in wanted for held in self._claim([one])]
            (one,) = wanted
            self._lead.say_once("not claimed", round=one.round, attempt=one.attempt, traceback=traceback.format_exc())
            return []
        return [held for held in found if held is not None]

    def _start(self, runner: Runner, claimed: list[Held]) -> None:
        """Have these begun, of which the runner has not heard.

        They are committed before: whatever happens next, their rows say that someone may be at them.
        """
        for number, held in enumerate(claimed):
            failpoints.reach("claimed")
            assignment = held.assignment
            name = f"{assignment.attempt}/{held.fence}"
            try:
                handle = runner.start(name, assignment.job, self._lead.blobs, demand=assignment.demand)
            except Exception as error:
                self._not_started(held, error)
                self._let_go(claimed[number + 1 :])
                return
            failpoints.reach("started")
            self._lead.host.trust()
            self._lead.running[assignment.attempt] = Running(held, handle, runner)
            self._lead.vitals.started[assignment.kind] += 1
            say("attempt started", **ids(held), stages=len(assignment.stages))

    def _let_go(self, claimed: list[Held]) -> None:
        """Give back what was claimed with one that the runner did not take, and that it was not asked to take."""
        if claimed:
            reason = "the runner takes nothing now: it was not asked to take this one"
            with self._lead.store.transaction() as tx:
                for held in claimed:
                    if (row := stages.row_of(tx, held)) is not None:
                        # Of the codes that say nothing of the next try: it waits no longer for it.
                        stages.lost(tx, row, epoch=held.epoch, reason=reason, adoptable=False, code="let_go")

    def _not_started(self, held: Held, error: Exception, *, looked_for: bool = False) -> None:
        """The runner takes nothing now, which says nothing of the job: no try is counted, and everything waits a little."""
        reason = f"not started: {type(error).__name__}: {error}"
        say("not started", **ids(held), reason=reason)
        self._lead.host.suspect(error)
        self._settled.hold_up()
        if not looked_for:
            # Longer each time for this one, so that a job that no runner takes does not hold up the others.
            self._settled.give_back(held, code="runner_lost", reason=reason)
            return
        with self._lead.store.transaction() as tx:
            if (row := stages.row_of(tx, held)) is not None:
                stages.lost(tx, row, epoch=held.epoch, reason=reason, adoptable=True)


def _closing_checkpoint(tx: Tx, state: Round) -> str | None:
    """The text (origin, size, root) of the first checkpoint that contains the round's RoundClosed."""
    mine = (log_entries.c.round == state.id) & (log_entries.c.type == "RoundClosed")
    closed = tx.execute(select(log_entries.c.index).where(mine)).scalar_one()
    query = select(log_checkpoints.c.note).where(log_checkpoints.c.size > closed).order_by(log_checkpoints.c.size)
    note = tx.execute(query.limit(1)).scalar()
    return None if note is None else str(note).partition("\n\n")[0] + "\n"
