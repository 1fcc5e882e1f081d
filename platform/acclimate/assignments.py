"""What is left to do in a round: planned stages minus those the log has. A stage's key names everything that can change its result.

Stages of one entry that are outstanding at the same time make one assignment, so that small models don't drown in start-up time.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sqlalchemy import Row, select

from acclimate import round_jobs
from acclimate.plan import demand_of
from acclimate.schedule import Work
from acclimate.service import forecasts
from acclimate.store import Tx, submissions
from acclimate_competitions import digests, recipe
from acclimate_competitions.definition import Task
from acclimate_competitions.phases import Entry, Phase, Round
from acclimate_runners import jobs
from acclimate_runners.jobs import CheckJob, Job, PrepareJob
from acclimate_runners.runner import Demand

_FIRST, _LATER = 0, 1
_Evaluation = tuple[str, int | None, str]
"""(task, seed, protocol)"""


@dataclass(frozen=True)
class Stage:
    """One thing to do and to record: a check, or one preparation or evaluation of the plan."""

    key: str
    task: str | None = None
    seed: int | None = None
    protocol: str | None = None


@dataclass(frozen=True)
class Assignment:
    """The outstanding stages of one submission: what one attempt does.

    Attributes:
        kind: check | prepare | evaluate.
        submission: id of the submission's row.
        entry: the log index that names the entry in records; None for a check.
        work: its place in the schedule.
        demand: what it takes of a machine. No part of a stage's key: the hardware class says all that can change a result.
    """

    kind: str
    round: str
    submission: str
    entrant: str
    entry: int | None
    stages: tuple[Stage, ...]
    job: Job
    work: Work
    demand: Demand

    @cached_property
    def attempt(self) -> str:
        """The attempt's id: the digest of its sorted stage keys."""
        return digests.of_json(sorted(stage.key for stage in self.stages))

    @property
    def halvings(self) -> int:
        """How often its micro-batch can be halved; 0 where nothing is learned."""
        learns = isinstance(self.job, CheckJob | PrepareJob)
        return recipe.halvings(self.job.recipe.global_batch) if learns else 0

    @property
    def micro_batch(self) -> int | None:
        """Sequences that its tries read at once; None where nothing is learned."""
        if not isinstance(self.job, CheckJob | PrepareJob):
            return None
        return self.job.micro_batch or self.job.recipe.global_batch

    def halved(self, times: int) -> "Assignment":
        """The same with a micro-batch that is the whole batch halved so often; no part of a stage's key, nor of the attempt's id.

        Where that leaves single sequences, layers are computed again in the backward pass, too.
        """
        assert isinstance(self.job, CheckJob | PrepareJob)
        size = recipe.micro_batch(self.job.recipe.global_batch, halved=times)
        return replace(self, job=replace(self.job, micro_batch=size, recompute=times > 0 and size == 1))


@dataclass(frozen=True)
class Held:
    """A try of an attempt, as its leader holds it: by its fence, in an epoch of the lease."""

    assignment: Assignment
    fence: int
    epoch: int


def stage_key(kind: str, state: Round, *, inputs: Iterable[str], params: Mapping[str, Any]) -> str:
    """A stage's key: the digest of the entry whose stage it is, and of all that can change its result.

    Two entries may be the same files: each has stages of its own, as each has its own records.

    Not in it: who runs it, when, in which attempt, with which priority and micro-batch. The hardware class is the pool that the definition declares;
    what a stage really ran on is in its result.
    """
    mandated = state.competition.preparation
    # Named where they lie in shards only: keys of rounds that began before there were any stay what they were.
    shards = {} if state.competition.compute.weights == "whole" else {"weights": state.competition.compute.weights}
    return digests.of_json(
        {
            "kind": kind,
            "code": state.defined["code"],
            "recipe": mandated.digest,
            "inputs": sorted(set(inputs)),
            "params": dict(params),
            "hardware": state.competition.compute.hardware,
            "world_size": state.competition.compute.processes,
            **shards,
            "determinism": mandated.determinism,
            "salt": state.id,
        }
    )


def without_answers(columns: Iterable[str], task: Task, *, cluster: str | None) -> list[str]:
    """The holdout's columns that a child may see: never the target, nor the cluster unless the prompt needs it."""
    hidden = {"target"} | ({"cluster", cluster} - set(re.findall(r"\w+", task.prompt)))
    return [name for name in columns if name not in hidden]


class Planned:
    """What is left to do of a round, again and again: assignments are made once and kept, as digests of thousands of stages take a second."""

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._kept: dict[int, Assignment] = {}

    def outstanding(self, tx: Tx, state: Round, *, holdout_inputs: Mapping[str, str]) -> list[Assignment]:
        """What is left to do in the round's phase, in the plan's order; as `outstanding`.

        An assignment that is kept is right as long as the same stages are left: all else that it names is fixed once the round has closed,
        and the holdout's inputs once it is opened.
        """
        if state.phase is not self._phase:
            self._phase, self._kept = state.phase, {}
        if state.phase is Phase.OPEN:
            waiting = select(submissions).where(submissions.c.round == state.id, submissions.c.state == "checking")
            rows = tx.execute(waiting.order_by(submissions.c.committed_index)).all()
            return [_check(state, row) for row in rows]
        left = _left(state)
        new = {entry for entry, what in left.items() if entry not in self._kept or _done_by(self._kept[entry]) != what}
        entries = _entries(tx, state) if new else []
        seconds = forecasts.expected(tx, state.id, [row for _, row in entries]) if new else {}
        for entry, row in entries:
            if entry.submission not in new:
                continue
            what = left[entry.submission]
            if state.phase is Phase.CLOSED:
                work = Work(row.entrant, forecasts.of_preparations(seconds[row.id], state, len(what)), _LATER)
                self._kept[entry.submission] = _prepare(state, entry, row, left=what, work=work)
            else:
                work = Work(row.entrant, forecasts.of_evaluations(seconds[row.id], state, len(what)), _LATER)
                self._kept[entry.submission] = _evaluate(state, entry, row, holdout_inputs, left=what, work=work)
        return [self._kept[entry] for entry in left]


def outstanding(tx: Tx, state: Round, *, holdout_inputs: Mapping[str, str]) -> list[Assignment]:
    """What is left to do of a round in its phase, in the plan's order.

    Args:
        tx: for the submissions' rows.
        state: the round.
        holdout_inputs: task -> digest of the holdout's inputs without targets; needed in phase `opened` only.
    """
    return Planned().outstanding(tx, state, holdout_inputs=holdout_inputs)


def _left(state: Round) -> dict[int, tuple[_Evaluation, ...]]:
    """Entry -> what is left of it, in the phases in which entries are prepared and evaluated; a preparation has no protocol."""
    found: dict[int, list[_Evaluation]] = {}
    if state.phase is Phase.CLOSED:
        done, every = state.prepared, [(task.name, seed) for task in state.competition.tasks for seed in _seeds(state)]
        for entry in state.entries:
            left: list[_Evaluation] = [
                (task, seed, "") for task, seed in every if (entry.submission, task, seed) not in done
            ]
            if left:
                found[entry.submission] = left
    elif state.phase is Phase.OPENED:
        evaluated = state.evaluated
        by_entry: dict[int, list[_Evaluation]] = {}
        for key in state.models:
            if key not in evaluated:
                by_entry.setdefault(key[0], []).append(key[1:])
        found = {e.submission: by_entry[e.submission] for e in state.entries if e.submission in by_entry}
    return {entry: tuple(left) for entry, left in found.items()}


def _seeds(state: Round) -> tuple[int, ...]:
    return tuple(state.competition.preparation.seeds)


def _done_by(assignment: Assignment) -> tuple[_Evaluation, ...]:
    return tuple((stage.task or "", stage.seed, stage.protocol or "") for stage in assignment.stages)


def _entries(tx: Tx, state: Round) -> list[tuple[Entry, Row[Any]]]:
    rows = tx.execute(select(submissions).where(submissions.c.round == state.id)).all()
    by_commitment = {row.commitment: row for row in rows}
    return [(entry, by_commitment[entry.commitment]) for entry in state.entries]


def _check(state: Round, row: Row[Any]) -> Assignment:
    job = round_jobs.check(state, round_jobs.model(state, row.manifest))
    key = stage_key("check", state, inputs=jobs.inputs(job), params={"submission": row.id})
    # First come, first served, over all rounds: an entrant waits for this answer.
    work = Work(row.entrant, cost=-float(row.committed_index), priority=_FIRST)
    demand = demand_of(state.competition)
    return Assignment("check", state.id, row.id, row.entrant, None, (Stage(key),), job, work, demand)


def _prepare(state: Round, entry: Entry, row: Row[Any], *, left: Sequence[_Evaluation], work: Work) -> Assignment:
    model, tasks = round_jobs.model(state, row.manifest), {task.name: task for task in state.competition.tasks}
    wanted = [(name, seed) for name, seed, _ in left if seed is not None]
    job = round_jobs.prepare(state, model, wanted)
    stages = tuple(
        Stage(
            stage_key(
                "prepare",
                state,
                inputs=jobs.inputs(replace(job, tasks=(round_jobs.public_data(state, tasks[name]),))),
                params={"submission": entry.submission, "task": name, "seed": seed},
            ),
            name,
            seed,
        )
        for name, seed in wanted
    )
    demand = demand_of(state.competition)
    return Assignment("prepare", state.id, row.id, row.entrant, entry.submission, stages, job, work, demand)


def _evaluate(
    state: Round,
    entry: Entry,
    row: Row[Any],
    holdout_inputs: Mapping[str, str],
    *,
    left: Sequence[_Evaluation],
    work: Work,
) -> Assignment:
    models = state.models
    prepared = {
        f"{name}/{seed}": models[(entry.submission, name, seed, p)] for name, seed, p in left if p == "prepared"
    }
    job = round_jobs.evaluate(
        state,
        round_jobs.model(state, row.manifest),
        left,
        inputs=holdout_inputs,
        prepared=prepared,
        entrant=entry.entrant,
    )
    shared = job.model.inputs | ({job.tokenizer} if job.tokenizer else set())
    stages = tuple(
        Stage(
            stage_key(
                "evaluate",
                state,
                inputs=shared | {holdout_inputs[name], models[(entry.submission, name, seed, protocol)]},
                params={"submission": entry.submission, "task": name, "seed": seed, "protocol": protocol},
            ),
            name,
            seed,
            protocol,
        )
        for name, seed, protocol in left
    )
    demand = demand_of(state.competition)
    return Assignment("evaluate", state.id, row.id, row.entrant, entry.submission, stages, job, work, demand)
