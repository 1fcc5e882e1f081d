"""What organizers ask of the leading dispatcher about blocked stages (service/attempts.py), done by it."""

from typing import Any

from sqlalchemy import func, or_, select, update

from acclimate import stages
from acclimate.store import Store, Tx, attempts, events, timestamp, wishes


def grant(store: Store, *, epoch: int) -> list[Any]:
    """Do what people asked for; returns the wishes that changed something.

    One about a stage that is no longer blocked doesn't: what goes on is neither begun again nor given up.

    Args:
        store: of the leader.
        epoch: of its lease.

    Raises:
        Refusal: busy, no_space, lease_lost, database_unreachable.
    """
    open_ones = select(wishes).where(wishes.c.done.is_(None)).order_by(wishes.c.id)
    with store.snapshot() as tx:
        if not tx.execute(open_ones.limit(1)).all():
            return []
    with store.transaction() as tx:
        changed = []
        for row in tx.execute(open_ones).all():
            code = stages.GIVEN_UP if row.wish == "give_up" else ""
            if stages.release(tx, row.stage, epoch=epoch, code=code, reason=row.reason or ""):
                changed.append(row)
            tx.execute(update(wishes).where(wishes.c.id == row.id).values(done=timestamp(tx)))
    return changed


def given_up(tx: Tx) -> dict[str, str]:
    """Attempt -> why its organizer gave it up; of those that nobody let be tried again since."""
    released = events.c.event == "released"
    newest = select(func.max(events.c.id)).where(released).group_by(events.c.attempt)
    query = select(events.c.attempt, events.c.reason).where(events.c.id.in_(newest), events.c.code == stages.GIVEN_UP)
    return {row.attempt: row.reason for row in tx.execute(query)}


def failed_tries(tx: Tx, attempt: str) -> list[Any]:
    """The tries of an attempt that failed, or found no room, however often an operator let it go; none that was merely lost. In their order."""
    mine = (attempts.c.attempt == attempt) & or_(attempts.c.state == "failed", attempts.c.code == "no_space")
    return list(tx.execute(select(attempts).where(mine).order_by(attempts.c.fence)).all())
