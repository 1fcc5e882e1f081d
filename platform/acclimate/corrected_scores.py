"""A bundle's scores by example that do not lie in it: by the correction in force where its ranking was revised, or by another metric.

`scores/` has the scores of the opened holdout by the definition's metrics. Predictions, holdout and correction are in the bundle too, so that the
others follow from it. Of each evaluation that the round's records name there must be the predictions, to the byte, and of each entry the scores: what
is left of a bundle is ranked otherwise than the round. Else nothing is verified here: `acclimate verify` shows that the ranking in force is that of
these scores.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from acclimate_competitions import corrections, digests, metrics, splits, tables
from acclimate_competitions.corrections import Correction
from acclimate_competitions.definition import Competition
from acclimate_competitions.metrics import MAJORITY
from acclimate_competitions.records import Record

if TYPE_CHECKING:
    from acclimate.verify.files import Bundle


Own = list[tuple[int, Record]]
"""The round's records, with their places in the log."""


def correction_in_force(bundle: "Bundle", own: Own) -> tuple[int, Correction | None]:
    """The version of the ranking in force, and what it was judged with beside definition and holdout, if anything.

    Args:
        bundle: opened.
        own: the round's records, with their places in the log.

    Raises:
        Failed: the correction is missing, or is not the one that the log names.
        Refusal: correction_invalid.
    """
    rankings = _rankings(own)
    digest = rankings[-1].fields.get("correction") if rankings else None
    if not digest:
        return len(rankings), None
    return len(rankings), corrections.parse(of_version(bundle, len(rankings), digest))


def ranking_in_force(bundle: "Bundle", own: Own) -> dict[str, Any]:
    """ranking.json, which is the one that the log names last, where one was published.

    Raises:
        Failed: it is missing, or is another.
    """
    from acclimate.verify.report import Failed

    document, rankings = bundle.json("ranking.json"), _rankings(own)
    if rankings and (found := digests.of_json(document)) != rankings[-1]["ranking"]:
        raise Failed("ranking.json", f"it has {found}, the log's version {len(rankings)} is {rankings[-1]['ranking']}")
    if not isinstance(document, dict) or not {"ranking", "baselines"} <= set(document):
        raise Failed("ranking.json", "it must be an object with ranking and baselines")
    return document


def _rankings(own: Own) -> list[Record]:
    return [record for _, record in own if record.type in ("RankingPublished", "RankingRevised")]


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


def score_files(bundle: "Bundle", competition: Competition, own: Own) -> list[str]:
    """The bundle's files with scores by example, of each entry and of the null predictor; none where the bundle has none at all.

    Raises:
        Failed: one is missing, or there is another.
    """
    from acclimate.verify.report import Failed

    names = bundle.under("scores")
    majority = {MAJORITY} & set(competition.ranking.baselines)
    wanted = {
        f"scores/{name}.parquet" for name in {name.split("/")[1] for name in _evaluated(own, competition)} | majority
    }
    for name in sorted({*names} ^ wanted) if names else ():
        raise Failed(name, "the round has no such entry" if name in names else "the file is missing")
    return names


def judged(
    bundle: "Bundle", competition: Competition, correction: Correction, own: Own, *, tasks: frozenset[str] | None = None
) -> pa.Table:
    """All scores as a correction has them, tables.SCORES: of each entry that has predictions, and of the null predictor; of all tasks, or of some.

    Raises:
        Failed: a file is missing, is another than the records name, or can't be read as what it is.
        Refusal: scores_invalid.
    """
    found = _predictions(bundle, competition, own)
    kept = tuple(task for task in competition.tasks if tasks is None or task.name in tasks)
    return corrections.scores(
        correction,
        dataclasses.replace(competition, tasks=kept),
        predictions=[(task.name, found[task.name]) for task in kept if task.name in found],
        holdout=lambda task: _split(bundle, f"holdout/{task}.parquet", task, competition),
        preparation=lambda task: _split(bundle, f"public/splits/{task}/preparation.parquet", task, competition),
    )


def by_metric(
    bundle: "Bundle", competition: Competition, correction: Correction | None, metric: str, *, own: Own
) -> pa.Table:
    """All scores by another metric than the tasks' own, tables.SCORES, of the tasks that it can score; arguments and refusals as judged."""
    fits = {task.name: metric for task in competition.tasks if task.kind in metrics.METRICS[metric].kinds}
    correction = Correction({}, {}, {}, "") if correction is None else correction
    return judged(bundle, competition, dataclasses.replace(correction, metrics=fits), own, tasks=frozenset(fits))


def other_metrics(competition: Competition) -> tuple[str, ...]:
    """The metrics beside the tasks' own by which predictions of some task can be judged."""
    own = {task.metric for task in competition.tasks}
    kinds = {task.kind for task in competition.tasks}
    return tuple(sorted(one.name for one in metrics.METRICS.values() if one.name not in own and kinds & set(one.kinds)))


def _predictions(bundle: "Bundle", competition: Competition, own: Own) -> Mapping[str, pa.Table]:
    """All predictions of each task, of the evaluations that the round's records name and of no others."""
    from acclimate.verify import parquet
    from acclimate.verify.report import Failed

    named, by_task = _evaluated(own, competition), dict[str, list[pa.Table]]()
    for name in sorted({*named, *bundle.under("predictions")}):
        if name not in named:
            raise Failed(name, "the log has no such evaluation")
        index, record = named[name]
        if (found := bundle.digest(name)) != record["predictions"]:
            raise Failed(name, f"its digest is {found}, log entry {index} says {record['predictions']}")
        by_task.setdefault(record["task"], []).append(parquet.read(bundle.path(name), name, tables.PREDICTIONS))
    return {task: pa.concat_tables(found) for task, found in by_task.items()}


def _evaluated(own: Own, competition: Competition) -> dict[str, tuple[int, Record]]:
    """The file with the predictions of each evaluation -> its ModelEvaluated, with the place in the log."""
    from acclimate.verify.names import predictions_name
    from acclimate.verify.report import Failed

    entrants = {index: record["entrant"] for index, record in own if record.type == "SubmissionAccepted"}
    tasks = {task.name for task in competition.tasks}
    found = {}
    for index, record in own:
        if record.type == "ModelEvaluated":
            if record["submission"] not in entrants or record["task"] not in tasks:
                of = f"submission {record['submission']}, task {record['task']!r}"
                raise Failed(f"log entry {index}", f"it is of {of}, which the round does not have")
            key = (record["submission"], record["task"], record["seed"], record["protocol"])
            found[predictions_name(entrants[record["submission"]], key)] = index, record
    return found


def _split(bundle: "Bundle", name: str, task: str, competition: Competition) -> pa.Table:
    """The rows of a split, which have what scoring needs."""
    from acclimate.verify import parquet
    from acclimate.verify.report import Failed

    table = parquet.read(bundle.path(name), name)
    for column in splits.columns_needed(competition.task(task), cluster=competition.ranking.cluster):
        there = [table.column(place) for place, known in enumerate(table.schema.names) if known == column]
        if len(there) != 1 or there[0].type != pa.string() or there[0].null_count:
            raise Failed(name, f"it must have one column {column!r}, of texts without nulls")
    return table
