"""A bundle's scores by example as its ranking in force has them: where that was revised, judged again with its correction.

`scores/` has the scores of the opened holdout, which a correction changes. Predictions, holdout and correction are in the bundle too, so that the
scores in force follow from it. Nothing is verified here: `acclimate verify` shows that the ranking in force is that of these scores.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from acclimate_competitions import corrections, digests, tables
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


def _predictions(bundle: "Bundle") -> Mapping[str, pa.Table]:
    """All predictions of each task."""
    by_task: dict[str, list[pa.Table]] = {}
    for name in bundle.under("predictions"):
        table = tables.read(bundle.path(name), tables.PREDICTIONS)
        if len(table):
            by_task.setdefault(table["task"][0].as_py(), []).append(table)
    return {task: pa.concat_tables(found) for task, found in by_task.items()}
