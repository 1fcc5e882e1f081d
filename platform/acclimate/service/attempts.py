"""What everybody may know of a round's stages and of the tries at them, and what its organizer asks of the dispatcher about them."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, insert, select

from acclimate import retries
from acclimate.retries import Ended
from acclimate.service import finding, names, reading
from acclimate.service import pools as machines
from acclimate.service.accounts import Account
from acclimate.store import Store, Tx, attempts, events, pools, stages, submissions, timestamp, wishes
from acclimate_competitions import recipe
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_competitions.records import format_time, parse_time

HISTORY = 500
"""Events of a stage that are told at most: a store that can't be reached for days makes thousands."""
LONGEST_REASON = 1000
"""Characters of the reason why work is given up: with who gave it up before them, they fit into a record."""
_NOBODY = "nobody waits for it any more"
_UNDER_WAY = frozenset({"starting", "running", "verifying"})
_DONE = frozenset({"committed", "failed"})


def stage_list(store: Store, account: Account | None, given: str) -> list[dict[str, Any]]:
    """The work of a round; whose submission a stage belongs to is hidden until the close, except from its own entrant.

    Returns:
        Of each stage {key, kind, entrant, task, seed, protocol, state, attempts, tries, progress, place, reason, code, heartbeat, not_before,
        expected, machine}: `attempts` are the tries that ended as the newest failure did, with the one that goes on or came to something,
        of `tries` that there will be at most (None: no end is set);
        `place` is that of its entry among those that wait, from 1; `expected` is when it should be done, by the pace of those that are.
        Where it runs only the round's organizer reads. Until the close the organizer reads neither whose a stage is nor the words of why it
        failed, which may tell of the model: only by which code, so as to know what to put right.
    """
    with store.snapshot() as tx:
        state = finding.find(tx, given)
        is_owner = finding.is_owner(tx, state.id, account)
        rows = _rows(tx, state)
        tried = {(row.attempt, row.fence): row for row in _telling(tx, state.id)}
        failed = _failed(tx, state.id, tried.values())
        outlook = _Outlook(tx, rows, tried)
        idle = machines.idle(tx, is_organizer=is_owner) if any(row.state == "pending" for row in rows) else ""
    hidden = finding.hides_models(state)
    result = []
    for row in rows:
        shown = not hidden or (account is not None and row.owner == account.id)
        newest = tried.get((row.attempt, row.fence))
        held = newest if row.state in _UNDER_WAY else None
        reason = reading.reason_of(row.state, row.reason, is_owner=is_owner) if shown else ""
        count, limit = _standing(state, row, failed.get(row.attempt, []))
        result.append(
            {
                "key": row.key,
                "kind": row.kind,
                "entrant": row.entrant if shown else None,
                "task": row.task,
                "seed": row.seed,
                "protocol": row.protocol,
                "state": row.state,
                "attempts": count,
                "tries": limit,
                "progress": row.progress,
                "place": outlook.place(row),
                "reason": reason or (idle if row.state == "pending" else ""),
                "code": (row.code or "") if shown or is_owner else "",
                "heartbeat": row.heartbeat,
                "not_before": row.not_before if row.state == "pending" else None,
                "expected": outlook.expected(row),
                "machine": held.machine if is_owner and held is not None else None,
            }
        )
    return result


def why(store: Store, account: Account | None, given: str, key: str) -> dict[str, Any]:
    """One stage, as stage_list shows it, with what happened to the tries at it.

    Args:
        store: the store.
        account: who asks.
        given: the round.
        key: of the stage, or any beginning of it that is unique in the round.

    Returns:
        {stage, history: [{at, event, fence, code, reason, machine}]}, the newest HISTORY events, the oldest first; reasons and machines as
        in stage_list.

    Raises:
        Refusal: round_unknown; not_found, for a key that no stage or more than one begins with.
    """
    listed = {stage["key"]: stage for stage in stage_list(store, account, given)}
    stage = listed[_the_one(listed, key)]
    with store.snapshot() as tx:
        is_owner = finding.is_owner(tx, finding.row(tx, given).id, account)
        mine = _attempts_of(tx, finding.row(tx, given).id, stage["key"])
        query = select(events).where(events.c.attempt.in_(mine)).order_by(events.c.id.desc()).limit(HISTORY)
        rows = list(reversed(tx.execute(query).all())) if mine else []
    told = stage["entrant"] is not None
    history = [
        {
            "at": row.at,
            "event": row.event,
            "fence": row.fence,
            "code": row.code if told or is_owner else "",
            "reason": _reason_of(row, is_owner=is_owner) if told else "",
            "machine": row.machine if is_owner else None,
        }
        for row in rows
    ]
    return {"stage": stage, "history": history}


def _the_one(keys: Iterable[str], given: str) -> str:
    """The key of a stage, by any beginning of it that no other has."""
    beginning = given if given.startswith("sha256:") else f"sha256:{given}"
    found = [key for key in keys if key.startswith(beginning)]
    if len(found) != 1:
        sentence = f"{len(found) or 'no'} stages of the round begin with {beginning!r}"
        raise Refusal("not_found", sentence, hint="acclimate stage list shows their keys")
    return found[0]


def failed_tries(store: Store, account: Account, given: str, key: str) -> list[Any]:
    """The tries at a stage, as rows of `attempts`, for whoever may read what their children said: that may hold words of a model or of the holdout.

    Args:
        store: the store.
        account: the round's organizer, who made the holdout, and from the close on knows the entries.
        given: the round.
        key: of the stage, or any beginning of it that is unique in the round.

    Returns:
        The oldest first.

    Raises:
        Refusal: round_unknown, not_found, role_missing; phase_wrong, before the close.
    """
    with store.snapshot() as tx:
        state = finding.find(tx, given)
        finding.require_owner(tx, state.id, account)
        if finding.hides_models(state):
            sentence = f"what was said of the entries of round {state.id} may tell of their models, which its organizer does not see before the close"
            raise Refusal("phase_wrong", sentence, hint="acclimate stage why tells by which code a try failed")
        keys = tx.execute(select(stages.c.key).where(stages.c.round == state.id)).scalars()
        mine = _attempts_of(tx, state.id, _the_one(keys, key))
        query = select(attempts).where(attempts.c.attempt.in_(mine)).order_by(attempts.c.claimed, attempts.c.fence)
        return list(tx.execute(query).all())


def _reason_of(event: Any, *, is_owner: bool) -> str:
    """An event's reason for whoever asks: what happened next, where the sentence itself may name hosts and folders."""
    if event.event == "cancelled" and event.reason and not is_owner:
        return _NOBODY
    given_up = event.event == "released" and event.code == "given_up"
    after = "failed" if given_up else "blocked" if event.event == "blocked" else "pending"
    return reading.reason_of(after, event.reason, is_owner=is_owner)


class _Outlook:
    """When what waits and runs should be done: by the median time of the round's attempts of the same kind that are."""

    def __init__(self, tx: Tx, rows: Sequence[Any], tried: Mapping[tuple[str, int], Any]) -> None:
        self._now, self._tried = tx.now(), tried
        took: dict[str, list[float]] = defaultdict(list)
        for one in tried.values():
            if one.state == "committed":
                took[one.kind].append((parse_time(one.ended) - parse_time(one.claimed)).total_seconds())
        self._median = {kind: statistics.median(found) for kind, found in took.items()}
        waiting = {(row.kind, row.submission): row.place for row in rows if row.state == "pending" and row.place}
        ordered = sorted(waiting, key=lambda entry: waiting[entry])
        self._places = {entry: number for number, entry in enumerate(ordered, start=1)}
        slots = tx.execute(select(pools.c.slots).where(pools.c.name == "dispatch")).scalar()
        self._slots = max(1, int(slots or 1))

    def place(self, row: Any) -> int | None:
        """Of its entry among those that wait."""
        return self._places.get((row.kind, row.submission)) if row.state == "pending" else None

    def expected(self, row: Any) -> str | None:
        """When it should be done; None where nothing of its kind is yet that one could go by, or it doesn't move."""
        pace, end = self._median.get(row.kind), None
        if row.state in _UNDER_WAY:
            end = self._running(row, pace)
        elif (place := self.place(row)) is not None and pace is not None:
            waves = (place - 1) // self._slots + 1
            end = self._now + timedelta(seconds=pace * (waves + 0.5))
        return None if end is None else format_time(end)

    def _running(self, row: Any, pace: float | None) -> datetime | None:
        one = self._tried.get((row.attempt, row.fence))
        if one is None:
            return None
        began = parse_time(one.claimed)
        if row.progress > 0.05:
            whole: timedelta = (self._now - began) / float(row.progress)
            return max(self._now, began + whole)
        return None if pace is None else max(self._now, began + timedelta(seconds=pace))


def _rows(tx: Tx, state: Round) -> list[Any]:
    found = tx.execute(
        select(stages, submissions.c.entrant, submissions.c.owner)
        .join(submissions, submissions.c.id == stages.c.submission)
        .where(stages.c.round == state.id)
        .order_by(
            submissions.c.committed_index,
            stages.c.kind,
            # Of its own accord PostgreSQL has them last, SQLite first.
            stages.c.task.nulls_first(),
            stages.c.seed.nulls_first(),
            stages.c.protocol.nulls_first(),
        )
    )
    return list(found.all())


def _telling(tx: Tx, round_id: str) -> list[Any]:
    """The tries of a round that say something: those that were given back are as many as there were outages."""
    mine = (attempts.c.round == round_id) & ((attempts.c.state != "given_back") | (attempts.c.code == "no_space"))
    return list(tx.execute(select(attempts).where(mine).order_by(attempts.c.fence)).all())


def _attempts_of(tx: Tx, round_id: str, key: str) -> list[str]:
    """The attempts that a stage was part of; each has a first try, whatever became of it."""
    oldest = select(attempts.c.attempt, func.min(attempts.c.fence).label("fence")).where(attempts.c.round == round_id)
    first = oldest.group_by(attempts.c.attempt).subquery()
    mine = (attempts.c.attempt == first.c.attempt) & (attempts.c.fence == first.c.fence)
    return [row.attempt for row in tx.execute(select(attempts).join(first, mine)).all() if key in row.stages]


def _failed(tx: Tx, round_id: str, tried: Iterable[Any]) -> dict[str, list[Ended]]:
    """Attempt -> its tries that failed or found no room since an operator last let it go, in their order, and as `failures` what is past."""
    query = select(events.c.attempt, func.max(events.c.fence).label("fence")).group_by(events.c.attempt)
    mine = (events.c.round == round_id) & (events.c.event == "released")
    since = {row.attempt: row.fence for row in tx.execute(query.where(mine))}
    found: dict[str, list[Ended]] = defaultdict(list)
    for row in tried:
        past = row.fence <= since.get(row.attempt, 0)
        if (row.state == "failed" or row.code == "no_space") and (row.code in retries.SHORT or not past):
            found[row.attempt].append(Ended(row.code, row.machine, past=past))
    return found


def _standing(state: Round, row: Any, failed: Sequence[Ended]) -> tuple[int, int | None]:
    """A stage's tries, and how many there will be at most."""
    begun = row.state in _UNDER_WAY or row.state in _DONE
    halvings = 0 if row.kind == "evaluate" else recipe.halvings(state.competition.preparation.global_batch)
    count, limit = retries.standing(failed, begun=begun, over=row.state == "blocked", halvings=halvings)
    return count, None if not limit or (row.code in retries.UNCHARGED and all(one.past for one in failed)) else limit


def retry(store: Store, account: Account, given: str, keys: Sequence[str]) -> dict[str, Any]:
    """Ask the leading dispatcher to try blocked stages again, with no try counted.

    Args:
        store: the store.
        account: the round's organizer.
        given: the round.
        keys: of stages; none for all that are blocked.

    Returns:
        {"round", "stages": keys of those asked for}.

    Raises:
        Refusal: role_missing; not_found, for a key that the round lacks; phase_wrong, for a stage that isn't blocked, or none.
    """
    with store.transaction() as tx:
        state, rows = _own_stages(tx, account, given)
        wanted = list(dict.fromkeys(keys)) or [key for key, row in rows.items() if row.state == "blocked"]
        if not wanted:
            sentence = f"no stage of round {state.id} is blocked"
            raise Refusal("phase_wrong", sentence, hint="all else is tried again by itself")
        _require_blocked(state, rows, wanted)
        return _ask(tx, state, wanted, wish="retry", account=account)


def give_up(store: Store, account: Account, given: str, keys: Sequence[str], *, reason: str) -> dict[str, Any]:
    """Ask the leading dispatcher to record blocked stages as failed, so that their round goes on without them.

    All stages that are done together end together: those that are blocked with the ones named.

    Args:
        store: the store.
        account: the round's organizer.
        given: the round.
        keys: of stages.
        reason: in words, for everybody to read.

    Returns:
        {"round", "stages": keys of those that will end}.

    Raises:
        Refusal: role_missing; not_found, for a key that the round lacks; phase_wrong, for a stage that isn't blocked, or that
            only waits for another version, lacks what the server must have, or was never tried by this one; name_invalid, for a reason that names.check refuses.
    """
    reason = names.check(reason.strip(), what="the reason", longest=LONGEST_REASON)
    with store.transaction() as tx:
        state, rows = _own_stages(tx, account, given)
        _require_blocked(state, rows, keys)
        for key in keys:
            _require_tried(state, rows[key])
        ending = {rows[key].attempt for key in keys}
        wanted = [key for key, row in rows.items() if row.state == "blocked" and row.attempt in ending]
        return _ask(tx, state, wanted, wish="give_up", account=account, reason=reason)


def _own_stages(tx: Tx, account: Account, given: str) -> tuple[Round, dict[str, Any]]:
    """An organizer's round, and key -> row of its stages."""
    state = finding.find(tx, given)
    finding.require_owner(tx, state.id, account)
    return state, {row.key: row for row in tx.execute(select(stages).where(stages.c.round == state.id)).all()}


def _require_blocked(state: Round, rows: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in rows:
            raise Refusal("not_found", f"round {state.id} has no stage {key}", hint="acclimate stage list shows them")
        if rows[key].state != "blocked":
            sentence = f"stage {key} is {rows[key].state}; only what is blocked waits for you"
            raise Refusal(
                "phase_wrong", sentence, hint=f"acclimate stage why {state.id} {key[:19]} tells what it waits for"
            )


def _require_tried(state: Round, row: Any) -> None:
    """Refuse to give up what nothing is wrong with, what no entrant can have caused, or what no try is known of."""
    if row.code == "code_pinned":
        sentence = f"stage {row.key} waits for another version of Acclimate; nothing is wrong with it"
        hint = "start the version with which the round was made: it takes the work up by itself"
        raise Refusal("phase_wrong", sentence, hint=hint)
    if row.code in retries.NEVER_GIVEN_UP:
        what = "room" if row.code == "no_space" else "a file that the server had"
        mended = "make room" if row.code == "no_space" else "put it back, from a backup or from who sent it"
        sentence = f"stage {row.key} lacks {what} ({row.code}): that is no fault of its entrant's, and can't end as their outcome"
        raise Refusal("phase_wrong", sentence, hint=f"{mended}, then: acclimate stage retry {state.id} {row.key[:19]}")
    if row.attempt is None:
        sentence = f"stage {row.key} was blocked by an older version, of which no try is written down"
        hint = f"acclimate stage retry {state.id} {row.key[:19]}; what is blocked again then can be given up"
        raise Refusal("phase_wrong", sentence, hint=hint)


def _ask(
    tx: Tx, state: Round, keys: Sequence[str], *, wish: str, account: Account, reason: str | None = None
) -> dict[str, Any]:
    """Write down what is asked for, where the same isn't asked for already."""
    open_ones = select(wishes.c.stage).where(wishes.c.round == state.id, wishes.c.wish == wish, wishes.c.done.is_(None))
    asked = set(tx.execute(open_ones).scalars())
    if new := [key for key in keys if key not in asked]:
        row = {"round": state.id, "wish": wish, "account": account.id, "at": timestamp(tx), "reason": reason}
        tx.execute(insert(wishes), [row | {"stage": key} for key in new])
    return {"round": state.id, "stages": sorted(keys)}
