"""Attempts that go on in the pool and belong to nobody: of a voided round, of a term that ended at the wrong moment, of a restored database.

They hold places and come to nothing, as no fence of theirs is open. Only the leader ends them, and only those that neither goes on under
its eyes nor may still be adopted; a claim is made and the runner told of it in the same thread, so what is about to start is known.
"""

from acclimate import stages
from acclimate.console import say
from acclimate.lead import Lead
from acclimate_runners.runner import Pool

_EVERY = 60.0


class Orphans:
    """Ends orphaned attempts, once a runner is there and then every minute, for one term."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._looked: float | None = None
        self._runner: object = None

    def step(self) -> None:
        """Look, if it is time.

        Raises:
            Refusal: busy, lease_lost, database_unreachable.
        """
        runner, now = self._lead.host.runner, self._lead.moments.monotonic()
        if not isinstance(runner, Pool):
            return
        if runner is self._runner and self._looked is not None and now - self._looked < _EVERY:
            return
        self._runner, self._looked = runner, now
        with self._lead.store.snapshot() as tx:
            open_ones = stages.adoptable(tx)
        open_ones |= {attempt: running.held.fence for attempt, running in self._lead.running.items()}
        # A dispatcher that was stopped for long must not end what its successor has started.
        self._lead.watch.still_leading()
        try:
            ended = runner.keep_only(frozenset(f"{attempt}/{fence}" for attempt, fence in open_ones.items()))
        except ConnectionError:
            # Its host makes it anew, and then it is looked at again.
            return
        if ended:
            say("orphans ended", attempts=ended, reason="no open attempt is theirs")
