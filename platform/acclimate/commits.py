"""What outcomes of attempts become: log records, results and stage states, of some attempts in one transaction, or nothing.

The evaluator's key signs here. Evaluations were scored before (scoring.py): what takes time is done outside the transaction.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import insert, update

from acclimate import stages
from acclimate.assignments import Assignment, Held, Stage
from acclimate.retries import SHORT
from acclimate.service import submit
from acclimate.service.identity import Identity
from acclimate.store import Store, Tx, results, timestamp
from acclimate.store import stages as stage_rows
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_runners import failpoints
from acclimate_runners.jobs import Outcome
from acclimate_runners.runner import Status

_LONGEST_REASON = 2000
_Ended = tuple[Stage, Mapping[str, Any], str]
"""A stage, the document of its result, and its public reason where it failed."""


@dataclass(frozen=True)
class Done:
    """An attempt that came to an outcome.

    Attributes:
        held: what was done, and the fence of the try.
        status: of the attempt, done.
        evaluations: of an evaluation, what each of its stages came to (scoring.evaluations).
    """

    held: Held
    status: Status
    evaluations: Sequence[Mapping[str, Any]] = ()


def commit(store: Store, identity: Identity, done: Sequence[Done]) -> None:
    """Commit what attempts came to: all of them in one transaction, so that one answer of the disk is waited for; a check by itself.

    Args:
        store: the store.
        identity: whose evaluator key signs.
        done: the attempts, in the order in which the log gets them.

    Raises:
        Refusal: what rounds.apply refuses; job_failed for an outcome that does not answer the assignment; conflict, where one is no
            longer its attempt's own: then none is committed; busy, no_space.
    """
    if done[0].held.assignment.kind == "check":
        (one,) = done
        _check(store, identity, one.held, one.status)
    else:
        with store.transaction() as tx:
            for one in done:
                ended = (_prepared if one.held.assignment.kind == "prepare" else _evaluated)(tx, identity, one)
                _close(tx, one.held, ended)
            stages.committed(tx, [one.held for one in done])
            for _ in done:
                failpoints.reach("committing")
    for _ in done:
        failpoints.reach("committed")


def outlasted(store: Store, state: Round, held: Held, status: Status, *, tries: int) -> Status:
    """What an attempt came to whose model needed more time or memory than is allowed, time and again: refused, as a bad model is."""
    size = (
        f" with micro-batch {held.assignment.micro_batch}" if status.code in SHORT and held.assignment.halvings else ""
    )
    # The runner's sentence alone: behind it stands the last line that the child said, which may hold words of the holdout (outputs.py), and
    # everybody reads this for good.
    sentence = status.reason.partition(": ")[0]
    return _refused(store, state, status, reason=f"{sentence}, at each of {tries} tries{size}")


def given_up(store: Store, state: Round, *, tries: Sequence[Any], reason: str) -> Status:
    """What an attempt came to that failed time and again, and that the round's organizer has tried no more; none runs for it.

    Its log tells of each try when and how it ended, so that the record shows what was given up.

    Args:
        store: the store.
        state: the round.
        tries: rows of those that failed (granting.failed_tries), in their order.
        reason: the organizer's.

    Raises:
        Refusal: no_space, blobs_unreachable.
    """
    last = f", the last with {tries[-1].code}" if tries else ""
    words = (
        f"given up by the round's organizer after {len(tries)} {'try' if len(tries) == 1 else 'tries'}{last}: {reason}"
    )
    said = "".join(f"try {one.fence} at {one.ended}: {one.code}: {one.reason}\n" for one in tries)
    log = store.blobs.put_bytes(said.encode())
    return _refused(store, state, Status("done", code=stages.GIVEN_UP, log=log), reason=words)


def _refused(store: Store, state: Round, status: Status, *, reason: str) -> Status:
    """The status of an attempt that came to no outcome of its own: refused, as a bad model is."""
    # No manifest says what it ran on.
    outcome = Outcome("refused", reason, {}, {}, hardware=state.competition.compute.hardware, versions={})
    return replace(status, state="done", outcome=outcome, log=status.log or store.blobs.put_bytes(b""))


def _check(store: Store, identity: Identity, held: Held, status: Status) -> None:
    outcome, assignment = outcome_of(status), held.assignment
    if outcome.status == "done":
        submit.accept(store, assignment.submission)
    else:
        # Who is to blame for what was given up nobody knows, so it is no try of its day either.
        ours = status.code == stages.GIVEN_UP
        submit.refuse(store, assignment.submission, outcome.reason, identity=identity, ours=ours)
    failpoints.reach("settled")
    # A crash in between is mended by the next plan, which sees that the submission is no longer being checked.
    with store.transaction() as tx:
        document = {**finite(outcome.results), **circumstances(status)}
        _close(tx, held, [(assignment.stages[0], document, outcome.reason)])
        stages.committed(tx, [held])
        failpoints.reach("committing")


def _prepared(tx: Tx, identity: Identity, done: Done) -> list[_Ended]:
    outcome, assignment = outcome_of(done.status), done.held.assignment
    selections = {entry["task"]: entry for entry in outcome.results.get("selections", [])}
    prepared = {(entry["task"], entry["seed"]): entry for entry in outcome.results.get("prepared", [])}
    ended: list[_Ended] = []
    state, signed = tx.round(assignment.round), []
    for stage in assignment.stages:
        if outcome.status == "refused":
            entry: dict[str, Any] = {"task": stage.task, "seed": stage.seed, "failed": failure(done.status)}
            entry["micro_batch"] = assignment.micro_batch
        elif (stage.task, stage.seed) in prepared:
            entry = finite(prepared[stage.task or "", stage.seed])
        else:
            raise Refusal("job_failed", f"the outcome has no preparation of {stage.task}, seed {stage.seed}")
        selection = finite(selections.get(stage.task, {}))
        signed.append(_signed(identity, state, _prepared_fields(state, assignment, entry, selection, done.status)))
        failed = str(entry["failed"]["reason"]) if "failed" in entry else ""
        ended.append((stage, {**entry, "selection": selection, **circumstances(done.status)}, failed))
    tx.append_all(signed)
    return ended


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
        **_ran_on(status),
    }
    # The outcome's own, where it says it; a round in which memory sufficed says nothing of it.
    size = entry.get("micro_batch", assignment.micro_batch)
    if size not in (None, assignment.job.recipe.global_batch):
        fields["micro_batch"] = size
    if "failed" in entry:
        reason = str(entry["failed"]["reason"])[:_LONGEST_REASON]
        return "ModelPrepared", {**fields, "failed": {**entry["failed"], "reason": reason, "log": status.log}}
    return "ModelPrepared", {
        **fields,
        "prepared": entry["prepared"],
        "candidates": selection["candidates"],
        "selected": selection["selected"],
        "cost": entry["cost"],
        **({"diverged": entry["diverged"][:_LONGEST_REASON]} if entry.get("diverged") else {}),
    }


def _evaluated(tx: Tx, identity: Identity, done: Done) -> list[_Ended]:
    assignment, state = done.held.assignment, tx.round(done.held.assignment.round)
    models, signed = state.models, []
    for stage, document in zip(assignment.stages, done.evaluations, strict=True):
        fields = {
            "submission": assignment.entry,
            "task": stage.task,
            "seed": stage.seed,
            "protocol": stage.protocol,
            "prepared": models[assignment.entry or 0, stage.task or "", stage.seed, stage.protocol or ""],
            "predictions": document["predictions"],
            "count": document["count"],
            **_ran_on(done.status),
        }
        if document.get("failed", {}).get("given_up"):
            # Its predictions are none: of every example the table says so (scoring.py).
            fields["given_up"] = str(document["failed"]["reason"])[:_LONGEST_REASON]
        signed.append(_signed(identity, state, ("ModelEvaluated", fields)))
    tx.append_all(signed)
    failures = [str(document.get("failed", {}).get("reason", "")) for document in done.evaluations]
    return list(zip(assignment.stages, done.evaluations, failures, strict=True))


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


def outcome_of(status: Status) -> Outcome:
    """The outcome of a done attempt."""
    assert status.outcome is not None
    return status.outcome


def _ran_on(status: Status) -> dict[str, Any]:
    """What a record says an attempt ran on: the class of hardware, and the libraries where a child said which."""
    outcome = outcome_of(status)
    libraries = {"libraries": dict(outcome.versions)} if outcome.versions else {}
    return {"hardware": outcome.hardware, **libraries}


def failure(status: Status) -> dict[str, Any]:
    """What a result says of the failure of a refused attempt: its public reason, and whether its organizer gave it up."""
    given_up = {"given_up": True} if status.code == stages.GIVEN_UP else {}
    return {"reason": outcome_of(status).reason, **given_up}


def circumstances(status: Status) -> dict[str, Any]:
    """What an attempt ran on and said, for its stages' results."""
    outcome = outcome_of(status)
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
