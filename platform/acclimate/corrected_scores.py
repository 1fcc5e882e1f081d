"""A bundle's scores by example that do not lie in it: by the correction in force where its ranking was revised, or by another metric.

`scores/` has the scores of the opened holdout by the definition's metrics. Predictions, holdout and correction are in the bundle too, so that the
others follow from it. Nothing is verified here: `acclimate verify` shows that the ranking in force is that of these scores.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from acclimate_competitions import corrections, digests, metrics, tables
from acclimate_competitions.corrections import Correction
from acclimate_competitions.definition import Competition

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
    rankings = [record for _, record in own if record.type in ("RankingPublished", "RankingRevised")]
    digest = rankings[-1].fields.get("correction") if rankings else None
    if not digest:
        return len(rankings), None
    return len(rankings), corrections.parse(of_version(bundle, len(rankings), digest))


def name_of(version: int) -> str:
    """The file of a version's correction in a bundle."""
    return f"versions/{version}/correction.json"


def of_version(bundle: "Bundle", version: int, digest: str) -> Any:
    """The document of the correction that the log names with a version.

    Raises:
        Failed: it is missing, or is another.
    """
    from acclimate.verify.report import Failed

    name = name_of(version)
    document = bundle.json(name)
    if (found := digests.of_json(document)) != digest:
        raise Failed(name, f"it has {found}, the log's version {version} names {digest}")
    return document


def judged(bundle: "Bundle", competition: Competition, correction: Correction) -> pa.Table:
    """All scores as a correction has them, tables.SCORES: of each entry that has predictions, and of the null predictor.

    Raises:
        Failed: a file is missing.
        Refusal: scores_invalid, file_unreadable.
    """
    return corrections.scores(
        correction,
        competition,
        predictions=_predictions(bundle).items(),
        holdout=lambda task: tables.read(bundle.path(f"holdout/{task}.parquet")),
        preparation=lambda task: tables.read(bundle.path(f"public/splits/{task}/preparation.parquet")),
    )


def by_metric(bundle: "Bundle", competition: Competition, correction: Correction | None, metric: str) -> pa.Table:
    """All scores by another metric than the tasks' own, tables.SCORES, of the tasks that it can score; arguments and refusals as judged."""
    fits = {task.name: metric for task in competition.tasks if task.kind in metrics.METRICS[metric].kinds}
    correction = Correction({}, {}, {}, "") if correction is None else correction
    return corrections.scores(
        dataclasses.replace(correction, metrics=fits),
        dataclasses.replace(competition, tasks=tuple(task for task in competition.tasks if task.name in fits)),
        predictions=[(task, found) for task, found in _predictions(bundle).items() if task in fits],
        holdout=lambda task: tables.read(bundle.path(f"holdout/{task}.parquet")),
        preparation=lambda task: tables.read(bundle.path(f"public/splits/{task}/preparation.parquet")),
    )


def other_metrics(competition: Competition) -> tuple[str, ...]:
    """The metrics beside the tasks' own by which predictions of some task can be judged."""
    own = {task.metric for task in competition.tasks}
    kinds = {task.kind for task in competition.tasks}
    return tuple(sorted(one.name for one in metrics.METRICS.values() if one.name not in own and kinds & set(one.kinds)))


def _predictions(bundle: "Bundle") -> Mapping[str, pa.Table]:
    """All predictions of each task."""
    by_task: dict[str, list[pa.Table]] = {}
    for name in bundle.under("predictions"):
        table = tables.read(bundle.path(name), tables.PREDICTIONS)
        if len(table):
            by_task.setdefault(table["task"][0].as_py(), []).append(table)
    return {task: pa.concat_tables(found) for task, found in by_task.items()}
