"""A bundle's scores by example as its ranking in force has them: where that was revised, judged again with its correction.

`scores/` has the scores of the opened holdout, which a correction changes. Predictions, holdout and correction are in the bundle too, so that the
scores in force follow from it. Nothing is verified here: `acclimate verify` shows that the ranking in force is that of these scores.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from acclimate_competitions import corrections, digests, metrics, tables
from acclimate_competitions.corrections import Correction
from acclimate_competitions.definition import Competition
from acclimate_competitions.metrics import MAJORITY

if TYPE_CHECKING:
    from acclimate.verify.files import Bundle


def correction_in_force(bundle: "Bundle", own: list[tuple[int, Any]]) -> tuple[int, Correction | None]:
    """The version of the ranking in force, and what it was judged with beside definition and holdout, if anything.

    Args:
        bundle: opened.
        own: the round's records, with their places in the log.

    Raises:
        Failed: the correction is missing, or is not the one that the log names.
        Refusal: correction_invalid.
    """
    from acclimate.verify.report import Failed

    rankings = [record for _, record in own if record.type in ("RankingPublished", "RankingRevised")]
    digest = rankings[-1].fields.get("correction") if rankings else None
    if not digest:
        return len(rankings), None
    name = f"versions/{len(rankings)}/correction.json"
    document = bundle.json(name)
    if (found := digests.of_json(document)) != digest:
        raise Failed(name, f"it has {found}, the log's version {len(rankings)} names {digest}")
    return len(rankings), corrections.parse(document)


def judged(bundle: "Bundle", competition: Competition, correction: Correction) -> pa.Table:
    """All scores as a correction has them, tables.SCORES: of each entry that has predictions, and of the null predictor.

    Raises:
        Failed: a file is missing.
        Refusal: scores_invalid, file_unreadable.
    """
    made, parts = correction.competition(competition), []
    cluster, seeds = made.ranking.cluster, made.preparation.seeds
    truth = {
        task.name: correction.holdout(task.name, tables.read(bundle.path(f"holdout/{task.name}.parquet")))
        for task in made.tasks
    }
    for name, found in _predictions(bundle).items():
        counted = correction.counted(name, found)
        parts.append(metrics.score_predictions(counted, truth[name], made.task(name), cluster=cluster))
    for task in made.tasks if MAJORITY in made.ranking.baselines else ():
        preparation = tables.read(bundle.path(f"public/splits/{task.name}/preparation.parquet"))
        parts.append(metrics.majority_scores(preparation, truth[task.name], task, seeds=seeds, cluster=cluster))
    return pa.concat_tables(parts) if parts else tables.SCORES.empty_table()


def _predictions(bundle: "Bundle") -> Mapping[str, pa.Table]:
    """All predictions of each task."""
    by_task: dict[str, list[pa.Table]] = {}
    for name in bundle.under("predictions"):
        table = tables.read(bundle.path(name), tables.PREDICTIONS)
        if len(table):
            by_task.setdefault(table["task"][0].as_py(), []).append(table)
    return {task: pa.concat_tables(found) for task, found in by_task.items()}
