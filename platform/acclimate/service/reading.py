"""What anybody may read of a round: where it stands, what comes next, its records and stages."""

from datetime import datetime
from typing import Any

from sqlalchemy import func, select

from acclimate import cosignatures, schedule
from acclimate.quorum import Quorum
from acclimate.service import clockwork, finding, pools, release
from acclimate.service.accounts import Account
from acclimate.store import Store, Tx, log_entries, outbox, rounds, share_documents, stages, submissions
from acclimate_competitions import rounds as rules
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import format_time, parse_time
from acclimate_runners.placement import HAS

_WORKING = frozenset({Phase.OPEN, Phase.CLOSED, Phase.OPENED})
_ENDED = frozenset({"committed", "failed", "cancelled"})
_AGAIN = "an earlier try came to no result, and it is tried again; the round's organizer is told why"
_HELD = "it waits for the server's operator; the round's organizer is told why"


def rounds_list(store: Store) -> list[dict[str, Any]]:
    """All rounds, the newest first."""
    with store.snapshot() as tx:
        names = tx.execute(select(rounds.c.id).order_by(rounds.c.created.desc(), rounds.c.id)).scalars().all()
        return [_summary(tx, tx.round(name)) for name in names]


def _summary(tx: Tx, state: Round) -> dict[str, Any]:
    return {
        "round": state.id,
        "competition": state.competition.slug,
        "name": state.defined["name"],
        "title": state.competition.title,
        "phase": str(state.phase),
        "opens": state.defined["opens"],
        "closes": format_time(state.closes),
        "now": format_time(tx.now()),
        "data_is_public": state.competition.data_is_public,
        "entrants": len(set(state.entrants) - state.baselines),
        "submissions": len(state.submissions),
    }


def status(store: Store, account: Account | None, given: str) -> dict[str, Any]:
    """Where a round stands, what happens next and when, and what it waits for; what is wrong with machines only its organizer reads."""
    with store.snapshot() as tx:
        state = finding.find(tx, given)
        log = tx.execute(
            select(func.min(log_entries.c.index), func.max(log_entries.c.index)).where(log_entries.c.round == state.id)
        ).one()
        counting = select(stages.c.state, func.count()).where(stages.c.round == state.id)
        count = {row[0]: row[1] for row in tx.execute(counting.group_by(stages.c.state))}
        next_ = upcoming(tx, state, is_owner=finding.is_owner(tx, state.id, account))
        return {
            **_summary(tx, state),
            "closes_latest": state.defined["closes_latest"],
            "grace": state.defined["grace"],
            "release_by": state.defined["release_by"],
            "next": next_["text"],
            "next_at": next_["at"],
            "waiting_for": next_["waiting_for"],
            "problem": next_["problem"],
            "stages": count,
            "phases": [{"phase": str(phase), "at": format_time(at)} for phase, at in state.phases],
            "log": {"first": log[0], "last": log[1]},
            "cosigned": _cosigned(tx, state, last=log[1]),
            "definition": state.competition.digest,
            "organizer": state.defined["organizer"],
            "custodians": _custodians(state),
            "threshold": state.threshold,
            "auditor": _auditor(state),
            "baselines": list(state.competition.ranking.baselines),
            "rehearsal": _rehearsal(tx, state),
            "entries": len(state.entries) if state.closed is not None else None,
            "forfeited": state.closed["forfeited"]["count"] if state.closed is not None else None,
            "ranking": state.rankings[-1][0] if state.rankings else None,
            "versions": len(state.rankings),
            "tracked": _tracked(tx, state),
        }


def _tracked(tx: Tx, state: Round) -> bool:
    """Whether MLflow has the round's results as they stand (finishing.py)."""
    done = tx.execute(select(outbox.c.payload).where(outbox.c.round == state.id, outbox.c.run == "done")).scalars()
    return any(payload.get("kind") == "round" and payload["phase"] == str(state.phase) for payload in done)


def _custodians(state: Round) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "name": custodian["name"],
            "acknowledged": index in state.acknowledged,
            "released": index in state.released,
        }
        for index, custodian in enumerate(state.defined["custodians"], start=1)
    ]


def _auditor(state: Round) -> dict[str, Any] | None:
    if state.auditor is None:
        return None
    drawn, done = state.drawn or (), state.audited
    # What nobody made again agrees with nothing, though it keeps no share.
    lost = state.drawn_given_up
    return {
        "name": state.auditor["name"],
        "due": state.audits_due if state.closed is not None else state.competition.round.audits,
        "drawn": state.drawn is not None,
        "audited": len(done),
        "agree": sum(done[key]["agrees"] for key in drawn if key in done and key not in lost),
        "given_up": len(lost),
        "reports": len(state.reports),
    }


def _rehearsal(tx: Tx, state: Round) -> dict[str, Any] | None:
    row = release.newest_rehearsal(tx, state.id)
    if row is None:
        return None
    received = tx.execute(
        select(func.count()).select_from(share_documents).where(share_documents.c.seal == row.seal)
    ).scalar_one()
    return {"seal": row.seal, "received": received, "needed": state.threshold, "succeeded": row.succeeded}


def upcoming(tx: Tx, state: Round, *, is_owner: bool = False) -> dict[str, Any]:
    """What happens next: {text, at (time or None), waiting_for, problem (or None)}."""
    found = _upcoming(tx, state)
    if found["problem"] is not None:
        return found
    told = (look(tx, state, is_owner=is_owner) for look in (_unread, _blocked, _unmet, _idle))
    problem = next((problem for problem in told if problem is not None), None)
    if problem is not None and state.phase is Phase.OPEN:
        # The log knows no other end for it, whoever is at fault: so it is said while the close can still be moved.
        problem["sentence"] += f"; what is not checked by {format_time(state.last_acceptance)} is forfeited"
        problem["sentence"] += ", unless its organizer moves the close before it comes"
    return found | {"problem": problem}


def _cosigned(tx: Tx, state: Round, *, last: int) -> dict[str, Any] | None:
    """How far the round's witnesses have come; None where it asks for none.

    Returns:
        {quorum, witnesses: how many there are, size: entries of the newest checkpoint that the quorum cosigned, missing: records of the round
        beyond it, late: names of the witnesses that have not cosigned the last of its records}.
    """
    quorum = Quorum.of(state.defined.fields)
    if quorum.needed == 0:
        return None
    size, missing = cosignatures.newest(tx, quorum), 0
    if size <= last:
        mine = (log_entries.c.round == state.id) & (log_entries.c.index >= size)
        missing = int(tx.execute(select(func.count()).select_from(log_entries).where(mine)).scalar_one())
    late = [key.partition("+")[0] for key, done in cosignatures.sizes(tx, quorum.keys).items() if done <= last]
    counts = {"quorum": quorum.needed, "witnesses": len(quorum.witnesses), "size": size, "missing": missing}
    return {**counts, "late": late}


def reason_of(row_state: str, reason: str, *, is_owner: bool) -> str:
    """A stage's reason for whoever asks: of an outcome it is on the record, as is a voiding; any other may name hosts, addresses and folders."""
    if is_owner or not reason or row_state in _ENDED or reason.startswith(schedule.PINNED):
        return reason
    if reason.startswith(schedule.UNMET):
        return reason.partition(HAS)[0]
    return _HELD if row_state == "blocked" else _AGAIN


def _unread(tx: Tx, state: Round, *, is_owner: bool) -> dict[str, str] | None:
    """What of the opened holdout is lost here, for which the evaluations wait; its digest is for the organizer."""
    problem = release.opening_problem(tx, state.id) if state.phase is Phase.OPENED else None
    if problem is None:
        return None
    sentence = problem[1] if is_owner else f"{problem[1].partition(release.UNREAD)[0]}{release.UNREAD}"
    return {"code": problem[0], "sentence": sentence}


def _blocked(tx: Tx, state: Round, *, is_owner: bool) -> dict[str, str] | None:
    """What an operator must see to before the round can go on; of a check in an open round no more than that there is one."""
    mine = (stages.c.round == state.id) & (stages.c.state == "blocked")
    if state.phase not in _WORKING or (count := tx.execute(select(func.count()).where(mine)).scalar_one()) == 0:
        return None
    sentence = f"an operator must look at this: {count} stages are blocked"
    if not finding.hides_models(state):
        reason = tx.execute(select(stages.c.reason).where(mine).order_by(stages.c.key).limit(1)).scalar_one()
        sentence += f", one of them as {reason_of('blocked', reason, is_owner=is_owner)}"
    return {"code": "work_blocked", "sentence": sentence}


def _unmet(tx: Tx, state: Round, *, is_owner: bool) -> dict[str, str] | None:
    """Why no machine of the pool can take the round's work (stages.explain): it begins as soon as one joins that can."""
    mine = (stages.c.round == state.id) & (stages.c.state == "pending")
    reason = tx.execute(
        select(stages.c.reason).where(mine, stages.c.reason.startswith(schedule.UNMET, autoescape=True)).limit(1)
    ).scalar()
    if state.phase not in _WORKING or reason is None:
        return None
    told = reason_of("pending", reason, is_owner=is_owner)
    return {"code": "infeasible", "sentence": f"this waits for a machine that can take it: {told}"}


def _idle(tx: Tx, state: Round, *, is_owner: bool) -> dict[str, str] | None:
    """Why nothing is begun of the round's work that waits."""
    mine = (stages.c.round == state.id) & (stages.c.state == "pending")
    checking = (submissions.c.round == state.id) & (submissions.c.state == "checking")
    waiting = [select(stages.c.key).where(mine).limit(1)]
    waiting += [select(submissions.c.id).where(checking).limit(1)] if state.phase is Phase.OPEN else []
    if state.phase not in _WORKING or not any(tx.execute(one).first() for one in waiting):
        return None
    why = pools.idle(tx, is_organizer=is_owner)
    return {"code": "infeasible", "sentence": f"work waits, and none is begun: {why}"} if why else None


def _upcoming(tx: Tx, state: Round) -> dict[str, Any]:
    found: dict[str, Any] = {"at": None, "waiting_for": [], "problem": None}
    now = tx.now()
    match state.phase:
        case Phase.DRAFT:
            text = f"the organizer seals the holdout: acclimate round seal {state.id} FOLDER --keys DIR"
            if now >= state.closes:
                text = _never_opens(state)
            return found | {"text": text, "waiting_for": ["the sealed holdout"]}
        case Phase.SEALED:
            return found | _before_opening(tx, state, now)
        case Phase.OPEN:
            return found | _before_closing(state, now)
        case Phase.CLOSED:
            done, plan = len(state.prepared), len(state.preparations)
            return found | {"text": f"entries are prepared: {done} of {plan} preparations have an outcome"}
        case Phase.PREPARED if rules.audits_missing(state):
            return found | _before_audits(state, now)
        case Phase.PREPARED:
            return found | _before_release(state, now)
        case Phase.RELEASED:
            problem = release.opening_problem(tx, state.id)
            if problem is None:
                return found | {"text": "the holdout is opened and checked against the seal"}
            text = "the holdout did not open: the custodians void the round, with the organizer or without"
            if problem[0] in release.DAMAGED:
                text = "the holdout is opened once the organizer has uploaded the sealed holdout again"
            return found | {"text": text, "problem": {"code": problem[0], "sentence": problem[1]}}
        case Phase.OPENED:
            done, plan = len(state.evaluated), len(state.models)
            return found | {"text": f"entries are evaluated: {done} of {plan} evaluations have an outcome"}
        case Phase.EVALUATED:
            return found | _before_publication(tx, state, now)
        case Phase.PUBLISHED:
            if state.private and not any(report["ranking"] == state.rankings[-1][0] for report in state.reports):
                assert state.auditor is not None, "a private holdout needs an auditor"
                text = f"the ranking is published; the auditor reports on the whole bundle: acclimate audit report {state.id}"
                return found | {"text": text, "waiting_for": [f"the report of {state.auditor['name']}"]}
            return found | {"text": "nothing: the ranking is published"}
    return found | {"text": "nothing: the round is void"}


def _never_opens(state: Round) -> str:
    return (
        f"nothing: the closing time {format_time(state.closes)} passed before the round opened; the organizer voids it"
    )


def _before_opening(tx: Tx, state: Round, now: datetime) -> dict[str, Any]:
    missing = clockwork.missing_before_opening(tx, state)
    if now >= state.closes:
        return {"text": _never_opens(state), "waiting_for": missing}
    when = state.defined["opens"] if now < state.opens else "as soon as that is done"
    if missing:
        return {
            "text": f"the round opens {when}; before that: {'; '.join(missing)}",
            "at": state.defined["opens"],
            "waiting_for": missing,
        }
    return {"text": f"the round opens {state.defined['opens']}", "at": state.defined["opens"]}


def _before_closing(state: Round, now: datetime) -> dict[str, Any]:
    count = len(state.outstanding)
    if count and now >= state.closes:
        at = format_time(state.last_acceptance)
        return {"text": f"no more submissions; waiting for the checks of {count} committed ones until {at}", "at": at}
    at = format_time(state.closes)
    extra = f"; {count} committed submissions are still to be checked" if count else ""
    return {"text": f"the round closes {at}{extra}", "at": at}


def _before_audits(state: Round, now: datetime) -> dict[str, Any]:
    assert state.auditor is not None
    missing, name = rules.audits_missing(state), state.auditor["name"]
    by = parse_time(state.defined["release_by"])
    wrong = not all(record["agrees"] for record in state.audited.values())
    text = f"the auditor {name} makes drawn preparations again ({missing}): acclimate audit run {state.id} --keys DIR"
    sentence = ""
    if wrong:
        text = "no share may be released: the custodians void the round, with the organizer or without"
        sentence = f"{missing}, by {name}'s signed record"
    elif now >= by:
        sentence = f"{missing}, after {format_time(by)}: the organizer may void the round as a custody failure"
    return {
        "text": text,
        "at": format_time(by),
        "waiting_for": [] if wrong else [f"the re-runs of {name}"],
        "problem": {"code": "guard_failed", "sentence": sentence} if sentence else None,
    }


def _before_release(state: Round, now: datetime) -> dict[str, Any]:
    left = state.threshold - len(state.released)
    silent = [c["name"] for i, c in enumerate(state.defined["custodians"], start=1) if i not in state.released]
    by = parse_time(state.defined["release_by"])
    who = clockwork.any_of(left, silent)
    text = f"{who} must release their share, by {format_time(by)}: acclimate custodian release {state.id} --keys DIR"
    problem = None
    if now >= by:
        sentence = (
            f"{left} shares are missing after {format_time(by)}: the organizer may void the round as a custody failure"
        )
        problem = {"code": "guard_failed", "sentence": sentence}
    return {
        "text": text,
        "at": format_time(by),
        "waiting_for": [f"the share of {who}"],
        "problem": problem,
    }


def _before_publication(tx: Tx, state: Round, now: datetime) -> dict[str, Any]:
    text = f"the organizer publishes the ranking: acclimate round publish {state.id} --keys DIR"
    moment = state.publishes_itself
    if moment is None:
        return {"text": text, "waiting_for": ["the published ranking"]}
    if now < moment:
        at = format_time(moment)
        return {
            "text": f"{text}; it publishes itself at {at}",
            "at": at,
            "waiting_for": ["the published ranking"],
        }
    problem = release.opening_problem(tx, state.id)
    if problem is not None:
        return {"text": text, "problem": {"code": problem[0], "sentence": problem[1]}}
    return {"text": "the ranking publishes itself as soon as a second process has computed the same"}


def records(store: Store, given: str, *, start: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
    """[{index, record}] of a round, in the order of the log: all from the log index `start` on, or the first `limit` of them."""
    with store.snapshot() as tx:
        name = finding.row(tx, given).id
        found = tx.records(name, start=start, limit=limit)
        return [{"index": index, "record": record.document()} for index, record in found]


def definition(store: Store, given: str) -> bytes:
    """The bytes of a round's definition."""
    with store.snapshot() as tx:
        return finding.find(tx, given).competition.raw


def public_file(store: Store, given: str, name: str) -> str:
    """The digest of a public file that RoundDefined names.

    Raises:
        Refusal: not_found.
    """
    with store.snapshot() as tx:
        state = finding.find(tx, given)
    files = state.defined["files"]
    if name not in files:
        raise Refusal(
            "not_found",
            f"round {state.id} has no public file {name!r}",
            hint="it has " + ", ".join(sorted(files)),
        )
    return str(files[name])
