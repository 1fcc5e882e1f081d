"""MLflow, both ways: projects a round into it, and reads rounds back for analysts. Only modules named tracking… import mlflow.

MLflow is a projection that can be rebuilt: publishing again finds each run by its stage key, writes only what differs, and
makes no second run. What analysts read here comes from MLflow alone; it needs no other access to the installation.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate import (
    projection,
    tracked_rows,
    tracked_state,
    tracking_artifacts,
    tracking_check,
    tracking_places,
    tracking_runs,
    tracking_tables,
)
from acclimate.projection import Planned
from acclimate.round_data import EntryData as EntryData
from acclimate.round_data import RoundData as RoundData
from acclimate.round_data import StageData as StageData
from acclimate.tracked_rows import Shape
from acclimate.tracking_check import Difference
from acclimate_competitions.errors import Refusal, installing

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Progress = Callable[[int, int], None]
"""Called with (runs seen, runs in all)."""


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
        Refusal: round_unknown, extra_missing; busy, while the round is written.
    """
    return _shaped(uri, competition, round_name, shape=tracked_rows.RANKING)


def scores(uri: str | Sequence[str], competition: str, round_name: str) -> "pd.DataFrame":
    """Every evaluation: entrant, baseline, task, protocol, seed, metric, score, se, n, missing.

    Arguments and refusals as ranking(). An evaluation without a single scored example has score null and n 0.
    """
    return _shaped(uri, competition, round_name, shape=tracked_rows.SCORES)


def preparations(uri: str | Sequence[str], competition: str, round_name: str) -> "pd.DataFrame":
    """Every preparation: entrant, baseline, task, seed, outcome, selected, lr, validation, tokens, steps, seconds, flops.

    Arguments and refusals as ranking(). lr is null where the base model was chosen; validation is the NLL in nats.
    """
    return _shaped(uri, competition, round_name, shape=tracked_rows.PREPARATIONS)


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
        Refusal: round_unknown, extra_missing, busy; holdout_private, where the holdout stays private.
    """
    wanted = {"entrant": entrant, "task": task, "protocol": protocol}

    def read(found: Sequence[Tracked]) -> "pd.DataFrame":
        frames = [one.examples(**wanted).to_pandas() for one in found]
        columns, by = tracked_rows.EXAMPLES, tracked_rows.EXAMPLES_BY
        return _frame(found, frames, columns, several=not isinstance(uri, str), whole=("seed",), by=by)

    return tracked_state.whole(lambda: _find(uri, competition, round_name), read)


def rounds(uri: str | Sequence[str]) -> "pd.DataFrame":
    """All rounds that these installations have in MLflow: installation, competition, round_name, round, metric, recipe_digest."""
    pandas = with_pandas()
    names = ("origin", "competition", "round_name", "round", "metric", "recipe_digest")
    rows = []
    for one in [uri] if isinstance(uri, str) else uri:
        for experiment in tracked_rows.experiments(_client(one)):
            rows.append({name: experiment.tags.get(f"acclimate.{name}") for name in names} | {"uri": one})
    frame = pandas.DataFrame(rows, columns=[*names, "uri"]).rename(columns={"origin": "installation"})
    return frame.sort_values(["competition", "round_name", "installation"], ignore_index=True)


def check(uri: str, data: RoundData, *, progress: Progress = lambda *_: None) -> list[Difference]:
    """In what MLflow differs from the record of a round; nothing is written. Runs that are none of ours are not looked at."""
    client = _client(uri)
    experiment, doubles = tracking_runs.experiments_of(client, data)
    planned = list(projection.preparations(data) if data.ranking is None else projection.whole(data))
    twice = [Difference("extra", f"experiment {one.name!r}") for one in doubles]
    if experiment is None or experiment.lifecycle_stage == "deleted":
        return [Difference("missing", plan.name) for plan in planned] + twice
    renamed = experiment.name != projection.experiment_name(data.competition.slug, data.name)
    twice += [Difference("changed", "experiment", ("name",))] if renamed else []

    def history(run_id: str, name: str) -> list[tuple[int, float]]:
        return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))

    tracked = Tracked(client, uri, experiment)
    found = tracking_check.experiment(experiment.tags, projection.experiment_tags(data))
    return [*twice, *found] + tracking_check.runs(
        planned, tracked.runs(), history=history, artifact=tracked.artifact, progress=progress
    )


def engine(uri: str, data: RoundData) -> str | None:
    """On what MLflow says that a round ran; None where it has no run of it."""
    client = _client(uri)
    experiment, _ = tracking_runs.experiments_of(client, data)
    # Deleted ones too: who deleted all of them changed nothing of what the round ran on.
    runs = client.search_runs([experiment.experiment_id], "", tracked_rows.ALL, 1) if experiment is not None else []
    return next((run.data.tags.get("acclimate.engine") for run in runs), None)


def restore(uri: str, data: RoundData) -> list[Difference]:
    """Take a round's experiment back that somebody deleted or renamed, and take out an older one that stands beside it; what was so."""
    client, name = _client(uri), projection.experiment_name(data.competition.slug, data.name)
    experiment, doubles = tracking_runs.experiments_of(client, data)
    wrong, found = [], []
    for one in doubles:
        tracking_runs.take_out(client, one)
        found.append(Difference("extra", f"experiment {one.name!r}"))
    if experiment is None:
        return found
    if experiment.name != name:
        wrong.append("name")
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
        wrong.append("deleted")
    if experiment.name != name:
        client.rename_experiment(experiment.experiment_id, name)
    return [*found, Difference("changed", "experiment", tuple(wrong))] if wrong else found


def remove(uri: str, data: RoundData, run_ids: Iterable[str]) -> None:
    """Delete runs of a round, so that publishing writes them anew: until then the round says that it is being written."""
    client = _client(uri)
    experiment = client.get_experiment_by_name(projection.experiment_name(data.competition.slug, data.name))
    if experiment is not None:
        tracking_runs.Writing(client, experiment.experiment_id, experiment.tags).begin()
    for run_id in run_ids:
        client.delete_run(run_id)


# ---- writing -------------------------------------------------------------------------------------------------------


def _publish(
    uri: str, artifacts: Path | str | None, data: RoundData, planned: Sequence[Planned], progress: Progress | None
) -> None:
    tracking_tables.begin(uri, artifacts)
    tracking_places.journal(uri)
    client = _client(uri)
    writing = tracking_runs.claim(client, artifacts, data)
    with tempfile.TemporaryDirectory() as temporary:
        existing = tracking_runs.by_key(writing)
        ids = {key: run.info.run_id for key, run in existing.items()}
        # Artifacts of a tracking server are found through its address, not through their own.
        keep = tracking_runs.Artifacts(tracking_places.driver(uri), Path(temporary))
        for number, plan in enumerate(planned, start=1):
            ids[plan.key] = tracking_runs.write(writing, plan, existing.get(plan.key), ids, keep)
            if progress is not None:
                progress(number, len(planned))
    writing.end()
    tracking_places.analyze(uri)


# ---- reading -------------------------------------------------------------------------------------------------------


class Tracked:
    """One round in one MLflow store.

    Attributes:
        tags: of its experiment.
    """

    def __init__(self, client: Any, uri: str, experiment: Any) -> None:
        self._client, self._uri, self._experiment = client, uri, experiment
        self.tags: Mapping[str, str] = experiment.tags

    def unchanged(self) -> bool:
        """Whether the round was not written since this was found."""
        now = self._client.get_experiment(self._experiment.experiment_id).tags
        return bool(now.get(tracked_state.WRITTEN) == self.tags.get(tracked_state.WRITTEN))

    def runs(self, role: str = "", **tags: str) -> list[Any]:
        """Its runs of a role, or all, with these tags.

        Raises:
            Refusal: name_invalid.
        """
        wanted = {**({"role": role} if role else {}), **tags}
        conditions = [f"tags.`acclimate.{name}` = '{tracked_rows.quoted(value)}'" for name, value in wanted.items()]
        return list(tracked_rows.search(self._client, self._experiment.experiment_id, " and ".join(conditions)))

    def examples(self, **tags: str | None) -> "pa.Table":
        """Every score of every example of evaluations with these tags, with the columns tracked_rows.EXAMPLES.

        Raises:
            Refusal: holdout_private, where the holdout stays private; name_invalid; busy, where the round was written since it was found.
        """
        if self.tags.get("acclimate.holdout") == "private":
            raise Refusal(
                "holdout_private",
                f"the holdout of round {self.tags['acclimate.round']} stays private: MLflow has no scores of single examples",
                hint="scores() has the means; the round's organizer and its auditor have more in the whole bundle",
            )
        try:
            found = self._examples({name: value for name, value in tags.items() if value is not None})
        except Refusal:
            if self.unchanged():
                raise
            raise tracked_state.refused([self.tags]) from None
        if not self.unchanged():
            raise tracked_state.refused([self.tags])
        return found

    def _examples(self, wanted: Mapping[str, str]) -> "pa.Table":
        import pyarrow as pa

        names = tracked_rows.EXAMPLES
        types = {"seed": pa.int64(), "score": pa.float64()}
        schema = pa.schema([(name, types.get(name, pa.string())) for name in names])
        parts = [schema.empty_table()]
        for run in self.runs("evaluate", **wanted):
            own = run.data.tags
            try:
                part = self.parquet(run, projection.EXAMPLES)
                key = [pa.scalar(own[f"acclimate.{name}"], pa.string()) for name in ("entrant", "task", "protocol")]
                columns = [
                    pa.repeat(value, len(part)) for value in [*key, pa.scalar(tracked_rows.seed(own), pa.int64())]
                ]
                columns += [part.column(name) for name in names[len(columns) :]]
                parts.append(pa.table(columns, names=list(names)).cast(schema))
            except (KeyError, ValueError, pa.ArrowException) as error:
                raise tracked_rows.altered(self.tags, f"{run.info.run_name}, {error}") from error
        return pa.concat_tables(parts)

    def artifact(self, run: Any, name: str) -> bytes | None:
        """An artifact's bytes; None where it is not there.

        Raises:
            Refusal: file_unreadable, server_unreachable.
        """
        return tracking_artifacts.content(run.info.artifact_uri, name, uri=tracking_places.driver(self._uri))

    def parquet(self, run: Any, name: str) -> "pa.Table":
        """A table that is an artifact of a run.

        Raises:
            Refusal: file_unreadable, where it is not there too; server_unreachable.
            pa.ArrowException: it is no table.
        """
        found = tracking_artifacts.parquet(run.info.artifact_uri, name, uri=tracking_places.driver(self._uri))
        if found is None:
            raise tracked_rows.altered(self.tags, f"{run.info.run_name} has no artifact {name}")
        return found


def tracked(uri: str, competition: str) -> list[Tracked]:
    """All rounds of a competition that a store has, by name.

    Raises:
        Refusal: extra_missing, server_unreachable; round_unknown, where it has none.
    """
    client = _client(uri)
    known = list(tracked_rows.experiments(client))
    found = [Tracked(client, uri, one) for one in known if one.tags.get("acclimate.competition") == competition]
    if not found:
        slugs = sorted({str(one.tags.get("acclimate.competition")) for one in known})
        hint = f"it has rounds of: {', '.join(slugs) or 'none'}"
        raise Refusal("round_unknown", f"MLflow has no round of competition {competition!r}", hint=hint)
    return sorted(found, key=lambda one: (one.tags.get("acclimate.round_name", ""), one.tags["acclimate.round"]))


def _shaped(uri: str | Sequence[str], competition: str, round_name: str, *, shape: Shape) -> "pd.DataFrame":
    """The table of this shape, of the round in each store that has it."""
    pandas = with_pandas()

    def read(found: Sequence[Tracked]) -> "pd.DataFrame":
        frames = []
        for one in found:
            runs = [run for role in shape.roles for run in one.runs(role)]
            frames.append(pandas.DataFrame(tracked_rows.rows_of(shape, runs, one.tags), columns=list(shape.columns)))
        several = not isinstance(uri, str)
        return _frame(found, frames, shape.columns, several=several, whole=shape.whole, by=shape.by)

    return tracked_state.whole(lambda: _find(uri, competition, round_name), read)


def _frame(
    found: Sequence[Tracked],
    frames: "Sequence[pd.DataFrame]",
    columns: Sequence[str],
    *,
    several: bool,
    whole: Sequence[str],
    by: Sequence[str],
) -> "pd.DataFrame":
    """One table of a frame for each round found, sorted within each installation; columns named in `whole` are Int64."""
    pandas = with_pandas()
    done = []
    for one, frame in zip(found, frames, strict=True):
        frame = frame[list(columns)].astype({name: "Int64" for name in whole})
        frame = frame.sort_values(list(by), ignore_index=True, na_position="last")
        if several:
            frame.insert(0, "installation", one.tags["acclimate.origin"])
        done.append(frame)
    return pandas.concat(done, ignore_index=True)


def _find(uri: str | Sequence[str], competition: str, round_name: str) -> list[Tracked]:
    """The round in each store that has it, by its name or its id."""
    found, known = [], []
    for one in [uri] if isinstance(uri, str) else uri:
        client = _client(one)
        for experiment in tracked_rows.experiments(client):
            tags = experiment.tags
            name, identity = tags.get("acclimate.round_name"), tags["acclimate.round"]
            known.append(f"{tags.get('acclimate.competition')} {name}")
            if tags.get("acclimate.competition") == competition and round_name in (name, identity):
                found.append(Tracked(client, one, experiment))
    if not found:
        raise Refusal(
            "round_unknown",
            f"MLflow has no round {round_name!r} of competition {competition!r}",
            hint=f"it has: {', '.join(sorted(set(known))) or 'none'}",
        )
    return found


def _client(uri: str) -> Any:
    """An MLflow client that sends no telemetry and starts no jobs.

    Raises:
        Refusal: extra_missing; server_unreachable, where a tracking server does not answer.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"  # a bar for each file
    # MLflow's own seven tries take minutes; who calls here comes again.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    with _extra("mlflow"):
        from mlflow import MlflowClient

        # It tells of every table it makes.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        tracking_places.reach(uri)
        with tracking_places.no_stray_folder(uri):
            return MlflowClient(tracking_places.driver(uri))


def with_pandas() -> Any:
    """Pandas, where it is installed.

    Raises:
        Refusal: extra_missing.
    """
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
