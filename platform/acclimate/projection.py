"""A round as MLflow runs, still without MLflow: which runs there are, and what each holds. Pure, so that it can be rebuilt at will.

    experiment acclimate/{competition}/{round name}
        role entry, baseline    one an entrant, the parents: manifest, aggregated scores, ranks
        role select             one an entry and task: the candidates' validation loss
        role prepare            one an entry, task and seed: training curve, validation loss, cost
        role evaluate           one an entrant, task, protocol and seed: scores of the holdout, example by example

Where the holdout stays private MLflow gets means and counts only: nothing of any single example, and no digest that would confirm a guessed file.

A run is found by its tag `acclimate.stage_key`; its time is that of the stage, so that projecting again changes nothing.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from acclimate import evaluations
from acclimate.evaluations import Evaluation
from acclimate.round_data import EntryData, RoundData, StageData
from acclimate_competitions import digests
from acclimate_competitions.definition import Competition

EXAMPLES = "examples.parquet"
"""The artifact of an evaluation with the score of each example."""
CURVE_POINTS = 200
"""At most so many points of a training curve."""

_MANIFEST_PARAMS = ("title", "kind", "family", "base", "parameters", "released", "weights_after")


@dataclass(frozen=True)
class Input:
    """A data set that a run used: name, digest, and what for (training | validation | evaluation)."""

    name: str
    digest: str
    context: str


@dataclass(frozen=True)
class Planned:
    """One run.

    Attributes:
        metrics: (key, value, step).
        artifacts: file name -> bytes.
        start, end: the run's time.
        parent: stage key of the parent run, None for a parent.
    """

    key: str
    name: str
    parent: str | None
    tags: Mapping[str, str]
    params: Mapping[str, str]
    metrics: tuple[tuple[str, float, int], ...]
    inputs: tuple[Input, ...]
    artifacts: Mapping[str, bytes]
    start: datetime
    end: datetime
    failed: bool = False

    @property
    def digest(self) -> str:
        """Digest of everything that the run holds; a run that has it needs no second writing."""
        return digests.of_json(
            {
                "tags": dict(self.tags),
                "params": dict(self.params),
                "metrics": [list(metric) for metric in self.metrics],
                "inputs": [[i.name, i.digest, i.context] for i in self.inputs],
                "artifacts": {name: digests.of_bytes(data) for name, data in self.artifacts.items()},
                "times": [self.start.isoformat(), self.end.isoformat()],
                "failed": self.failed,
            }
        )


def experiment_name(competition: str, round_name: str) -> str:
    """The experiment's name."""
    return f"acclimate/{competition}/{round_name}"


def overall_metric(competition: Competition) -> str:
    """What the score over all tasks is called: the metric that they share, or how they are aggregated by ranks."""
    aggregate = competition.ranking.aggregate
    return competition.tasks[0].metric if aggregate == "mean" else aggregate


def experiment_tags(data: RoundData) -> dict[str, str]:
    """The experiment's tags."""
    c = data.competition
    public = " The data are public: the round shows the protocol, not blindness." if c.data_is_public else ""
    found = {
        "round": data.round,
        "competition": c.slug,
        "round_name": data.name,
        "origin": data.origin,
        "metric": overall_metric(c),
        "metrics": json.dumps({task.name: task.metric for task in c.tasks}),
        "tasks": json.dumps([task.name for task in c.tasks]),
        "policy": json.dumps(c.ranking.document(), sort_keys=True),
        "definition_digest": c.digest,
        "recipe_digest": c.preparation.digest,
        "policy_digest": c.ranking.digest,
        "code_digest": data.code,
        **data.tags,
    }
    if c.anchors:
        found["anchors"] = json.dumps([anchor.name for anchor in c.anchors])
    if _private(data):
        found["holdout"] = "private"
    if data.ranking is not None:
        found |= {"ranking_digest": digests.of_json(dict(data.ranking)), "version": str(data.revision + 1)}
    tags = {f"acclimate.{name}": value for name, value in found.items()}
    return tags | {"mlflow.note.content": f"{c.title}, blind round {data.name} ({data.round}).{public}"}


def preparations(data: RoundData) -> Iterator[Planned]:
    """Runs that hold nothing of the holdout: entries without scores, select, prepare. Parents first."""
    for entry in data.entries:
        yield _parent(data, entry.entrant, entry, ())
    chosen = {(s.entrant, s.task): selected(s.document) for s in data.stages if s.kind == "select"}
    for stage in data.stages:
        if stage.kind == "select":
            yield _select(data, stage)
        elif stage.kind == "prepare":
            yield _prepare(data, stage, chosen.get((stage.entrant, stage.task)))


def whole(data: RoundData) -> Iterator[Planned]:
    """All runs of an evaluated round; parents first."""
    groups = list(evaluations.groups(data.scores)) if data.scores is not None else []
    entries = {entry.entrant: entry for entry in data.entries}
    aggregated = _by_version(data, groups)
    for entrant in dict.fromkeys([*entries, *(group.entrant for group in groups)]):
        yield _parent(data, entrant, entries.get(entrant), aggregated.get(entrant, ()))
    for planned in preparations(data):
        if planned.parent is not None:
            yield planned
    stages = {(s.entrant, s.protocol, s.task, s.seed): s for s in data.stages if s.kind == "evaluate"}
    for group in groups:
        yield _evaluate(data, group, stages.get((group.entrant, group.protocol, group.task, group.seed)))


def selected(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The chosen candidate {lr, epoch, validation} of an element of Outcome.results["selections"]; None: all diverged."""
    choice: Mapping[str, Any] | None = document["selected"]
    if choice is None:
        return None
    found: list[Mapping[str, Any]] = [
        c for c in document["candidates"] if (c["lr"], c["epoch"]) == (choice["lr"], choice["epoch"])
    ]
    return found[0] if found else choice


# ---- the runs of each role -----------------------------------------------------------------------------------------


def _tags(data: RoundData, role: str, entrant: str, **more: str | int | None) -> dict[str, str]:
    known = {
        "role": role,
        "competition": data.competition.slug,
        "round": data.round,
        "entrant": entrant,
        "baseline": "true" if entrant in data.competition.ranking.baselines else "false",
        "engine": data.engine,
        "code_digest": data.code,
        **more,
    }
    return {f"acclimate.{name}": str(value) for name, value in known.items() if value not in (None, "")}


def _parent_key(data: RoundData, entrant: str) -> str:
    return digests.of_json({"round": data.round, "role": "entry", "entrant": entrant})


def _parent(
    data: RoundData, entrant: str, entry: EntryData | None, metrics: tuple[tuple[str, float, int], ...]
) -> Planned:
    baseline = entrant in data.competition.ranking.baselines
    tags = _tags(
        data,
        "baseline" if baseline else "entry",
        entrant,
        stage_key=_parent_key(data, entrant),
        submission=entry.submission if entry else None,
        model_digest=entry.model if entry else None,
        recipe_digest=data.competition.preparation.digest,
        outcome="scored" if metrics else None,
        version=data.revision + 1 if metrics else None,
    )
    artifacts: dict[str, bytes] = {}
    params: dict[str, str] = {}
    if entry is not None:
        own = [stage for stage in data.stages if stage.entrant == entrant and stage.hardware]
        environment = {
            "code": data.code,
            "engine": data.engine,
            "hardware": sorted({stage.hardware for stage in own}),
            "versions": {name: version for stage in own for name, version in sorted(stage.versions.items())},
        }
        artifacts = {
            "recipe.json": _json(data.competition.preparation.document()),
            "manifest.json": _json(entry.manifest),
            "environment.json": _json(environment),
        }
        params = {n: _text(entry.manifest[n]) for n in _MANIFEST_PARAMS if entry.manifest.get(n) not in (None, "")}
    return Planned(
        key=_parent_key(data, entrant),
        name=entrant,
        parent=None,
        tags=tags,
        params=params,
        metrics=metrics + _cost(data, entrant),
        inputs=(),
        artifacts=artifacts,
        start=data.at,
        end=data.at,
    )


def _stage(data: RoundData, stage: StageData, **parts: Any) -> Planned:
    seed = "" if stage.seed is None else f" seed {stage.seed}"
    protocol = "" if stage.protocol is None else f" {stage.protocol}"
    models = {entry.entrant: entry for entry in data.entries}
    entry = models.get(stage.entrant)
    tags = {
        "stage_key": stage.key,
        "task": stage.task,
        "seed": stage.seed,
        "protocol": stage.protocol,
        "attempt": stage.attempt,
        "submission": entry.submission if entry else None,
        "model_digest": entry.model if entry else None,
        "recipe_digest": data.competition.preparation.digest,
        "hardware": stage.hardware,
        **parts.pop("tags", {}),
    }
    seconds = float(stage.document.get("cost", stage.document).get("seconds", 0.0))
    return Planned(
        key=stage.key,
        name=f"{stage.entrant} {stage.kind} {stage.task}{protocol}{seed}",
        parent=_parent_key(data, stage.entrant),
        tags=_tags(data, stage.kind, stage.entrant, **tags),
        start=stage.at - timedelta(seconds=seconds),
        end=stage.at,
        **parts,
    )


def _select(data: RoundData, stage: StageData) -> Planned:
    choice = selected(stage.document)
    metrics: list[tuple[str, Any, int]] = [("valid/nll", choice.get("validation"), 0)] if choice else []
    for candidate in stage.document["candidates"]:
        metrics.append((f"valid/{_candidate(candidate)}/nll", candidate["validation"], 0))
    metrics += [(f"cost/{name}", value, 0) for name, value in stage.document.get("cost", {}).items()]
    return _stage(
        data,
        stage,
        tags={"outcome": "done" if choice else "failed", "reason": None if choice else "every candidate diverged"},
        params=_choice_params(choice) | {"seed": str(data.competition.preparation.selection.seed)},
        metrics=_finite(metrics),
        inputs=_public(data, stage.task),
        artifacts={"candidates.json": _json(stage.document["candidates"])},
        failed=choice is None,
    )


def _prepare(data: RoundData, stage: StageData, choice: Mapping[str, Any] | None) -> Planned:
    document, recipe = stage.document, data.competition.preparation
    failed = document.get("failed")
    losses = document.get("losses") or []
    curve = list(zip(document.get("loss_steps") or range(1, len(losses) + 1), losses, strict=True))
    metrics: list[tuple[str, Any, int]] = [("train/loss", loss, step) for step, loss in _thinned(curve)]
    metrics += [("valid/nll", document.get("validation"), 0)]
    metrics += [(f"cost/{name}", value, 0) for name, value in document.get("cost", {}).items()]
    return _stage(
        data,
        stage,
        tags={
            "outcome": "failed" if failed else "done",
            "reason": failed["reason"][:1000] if failed else None,
            "given_up": _given_up(document),
            "note": (document.get("note") or "")[:1000],
            "prepared_digest": document.get("prepared"),
        },
        params={
            "epochs": str(recipe.epochs),
            "global_batch": str(recipe.global_batch),
            "micro_batch": str(document.get("micro_batch", recipe.global_batch)),
            "seed": str(stage.seed),
        }
        | _choice_params(choice),
        metrics=_finite(metrics),
        inputs=_public(data, stage.task),
        artifacts={},
        failed=bool(failed),
    )


def _evaluate(data: RoundData, group: Evaluation, stage: StageData | None) -> Planned:
    """A group of scores; one without a stage is the platform's own: a null predictor, or a preparation that failed."""
    key = {"round": data.round, "entrant": group.entrant, "protocol": group.protocol}
    stage = stage or StageData(
        kind="evaluate",
        key=digests.of_json({**key, "task": group.task, "seed": group.seed}),
        entrant=group.entrant,
        task=group.task,
        seed=group.seed,
        protocol=group.protocol,
        document={},
        at=data.at,
    )
    metrics: list[tuple[str, Any, int]] = []
    for metric, found in group.summaries.items():
        metrics += [(f"test/{group.task}/{metric}{end}", value, data.revision) for end, value in found.items()]
    if "seconds" in stage.document:
        metrics.append(("cost/seconds", stage.document["seconds"], 0))
    scored = any(found[".n"] for found in group.summaries.values())
    prepared = {(s.entrant, s.task, s.seed): s.document.get("prepared") for s in data.stages if s.kind == "prepare"}
    model = {"model_digest": prepared.get((group.entrant, group.task, group.seed))} if group.seed is not None else {}
    holdout = data.holdout.get(group.task)
    name = f"{data.competition.slug}/{group.task}/holdout"
    return _stage(
        data,
        stage,
        tags={
            "outcome": "scored" if scored else "unscored",
            "reason": _why(data, stage),
            "given_up": _given_up(stage.document),
            **model,
        },
        params={},
        metrics=_finite(metrics),
        inputs=(Input(name, holdout, "evaluation"),) if holdout else (),
        artifacts={}
        if _private(data)
        else {EXAMPLES: evaluations.examples(group.table, data.targets.get(group.task, {}))},
    )


def _why(data: RoundData, stage: StageData) -> str | None:
    """Why an evaluation came to nothing; not of a holdout that stays private, of which a reason may tell, unless it was given up."""
    failed = stage.document.get("failed", {})
    told = failed.get("given_up") or not _private(data)
    return str(failed["reason"])[:1000] if failed and told else None


def _given_up(document: Mapping[str, Any]) -> str | None:
    """Whether the organizer gave the work up, as a tag has it."""
    return "true" if document.get("failed", {}).get("given_up") else None


def _private(data: RoundData) -> bool:
    return data.competition.round.holdout_after == "private"


# ---- scores --------------------------------------------------------------------------------------------------------


def _by_version(data: RoundData, groups: list[Evaluation]) -> dict[str, tuple[tuple[str, float, int], ...]]:
    """Metrics of each parent as (name, value, step): a version's step is one less than its number, and the newest is the highest.

    What the newest version does not have (its metric is another, or the score is unknown now) is in no step: it would be the latest value.
    """
    found: dict[str, tuple[tuple[str, float, int], ...]] = {}
    newest = _aggregated(data, groups)
    told = [_aggregated(replace(data, **vars(old)), list(evaluations.groups(old.scores))) for old in data.older]
    # Where the older versions are not at hand, the newest has its own step nevertheless.
    for step, metrics in [*enumerate(told), (data.revision, newest)]:
        for entrant, own in metrics.items():
            kept = tuple((name, value, step) for name, value in own.items() if name in newest.get(entrant, {}))
            found[entrant] = found.get(entrant, ()) + kept
    return found


def _aggregated(data: RoundData, groups: list[Evaluation]) -> dict[str, dict[str, float]]:
    """Metrics of each parent: ranked entrants as the ranking says, baselines' tasks as means over their seeds."""
    if data.ranking is None:
        return {}
    metric = overall_metric(data.competition)
    found: dict[str, dict[str, float | None]] = {}
    for row in [*data.ranking["ranking"], *data.ranking["baselines"]]:
        own = found.setdefault(row["entrant"], {})
        own |= {f"test/{metric}{end}": row.get(name) for end, name in (("", "score"), (".se", "se"), (".n", "n"))}
        own |= {f"direct/{metric}": row.get("direct_score"), "rank/seeds": row.get("seeds")}
        ranks = {"rank": "rank", "low": "rank_low", "high": "rank_high", "tier": "tier", "direct": "direct_rank"}
        own |= {f"rank/{short}": row.get(name) for short, name in ranks.items()}
    for task in data.competition.tasks:
        for row in data.ranking["tasks"].get(task.name, []):
            key = f"{task.name}/{task.metric}"
            own = found.setdefault(row["entrant"], {})
            own |= {f"test/{key}": row["score"], f"test/{key}.se": row["se"], f"test/{key}.n": row["n"]}
            own |= {f"direct/{key}": row["direct_score"], f"rank/task/{task.name}": row["rank"]}
        for row in data.ranking["baselines"]:
            for protocol, prefix in (("prepared", "test"), ("direct", "direct")):
                means = [
                    mean
                    for group in groups
                    if (group.entrant, group.task, group.protocol) == (row["entrant"], task.name, protocol)
                    and (mean := group.summaries[task.metric].get("")) is not None
                ]
                if means:
                    found[row["entrant"]][f"{prefix}/{task.name}/{task.metric}"] = math.fsum(means) / len(means)
    return {
        entrant: {name: float(value) for name, value in own.items() if value is not None}
        for entrant, own in found.items()
    }


# ---- small parts ---------------------------------------------------------------------------------------------------


def _public(data: RoundData, task: str) -> tuple[Input, ...]:
    return tuple(
        Input(f"{data.competition.slug}/{task}/{split}", data.files[name], context)
        for split, context in (("preparation", "training"), ("validation", "validation"))
        if (name := f"splits/{task}/{split}.parquet") in data.files
    )


def _cost(data: RoundData, entrant: str) -> tuple[tuple[str, float, int], ...]:
    """What the selections and preparations of an entry cost together."""
    costs = [s.document.get("cost", {}) for s in data.stages if s.kind != "evaluate" and s.entrant == entrant]
    names = sorted({name for cost in costs for name in cost})
    return _finite((f"cost/{name}", math.fsum(cost.get(name) or 0.0 for cost in costs), 0) for name in names)


def _candidate(candidate: Mapping[str, Any]) -> str:
    return "base" if candidate["lr"] is None else f"lr-{digests.number(candidate['lr'])}-epoch-{candidate['epoch']}"


def _choice_params(choice: Mapping[str, Any] | None) -> dict[str, str]:
    if choice is None:
        return {}
    lr = "none" if choice["lr"] is None else digests.number(choice["lr"])
    return {"selected": _candidate(choice), "lr": lr, "epoch": str(choice["epoch"])}


def _finite(metrics: Iterable[tuple[str, Any, int]]) -> tuple[tuple[str, float, int], ...]:
    """Metrics that have a value: an unknown or infinite one is left out, never written as zero."""
    return tuple(
        (name, float(value), step) for name, value, step in metrics if value is not None and math.isfinite(value)
    )


def _thinned(curve: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    """Evenly drawn points (step, loss) of a curve, first and last included."""
    last = len(curve) - 1
    if last < CURVE_POINTS:
        return curve
    return [curve[round(point * last / (CURVE_POINTS - 1))] for point in range(CURVE_POINTS)]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode()


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:500]
