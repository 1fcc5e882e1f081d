"""What comes back to the leader: ends of attempts, which are committed, tried again, or told to an operator."""

import contextlib
import traceback
from collections import Counter

from acclimate import commits, stages
from acclimate.assignments import Assignment
from acclimate.console import say
from acclimate.lead import OUTAGES, Lead, Running, ids
from acclimate.service import release
from acclimate_competitions.errors import Refusal
from acclimate_runners.runner import Status

TRIES = {"limit_exceeded": 3, "job_failed": 3}
"""How often an attempt is made that ends like this: what will hardly end differently. After that it is the entrant's outcome, or blocked."""
TRIES_OF_MACHINES = 10
PAUSE, BACKOFF = 5.0, 0.5
LONG_BACKOFF = (5.0, 300.0)
_PASSING = frozenset({"no_space", "busy", "blobs_unreachable"})


class Settling:
    """Takes what comes back, for one term.

    Attributes:
        failures: how often an attempt ended with a code, in this term.
        not_before: attempt -> before when it isn't started again, by the monotonic clock.
    """

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self.failures = Counter[tuple[str, str]]()
        self.not_before: dict[str, float] = {}

    def settle(self, running: Running) -> bool:
        """Take an attempt's end; whether it has ended."""
        status = self.poll(running)
        if status.state == "running":
            return False
        if status.state == "failed":
            self._failed(running, status)
        else:
            self._commit(running.assignment, status)
            self._forget(running.assignment.attempt)
        del self._lead.running[running.assignment.attempt]
        return True

    def _forget(self, attempt: str) -> None:
        """No longer count the failures of an attempt that has come to something."""
        self.not_before.pop(attempt, None)
        for key in [key for key in self.failures if key[0] == attempt]:
            del self.failures[key]

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
        return status

    def _commit(self, assignment: Assignment, status: Status) -> None:
        assert status.outcome is not None
        try:
            files = holdout(self._lead, assignment.round) if assignment.kind == "evaluate" else {}
            alive = self._lead.watch.alive
            commits.commit(self._lead.store, self._lead.identity, assignment, status, holdout=files, alive=alive)
        except Refusal as refusal:
            if refusal.code in _PASSING | OUTAGES:
                # It stays as it is, done, and is committed once that has passed.
                raise
            reason = f"not committed: {refusal.code}: {refusal.sentence}"
            with self._lead.store.snapshot() as tx:
                held = stages.holds(tx, assignment)
            if held:
                self.block(assignment, reason)
            else:
                # The row is another's, or of a database that lost its last moments: the next plan sees what is left to do.
                say("dropped", **ids(assignment), reason=reason)
        except Exception as error:
            say("error", **ids(assignment), traceback=traceback.format_exc())
            self.block(assignment, f"not committed: {type(error).__name__}: {error}")
        else:
            outcome = status.outcome
            say("committed", **ids(assignment), outcome=outcome.status, reason=outcome.reason, network=status.network)

    def _failed(self, running: Running, status: Status) -> None:
        assignment = running.assignment
        keys = [stage.key for stage in assignment.stages]
        if not running.said:
            # Once, also where writing it down has to wait for the database.
            running.said = True
            self._lead.vitals.failed[status.code or "runner_failed"] += 1
            self.failures[assignment.attempt, status.code] += 1
            say("attempt failed", **ids(assignment), reason=status.reason, code=status.code, log=status.log)
        if status.code in _PASSING or status.code in ("cancelled", "runner_lost"):
            # Under the same number, so that what lives on where nobody sees it is adopted and not made beside it.
            with self._lead.store.transaction() as tx:
                stages.give_back(tx, keys, reason=status.reason if status.code == "runner_lost" else None)
            if status.code in _PASSING:
                self._lead.paused = self._lead.moments.monotonic() + PAUSE
            return
        count = self.failures[assignment.attempt, status.code]
        tries = TRIES.get(status.code, TRIES_OF_MACHINES)
        if count < tries:
            with self._lead.store.transaction() as tx:
                stages.try_again(tx, keys, reason=status.reason)
            wait = BACKOFF * 4 ** (count - 1) if status.code in TRIES else self.long(count)
            self.not_before[assignment.attempt] = self._lead.moments.monotonic() + wait
        elif status.code == "limit_exceeded":
            with self._lead.store.snapshot() as tx:
                state = tx.round(assignment.round)
            self._commit(assignment, commits.outlasted(self._lead.store, state, status, tries=tries))
        else:
            self.block(assignment, f"failed {tries} times, last: {status.reason}")

    def block(self, assignment: Assignment, reason: str) -> None:
        """Leave an attempt's stages to an operator."""
        with self._lead.store.transaction() as tx:
            stages.block(tx, [stage.key for stage in assignment.stages], reason=reason)
        say("blocked", **ids(assignment), reason=reason, hint="put it right and start the dispatcher again")

    def long(self, count: int) -> float:
        """Seconds to wait after the count-th failure of a machine: up to a bound that doubles, drawn, so that not all come at once."""
        first, last = LONG_BACKOFF
        return self._lead.moments.uniform(0.0, min(last, first * 2.0 ** min(count - 1, 16)))


def holdout(lead: Lead, round_id: str) -> dict[str, str]:
    """The files of a round's opened holdout: name -> digest."""
    with lead.store.snapshot() as tx:
        return release.holdout_files(tx, round_id)
