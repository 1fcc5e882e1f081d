"""Versions of a ranking: each follows from the logged predictions, the opened holdout and its own correction, and the log names them all."""

from typing import Any

import pyarrow as pa

from acclimate.corrected_scores import name_of, of_version
from acclimate.verify import parquet
from acclimate.verify.audit import Audit
from acclimate.verify.names import predictions_name
from acclimate.verify.report import Beside, Failed, NotChecked
from acclimate_competitions import corrections, digests, ranking, tables
from acclimate_competitions.corrections import Correction
from acclimate_competitions.errors import Refusal


def rank(audit: Audit) -> str:
    """Ranking the recomputed scores by the committed policy gives ranking.json, digit for digit; of a revised one with its correction."""
    audit.ranking = ranking_of(audit, len(audit.round.rankings))
    found, expected = audit.bundle.read("ranking.json"), digests.canonical(audit.ranking.document())
    if found != expected:
        raise Failed(*_first_difference(found, expected))
    return f"{len(audit.ranking.rows)} entrants ranked, {audit.ranking.digest}"


def older(audit: Audit) -> str:
    """Each version before the newest is in the bundle, as the log names it, and follows from its own correction; nothing else is there."""
    count = len(audit.round.rankings)
    wanted = {f"versions/{number}/ranking.json" for number in range(1, count)}
    wanted |= {name_of(number) for number, digest in enumerate(audit.round.corrections, start=1) if digest}
    for name in audit.bundle.under("versions"):
        if name not in wanted:
            raise Failed(name, "the log has no such version of the ranking, or it has no correction")
    if count < 2:
        raise Beside
    for number, (named, _) in enumerate(audit.round.rankings[:-1], start=1):
        name = f"versions/{number}/ranking.json"
        found = digests.of_json(audit.bundle.json(name))
        if found != named:
            raise Failed(name, f"it has {found}, the log's version {number} is {named}")
    if not hasattr(audit, "ranking"):
        raise NotChecked(
            f"the log names {count} versions, and those here are they; the newest could not be recomputed, so neither could the older ones"
        )
    for number, (named, _) in enumerate(audit.round.rankings[:-1], start=1):
        name = f"versions/{number}/ranking.json"
        own = ranking_of(audit, number).digest
        if own != named:
            raise Failed(name, f"the log names {named}, recomputed with its correction it is {own}")
    told = [
        f"version {number} with {_told(_correction(audit, number, digest))}"
        for number, digest in enumerate(audit.round.corrections, start=1)
        if digest
    ]
    said = f"; {'; '.join(told)}" if told else ""
    return f"{count} versions; in force is version {count}: {audit.round.rankings[-1][1]}{said}"


def ranking_of(audit: Audit, number: int) -> ranking.Ranking:
    """A version's ranking, recomputed; version 0 is the one of a round that has published none.

    Raises:
        Failed: its correction is missing, or is not the one that the log names, or does not fit the holdout.
    """
    digest = audit.round.corrections[number - 1] if number else ""
    return revised(audit, _correction(audit, number, digest) if digest else None)


def revised(audit: Audit, correction: Correction | None) -> ranking.Ranking:
    """The ranking with a correction, from scores that the audit recomputed or, with one, recomputes from the predictions."""
    if correction is None:
        competition = audit.competition
        table = pa.concat_tables(audit.scores[entrant] for entrant in sorted(audit.scores))
    else:
        competition = correction.competition(audit.competition)
        table = _judged(audit, correction)
    return ranking.rank(
        table,
        tasks=competition.tasks,
        policy=competition.ranking,
        entrants=list(audit.plan),
        unranked=audit.round.unranked,
    )


def _judged(audit: Audit, correction: Correction) -> pa.Table:
    def read(name: str, schema: Any = None) -> pa.Table:
        return parquet.read(audit.bundle.path(name), name, schema)

    predictions = (
        (task, read(predictions_name(entrant, key), tables.PREDICTIONS))
        for entrant, tasks in audit.plan.items()
        for task, keys in tasks.items()
        for key in keys
    )
    return corrections.scores(
        correction,
        audit.competition,
        predictions=predictions,
        holdout=lambda task: audit.holdout[task],
        preparation=lambda task: read(f"public/splits/{task}/preparation.parquet"),
    )


def _correction(audit: Audit, number: int, digest: str) -> Correction:
    name, document = name_of(number), of_version(audit.bundle, number, digest)
    try:
        correction = corrections.parse(document)
        corrections.check(correction, audit.competition, audit.holdout)
    except Refusal as refusal:
        raise Failed(name, "; ".join([refusal.sentence, *refusal.problems[1:]])) from refusal
    return correction


def _told(correction: Correction) -> str:
    """How much a correction changes, in numbers: whether it is right, no check can tell."""
    targets, void = (sum(map(len, each.values())) for each in (correction.targets, correction.void))
    metrics_ = ", ".join(f"{metric} for {task}" for task, metric in sorted(correction.metrics.items()))
    said = f"{targets} targets changed and {void} examples void"
    return said + (f", the metric {metrics_}" if metrics_ else "")


def _first_difference(found: bytes, expected: bytes) -> tuple[str, str]:
    """Place and sentence of what in ranking.json is not as recomputed."""
    want = digests.parse_canonical(expected)
    try:
        have = digests.parse_canonical(found)
    except Refusal as refusal:
        return "ranking.json", refusal.sentence
    path, here, there = _differing(have, want, "ranking.json")
    return path, f"it says {here!r}, recomputed: {there!r}"


def _differing(here: Any, there: Any, path: str) -> tuple[str, Any, Any]:
    if isinstance(here, dict) and isinstance(there, dict) and set(here) == set(there):
        for name in sorted(here):
            if digests.canonical(here[name]) != digests.canonical(there[name]):
                return _differing(here[name], there[name], f"{path}, {name}")
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for row, (mine, yours) in enumerate(zip(here, there, strict=True)):
            if digests.canonical(mine) != digests.canonical(yours):
                return _differing(mine, yours, f"{path}, row {row}")
    return path, here, there
