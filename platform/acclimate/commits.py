"""What an attempt's outcome becomes: log records, results and stage states, in one transaction, or nothing.

The evaluator's key signs here. Predictions are scored here too, where the targets are: no child sees them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, update

from acclimate import stages, table_blobs
from acclimate.assignments import Assignment, Held, Stage
from acclimate.retries import SHORT
from acclimate.service import submit
from acclimate.service.identity import Identity
from acclimate.store import Store, Tx, results, timestamp
from acclimate.store import stages as stage_rows
from acclimate_competitions import records, tables
from acclimate_competitions.definition import Task
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_runners import failpoints
from acclimate_runners.jobs import Outcome
from acclimate_runners.runner import Status

if TYPE_CHECKING:
    import pyarrow as pa

_LONGEST_REASON = 2000
_Ended = tuple[Stage, Mapping[str, Any], str]
"""A stage, the document of its result, and its public reason where it failed."""
_AT_ONCE = 8
"""Stages of one attempt that are scored at the same time."""


def commit(
    store: Store,
    identity: Identity,
    held: Held,
    status: Status,
    *,
    holdout: Mapping[str, str],
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Commit what a done attempt came to.

    Args:
        store: the store, whose blobs hold the outcome's files.
        identity: whose evaluator key signs.
        held: what was done, and the fence of the try.
        status: of the attempt, done.
        holdout: name -> digest of the opened holdout's files; needed for evaluations only.
        alive: called before each table that is read or scored, which may take long.

    Raises:
        Refusal: what rounds.apply refuses; scores_invalid; job_failed for an outcome that does not answer the assignment;
            busy, no_space.
    """
    if held.assignment.kind == "check":
        _check(store, identity, held, status)
    elif held.assignment.kind == "prepare":
        _prepare(store, identity, held, status)
    else:
        _evaluate(store, identity, held, status, holdout=holdout, alive=alive)
    failpoints.reach("committed")


def outlasted(store: Store, state: Round, held: Held, status: Status, *, tries: int) -> Status:
    """What an attempt came to whose model needed more time or memory than is allowed, time and again: refused, as a bad model is."""
    size = (
        f" with micro-batch {held.assignment.micro_batch}" if status.code in SHORT and held.assignment.halvings else ""
    )
    reason = f"{status.reason}, at each of {tries} tries{size}"
    # No manifest says what it ran on.
    outcome = Outcome("refused", reason, {}, {}, hardware=state.competition.compute.hardware, versions={})
    return replace(status, state="done", outcome=outcome, log=status.log or store.blobs.put_bytes(b""))


def _check(store: Store, identity: Identity, held: Held, status: Status) -> None:
    outcome, assignment = _outcome(status), held.assignment
    if outcome.status == "done":
        submit.accept(store, assignment.submission)
    else:
        submit.refuse(store, assignment.submission, outcome.reason, identity=identity)
    failpoints.reach("settled")
    # A crash in between is mended by the next plan, which sees that the submission is no longer being checked.
    with store.transaction() as tx:
        document = {**finite(outcome.results), **_circumstances(status)}
        _close(tx, held, [(assignment.stages[0], document, outcome.reason)])
        stages.committed(tx, held)
        failpoints.reach("committing")


def _prepare(store: Store, identity: Identity, held: Held, status: Status) -> None:
    outcome, assignment = _outcome(status), held.assignment
    selections = {entry["task"]: entry for entry in outcome.results.get("selections", [])}
    prepared = {(entry["task"], entry["seed"]): entry for entry in outcome.results.get("prepared", [])}
    ended: list[_Ended] = []
    with store.transaction() as tx:
        state = tx.round(assignment.round)
        for stage in assignment.stages:
            if outcome.status == "refused":
                entry: dict[str, Any] = {"task": stage.task, "seed": stage.seed, "failed": {"reason": outcome.reason}}
                entry["micro_batch"] = assignment.micro_batch
            elif (stage.task, stage.seed) in prepared:
                entry = finite(prepared[stage.task or "", stage.seed])
            else:
                raise Refusal("job_failed", f"the outcome has no preparation of {stage.task}, seed {stage.seed}")
            selection = finite(selections.get(stage.task, {}))
            tx.append(_signed(identity, state, _prepared_fields(state, assignment, entry, selection, status)))
            failed = str(entry["failed"]["reason"]) if "failed" in entry else ""
            ended.append((stage, {**entry, "selection": selection, **_circumstances(status)}, failed))
        _close(tx, held, ended)
        stages.committed(tx, held)
        failpoints.reach("committing")


def _prepared_fields(
    state: Round, assignment: Assignment, entry: Mapping[str, Any], selection: Mapping[str, Any], status: Status
) -> tuple[str, dict[str, Any]]:
    fields: dict[str, Any] = {
        "submission": assignment.entry,
        "task": entry["task"],
        "seed": entry["seed"],
        "recipe": state.defined["recipe"],
        "base": assignment.job.model.digest,
        "code": state.defined["code"],
        "hardware": _outcome(status).hardware,
    }
    # The outcome's own, where it says it; a round in which memory sufficed says nothing of it.
    size = entry.get("micro_batch", assignment.micro_batch)
    if size not in (None, assignment.job.recipe.global_batch):
        fields["micro_batch"] = size
    if "failed" in entry:
        reason = str(entry["failed"]["reason"])[:_LONGEST_REASON]
        return "ModelPrepared", {**fields, "failed": {"reason": reason, "log": status.log}}
    return "ModelPrepared", {
        **fields,
        "prepared": entry["prepared"],
        "candidates": selection["candidates"],
        "selected": selection["selected"],
        "cost": entry["cost"],
        **({"diverged": entry["diverged"][:_LONGEST_REASON]} if entry.get("diverged") else {}),
    }


def _evaluate(
    store: Store,
    identity: Identity,
    held: Held,
    status: Status,
    *,
    holdout: Mapping[str, str],
    alive: Callable[[], None],
) -> None:
    outcome, assignment = _outcome(status), held.assignment
    given = {(p["task"], p["seed"], p["protocol"]): p for p in outcome.results.get("predictions", [])}
    with store.snapshot() as tx:
        state = tx.round(assignment.round)
    # Scoring and writing files takes time, so it is done before the transaction.
    tasks = {task.name: task for task in state.competition.tasks}
    truth = {}
    for name in tasks:
        alive()
        truth[name] = table_blobs.read(store.blobs, holdout[f"{name}.parquet"])

    def scored(stage: Stage) -> dict[str, Any]:
        alive()
        assert stage.task is not None
        task = tasks[stage.task]
        if outcome.status == "refused":
            # The model was fit to be prepared and is not to be evaluated: unknown is not zero, its examples stay unscored.
            predictions = table_blobs.keep(store.blobs, unpredicted(assignment.entrant, stage, truth[stage.task]))
            entry: dict[str, Any] = {"count": truth[stage.task].num_rows, "failed": {"reason": outcome.reason}}
        elif (stage.task, stage.seed, stage.protocol) in given:
            entry = finite(given[stage.task, stage.seed, stage.protocol])
            predictions = outcome.files[entry["file"]]
        else:
            raise Refusal("job_failed", f"the outcome has no predictions for {stage.task}, {stage.protocol}")
        scores = score(store, assignment, stage, predictions, holdout=truth[stage.task], task=task, state=state)
        return {**entry, "predictions": predictions, "scores": scores, **_circumstances(status)}

    # What takes the time is the disk's answer that it has each table: several are asked for at once.
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="scoring") as threads:
        documents = list(threads.map(scored, assignment.stages))
    models = state.models
    with store.transaction() as tx:
        state = tx.round(assignment.round)
        for stage, document in zip(assignment.stages, documents, strict=True):
            key = (assignment.entry or 0, stage.task or "", stage.seed, stage.protocol or "")
            fields = {
                "submission": assignment.entry,
                "task": stage.task,
                "seed": stage.seed,
                "protocol": stage.protocol,
                "prepared": models[key],
                "predictions": document["predictions"],
                "count": document["count"],
            }
            tx.append(_signed(identity, state, ("ModelEvaluated", fields)))
        failures = [str(document.get("failed", {}).get("reason", "")) for document in documents]
        _close(tx, held, list(zip(assignment.stages, documents, failures, strict=True)))
        stages.committed(tx, held)
        failpoints.reach("committing")


def score(
    store: Store,
    assignment: Assignment,
    stage: Stage,
    predictions: str,
    *,
    holdout: "pa.Table",
    task: Task,
    state: Round,
) -> str:
    """Score one stage's predictions; returns the digest of the score table's blob.

    Raises:
        Refusal: scores_invalid, where they are another entrant's or stage's than asked for; blob_corrupt; no_space.
    """
    from acclimate_competitions import metrics

    table = table_blobs.read(store.blobs, predictions, tables.PREDICTIONS)
    wanted = {(assignment.entrant, stage.protocol, stage.task, stage.seed)}
    found = {tuple(row.values()) for row in table.select(["entrant", "protocol", "task", "seed"]).to_pylist()}
    if found != wanted:
        raise Refusal("scores_invalid", f"predictions are of {sorted(map(str, found))}, asked for was {wanted}")
    scored = metrics.score_predictions(table, holdout, task, cluster=state.competition.ranking.cluster)
    return table_blobs.keep(store.blobs, scored)


def unpredicted(entrant: str, stage: Stage, holdout: "pa.Table") -> "pa.Table":
    """Predictions that say of each example that there is none."""
    import pyarrow as pa

    rows = [
        {"entrant": entrant, "protocol": stage.protocol, "task": stage.task, "seed": stage.seed, "example": example}
        for example in holdout.column("example").to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=tables.PREDICTIONS)


def _signed(identity: Identity, state: Round, record: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    kind, fields = record
    return records.sign(kind, state.id, fields, key=identity.evaluator_key)


def _close(tx: Tx, held: Held, ended: Sequence[_Ended]) -> None:
    """Note the ends of stages: their results and states, where this try still holds them all."""
    attempt, at = held.assignment.attempt, timestamp(tx)
    for failed in sorted({failed for _, _, failed in ended}):
        keys = [stage.key for stage, _, reason in ended if reason == failed]
        mine = [stage_rows.c.key.in_(keys), stage_rows.c.attempt == attempt, stage_rows.c.fence == held.fence]
        mine.append(stage_rows.c.state.in_(stages.UNDER_WAY))
        values = {"state": "failed" if failed else "committed", "progress": 1.0, "reason": failed[:_LONGEST_REASON]}
        changed = tx.execute(update(stage_rows).where(*mine).values(**values, heartbeat=at)).rowcount
        if changed != len(keys):
            sentence = (
                f"{len(keys) - changed} of {len(keys)} stages, such as {keys[0]}, are no longer of attempt {attempt}"
            )
            raise Refusal("conflict", f"{sentence} under fence {held.fence}")
    tx.execute(insert(results), [{"stage": stage.key, "document": dict(made), "at": at} for stage, made, _ in ended])


def _outcome(status: Status) -> Outcome:
    assert status.outcome is not None
    return status.outcome


def _circumstances(status: Status) -> dict[str, Any]:
    outcome = _outcome(status)
    return {
        "hardware": outcome.hardware,
        "versions": dict(outcome.versions),
        "log": status.log,
        "network": status.network,
    }


def finite(value: Any) -> Any:
    """The same JSON with None for what is no number: neither records nor results can say NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value
