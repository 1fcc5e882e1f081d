"""The runs of a round in MLflow, written: what differs from what is planned, and nothing twice. Reading is tracking.py's."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate import projection, tracked_rows, tracked_state, tracking_check, tracking_places
from acclimate.projection import Planned
from acclimate.round_data import RoundData
from acclimate_competitions.errors import Refusal

# MLflow's limits of one batch; no run of ours has that many parameters or tags.
_METRICS, _PARAMS, _TAGS = 1000, 100, 100
_CONTENT = "acclimate.content"


@dataclass
class Writing:
    """One writing of a round: it begins with the first thing that is changed, so that whoever reads meanwhile sees it."""

    client: Any
    experiment: str
    tags: Mapping[str, str]
    begun: bool = False

    def begin(self) -> None:
        """Say that the round is being written; before anything is changed."""
        if not self.begun:
            self._tell(tracked_state.begun(self.tags))
            self.begun = True

    def end(self) -> None:
        """Say that all is written, also where an earlier writing was broken off."""
        if tracked_state.under_way(self.tags):
            self._tell(tracked_state.done(self.tags))

    def _tell(self, value: str) -> None:
        self.tags = {**self.tags, tracked_state.WRITTEN: value}
        self.client.set_experiment_tag(self.experiment, tracked_state.WRITTEN, value)


def experiments_of(client: Any, data: RoundData) -> tuple[Any | None, list[Any]]:
    """The experiment of a round, deleted or not, and the others that say that they are: older ones that somebody renamed, and that are not deleted.

    That of the round's name is its own, else the first that says that it is of the round.
    """
    name = projection.experiment_name(data.competition.slug, data.name)
    own = client.get_experiment_by_name(name)
    others = [
        one
        for one in tracked_rows.experiments(client, deleted=True)
        if one.tags["acclimate.round"] == data.round and one.name != name
    ]
    others.sort(key=lambda one: (one.lifecycle_stage == "deleted", str(one.experiment_id)))
    if own is None and others:
        own = others.pop(0)
    return own, [one for one in others if one.lifecycle_stage != "deleted"]


def take_out(client: Any, experiment: Any) -> None:
    """Delete what an experiment that stands twice has of ours, and itself, where nothing else lies in it; else it says no more that it is a round."""
    others = False
    for run in tracked_rows.search(client, experiment.experiment_id, ""):
        if any(name.startswith("acclimate.") for name in run.data.tags):
            client.delete_run(run.info.run_id)
        else:
            others = True
    if not others:
        client.delete_experiment(experiment.experiment_id)
        return
    for name in experiment.tags:
        if name.startswith("acclimate."):
            client.delete_experiment_tag(experiment.experiment_id, name)


def claim(client: Any, artifacts: Path | str | None, data: RoundData) -> Writing:
    """The round's experiment, made where there is none, with its tags."""
    name = projection.experiment_name(data.competition.slug, data.name)
    tags = projection.experiment_tags(data)
    experiment, _ = experiments_of(client, data)
    if experiment is None:
        location = None if artifacts is None else f"{tracking_places.location(artifacts)}/{data.round}"
        tags |= {tracked_state.WRITTEN: tracked_state.begun({})}
        created: str = client.create_experiment(name, artifact_location=location, tags=tags)
        return Writing(client, created, tags, begun=True)
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    if experiment.name != name:  # somebody renamed it: a second one would stand beside it
        client.rename_experiment(experiment.experiment_id, name)
    owner = experiment.tags.get("acclimate.round")
    if owner != data.round:
        raise Refusal(
            "conflict",
            f"the MLflow experiment {name!r} belongs to round {owner!r}, not {data.round!r}",
            hint="give each installation a tracking store of its own",
        )
    writing = Writing(client, experiment.experiment_id, experiment.tags)
    if tracking_check.experiment(experiment.tags, tags):
        writing.begin()
    for key, value in tags.items():
        if experiment.tags.get(key) != value:
            client.set_experiment_tag(experiment.experiment_id, key, value)
    return writing


def by_key(writing: Writing) -> dict[str, Any]:
    """The runs of an experiment by stage key; where a race made two of one key, all but the first are deleted."""
    found: dict[str, Any] = {}
    for run in sorted(
        tracked_rows.search(writing.client, writing.experiment, ""), key=lambda run: str(run.info.run_id)
    ):
        key = run.data.tags.get("acclimate.stage_key")
        if key is None:
            continue
        if key in found:
            writing.begin()
            writing.client.delete_run(run.info.run_id)
        else:
            found[key] = run
    return found


@dataclass(frozen=True)
class Artifacts:
    """How a run's artifacts are kept: by the store at `tracking`, from files in `folder`."""

    tracking: str
    folder: Path

    def write(self, run: Any, files: Mapping[str, bytes]) -> None:
        """Files by name."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        repository = get_artifact_repository(run.info.artifact_uri, tracking_uri=self.tracking)
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
            repository.log_artifact(str(self.folder / name))


def write(writing: Writing, plan: Planned, run: Any | None, ids: Mapping[str, str], artifacts: Artifacts) -> str:
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
    client = writing.client
    writing.begin()
    if run is not None and _outlived(plan, run):
        client.set_tag(run.info.run_id, "acclimate.superseded", "true")
        client.delete_run(run.info.run_id)
        run = None
    tags = dict(plan.tags) | {"mlflow.user": "acclimate", "mlflow.source.name": "acclimate"}
    if parent:
        tags["mlflow.parentRunId"] = parent
    made = run is None
    if run is None:
        run = client.create_run(writing.experiment, start_time=_milliseconds(plan.start), tags=tags, run_name=plan.name)
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


def _outlived(plan: Planned, run: Any) -> bool:
    """Whether a run has what can't be taken from it, and what is planned has not: metrics, such as of the version before, and parameters."""
    gone = set(run.data.metrics) - {name for name, _, _ in plan.metrics}
    return bool(gone) or any(plan.params.get(name) != value for name, value in run.data.params.items())


def _scored(plan: Planned) -> bool:
    return plan.tags.get("acclimate.outcome") == "scored"


def _milliseconds(moment: Any) -> int:
    return int(round(moment.timestamp() * 1000))
