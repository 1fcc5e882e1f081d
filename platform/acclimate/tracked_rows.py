"""What MLflow's runs of a round say, as rows for tables: pure, of whatever has MLflow's attributes, so that it needs no MLflow."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from acclimate_competitions.errors import Refusal

Runs = Iterable[Any]
"""MLflow's runs, each with .data.tags, .data.metrics and .data.params."""
Row = dict[str, Any]
ACTIVE, ALL = 1, 3
"""MLflow's view types: what is not deleted, and everything."""


@dataclass(frozen=True)
class Shape:
    """How a table of a round looks.

    Attributes:
        roles: whose runs it is made of.
        columns: in their order.
        whole: columns of whole numbers, which may be null.
        by: the order of the rows.
        rows: makes them, of runs of these roles and the round's tags.
    """

    roles: tuple[str, ...]
    columns: tuple[str, ...]
    whole: tuple[str, ...]
    by: tuple[str, ...]
    rows: Callable[[Runs, Mapping[str, str]], Iterator[Row]]


def rows_of(shape: Shape, runs: Runs, tags: Mapping[str, str]) -> list[Row]:
    """A table's rows, of runs and tags as MLflow has them.

    Raises:
        Refusal: file_unreadable, where somebody took something from them, or wrote something else there.
    """
    try:
        return list(shape.rows(runs, tags))
    except (KeyError, ValueError) as error:
        raise altered(tags, f"{type(error).__name__}: {error}") from error


def altered(tags: Mapping[str, str], what: str) -> Refusal:
    """The refusal of a round of which MLflow does not have what was written."""
    name = tags.get("acclimate.round_name") or tags.get("acclimate.round", "?")
    return Refusal(
        "file_unreadable",
        f"MLflow's copy of round {name} is not as it was written: {what}",
        hint="its operator tells what differs with acclimate mlflow check, and writes it anew with acclimate mlflow sync",
    )


def ranking(runs: Runs, tags: Mapping[str, str]) -> Iterator[Row]:
    """Of entries and baselines, a row each."""
    metric = tags["acclimate.metric"]
    for run in runs:
        value, own = run.data.metrics.get, run.data.tags
        yield {
            "entrant": own["acclimate.entrant"],
            "rank": value("rank/rank"),
            "rank_low": value("rank/low"),
            "rank_high": value("rank/high"),
            "score": value(f"test/{metric}"),
            "se": value(f"test/{metric}.se"),
            "direct_rank": value("rank/direct"),
            "direct_score": value(f"direct/{metric}"),
            "baseline": own["acclimate.role"] == "baseline",
        }


def entries(runs: Runs, tags: Mapping[str, str]) -> Iterator[Row]:
    """Of entries and baselines, a row each: which model it was, and whether the definition has it as an anchor."""
    anchors = json.loads(tags.get("acclimate.anchors", "[]"))
    for run in runs:
        own = run.data.tags
        name = own["acclimate.entrant"]
        yield {
            "entrant": name,
            "model": own.get("acclimate.model_digest"),
            "baseline": own["acclimate.role"] == "baseline",
            "anchor": name in anchors,
        }


def scores(runs: Runs, tags: Mapping[str, str]) -> Iterator[Row]:
    """Of evaluations, a row for each metric."""
    for run in runs:
        own, metrics = run.data.tags, run.data.metrics
        task = own["acclimate.task"]
        start = f"test/{task}/"
        for key in metrics:
            if not (key.startswith(start) and key.endswith(".n")):
                continue
            stem = key.removesuffix(".n")
            yield {
                "entrant": own["acclimate.entrant"],
                "baseline": own["acclimate.baseline"] == "true",
                "task": task,
                "protocol": own["acclimate.protocol"],
                "seed": seed(own),
                "metric": stem.removeprefix(start),
                "score": metrics.get(stem),
                "se": metrics.get(f"{stem}.se"),
                "n": metrics[key],
                "missing": metrics[f"{stem}.missing"],
            }


def preparations(runs: Runs, tags: Mapping[str, str]) -> Iterator[Row]:
    """Of preparations, a row each."""
    for run in runs:
        own, metrics, params = run.data.tags, run.data.metrics, run.data.params
        lr = params.get("lr", "none")
        yield {
            "entrant": own["acclimate.entrant"],
            "baseline": own["acclimate.baseline"] == "true",
            "task": own["acclimate.task"],
            "seed": int(own["acclimate.seed"]),
            "outcome": own["acclimate.outcome"],
            "selected": params.get("selected"),
            "lr": None if lr == "none" else float(lr),
            "validation": metrics.get("valid/nll"),
            **{name: metrics.get(f"cost/{name}") for name in ("tokens", "steps", "seconds", "flops")},
        }


def given_up(runs: Runs, tags: Mapping[str, str]) -> Iterator[Row]:
    """Of what the round's organizer gave up, a row for each entrant, kind of work and reason."""
    counted: dict[tuple[str, str, str], int] = {}
    for run in runs:
        own = run.data.tags
        if own.get("acclimate.given_up") == "true":
            work = {"prepare": "preparation", "evaluate": "evaluation"}[own["acclimate.role"]]
            key = (own["acclimate.entrant"], work, own.get("acclimate.reason", ""))
            counted[key] = counted.get(key, 0) + 1
    for (entrant, work, reason), count in counted.items():
        yield {"entrant": entrant, "work": work, "reason": reason, "count": count}


def metrics_of(tags: Mapping[str, str]) -> dict[str, str]:
    """Task -> the metric of its ranking, by a round's tags; rounds written before there was a tag for it have one metric for all."""
    try:
        found: dict[str, str] = json.loads(tags.get("acclimate.metrics", "{}"))
        return found or dict.fromkeys(json.loads(tags.get("acclimate.tasks", "[]")), tags["acclimate.metric"])
    except (KeyError, ValueError) as error:
        raise altered(tags, f"its metrics, {type(error).__name__}: {error}") from error


def policy_of(tags: Mapping[str, str]) -> dict[str, Any] | None:
    """The policy of a round's ranking, by its tags; None of rounds written before there was a tag for it."""
    text = tags.get("acclimate.policy")
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise altered(tags, f"its policy, {error}") from error


def seed(tags: Mapping[str, str]) -> int | None:
    """The seed of a run; None for a direct evaluation."""
    found = tags.get("acclimate.seed")
    return None if found is None else int(found)


RANKING = Shape(
    roles=("entry", "baseline"),
    columns=("entrant", "rank", "rank_low", "rank_high", "score", "se", "direct_rank", "direct_score", "baseline"),
    whole=("rank", "rank_low", "rank_high", "direct_rank"),
    by=("baseline", "rank", "entrant"),
    rows=ranking,
)
ENTRIES = Shape(
    roles=("entry", "baseline"),
    columns=("entrant", "model", "baseline", "anchor"),
    whole=(),
    by=("baseline", "entrant"),
    rows=entries,
)
SCORES = Shape(
    roles=("evaluate",),
    columns=("entrant", "baseline", "task", "protocol", "seed", "metric", "score", "se", "n", "missing"),
    whole=("seed", "n", "missing"),
    by=("entrant", "task", "protocol", "seed", "metric"),
    rows=scores,
)
PREPARATIONS = Shape(
    roles=("prepare",),
    columns=(
        *("entrant", "baseline", "task", "seed", "outcome", "selected", "lr", "validation"),
        *("tokens", "steps", "seconds", "flops"),
    ),
    whole=("seed", "tokens", "steps"),
    by=("entrant", "task", "seed"),
    rows=preparations,
)
GIVEN_UP = Shape(
    roles=("prepare", "evaluate"),
    columns=("entrant", "work", "reason", "count"),
    whole=("count",),
    by=("entrant", "work", "reason"),
    rows=given_up,
)
EXAMPLES = ("entrant", "task", "protocol", "seed", "example", "cluster", "metric", "target", "score", "reason")
"""The columns of the table of single examples."""
EXAMPLES_BY = ("entrant", "task", "protocol", "seed", "example", "metric")


# ---- through MLflow's client ----------------------------------------------------------------------------------------


def experiments(client: Any, *, deleted: bool = False) -> Iterator[Any]:
    """The experiments that are rounds, one a round; or all, deleted ones too, if asked for."""
    view = ALL if deleted else ACTIVE
    found = [
        experiment
        for experiment in _pages(lambda token: client.search_experiments(view, max_results=1000, page_token=token))
        if "acclimate.round" in experiment.tags
    ]
    if deleted:
        yield from found
        return
    # Who renamed one before it was written again left two of a round: that of its own name is the round.
    chosen: dict[str, Any] = {}
    for experiment in sorted(found, key=lambda one: (not _has_own_name(one), str(one.experiment_id))):
        chosen.setdefault(experiment.tags["acclimate.round"], experiment)
    yield from (experiment for experiment in found if chosen[experiment.tags["acclimate.round"]] is experiment)


def _has_own_name(experiment: Any) -> bool:
    tags = experiment.tags
    return bool(experiment.name == f"acclimate/{tags.get('acclimate.competition')}/{tags.get('acclimate.round_name')}")


def search(client: Any, experiment: str, condition: str) -> Iterator[Any]:
    """The runs of an experiment that a condition holds for, through MLflow's client."""
    return _pages(lambda token: client.search_runs([experiment], condition, max_results=1000, page_token=token))


def _pages(fetch: Callable[[str | None], Any]) -> Iterator[Any]:
    token = None
    while True:
        page = fetch(token)
        yield from page
        token = page.token
        if not token:
            return


def quoted(value: str) -> str:
    """A value between quotes of a search.

    Raises:
        Refusal: name_invalid.
    """
    if "'" in value or "\\" in value:
        raise Refusal("name_invalid", f"{value!r} is not a name that a run can have")
    return value
