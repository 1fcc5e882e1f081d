"""What organizers ask of the leading dispatcher about blocked stages (service/attempts.py), done by it."""

from typing import Any

from sqlalchemy import select, update

from acclimate import stages
from acclimate.store import Store, timestamp, wishes


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
