"""The life of stages and attempts, which only the leading dispatcher writes (and who ends a round).

A stage: pending → starting → running → verifying → committed, failed (the entrant's outcome), blocked (ours, until an operator
acts) or cancelled. It is written down once all that it needs is there, so pending means ready.

An attempt is some stages of one entry that are done together. Each try of it has a fence of its own, which is committed before a runner
hears of it; every change of state says for which attempt and fence, so what an earlier try comes to changes nothing. Each change adds
an event (event_history.py) in its own transaction.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import bindparam, case, func, insert, or_, select, update

from acclimate import retries
from acclimate.assignments import Assignment, Held
from acclimate.retries import Ended
from acclimate.schedule import PINNED, UNMET
from acclimate.store import Store, Tx, attempts, events, stages, timestamp
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time, parse_time

STATES = ("pending", "starting", "running", "verifying", "committed", "failed", "blocked", "cancelled")
UNDER_WAY = ("starting", "running", "verifying")
"""A stage or a try of an attempt that somebody is at."""
GIVEN_UP = "given_up"
"""Code of the release of what is not tried again: its next try ends at once, as its entrant's outcome."""
_PART = 500
_LONGEST_REASON = 2000
_NEWEST = 20
"""Ends in a row that are looked at: by then the wait has its largest bound."""


def resume(tx: Tx, *, epoch: int, code: str, outlives: bool) -> None:
    """What a new leader does first: what was under way is pending again, and so is what waited for this version's code.

    Args:
        tx: of the leader.
        epoch: of its lease.
        code: the digest of its code.
        outlives: whether attempts go on where their dispatcher ends, and so may be adopted.
    """
    for row in tx.execute(select(attempts).where(attempts.c.state.in_(UNDER_WAY))).all():
        lost(tx, row, epoch=epoch, reason="its dispatcher ended", adoptable=outlives, code="dispatcher_lost")
    # Rows of a release that wrote no attempts.
    tx.execute(update(stages).where(stages.c.state.in_(UNDER_WAY)).values(state="pending", progress=0.0))
    # By how the reason begins: it names both codes.
    mine = (stages.c.state == "blocked") & stages.c.reason.startswith(f"{PINNED}{code}", autoescape=True)
    for row in tx.execute(select(stages).where(mine)).all():
        release(tx, row.key, epoch=epoch)
    # What no machine could take is judged anew, by the pool that this dispatcher sees.
    tx.execute(update(stages).where(_unmet()).values(reason=""))


def lost(tx: Tx, row: Any, *, epoch: int, reason: str, adoptable: bool, code: str = "runner_lost") -> None:
    """A try that nobody here follows any more: its stages are pending, and it may be adopted under its fence if it goes on somewhere."""
    state = "lost" if adoptable else "given_back"
    _end(tx, row, state=state, code=code, reason=reason)
    _note(tx, row, "given_back", epoch=epoch, code=code, reason=reason)
    _to_pending(tx, row, charged=False, values={"reason": reason[:_LONGEST_REASON], "code": code})


def give_back(
    tx: Tx, held: Held, *, code: str, reason: str, draw: Callable[[float, float], float], machine: str = ""
) -> float:
    """A try that ended through no fault that counts: its stages are pending again; returns the seconds that they wait."""
    row = row_of(tx, held)
    if row is None or row.state not in UNDER_WAY:
        return 0.0
    _end(tx, row, state="given_back", code=code, reason=reason, machine=machine)
    _note(tx, row, "given_back", epoch=held.epoch, code=code, reason=reason, machine=machine)
    wait = retries.rest(_newest_ends(tx, row.attempt), draw=draw)
    later = format_time(tx.now() + timedelta(seconds=wait)) if wait else None
    values = {"reason": reason[:_LONGEST_REASON], "code": code, "not_before": later}
    _to_pending(tx, row, charged=False, values=values)
    return wait


def strays(tx: Tx, known: Collection[str]) -> list[Any]:
    """The tries that are written down as under way and are none of these attempts; for the leader, whose writes are fenced.

    A claim may be committed although the connection broke before its leader heard of it, and giving back may fail with the database.
    """
    query = select(attempts).where(attempts.c.state.in_(UNDER_WAY), attempts.c.attempt.not_in(list(known)))
    return list(tx.execute(query).all())


def end_lost(store: Store, *, epoch: int) -> int:
    """End the lost tries that nobody will take up, as no stage of theirs waits any more: of a voided round, of a withdrawn submission.

    Raises:
        Refusal: busy, no_space, lease_lost, database_unreachable.
    """
    waiting = select(stages.c.key).where(
        stages.c.attempt == attempts.c.attempt, stages.c.state.in_(("pending", "blocked"))
    )
    query = select(attempts).where(attempts.c.state == "lost", ~waiting.exists())
    with store.snapshot() as tx:
        if not tx.execute(query.limit(1)).all():
            return 0
    with store.transaction() as tx:
        rows = list(tx.execute(query).all())
        for row in rows:
            _end(tx, row, state="cancelled", code="cancelled", reason="nobody waits for it any more")
            _note(tx, row, "cancelled", epoch=epoch, code="cancelled")
    return len(rows)


def without_room(tx: Tx, attempt: str) -> int:
    """How many tries of an attempt, since an operator last let it go, found no room on a disk."""
    mine = (attempts.c.attempt == attempt) & (attempts.c.code == "no_space")
    mine &= attempts.c.fence > _released(tx, attempt)
    return int(tx.execute(select(func.count()).where(mine)).scalar_one())


def _released(tx: Tx, attempt: str) -> int:
    """The fence at which an operator last let an attempt go; 0 where nobody did."""
    since = select(func.max(events.c.fence)).where(events.c.attempt == attempt, events.c.event == "released")
    return int(tx.execute(since).scalar() or 0)


def _newest_ends(tx: Tx, attempt: str) -> list[Ended]:
    """The newest tries of an attempt that have ended since an operator last let it go, in their order, without what is UNTOLD."""
    mine = (attempts.c.attempt == attempt) & (attempts.c.fence > _released(tx, attempt))
    mine &= attempts.c.ended.is_not(None) & attempts.c.code.not_in(list(retries.UNTOLD))
    rows = tx.execute(select(attempts).where(mine).order_by(attempts.c.fence.desc()).limit(_NEWEST)).all()
    return [
        Ended(row.code, row.machine, (parse_time(row.ended) - parse_time(row.claimed)).total_seconds())
        for row in reversed(rows)
    ]


def waiting(tx: Tx) -> dict[str, tuple[float, list[Ended]]]:
    """What a new leader must know of the attempts that wait: for how many seconds yet, by the database's clock, and how they failed."""
    now, pending = tx.now(), stages.c.state == "pending"
    later = select(stages.c.attempt, func.max(stages.c.not_before).label("until"))
    later = later.where(pending, stages.c.not_before > format_time(now)).group_by(stages.c.attempt)
    until = {row.attempt: (parse_time(row.until) - now).total_seconds() for row in tx.execute(later)}
    failed = select(stages.c.attempt).distinct().join(attempts, attempts.c.attempt == stages.c.attempt)
    found = set(tx.execute(failed.where(pending, attempts.c.state == "failed")).scalars())
    return {name: (until.get(name, 0.0), failures(tx, name)) for name in found | until.keys()}


def adoptable(tx: Tx) -> dict[str, int]:
    """Attempt -> fence of its lost try, which may go on somewhere."""
    query = select(attempts.c.attempt, attempts.c.fence).where(attempts.c.state == "lost").order_by(attempts.c.fence)
    return {row.attempt: row.fence for row in tx.execute(query)}


def register(store: Store, wanted: Iterable[Assignment]) -> dict[str, str]:
    """Write down the stages that are new, so that everyone sees what is to be done, and in which order; key -> state of all."""
    wanted = list(wanted)
    places = {assignment.attempt: number for number, assignment in enumerate(wanted, start=1)}
    planned = {stage.key: (assignment, stage) for assignment in wanted for stage in assignment.stages}
    # Of whole rounds, in one question for all: thousands of keys are too much to ask for twice a second.
    of_rounds = select(stages.c.key, stages.c.state).where(stages.c.round.in_({one.round for one in wanted}))
    with store.snapshot() as tx:
        known: dict[str, str] = {row.key: row.state for row in tx.execute(of_rounds)}
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
            "place": places[assignment.attempt],
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


def claim(tx: Tx, wanted: Sequence[Assignment], *, epoch: int) -> list[Held | None]:
    """Pending stages to starting, for a new try of each attempt under a fence of its own; None for one whose stages are not all pending."""
    names, keys = [one.attempt for one in wanted], [stage.key for one in wanted for stage in one.stages]
    known: dict[str, Any] = {}
    for part in _parts(keys):
        query = select(stages.c.key, stages.c.state, stages.c.fence).where(stages.c.key.in_(part))
        known |= {row.key: row for row in tx.execute(query)}
    newest = select(attempts.c.attempt, func.max(attempts.c.fence).label("fence")).where(attempts.c.attempt.in_(names))
    fences = {row.attempt: row.fence for row in tx.execute(newest.group_by(attempts.c.attempt))}
    failed = select(attempts.c.attempt).where(attempts.c.attempt.in_(names), attempts.c.state == "failed")
    tried = set(tx.execute(failed).scalars())
    found: list[Held | None] = []
    for one in wanted:
        # Taken out: what one of them claims is pending for none after it.
        rows = [known.pop(stage.key, None) for stage in one.stages]
        if not rows or any(row is None or row.state != "pending" for row in rows):
            found.append(None)
            continue
        fence = max(fences.get(one.attempt, 0), *(row.fence for row in rows)) + 1
        found.append(Held(_fitted(tx, one) if one.attempt in tried else one, fence=fence, epoch=epoch))
    claimed = [held for held in found if held is not None]
    if claimed:
        _begin(tx, claimed)
    return found


def _begin(tx: Tx, claimed: Sequence[Held]) -> None:
    at = timestamp(tx)
    # What was lost and not found again is superseded.
    earlier = attempts.c.attempt.in_([held.assignment.attempt for held in claimed]) & (attempts.c.state == "lost")
    tx.execute(update(attempts).where(earlier).values(state="given_back"))
    rows = [
        {
            "attempt": held.assignment.attempt,
            "fence": held.fence,
            "round": held.assignment.round,
            "submission": held.assignment.submission,
            "kind": held.assignment.kind,
            "stages": sorted(stage.key for stage in held.assignment.stages),
            "state": "starting",
            "epoch": held.epoch,
            "claimed": at,
        }
        for held in claimed
    ]
    tx.execute(insert(attempts), rows)
    tx.execute(insert(events), [_event(tx, held, "claimed") for held in claimed])
    _hold(tx, claimed, state="starting")


def _fitted(tx: Tx, assignment: Assignment) -> Assignment:
    """The assignment with the micro-batch of its next or lost try: the whole batch, halved for each try that ran out of memory."""
    short = retries.shortages(failures(tx, assignment.attempt)) if assignment.halvings else 0
    return assignment.halved(short) if short else assignment


def newest_fence(tx: Tx, assignment: Assignment) -> int:
    """The fence of an attempt's newest try; 0 where there was none."""
    used = select(func.max(attempts.c.fence)).where(attempts.c.attempt == assignment.attempt)
    return int(tx.execute(used).scalar() or 0)


def adopt(tx: Tx, assignment: Assignment, *, fence: int, epoch: int) -> Held | None:
    """Take up a lost try under its own fence; None where its stages are not all pending, or are of another try by now."""
    held = Held(_fitted(tx, assignment), fence=fence, epoch=epoch)
    row, keys = row_of(tx, held), [stage.key for stage in assignment.stages]
    if row is None or row.state != "lost" or set(states_of(tx, keys).values()) != {"pending"}:
        return None
    mine = (attempts.c.attempt == row.attempt) & (attempts.c.fence == row.fence)
    tx.execute(update(attempts).where(mine).values(state="running", code="", reason="", ended=None))
    _note(tx, row, "adopted", epoch=epoch)
    _hold(tx, [held], state="running")
    return held


def started(tx: Tx, begun: Sequence[tuple[Held, str]]) -> None:
    """The children of these tries run, each on the machine of this name."""
    states = _states_of_tries(tx, [held for held, _ in begun])
    new = [(held, machine) for held, machine in begun if _is(states, held, ("starting",))]
    if new:
        own = (attempts.c.attempt == bindparam("of")) & (attempts.c.fence == bindparam("under"))
        statement = update(attempts).where(own).values(state="running", machine=bindparam("on"))
        given = [{"of": held.assignment.attempt, "under": held.fence, "on": machine} for held, machine in new]
        tx.execute(statement, given)
        tx.execute(insert(events), [_event(tx, held, "running", machine=machine) for held, machine in new])
    statement = update(stages).where(_OWN, stages.c.state == "starting").values(state="running")
    tx.execute(statement, [owned for held, _ in begun for owned in _owned(held)])


def verifying(tx: Tx, done: Sequence[Held]) -> None:
    """These are done, and what they gave back is being read and scored."""
    statement = update(stages).where(_OWN, _OPEN).values(state="verifying", progress=1.0, heartbeat=timestamp(tx))
    tx.execute(statement, [owned for held in done for owned in _owned(held)])


def committed(tx: Tx, done: Sequence[Held]) -> None:
    """What these came to is on the record: in the transaction that puts it there.

    Raises:
        Refusal: conflict, where one of these tries is not its attempt's own any more.
    """
    states = _states_of_tries(tx, done)
    for held in done:
        if not _is(states, held, UNDER_WAY):
            raise Refusal("conflict", f"try {held.fence} of attempt {held.assignment.attempt} is over")
    own = (attempts.c.attempt == bindparam("of")) & (attempts.c.fence == bindparam("under"))
    statement = update(attempts).where(own).values(state="committed", code="", reason="", ended=timestamp(tx))
    tx.execute(statement, [{"of": held.assignment.attempt, "under": held.fence} for held in done])
    tx.execute(insert(events), [_event(tx, held, "committed") for held in done])


def holds(tx: Tx, held: Held) -> bool:
    """Whether all stages of a try are still its own, as they were when it was claimed."""
    keys = [stage.key for stage in held.assignment.stages]
    mine = select(stages.c.key).where(_mine(held), stages.c.key.in_(keys))
    return len(tx.execute(mine).all()) == len(keys)


def failures(tx: Tx, attempt: str) -> list[Ended]:
    """The tries of an attempt that failed since an operator last let it go, in their order; what doesn't count is not among them.

    Those that ran out of memory before are there as past: the micro-batch that they led to is the attempt's for good.
    """
    mine, since = (attempts.c.attempt == attempt) & (attempts.c.state == "failed"), _released(tx, attempt)
    mine &= (attempts.c.fence > since) | attempts.c.code.in_(retries.SHORT)
    query = select(attempts.c.code, attempts.c.machine, attempts.c.fence).where(mine).order_by(attempts.c.fence)
    return [Ended(row.code, row.machine, past=row.fence <= since) for row in tx.execute(query)]


def try_again(tx: Tx, held: Held, ended: Ended, *, reason: str, wait: float) -> None:
    """A try that failed: its stages are pending, and wait so many seconds."""
    row = row_of(tx, held)
    if row is None or row.state not in UNDER_WAY:
        return
    _end(tx, row, state="failed", code=ended.code, reason=reason, machine=ended.machine)
    _note(tx, row, "again", epoch=held.epoch, code=ended.code, reason=reason, machine=ended.machine)
    later = format_time(tx.now() + timedelta(seconds=wait))
    _to_pending(
        tx, row, charged=True, values={"reason": reason[:_LONGEST_REASON], "code": ended.code, "not_before": later}
    )


def block(tx: Tx, held: Held, *, code: str, reason: str, machine: str = "") -> None:
    """Stages that can't be done until an operator acts; the try that showed it is over."""
    row, words = row_of(tx, held), reason[:_LONGEST_REASON]
    if row is not None and row.state in UNDER_WAY:
        _end(tx, row, state="failed", code=code, reason=reason, machine=machine)
    tx.execute(insert(events), _event(tx, held, "blocked", code=code, reason=reason, machine=machine))
    keys = [stage.key for stage in held.assignment.stages]
    for part in _parts(keys):
        mine = stages.c.key.in_(part) & stages.c.state.in_((*UNDER_WAY, "pending"))
        tx.execute(
            update(stages).where(mine).values(state="blocked", reason=words, code=code, attempt=held.assignment.attempt)
        )


def release(tx: Tx, key: str, *, epoch: int, code: str = "", reason: str = "") -> bool:
    """Let a blocked stage, and all that are blocked with it, go on, with no try counted; whether it was blocked.

    Args:
        tx: of the leader.
        key: of the stage.
        epoch: of its lease.
        code: GIVEN_UP, where it is not to be tried again but to come to its end; empty otherwise.
        reason: the organizer's.
    """
    row = tx.execute(select(stages).where(stages.c.key == key, stages.c.state == "blocked")).one_or_none()
    if row is None:
        return False
    if code == GIVEN_UP and (row.attempt is None or row.code in retries.NEVER_GIVEN_UP):
        # What no attempt is known of, no event can say to be given up: let go, it would be tried again. The other was blocked anew since.
        return False
    together = stages.c.state == "blocked"
    together &= stages.c.attempt == row.attempt if row.attempt is not None else stages.c.key == key
    tx.execute(
        update(stages).where(together).values(state="pending", attempts=0, code=None, reason="", not_before=None)
    )
    if row.attempt is not None:
        _note(tx, row, "released", epoch=epoch, code=code, reason=reason)
    return True


def cancel(tx: Tx, held: Held, *, reason: str) -> None:
    """A try that nobody waits for any more; what its stages come to is said by whoever ended their reason to be."""
    row = row_of(tx, held)
    if row is not None and row.state in UNDER_WAY:
        _end(tx, row, state="cancelled", code="cancelled", reason=reason)
        _note(tx, row, "cancelled", epoch=held.epoch, code="cancelled", reason=reason)
        _to_pending(tx, row, charged=False, values={})


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


def beat(tx: Tx, beats: Sequence[tuple[Held, float, float]]) -> None:
    """Running attempts' progress (0 to 1), and their last signs of life, so many seconds ago."""
    now = tx.now()
    told = [
        owned | {"share": min(1.0, progress), "at": format_time(now - timedelta(seconds=silent))}
        for held, progress, silent in beats
        for owned in _owned(held)
    ]
    statement = update(stages).where(_OWN, _OPEN).values(progress=bindparam("share"), heartbeat=bindparam("at"))
    tx.execute(statement, told)


def _parts(items: list[str]) -> Iterator[list[str]]:
    # SQLite takes a limited number of values in one statement.
    for start in range(0, len(items), _PART):
        yield items[start : start + _PART]


def _mine(held: Held) -> Any:
    """The stages that a try holds: no other's, whoever claimed them since."""
    # By their keys first, as only those have an index: a round has thousands.
    keys = stages.c.key.in_([stage.key for stage in held.assignment.stages])
    mine = keys & (stages.c.attempt == held.assignment.attempt) & (stages.c.fence == held.fence)
    return mine & stages.c.state.in_(UNDER_WAY)


_OWN = (
    (stages.c.key == bindparam("own")) & (stages.c.attempt == bindparam("of")) & (stages.c.fence == bindparam("under"))
)
"""A stage of _owned: for one statement over the stages of many tries."""
_OPEN = or_(*(stages.c.state == state for state in UNDER_WAY))


def _owned(held: Held) -> list[dict[str, Any]]:
    """What _OWN is given for each stage of a try."""
    return [{"own": stage.key, "of": held.assignment.attempt, "under": held.fence} for stage in held.assignment.stages]


def _hold(tx: Tx, claimed: Sequence[Held], *, state: str) -> None:
    values: dict[str, Any] = {"attempt": bindparam("of"), "fence": bindparam("under"), "state": state}
    values |= {"heartbeat": timestamp(tx), "progress": 0.0, "not_before": None, "attempts": stages.c.attempts + 1}
    statement = update(stages).where(stages.c.key == bindparam("own")).values(**values)
    tx.execute(statement, [owned for held in claimed for owned in _owned(held)])


def _states_of_tries(tx: Tx, tries: Sequence[Held]) -> dict[tuple[str, int], str]:
    """(attempt, fence) -> state of all tries of these attempts."""
    query = select(attempts.c.attempt, attempts.c.fence, attempts.c.state)
    found = tx.execute(query.where(attempts.c.attempt.in_([held.assignment.attempt for held in tries])))
    return {(row.attempt, row.fence): row.state for row in found}


def _is(states: Mapping[tuple[str, int], str], held: Held, wanted: Collection[str]) -> bool:
    return states.get((held.assignment.attempt, held.fence)) in wanted


def row_of(tx: Tx, held: Held) -> Any:
    """A try as it is written down; None where it isn't."""
    mine = (attempts.c.attempt == held.assignment.attempt) & (attempts.c.fence == held.fence)
    return tx.execute(select(attempts).where(mine)).one_or_none()


def _end(tx: Tx, row: Any, *, state: str, code: str, reason: str, machine: str = "") -> None:
    mine = (attempts.c.attempt == row.attempt) & (attempts.c.fence == row.fence)
    values = {"state": state, "code": code, "reason": reason[:_LONGEST_REASON], "ended": timestamp(tx)}
    tx.execute(update(attempts).where(mine).values(**values, **({"machine": machine} if machine else {})))


def _to_pending(tx: Tx, row: Any, *, charged: bool, values: Mapping[str, Any]) -> None:
    fewer = stages.c.attempts if charged else case((stages.c.attempts > 0, stages.c.attempts - 1), else_=0)
    mine = stages.c.key.in_(row.stages) & stages.c.state.in_(UNDER_WAY)
    mine &= (stages.c.attempt == row.attempt) & (stages.c.fence == row.fence)
    tx.execute(update(stages).where(mine).values(state="pending", attempts=fewer, progress=0.0, **values))


def _note(tx: Tx, row: Any, event: str, *, epoch: int, code: str = "", reason: str = "", machine: str = "") -> None:
    values = {name: getattr(row, name) for name in ("round", "kind", "submission", "attempt", "fence")}
    values |= {"at": timestamp(tx), "epoch": epoch, "event": event}
    tx.execute(insert(events), values | {"code": code, "reason": reason[:_LONGEST_REASON], "machine": machine})


def _event(tx: Tx, held: Held, event: str, *, code: str = "", reason: str = "", machine: str = "") -> dict[str, Any]:
    """The row of an event of a try."""
    assignment = held.assignment
    values: dict[str, Any] = {"round": assignment.round, "kind": assignment.kind, "submission": assignment.submission}
    values |= {"attempt": assignment.attempt, "fence": held.fence, "epoch": held.epoch, "event": event}
    return values | {"at": timestamp(tx), "code": code, "reason": reason[:_LONGEST_REASON], "machine": machine}
