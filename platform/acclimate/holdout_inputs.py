"""The opened holdout as children get it: without targets, made of the opened files, and made again where it is lost.

The openings' row names it, so that it stays as long as the round's record does, whether or not an evaluation is under way.
"""

from typing import Any

from sqlalchemy import select, update

from acclimate import assignments, retries, table_blobs
from acclimate.assignments import Held
from acclimate.lead import OUTAGES, Lead
from acclimate.service import release
from acclimate.store import openings
from acclimate_competitions.definition import Task
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_runners.runner import Status

AGAIN_AFTER = (1.0, 60.0)
"""Seconds before a holdout that can't be read is looked at again: twice as long each time, up to a bound."""
_MOST = 5
"""How often in one term an attempt may end as its inputs are lost, before that is an operator's."""


class HoldoutInputs:
    """Makes and keeps the inputs of opened holdouts, for one term."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._made: dict[str, dict[str, str]] = {}
        # Of rounds whose holdout can't be read: how often that was so, and before when it isn't looked at again.
        self._hindered: dict[str, tuple[int, float]] = {}
        self._lost: dict[str, int] = {}

    def of(self, state: Round) -> dict[str, str] | None:
        """Task -> digest of the holdout's inputs; the same bytes however often they are made.

        None where the opened holdout can't be read: then the round's status says why, and it is looked at again later.

        Raises:
            Refusal: busy, lease_lost, database_unreachable, blobs_unreachable.
        """
        if state.id in self._made:
            return self._made[state.id]
        now = self._lead.moments.monotonic()
        count, until = self._hindered.get(state.id, (0, 0.0))
        if count and now < until:
            return None
        with self._lead.store.snapshot() as tx:
            files, made = release.holdout_files(tx, state.id), {}
        for task in state.competition.tasks:
            self._lead.watch.alive()
            name = f"{task.name}.parquet"
            try:
                made[task.name] = self._make(state, task, files[name])
            except Refusal as refusal:
                if refusal.code in OUTAGES:
                    raise
                self._hindered[state.id] = (
                    count + 1,
                    now + min(AGAIN_AFTER[1], AGAIN_AFTER[0] * 2.0 ** min(count, 16)),
                )
                what = "it is tried again"
                if refusal.code in retries.LOST:
                    what = "put that blob back, from a backup, and the round goes on"
                problem = f"{name}{release.UNREAD}: {refusal.sentence}; {what}"
                self._lead.say_once("holdout unread", round=state.id, code=refusal.code, reason=problem)
                self._note(state.id, code=refusal.code, problem=problem)
                return None
        # What nobody names any more may be collected as garbage: named before anybody is given it.
        self._note(state.id, inputs=made)
        self._hindered.pop(state.id, None)
        self._made[state.id] = made
        return made

    def there(self, assignment: assignments.Assignment) -> bool:
        """Whether the inputs of an evaluation are there; where not, `of` makes them again."""
        if assignment.kind != "evaluate":
            return True
        made = self._made.get(assignment.round, {})
        missing = [digest for digest in made.values() if not self._lead.blobs.has(digest)]
        if missing:
            self._forget(assignment.round, missing)
        return not missing

    def were_lost(self, held: Held, status: Status) -> bool:
        """Whether a try failed as it missed inputs that `of` makes again, so that nobody has to put them back."""
        assignment = held.assignment
        lost = [digest for digest in self._made.get(assignment.round, {}).values() if digest in status.reason]
        if status.code not in retries.LOST or assignment.kind != "evaluate" or not lost:
            return False
        self._lost[assignment.attempt] = self._lost.get(assignment.attempt, 0) + 1
        if self._lost[assignment.attempt] > _MOST:
            return False
        self._forget(assignment.round, lost)
        return True

    def _forget(self, round_id: str, lost: list[str]) -> None:
        self._lead.say_once("made again", round=round_id, reason=f"inputs of the holdout are lost: {', '.join(lost)}")
        self._made.pop(round_id, None)

    def _make(self, state: Round, task: Task, digest: str) -> str:
        # Re-hashed, once a term: what is read is what was opened.
        self._lead.blobs.check(digest)
        table = table_blobs.read(self._lead.blobs, digest)
        kept = assignments.without_answers(table.column_names, task, cluster=state.competition.ranking.cluster)
        return table_blobs.keep(self._lead.blobs, table.select(kept).replace_schema_metadata(None))

    def _note(self, round_id: str, *, inputs: dict[str, str] | None = None, code: str = "", problem: str = "") -> None:
        """Write down the inputs, or what hinders them, where it isn't written yet."""
        mine = openings.c.round == round_id
        with self._lead.store.snapshot() as tx:
            row = tx.execute(select(openings).where(mine)).one()
            files: dict[str, Any] = dict(row.files)
            if inputs is not None:
                named = {release.INPUTS + task: digest for task, digest in inputs.items()}
                files = {**release.holdout_files(tx, round_id), **named}
        if (files, code, problem) != (row.files, row.code, row.problem):
            with self._lead.store.transaction() as tx:
                tx.execute(update(openings).where(mine).values(files=files, code=code, problem=problem))
