"""The jobs that a round asks for: what its dispatcher has done, and what an auditor has done again. One maker, so that they are equal.

A job holds nothing of the machine that does it. Whoever knows the round's records and the digests of a model's files makes the same one;
so does whoever has the competition's public files, before there is a round (trials.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from acclimate_competitions import bases
from acclimate_competitions.definition import Competition, Task
from acclimate_runners.jobs import CheckJob, EvaluateJob, Limits, ModelFiles, PrepareJob, TaskData


class Defined(Protocol):
    """The fields of `RoundDefined`; only `files`, name -> digest, is looked at here."""

    def __getitem__(self, name: str, /) -> Any: ...


class Terms(Protocol):
    """What the jobs of a round follow from: phases.Round is one, a competition's folder another."""

    @property
    def competition(self) -> Competition: ...  # noqa: D102
    @property
    def defined(self) -> Defined: ...  # noqa: D102


def limits(state: Terms) -> Limits:
    """What a model may be, and what its child process may use, in this round."""
    rules, isolation = state.competition.submission, state.competition.isolation
    return Limits(
        architectures=rules.architectures,
        max_parameters=rules.max_parameters,
        max_bytes=rules.max_bytes,
        memory=isolation.memory,
        wall_seconds=isolation.wall.total_seconds(),
    )


def tokenizer(state: Terms) -> str | None:
    """Digest of the competition's own tokenizer; None where entrants bring theirs."""
    return dict(state.defined["files"]).get("tokenizer.json")


def model(state: Terms, manifest: Mapping[str, Any]) -> ModelFiles:
    """The model of a manifest, with the base that an adapter stands on."""
    files = {item["name"]: item["sha256"] for item in manifest["files"]}
    return with_base(state, files, manifest["base"] if manifest["kind"] == bases.KIND else None)


def with_base(state: Terms, files: Mapping[str, str], base: str | None) -> ModelFiles:
    """A model's files, name -> digest, with those of the base that it stands on; None for a whole model."""
    return ModelFiles(files, bases.of(state.defined["files"], base) if base is not None else {})


def public_data(state: Terms, task: Task) -> TaskData:
    """A task with the public splits that preparing for it reads."""
    files = state.defined["files"]
    preparation, validation = (files[f"splits/{task.name}/{name}.parquet"] for name in ("preparation", "validation"))
    return TaskData(task, preparation=preparation, validation=validation)


def public_files(state: Terms, tasks: Sequence[str], model: ModelFiles) -> list[str]:
    """Names of the public files that preparing a model for these tasks reads."""
    names = {f"splits/{task}/{split}.parquet" for task in tasks for split in ("preparation", "validation")}
    names.add("tokenizer.json")
    files, base = state.defined["files"], set(model.base.values())
    return [
        name
        for name, digest in files.items()
        if name in names or (name.startswith(f"{bases.FOLDER}/") and digest in base)
    ]


def check(state: Terms, model: ModelFiles) -> CheckJob:
    """The job that checks a submission."""
    return CheckJob(
        kind="check",
        model=model,
        tasks=tuple(public_data(state, task) for task in state.competition.tasks),
        recipe=state.competition.preparation,
        limits=limits(state),
        tokenizer=tokenizer(state),
        device=state.competition.compute.device,
        **_together(state),
    )


def _together(state: Terms) -> dict[str, Any]:
    """How many processes check or evaluate a model: one, but where the weights lie in shards, as it need not fit on one device."""
    compute = state.competition.compute
    return {"processes": compute.processes, "weights": "shards"} if compute.weights == "shards" else {}


def prepare(
    state: Terms, model: ModelFiles, stages: Sequence[tuple[str, int]], *, micro_batch: int | None = None
) -> PrepareJob:
    """The job that prepares a model.

    Args:
        state: the round, or what stands for it.
        model: as submitted.
        stages: (task, seed), in the plan's order.
        micro_batch: sequences that are read at once, as ModelPrepared has it; None for the whole batch.
    """
    tasks = dict.fromkeys(task for task, _ in stages)
    return PrepareJob(
        kind="prepare",
        model=model,
        tasks=tuple(public_data(state, state.competition.task(name)) for name in tasks),
        recipe=state.competition.preparation,
        limits=limits(state),
        tokenizer=tokenizer(state),
        device=state.competition.compute.device,
        stages=tuple(stages),
        micro_batch=micro_batch,
        # The last resort then, and now.
        recompute=micro_batch == 1,
        processes=state.competition.compute.processes,
        weights=state.competition.compute.weights,
    )


def evaluate(
    state: Terms,
    model: ModelFiles,
    stages: Sequence[tuple[str, int | None, str]],
    *,
    inputs: Mapping[str, str],
    prepared: Mapping[str, str],
    entrant: str,
) -> EvaluateJob:
    """The job that evaluates a model.

    Args:
        state: the round, or what stands for it.
        model: as submitted.
        stages: (task, seed, protocol), in the plan's order.
        inputs: task -> digest of the rows to predict.
        prepared: "task/seed" -> digest of the prepared weights; more than the stages need may be there.
        entrant: whose name the predictions carry.
    """
    tasks = dict.fromkeys(task for task, _, _ in stages)
    needed = [f"{task}/{seed}" for task, seed, protocol in stages if protocol == "prepared"]
    return EvaluateJob(
        kind="evaluate",
        model=model,
        tasks=tuple(TaskData(state.competition.task(name), holdout_inputs=inputs[name]) for name in tasks),
        recipe=state.competition.preparation,
        limits=limits(state),
        tokenizer=tokenizer(state),
        device=state.competition.compute.device,
        entrant=entrant,
        **_together(state),
        stages=tuple(stages),
        prepared={name: prepared[name] for name in needed},
    )
