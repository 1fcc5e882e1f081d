"""From scores to the published ranking: recomputed here from stored scores, compared with what the organizer signed."""

import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from acclimate.service import finding, judging, names, release
from acclimate.service.accounts import Account, require_signer
from acclimate.service.submit import answer
from acclimate.store import Store, Tx, results, stages, submissions
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_competitions.metrics import MAJORITY
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import format_time

if TYPE_CHECKING:
    import pyarrow as pa

    from acclimate.report_sections import Section
    from acclimate_competitions.ranking import Ranking

_SCORED = frozenset({Phase.EVALUATED, Phase.PUBLISHED})
_ranking = threading.Lock()
# Of each store: round -> (index of its last log entry, the ranking as computed then).
_rankings: "weakref.WeakKeyDictionary[Store, dict[str, tuple[int, Ranking]]]" = weakref.WeakKeyDictionary()


def ranking(store: Store, round_id: str) -> "Ranking":
    """The ranking that follows from the stored scores and the majority predictor, by the round's policy.

    It is computed once for each last log entry of a round, and kept.

    Raises:
        Refusal: phase_wrong before EvaluationFinished; scores_invalid.
    """
    with store.snapshot() as tx:
        last = tx.last(round_id)
    # What a ranking follows from can't change without a log entry; one request computes it while the others wait.
    with _ranking:
        kept = _rankings.setdefault(store, {})
        if round_id not in kept or kept[round_id][0] != last:
            kept[round_id] = (last, judging.rank(*scores(store, round_id)))
        return kept[round_id][1]


def scores(store: Store, round_id: str, *, version: int = 0) -> "tuple[Round, pa.Table]":
    """The round, its tasks as they are judged, and all scores of its entries with those of the majority predictor, of a version; 0 is the newest.

    Raises:
        Refusal: phase_wrong before EvaluationFinished; scores_invalid.
    """
    with store.snapshot() as tx:
        state = tx.round(round_id)
        if state.phase not in _SCORED:
            sentence = f"round {state.id} is {state.phase}: there is no ranking before it is evaluated"
            raise Refusal("phase_wrong", sentence)
        found, holdout = score_digests(tx, state), release.holdout_files(tx, state.id)
    correction = judging.correction_of(store, state, version)
    if correction is not None:
        return judging.as_judged(state, correction), judging.scores(store, state, correction, holdout=holdout)
    return state, _concat(tables_of(store, found) + majority(store, state, holdout))


def report(store: Store, round_id: str, out: Path) -> None:
    """Write the round's stability report, one HTML page, from stored scores.

    Raises:
        Refusal: phase_wrong, scores_invalid.
    """
    from acclimate import report as page
    from acclimate_competitions import stability

    ranked = ranking(store, round_id)
    state, table = scores(store, round_id)
    competition = state.competition
    steady = stability.of_round(
        table,
        tasks=competition.tasks,
        policy=competition.ranking,
        entrants=[entry.entrant for entry in state.entries],
        unranked=state.unranked,
    )
    page.write(
        out,
        title=f"{competition.title}: {state.id}",
        ranking=ranked.document(),
        stability=steady.document(),
        info={
            "competition": competition.title,
            "round": state.id,
            "data_is_public": competition.data_is_public,
            "holdout": "stays private" if state.private else None,
            "given up": "; ".join(_given_up(state)) or None,
            "ranking digest": ranked.digest,
            **({"versions": judging.versions(store, round_id)} if len(state.rankings) > 1 else {}),
            "phases": [{"phase": str(phase), "at": format_time(at)} for phase, at in state.phases],
            "log": state.defined["log"],
        },
        sections=_of_examples(state, table, ranked.document()),
    )


def _given_up(state: Round) -> tuple[str, ...]:
    """Whose work the organizer gave up, and why."""
    from acclimate import item_sources

    entrants = {entry.submission: entry.entrant for entry in state.entries}
    return item_sources.given_up_of([*state.prepared.values(), *state.evaluated.values()], entrants)


def _of_examples(state: Round, table: "pa.Table", document: dict[str, Any]) -> "list[Section]":
    """What the scores by example say beside the ranking; where they can't, the reason."""
    from acclimate import item_sources, report_data, report_sections

    one = item_sources.Round(
        state.id,
        table.select(item_sources.COLUMNS),
        {task.name: task.metric for task in state.competition.tasks},
        frozenset(row["entrant"] for row in document["baselines"]),
        document,
    )
    title = "Single examples"
    try:
        found = report_data.of_round(one, options={}, label=state.id)
    except Refusal as refusal:
        if refusal.code != "scores_invalid":
            raise
        return [report_sections.Section("examples", title, f"Nothing more can be told from them: {refusal.sentence}.")]
    made = report_sections.of_examples(found)
    return made or [
        report_sections.Section("examples", title, f"Nothing more is told from them: {'; '.join(found.notes)}.")
    ]


def score_digests(tx: Tx, state: Round) -> dict[tuple[str, str, str, int | None], str]:
    """(entrant, protocol, task, seed) -> digest of the score table, of every evaluation of the entries.

    Raises:
        Refusal: scores_invalid, where an evaluation that the log has is not in the store.
    """
    counting = {entry.commitment for entry in state.entries}
    rows = tx.execute(
        select(submissions.c.entrant, submissions.c.commitment, stages, results.c.document)
        .join(stages, stages.c.submission == submissions.c.id)
        .join(results, results.c.stage == stages.c.key)
        .where(stages.c.round == state.id, stages.c.kind == "evaluate")
    ).all()
    found = {
        (row.entrant, row.protocol, row.task, row.seed): str(row.document["scores"])
        for row in rows
        if row.commitment in counting
    }
    names_of = {entry.submission: entry.entrant for entry in state.entries}
    wanted = {(names_of[s], protocol, task, seed) for s, task, seed, protocol in state.models}
    if set(found) != wanted:
        raise Refusal(
            "scores_invalid",
            f"the log has {len(wanted)} evaluations, the store has scores of {len(wanted & set(found))} of them",
        )
    return dict(sorted(found.items(), key=lambda item: tuple(str(part) for part in item[0])))


def tables_of(store: Store, found: "Mapping[tuple[str, str, str, int | None], str]") -> "list[pa.Table]":
    """The score tables of score_digests; evaluations that were made together share one."""
    from acclimate import table_blobs
    from acclimate_competitions import tables

    return [table_blobs.read(store.blobs, digest, tables.SCORES) for digest in dict.fromkeys(found.values())]


def majority(store: Store, state: Round, holdout: Mapping[str, str]) -> "list[pa.Table]":
    """Score tables of the null predictor, one a task; none where the definition does not name it as a baseline.

    Args:
        store: for the blobs.
        state: the round.
        holdout: release.holdout_files of it.
    """
    from acclimate import table_blobs
    from acclimate_competitions import metrics

    competition = state.competition
    if MAJORITY not in competition.ranking.baselines:
        return []
    files = state.defined["files"]
    return [
        metrics.majority_scores(
            table_blobs.read(store.blobs, files[f"splits/{task.name}/preparation.parquet"]),
            table_blobs.read(store.blobs, holdout[f"{task.name}.parquet"]),
            task,
            seeds=competition.preparation.seeds,
            cluster=competition.ranking.cluster,
        )
        for task in competition.tasks
    ]


def _concat(parts: "list[pa.Table]") -> "pa.Table":
    import pyarrow as pa

    from acclimate_competitions import tables

    return pa.concat_tables(parts) if parts else tables.SCORES.empty_table()


def publish(
    store: Store, account: Account, given: str, request: Mapping[str, Any], *, document: Mapping[str, Any]
) -> dict[str, Any]:
    """Log the ranking that the organizer signs.

    1. The caller is the round's organizer and signed RankingPublished.
    2. The document has the digest that was signed.
    3. Computed again from the stored scores, the ranking is the same.
    4. It is kept as a blob and logged.

    Raises:
        Refusal: role_missing, signature_invalid, phase_wrong, guard_failed where the rankings differ, conflict, …
    """
    with store.snapshot() as tx:
        # 1
        state = finding.find(tx, given)
        finding.require_owner(tx, state.id, account)
        finding.require_kind(request, "RankingPublished", state)
        require_signer(dict(request), account)
        fields = request["fields"]
        if fields["reason"]:
            names.check(fields["reason"], what="the reason", longest=2000)
        if state.rankings and tx.find(request) is None:
            raise Refusal(
                "conflict",
                f"round {state.id} has a published ranking already: {state.rankings[-1][0]}",
                hint="see it: acclimate ranking ROUND; where the definition says so a round publishes it itself. What was judged wrongly gets a"
                " new version: acclimate round revise",
            )
    # 2
    signed = digests.of_json(dict(document))
    if signed != fields["ranking"]:
        raise Refusal("guard_failed", f"the document has {signed}, RankingPublished says {fields['ranking']}")
    # 3
    own = ranking(store, state.id).document()
    if digests.of_json(own) != signed:
        raise Refusal(
            "guard_failed",
            f"the server computed ranking {digests.of_json(own)}, signed was {signed}",
            hint="fetch the ranking from the server (GET …/ranking) and compare before signing",
        )
    # 4
    store.blobs.put_bytes(digests.canonical(own))
    with store.transaction() as tx:
        return answer(*tx.append_once(request))


def document(store: Store, account: Account | None, given: str, *, version: int | None = None) -> bytes:
    """The ranking's canonical JSON, of the newest version or of another one: published to all, evaluated to the round's organizer.

    Raises:
        Refusal: phase_wrong; not_found, where there is no such version.
    """
    with store.snapshot() as tx:
        state = finding.find(tx, given)
        require_results(tx, state, account)
    if state.rankings or version is not None:
        return store.blobs.read(judging.chosen(state, version))
    return digests.canonical(ranking(store, state.id).document())


def admit_whole(store: Store, account: Account | None, given: str) -> bool:
    """Refuse the whole bundle of a private holdout to anybody but the round's organizer and its auditor.

    Returns:
        Whether it is another one than the public bundle.

    Raises:
        Refusal: holdout_private, round_unknown.
    """
    with store.snapshot() as tx:
        state = finding.find(tx, given)
        owner = finding.is_owner(tx, state.id, account)
    if state.private and not owner and not finding.is_auditor(state, account):
        who = "whoever gives no account" if account is None else f"{account.id} ({account.role})"
        raise Refusal(
            "holdout_private",
            f"the holdout of round {state.id} stays private: its whole bundle is for its organizer and its auditor, not for {who}",
            hint="without `whole` you get the public bundle: what it can't show, the auditor's report stands for",
        )
    return state.private


def require_results(tx: Tx, state: Round, account: Account | None) -> None:
    """Refuse results to whoever may not see them in this phase: organizers from `evaluated`, all from `published`.

    Raises:
        Refusal: phase_wrong.
    """
    owner = finding.is_owner(tx, state.id, account)
    if state.rankings or (state.phase is Phase.EVALUATED and owner):
        return
    wait = f"wait for it: acclimate status {state.id} --until published --server URL"
    hint = "custodians release first; publish once the round is evaluated"
    if state.phase is Phase.EVALUATED and state.competition.round.publish == "auto":
        hint = f"it publishes itself as soon as a second process has computed the same ranking; {wait}"
    elif state.phase is Phase.EVALUATED:
        hint = f"its organizer publishes it next; {wait}"
    elif not owner and state.phase is not Phase.VOIDED:
        hint = wait
    elif state.phase in (Phase.RELEASED, Phase.OPENED):
        hint = f"the evaluation is under way: acclimate status {state.id} --keys DIR shows how far it is"
    elif state.phase is Phase.VOIDED:
        hint = "it was voided: it has no ranking"
    raise Refusal(
        "phase_wrong",
        f"round {state.id} is {state.phase}: results are shown once the ranking is published",
        hint=hint,
    )
