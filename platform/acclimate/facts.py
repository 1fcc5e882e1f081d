"""An installation in numbers: what health, metrics and `acclimate doctor` say of it. Sums over all rounds, nothing of one."""

import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import Column, func, select

from acclimate import cosignatures
from acclimate.quorum import Quorum
from acclimate.store import Store, Tx, accounts, leases, log_checkpoints, log_entries, pools, stages
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import parse_time

_UNREADABLE = "unreadable"
CLOCK_WARNS = 2.0
"""Seconds between a machine's clock and the database's that are worth a warning."""


@dataclass(frozen=True)
class LogFacts:
    """The log: entries, those that no checkpoint holds, and seconds since the newest checkpoint and the oldest unsigned entry."""

    entries: int
    unsigned: int
    checkpoint_age: float | None
    unsigned_age: float


@dataclass(frozen=True)
class CosignedFacts:
    """What witnesses cosigned.

    Attributes:
        witnesses: name -> entries of the newest checkpoint that it cosigned.
        size: entries of the newest one that the quorum cosigned.
        missing: entries that no such checkpoint holds.
        age: seconds since the oldest of them came; 0 where there is none.
    """

    witnesses: dict[str, int]
    size: int
    missing: int
    age: float


@dataclass(frozen=True)
class PoolFacts:
    """What the leading dispatcher last wrote of its pool; age in seconds."""

    machines: int
    slots: int
    problem: bool
    age: float


@dataclass(frozen=True)
class Facts:
    """One moment of an installation.

    Attributes:
        log: see there.
        rounds: phase -> how many; "unreadable" where a round can't be read.
        stages: state -> how many.
        accounts: role -> how many.
        lease: seconds for which a dispatcher leads, negative where its lease is over; None where none ever led.
        pool: None where no dispatcher wrote one.
        cosigned: None where the settings name no witnesses, or a quorum of 0.
    """

    log: LogFacts
    rounds: dict[str, int] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    accounts: dict[str, int] = field(default_factory=dict)
    lease: float | None = None
    pool: PoolFacts | None = None
    cosigned: CosignedFacts | None = None


class Phases:
    """Round -> phase, as last looked at. A phase moves by records only, so only rounds with new ones are looked at again."""

    def __init__(self) -> None:
        self._phases: dict[str, str] = {}
        self._size = 0

    def counted(self, tx: Tx) -> dict[str, int]:
        """Phase -> how many rounds; "unreadable" where one can't be read."""
        size = tx.size()
        if size < self._size:
            # Another log than the one before.
            self._phases, self._size = {}, 0
        # What is of no round, such as a change of the log's key, has the empty name.
        new = (log_entries.c.index >= self._size, log_entries.c.round != "")
        moved = select(log_entries.c.round).where(*new).distinct()
        unread = [name for name, phase in self._phases.items() if phase == _UNREADABLE]
        for name in {*tx.execute(moved).scalars(), *unread}:
            try:
                self._phases[name] = str(tx.round(name).phase)
            except Refusal:
                self._phases[name] = _UNREADABLE
        self._size = size
        return dict(Counter(self._phases.values()))


def read(store: Store, *, phases: Phases | None = None, quorum: Quorum | None = None) -> Facts:
    """The facts of now.

    Args:
        store: where from.
        phases: kept by whoever asks again and again.
        quorum: of the installation's witnesses; None where nobody asks for it.

    Raises:
        Refusal: busy, database_unreachable.
    """
    with store.snapshot() as tx:
        now = tx.now()
        return Facts(
            log=log_facts(tx, now),
            rounds=(phases or Phases()).counted(tx),
            stages=_counted(tx, stages.c.state),
            accounts=_counted(tx, accounts.c.role),
            lease=_lease(tx, now),
            pool=_pool(tx, now),
            cosigned=cosigned_facts(tx, quorum, now) if quorum is not None and quorum.needed else None,
        )


def log_facts(tx: Tx, now: datetime) -> LogFacts:
    """The log's facts in a transaction."""
    last = tx.execute(select(log_checkpoints).order_by(log_checkpoints.c.size.desc()).limit(1)).one_or_none()
    entries, signed = tx.size(), last.size if last is not None else 0
    unsigned_age = 0.0
    if entries > signed:
        unsigned_age = max(0.0, (now - records.parse(tx.entry(signed)).at).total_seconds())
    age = (now - parse_time(last.at)).total_seconds() if last is not None else None
    return LogFacts(entries, max(0, entries - signed), age, unsigned_age)


def cosigned_facts(tx: Tx, quorum: Quorum, now: datetime) -> CosignedFacts:
    """What witnesses cosigned, in a transaction."""
    size, entries, age = cosignatures.newest(tx, quorum), tx.size(), 0.0
    if entries > size:
        age = max(0.0, (now - records.parse(tx.entry(size)).at).total_seconds())
    found = cosignatures.sizes(tx, quorum.keys)
    names = {key.partition("+")[0]: has for key, has in found.items()}
    return CosignedFacts(names, size, max(0, entries - size), age)


def clock_offset(store: Store) -> float:
    """Seconds by which the database's clock is ahead of this machine's, within half of the time that asking takes.

    Raises:
        Refusal: busy, database_unreachable.
    """
    with store.snapshot() as tx:
        tx.now()
        before = time.time()
        now = tx.now()
        after = time.time()
    return now.timestamp() - (before + after) / 2


def clock_warning(offset: float) -> str:
    """What to say of the clocks; empty where they agree well enough."""
    if abs(offset) <= CLOCK_WARNS:
        return ""
    side = "ahead of" if offset > 0 else "behind"
    here = datetime.now(UTC).isoformat(timespec="seconds")
    return (
        f"the database's clock is {abs(offset):.1f} s {side} this machine's ({here}); decisions are by the database's: "
        "keep both in step with NTP"
    )


def unloggable(store: Store) -> str:
    """Why no record can be logged now, by the database's clock and the log's newest record, and what to do; empty where one can.

    Raises:
        Refusal: database_unreachable.
    """
    with store.snapshot() as tx:
        try:
            tx.next_record()
        except Refusal as refusal:
            if refusal.code == "database_unreachable":
                raise
            return refusal.sentence + (f" ({refusal.hint})" if refusal.hint else "")
    return ""


def _counted(tx: Tx, column: Column[str]) -> dict[str, int]:
    return {row[0]: int(row[1]) for row in tx.execute(select(column, func.count()).group_by(column))}


def _lease(tx: Tx, now: datetime) -> float | None:
    expires = tx.execute(select(leases.c.expires).where(leases.c.name == "dispatch")).scalar()
    return None if expires is None else (parse_time(expires) - now).total_seconds()


def _pool(tx: Tx, now: datetime) -> PoolFacts | None:
    row = tx.execute(select(pools).where(pools.c.name == "dispatch")).one_or_none()
    if row is None:
        return None
    age = (now - parse_time(row.at)).total_seconds()
    return PoolFacts(len(row.machines), row.slots, bool(row.problem), age)
