"""Versions of a round's results: judged again with a correction, from the predictions and the opened holdout; the versions before stay (decision 0026)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from acclimate.service import finding, names, release
from acclimate.service.accounts import Account, require_signer
from acclimate.service.submit import answer
from acclimate.store import Store
from acclimate_competitions import corrections, digests
from acclimate_competitions.corrections import Correction
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_competitions.records import format_time

if TYPE_CHECKING:
    import pyarrow as pa

    from acclimate_competitions.ranking import Ranking

_RANKINGS = frozenset({"RankingPublished", "RankingRevised"})


def correction_of(store: Store, state: Round, version: int = 0) -> Correction | None:
    """What a version of a round's results was judged with; version 0 is the newest.

    Returns:
        None where it is the definition and the opened holdout alone, or nothing is published yet.

    Raises:
        Refusal: blob_unknown, blob_corrupt.
    """
    digest = state.corrections[version - 1] if state.corrections else ""
    return corrections.parse(digests.parse_canonical(store.blobs.read(digest))) if digest else None


def as_judged(state: Round, correction: Correction | None) -> Round:
    """The round with its tasks as they are judged."""
    return state if correction is None else replace(state, competition=correction.competition(state.competition))


def scores(store: Store, state: Round, correction: Correction, *, holdout: Mapping[str, str]) -> "pa.Table":
    """All scores of a round as a correction has them, of the entries and of the null predictor.

    Args:
        store: for the blobs.
        state: the round.
        correction: what is judged otherwise.
        holdout: release.holdout_files of it.

    Raises:
        Refusal: blob_unknown, blob_corrupt, scores_invalid.
    """
    from acclimate import table_blobs
    from acclimate_competitions import tables

    files = state.defined["files"]
    return corrections.scores(
        correction,
        state.competition,
        predictions=(
            (task, table_blobs.read(store.blobs, record["predictions"], tables.PREDICTIONS))
            for (_, task, _, _), record in state.evaluated.items()
        ),
        holdout=lambda task: _truth(store, task, holdout),
        preparation=lambda task: table_blobs.read(store.blobs, files[f"splits/{task}/preparation.parquet"]),
    )


def _truth(store: Store, task: str, holdout: Mapping[str, str]) -> "pa.Table":
    from acclimate import table_blobs

    return table_blobs.read(store.blobs, holdout[f"{task}.parquet"])


def rank(state: Round, table: "pa.Table") -> "Ranking":
    """The ranking of a round's scores, by its policy and its tasks as they are judged."""
    from acclimate_competitions import ranking as ranker

    return ranker.rank(
        table,
        tasks=state.competition.tasks,
        policy=state.competition.ranking,
        entrants=[entry.entrant for entry in state.entries],
        unranked=state.unranked,
    )


def revise(
    store: Store,
    account: Account,
    given: str,
    request: Mapping[str, Any],
    *,
    document: Mapping[str, Any],
    correction: Mapping[str, Any],
) -> dict[str, Any]:
    """Log a new version of a published ranking, which its organizer signs; the versions before stay.

    1. The caller is the round's organizer and signed RankingRevised, with a reason; the round is published.
    2. Ranking and correction have the digests that were signed.
    3. The correction fits the opened holdout, and the ranking is the one that follows from the stored predictions with it.
    4. Both are kept as blobs, and logged.

    Raises:
        Refusal: role_missing, signature_invalid, phase_wrong, correction_invalid, guard_failed where the rankings differ, …
    """
    with store.snapshot() as tx:
        # 1
        state = finding.find(tx, given)
        finding.require_owner(tx, state.id, account)
        finding.require_kind(request, "RankingRevised", state)
        require_signer(dict(request), account)
        fields = request["fields"]
        names.check(fields["reason"], what="the reason", longest=2000)
        if not state.rankings:
            raise Refusal("phase_wrong", f"round {state.id} is {state.phase}: only what is published can be revised")
        holdout = release.holdout_files(tx, state.id)
    # 2
    made = corrections.parse(dict(correction))
    for what, found, signed in (
        ("correction", made.digest, fields.get("correction")),
        ("ranking", digests.of_json(dict(document)), fields["ranking"]),
    ):
        if found != signed:
            raise Refusal("guard_failed", f"the {what} has {found}, RankingRevised says {signed}")
    # 3
    truth = {task.name: _truth(store, task.name, holdout) for task in state.competition.tasks}
    corrections.check(made, state.competition, truth)
    own = rank(as_judged(state, made), scores(store, state, made, holdout=holdout))
    if own.digest != fields["ranking"]:
        raise Refusal("guard_failed", f"the server computed ranking {own.digest}, signed was {fields['ranking']}")
    # 4
    store.blobs.put_bytes(digests.canonical(own.document()))
    store.blobs.put_bytes(digests.canonical(made.document()))
    with store.transaction() as tx:
        return answer(*tx.append_once(request))


def versions(store: Store, given: str) -> list[dict[str, Any]]:
    """Every version of a round's ranking, the first one first.

    Returns:
        [{version, ranking (digest), reason, at, correction (digest or None), corrected (its document, where the holdout is public),
        changes (as corrections.differences to the version before)}]; none before a ranking is published.

    Raises:
        Refusal: round_unknown.
    """
    with store.snapshot() as tx:
        state = finding.find(tx, given)
        moments = [format_time(record.at) for _, record in tx.records(state.id) if record.type in _RANKINGS]
    found: list[dict[str, Any]] = []
    before: Any = None
    for number, ((ranking, reason), at) in enumerate(zip(state.rankings, moments, strict=True), start=1):
        document: Any = digests.parse_canonical(store.blobs.read(ranking))
        correction = correction_of(store, state, number)
        found.append(
            {
                "version": number,
                "ranking": ranking,
                "reason": reason,
                "at": at,
                "correction": correction.digest if correction else None,
                "corrected": correction.document() if correction and not state.private else None,
                "changes": corrections.differences(before, document) if before is not None else [],
            }
        )
        before = document
    return found


def chosen(state: Round, version: int | None) -> str:
    """The digest of a version of the ranking; of the newest where none is asked for.

    Raises:
        Refusal: not_found.
    """
    if version is None:
        return state.rankings[-1][0]
    if not 1 <= version <= len(state.rankings):
        raise Refusal(
            "not_found",
            f"the ranking of {state.id} has no version {version}, it has {len(state.rankings)}",
            hint=f"acclimate round versions {state.id} shows them",
        )
    return state.rankings[version - 1][0]
