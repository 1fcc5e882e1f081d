"""What comes back to the leader: ends of attempts, which are committed, tried again, or told to an operator."""

import contextlib
import traceback

from acclimate import commits, retries, stages
from acclimate.assignments import Held
from acclimate.console import say
from acclimate.holdout_inputs import HoldoutInputs
from acclimate.lead import OUTAGES, Lead, Running, ids
from acclimate.retries import Ended
from acclimate.service import release
from acclimate_competitions.errors import Refusal
from acclimate_runners import failpoints
from acclimate_runners.runner import Status

PAUSE = 5.0
"""Seconds for which nothing is started where a machine or a store can take nothing; twice as long each time that nothing else came back."""
_LONGEST = 12
"""The longest such pause, in PAUSEs: a minute."""


class Settling:
    """Takes what comes back, for one term.

    Attributes:
        not_before: attempt -> before when it isn't started again, by the monotonic clock.
        avoid: attempt -> machines that it should stay away from.
        inputs: of opened holdouts.
    """

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self.not_before: dict[str, float] = {}
        self.avoid: dict[str, frozenset[str]] = {}
        self.inputs = HoldoutInputs(lead)
        # How often in a row everything was held up.
        self._held_up = 0

    def recall(self) -> None:
        """See what the database says of what waits: at the begin of a term, and where an operator let something go.

        Raises:
            Refusal: busy, database_unreachable.
        """
        with self._lead.store.snapshot() as tx:
            found = stages.waiting(tx)
        now = self._lead.moments.monotonic()
        # A clock that was put back must not keep anything for longer than the longest wait.
        waits = {attempt: min(wait, retries.LONG_BACKOFF[1]) for attempt, (wait, _) in found.items() if wait > 0}
        self.not_before = {attempt: now + wait for attempt, wait in waits.items()}
        self.avoid = {attempt: retries.avoided(failed) for attempt, (_, failed) in found.items() if failed}

    def hold_up(self) -> None:
        """Start nothing for a while: for longer each time, until something comes back in another way."""
        now = self._lead.moments.monotonic()
        if now >= self._lead.paused:
            self._held_up += 1
        pause = PAUSE * min(_LONGEST, 2.0 ** max(0, min(self._held_up - 1, 16)))
        self._lead.paused = max(self._lead.paused, now + pause)

    def settle(self, running: Running) -> bool:
        """Take an attempt's end; whether it has ended."""
        status = self.poll(running)
        if status.state == "running":
            return False
        if status.state == "failed":
            self._failed(running, status)
        else:
            self._commit(running.held, status)
            self.not_before.pop(running.held.assignment.attempt, None)
            self.avoid.pop(running.held.assignment.attempt, None)
        if status.code not in retries.PASSING:
            self._held_up = 0
        del self._lead.running[running.held.assignment.attempt]
        return True

    def poll(self, running: Running) -> Status:
        """Where an attempt stands; once it has ended, that stays its answer until it is written down."""
        if running.ended is not None:
            return running.ended
        if running.runner is not self._lead.host.runner:
            reason = f"its runner was lost: {self._lead.host.problem or 'it was made anew'}"
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
        running.machine = status.machine or running.machine
        running.placed = running.placed or bool(status.machine or status.network or status.total)
        return status

    def _commit(self, held: Held, status: Status) -> None:
        assert status.outcome is not None
        assignment, store = held.assignment, self._lead.store
        failpoints.reach("done")
        try:
            files = {}
            if assignment.kind == "evaluate":
                files = holdout(self._lead, assignment.round)
                with store.transaction() as tx:
                    stages.verifying(tx, held)
            alive = self._lead.watch.alive
            commits.commit(store, self._lead.identity, held, status, holdout=files, alive=alive)
        except Refusal as refusal:
            if refusal.code in retries.PASSING | OUTAGES:
                # It stays as it is, done, and is committed once that has passed.
                raise
            reason = f"not committed: {refusal.code}: {refusal.sentence}"
            reason = _and_what_to_do(reason, reason, refusal.code)
            with store.snapshot() as tx:
                mine = stages.holds(tx, held)
            if mine:
                self.block(held, reason, code=refusal.code)
            else:
                # The row is another's, or of a database that lost its last moments: the next plan sees what is left to do.
                say("dropped", **ids(held), reason=reason)
        except Exception as error:
            say("error", **ids(held), traceback=traceback.format_exc())
            self.block(held, f"not committed: {type(error).__name__}: {error}", code="job_failed")
        else:
            outcome = status.outcome
            say("committed", **ids(held), outcome=outcome.status, reason=outcome.reason, network=status.network)

    def _failed(self, running: Running, status: Status) -> None:
        held, code = running.held, status.code or "runner_failed"
        attempt, store = held.assignment.attempt, self._lead.store
        if not running.said:
            # Once, also where writing it down has to wait for the database.
            running.said = True
            if code != "not_found":
                self._lead.vitals.failed[code] += 1
                say("attempt failed", **ids(held), reason=status.reason, code=code, log=status.log)
        if code in retries.UNCHARGED or self.inputs.were_lost(held, status):
            self._let_go(held, status, code)
            return
        ended = Ended(code, status.machine)
        with store.snapshot() as tx:
            before = stages.failures(tx, attempt)
        halvings, tried = held.assignment.halvings, [*before, ended]
        decision = retries.decide(tried, draw=self._lead.moments.uniform, halvings=halvings)
        if decision.action == "again":
            reason = status.reason
            if code in retries.SHORT and halvings:
                size = held.assignment.halved(retries.shortages(tried)).micro_batch
                reason += f"; it had micro-batch {held.assignment.micro_batch}, the next try has {size}"
            with store.transaction() as tx:
                stages.try_again(tx, held, ended, reason=reason, wait=decision.wait)
            self.not_before[attempt] = self._lead.moments.monotonic() + decision.wait
            self.avoid[attempt] = decision.avoid
        elif decision.action == "outcome":
            with store.snapshot() as tx:
                state = tx.round(held.assignment.round)
            self._commit(held, commits.outlasted(store, state, held, status, tries=decision.tries))
        else:
            reason = f"failed {decision.tries} times, last: {status.reason}"
            self.block(held, _and_what_to_do(reason, status.reason, code), code=code, machine=status.machine)

    def _let_go(self, held: Held, status: Status, code: str) -> None:
        """What ended through no fault that counts: tried again, or adopted where it goes on."""
        if code == "no_space":
            # Not for ever: what is larger than every disk would set aside one machine after the other.
            with self._lead.store.snapshot() as tx:
                count = stages.without_room(tx, held.assignment.attempt) + 1
            if count >= retries.TRIES_OF_DISKS:
                reason = f"found no room at {count} tries, last: {status.reason}; make room, or give it a larger disk"
                self.block(held, reason, code=code, machine=status.machine)
                return
        if code in ("runner_lost", "cancelled"):
            with self._lead.store.transaction() as tx:
                row = stages.row_of(tx, held)
                if code == "cancelled":
                    stages.cancel(tx, held, reason=status.reason)
                elif row is not None and row.state in stages.UNDER_WAY:
                    stages.lost(tx, row, epoch=held.epoch, reason=status.reason, adoptable=True)
        else:
            self.give_back(held, code=code, reason=status.reason, machine=status.machine)
        # A machine that is full is left alone by its runner; the others go on.
        if code in retries.PASSING and not status.unfit:
            self.hold_up()

    def give_back(self, held: Held, *, code: str, reason: str, machine: str = "") -> None:
        """Leave what ended through no fault that counts to a later try: the later, the more ends in a row were of this kind."""
        draw = self._lead.moments.uniform
        with self._lead.store.transaction() as tx:
            wait = stages.give_back(tx, held, code=code, reason=reason, draw=draw, machine=machine)
        if wait:
            self.not_before[held.assignment.attempt] = self._lead.moments.monotonic() + wait

    def block(self, held: Held, reason: str, *, code: str, machine: str = "") -> None:
        """Leave an attempt's stages to an operator."""
        with self._lead.store.transaction() as tx:
            stages.block(tx, held, code=code, reason=reason, machine=machine)
        say("blocked", **ids(held), reason=reason, hint="put it right, then: acclimate stage retry")


def _and_what_to_do(reason: str, lost: str, code: str) -> str:
    """The reason, and of a lost input how its work goes on; of that nobody need hear how often it was looked for."""
    if code not in retries.LOST:
        return reason
    return f"{lost}; put that blob back, from a backup or from who sent it, and then: acclimate stage retry"


def holdout(lead: Lead, round_id: str) -> dict[str, str]:
    """The files of a round's opened holdout: name -> digest."""
    with lead.store.snapshot() as tx:
        return release.holdout_files(tx, round_id)
