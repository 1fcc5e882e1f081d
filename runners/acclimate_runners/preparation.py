"""The mandated preparation: the same fine-tune for every entry, from top to bottom in plain PyTorch.

For each task: pack its rows; fit once for each learning rate of the grid with the selection seed; choose, by validation NLL,
between these and the model as submitted; then fit once for each reporting seed at the chosen rate. What is prepared is a pure
function of (model, data, recipe, seed): the same image, hardware class and threads give the same bytes.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from acclimate_competitions import tables
from acclimate_competitions.definition import Task
from acclimate_competitions.errors import Refusal
from acclimate_competitions.recipe import Recipe, Schedule
from acclimate_runners import adapters, classifying, computing, efforts, jobs, layouts, network, packing, ranks
from acclimate_runners.checkpoints import Checkpoints, Fitting, Standing
from acclimate_runners.jobs import CheckJob, EvaluateJob, Outcome, PrepareJob, TaskData
from acclimate_runners.network import Network
from acclimate_runners.packing import Packed
from acclimate_runners.words import Words

Progress = Callable[[int, int, str], None]

CURVE_POINTS = 200


@dataclass(frozen=True)
class Fit:
    """One fine-tune.

    Attributes:
        losses: of each step, before its update; the last may be NaN or infinite.
        validation: NLL per example of the validation split after the last step; None where it diverged.
        diverged: public reason; "" where it did not.
        tokens: read by the model, padding left out.
        seconds: of wall clock; in no digest.
        beside: floating-point operations of a token or image for adapters and what was learned with them; 0 without.
    """

    losses: tuple[float, ...]
    validation: float | None
    diverged: str
    tokens: int
    seconds: float
    beside: int = 0


def learning_rate(step: int, *, total: int, peak: float, schedule: Schedule) -> float:
    """Learning rate of a step, counted from 1: linear warm-up to the peak, then linear to final × peak at the last step."""
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    fallen = (step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps)
    return peak * (1 - (1 - schedule.final) * fallen)


def fit(
    model: Network,
    data: tuple[Packed, Packed],
    recipe: Recipe,
    *,
    lr: float,
    seed: int,
    on_step: Callable[[int], None] = lambda step: None,
    stop_after: int | None = None,
    fitting: Fitting | None = None,
    micro_batch: int | None = None,
) -> Fit:
    """Fine-tune a model's weights in place on data[0]; data[1] is the validation split.

    The loss of a step is the mean NLL over the answers' tokens of its global batch. AdamW decays all that is learned: the weights, or
    the recipe's adapters, which are merged into these. With `fitting` it goes on from where an earlier try was, and comes to the same
    bytes. With `micro_batch` so many sequences are read at once, which takes less memory and gives the same but for the last bits.
    """
    rows, _ = data
    total = packing.steps(len(rows), epochs=recipe.epochs, global_batch=recipe.global_batch)
    with adapters.learned(model, recipe.lora, seed=seed) as named:
        constants, beside = recipe.optimizer, adapters.operations(named, recipe.lora, model)
        optimizer = torch.optim.AdamW(
            list(named.values()),
            lr=lr,
            betas=(constants.beta1, constants.beta2),
            eps=constants.eps,
            weight_decay=constants.weight_decay,
            fused=True,
        )
        begun = fitting.begin(named, optimizer) if fitting else Standing()
        model.model.train().zero_grad()
        losses, tokens, began = list(begun.losses), begun.tokens, time.monotonic() - begun.seconds
        for step in range(len(losses) + 1, min(total, stop_after or total) + 1):
            # 1. The batch follows from the seed and the step's number alone; nothing else is drawn.
            batch = packing.batch_of_step(step - 1, rows=len(rows), global_batch=recipe.global_batch, seed=seed)
            # 2. Loss on the answers' tokens, and its gradient.
            optimizer.zero_grad()
            loss = learn(model, rows, ranks.parts(batch, micro_batch), recipe=recipe, batch=batch)
            loss = model.held.added(loss, named)
            # 3. Clip, and step at the schedule's learning rate.
            model.held.clip(named, recipe.clip)
            optimizer.param_groups[0]["lr"] = learning_rate(step, total=total, peak=lr, schedule=recipe.schedule)
            optimizer.step()
            losses.append(loss)
            tokens += int(rows.lengths[batch].sum())
            # 4. A loss that is no number ends the fit.
            if not math.isfinite(losses[-1]):
                reason, seconds = f"the loss at step {step} is {losses[-1]}", time.monotonic() - began
                return Fit(tuple(losses), None, reason, tokens, seconds, beside)
            on_step(step)
            if fitting:
                fitting.after_step(partial(_standing, losses, tokens, began))
    # 5. The validation split decides whether the weights are of use, and later which rate is chosen.
    nll = validation_nll(model, data[1])
    wrong = model.held.agreed([name for name, tensor in model.weights.items() if not network.is_finite(tensor)])
    fine = nll is not None and not wrong
    reason, seconds = "" if fine else "the weights diverged", time.monotonic() - began
    return Fit(tuple(losses), nll if fine else None, reason, tokens, seconds, beside)


def learn(
    model: Network, rows: Packed, parts: list[packing.Integers], *, recipe: Recipe, batch: packing.Integers
) -> float:
    """The parts' share of the mean NLL over a batch's answers' tokens; its gradient is added to that of what is learned.

    The parts are together the batch, or this process's part of it. For an empty one a row is read that counts nothing: where the weights lie in
    shards, all processes read as often.
    """
    whole = len(parts) == 1 and len(parts[0]) == len(batch)
    scored = 0 if whole else int((rows.labels[batch] != packing.NOT_SCORED).sum())
    found = 0.0
    for part in parts:
        with computing.multiplying(recipe.dtype, model.device, keep=model.held.everything):
            logits, wanted = _read(model, rows, part if len(part) else batch[:1], packed=recipe.packing)
        loss = functional.cross_entropy(logits, wanted, reduction="sum" if scored else "mean")
        # Of the whole batch's tokens, as parts may have different numbers of them.
        loss = loss / scored if scored else loss
        (loss if len(part) else loss * 0).backward()
        found += loss.item() if len(part) else 0.0
    return found


def _read(model: Network, rows: Packed, part: packing.Integers, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Logits [tokens, vocabulary] and the tokens that were wanted, of the answers of some rows."""
    longest = int(rows.lengths[part].max())
    chosen = Packed(rows.inputs[part, :longest], rows.labels[part, :longest], rows.lengths[part])
    # A window that is shorter than a sequence has the library make its own mask, which knows of no neighbours.
    if packed and model.can_lay(longest):
        laid, labels = layouts.side_by_side(chosen)
        wanted = torch.from_numpy(labels).flatten()
        at = (wanted != packing.NOT_SCORED).nonzero()[:, 0]
        return model.laid_logits(laid, at), wanted[at].to(model.device)
    wanted = torch.from_numpy(chosen.labels).flatten()
    at = (wanted != packing.NOT_SCORED).nonzero()[:, 0]
    return model.logits(torch.from_numpy(chosen.inputs), at), wanted[at].to(model.device)


def _standing(losses: list[float], tokens: int, began: float) -> Standing:
    return Standing(tuple(losses), tokens, time.monotonic() - began)


def validation_nll(model: Network, rows: Packed) -> float | None:
    """Mean over the examples of the NLL of their answers, summed over an answer's tokens; None where that is no number."""
    nll = -math.fsum(network.answer_loglikelihoods(model, rows).tolist()) / len(rows)
    return nll if math.isfinite(nll) else None


@dataclass(frozen=True)
class Choice:
    """What the selection of a task came to: lr None is the model as submitted; document is the results' entry."""

    lr: float | None
    diverged: str
    document: dict[str, Any]


@dataclass(frozen=True)
class Start:
    """Where all fits of an entry begin, and what is done of them.

    Attributes:
        model: set to whatever weights are worked on.
        weights: as submitted.
        recipe: of all fits.
        checkpoints: of this preparation.
        micro_batch: sequences that are read at once; None for all of a batch.
        max_steps: after which a fit ends early; None for the recipe's.
    """

    model: Network
    weights: Mapping[str, Tensor]
    recipe: Recipe
    checkpoints: Checkpoints
    micro_batch: int | None = None
    max_steps: int | None = None

    def fit(
        self, data: tuple[Packed, Packed], *, lr: float, seed: int, on_step: Callable[[int], None], part: str
    ) -> Fit:
        """One fine-tune of the model as submitted; `part` names it in checkpoints."""
        self.model.set_weights(self.weights)
        how: dict[str, Any] = {"fitting": self.checkpoints.fitting(part), "micro_batch": self.micro_batch}
        how |= {"stop_after": self.max_steps}
        return fit(self.model, data, self.recipe, lr=lr, seed=seed, on_step=on_step, **how)


def select(start: Start, data: tuple[Packed, Packed], *, task: str, on_step: Callable[[int], None]) -> Choice:
    """Choose by validation NLL between the model as submitted and one fit for each learning rate; ties to the lower rate."""
    model, recipe, checkpoints = start.model, start.recipe, start.checkpoints
    candidates: list[dict[str, Any]] = []
    costs: list[dict[str, float]] = []

    def base() -> float | None:
        model.set_weights(start.weights)
        return validation_nll(model, data[1])

    def candidate(lr: float, part: str) -> dict[str, Any]:
        done = start.fit(data, lr=lr, seed=recipe.selection.seed, on_step=on_step, part=part)
        return {"validation": done.validation, "diverged": done.diverged, "cost": cost(done, model)}

    if "base" in recipe.selection.candidates:
        found = checkpoints.part(f"{task}, as submitted", base)
        candidates.append({"lr": None, "epoch": 0, "validation": found})
    reason = ""
    for lr in recipe.lr_grid if "last" in recipe.selection.candidates else ():
        part = f"{task}, rate {lr!r}"
        done = checkpoints.part(part, partial(candidate, lr, part))
        reason = done["diverged"] or reason
        candidates.append({"lr": lr, "epoch": recipe.epochs, "validation": done["validation"]})
        costs.append(done["cost"])
    chosen = best(candidates)
    spent = {name: sum(entry[name] for entry in costs) for name in ("tokens", "steps", "seconds", "flops")}
    document = {
        "task": task,
        "seed": recipe.selection.seed,
        "candidates": candidates,
        "selected": None if chosen is None else {"lr": chosen["lr"], "epoch": chosen["epoch"]},
        "cost": spent,
    }
    if chosen is None:
        return Choice(None, reason or "no candidate has a validation NLL", document)
    return Choice(chosen["lr"], "", document)


def given(recipe: Recipe, lr: float, *, task: str) -> Choice:
    """The choice of a rate that nobody had to choose: no candidates, no cost."""
    selected = {"lr": lr, "epoch": recipe.epochs}
    document = {"task": task, "seed": recipe.selection.seed, "candidates": [], "selected": selected, "cost": NO_COST}
    return Choice(lr, "", document)


def best(candidates: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The candidate of the lowest validation NLL, ties to the lower rate, the model as submitted being 0; None where none has one."""
    usable = [candidate for candidate in candidates if candidate["validation"] is not None]
    return min(usable, key=lambda candidate: (candidate["validation"], candidate["lr"] or 0.0), default=None)


def cost(done: Fit, model: Network) -> dict[str, float]:
    """What a fit took; FLOPs as efforts counts them."""
    return {
        "tokens": done.tokens,
        "steps": len(done.losses),
        "seconds": round(done.seconds, 3),
        "flops": efforts.flops(model.facts.config, tokens=done.tokens, image=model.image, beside=done.beside),
    }


NO_COST = {"tokens": 0, "steps": 0, "seconds": 0.0, "flops": 0}


def prepare(job: PrepareJob, folder: Path, progress: Progress, *, kept_from: str = "") -> Outcome:
    """Prepare one entry for its tasks and seeds.

    Args:
        job: what to do.
        folder: of the job.
        progress: told of the steps.
        kept_from: this process's network, as Outcome has it.

    Raises:
        Refusal: model_invalid, for the entrant's faults; anything else that is raised is not the entrant's.
    """
    # 1. The model, read strictly; its own weights are the start of every fit.
    computing.be_deterministic(job.recipe.threads)
    model, tokenizer = open_model(job, folder)
    weights = model.copy_weights()
    wanted = {data.task.name: [seed for task, seed in job.stages if task == data.task.name] for data in job.tasks}
    todo = [data for data in job.tasks if wanted[data.task.name]]
    words = Words(progress)
    model.on_batch = words.again
    packed = {data.task.name: pack_splits(job, folder, data, model, tokenizer) for data in todo}
    # 2. What an earlier try had done; progress counts the steps of all fits.
    hardware, versions = computing.hardware(job.recipe.dtype, job.device), computing.versions()
    identity = {"job": jobs.digest(job), "hardware": hardware, "versions": versions}
    every = job.limits.checkpoint_seconds
    checkpoints = Checkpoints(folder, identity=identity, seconds=every, network=kept_from, held=model.held)
    start = Start(model, weights, job.recipe, checkpoints, job.micro_batch, job.max_steps)
    counter = _Counter(job, packed, wanted, words, checkpoints)
    selections: list[dict[str, Any]] = []
    prepared: list[dict[str, Any]] = []
    files: dict[str, str] = {}
    submitted = start
    for data in todo:
        name = data.task.name
        fitting_head = classifying.begun(model, weights, data.task, seed=job.recipe.selection.seed)
        start = replace(submitted, weights=fitting_head)
        # 3. The learning rate, with the selection seed; or the one that the job gives, which no round's does.
        choice = (
            select(start, packed[name], task=name, on_step=counter.of(f"{name}, choosing the rate"))
            if job.lr is None
            else given(job.recipe, job.lr, task=name)
        )
        selections.append(choice.document)
        # 4. The reporting seeds, at that rate.
        for seed in wanted[name]:
            part = f"{name}, seed {seed}"
            make = partial(_prepare_seed, start, packed[name], choice, on_step=counter.of(part), part=part)
            entry = checkpoints.part(
                part, partial(_written, start, partial(make, seed), folder / "out", f"{name}-{seed}")
            )
            if entry["file"] is not None:
                files[entry["file"]] = entry["prepared"]
            prepared.append(
                {"task": name, "seed": seed, "micro_batch": job.micro_batch or job.recipe.global_batch, **entry}
            )
    results = {"selections": selections, "prepared": prepared}
    return Outcome("done", "", files, results, hardware, versions, checkpoints.network)


def _prepare_seed(
    start: Start,
    data: tuple[Packed, Packed],
    choice: Choice,
    seed: int,
    *,
    on_step: Callable[[int], None],
    part: str,
) -> dict[str, Any]:
    model, recipe = start.model, start.recipe
    if choice.diverged:
        return _diverged(model, recipe, choice.diverged, None)
    if choice.lr is None:
        nll = next(c["validation"] for c in choice.document["candidates"] if c["lr"] is None)
        note = "the selection chose the model as submitted: no fine-tune, no seed variance"
        return _entry(base=True, losses=(), validation=nll, spent=NO_COST, note=note)
    done = start.fit(data, lr=choice.lr, seed=seed, on_step=on_step, part=part)
    if done.diverged:
        return _diverged(model, recipe, f"at learning rate {choice.lr:g}: {done.diverged}", done)
    return _entry(base=False, losses=done.losses, validation=done.validation, spent=cost(done, model), note="")


def _written(start: Start, make: Callable[[], dict[str, Any]], out: Path, name: str) -> dict[str, Any]:
    """A seed's entry with its file; a checkpoint that knows of the entry knows a whole file."""
    entry = make()
    if "failed" in entry:
        return {**entry, "file": None, "prepared": None}
    file = f"{name}.safetensors"
    weights = start.weights if entry["base"] else start.model.weights
    return {**entry, "file": file, "prepared": network.write_weights(weights, out / file, start.model.held)}


def _diverged(model: Network, recipe: Recipe, reason: str, done: Fit | None) -> dict[str, Any]:
    # Divergence is an outcome by the recipe's rule, never a reason to try again.
    losses, spent = (done.losses, cost(done, model)) if done else ((), NO_COST)
    if recipe.diverged != "base":
        entry = _entry(base=False, losses=losses, validation=None, spent=spent, note="")
        return {**entry, "failed": {"reason": f"the preparation diverged: {reason}"}}
    note = f"the preparation diverged ({reason}): by rule the model as submitted counts"
    entry = _entry(base=True, losses=losses, validation=None, spent=spent, note=note)
    return {**entry, "diverged": reason}


def _entry(
    *, base: bool, losses: tuple[float, ...], validation: float | None, spent: Mapping[str, float], note: str
) -> dict[str, Any]:
    return {"base": base, **curve(losses), "validation": validation, "cost": dict(spent), "note": note}


def curve(losses: tuple[float, ...]) -> dict[str, list[Any]]:
    """Losses with their steps, thinned to at most CURVE_POINTS; a loss that is no number is None, as JSON has none."""
    stride = max(1, -(-len(losses) // CURVE_POINTS))
    kept = range(0, len(losses), stride)
    return {
        "losses": [losses[i] if math.isfinite(losses[i]) else None for i in kept],
        "loss_steps": [i + 1 for i in kept],
    }


def fit_steps(recipe: Recipe, rows: int) -> int:
    """Steps of one fit."""
    return packing.steps(rows, epochs=recipe.epochs, global_batch=recipe.global_batch)


def planned_steps(recipe: Recipe, rows: int, *, seeds: int) -> int:
    """Steps of a task's fits: one for each rate of the grid, then one for each seed."""
    return fit_steps(recipe, rows) * (len(recipe.lr_grid) + seeds)


class _Counter:
    """Steps done over all fits of a job, told by its words."""

    def __init__(
        self,
        job: PrepareJob,
        packed: Mapping[str, tuple[Packed, Packed]],
        wanted: Mapping[str, list[int]],
        words: Words,
        checkpoints: Checkpoints,
    ) -> None:
        self._words, self._checkpoints = words, checkpoints
        rates, sizes = (0 if job.lr is not None else len(job.recipe.lr_grid)), {n: len(d[0]) for n, d in packed.items()}
        self._total = sum(
            min(fit_steps(job.recipe, rows), job.max_steps or sys.maxsize) * (rates + len(wanted[name]))
            for name, rows in sizes.items()
        )

    def of(self, what: str) -> Callable[[int], None]:
        def on_step(step: int) -> None:
            done = self._checkpoints.position[0] + 1
            self._checkpoints.position = (done, self._total)
            self._words.now(done, self._total, what)

        return on_step


def input_path(folder: Path, digest: str) -> Path:
    """Where whoever runs a job puts an input."""
    return folder / "inputs" / digest.removeprefix("sha256:")


def open_model(job: CheckJob | PrepareJob | EvaluateJob, folder: Path) -> tuple[Network, Any]:
    """The job's model and tokenizer; none of a model of images.

    Raises:
        Refusal: model_invalid.
    """
    files, base = (
        {name: input_path(folder, digest) for name, digest in given.items()}
        for given in (job.model.files, job.model.base)
    )
    in_shards = job.weights == "shards"
    where: dict[str, Any] = {"base": base, "device": computing.device(job.device), "in_shards": in_shards}
    model = network.load(files, job.limits, max_length=job.recipe.max_length, tokenizer=job.tokenizer, **where)
    # Weights in bfloat16 that a layer has multiplied with would be kept for the backward pass, of all layers.
    if not isinstance(job, EvaluateJob) and (job.recompute or (in_shards and job.recipe.dtype == "bfloat16")):
        model.recompute()
    if model.sees:
        return model, None
    return model, packing.load_tokenizer((base or files)["tokenizer.json"], vocabulary=model.vocabulary)


def pack_splits(
    job: CheckJob | PrepareJob, folder: Path, data: TaskData, model: Network, tokenizer: Any
) -> tuple[Packed, Packed]:
    """The preparation and validation split of a task as sequences.

    Raises:
        Refusal: model_invalid, where the model can't read them; splits_invalid, where a split is missing or empty.
    """
    if data.preparation is None or data.validation is None:
        raise Refusal("splits_invalid", f"the job names no preparation and validation split of task {data.task.name}")
    found = []
    for digest in (data.preparation, data.validation):
        model.on_batch()
        rows = tables.read(input_path(folder, digest)).to_pylist()
        if not rows:
            raise Refusal("splits_invalid", f"a split of task {data.task.name} has no rows")
        prompts, targets = classifying.taught(tokenizer, data.task, rows, model=model, max_length=job.recipe.max_length)
        found.append(readable(packing.pack(prompts, targets, max_length=job.recipe.max_length), model, data.task))
    return found[0], found[1]


def readable(packed: Packed, model: Network, task: Task) -> Packed:
    """The same sequences, where the model can read all of them.

    Raises:
        Refusal: model_invalid.
    """
    longest, largest = (
        int(packed.lengths.max(initial=0)),
        int(max(packed.inputs.max(initial=0), packed.labels.max(initial=0))),
    )
    if longest > model.positions:
        raise Refusal(
            "model_invalid",
            f"task {task.name} has sequences of {longest} tokens, the model reads at most {model.positions}",
        )
    if largest >= model.vocabulary:
        raise Refusal("model_invalid", f"the tokenizer gives token {largest}, which the model's vocabulary lacks")
    return packed
