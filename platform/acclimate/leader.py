"""What the leading dispatcher does, for one term: makes due transitions, hands out work, and commits what comes back.

What is left to do is a set difference of the plan and the log, so whoever leads next just goes on: running stages went back to
pending, an attempt that still runs or has finished is adopted by its name, and nothing is committed twice because a commit is one
transaction that requires the stage to be this attempt's, and the lease to be this leader's.
"""

import time
from typing import Any

from acclimate import granting, stages
from acclimate.admission import Admission
from acclimate.aside import Aside
from acclimate.assignments import Held
from acclimate.console import say
from acclimate.finishing import Finish, Finisher
from acclimate.hosting import outlives
from acclimate.lead import OUTAGES, Lead, Running
from acclimate.orphans import Orphans
from acclimate.pool import PoolRow
from acclimate.service import clockwork, release
from acclimate.settling import Settling
from acclimate.sweeping import Sweeper
from acclimate_competitions.errors import Refusal

PATIENCE = 12.0
"""Seconds for which a dispatcher that is stopped waits, before it hands over, for what opens, publishes or finishes a round; of supervision.GRACE."""
_PLAN_EVERY, _BEAT_EVERY, _BEAT_AT_LEAST = 0.5, 0.5, 5.0


class Leader:
    """Leads for one term.

    Args:
        lead: what its parts share.
        finish_round: as Dispatcher's.
    """

    def __init__(self, lead: Lead, *, finish_round: Finish | None) -> None:
        self._lead = lead
        self._settling = Settling(lead)
        self._admission = Admission(lead, self._settling)
        self._aside = Aside(lead.store, lead.settings, monotonic=lead.moments.monotonic)
        self._sweeper = Sweeper(lead.blobs)
        self._orphans = Orphans(lead)
        self._finisher: Finisher | None = None
        if finish_round is not None:
            self._finisher = Finisher(lead.store, finish_round, still_leading=lead.watch.still_leading)
        self._pool = PoolRow(lead.store, name="dispatch", runner=lead.settings.runner)
        # When the last plan was made, by the monotonic clock.
        self._planned = 0.0
        # Whether something may have been granted of which the parts have not heard.
        self._unheard = False

    @property
    def busy(self) -> bool:
        """Whether an attempt is under way that has not ended."""
        return any(running.ended is None for running in self._lead.running.values())

    def begin(self) -> None:
        """Take over: what a killed process left of an opening is removed, and what was under way is pending again.

        Raises:
            Refusal: busy, lease_lost, database_unreachable, no_space.
        """
        release.clear(self._lead.settings)
        with self._lead.store.transaction() as tx:
            stages.resume(
                tx,
                epoch=self._lead.watch.epoch,
                code=self._lead.identity.code,
                outlives=outlives(self._lead.settings),
            )
        self._settling.recall()

    def end(self) -> None:
        """Hand over in order: wait for what opens or finishes a round, and give back what runs; the host must be closed by then.

        Raises:
            Refusal: busy, lease_lost, database_unreachable, no_space.
        """
        until = time.monotonic() + PATIENCE
        self._aside.close()
        self._settling.scorer.close()
        if self._finisher is not None:
            self._finisher.close(patience=max(0.0, until - time.monotonic()))
        with self._lead.store.transaction() as tx:
            for running in self._lead.running.values():
                row = stages.row_of(tx, running.held)
                if row is not None and row.state in stages.UNDER_WAY:
                    going_on = outlives(self._lead.settings)
                    why: dict[str, str] = {"code": "dispatcher_lost", "reason": "its dispatcher was stopped"}
                    stages.lost(tx, row, epoch=running.held.epoch, adoptable=going_on, **why)

    def abandon(self) -> None:
        """Forget everything, as another leads: attempts that it may adopt are left alone."""
        self._lead.running.clear()
        self._aside.close(patience=0.0)
        self._settling.scorer.close()
        if self._finisher is not None:
            self._finisher.close(patience=0.0)

    def step(self) -> None:
        """Do all that can be done now: transitions, commits, starts, heartbeats.

        Raises:
            Refusal: busy, no_space, lease_lost, database_unreachable, blobs_unreachable; what was not done is done in a later step.
        """
        try:
            made = clockwork.tick(self._lead.store, self._lead.settings, aside=self._aside.begin)
        except Refusal as refusal:
            if refusal.code in OUTAGES:
                raise
            # What stops one transition must not keep finished work from being committed.
            self._lead.say_once("no transition", code=refusal.code, reason=refusal.sentence)
            made = []
        made += self._aside.made()
        for line in made:
            self._lead.vitals.transitions[line.rpartition(": ")[2]] += 1
            say("transition", made=line)
        granted = self._grant()
        for wish in granted:
            event = "given up" if wish.wish == "give_up" else "retried"
            say(event, round=wish.round, stage=wish.stage, account=wish.account, reason=wish.reason or "")
        settled = self._settling.settle()
        if made or settled or self._lead.moments.monotonic() - self._planned > _PLAN_EVERY:
            self._planned = self._lead.moments.monotonic()
            self._admission.plan()
        self._beat()
        host = self._lead.host
        if host.problem:
            self._lead.say_once("no runner" if host.runner is None else "no machines", reason=host.problem)
        self._pool.write(host)
        self._orphans.step()
        self._sweeper.step()
        if self._finisher is not None:
            self._finisher.step()
        self._lead.vitals.running = len(self._lead.running)

    def _grant(self) -> list[Any]:
        """Do what organizers asked for, and see anew what waits; also where the answer was lost that it was done.

        Raises:
            Refusal: busy, no_space, lease_lost, database_unreachable.
        """
        try:
            granted = granting.grant(self._lead.store, epoch=self._lead.watch.epoch)
        except Exception:
            self._unheard = True
            raise
        self._unheard |= bool(granted)
        if self._unheard:
            self._settling.recall()
            self._unheard = False
        return granted

    def _beat(self) -> None:
        """Write down progress, for those that made some, and now and then for all; at most every half second."""
        now = self._lead.moments.monotonic()
        due: list[tuple[Held, float, float]] = []
        begun: list[tuple[Running, str]] = []
        for running in self._lead.running.values():
            status = self._settling.poll(running)
            if not running.begun and status.state == "running" and (status.total or status.network):
                begun.append((running, status.machine))
            word, waited = (status.step, status.total), now - running.beat
            if waited > _BEAT_AT_LEAST or (word != running.told and waited > _BEAT_EVERY):
                running.beat, running.told = now, word
                progress = status.step / status.total if status.total > 0 else float(status.state == "done")
                due.append((running.held, progress, status.silent))
        if due or begun:
            with self._lead.store.transaction() as tx:
                if begun:
                    stages.started(tx, [(running.held, machine) for running, machine in begun])
                if due:
                    stages.beat(tx, due)
        for running, _ in begun:
            running.begun = True
