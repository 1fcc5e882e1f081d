"""Checks whose submission is no longer being checked: it was withdrawn, forfeited, or settled before a crash."""

from typing import Any

from sqlalchemy import select, update

from acclimate.store import Store, Tx, stages, submissions


def end(store: Store) -> None:
    """End them.

    Raises:
        Refusal: busy, no_space, lease_lost, database_unreachable.
    """
    with store.snapshot() as tx:
        if not _stale(tx):
            return
    with store.transaction() as tx:
        for row in _stale(tx):
            state = "committed" if row.submission_state == "accepted" else "failed"
            tx.execute(update(stages).where(stages.c.key == row.key).values(state=state, reason=row.submission_reason))


def _stale(tx: Tx) -> list[Any]:
    columns = (
        stages.c.key,
        submissions.c.state.label("submission_state"),
        submissions.c.reason.label("submission_reason"),
    )
    query = select(*columns).join(submissions, submissions.c.id == stages.c.submission)
    open_ones = (stages.c.kind == "check") & stages.c.state.in_(("pending", "blocked"))
    return list(tx.execute(query.where(open_ones, submissions.c.state != "checking")).all())
