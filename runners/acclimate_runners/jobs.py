"""What a runner is asked to do and what it gives back: frozen, JSON in, JSON out.

A job names its inputs by digest; whoever runs it puts each input at `inputs/<hex of the digest>` of the job's folder. The child
process (`python -m acclimate_runners FOLDER`) reads `FOLDER/job.json` and its inputs, writes below `FOLDER/out/`, and writes
`FOLDER/out/manifest.json` last: a manifest means that the job has an outcome and all files it names are whole. Progress goes to
file descriptor 3 where it is open, one JSON object a line: {"step": n, "total": m, "what": "digit, lr 0.002"}. Where a preparation stands
goes to `FOLDER/checkpoint/` and comes from `FOLDER/resume/` (checkpoints.py).

Outcomes of a manifest: `done`, or `refused` (the entrant's fault, with a public reason). A child that ends without a manifest
is a fault of the platform or the machine, and may be tried again.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from acclimate_competitions import digests, recipe
from acclimate_competitions import tasks as task_definitions
from acclimate_competitions.recipe import Recipe
from acclimate_competitions.tasks import Task


@dataclass(frozen=True)
class ModelFiles:
    """A submitted model: file name -> digest.

    Attributes:
        files: in Hugging Face layout (config.json, model.safetensors or its index and shards, tokenizer.json), or an adapter's in peft's
            (adapter_files.py).
        base: those of the model that an adapter stands on, which the competition names; empty for a whole model.
    """

    files: Mapping[str, str]
    base: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """The model's digest: of the canonical JSON of {name: digest} of what was submitted."""
        return digests.of_json(dict(self.files))

    @property
    def inputs(self) -> set[str]:
        """Digests of all files that opening it reads."""
        return {*self.files.values(), *self.base.values()}


@dataclass(frozen=True)
class TaskData:
    """A task with the digests of its public splits, and for evaluation of the holdout's inputs (no targets)."""

    task: Task
    preparation: str | None = None
    validation: str | None = None
    holdout_inputs: str | None = None


@dataclass(frozen=True)
class Limits:
    """What a model may be, and what its child process may use.

    Attributes:
        architectures, max_parameters, max_bytes: of the model.
        memory: in bytes.
        wall_seconds: of all tries together that a result comes from.
        checkpoint_seconds: between two checkpoints of a preparation.
    """

    architectures: tuple[str, ...]
    max_parameters: int
    max_bytes: int
    memory: int
    wall_seconds: float
    checkpoint_seconds: float = 60.0


@dataclass(frozen=True)
class CheckJob:
    """Load a submitted model safely and run three preparation steps on public data.

    Attributes:
        micro_batch, recompute, device, processes, weights: as of PrepareJob; in no result.
    """

    kind: Literal["check"]
    model: ModelFiles
    tasks: tuple[TaskData, ...]
    recipe: Recipe
    limits: Limits
    tokenizer: str | None
    micro_batch: int | None = None
    recompute: bool = False
    device: str = "cpu"
    processes: int = 1
    weights: str = "whole"


@dataclass(frozen=True)
class PrepareJob:
    """Prepare one entry: for each task the selection over the grid, then each of its seeds.

    Attributes:
        stages: which (task, seed) to prepare; the selection of a task is made where one of its seeds is asked for.
        micro_batch: sequences that are read at once, at least 1; None for the recipe's global batch. The last bits of a result depend on it.
        recompute: whether a layer keeps only its inputs for the backward pass and is computed again in it (gradient checkpointing): less
            memory, more time, and the same bytes, so that no record says it.
        processes: of a node, that share each batch (ranks.py). The last bits of a result depend on it.
        weights: whole, each process has all of them; or shards, each has some rows of each (sharding.py). The last bits of a result depend on it.
        nodes: 1; a job for more is refused.
        lr: the learning rate, where none is to be chosen; no round's job has one.
        max_steps: after which each fit ends early, for trying; no round's job has it.
        device: the kind of device that computes: "cpu", or "cuda" for the GPU that the child is given (computing.py). The bits of a result depend on it.
    """

    kind: Literal["prepare"]
    model: ModelFiles
    tasks: tuple[TaskData, ...]
    recipe: Recipe
    limits: Limits
    tokenizer: str | None
    stages: tuple[tuple[str, int], ...]
    micro_batch: int | None = None
    recompute: bool = False
    processes: int = 1
    weights: str = "whole"
    nodes: int = 1
    lr: float | None = None
    max_steps: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class EvaluateJob:
    """Evaluate one entry on the holdout's inputs: (task, seed, protocol), seed None for direct.

    Attributes:
        prepared: digest of the prepared weights (safetensors) per stage "task/seed"; direct stages use the model's own.
        device: as of PrepareJob.
        processes, weights: as of PrepareJob; the bits of a result do not depend on them.
    """

    kind: Literal["evaluate"]
    model: ModelFiles
    tasks: tuple[TaskData, ...]
    recipe: Recipe
    limits: Limits
    tokenizer: str | None
    entrant: str
    stages: tuple[tuple[str, int | None, str], ...]
    prepared: Mapping[str, str]
    device: str = "cpu"
    processes: int = 1
    weights: str = "whole"


Job = CheckJob | PrepareJob | EvaluateJob


@dataclass(frozen=True)
class Outcome:
    """A job's manifest.

    Attributes:
        status: done | refused.
        reason: for refused, public; "" otherwise.
        files: name below out/ -> digest; the manifest itself is not listed.
        results: by kind of job; each has "memory", the child's peak in bytes, null where the machine doesn't say.
            check: {"architecture", "parameters", "losses": [3 floats], "forecast": seconds of the preparation of all tasks and seeds}.
            prepare: {"selections": [{"task", "candidates": [{"lr", "epoch", "validation"}], "selected"}],
                "prepared": [{"task", "seed", "micro_batch", "file", "prepared", "failed"?: {"reason"}, "diverged"?: reason, "losses": [...], "validation",
                "cost": {"tokens", "steps", "seconds", "flops"}}]}. A base candidate has lr null and epoch 0.
            evaluate: {"predictions": [{"task", "seed", "protocol", "file", "count", "seconds"}]}; each file is a table
                with the columns of tables.PREDICTIONS.
        hardware: hardware class, such as "cpu/x86_64/avx512/intel".
        versions: of the libraries that can change a number.
        network: what the child was kept from (isolation.py), with a preparation the least of all tries that it comes from: none, open;
            empty where it was not asked to confine itself.
    """

    status: Literal["done", "refused"]
    reason: str
    files: Mapping[str, str]
    results: Mapping[str, Any]
    hardware: str
    versions: Mapping[str, str]
    network: str = ""


def inputs(job: Job) -> set[str]:
    """Digests of all files that a job reads."""
    found = job.model.inputs
    for data in job.tasks:
        found |= {d for d in (data.preparation, data.validation, data.holdout_inputs) if d is not None}
    if job.tokenizer is not None:
        found.add(job.tokenizer)
    if isinstance(job, EvaluateJob):
        found |= set(job.prepared.values())
    return found


def to_json(job: Job) -> str:
    """The job as JSON text."""
    return json.dumps(dataclasses.asdict(job), indent=1, sort_keys=True)


def digest(job: Job) -> str:
    """The digest of to_json's text."""
    return digests.of_bytes(to_json(job).encode())


def from_json(text: str) -> Job:
    """The job of to_json's text."""
    values = json.loads(text)
    values["model"] = ModelFiles(**values["model"])
    values["tasks"] = tuple(
        TaskData(**{**data, "task": task_definitions.from_values(data["task"])}) for data in values["tasks"]
    )
    values["recipe"] = recipe.from_document(values["recipe"])
    values["limits"] = Limits(**{**values["limits"], "architectures": tuple(values["limits"]["architectures"])})
    if "stages" in values:
        values["stages"] = tuple(tuple(stage) for stage in values["stages"])
    kinds: dict[str, type[Job]] = {"check": CheckJob, "prepare": PrepareJob, "evaluate": EvaluateJob}
    return kinds[values["kind"]](**values)


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome of a job's folder, or None while it has none; files are not re-hashed here."""
    path = folder / "out" / "manifest.json"
    if not path.exists():
        return None
    return Outcome(**json.loads(path.read_text("utf-8")))
