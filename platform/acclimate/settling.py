"""What comes back to the leader: ends of attempts, which are committed, tried again, or told to an operator."""

import contextlib
import traceback
from collections.abc import Iterator

from acclimate import commits, granting, retries, stages
from acclimate.assignments import Held
from acclimate.commits import Done
from acclimate.console import say
from acclimate.holdout_inputs import HoldoutInputs
from acclimate.lead import TOGETHER, Lead, Running, ids, passes
from acclimate.retries import Ended
from acclimate.scoring import Asked, Scorer
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
        given_up: attempt -> why its organizer has it tried no more.
        inputs: of opened holdouts.
        scorer: scores evaluations while their leader goes on.
    """

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self.not_before: dict[str, float] = {}
        self.avoid: dict[str, frozenset[str]] = {}
        self.given_up: dict[str, str] = {}
        self.inputs = HoldoutInputs(lead)
        # How often in a row everything was held up.
        self._held_up = 0
        self.scorer = Scorer(lead.blobs)

    def recall(self) -> None:
        """See what the database says of what waits: at the begin of a term, and where an operator let something go.

        Raises:
            Refusal: busy, database_unreachable.
        """
        with self._lead.store.snapshot() as tx:
            found, self.given_up = stages.waiting(tx), granting.given_up(tx)
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

    def settle(self) -> bool:
        """Take what has ended: have it scored, commit it, or see what becomes of what failed; whether any attempt is over.

        Raises:
            Refusal: what passes; what was not done is done in a later step.
        """
        before, done, hindered = len(self._lead.running), list[Running](), list[Refusal]()
        for running in list(self._lead.running.values()):
            status = self.poll(running)
            if status.state == "failed":
                self._failed(running, status)
                if running.ended is status:
                    self._over(running, status)
            elif status.state == "done":
                done.append(running)
        self._have_scored([one for one in done if one.held.assignment.kind == "evaluate"])
        ready: list[tuple[Running, Done]] = []
        for running in done:
            try:
                one = self._ready(running)
            except Refusal as refusal:
                hindered.append(refusal)
            else:
                ready += [(running, one)] if one is not None else []
        for group in _groups(ready):
            self._lead.watch.alive()
            self._commit(group)
        if hindered:
            raise hindered[0]
        return len(self._lead.running) < before

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

    def _have_scored(self, done: list[Running]) -> None:
        """Begin to score those evaluations that are not being scored yet."""
        asked: list[Asked] = []
        for running in done:
            if self.scorer.knows(running.held):
                continue
            failpoints.reach("done")
            try:
                asked.append(self._asked(running))
            except Exception as error:
                self._not_committed(running, error)
        if asked:
            with self._lead.store.transaction() as tx:
                stages.verifying(tx, [one.held for one in asked])
            for one in asked:
                self.scorer.ask(one)

    def _asked(self, running: Running) -> Asked:
        assert running.ended is not None
        round_id = running.held.assignment.round
        with self._lead.store.snapshot() as tx:
            return Asked(
                running.held, running.ended, tx.round(round_id).competition, release.holdout_files(tx, round_id)
            )

    def _ready(self, running: Running) -> Done | None:
        """What there is to commit of a done attempt; None while it is being scored, or where it can't be.

        Raises:
            Refusal: what passes.
        """
        status, held = running.ended, running.held
        assert status is not None
        if held.assignment.kind != "evaluate":
            failpoints.reach("done")
            return Done(held, status)
        try:
            made = self.scorer.made(held)
        except Exception as error:
            self._not_committed(running, error)
            return None
        return None if made is None else Done(held, status, made)

    def _commit(self, group: list[tuple[Running, Done]]) -> None:
        """Commit together what may be; where one of them is refused, each by itself."""
        try:
            commits.commit(self._lead.store, self._lead.identity, [done for _, done in group])
        except Exception as error:
            if len(group) == 1:
                self._not_committed(group[0][0], error)
                return
            if passes(error):
                raise
            for one in group:
                self._commit([one])
            return
        for running, done in group:
            self._over(running, done.status)
            assert done.status.outcome is not None
            outcome, network = done.status.outcome, done.status.network
            say("committed", **ids(done.held), outcome=outcome.status, reason=outcome.reason, network=network)

    def _not_committed(self, running: Running, error: Exception) -> None:
        """What can't be committed is an operator's; what passes stays as it is, done, and is committed once that has passed.

        Raises:
            Refusal: what passes.
        """
        if passes(error):
            raise error
        held, code = running.held, "job_failed"
        if isinstance(error, Refusal):
            reason = f"not committed: {error.code}: {error.sentence}"
            reason, code = _and_what_to_do(reason, reason, error.code), error.code
        else:
            say("error", **ids(held), traceback="".join(traceback.format_exception(error)))
            reason = f"not committed: {type(error).__name__}: {error}"
        with self._lead.store.snapshot() as tx:
            mine = stages.holds(tx, held)
        if mine:
            self.block(held, reason, code=code)
        else:
            # The row is another's, or of a database that lost its last moments, or this was written down and the answer lost: the next
            # plan sees what is left to do.
            say("dropped", **ids(held), reason=reason)
        assert running.ended is not None
        self._over(running, running.ended)

    def _over(self, running: Running, status: Status) -> None:
        """Follow an attempt no longer."""
        attempt = running.held.assignment.attempt
        if status.state == "done":
            self.not_before.pop(attempt, None)
            self.avoid.pop(attempt, None)
            self.scorer.forget(running.held)
        if status.code not in retries.PASSING:
            self._held_up = 0
        del self._lead.running[attempt]

    def _failed(self, running: Running, status: Status) -> None:
        held, code = running.held, status.code or "runner_failed"
        attempt, store = held.assignment.attempt, self._lead.store
        with store.snapshot() as tx:
            row = stages.row_of(tx, held)
        if row is not None and row.state not in stages.UNDER_WAY:
            # It was written down, and the connection broke before the answer came: once is enough, and the database says what follows.
            self.recall()
            return
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
            # An outcome like others, which the next step takes.
            running.ended = commits.outlasted(store, state, held, status, tries=decision.tries)
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


def _groups(ready: list[tuple[Running, Done]]) -> Iterator[list[tuple[Running, Done]]]:
    """Those that are committed together, in their order; a check is by itself."""
    alone = [[one] for one in ready if one[1].held.assignment.kind == "check"]
    others = [one for one in ready if one[1].held.assignment.kind != "check"]
    yield from alone
    for start in range(0, len(others), TOGETHER):
        yield others[start : start + TOGETHER]
