"""The life of stage rows: pending → running → committed, failed (the entrant's fault), or blocked (ours, until an operator acts).

Only the dispatcher writes them. A change of state always says from which state, and for which attempt.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import case, insert, select, update

from acclimate.assignments import Assignment
from acclimate.schedule import UNMET
from acclimate.store import Store, Tx, stages, submissions, timestamp

_PART = 500
_LONGEST_REASON = 2000


def resume(tx: Tx) -> None:
    """What a new dispatcher does first: what ran is pending again, and so is what was blocked, as someone has looked at it."""
    give_back(tx)
    blocked = update(stages).where(stages.c.state == "blocked")
    tx.execute(blocked.values(state="pending", attempts=0))
    # What no machine could take is judged anew, by the pool that this dispatcher sees.
    tx.execute(update(stages).where(_unmet()).values(reason=""))


def give_back(tx: Tx, keys: Sequence[str] | None = None, *, reason: str | None = None) -> None:
    """Running stages (all, or those of `keys`) to pending; the attempt doesn't count, as it ended through no fault of its own."""
    fewer = case((stages.c.attempts > 0, stages.c.attempts - 1), else_=0)
    running = stages.c.state == "running"
    mine = running if keys is None else running & stages.c.key.in_(keys)
    why = {} if reason is None else {"reason": reason[:_LONGEST_REASON]}
    tx.execute(update(stages).where(mine).values(state="pending", attempts=fewer, progress=0.0, **why))


def reclaim(store: Store, attempts: Collection[str]) -> int:
    """Running stages whose attempt is none of these to pending; how many. For the leader, whose writes are fenced: nobody else's run.

    A claim may be committed although the connection broke before its leader heard of it, and giving back may fail with the database.
    """
    stray = (stages.c.state == "running") & (stages.c.attempt.is_(None) | stages.c.attempt.not_in(list(attempts)))
    with store.snapshot() as tx:
        keys = list(tx.execute(select(stages.c.key).where(stray)).scalars())
    if keys:
        with store.transaction() as tx:
            for part in _parts(keys):
                give_back(tx, part)
    return len(keys)


def register(store: Store, wanted: Iterable[Assignment]) -> dict[str, str]:
    """Write down the stages that are new, so that everyone sees what is to be done; key -> state of all."""
    planned = {stage.key: (assignment, stage) for assignment in wanted for stage in assignment.stages}
    with store.snapshot() as tx:
        known = states_of(tx, planned)
    new = [
        {
            "key": key,
            "round": assignment.round,
            "kind": assignment.kind,
            "submission": assignment.submission,
            "task": stage.task,
            "seed": stage.seed,
            "protocol": stage.protocol,
            "state": "pending",
        }
        for key, (assignment, stage) in planned.items()
        if key not in known
    ]
    if new:
        with store.transaction() as tx:
            tx.execute(insert(stages), new)
    return known | dict.fromkeys(planned.keys() - known.keys(), "pending")


def states_of(tx: Tx, keys: Iterable[str]) -> dict[str, str]:
    """Key -> state of the stages that have a row."""
    found: dict[str, str] = {}
    for part in _parts(sorted(keys)):
        query = select(stages.c.key, stages.c.state).where(stages.c.key.in_(part))
        found |= {row.key: row.state for row in tx.execute(query)}
    return found


def claim(tx: Tx, assignment: Assignment) -> int | None:
    """Pending stages to running, for one attempt; the attempt's number, from 1, or None where not all of them are pending."""
    keys = [stage.key for stage in assignment.stages]
    if set(states_of(tx, keys).values()) != {"pending"}:
        return None
    values = {"state": "running", "attempt": assignment.attempt, "heartbeat": timestamp(tx), "progress": 0.0}
    tx.execute(update(stages).where(stages.c.key.in_(keys)).values(**values, attempts=stages.c.attempts + 1))
    return int(max(tx.execute(select(stages.c.attempts).where(stages.c.key.in_(keys))).scalars()))


def holds(tx: Tx, assignment: Assignment) -> bool:
    """Whether all stages of an attempt are still its own, as they were when it was claimed."""
    keys = [stage.key for stage in assignment.stages]
    mine = (stages.c.attempt == assignment.attempt) & (stages.c.state == "running") & stages.c.key.in_(keys)
    return len(tx.execute(select(stages.c.key).where(mine)).all()) == len(keys)


def try_again(tx: Tx, keys: Sequence[str], *, reason: str) -> None:
    """Running stages to pending, with what went wrong this time."""
    mine = stages.c.key.in_(keys) & (stages.c.state == "running")
    tx.execute(update(stages).where(mine).values(state="pending", reason=reason[:_LONGEST_REASON]))


def block(tx: Tx, keys: Sequence[str], *, reason: str) -> None:
    """Stages that can't be done until an operator acts."""
    mine = stages.c.key.in_(keys) & stages.c.state.in_(("running", "pending"))
    tx.execute(update(stages).where(mine).values(state="blocked", reason=reason[:_LONGEST_REASON]))


def explain(store: Store, reasons: Mapping[str, str]) -> None:
    """Write down why the pending stages of these rounds can't begin (round -> placement.refusal_of), and no longer of any others.

    Raises:
        Refusal: busy, no_space, lease_lost, database_unreachable.
    """
    cleared = _unmet() & stages.c.round.not_in(list(reasons))
    pending = stages.c.state == "pending"
    due = [(cleared, "")]
    for name, reason in reasons.items():
        words = reason[:_LONGEST_REASON]
        due.append((pending & (stages.c.round == name) & (stages.c.reason != words), words))
    with store.snapshot() as tx:
        due = [(mine, words) for mine, words in due if tx.execute(select(stages.c.key).where(mine).limit(1)).first()]
    if due:
        with store.transaction() as tx:
            for mine, words in due:
                tx.execute(update(stages).where(mine).values(reason=words))


def _unmet() -> Any:
    return (stages.c.state == "pending") & stages.c.reason.startswith(UNMET, autoescape=True)


def beat(tx: Tx, assignment: Assignment, *, progress: float) -> None:
    """A running attempt's progress (0 to 1) and sign of life."""
    mine = (stages.c.attempt == assignment.attempt) & (stages.c.state == "running")
    tx.execute(update(stages).where(mine).values(progress=min(1.0, progress), heartbeat=timestamp(tx)))


def end_stale_checks(store: Store) -> None:
    """End the checks whose submission is no longer being checked: withdrawn, forfeited, or settled before a crash."""
    with store.snapshot() as tx:
        if not _stale_checks(tx):
            return
    with store.transaction() as tx:
        for row in _stale_checks(tx):
            state = "committed" if row.submission_state == "accepted" else "failed"
            tx.execute(update(stages).where(stages.c.key == row.key).values(state=state, reason=row.submission_reason))


def _stale_checks(tx: Tx) -> list[Any]:
    columns = (
        stages.c.key,
        submissions.c.state.label("submission_state"),
        submissions.c.reason.label("submission_reason"),
    )
    query = select(*columns).join(submissions, submissions.c.id == stages.c.submission)
    open_ones = (stages.c.kind == "check") & stages.c.state.in_(("pending", "blocked"))
    return list(tx.execute(query.where(open_ones, submissions.c.state != "checking")).all())


def _parts(items: list[str]) -> Iterator[list[str]]:
    # SQLite takes a limited number of values in one statement.
    for start in range(0, len(items), _PART):
        yield items[start : start + _PART]
