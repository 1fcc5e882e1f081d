"""From the store to MLflow: gathers what the projection of a round needs. Late or failed, it changes no result."""

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import select

from acclimate import round_data, table_blobs, tracking
from acclimate.config import Settings
from acclimate.service import manifests, publish, release
from acclimate.store import Store, Tx, results, stages, submissions
from acclimate_competitions import digests
from acclimate_competitions.phases import Phase, Round
from acclimate_competitions.records import parse_time
from acclimate_competitions.tasks import Task
from acclimate_runners.jobs import ModelFiles


def finish(store: Store, settings: Settings, round_id: str, still_leading: Callable[[], None] = lambda: None) -> None:
    """Project a round into MLflow: everything once its ranking is published, before that the preparations only. Idempotent.

    Args:
        store: the store.
        settings: of the installation.
        round_id: which round.
        still_leading: called before each run; refuses where another dispatcher leads and publishes the round.

    Raises:
        Refusal: what still_leading refuses; conflict, extra_missing, server_unreachable; as gather.
    """
    data = gather(store, settings, round_id)
    # A tracking server keeps the artifacts itself.
    artifacts = None if settings.tracking.startswith(("http://", "https://")) else settings.artifacts
    publish = tracking.publish_preparations if data.ranking is None else tracking.publish_round
    still_leading()
    publish(settings.tracking, artifacts, data, progress=lambda *_: still_leading())


def gather(store: Store, settings: Settings, round_id: str) -> round_data.RoundData:
    """All that the projection of a round needs, from the store and its blobs.

    Raises:
        Refusal: blob_unknown, blob_corrupt, scores_invalid.
    """
    with store.snapshot() as tx:
        state = tx.round(round_id)
        scored = state.phase is Phase.PUBLISHED
        holdout = release.holdout_files(tx, round_id) if scored else {}
        entries = tuple(_entries(tx, state))
        known = {entry.submission: entry.entrant for entry in entries}
        kinds = ("prepare", "evaluate") if scored else ("prepare",)
        done = tuple(_stages(tx, state, known, kinds))
        last = tx.last(round_id)
    assert state.closed is not None
    judged, scores = publish.scores(store, round_id) if scored else (state, None)
    opened = {task.name: holdout[f"{task.name}.parquet"] for task in state.competition.tasks} if scored else {}
    targets = (
        {}
        if state.private
        else {task: _targets(store, digest, state.competition.task(task)) for task, digest in opened.items()}
    )
    if state.private and state.seal is not None:
        # A file's own digest would tell whoever guesses the file that they are right; this root is salted.
        opened = dict.fromkeys(opened, str(state.seal["row_root"]))
    return round_data.RoundData(
        competition=judged.competition,
        name=state.defined["name"],
        round=state.id,
        origin=settings.origin,
        at=state.closed.at,
        code=state.defined["code"],
        engine=settings.runner,
        files=state.defined["files"],
        entries=entries,
        stages=done,
        holdout=opened,
        targets=targets,
        scores=scores,
        ranking=publish.ranking(store, round_id).document() if scored else None,
        revision=max(0, len(state.rankings) - 1),
        older=tuple(_older(store, round_id, number) for number in range(1, len(state.rankings))),
        tags={"log_last": str(last)},
    )


def _entries(tx: Tx, state: Round) -> Iterator[round_data.EntryData]:
    rows = tx.execute(select(submissions).where(submissions.c.round == state.id)).all()
    by_commitment = {row.commitment: row for row in rows}
    for entry in state.entries:
        row = by_commitment[entry.commitment]
        model = ModelFiles(manifests.digests_of(row.manifest)).digest
        yield round_data.EntryData(entry.entrant, row.id, row.manifest, model)


def _stages(tx: Tx, state: Round, known: dict[str, str], kinds: tuple[str, ...]) -> Iterator[round_data.StageData]:
    query = select(stages, results.c.document, results.c.at).join(results, results.c.stage == stages.c.key)
    rows = tx.execute(query.where(stages.c.round == state.id, stages.c.kind.in_(kinds)).order_by(stages.c.key)).all()
    selected: set[tuple[str, str]] = set()
    for row in rows:
        if row.submission not in known:
            continue
        common: dict[str, Any] = {
            "entrant": known[row.submission],
            "task": row.task,
            "at": parse_time(row.at),
            "attempt": row.attempt or "",
            "hardware": row.document.get("hardware", ""),
            "versions": row.document.get("versions", {}),
        }
        yield round_data.StageData(
            kind=row.kind, key=row.key, seed=row.seed, protocol=row.protocol, document=row.document, **common
        )
        selection = row.document.get("selection")
        if row.kind == "prepare" and selection and (row.submission, row.task) not in selected:
            selected.add((row.submission, row.task))
            key = digests.of_json(["select", state.id, row.submission, row.task])
            yield round_data.StageData(kind="select", key=key, seed=None, protocol=None, document=selection, **common)


def _targets(store: Store, digest: str, task: Task) -> dict[str, str]:
    table = table_blobs.read(store.blobs, digest)
    return dict(zip(table.column("example").to_pylist(), table.column(task.truth).to_pylist(), strict=True))


def _older(store: Store, round_id: str, number: int) -> round_data.Version:
    judged, scores = publish.scores(store, round_id, version=number)
    document: Any = digests.parse_canonical(store.blobs.read(judged.rankings[number - 1][0]))
    return round_data.Version(judged.competition, scores, document)
