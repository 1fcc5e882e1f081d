"""What is said of a record that comes too early or too late, to people who know what they wanted to do and not what its record is called."""

from collections.abc import Sequence

from acclimate_competitions import records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import Record

WORDS = {
    "HoldoutSealed": "the seal of the holdout",
    "ShareAcknowledged": "the acknowledgement of a share",
    "RoundOpened": "the round's opening",
    "ClosingExtended": "a later close",
    "EntrantRegistered": "an entrant's registration",
    "SubmissionCommitted": "a submission",
    "SubmissionAccepted": "the acceptance of a submission",
    "SubmissionRefused": "the refusal of a submission",
    "SubmissionWithdrawn": "the withdrawal of a submission",
    "RoundClosed": "the round's close",
    "ModelPrepared": "a preparation",
    "PreparationFinished": "the end of the preparations",
    "AuditDrawn": "the auditor's draw",
    "PreparationAudited": "the re-run of a preparation",
    "ShareReleased": "the release of a share",
    "HoldoutOpened": "the opened holdout",
    "ModelEvaluated": "an evaluation",
    "EvaluationFinished": "the end of the evaluations",
    "RankingPublished": "the ranking",
    "RankingRevised": "a new version of the ranking",
    "RoundAudited": "the auditor's report",
    "RoundVoided": "the voiding of the round",
}
"""Each type of record that a round takes, in words."""

# What a phase waits for, for whoever came too early or too late.
_NEXT = {
    Phase.DRAFT: "the organizer seals the holdout next",
    Phase.SEALED: "custodians acknowledge their shares and rehearse; then the round opens",
    Phase.OPEN: "entrants submit until the round closes",
    Phase.CLOSED: "the entries are prepared; then custodians release their shares",
    Phase.PREPARED: "the auditor, where one is named, makes drawn preparations again; custodians release their shares; then the holdout is opened and the entries are evaluated",
    Phase.RELEASED: "the holdout is opened; then the entries are evaluated",
    Phase.OPENED: "the entries are evaluated; then the organizer publishes the ranking, or, where the definition says so, the round itself does",
    Phase.EVALUATED: "the organizer publishes the ranking next, or, where the definition says so, the round itself does",
    Phase.PUBLISHED: "the ranking is published; its organizer may revise it, with a reason, and the round's auditor report on it",
    Phase.VOIDED: "nothing follows: the round is void",
}
_NOT_OPEN_YET = (
    "the close moves only once the round is open; if it would pass before, void the round (acclimate round void) and create it again with a"
    " later close, under another --name"
)
_NEXT_ROUND = "who came late enters the competition's next round"
_LATE = {
    "ClosingExtended": f"the close moves only before it passes; {_NEXT_ROUND}",
    "EntrantRegistered": f"{_NEXT_ROUND}: acclimate round list --server URL",
    "SubmissionCommitted": f"what was committed to before counts; {_NEXT_ROUND}: acclimate round list --server URL",
    "SubmissionAccepted": f"what was accepted before counts; {_NEXT_ROUND}: acclimate round list --server URL",
    "SubmissionWithdrawn": "it can be withdrawn until the close only; what was accepted stays in the round: tell the organizer why it should not count",
}


def told(kind: str) -> str:
    """A type of record in words, with its name for who reads the protocol."""
    return f"{WORDS[kind]} ({kind})" if kind in WORDS else kind


def wrong_phase(state: Round, kind: str, *, allowed: Sequence[str]) -> Refusal:
    """The refusal of a record that the round's phase does not take.

    Args:
        state: the round.
        kind: the type of the record.
        allowed: the types that the phase takes.
    """
    now = ", ".join(WORDS[name] for name in allowed) or "nothing"
    early = kind == "ClosingExtended" and state.phase in (Phase.DRAFT, Phase.SEALED)
    return Refusal(
        "phase_wrong",
        f"{state.id} is {state.phase} and does not take {told(kind)}; it takes now: {now}",
        hint=_NOT_OPEN_YET if early else _NEXT[state.phase],
    )


def too_late(state: Round, record: Record) -> Refusal:
    """The refusal of what came once the round had closed."""
    closes = records.format_time(state.closes)
    return Refusal(
        "round_closed",
        f"the round closed {closes}, {told(record.type)} was received {records.format_time(record.at)}",
        hint=_LATE.get(record.type, ""),
    )
