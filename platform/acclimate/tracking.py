"""MLflow, both ways: projects a round into it, and reads rounds back for analysts. Only this module and tracking_tables import mlflow.

MLflow is a projection that can be rebuilt: publishing again finds each run by its stage key, writes only what differs, and
makes no second run. What analysts read here comes from MLflow alone; it needs no other access to the installation.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate import projection, tracking_places, tracking_tables
from acclimate.projection import Planned
from acclimate.round_data import EntryData as EntryData
from acclimate.round_data import RoundData as RoundData
from acclimate.round_data import StageData as StageData
from acclimate_competitions.errors import Refusal, installing

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int], None]
"""Called with (runs seen, runs in all)."""

# MLflow's limits of one batch; no run of ours has that many parameters or tags.
_METRICS, _PARAMS, _TAGS = 1000, 100, 100
_CONTENT = "acclimate.content"


def publish_preparations(
    uri: str, artifacts: Path | str | None, data: RoundData, *, progress: Progress | None = None
) -> None:
    """Write entries, selections and preparations: nothing of the holdout. Idempotent.

    Args:
        uri: MLflow tracking URI.
        artifacts: folder of the artifacts, or a URI; None leaves it to the MLflow server.
        data: the round; its scores and ranking are not looked at.
        progress: called after each run.

    Raises:
        Refusal: conflict, where another round has the experiment; extra_missing.
    """
    _publish(uri, artifacts, data, list(projection.preparations(data)), progress)


def publish_round(uri: str, artifacts: Path | str | None, data: RoundData, *, progress: Progress | None = None) -> None:
    """Write a whole evaluated round, completing what publish_preparations wrote. Idempotent; arguments as there."""
    _publish(uri, artifacts, data, list(projection.whole(data)), progress)


def ranking(uri: str | Sequence[str], competition: str, round_name: str) -> "pd.DataFrame":
    """The ranking of a round, baselines unranked at the end.

    Args:
        uri: a tracking URI, or several: then a column `installation` stands first.
        competition: slug.
        round_name: the round's name, such as 2027-1, or its id.

    Returns:
        entrant, rank, rank_low, rank_high, score, se, direct_rank, direct_score, baseline; ranks are Int64, null for baselines.

    Raises:
        Refusal: round_unknown, extra_missing.
    """

    def rows(found: "_Round") -> Iterator[dict[str, Any]]:
        metric = found.tags["acclimate.metric"]
        for run in found.runs("entry") + found.runs("baseline"):
            value = run.data.metrics.get
            yield {
                "entrant": run.data.tags["acclimate.entrant"],
                "rank": value("rank/rank"),
                "rank_low": value("rank/low"),
                "rank_high": value("rank/high"),
                "score": value(f"test/{metric}"),
                "se": value(f"test/{metric}.se"),
                "direct_rank": value("rank/direct"),
                "direct_score": value(f"direct/{metric}"),
                "baseline": run.data.tags["acclimate.role"] == "baseline",
            }

    columns = "entrant rank rank_low rank_high score se direct_rank direct_score baseline".split()
    whole = ["rank", "rank_low", "rank_high", "direct_rank"]
    return _frame(_find(uri, competition, round_name), rows, columns, whole=whole, by=["baseline", "rank", "entrant"])


def scores(uri: str | Sequence[str], competition: str, round_name: str) -> "pd.DataFrame":
    """Every evaluation: entrant, baseline, task, protocol, seed, metric, score, se, n, missing.

    Arguments and refusals as ranking(). An evaluation without a single scored example has score null and n 0.
    """

    def rows(found: "_Round") -> Iterator[dict[str, Any]]:
        for run in found.runs("evaluate"):
            tags, metrics = run.data.tags, run.data.metrics
            task, seed = tags["acclimate.task"], tags.get("acclimate.seed")
            for key in [key for key in metrics if key.startswith(f"test/{task}/") and key.endswith(".n")]:
                stem = key.removesuffix(".n")
                yield {
                    "entrant": tags["acclimate.entrant"],
                    "baseline": tags["acclimate.baseline"] == "true",
                    "task": task,
                    "protocol": tags["acclimate.protocol"],
                    "seed": None if seed is None else int(seed),
                    "metric": stem.removeprefix(f"test/{task}/"),
                    "score": metrics.get(stem),
                    "se": metrics.get(f"{stem}.se"),
                    "n": metrics[key],
                    "missing": metrics[f"{stem}.missing"],
                }

    columns = "entrant baseline task protocol seed metric score se n missing".split()
    order = ["entrant", "task", "protocol", "seed", "metric"]
    return _frame(_find(uri, competition, round_name), rows, columns, whole=["seed", "n", "missing"], by=order)


def preparations(uri: str | Sequence[str], competition: str, round_name: str) -> "pd.DataFrame":
    """Every preparation: entrant, baseline, task, seed, outcome, selected, lr, validation, tokens, steps, seconds, flops.

    Arguments and refusals as ranking(). lr is null where the base model was chosen; validation is the NLL in nats.
    """

    def rows(found: "_Round") -> Iterator[dict[str, Any]]:
        for run in found.runs("prepare"):
            tags, metrics, params = run.data.tags, run.data.metrics, run.data.params
            lr = params.get("lr", "none")
            yield {
                "entrant": tags["acclimate.entrant"],
                "baseline": tags["acclimate.baseline"] == "true",
                "task": tags["acclimate.task"],
                "seed": int(tags["acclimate.seed"]),
                "outcome": tags["acclimate.outcome"],
                "selected": params.get("selected"),
                "lr": None if lr == "none" else float(lr),
                "validation": metrics.get("valid/nll"),
                **{name: metrics.get(f"cost/{name}") for name in ("tokens", "steps", "seconds", "flops")},
            }

    columns = "entrant baseline task seed outcome selected lr validation tokens steps seconds flops".split()
    order = ["entrant", "task", "seed"]
    return _frame(_find(uri, competition, round_name), rows, columns, whole=["seed", "tokens", "steps"], by=order)


def examples(
    uri: str | Sequence[str],
    competition: str,
    round_name: str,
    *,
    entrant: str | None = None,
    task: str | None = None,
    protocol: str | None = None,
) -> "pd.DataFrame":
    """Every score of every example, from the runs' examples.parquet; narrow it by entrant, task or protocol.

    Returns:
        entrant, task, protocol, seed, example, cluster, metric, target (digest), score (null: unscored), reason.

    Raises:
        Refusal: round_unknown, extra_missing; holdout_private, where the holdout stays private.
    """
    wanted = {"entrant": entrant, "task": task, "protocol": protocol}

    def rows(found: "_Round") -> Iterator[dict[str, Any]]:
        if found.tags.get("acclimate.holdout") == "private":
            raise Refusal(
                "holdout_private",
                f"the holdout of round {found.tags['acclimate.round']} stays private: MLflow has no scores of single examples",
                hint="scores() has the means; the round's organizer and its auditor have more in the whole bundle",
            )
        for run in found.runs("evaluate", **{name: value for name, value in wanted.items() if value is not None}):
            tags = run.data.tags
            seed = tags.get("acclimate.seed")
            key = {name: tags[f"acclimate.{name}"] for name in ("entrant", "task", "protocol")}
            for row in found.parquet(run, projection.EXAMPLES):
                yield key | {"seed": None if seed is None else int(seed)} | row

    columns = "entrant task protocol seed example cluster metric target score reason".split()
    order = ["entrant", "task", "protocol", "seed", "example", "metric"]
    return _frame(_find(uri, competition, round_name), rows, columns, whole=["seed"], by=order)


def rounds(uri: str | Sequence[str]) -> "pd.DataFrame":
    """All rounds that these installations have in MLflow: installation, competition, round_name, round, metric, recipe_digest."""
    pandas = _pandas()
    names = ("origin", "competition", "round_name", "round", "metric", "recipe_digest")
    rows = []
    for one in [uri] if isinstance(uri, str) else uri:
        for experiment in _experiments(_client(one)):
            rows.append({name: experiment.tags.get(f"acclimate.{name}") for name in names} | {"uri": one})
    frame = pandas.DataFrame(rows, columns=[*names, "uri"]).rename(columns={"origin": "installation"})
    return frame.sort_values(["competition", "round_name", "installation"], ignore_index=True)


# ---- writing -------------------------------------------------------------------------------------------------------


def _publish(
    uri: str, artifacts: Path | str | None, data: RoundData, planned: Sequence[Planned], progress: Progress | None
) -> None:
    tracking_tables.begin(uri, artifacts)
    tracking_places.journal(uri)
    client = _client(uri)
    experiment = _claim(client, artifacts, data)
    with tempfile.TemporaryDirectory() as temporary:
        existing = _by_key(client, experiment)
        ids = {key: run.info.run_id for key, run in existing.items()}
        # Artifacts of a tracking server are found through its address, not through their own.
        keep = _Artifacts(tracking_places.driver(uri), Path(temporary))
        for number, plan in enumerate(planned, start=1):
            ids[plan.key] = _write(client, experiment, plan, existing.get(plan.key), ids, keep)
            if progress is not None:
                progress(number, len(planned))
    tracking_places.analyze(uri)


def _claim(client: Any, artifacts: Path | str | None, data: RoundData) -> str:
    """The round's experiment, made where there is none, with its tags."""
    name = projection.experiment_name(data.competition.slug, data.name)
    tags = projection.experiment_tags(data)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = None if artifacts is None else f"{tracking_places.location(artifacts)}/{data.round}"
        created: str = client.create_experiment(name, artifact_location=location, tags=tags)
        return created
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    owner = experiment.tags.get("acclimate.round")
    if owner != data.round:
        raise Refusal(
            "conflict",
            f"the MLflow experiment {name!r} belongs to round {owner!r}, not {data.round!r}",
            hint="give each installation a tracking store of its own",
        )
    for key, value in tags.items():
        if experiment.tags.get(key) != value:
            client.set_experiment_tag(experiment.experiment_id, key, value)
    found: str = experiment.experiment_id
    return found


def _by_key(client: Any, experiment: str) -> dict[str, Any]:
    """The runs of an experiment by stage key; where a race made two of one key, all but the first are deleted."""
    found: dict[str, Any] = {}
    for run in sorted(_search(client, experiment, ""), key=lambda run: str(run.info.run_id)):
        key = run.data.tags.get("acclimate.stage_key")
        if key is None:
            continue
        if key in found:
            client.delete_run(run.info.run_id)
        else:
            found[key] = run
    return found


@dataclass(frozen=True)
class _Artifacts:
    """How a run's artifacts are kept: by the store at `tracking`, from files in `folder`."""

    tracking: str
    folder: Path

    def write(self, run: Any, files: Mapping[str, bytes]) -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        repository = get_artifact_repository(run.info.artifact_uri, tracking_uri=self.tracking)
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
            repository.log_artifact(str(self.folder / name))


def _write(
    client: Any, experiment: str, plan: Planned, run: Any | None, ids: Mapping[str, str], artifacts: _Artifacts
) -> str:
    """Make one run hold what is planned; its id. The content's digest is written last, so that a torn run is written again."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

    status = "FAILED" if plan.failed else "FINISHED"
    parent = "" if plan.parent is None else ids[plan.parent]
    if run is not None:
        held = run.data.tags
        # Where two published at once, its parent may be the run that was deleted.
        same = held.get(_CONTENT) == plan.digest and run.info.status == status
        same = same and held.get("mlflow.parentRunId", "") == parent
        # A parent that has its scores keeps them when only preparations are published again.
        richer = plan.parent is None and held.get("acclimate.outcome") == "scored" and not _scored(plan)
        if same or richer:
            return str(run.info.run_id)
    tags = dict(plan.tags) | {"mlflow.user": "acclimate", "mlflow.source.name": "acclimate"}
    if parent:
        tags["mlflow.parentRunId"] = parent
    made = run is None
    if run is None:
        run = client.create_run(experiment, start_time=_milliseconds(plan.start), tags=tags, run_name=plan.name)
    run_id = str(run.info.run_id)
    at = _milliseconds(plan.end)
    if plan.inputs:
        client.log_inputs(
            run_id,
            [
                DatasetInput(
                    # MLflow takes 36 characters of a digest; the whole one is in the tag.
                    Dataset(i.name, i.digest.removeprefix("sha256:")[:32], "acclimate", f'{{"digest": "{i.digest}"}}'),
                    [InputTag("mlflow.data.context", i.context), InputTag("acclimate.digest", i.digest)],
                )
                for i in plan.inputs
            ],
        )
    if plan.artifacts:
        artifacts.write(run, plan.artifacts)
    metrics = [Metric(name, value, at, step) for name, value, step in plan.metrics]
    for part in range(_METRICS, len(metrics), _METRICS):
        client.log_batch(run_id, metrics[part : part + _METRICS])
    new = {} if made else {name: value for name, value in tags.items() if run.data.tags.get(name) != value}
    client.log_batch(
        run_id,
        metrics[:_METRICS],
        [Param(name, value) for name, value in plan.params.items()][:_PARAMS],
        [RunTag(name, value) for name, value in (new | {_CONTENT: plan.digest}).items()][:_TAGS],
    )
    client.set_terminated(run_id, status, end_time=at)
    return run_id


def _scored(plan: Planned) -> bool:
    return plan.tags.get("acclimate.outcome") == "scored"


def _milliseconds(moment: Any) -> int:
    return int(round(moment.timestamp() * 1000))


# ---- reading -------------------------------------------------------------------------------------------------------


class _Round:
    """One round in one MLflow store."""

    def __init__(self, client: Any, uri: str, experiment: Any) -> None:
        self._client, self._uri, self._experiment = client, uri, experiment
        self.tags: Mapping[str, str] = experiment.tags

    def runs(self, role: str, **tags: str) -> list[Any]:
        """Its runs of a role, with these tags."""
        conditions = [f"tags.`acclimate.{name}` = '{_quoted(value)}'" for name, value in {"role": role, **tags}.items()]
        return list(_search(self._client, self._experiment.experiment_id, " and ".join(conditions)))

    def parquet(self, run: Any, name: str) -> list[dict[str, Any]]:
        """The rows of an artifact."""
        import mlflow.artifacts
        import pyarrow.parquet as pq

        with tempfile.TemporaryDirectory() as temporary:
            # A local artifact is read where it lies; others are fetched.
            local = run.info.artifact_uri.startswith("file:")
            path = mlflow.artifacts.download_artifacts(
                artifact_uri=f"{run.info.artifact_uri}/{name}",
                dst_path=None if local else temporary,
                tracking_uri=tracking_places.driver(self._uri),
            )
            rows: list[dict[str, Any]] = pq.read_table(path, partitioning=None).to_pylist()
            return rows


def _frame(
    found: "_Found",
    rows: Callable[[_Round], Iterable[dict[str, Any]]],
    columns: Sequence[str],
    *,
    whole: Sequence[str],
    by: Sequence[str],
) -> "pd.DataFrame":
    """One table of rows, sorted within each installation; columns named in `whole` are Int64."""
    pandas = _pandas()
    frames = []
    for one in found.rounds:
        frame = pandas.DataFrame(list(rows(one)), columns=list(columns))
        frame = frame.astype({name: "Int64" for name in whole})
        frame = frame.sort_values(list(by), ignore_index=True, na_position="last")
        if found.several:
            frame.insert(0, "installation", one.tags["acclimate.origin"])
        frames.append(frame)
    return pandas.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class _Found:
    """A round in the stores that have it; several: whether more than one store was asked for."""

    rounds: list[_Round]
    several: bool


def _find(uri: str | Sequence[str], competition: str, round_name: str) -> _Found:
    """The round in each store that has it, by its name or its id."""
    found, known = [], []
    for one in [uri] if isinstance(uri, str) else uri:
        client = _client(one)
        for experiment in _experiments(client):
            tags = experiment.tags
            name, identity = tags.get("acclimate.round_name"), tags["acclimate.round"]
            known.append(f"{tags.get('acclimate.competition')} {name}")
            if tags.get("acclimate.competition") == competition and round_name in (name, identity):
                found.append(_Round(client, one, experiment))
    if not found:
        raise Refusal(
            "round_unknown",
            f"MLflow has no round {round_name!r} of competition {competition!r}",
            hint=f"it has: {', '.join(sorted(set(known))) or 'none'}",
        )
    return _Found(found, not isinstance(uri, str))


def _experiments(client: Any) -> Iterator[Any]:
    """All experiments that are rounds."""
    for experiment in _pages(lambda token: client.search_experiments(max_results=1000, page_token=token)):
        if "acclimate.round" in experiment.tags:
            yield experiment


def _search(client: Any, experiment: str, condition: str) -> Iterator[Any]:
    return _pages(lambda token: client.search_runs([experiment], condition, max_results=1000, page_token=token))


def _pages(fetch: Callable[[str | None], Any]) -> Iterator[Any]:
    token = None
    while True:
        page = fetch(token)
        yield from page
        token = page.token
        if not token:
            return


def _quoted(value: str) -> str:
    if "'" in value or "\\" in value:
        raise Refusal("name_invalid", f"{value!r} is not a name that a run can have")
    return value


def _client(uri: str) -> Any:
    """An MLflow client that sends no telemetry and starts no jobs.

    Raises:
        Refusal: extra_missing; server_unreachable, where a tracking server does not answer.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    # MLflow's own seven tries take minutes; who calls here comes again.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    with _extra("mlflow"):
        from mlflow import MlflowClient

        # It tells of every table it makes.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        tracking_places.reach(uri)
        return MlflowClient(tracking_places.driver(uri))


def _pandas() -> Any:
    with _extra("pandas"):
        import pandas

        return pandas


@contextmanager
def _extra(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise Refusal(
            "extra_missing", f"this needs {name}, which is not installed", hint=installing("analysis")
        ) from error
