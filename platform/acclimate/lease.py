"""Who leads: of any number of dispatchers one at a time, by a row with an epoch, and by nothing but the database's clock.

A lease is no lock. Its holder may be paused for an hour and wake up in the middle of a step, so what makes it safe is not the time but
the epoch: it grows with each change of holder, and every writing transaction of a leader begins with `check`, which refuses it once the
row is not the leader's own any more. Writers come one after another, so nobody takes the lease between a check and its commit. Time
only says when others may try: an expired lease that nobody took is still its holder's.

A clock that is set forward makes a lease look expired: another may take it, and the old leader stands by; no write is doubled. A clock
that is set back leaves a row that expires later than any could: the holder puts that right when it renews, and where it doesn't, the
row counts as expired once it was seen unchanged for a lease's time by this process's own clock.
"""

import threading
import time
import traceback
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from sqlalchemy import insert, select, update

from acclimate.console import say
from acclimate.store import Store, Tx, leases
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time, parse_time

SECONDS = 15.0


class Lease:
    """A named lease, as one holder sees it. One object serves one term: it takes the lease once, and once lost never again.

    Args:
        store: unfenced; its database's clock decides.
        name: of the row.
        holder: who asks; a name of this process alone.
        seconds: how long it holds without being renewed.
        former: names of processes that are proved to be gone in another way; what they hold is taken at once.

    Attributes:
        epoch: of its term; 0 before it took the lease.
        seen: the holder that the row named when it was last looked at, and when its lease ends; empty where there was none.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "dispatch",
        holder: str,
        seconds: float = SECONDS,
        former: Collection[str] = (),
    ) -> None:
        self._store, self._name, self.holder, self.seconds = store, name, holder, seconds
        self._former = frozenset(former)
        self.epoch = 0
        self.seen = ("", "")
        self._renewed = 0.0
        # The row as it stood when it last changed, and when that was noticed, by the monotonic clock.
        self._watched: tuple[tuple[int, str] | None, float] = (None, 0.0)

    @property
    def left(self) -> float:
        """Seconds for which others must leave it alone, as far as this process knows; 0 where it isn't held."""
        return max(0.0, self._renewed + self.seconds - time.monotonic()) if self.epoch else 0.0

    def take(self) -> bool:
        """Take the lease where it is free, has expired, or is this holder's own from before; says whether it is held now.

        Raises:
            Refusal: busy, database_unreachable, no_space.
        """
        if self.epoch:
            raise ValueError("this lease had its term")
        taken = self._take()
        # Those before it are gone; whoever leads under such a name from now on has a copy of their folder.
        self._former = frozenset()
        return taken

    def renew(self) -> None:
        """Hold it for another `seconds` from now.

        Raises:
            Refusal: lease_lost; busy, database_unreachable, no_space, which say nothing of whether it is held.
        """
        began = time.monotonic()
        with self._store.transaction() as tx:
            self.check(tx)
            tx.execute(update(leases).where(leases.c.name == self._name).values(expires=self._end(tx)))
        self._renewed = began

    def check(self, tx: Tx) -> None:
        """Refuse a transaction of a holder that was deposed; for Store.fenced.

        Raises:
            Refusal: lease_lost.
        """
        row = self._row(tx)
        found = ("nobody", 0) if row is None else (row.holder, row.epoch)
        if not self.epoch or found != (self.holder, self.epoch):
            raise Refusal(
                "lease_lost",
                f"{found[0]} leads in epoch {found[1]}, this was {self.holder} of epoch {self.epoch}",
                hint="nothing was written; this dispatcher stands by",
            )

    def release(self) -> None:
        """Give it up, so that another need not wait; changes nothing where it is lost.

        Raises:
            Refusal: busy, database_unreachable, no_space.
        """
        if not self.epoch:
            return
        with self._store.transaction() as tx:
            mine = (leases.c.name == self._name) & (leases.c.holder == self.holder) & (leases.c.epoch == self.epoch)
            tx.execute(update(leases).where(mine).values(expires=format_time(tx.now())))
        self._renewed = -self.seconds

    def _take(self) -> bool:
        with self._store.snapshot() as tx:
            if not self._is_free(tx, self._row(tx)):
                return False
        began = time.monotonic()
        with self._store.transaction() as tx:
            row = self._row(tx)
            if not self._is_free(tx, row):
                return False
            values = {"holder": self.holder, "epoch": 1 if row is None else row.epoch + 1, "expires": self._end(tx)}
            if row is None:
                tx.execute(insert(leases), {"name": self._name, **values})
            else:
                tx.execute(update(leases).where(leases.c.name == self._name).values(**values))
        self.epoch, self._renewed = int(str(values["epoch"])), began
        self.seen = (self.holder, str(values["expires"]))
        return True

    def _row(self, tx: Tx) -> Any:
        return tx.execute(select(leases).where(leases.c.name == self._name)).one_or_none()

    def _end(self, tx: Tx) -> str:
        return format_time(tx.now() + timedelta(seconds=self.seconds))

    def _is_free(self, tx: Tx, row: Any) -> bool:
        if row is None or row.holder == self.holder or row.holder in self._former:
            return True
        self.seen = (row.holder, row.expires)
        stands, now = (row.epoch, row.expires), time.monotonic()
        if self._watched[0] != stands:
            self._watched = (stands, now)
        left = (parse_time(row.expires) - tx.now()).total_seconds()
        return left <= 0 or (left > self.seconds and now - self._watched[1] > self.seconds)


class Presence:
    """A row by which those that stand by show that they are there: whoever can't work gives way to them, and to nobody else.

    Args:
        store: unfenced.
        holder: who asks.
        seconds: for how long one counts as there after it has shown itself.
    """

    _NAME = "standby"

    def __init__(self, store: Store, *, holder: str, seconds: float = 60.0) -> None:
        self._store, self._holder, self._seconds = store, holder, seconds
        self._shown = float("-inf")

    def show(self) -> None:
        """Write that this one stands by, every third of the time.

        Raises:
            Refusal: busy, database_unreachable, no_space.
        """
        if time.monotonic() - self._shown < self._seconds / 3:
            return
        self._shown = time.monotonic()
        with self._store.transaction() as tx:
            values = {"holder": self._holder, "expires": format_time(tx.now() + timedelta(seconds=self._seconds))}
            mine = leases.c.name == self._NAME
            if tx.execute(update(leases).where(mine).values(**values)).rowcount == 0:
                tx.execute(insert(leases), {"name": self._NAME, "epoch": 0, **values})

    def another(self) -> bool:
        """Whether another stands by.

        Raises:
            Refusal: busy, database_unreachable.
        """
        with self._store.snapshot() as tx:
            row = tx.execute(select(leases).where(leases.c.name == self._NAME)).one_or_none()
            return row is not None and row.holder != self._holder and bool(row.expires > format_time(tx.now()))


class Renewal:
    """Renews a lease in a thread of its own, five times a lease's time, as long as whoever leads shows life.

    Args:
        lease: taken.
        patience: seconds without `alive` after which it is not renewed any more: a leader that hangs must not lead.

    Attributes:
        lost: the refusal by which it found that another leads; None as long as it did not.
    """

    def __init__(self, lease: Lease, *, patience: float) -> None:
        self._lease, self._patience = lease, patience
        self.lost: Refusal | None = None
        self._alive = time.monotonic()
        self._said = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def alive(self) -> None:
        """The leader is at work."""
        self._alive = time.monotonic()

    def stop(self) -> None:
        """Renew no more."""
        self._stop.set()
        self._thread.join()

    def _renew(self) -> None:
        while not self._stop.wait(self._lease.seconds / 5):
            hung = time.monotonic() - self._alive
            if hung > self._patience:
                self._say(f"the dispatcher's step has hung for more than {self._patience:.0f} s")
                continue
            try:
                self._lease.renew()
            except Refusal as refusal:
                self._say(f"{refusal.code}: {refusal.sentence}")
                if refusal.code == "lease_lost":
                    self.lost = refusal
                    return
            except Exception:
                self._say(traceback.format_exc())
            else:
                self._said = ""

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            say("lease not renewed", reason=reason)
