"""The numbers: every score follows from logged predictions on the opened holdout, the ranking from the scores.

1. prepared, selection: every entry was prepared from the model it submitted, its learning rate chosen by the rule; prepared.json
   says what the log says.
2. predictions: the bytes that ModelEvaluated names, one row for every example of the holdout.
3. scores, majority: recomputed from predictions, holdout and public splits, and compared row by row.
4. ranking: recomputed from the recomputed scores, and compared.

This shows the arithmetic, not the origin: that the logged models gave these predictions, only a re-run can show.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from acclimate.verify import parquet
from acclimate.verify.audit import Audit
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import digests, metrics, ranking, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.metrics import MAJORITY
from acclimate_competitions.phases import EvaluationKey, Round

# ---- what was prepared ---------------------------------------------------------------------------------------------


def prepared(audit: Audit) -> str:
    """Each entry was prepared from the model it submitted, and prepared.json says of each preparation what the log says."""
    _same_models(audit)
    rows, expected = audit.bundle.json("prepared.json"), prepared_document(audit.round)
    if not isinstance(rows, list):
        raise Failed("prepared.json", "it must be a list")
    for position, want in enumerate(expected):
        where = f"prepared.json, row {position} ({want['entrant']}, {want['task']}, seed {want['seed']})"
        if position >= len(rows) or not isinstance(rows[position], dict) or set(rows[position]) != set(want):
            raise Failed(where, f"it must be there with exactly {', '.join(sorted(want))}")
        for name, value in want.items():
            if digests.canonical(rows[position][name]) != digests.canonical(value):
                raise Failed(f"{where}, {name}", f"it says {rows[position][name]!r}, ModelPrepared says {value!r}")
    if len(rows) > len(expected):
        raise Failed(f"prepared.json, row {len(expected)}", "there was no such preparation")
    return f"{len(expected)} preparations of {len(audit.round.entries)} entries"


def prepared_document(round_: Round) -> list[dict[str, Any]]:
    """prepared.json as the log has it: by entrant, task and seed in the definition's order; failed ones have `failed`."""
    entrants = {entry.submission: entry.entrant for entry in round_.entries}
    rows = []
    for key in round_.preparation_plan():
        record = round_.prepared[key]
        row = {name: record.fields.get(name) for name in ("task", "seed", "prepared", "recipe", "selected", "cost")}
        failed = {"failed": record["failed"]} if "failed" in record.fields else {}
        rows.append({"entrant": entrants[key[0]], **row, **failed})
    return rows


def _same_models(audit: Audit) -> None:
    entries = {entry.submission: entry for entry in audit.round.entries}
    for (submission, task, seed), record in audit.round.prepared.items():
        entry = entries[submission]
        manifest: Mapping[str, Any] = audit.manifests[entry.commitment]
        submitted = digests.of_json({file["name"]: file["sha256"] for file in manifest["files"]})
        if record["base"] != submitted:
            raise Failed(
                f"ModelPrepared of {entry.entrant}, {task}, seed {seed}",
                f"its base is {record['base']}, the manifest's files give {submitted}",
            )


def selection(audit: Audit) -> str:
    """Of each entry and task, all candidates of the recipe are logged, and the selected one is the best by validation."""
    recipe, entrants = audit.competition.preparation, {e.submission: e.entrant for e in audit.round.entries}
    base = [(None, 0)] if "base" in recipe.selection.candidates else []
    last = [(lr, recipe.epochs) for lr in recipe.lr_grid] if "last" in recipe.selection.candidates else []
    logged: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for (submission, task, seed), record in audit.round.prepared.items():
        if "failed" in record.fields:
            continue
        where = f"ModelPrepared of {entrants[submission]}, {task}, seed {seed}"
        candidates = record["candidates"]
        if [(c["lr"], c["epoch"]) for c in candidates] != base + last:
            raise Failed(where, f"its candidates are {candidates}, the recipe has (lr, epoch) {base + last}")
        if logged.setdefault((submission, task), candidates) != candidates:
            raise Failed(where, "its candidates have other validation scores than under another seed")
        # Lowest validation NLL; at a tie the lower rate, the model as submitted being 0; a diverged candidate has none.
        best = min(
            (c for c in candidates if c["validation"] is not None),
            key=lambda c: (c["validation"], c["lr"] or 0.0),
            default={"lr": None, "epoch": None},
        )
        if record["selected"] != {"lr": best["lr"], "epoch": best["epoch"]}:
            raise Failed(where, f"it selected {record['selected']}, the rule selects {best}")
    return f"{len(logged)} selections"


# ---- predictions and scores ----------------------------------------------------------------------------------------


def plan(round_: Round) -> dict[str, dict[str, list[EvaluationKey]]]:
    """Entrant -> task -> its evaluations, direct before the seeds, in the definition's order: the order of score tables."""
    entrants = {entry.submission: entry.entrant for entry in round_.entries}
    tasks = [task.name for task in round_.competition.tasks]
    result: dict[str, dict[str, list[EvaluationKey]]] = {e.entrant: {t: [] for t in tasks} for e in round_.entries}
    for key in round_.evaluation_plan():
        result[entrants[key[0]]][key[1]].append(key)
    return result


def predictions_name(entrant: str, key: EvaluationKey) -> str:
    """The bundle's file with the predictions of one evaluation."""
    _, task, seed, protocol = key
    return f"predictions/{entrant}/{protocol}-{task}-{'none' if seed is None else seed}.parquet"


def predictions(audit: Audit) -> str:
    """Each evaluation's predictions are the bytes that ModelEvaluated names, for every example of the holdout and no other."""
    audit.plan = plan(audit.round)
    named = {
        predictions_name(e, key): key for e, tasks in audit.plan.items() for keys in tasks.values() for key in keys
    }
    for name in audit.bundle.under("predictions"):
        if name not in named:
            raise Failed(name, "the log has no such evaluation")
    for name, key in named.items():
        record, found = audit.round.evaluated[key], audit.bundle.digest(name)
        where = f"ModelEvaluated of {name.split('/')[1]}, {key[1]}, seed {key[2]}, {key[3]}"
        if found != record["predictions"]:
            raise Failed(name, f"its digest is {found}, {where} says {record['predictions']}")
        table = parquet.read(audit.bundle.path(name), name, tables.PREDICTIONS)
        if table.num_rows != record["count"]:
            raise Failed(name, f"{table.num_rows} rows, {where} counts {record['count']}")
        _is_of(table, name, (name.split("/")[1], key[3], key[1], key[2]))
        _covers(table, audit.holdout[key[1]], name)
    return f"{len(named)} evaluations"


def _is_of(table: pa.Table, name: str, expected: tuple[object, ...]) -> None:
    columns = (table.column(column).to_pylist() for column in ("entrant", "protocol", "task", "seed"))
    for row, found in enumerate(zip(*columns, strict=True)):
        if found != expected:
            raise Failed(f"{name}, row {row}", f"it is of {found}, the file is of {expected}")


def _covers(table: pa.Table, holdout: pa.Table, name: str) -> None:
    left = dict.fromkeys(holdout.column("example").to_pylist())
    for row, example in enumerate(table.column("example").to_pylist()):
        if example not in left:
            raise Failed(f"{name}, row {row}", f"example {example!r} is not in the holdout, or was there before")
        del left[example]
    if left:
        raise Failed(name, f"example {next(iter(left))!r} of the holdout has no row")


def scores(audit: Audit) -> str:
    """Scoring the predictions again gives every published score, row by row."""
    audit.scores = {entrant: _scored(audit, entrant) for entrant in audit.plan}
    for entrant in audit.scores:
        _compare(audit, entrant)
    named = {f"scores/{name}.parquet" for name in {*audit.plan, *audit.competition.ranking.baselines}}
    for name in audit.bundle.under("scores"):
        if name not in named:
            raise Failed(name, "the round has no such entry or baseline")
    return f"{sum(table.num_rows for table in audit.scores.values())} scores of {len(audit.scores)} entries"


def _scored(audit: Audit, entrant: str) -> pa.Table:
    parts = []
    for task in audit.competition.tasks:
        names = [predictions_name(entrant, key) for key in audit.plan[entrant][task.name]]
        found = pa.concat_tables(parquet.read(audit.bundle.path(name), name, tables.PREDICTIONS) for name in names)
        cluster = audit.competition.ranking.cluster
        parts.append(metrics.score_predictions(found, audit.holdout[task.name], task, cluster=cluster))
    return pa.concat_tables(parts)


def majority(audit: Audit) -> str:
    """The scores of the null predictor follow from the public preparation splits and the holdout."""
    if MAJORITY not in audit.competition.ranking.baselines:
        return "the definition names no such baseline"
    seeds, cluster, parts = audit.competition.preparation.seeds, audit.competition.ranking.cluster, []
    for task in audit.competition.tasks:
        name = f"public/splits/{task.name}/preparation.parquet"
        preparation, holdout = parquet.read(audit.bundle.path(name), name), audit.holdout[task.name]
        parts.append(metrics.majority_scores(preparation, holdout, task, seeds=seeds, cluster=cluster))
    audit.scores[MAJORITY] = pa.concat_tables(parts)
    _compare(audit, MAJORITY)
    return f"{audit.scores[MAJORITY].num_rows} scores"


def _compare(audit: Audit, entrant: str) -> None:
    name = f"scores/{entrant}.parquet"
    published = parquet.read(audit.bundle.path(name), name, tables.SCORES)
    parquet.same(published, audit.scores[entrant], name, was="recomputed")


# ---- ranking -------------------------------------------------------------------------------------------------------


def rank(audit: Audit) -> str:
    """Ranking the recomputed scores by the committed policy gives ranking.json, digit for digit."""
    audit.ranking = recomputed_ranking(audit)
    found, expected = audit.bundle.read("ranking.json"), digests.canonical(audit.ranking.document())
    if found != expected:
        raise Failed(*_first_difference(found, expected))
    return f"{len(audit.ranking.rows)} entrants ranked, {audit.ranking.digest}"


def recomputed_ranking(audit: Audit) -> ranking.Ranking:
    """The ranking of the scores that the audit recomputed."""
    competition = audit.competition
    table = pa.concat_tables(audit.scores[entrant] for entrant in sorted(audit.scores))
    return ranking.rank(table, tasks=competition.tasks, policy=competition.ranking, entrants=list(audit.plan))


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


def published(audit: Audit) -> str:
    """The last RankingPublished or RankingRevised, signed by the organizer, names the digest of ranking.json."""
    if not audit.round.rankings:
        raise NotChecked("the round is evaluated, not published yet: nobody has signed a ranking")
    named, found = audit.round.rankings[-1][0], audit.ranking.digest
    if named != found:
        raise Failed("the log's last ranking record", f"it names {named}, ranking.json has {found}")
    return f"version {len(audit.round.rankings)}"
