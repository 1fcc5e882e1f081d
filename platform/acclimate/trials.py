"""What an entrant tries on its own machine, on open data and without a server: evaluate, prepare, check.

The jobs are those of a round (round_jobs.py), done by the same code in the same confined child (rerun.py), so that the same model, data,
recipe and seed on the same hardware class give the bytes that a round would record. `acclimate.evaluate`, `acclimate.prepare` and
`acclimate.check` are these functions.
"""

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acclimate import evaluations, files, round_jobs, tried_examples
from acclimate.extras import need
from acclimate.rerun import SILENT, Progress, RerunFolder
from acclimate_competitions import bases, compute, definition, digests, measures, metrics, recipe, splits, tables
from acclimate_competitions.definition import Competition, Task
from acclimate_competitions.errors import Refusal
from acclimate_competitions.recipe import LARGEST_SEED
from acclimate_runners import adapter_files, architectures, devices, prompts, reading
from acclimate_runners.jobs import CheckJob, Job, ModelFiles, Outcome, PrepareJob

if TYPE_CHECKING:
    import pyarrow as pa

_PREPARED_FROM = ("preparation", "validation")
_MODULES = ("torch", "transformers", "tokenizers", "jinja2")
_NAME = "model"
"""What predictions carry for an entrant's name."""


def evaluate(
    model: Path | str,
    competition: Path | str,
    *,
    task: str | None = None,
    split: str = "validation",
    examples: Path | str | None = None,
    entrant: str | None = None,
    seed: int | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Evaluate a model as it is on a public split, as a round would on its holdout.

    Args:
        model: a folder with config.json, model.safetensors (or its index and shards) and tokenizer.json.
        competition: a folder with competition.toml, splits/ and, where it fixes one, tokenizer.json.
        task: one task's name; None for all.
        split: a public split.
        examples: where to write a Parquet file with one row an example: entrant, task, example, cluster, target, choices,
            loglikelihoods (natural, in the order of choices, or one of the whole text), text (generated), metric, score, reason (why
            there is no score). It is what `rank`, `compare` and `stability` take as items.
        entrant: whose rows these are, in that file; None for the name of the model's folder, or of a folder <out>/<task>/<seed> that `prepare` made that of <out>.
        seed: with which the model was prepared, as a column of that file: files of one entrant and several seeds are read together as repetitions.
        progress: called with (steps done, of how many, what is done).

    Returns:
        {"competition", "definition", "model", "split", "tasks", "hardware", "versions", "memory", "seconds"}: tasks has for each
        task {<metric>: mean, "metric": its name, "se": standard error by cluster, None with one cluster, "n": scored examples,
        "unscored", "chance", "metrics": {name: {"value", "se", "n"}} of all metrics that fit the task's kind}; memory is the child's peak in bytes.

    Raises:
        Refusal: extra_missing, file_unreadable, definition_invalid, splits_invalid, holdout_private, request_invalid,
            model_invalid, limit_exceeded, conflict, no_space.
    """
    began = time.monotonic()
    given = _Folder.opened(Path(competition), task, splits_=(_public(split),))
    out = None if examples is None else Path(examples)
    _require_sane(lr=None, seed=seed, max_steps=None, device=None)
    asked = (out, entrant, seed) != (None, None, None)
    whose = tried_examples.named(entrant, Path(model)) if asked else ""
    if out is not None:
        files.require_replaceable(out, b"par1")
    with _shop(None, progress, what="the evaluation") as shop:
        submitted = given.model(Path(model), shop)
        rows = {name: tables.read(given.split(name, split)) for name in given.tasks}
        inputs = {name: shop.blobs.put_bytes(_without_targets(table)) for name, table in rows.items()}
        stages = [(name, None, "direct") for name in given.tasks]
        job = round_jobs.evaluate(given, submitted, stages, inputs=inputs, prepared={}, entrant=_NAME)
        outcome = _done(shop, job)
        found: dict[str, Any] = {}
        shown: list[dict[str, Any]] = []
        for entry in outcome.results["predictions"]:
            with shop.blobs.local(outcome.files[entry["file"]]) as path:
                predictions = tables.read(path, tables.PREDICTIONS)
            found[entry["task"]] = given.scored(entry["task"], rows[entry["task"]], predictions, shown)
    if out is not None:
        tried_examples.write(shown, out, entrant=whose, seed=seed)
    return {**given.named(submitted), "split": split, "tasks": found, **_ran(outcome, began)}


def prepare(
    model: Path | str,
    competition: Path | str,
    *,
    out: Path | str,
    task: str | None = None,
    lr: float | None = None,
    seed: int | None = None,
    max_steps: int | None = None,
    device: str | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Prepare a model as the round does: for each task the selection over the grid, then each reporting seed.

    Args:
        model: a folder with config.json, model.safetensors (or its index and shards) and tokenizer.json.
        competition: a folder with competition.toml, splits/ and, where it fixes one, tokenizer.json.
        out: a new folder; gets <task>/<seed>/ with each prepared model, and preparation.json with what this returns.
        task: one task's name; None for all.
        lr: the learning rate, instead of a selection.
        seed: one seed, instead of the recipe's.
        max_steps: ends each fit after so many steps, for trying; no round's bytes then.
        device: "cpu" or "cuda"; None for the round's, or the processor where that is a GPU and this machine has none.
        progress: called with (steps done, of how many, what is done).

    Returns:
        {"competition", "definition", "recipe": digest, "model": digest, "device", "max_steps", "tokens", "tasks", "hardware",
        "versions", "memory": peak in bytes, "seconds"}; tasks has for each task {"lr": the selected one, None for the model as
        submitted, "candidates": [{"lr", "epoch", "validation"}], "tokens": of the selection, "seeds": {"11": {"prepared": the digest
        that a round would record, "folder", "losses" and "loss_steps" (at most 200 points), "validation": nll, "tokens",
        "steps", "seconds", "flops", "micro_batch": halved where memory did not suffice, "note"}}}. A diverged one that by rule failed has prepared None and the reason as note.

    Raises:
        Refusal: as evaluate.
    """
    began, target = time.monotonic(), Path(out)
    _require_sane(lr=lr, seed=seed, max_steps=max_steps, device=device)
    given = _Folder.opened(Path(competition), task, splits_=_PREPARED_FROM)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Refusal("conflict", f"{target} exists already", hint="name a new folder with --out")
    seeds = given.competition.preparation.seeds if seed is None else (seed,)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _shop(target, progress, what="the preparation") as shop:
        submitted = given.model(Path(model), shop)
        stages = [(name, each) for name in given.tasks for each in seeds]
        job = replace(round_jobs.prepare(given, submitted, stages), lr=lr, max_steps=max_steps)
        job = replace(job, device=device or job.device)
        outcome = _done(shop, job)
        found = {entry["task"]: _selection(entry) for entry in outcome.results["selections"]}
        for entry in outcome.results["prepared"]:
            found[entry["task"]]["seeds"][str(entry["seed"])] = _prepared(entry)
        tokens = sum(part["tokens"] + sum(each["tokens"] for each in part["seeds"].values()) for part in found.values())
        summary = {
            **given.named(submitted),
            "recipe": given.competition.preparation.digest,
            "device": outcome.hardware.partition("/")[0],
            "max_steps": max_steps,
            "given_lr": lr,
            "round_seeds": list(given.competition.preparation.seeds),
            "tokens": tokens,
            "tasks": found,
            **_ran(outcome, began),
        }
        _place(shop, submitted, summary, target, competition=given.competition)
    return summary


def check(model: Path | str, competition: Path | str, *, progress: Progress = SILENT) -> dict[str, Any]:
    """Check a model as the server will: read it strictly, run three steps of each task's preparation, and forecast the whole.

    Returns:
        {"competition", "definition", "model", "base": {"name", "digest"} of what an adapter stands on, else None, "architecture", "parameters", "bytes", "losses": of the first task's steps,
        "forecast": {"seconds", "memory"}, "allowed": {"seconds", "memory", "parameters", "bytes"}, "fits", "hardware", "versions",
        "memory", "seconds"}. fits: whether the forecast is within what is allowed; memory is in bytes.

    Raises:
        Refusal: as evaluate; model_invalid, where the server would refuse it.
    """
    began = time.monotonic()
    given = _Folder.opened(Path(competition), None, splits_=_PREPARED_FROM)
    with _shop(None, progress, what="the check") as shop:
        submitted = given.model(Path(model), shop)
        job = round_jobs.check(given, submitted)
        outcome = _done(shop, job)
        size = sum(shop.blobs.size(digest) for digest in submitted.files.values())
    results, limits = outcome.results, job.limits
    forecast = {"seconds": results["forecast"], "memory": results["memory"]}
    allowed = {"seconds": limits.wall_seconds, "memory": limits.memory}
    fits = all(forecast[name] is None or forecast[name] <= allowed[name] for name in allowed)
    return {
        **given.named(submitted),
        "base": given.base(submitted),
        "architecture": results["architecture"],
        "parameters": results["parameters"],
        "bytes": size,
        "losses": results["losses"],
        "forecast": forecast,
        "allowed": {**allowed, "parameters": limits.max_parameters, "bytes": limits.max_bytes},
        "fits": fits,
        **_ran(outcome, began),
    }


# ---- what is given -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Folder:
    """A competition's folder as the terms of jobs (round_jobs.Terms).

    Attributes:
        path: the folder.
        competition: its definition.
        tasks: names of those that are meant.
        defined: {"files": name -> digest}, of the public files.
        paths: the same names -> path.
    """

    path: Path
    competition: Competition
    tasks: tuple[str, ...]
    defined: Mapping[str, Any]
    paths: Mapping[str, Path]

    @classmethod
    def opened(cls, path: Path, task: str | None, *, splits_: Sequence[str]) -> "_Folder":
        """A folder whose splits of the tasks that are meant have been checked."""
        need("runner", *_MODULES)
        competition = definition.load(path)
        folder = path if path.is_dir() else path.parent
        known = tuple(each.name for each in competition.tasks)
        if task is not None and task not in known:
            hint = f"one of {', '.join(known)}"
            raise Refusal("request_invalid", f"{competition.slug} has no task {task!r}", hint=hint)
        tasks = known if task is None else (task,)
        paths = splits.public_files(folder) if (folder / "splits").is_dir() else {}
        for name in tasks if paths else ():
            for split in splits_:
                if f"splits/{name}/{split}.parquet" not in paths:
                    there = [each for each in splits.PUBLIC if f"splits/{name}/{each}.parquet" in paths]
                    sentence = f"{folder}: task {name} has no split {split!r}"
                    own = splits.unbuilt(folder, competition, tasks=[name], only=splits_)
                    hint = f"there is {', '.join(there)}" if there else own
                    raise Refusal("splits_invalid", sentence, hint=hint)
        splits.check(folder, competition, only=splits_, tasks=tasks)
        prompts.check(folder, competition, only=splits_)
        adapter_files.check_bases(folder, competition)
        wanted = {f"splits/{name}/{split}.parquet" for name in tasks for split in splits_} | {"tokenizer.json"}
        wanted |= set(bases.in_folder(folder))
        used = {name: found for name, found in paths.items() if name in wanted}
        return cls(
            folder, competition, tasks, {"files": {name: digests.of_file(found) for name, found in used.items()}}, used
        )

    def split(self, task: str, name: str) -> Path:
        """Where a split's file is."""
        return self.paths[f"splits/{task}/{name}.parquet"]

    def model(self, folder: Path, shop: RerunFolder) -> ModelFiles:
        """A model's files as blobs, after the strict reading that the server does; the public files are blobs then, too."""
        given, rules = adapter_files.of_folder(folder), self.competition.submission
        base = adapter_files.stands_on(given, rules, folder=folder)
        on = (base, self.paths[f"{bases.FOLDER}/{base}/config.json"]) if base is not None else None
        adapter_files.inspect_submitted(given, rules, on=on, tokenizer=round_jobs.tokenizer(self))
        for name, path in self.paths.items():
            if not name.startswith(f"{bases.FOLDER}/") or name.startswith(f"{bases.FOLDER}/{base}/"):
                shop.blobs.put(path)
        return round_jobs.with_base(self, {name: shop.blobs.put(path) for name, path in given.items()}, base)

    def named(self, model: ModelFiles) -> dict[str, Any]:
        """What each result begins with."""
        return {
            "competition": self.competition.slug,
            "definition": self.competition.digest,
            "model": model.digest,
        }

    def base(self, model: ModelFiles) -> dict[str, str] | None:
        """The base that an adapter stands on, by its name in the definition and the digest there."""
        digest = digests.of_json(dict(model.base))
        named = self.competition.submission.bases
        return next(
            ({"name": name, "digest": digest} for name, own in named.items() if model.base and own == digest), None
        )

    def scored(
        self, name: str, rows: "pa.Table", predictions: "pa.Table", shown: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """A task's summary; its examples are added to `shown`, in the order of the split."""
        task = self.competition.task(name)
        scores = metrics.score_predictions(predictions, rows, task, cluster=self.competition.ranking.cluster)
        (found,) = evaluations.groups(scores)
        summary = found.summaries[task.metric]
        # A text that is read as a whole has no target.
        targets = rows.column("target").to_pylist() if task.truth == "target" else [None] * rows.num_rows
        for row, score, target in zip(predictions.to_pylist(), scores.to_pylist(), targets, strict=True):
            values = {"task": name, "example": row["example"], "cluster": score["cluster"], "target": target}
            values |= {"choices": list(task.choices)}
            values |= {"loglikelihoods": row["loglikelihoods"], "text": row["text"], "metric": task.metric}
            shown.append({**values, "score": score["score"], "reason": score["reason"]})
        return {
            task.metric: summary.get(""),
            "metric": task.metric,
            "se": summary.get(".se"),
            "n": summary[".n"],
            "unscored": summary[".missing"],
            "chance": task.chance,
            "metrics": _measured(task, rows, predictions, cluster=self.competition.ranking.cluster),
        }


def _measured(
    task: Task, rows: "pa.Table", predictions: "pa.Table", *, cluster: str | None
) -> dict[str, dict[str, Any]]:
    """Every metric of an analyst that fits the task's kind: {name: {value, se, n}}."""
    if not task.choices:
        return {}
    given = dict(
        zip(predictions.column("example").to_pylist(), predictions.column("loglikelihoods").to_pylist(), strict=True)
    )
    values = [given.get(example) for example in rows.column("example").to_pylist()]
    targets = rows.column("target").to_pylist()
    clusters = rows.column(cluster).to_pylist() if cluster else None
    found: dict[str, dict[str, Any]] = {}
    for name in measures.OF_CHOICE:
        own = measures.of_choice(name, values, targets, choices=task.choices, clusters=clusters)
        found[name] = {"value": own.value, "se": own.se, "n": own.n}
    return found


def _public(split: str) -> str:
    if split == "holdout":
        raise Refusal(
            "holdout_private",
            "the holdout is evaluated once, by the round, after the release",
            hint=f"--split {' or '.join(splits.PUBLIC[1:])}",
        )
    if split not in splits.PUBLIC:
        raise Refusal("request_invalid", f"there is no split {split!r}", hint=f"one of {', '.join(splits.PUBLIC)}")
    return split


def _require_sane(*, lr: float | None, seed: int | None, max_steps: int | None, device: str | None) -> None:
    wrong = []
    if lr is not None and not (math.isfinite(lr) and lr > 0):
        wrong.append(f"the learning rate is {lr}: it must be a number above 0")
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        wrong.append(f"the seed is {seed}: it must be from 0 to {LARGEST_SEED}")
    if max_steps is not None and max_steps < 1:
        wrong.append(f"max_steps is {max_steps}: it must be at least 1")
    if device not in (None, *compute.DEVICES):
        wrong.append(f"the device is {device!r}: preparations run on {' or '.join(compute.DEVICES)}")
    elif device == "cuda" and not devices.visible_gpus():
        wrong.append("the device is 'cuda': this machine shows no NVIDIA GPU (nvidia-smi lists those that it has)")
    if wrong:
        raise Refusal("request_invalid", "; ".join(wrong))


def _without_targets(table: "pa.Table") -> bytes:
    """A split's rows as a round gives its holdout's to the model."""
    with tempfile.TemporaryDirectory(prefix="acclimate-") as folder:
        path = Path(folder) / "inputs.parquet"
        tables.write(table.select([name for name in table.column_names if name != "target"]), path)
        return path.read_bytes()


# ---- what is done --------------------------------------------------------------------------------------------------


@contextmanager
def _shop(beside: Path | None, progress: Progress, *, what: str) -> Iterator[RerunFolder]:
    """A folder for one job, which is gone afterwards: beside a result that can be large, else in the temporary folder."""
    prefix, parent = ("acclimate-", None) if beside is None else (f".{beside.name}-", beside.parent)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        yield RerunFolder(Path(folder) / "work", progress=progress, what=what)


def _done(shop: RerunFolder, job: Job) -> Outcome:
    status = shop.carry_out(job)
    while status.code == "out_of_memory" and isinstance(job, CheckJob | PrepareJob):
        size = job.micro_batch or job.recipe.global_batch
        if size == 1:
            break
        # As a round does; the same halves.
        half = recipe.micro_batch(size, halved=1)
        job = replace(job, micro_batch=half, recompute=half == 1)
        status = shop.carry_out(job)
    outcome: Outcome | None = status.outcome
    if outcome is None:
        hint = "competition.toml has the limits in [isolation]; a smaller model needs less"
        raise Refusal("limit_exceeded", status.reason, hint=hint)
    if outcome.status == "refused":
        raise Refusal("model_invalid", outcome.reason)
    return outcome


def _ran(outcome: Outcome, began: float) -> dict[str, Any]:
    """What each result ends with."""
    return {
        "hardware": outcome.hardware,
        "versions": dict(outcome.versions),
        "memory": outcome.results["memory"],
        "seconds": round(time.monotonic() - began, 3),
    }


def _selection(entry: Mapping[str, Any]) -> dict[str, Any]:
    chosen = entry["selected"]
    return {
        "lr": None if chosen is None else chosen["lr"],
        "candidates": entry["candidates"],
        "tokens": entry["cost"]["tokens"],
        "seconds": entry["cost"]["seconds"],
        "seeds": {},
    }


def _prepared(entry: Mapping[str, Any]) -> dict[str, Any]:
    folder = f"{entry['task']}/{entry['seed']}" if entry["prepared"] is not None else None
    return {
        "prepared": entry["prepared"],
        "folder": folder,
        "losses": entry["losses"],
        "loss_steps": entry["loss_steps"],
        "validation": entry["validation"],
        "micro_batch": entry["micro_batch"],
        **{name: entry["cost"][name] for name in ("tokens", "steps", "seconds", "flops")},
        "note": entry["failed"]["reason"] if "failed" in entry else entry["note"],
    }


def _config(told: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """A submission's config.json, for a model that was prepared of it for a task."""
    # Transformers makes weights what a dtype says, and those that were prepared are float32.
    told = {name: "float32" if name in ("dtype", "torch_dtype") else value for name, value in told.items()}
    # A classifier's head was made for the task's labels.
    return told if architectures.labels(told) is None else architectures.with_labels(told, task.choices)


def _place(
    shop: RerunFolder, model: ModelFiles, summary: Mapping[str, Any], out: Path, *, competition: Competition
) -> None:
    """Put the prepared models where they were asked for, all at once or not at all."""
    made = shop.folder.parent / "made"
    made.mkdir()
    for name, part in summary["tasks"].items():
        task = competition.task(name)
        for each in part["seeds"].values():
            if each["folder"] is None:
                continue
            # Whatever the submission's weights came in, the prepared ones are one file.
            beside = model.base or model.files
            contents = {name: beside[name] for name in reading.BESIDES if name in beside} | {
                "model.safetensors": each["prepared"]
            }
            (made / each["folder"]).mkdir(parents=True)
            for file, digest in contents.items():
                shop.blobs.get(digest, made / each["folder"] / file)
            config = made / each["folder"] / "config.json"
            told = json.loads(config.read_bytes())
            if (fitting := _config(told, task)) != told:
                config.write_text(json.dumps(fitting), "utf-8")
    text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
    files.write(made / tried_examples.SUMMARY, text.encode(), mode=0o644)
    try:
        # A folder may be there, if it is empty.
        if out.is_dir():
            out.rmdir()
        shutil.move(made, out)
    except OSError as error:
        raise files.failed(out, error) from error
