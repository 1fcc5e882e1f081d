"""How long the entries of a round should take: by the pace that their checks measured, else by the size of their models.

Only the order of work and a plan's promise follow from it, no result.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Row, select

from acclimate.service import finding
from acclimate.service.accounts import Account
from acclimate.store import Store, Tx, results, stages, submissions
from acclimate_competitions.phases import Round

_PACE = 1e-4
"""Seconds of a whole preparation for each parameter, where no check of the round has measured any."""
_EVALUATION = 0.1
"""An evaluation's part of a preparation's time, a stage for a stage: it reads the holdout once, and only forwards."""


def expected(tx: Tx, round_id: str, rows: Iterable[Row[Any]]) -> dict[str, float]:
    """Submission -> seconds that preparing it for all tasks and seeds should take.

    Args:
        tx: for what the checks found.
        round_id: the round.
        rows: of the submissions; where a check has told nothing, the median pace of the others and the manifest's parameters do.
    """
    checked = (
        select(stages.c.submission, results.c.document)
        .join(results, results.c.stage == stages.c.key)
        .where(stages.c.round == round_id, stages.c.kind == "check")
    )
    told = {row.submission: row.document.get("forecast") for row in tx.execute(checked)}
    known = {submission: float(seconds) for submission, seconds in told.items() if seconds}
    sizes = {row.id: max(1.0, float(row.manifest["parameters"])) for row in rows}
    paces = [known[submission] / size for submission, size in sizes.items() if submission in known]
    pace = statistics.median(paces) if paces else _PACE
    return {submission: known.get(submission, size * pace) for submission, size in sizes.items()}


def of_preparations(seconds: float, state: Round, count: int) -> float:
    """Seconds of so many (task, seed) of an entry, of whom all should take so many."""
    return seconds * count / max(1, _all(state))


def of_evaluations(seconds: float, state: Round, count: int) -> float:
    """Seconds of so many evaluations of an entry whose preparations should take so many."""
    return _EVALUATION * seconds * count / max(1, _all(state))


def _all(state: Round) -> int:
    return len(state.competition.tasks) * len(state.competition.preparation.seeds)


def forecast(store: Store, account: Account | None, given: str) -> dict[str, Any]:
    """What a round's work should take, without saying whose it is, for `acclimate plan`.

    Returns:
        {round, entries, preparations, evaluations}: of each entry, or would-be entry before the close, the seconds of its attempt, the
        longest first. Before the close, and of a round that was voided before, only its organizer is told: they tell how large models are.

    Raises:
        Refusal: round_unknown.
    """
    with store.snapshot() as tx:
        state = finding.find(tx, given)
        entries = state.entries if state.closed is not None else state.frozen_entries()
        mine = {entry.commitment for entry in entries}
        found = tx.execute(select(submissions).where(submissions.c.round == state.id)).all()
        rows = [row for row in found if row.commitment in mine]
        shown = not finding.hides_models(state) or finding.is_owner(tx, state.id, account)
        seconds = _sorted(expected(tx, state.id, rows)) if shown else []
    prepared = _all(state)
    evaluated = prepared + len(state.competition.tasks)
    return {
        "round": state.id,
        "entries": len(entries),
        "preparations": [round(of_preparations(one, state, prepared), 3) for one in seconds],
        "evaluations": [round(of_evaluations(one, state, evaluated), 3) for one in seconds],
    }


def _sorted(found: Mapping[str, float]) -> list[float]:
    return sorted(found.values(), reverse=True)
