"""What a round's auditor does, and gets: the draw, the files of drawn entries, the outcomes of their re-runs, the report on the bundle.

Weights are private until the entrant says otherwise; of a drawn entry the auditor whom the round names gets them, once the jobs
are drawn, and nobody else and nothing more.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from acclimate.service import finding, manifests
from acclimate.service.accounts import Account, require_signer
from acclimate.service.submit import answer
from acclimate.store import Store, Tx, results, stages, submissions
from acclimate_competitions import bases
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, PreparationKey, Round


def log(store: Store, account: Account, given: str, request: Mapping[str, Any], *, kind: str) -> dict[str, Any]:
    """Log the draw (AuditDrawn), the outcome of a re-run (PreparationAudited) or what a whole bundle came to (RoundAudited).

    Raises:
        Refusal: role_missing, signature_invalid, phase_wrong, guard_failed, conflict, …
    """
    with store.transaction() as tx:
        state = finding.find(tx, given)
        finding.require_auditor(state, account)
        finding.require_kind(request, kind, state)
        require_signer(dict(request), account)
        return answer(*tx.append_once(request))


def jobs(store: Store, account: Account, given: str) -> list[dict[str, Any]]:
    """The drawn preparations, in the order drawn, with what making them again needs that no record says.

    Returns:
        [{submission, entrant, task, seed, files: {name: digest}, base, versions}]; base is the competition's that an adapter stands on,
        null for a whole model, versions are those that the first one ran with.

    Raises:
        Refusal: role_missing; phase_wrong, where nothing is drawn.
    """
    with store.snapshot() as tx:
        state = _drawn(tx, given, account)
        ran = _versions(tx, state)
        entrants = {entry.submission: entry.entrant for entry in state.entries}
        drawn = _manifests(tx, state)
        return [
            {
                "submission": submission,
                "entrant": entrants[submission],
                "task": task,
                "seed": seed,
                "files": manifests.digests_of(drawn[submission]),
                "base": drawn[submission]["base"] if drawn[submission]["kind"] == bases.KIND else None,
                "versions": ran.get((submission, task, seed), {}),
            }
            for submission, task, seed in state.drawn or ()
        ]


def file_of(store: Store, account: Account, given: str, digest: str) -> str:
    """The digest, where it is of a drawn entry's file or of a model prepared from one by a drawn job.

    Raises:
        Refusal: role_missing; phase_wrong, where nothing is drawn; not_found.
    """
    with store.snapshot() as tx:
        state = _drawn(tx, given, account)
        allowed = {found for each in _manifests(tx, state).values() for found in manifests.sizes_of(each)}
        drawn = [state.prepared[key] for key in state.drawn or ()]
        allowed |= {record["prepared"] for record in drawn if "failed" not in record.fields}
    if digest not in allowed:
        raise Refusal(
            "not_found",
            f"no drawn job of round {state.id} has a file {digest}",
            hint="`GET /v1/rounds/{round}/audits` lists the files of drawn jobs",
        )
    return digest


def _drawn(tx: Tx, given: str, account: Account) -> Round:
    state = finding.find(tx, given)
    finding.require_auditor(state, account)
    if state.drawn is None or state.phase is Phase.VOIDED:
        why = "is void" if state.phase is Phase.VOIDED else f"is in phase {state.phase}, and nothing is drawn"
        raise Refusal("phase_wrong", f"round {state.id} {why}", hint=f"acclimate audit draw {state.id}")
    return state


def _manifests(tx: Tx, state: Round) -> dict[int, Mapping[str, Any]]:
    """Submission -> manifest, of the entries that were drawn."""
    drawn = {submission for submission, _, _ in state.drawn or ()}
    rows = tx.execute(select(submissions).where(submissions.c.round == state.id)).all()
    by_commitment = {row.commitment: row for row in rows}
    return {
        entry.submission: by_commitment[entry.commitment].manifest
        for entry in state.entries
        if entry.submission in drawn
    }


def _versions(tx: Tx, state: Round) -> dict[PreparationKey, dict[str, str]]:
    rows = tx.execute(select(submissions.c.id, submissions.c.commitment).where(submissions.c.round == state.id)).all()
    entries = {entry.commitment: entry.submission for entry in state.entries}
    by_id = {row.id: entries[row.commitment] for row in rows if row.commitment in entries}
    found = tx.execute(
        select(stages.c.submission, stages.c.task, stages.c.seed, results.c.document)
        .join(results, results.c.stage == stages.c.key)
        .where(stages.c.round == state.id, stages.c.kind == "prepare")
    ).all()
    return {
        (by_id[row.submission], row.task, row.seed): dict(row.document.get("versions", {}))
        for row in found
        if row.submission in by_id
    }
