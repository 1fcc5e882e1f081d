"""The numbers: every score follows from logged predictions on the opened holdout, the ranking from the scores.

1. prepared, selection: every entry was prepared from the model it submitted, its learning rate chosen by the rule; prepared.json
   says what the log says.
2. predictions: the bytes that ModelEvaluated names, one row for every example of the holdout. Where no
   fine-tune counts, submitted.py holds them against the direct evaluation.
3. scores, majority: recomputed from predictions, holdout and public splits, and compared row by row.
4. ranking: recomputed from the recomputed scores, and compared.

This shows the arithmetic, not the origin: that the logged models gave these predictions, only a re-run can show.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from acclimate.verify import parquet
from acclimate.verify.audit import Audit
from acclimate.verify.names import predictions_name
from acclimate.verify.report import Failed, NotChecked
from acclimate.verify.submitted import counts_as_submitted
from acclimate_competitions import digests, metrics, records, tables
from acclimate_competitions.metrics import MAJORITY
from acclimate_competitions.phases import EvaluationKey, Round
from acclimate_competitions.recipe import Recipe
from acclimate_competitions.records import Record

_RANKINGS = frozenset({"RankingPublished", "RankingRevised"})

# ---- what was prepared ---------------------------------------------------------------------------------------------


def prepared(audit: Audit) -> str:
    """Each entry was prepared from the model it submitted, and prepared.json says of each preparation what the log says.

    What was given up is counted here, of evaluations too: the records alone tell it, also where the predictions are withheld.
    """
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
    failed = [f"{row['entrant']}, {row['task']}, seed {row['seed']}" for row in expected if "failed" in row]
    said = f"; {len(failed)} failed: {'; '.join(failed)}" if failed else ""
    if given_up := sum(map(records.was_given_up, audit.round.prepared.values())):
        said += f"; {given_up} of them were given up by the organizer, as the evaluator says"
    return (
        f"{len(expected)} preparations of {len(audit.round.entries)} entries{said}{_given_up_evaluations(audit.round)}"
    )


def _given_up_evaluations(round_: Round) -> str:
    entrants = {entry.submission: entry.entrant for entry in round_.entries}
    lost = [key for key, record in round_.evaluated.items() if records.was_given_up(record)]
    named = "; ".join(f"{entrants[key[0]]}, {key[1]}, {key[3] if key[2] is None else f'seed {key[2]}'}" for key in lost)
    counted = f"{len(lost)} {'evaluation was' if len(lost) == 1 else 'evaluations were'}"
    return f"; {counted} given up by the organizer, as the evaluator says: {named}" if lost else ""


def prepared_document(round_: Round) -> list[dict[str, Any]]:
    """prepared.json as the log has it: by entrant, task and seed in the definition's order.

    Failed ones have `failed`; those that diverged, so that the model counts as submitted, have `diverged`.
    """
    entrants = {entry.submission: entry.entrant for entry in round_.entries}
    rows = []
    for key in round_.preparation_plan():
        record = round_.prepared[key]
        row = {name: record.fields.get(name) for name in ("task", "seed", "prepared", "recipe", "selected", "cost")}
        outcome = {name: record[name] for name in ("diverged", "failed") if name in record.fields}
        rows.append({"entrant": entrants[key[0]], **row, **outcome})
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
    models: dict[tuple[int, str], str] = {}
    commitments = {entry.submission: entry.commitment for entry in audit.round.entries}
    for (submission, task, seed), record in audit.round.prepared.items():
        if "failed" in record.fields:
            continue
        where = f"ModelPrepared of {entrants[submission]}, {task}, seed {seed}"
        candidates = record["candidates"]
        if not _same([[c["lr"], c["epoch"]] for c in candidates], [list(pair) for pair in base + last]):
            raise Failed(where, f"its candidates are {candidates}, the recipe has (lr, epoch) {base + last}")
        if not _same(logged.setdefault((submission, task), candidates), candidates):
            raise Failed(where, "its candidates have other validation scores than under another seed")
        best = _best(candidates)
        if not _same(record["selected"], best):
            raise Failed(where, f"it selected {record['selected']}, the rule selects {best}")
        _is_divergence(record, recipe, where)
        # A classifier's head is made for the task: as submitted it is one model a task.
        kind = audit.manifests[commitments[submission]]["kind"]
        key = (submission, task if kind in ("hf-sequence-classifier", "hf-image-classifier") else "")
        if counts_as_submitted(record) and models.setdefault(key, record["prepared"]) != record["prepared"]:
            sentence = f"the model counts as submitted, as {record['prepared']} here and {models[key]} elsewhere"
            raise Failed(where, sentence)
    return f"{len(logged)} selections"


def _same(here: Any, there: Any) -> bool:
    # Python takes true for 1 and 1.0; JSON does not.
    return digests.canonical(here) == digests.canonical(there)


def _best(candidates: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Lowest validation NLL; at a tie the lower rate, the model as submitted being 0; None where all have diverged."""
    usable = [c for c in candidates if c["validation"] is not None]
    best = min(usable, key=lambda c: (c["validation"], c["lr"] or 0.0), default=None)
    return None if best is None else {"lr": best["lr"], "epoch": best["epoch"]}


def _is_divergence(record: Record, recipe: Recipe, where: str) -> None:
    """What a record says of divergence is possible under the recipe and fits what was selected."""
    selected = record["selected"]
    if "diverged" in record.fields and recipe.diverged != "base":
        raise Failed(where, f"it diverged and did not fail, though the recipe has diverged = {recipe.diverged!r}")
    if "diverged" in record.fields and selected is not None and selected["lr"] is None:
        raise Failed(where, "it diverged, though the model as submitted was selected, which is not trained")
    if "diverged" not in record.fields and selected is None:
        raise Failed(where, "every candidate diverged, and the preparation neither failed nor says so")


# ---- predictions and scores ----------------------------------------------------------------------------------------


def plan(round_: Round) -> dict[str, dict[str, list[EvaluationKey]]]:
    """Entrant -> task -> its evaluations, direct before the seeds, in the definition's order: the order of score tables."""
    entrants = {entry.submission: entry.entrant for entry in round_.entries}
    tasks = [task.name for task in round_.competition.tasks]
    result: dict[str, dict[str, list[EvaluationKey]]] = {e.entrant: {t: [] for t in tasks} for e in round_.entries}
    for key in round_.evaluation_plan():
        result[entrants[key[0]]][key[1]].append(key)
    return result


def predictions(audit: Audit) -> str:
    """Each evaluation's predictions are the bytes that ModelEvaluated names, for every example of the holdout and no other."""
    audit.plan = plan(audit.round)
    named = {
        predictions_name(e, key): key for e, tasks in audit.plan.items() for keys in tasks.values() for key in keys
    }
    for name in audit.bundle.under("predictions"):
        if name not in named:
            raise Failed(name, "the log has no such evaluation")
    given_up = 0
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
        if records.was_given_up(record):
            _has_none(table, name, where)
            given_up += 1
    told = f"; {given_up} given up, which have no prediction" if given_up else ""
    return f"{len(named)} evaluations{told}"


def _has_none(table: pa.Table, name: str, where: str) -> None:
    """What was given up has no prediction: else a score would come from work that nobody answers for."""
    for row, found in enumerate(zip(table["loglikelihoods"].is_valid(), table["text"].is_valid(), strict=True)):
        if any(valid.as_py() for valid in found):
            raise Failed(
                f"{name}, row {row}", f"here is a prediction, and {where} says that the evaluation was given up"
            )


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
    audit.scores = {entrant: _compared(audit, entrant, _scored(audit, entrant)) for entrant in audit.plan}
    majority_ = {MAJORITY} & set(audit.competition.ranking.baselines)
    named = {f"scores/{name}.parquet" for name in {*audit.plan} | majority_}
    for name in audit.bundle.under("scores"):
        if name not in named:
            raise Failed(name, "the round has no such entry, and the definition no such null baseline")
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
    audit.scores[MAJORITY] = _compared(audit, MAJORITY, pa.concat_tables(parts))
    return f"{audit.scores[MAJORITY].num_rows} scores"


def _compared(audit: Audit, entrant: str, recomputed: pa.Table) -> pa.Table:
    """Recomputed scores that are the published ones; each text once, since a round has millions of rows and few texts."""
    name = f"scores/{entrant}.parquet"
    published = parquet.read(audit.bundle.path(name), name, tables.SCORES)
    parquet.same(published, recomputed, name, was="recomputed")
    parquet.require_plain(audit.bundle.path(name), name, recomputed.cast(tables.SCORES), audit.work)
    columns = [
        column.dictionary_encode() if pa.types.is_string(column.type) else column for column in recomputed.columns
    ]
    return pa.table(columns, names=recomputed.schema.names)


# ---- ranking -------------------------------------------------------------------------------------------------------


def published(audit: Audit) -> str:
    """The last RankingPublished or RankingRevised names the digest of ranking.json; that its signer might sign it, the rules have shown."""
    if not audit.round.rankings:
        raise NotChecked("the round is evaluated, not published yet: nobody has signed a ranking")
    named, found = audit.round.rankings[-1][0], digests.of_json(audit.bundle.json("ranking.json"))
    if named != found:
        raise Failed("the log's last ranking record", f"it names {named}, ranking.json has {found}")
    last = next(r for r in reversed(audit.records) if r.round == audit.round.id and r.type in _RANKINGS)
    organizer = last.by == audit.round.defined["organizer"]["ed25519"]
    by = "signed by the organizer" if organizer else "by the round itself: an evaluator signed it"
    return f"version {len(audit.round.rankings)}, {by}"
