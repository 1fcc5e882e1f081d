"""The pool as the leading dispatcher last saw it, written down for everybody: one row, renewed while somebody leads."""

import time
from typing import Any

from sqlalchemy import insert, select, update

from acclimate.hosting import Host
from acclimate.store import Store, pools, timestamp
from acclimate_runners.runner import Pool

_EVERY = 30.0
_LONGEST_PROBLEM = 2000


class PoolRow:
    """Writes the row of a lease whenever the pool has changed, and every 30 s as a sign of life.

    Args:
        store: the leader's.
        name: of the lease.
        runner: ray | local.
    """

    def __init__(self, store: Store, *, name: str, runner: str) -> None:
        self._store, self._name, self._runner = store, name, runner
        self._written: dict[str, Any] | None = None
        self._at = 0.0

    def write(self, host: Host) -> None:
        """Write the row if it is time.

        Raises:
            Refusal: busy, lease_lost, database_unreachable, no_space.
        """
        runner = host.runner
        machines = sorted(host.machines, key=lambda machine: machine.name)
        values: dict[str, Any] = {
            "runner": self._runner,
            "slots": 0 if runner is None else runner.slots,
            "machines": [
                {"name": m.name, "cpus": m.cpus, "gpus": m.gpus, "memory": m.memory, "labels": dict(m.labels)}
                for m in machines
            ],
            "problem": (host.problem or _aside(host))[:_LONGEST_PROBLEM],
        }
        now = time.monotonic()
        if values == self._written and now - self._at < _EVERY:
            return
        with self._store.transaction() as tx:
            mine = pools.c.name == self._name
            row = {**values, "at": timestamp(tx)}
            if tx.execute(select(pools.c.name).where(mine)).first() is None:
                tx.execute(insert(pools), {"name": self._name, **row})
            else:
                tx.execute(update(pools).where(mine).values(**row))
        self._written, self._at = values, now


def _aside(host: Host) -> str:
    """Which machines are there and take no attempt, and why."""
    found = host.runner.aside() if isinstance(host.runner, Pool) else {}
    return "; ".join(f"{name} is left alone for a while: {why}" for name, why in sorted(found.items()))
