"""A round is the fold of its log records; this file is its only state machine. Server and auditor run the same function.

Rules that no reader may break:
- the order is seal → open → close → prepare → release → open the holdout → evaluate → publish, and TABLE is the whole of it;
- times are receipt times by the database's clock (`at`); an interval is half-open: opens ≤ at < closes;
- a record changes the round only if its signature verifies and its signer may sign it;
- RoundDefined authorizes the unsigned records in advance: they say when, never what, and every value in them is recomputed;
- nothing is accepted, refused or withdrawn after RoundClosed, and nothing is released before PreparationFinished.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from acclimate_competitions import digests, drawing, records
from acclimate_competitions.defining import begin, scorer_digest
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.guards import (
    agreed_to_void,
    bases_with,
    check_audit,
    require,
    require_baseline,
    require_micro_batch,
    secret_of,
)
from acclimate_competitions.metrics import MAJORITY
from acclimate_competitions.phases import Phase, Round, Submission, entries_root
from acclimate_competitions.records import Record, parse_time
from acclimate_competitions.untimely import too_late, wrong_phase

__all__ = ["LAPSE", "TABLE", "allowed", "apply", "audits_missing", "begin", "fold", "require_allowed", "scorer_digest"]

LAPSE = timedelta(days=30)
"""How long after `release_by` a round has lapsed: any custodian may void it alone, as long as fewer than k shares are released."""


def fold(numbered: Iterable[tuple[int, Record]], competition: Competition) -> Round:
    """The round that records (log index, record) lead to.

    Raises:
        Refusal: of the first record that the rules do not allow, with its log index in the sentence.
    """
    state: Round | None = None
    before = datetime.min.replace(tzinfo=UTC)
    for index, record in numbered:
        try:
            # Else a record dated ahead, to end a window early, hides behind a later one dated honestly.
            require(record.at >= before, f"{record.type} is dated before its predecessor", "log_inconsistent")
            before = record.at
            state = begin(record, competition) if state is None else apply(state, record, index=index)
        except Refusal as refusal:
            raise Refusal(refusal.code, f"log entry {index}: {refusal.sentence}", hint=refusal.hint) from refusal
    if state is None:
        raise Refusal("round_unknown", "there are no records of this round")
    return state


def apply(state: Round, record: Record, *, index: int) -> Round:
    """The round after one more record.

    Args:
        state: the round so far.
        record: a record with its receipt time.
        index: the log index that the record has or will have.

    Raises:
        Refusal: phase_wrong, too_early, round_closed, signature_invalid, guard_failed, seal_mismatch, share_false, …
    """
    require(record.round == state.id, f"the record is of round {record.round}, not {state.id}")
    if record.type not in TABLE or state.phase not in TABLE[record.type][0]:
        if record.type in _SUBMITTING and state.phase in _AFTER_OPEN:
            raise too_late(state, record)
        raise wrong_phase(state, record.type, allowed=allowed(state.phase))
    signers, change = TABLE[record.type][1:]
    if signers is not None:
        if record.by not in signers(state, record):
            raise Refusal(
                "signature_invalid", f"{record.type}: signed by {record.by}, a key that may not sign it in this round"
            )
        records.verify(record)
    after = change(state, record, index)
    if after.phase != state.phase:
        after = replace(after, phases=(*state.phases, (after.phase, record.at)))
    return after


def allowed(phase: Phase) -> list[str]:
    """Record types that a phase takes."""
    return [name for name, (phases, _, _) in TABLE.items() if phase in phases]


def require_allowed(state: Round, kind: str) -> None:
    """Refuse a type of record that the round's phase does not take, before one is made.

    Raises:
        Refusal: phase_wrong.
    """
    if kind not in allowed(state.phase):
        raise wrong_phase(state, kind, allowed=allowed(state.phase))


# ---- what each record does -----------------------------------------------------------------------------------------


def _seal(state: Round, record: Record, index: int) -> Round:
    names = [custodian["name"] for custodian in state.defined["custodians"]]
    shares = record["shares"]
    require(
        [s["index"] for s in shares] == list(range(1, len(names) + 1)),
        "the seal must have one share a custodian, in order",
    )
    require([s["to"] for s in shares] == names, "the seal's shares go to others than the custodians")
    return replace(state, phase=Phase.SEALED, seal=record)


def _acknowledge(state: Round, record: Record, index: int) -> Round:
    share = _own_share(state, record)
    require(record["commitment"] == share["commitment"], "the acknowledged commitment is not the seal's", "share_false")
    return replace(state, acknowledged=state.acknowledged | {share["index"]})


def _open(state: Round, record: Record, index: int) -> Round:
    assert state.seal is not None
    require(record["seal"] == state.seal["seal"], "RoundOpened names another seal", "seal_mismatch")
    have, need = len(state.acknowledged), state.acknowledgements_needed
    require(have >= need, f"{have} custodians acknowledged their share, {need} must")
    if record.at < state.opens:
        raise Refusal("too_early", f"the round opens {state.defined['opens']}, it is {records.format_time(record.at)}")
    return replace(state, phase=Phase.OPEN)


def _extend(state: Round, record: Record, index: int) -> Round:
    _before_close(state, record)
    closes = parse_time(record["closes"])
    latest = state.defined["closes_latest"]
    hint = (
        f"a close moves later, and until {latest} at most: `acclimate round create --closes-latest` fixes that for good"
    )
    require(
        closes > state.closes,
        f"the closing time may only move later than {records.format_time(state.closes)}",
        hint=hint,
    )
    require(closes <= parse_time(latest), f"the closing time may not move beyond closes_latest, {latest}", hint=hint)
    return replace(state, closes=closes)


def _register(state: Round, record: Record, index: int) -> Round:
    _before_close(state, record)
    name, key = record["entrant"], record["ed25519"]
    records.public_key(key)
    once = "an entrant registers once a round, and the conflicts declared then stand in the log; tell the organizer of one that came up later"
    require(name not in state.entrants, f"entrant {name!r} is registered already", "conflict", hint=once)
    require(key not in state.entrants.values(), "this key is registered by another entrant", "conflict")
    organizer = record.by == state.defined["organizer"]["ed25519"]
    require(name != MAJORITY, f"{MAJORITY!r} is the null predictor, which has no model", "name_taken")
    baseline = "baseline" in record["conflicts"]
    require_baseline(state.competition, name, baseline=baseline)
    require(baseline == organizer, "baselines, and only they, are registered by the organizer")
    require(baseline or record.by == key, "an entrant registers its own key", "signature_invalid")
    return replace(
        state,
        entrants={**state.entrants, name: key},
        baselines=state.baselines | ({name} if baseline else set()),
        unranked=state.unranked | ({name} if record["conflicts"] else set()),
    )


def _commit(state: Round, record: Record, index: int) -> Round:
    _before_close(state, record)
    commitment = record["commitment"]
    require(digests.is_digest(commitment), "a commitment is a sha256 digest", "record_invalid")
    require(commitment not in state.submissions, "this commitment is in the log already", "conflict")
    submission = Submission(record["entrant"], commitment, index)
    return replace(state, submissions={**state.submissions, commitment: submission})


def _accept(state: Round, record: Record, index: int) -> Round:
    commitment = record["commitment"]
    submission = state.submissions.get(commitment)
    if submission is None:
        _before_close(state, record)
        submission = Submission(record["entrant"], commitment, None)
    elif record.at >= state.last_acceptance:
        raise too_late(state, record)
    require(
        submission.entrant == record["entrant"], "another entrant committed to this submission", "signature_invalid"
    )
    require(
        submission.accepted is None and not submission.ended,
        "this submission was accepted, refused or withdrawn before",
        "conflict",
    )
    return replace(state, submissions={**state.submissions, commitment: replace(submission, accepted=index)})


def _refuse(state: Round, record: Record, index: int) -> Round:
    # For as long as it could be accepted: after that it is forfeited, whatever the check says.
    if record.at >= state.last_acceptance:
        raise too_late(state, record)
    submission = state.submissions.get(record["commitment"])
    if submission is None or submission.entrant != record["entrant"]:
        raise Refusal("submission_unknown", f"entrant {record['entrant']!r} has no submission with this commitment")
    require(
        submission.accepted is None and not submission.ended,
        "this submission was accepted, refused or withdrawn before",
        "conflict",
    )
    return replace(state, submissions={**state.submissions, submission.commitment: replace(submission, refused=True)})


def _withdraw(state: Round, record: Record, index: int) -> Round:
    _before_close(state, record)
    submission = state.submissions.get(record["commitment"])
    if submission is None or submission.entrant != record["entrant"]:
        raise Refusal("submission_unknown", "the entrant has no submission with this commitment")
    require(not submission.ended, "this submission was refused or withdrawn before", "conflict")
    return replace(state, submissions={**state.submissions, submission.commitment: replace(submission, withdrawn=True)})


def _close(state: Round, record: Record, index: int) -> Round:
    earliest = state.last_acceptance if state.outstanding else state.closes
    if record.at < earliest:
        raise Refusal(
            "too_early", f"the round closes {records.format_time(earliest)}, it is {records.format_time(record.at)}"
        )
    entries = state.frozen_entries()
    require(
        record["count"] == len(entries), f"RoundClosed counts {record['count']} entries, the log has {len(entries)}"
    )
    require(record["entries_root"] == entries_root(entries), "RoundClosed has another root of the entries")
    require(
        record["forfeited"] == state.forfeited(), "RoundClosed has another count or root of the forfeited commitments"
    )
    preparations = state.planned_preparations(entries)
    return replace(state, phase=Phase.CLOSED, closed=record, entries=entries, preparations=preparations)


def _prepare(state: Round, record: Record, index: int) -> Round:
    key = (record["submission"], record["task"], record["seed"])
    require(key in state.preparations, f"the plan has no preparation {key}")
    require(key not in state.prepared, f"preparation {key} is in the log already", "conflict")
    require(record["recipe"] == state.defined["recipe"], "prepared by another recipe")
    require(record["code"] == state.defined["code"], "prepared by other code")
    given = {"prepared", "candidates", "selected"} & set(record.fields)
    require(
        len(given) == (0 if "failed" in record.fields else 3),
        "either failed, or prepared, candidates and selected",
        "record_invalid",
    )
    require(
        "failed" not in record.fields or "diverged" not in record.fields,
        "a preparation that failed gave no model: `diverged` says why the base counts as prepared",
        "record_invalid",
    )
    bases = bases_with(state, record)
    require_micro_batch(state, record)
    return replace(state, prepared=state.prepared.plus(key, record), bases=bases)


def _finish_preparation(state: Round, record: Record, index: int) -> Round:
    left = len(state.preparations) - len(state.prepared)
    require(left == 0, f"{left} preparations have no outcome yet")
    _check_count_and_root(record, state.prepared_leaves)
    if state.prepared:
        window_ends = max(r.at for r in state.prepared.values()) + state.competition.round.objection_window
        if record.at < window_ends:
            raise Refusal("too_early", f"the objection window ends {records.format_time(window_ends)}")
    return replace(state, phase=Phase.PREPARED, finished=record, models=state.planned_evaluations())


def _draw(state: Round, record: Record, index: int) -> Round:
    assert state.auditor is not None
    assert state.finished is not None
    require(state.drawn is None, "the jobs were drawn before", "conflict")
    secret = secret_of(record["secret"])
    require(digests.of_bytes(secret) == state.auditor["draw"], "the secret is not the one that RoundDefined commits to")
    plan = state.preparation_plan()
    seed = drawing.job_seed(secret, state.finished.encode())
    chosen = drawing.numbers(seed, count=state.competition.round.audits, of=len(plan))
    return replace(state, drawn=tuple(plan[number] for number in chosen))


def _audit(state: Round, record: Record, index: int) -> Round:
    key = (record["submission"], record["task"], record["seed"])
    require(state.drawn is not None and key in state.drawn, f"preparation {key} was not drawn for a re-run")
    require(key not in state.audited, f"preparation {key} was audited before", "conflict")
    check_audit(record, state.prepared[key], declared=state.competition.round.audit_tolerance)
    return replace(state, audited={**state.audited, key: record})


def _release(state: Round, record: Record, index: int) -> Round:
    # A round without audits has none due, and its drawn jobs are none.
    missing = audits_missing(state)
    require(not missing, f"no share before the audits: {missing}")
    share = _own_share(state, record)
    if record["document"] != share["commitment"]:
        raise Refusal("share_false", f"the share of {share['to']} does not match its commitment in the seal")
    released = {**state.released, share["index"]: record["document"]}
    return replace(state, released=released, phase=Phase.RELEASED if len(released) >= state.threshold else state.phase)


def _open_holdout(state: Round, record: Record, index: int) -> Round:
    assert state.seal is not None
    require(
        record["row_root"] == state.seal["row_root"],
        "what was opened has other rows than what was sealed",
        "seal_mismatch",
    )
    return replace(state, phase=Phase.OPENED, opened=record)


def _evaluate(state: Round, record: Record, index: int) -> Round:
    key = (record["submission"], record["task"], record["seed"], record["protocol"])
    require(key in state.models, f"the plan has no evaluation {key}")
    require(key not in state.evaluated, f"evaluation {key} is in the log already", "conflict")
    require(record["prepared"] == state.models[key], f"evaluation {key} used another model than the one prepared")
    return replace(state, evaluated=state.evaluated.plus(key, record))


def _finish_evaluation(state: Round, record: Record, index: int) -> Round:
    left = len(state.models) - len(state.evaluated)
    require(left == 0, f"{left} evaluations have no outcome yet")
    _check_count_and_root(record, state.evaluated_leaves)
    return replace(state, phase=Phase.EVALUATED)


def _publish(state: Round, record: Record, index: int) -> Round:
    if record.by not in _organizer(state, record):
        moment = state.publishes_itself
        assert moment is not None, "no evaluator may sign it then"
        if record.at < moment:
            when = records.format_time(moment)
            raise Refusal("too_early", f"the ranking is its organizer's to publish until {when}")
        require(not record["reason"], "a ranking that publishes itself gives no reason")
    return _ranked(state, record)


def _ranked(state: Round, record: Record) -> Round:
    require(record["policy"] == state.defined["policy"], "the ranking was made by another policy than the round's")
    rankings = (*state.rankings, (record["ranking"], record["reason"]))
    corrections = (*state.corrections, record.fields.get("correction", ""))
    return replace(state, phase=Phase.PUBLISHED, rankings=rankings, corrections=corrections)


def _revise(state: Round, record: Record, index: int) -> Round:
    require(bool(record["reason"]), "a revision gives its reason")
    return _ranked(state, record)


def _report(state: Round, record: Record, index: int) -> Round:
    require(record["ranking"] == state.rankings[-1][0], "the report is of another ranking than the newest")
    return replace(state, reports=(*state.reports, record))


def _void(state: Round, record: Record, index: int) -> Round:
    require(bool(record["reason"]), "voiding a round gives its reason")
    by_custodian = record.by not in _organizer(state, record)
    # An approval ages with the phase: what was agreed to before the ranking was known must not void the ranking.
    phase = record.fields.get("phase")
    require(not by_custodian or phase is not None, "a custodian's voiding names the phase that the round is in")
    require(
        phase in (None, state.phase),
        f"this voiding, and whoever approved it, is of a round in phase {phase}; {state.id} is in phase {state.phase}",
    )
    # Only here do the custodians keep the round waiting; before, the organizer would be the one who waits.
    custody_failure = state.phase is Phase.PREPARED and record.at >= parse_time(state.defined["release_by"])
    # The close counts, not RoundClosed: between the two stands the grace, and the organizer may know who submitted.
    closed = state.closed is not None or (state.phase is Phase.OPEN and record.at >= state.closes)
    # Fewer than k may be left. Never so once k shares are out: scores may be known then, and `at` is the server's word.
    unread = len(state.released) < state.threshold
    lapsed = by_custodian and unread and record.at >= parse_time(state.defined["release_by"]) + LAPSE
    if not lapsed and (by_custodian or (closed and not custody_failure)):
        count = len(agreed_to_void(state, record))
        which = "without the organizer" if by_custodian else "after the close"
        alone = f"; {LAPSE.days} days after release_by, {state.defined['release_by']}, any custodian may void it alone"
        require(
            count >= state.threshold,
            f"{which} {state.threshold} custodians must agree to a voiding, {count} did{alone if unread else ''}",
        )
    return replace(state, phase=Phase.VOIDED)


def audits_missing(state: Round) -> str:
    """What still stands between the drawn re-runs and the release, in words; empty where nothing does.

    A re-run that does not agree is not outvoted by another: only a voiding leads on from it.
    """
    due = state.audits_due
    if not due:
        return ""
    if state.drawn is None:
        return f"the auditor has not drawn the {due} preparations to make again"
    if wrong := [key for key, record in state.audited.items() if not record["agrees"]]:
        return f"the re-run of preparation {wrong[0]} does not agree"
    left = len(state.drawn) - len(state.audited)
    return f"{left} of the {due} drawn re-runs have no outcome yet" if left else ""


# ---- shared conditions ---------------------------------------------------------------------------------------------


def _before_close(state: Round, record: Record) -> None:
    if record.at >= state.closes:
        raise too_late(state, record)


def _own_share(state: Round, record: Record) -> Mapping[str, Any]:
    assert state.seal is not None
    require(record["seal"] == state.seal["seal"], f"{record.type} names another seal", "seal_mismatch")
    index = state.custodian_index(record.by)
    require(record["index"] == index, f"share {record['index']} is not this custodian's", "signature_invalid")
    share: Mapping[str, Any] = state.seal["shares"][record["index"] - 1]
    return share


def _check_count_and_root(record: Record, leaves: tuple[bytes, ...]) -> None:
    require(record["count"] == len(leaves), f"{record.type} counts {record['count']}, the log has {len(leaves)}")
    require(record["root"] == digests.root_of_leaves(leaves), f"{record.type} has another root than its records")


def _auditor(state: Round, record: Record) -> set[str]:
    return {state.auditor["ed25519"]} if state.auditor is not None else set()


def _organizer(state: Round, record: Record) -> set[str]:
    return {state.defined["organizer"]["ed25519"]}


def _custodians(state: Round, record: Record) -> set[str]:
    return {custodian["ed25519"] for custodian in state.defined["custodians"]}


def _voiders(state: Round, record: Record) -> set[str]:
    # Before the seal there is nothing that custodians hold.
    return _organizer(state, record) | (_custodians(state, record) if state.phase is not Phase.DRAFT else set())


def _publishers(state: Round, record: Record) -> set[str]:
    # The organizer in any case: whatever hinders the server's own publication must not keep a ranking from being published.
    return _organizer(state, record) | (_evaluators(state, record) if state.publishes_itself is not None else set())


def _evaluators(state: Round, record: Record) -> set[str]:
    return set(state.defined["evaluators"])


def _registrant(state: Round, record: Record) -> set[str]:
    return {record["ed25519"]} | _organizer(state, record)


def _entrant(state: Round, record: Record) -> set[str]:
    if record["entrant"] not in state.entrants:
        raise Refusal("entrant_unknown", f"entrant {record['entrant']!r} is not registered for round {state.id}")
    return {state.entrants[record["entrant"]]}


_Signers = Callable[[Round, Record], set[str]]
_Change = Callable[[Round, Record, int], Round]
_BEFORE_PUBLISHED = frozenset(Phase) - {Phase.PUBLISHED, Phase.VOIDED}
_AFTER_OPEN = frozenset(Phase) - {Phase.DRAFT, Phase.SEALED, Phase.OPEN, Phase.VOIDED}
_SUBMITTING = frozenset(
    "EntrantRegistered SubmissionCommitted SubmissionAccepted SubmissionRefused SubmissionWithdrawn ClosingExtended".split()
)

# record type -> (phases that take it, who may sign it (None: RoundDefined authorized it), what it does)
TABLE: dict[str, tuple[frozenset[Phase], _Signers | None, _Change]] = {
    "HoldoutSealed": (frozenset({Phase.DRAFT}), _organizer, _seal),
    "ShareAcknowledged": (frozenset({Phase.SEALED, Phase.OPEN}), _custodians, _acknowledge),
    "RoundOpened": (frozenset({Phase.SEALED}), None, _open),
    "ClosingExtended": (frozenset({Phase.OPEN}), _organizer, _extend),
    "EntrantRegistered": (frozenset({Phase.OPEN}), _registrant, _register),
    "SubmissionCommitted": (frozenset({Phase.OPEN}), _entrant, _commit),
    "SubmissionAccepted": (frozenset({Phase.OPEN}), _entrant, _accept),
    "SubmissionRefused": (frozenset({Phase.OPEN}), _evaluators, _refuse),
    "SubmissionWithdrawn": (frozenset({Phase.OPEN}), _entrant, _withdraw),
    "RoundClosed": (frozenset({Phase.OPEN}), None, _close),
    "ModelPrepared": (frozenset({Phase.CLOSED}), _evaluators, _prepare),
    "PreparationFinished": (frozenset({Phase.CLOSED}), None, _finish_preparation),
    "AuditDrawn": (frozenset({Phase.PREPARED}), _auditor, _draw),
    "PreparationAudited": (frozenset({Phase.PREPARED}), _auditor, _audit),
    "ShareReleased": (frozenset({Phase.PREPARED}), _custodians, _release),
    "HoldoutOpened": (frozenset({Phase.RELEASED}), None, _open_holdout),
    "ModelEvaluated": (frozenset({Phase.OPENED}), _evaluators, _evaluate),
    "EvaluationFinished": (frozenset({Phase.OPENED}), None, _finish_evaluation),
    "RankingPublished": (frozenset({Phase.EVALUATED}), _publishers, _publish),
    "RankingRevised": (frozenset({Phase.PUBLISHED}), _organizer, _revise),
    "RoundAudited": (frozenset({Phase.PUBLISHED}), _auditor, _report),
    "RoundVoided": (_BEFORE_PUBLISHED, _voiders, _void),
}
