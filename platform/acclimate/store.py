"""Transactions: what happened. SQLite (WAL) as the embedded default, PostgreSQL; every decision by the database's clock.

A round's records live in the log; its state is their fold (rounds.py), kept in memory up to the last record seen. Whoever
appends does so in the transaction of the record's effect, and the fold is advanced for others only after the commit.
"""

import copy
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, func, insert, select

from acclimate import config, database, migrations
from acclimate.clocks import Clocks
from acclimate.schema import (
    accounts,
    attempts,
    cosignatures,
    events,
    installation,
    invitations,
    leases,
    log_checkpoints,
    log_entries,
    metadata,
    openings,
    outbox,
    pools,
    quota_ledger,
    results,
    rounds,
    seals,
    share_documents,
    stages,
    submissions,
    uploads,
    wishes,
)
from acclimate.turns import Batch, Turns
from acclimate_competitions import definition, digests, records
from acclimate_competitions import rounds as machine
from acclimate_competitions.errors import Refusal
from acclimate_competitions.ledger import Ledger
from acclimate_competitions.phases import Round
from acclimate_competitions.records import Record, format_time, parse_time
from acclimate_runners.blobs import Blobs, blobs_at

__all__ = [
    "Store",
    "Tx",
    "accounts",
    "attempts",
    "cosignatures",
    "events",
    "installation",
    "invitations",
    "leases",
    "log_checkpoints",
    "log_entries",
    "metadata",
    "openings",
    "outbox",
    "pools",
    "quota_ledger",
    "results",
    "rounds",
    "seals",
    "share_documents",
    "stages",
    "submissions",
    "timestamp",
    "unsigned",
    "uploads",
    "wishes",
]

RECALL_SECONDS = 60.0
"""For how long what was seen of a round is taken for so: a database that was put back must not be missed for good."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Folded:
    """A round's state after the log entry `last` of digest `entry`, and which statements it holds (statement digest -> index)."""

    state: Round
    last: int
    entry: bytes
    statements: Ledger[str, int]


class _Folds:
    """The newest state of each round that this process has folded, for all views of a store.

    A database may be put back under a running process: by a failover that loses what came last, or from a backup. So whoever uses a state
    compares its last entry, and drops it where the database has another one or none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _Folded] = {}
        # When each was kept, as a count of all that were; and when it was last compared with the database, by the monotonic clock.
        self._count, self._counts = 0, dict[str, int]()
        self._compared: dict[str, float] = {}

    def count(self) -> int:
        """How many were kept so far: what was kept before a transaction began can't be missing in it."""
        with self._lock:
            return self._count

    def of(self, round_id: str, *, within: float | None = None) -> _Folded | None:
        """What is kept of a round, if it was compared with the database within so many seconds."""
        with self._lock:
            if within is not None and time.monotonic() - self._compared.get(round_id, -within) >= within:
                return None
            return self._kept.get(round_id)

    def keep(self, found: Mapping[str, _Folded]) -> None:
        """Keep what is newer than what is kept."""
        with self._lock:
            for round_id, folded in found.items():
                kept = self._kept.get(round_id)
                if kept is None or kept.last < folded.last:
                    self._count += 1
                    self._kept[round_id], self._counts[round_id] = folded, self._count
                if kept is None or kept.last <= folded.last:
                    self._compared[round_id] = time.monotonic()

    def drop(self, round_id: str, folded: _Folded, *, until: int | None = None) -> None:
        """Drop a state that isn't the database's, if it was kept before `count` said so; a later one may just be news."""
        with self._lock:
            if self._kept.get(round_id) is folded and (until is None or self._counts[round_id] <= until):
                del self._kept[round_id]


class Store:
    """The database and the blobs of an installation; safe to share between threads, cheap to open in each process."""

    def __init__(self, engine: Engine, blobs: Blobs, *, clocks: Clocks | None = None) -> None:
        self.engine, self.blobs, self.clocks = engine, blobs, clocks
        self._writer = threading.Lock()
        self.folds = _Folds()
        self._turns = Turns(
            lambda: database.writing(engine),
            lambda batch: self.folds.keep(batch.folded),
            turn=self._writer,
            wait=lambda: database.WAIT_SECONDS,
        )
        self._competitions: dict[str, definition.Competition] = {}
        self._checks: tuple[Callable[[Tx], None], ...] = ()

    @classmethod
    def open(cls, settings: config.Settings, *, clock: database.Clock | None = None) -> "Store":
        """Open the store of a data folder, making it on first use.

        Args:
            settings: says where it is.
            clock: replaces the database's clock; for tests only.

        Raises:
            Refusal: data_version, config_invalid, database_unreachable, blobs_unreachable, no_space, busy.
        """
        config.claim(settings)
        engine = database.connect(settings.database, clock=clock)
        try:
            migrations.ready(engine)
            _private(settings.blobs)
            place = blobs_at(settings.blobs, endpoint=settings.blobs_endpoint, scratch=settings.work / "blobs")
            # Each process sweeps its own machine: nobody else can.
            place.sweep_local()
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, place, clocks=Clocks(behind=settings.clock_behind) if clock is None else None)

    def fenced(self, check: Callable[["Tx"], None]) -> "Store":
        """This store for who may lose the right to write: each transaction that may begins with `check`, beside those there were."""
        view = copy.copy(self)
        view._checks = (*self._checks, check)
        return view

    def close(self) -> None:
        """Give back all connections."""
        self.engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator["Tx"]:
        """A transaction that may write: all of it, or nothing where the block raises.

        Raises:
            Refusal: busy, no_space, database_unreachable.
        """
        with database.refusing(), self._turns.take() as batch:
            tx = Tx(self, batch.connection, batch=batch)
            for check in self._checks:
                check(tx)
            yield tx
            batch.folded, batch.tip = tx.folded, tx.tip

    @contextmanager
    def snapshot(self) -> Iterator["Tx"]:
        """A transaction that only reads, and sees one moment.

        Raises:
            Refusal: busy, database_unreachable.
        """
        with database.refusing():
            with database.reading(self.engine) as connection:
                tx = Tx(self, connection)
                yield tx
            self.folds.keep(tx.folded)

    def warm(self) -> None:
        """Fold every round once, outside any writing transaction, so that no request waits for it.

        Raises:
            Refusal: busy.
        """
        with self.snapshot() as tx:
            for name in tx.execute(select(rounds.c.id)).scalars().all():
                try:
                    tx.round(name)
                except Refusal as refusal:
                    # Its own requests are told so; the other rounds are served.
                    _log.warning("round %s can't be read: %s", name, refusal)

    def competition(self, digest: str) -> definition.Competition:
        """The competition of a stored definition.

        Raises:
            Refusal: blob_unknown, definition_invalid.
        """
        if digest not in self._competitions:
            self._competitions[digest] = definition.parse(self.blobs.read(digest))
        return self._competitions[digest]

    def recall(self, round_id: str) -> Round | None:
        """Where a round stood when this process last looked, within a minute; without a query, so only good for what can't change back."""
        folded = self.folds.of(round_id, within=RECALL_SECONDS)
        return folded.state if folded is not None else None


class Tx:
    """One transaction: SQL by `connection`, the log and the rounds by its methods."""

    def __init__(self, store: Store, connection: Connection, *, batch: Batch | None = None) -> None:
        self.store, self.connection = store, connection
        self.folded: dict[str, _Folded] = dict(batch.folded) if batch is not None else {}
        # Of a transaction that appended: nobody else does before its end.
        self.tip: tuple[int, datetime] | None = batch.tip if batch is not None else None
        self.stamp: str | None = None
        self._kept_before = store.folds.count()

    def now(self) -> datetime:
        """The database's clock."""
        return parse_time(database.now(self.connection))

    def execute(self, statement: Any, parameters: Any = None) -> Any:
        """Run one SQL statement."""
        return self.connection.execute(statement, parameters)

    def size(self) -> int:
        """How many entries the log has."""
        return int(self.execute(select(func.coalesce(func.max(log_entries.c.index) + 1, 0))).scalar_one())

    def entry(self, index: int) -> bytes:
        """The bytes of a log entry.

        Raises:
            Refusal: entry_unknown.
        """
        data = self.execute(select(log_entries.c.data).where(log_entries.c.index == index)).scalar()
        if data is None:
            raise Refusal("entry_unknown", f"the log has no entry {index}, its size is {self.size()}")
        return bytes(data)

    def entries(self, start: int, end: int) -> list[bytes]:
        """The bytes of the log entries start ≤ index < end."""
        query = select(log_entries.c.data).where(log_entries.c.index >= start, log_entries.c.index < end)
        return [bytes(data) for data in self.execute(query.order_by(log_entries.c.index)).scalars()]

    def records(self, round_id: str, *, start: int = 0, limit: int | None = None) -> list[tuple[int, Record]]:
        """A round's records with their log indices, in order: all from the log index `start` on, or the first `limit` of them."""
        query = select(log_entries.c.index, log_entries.c.data).where(log_entries.c.round == round_id)
        query = query.where(log_entries.c.index >= start).order_by(log_entries.c.index).limit(limit)
        return [(row.index, records.parse(bytes(row.data))) for row in self.execute(query)]

    def last(self, round_id: str) -> int:
        """The index of a round's newest record.

        Raises:
            Refusal: round_unknown.
        """
        return self._fold(round_id).last

    def round(self, round_id: str) -> Round:
        """Where a round stands in this transaction.

        Raises:
            Refusal: round_unknown.
        """
        return self._fold(round_id).state

    def append(self, request: Mapping[str, Any]) -> tuple[int, Record]:
        """Log one record, if the round's rules allow it now.

        The receipt time is the database's clock, and never earlier than the entry before, so that times follow the order of
        the log even where the clock was set back a little.

        Args:
            request: {type, round, fields} and, for signed ones, {by, sig}: what records.sign makes.

        Returns:
            The log index and the record.

        Raises:
            Refusal: whatever rounds.apply refuses; record_invalid; busy, where the clock can't be right.
        """
        return self.append_all([request])[0]

    def append_all(self, requests: Sequence[Mapping[str, Any]]) -> list[tuple[int, Record]]:
        """Log one record or more, as append does, under one receipt time; none where one of them is refused."""
        first, at = self.next_record()
        added, rows = list[tuple[int, Record]](), list[dict[str, Any]]()
        folded: dict[str, _Folded] = {}
        for index, request in enumerate(requests, start=first):
            record = _record(request, at)
            data = record.encode()
            if records.parse(data) != record:
                raise Refusal("record_invalid", f"{record.type} does not survive being written and read")
            if record.type == "RoundDefined":
                if self.find(request) is not None:
                    raise Refusal("round_exists", f"round {record.round} is in the log already")
                state = machine.begin(record, self.store.competition(record["definition"]))
                statements: Ledger[str, int] = Ledger()
            else:
                before = folded.get(record.round) or self._fold(record.round)
                state, statements = machine.apply(before.state, record, index=index), before.statements
            rows.append({"index": index, "round": record.round, "type": record.type, "data": data})
            folded[record.round] = _Folded(state, index, _short(data), _with(statements, record, index))
            added.append((index, record))
        self.execute(insert(log_entries), rows)
        self.folded |= folded
        self.tip = first + len(rows), at
        return added

    def next_record(self) -> tuple[int, datetime]:
        """The log index and the time that a record would get now.

        Raises:
            Refusal: busy, where the clock can't be right: nothing may be logged by it.
        """
        first, before_it = self.tip or self._tip()
        now = self.now()
        if self.store.clocks is not None:
            self.store.clocks.check(now, last=before_it if first else None)
        return first, max(now, before_it)

    def append_once(self, request: Mapping[str, Any]) -> tuple[int, Record, bool]:
        """Like append, but a record whose statement the log already holds is answered with the one that stands there.

        Returns:
            The log index, the record, and whether it is new.
        """
        index = self.find(request)
        if index is not None:
            return index, records.parse(self.entry(index)), False
        return *self.append(request), True

    def find(self, request: Mapping[str, Any]) -> int | None:
        """The index of the record that makes the same statement (type, round, fields, signer), if it is in the log."""
        record = _record(request, self.now())
        known = self.execute(select(log_entries.c.index).where(log_entries.c.round == record.round).limit(1)).first()
        return self._fold(record.round).statements.get(_statement(record)) if known else None

    def _tip(self) -> tuple[int, datetime]:
        index = self.size()
        return index, records.parse(self.entry(index - 1)).at if index else datetime.min.replace(tzinfo=UTC)

    def _fold(self, round_id: str) -> _Folded:
        if self.tip is not None and round_id in self.folded:
            return self.folded[round_id]
        folded = self.folded.get(round_id) or self.store.folds.of(round_id)
        query = select(log_entries.c.index, log_entries.c.data).where(log_entries.c.round == round_id)
        query = query.order_by(log_entries.c.index)
        rows = self.execute(query.where(log_entries.c.index >= (folded.last if folded is not None else 0))).all()
        there = bool(rows) and folded is not None and rows[0].index == folded.last
        if folded is not None and not (there and _short(bytes(rows[0].data)) == folded.entry):
            # Another entry there: the database was put back. None: the same, or what is kept comes from a later moment than this one.
            self.store.folds.drop(round_id, folded, until=None if there else self._kept_before)
            folded, rows = None, self.execute(query).all()
        elif folded is not None:
            rows = rows[1:]
        # Records of no round, such as a change of the log's key, stand under the empty name.
        if not round_id or (folded is None and not rows):
            raise Refusal(
                "round_unknown",
                f"there is no round {round_id!r}",
                hint="`acclimate round list --server URL` shows them all",
            )
        statements = folded.statements if folded is not None else Ledger()
        state, last = (folded.state, folded.last) if folded is not None else (None, -1)
        for row in rows:
            record = records.parse(bytes(row.data))
            if state is None:
                state = machine.begin(record, self.store.competition(record["definition"]))
            else:
                state = machine.apply(state, record, index=row.index)
            statements, last = _with(statements, record, row.index), row.index
        assert state is not None
        if rows or folded is None:
            folded = _Folded(state, last, _short(bytes(rows[-1].data)), statements)
        self.folded[round_id] = folded
        return folded


def _private(place: str) -> None:
    """Make a folder of blobs for its owner alone; one that exists keeps its mode."""
    if "://" not in place:
        try:
            Path(place).mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise Refusal(
                "blobs_unreachable",
                f"the folder of blobs {place} can't be made: {error.strerror or error}",
                hint="choose another with --blobs or ACCLIMATE_BLOBS, or make it writable",
            ) from error


def unsigned(kind: str, round_id: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The request for a record that RoundDefined authorizes in advance, for Tx.append."""
    return {"type": kind, "round": round_id, "fields": dict(fields)}


def _record(request: Mapping[str, Any], at: datetime) -> Record:
    kind, fields = request.get("type"), request.get("fields")
    if not isinstance(kind, str) or not isinstance(fields, Mapping) or not isinstance(request.get("round"), str):
        raise Refusal("record_invalid", "a record needs type, round and fields")
    if kind == "LogKeyRotated":
        raise Refusal(
            "record_invalid", f"{kind} is of no round: only `acclimate log rotate` logs it (service/hand_over.py)"
        )
    records.check_fields(kind, fields, signed=request.get("sig") is not None)
    round_id = records.round_id_of(fields) if kind == "RoundDefined" else request["round"]
    if round_id != request["round"]:
        raise Refusal("record_invalid", f"the content gives round {round_id}, the request names {request['round']}")
    return Record(kind, round_id, at, dict(fields), by=request.get("by"), sig=request.get("sig"))


def _with(statements: Ledger[str, int], record: Record, index: int) -> Ledger[str, int]:
    """These and a record's; where the statement was made before, that one stands."""
    statement = _statement(record)
    return statements if statement in statements else statements.plus(statement, index)


def _statement(record: Record) -> str:
    document = records.assemble(record.type, record.round, record.fields, by=record.by)
    return digests.of_json(document)


def _short(entry: bytes) -> bytes:
    return hashlib.sha256(entry).digest()


def timestamp(tx: Tx) -> str:
    """The database's clock as text, for the `created` and `at` columns: one moment for all that a transaction writes."""
    if tx.stamp is None:
        tx.stamp = format_time(tx.now())
    return tx.stamp
