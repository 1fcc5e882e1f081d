"""A submitted model tried before it is accepted: a few steps of its preparation, and what the whole will take.

The same steps as the preparation's own; the forecast of time is that of the shortest of them, the forecast of memory what the
process took at most, a batch of the longest sequences included.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from acclimate_competitions.errors import Refusal
from acclimate_competitions.recipe import Recipe
from acclimate_runners import adapters, classifying, computing, ranks
from acclimate_runners.jobs import CheckJob, Outcome
from acclimate_runners.network import Network
from acclimate_runners.packing import Packed
from acclimate_runners.preparation import Fit, Progress, fit, learn, open_model, pack_splits, planned_steps
from acclimate_runners.words import Words

CHECK_STEPS = 3
_SLACK = 2.0


class _Pace:
    """How long a step takes at least: the shortest of those after the first, which warms up."""

    def __init__(self, threads: int) -> None:
        self._threads, self._laps = threads, list[tuple[float, float]]()

    def lap(self) -> None:
        """A step has ended."""
        self._laps.append((time.monotonic(), time.process_time()))

    @property
    def seconds(self) -> float:
        """Seconds of a step; 0 where there was only one. Other processes that keep this one waiting make it no longer."""
        laps = zip(self._laps, self._laps[1:], strict=False)
        return min((min(b[0] - a[0], (b[1] - a[1]) / self._threads) for a, b in laps), default=0.0)


def refuse_endless(forecast: float, allowed: float) -> None:
    """Refuse a model whose preparation would be ended by the time limit, while its entrant can still send another.

    Raises:
        Refusal: model_invalid, where the forecast is so far beyond the limit that a slow machine can't be the reason.
    """
    if forecast > _SLACK * allowed:
        sentence = f"the preparation would take about {forecast:.3g} s, {allowed:.3g} s are allowed"
        raise Refusal("model_invalid", sentence, hint="fewer layers or parameters make a step shorter")


def _read_longest(model: Network, rows: Packed, recipe: Recipe, *, micro_batch: int | None) -> None:
    """Have the process take the memory of a batch of the longest sequences, which three steps may not have met."""
    if rows.lengths.min() < rows.lengths.max():
        longest = np.argsort(rows.lengths, kind="stable")[-recipe.global_batch :]
        model.model.train()
        with adapters.learned(model, recipe.lora, seed=recipe.selection.seed):
            learn(model, rows, ranks.parts(longest, micro_batch), recipe=recipe, batch=longest)


def check(job: CheckJob, folder: Path, progress: Progress) -> Outcome:
    """Load a submitted model, read all tasks with its tokenizer, and run three preparation steps of each.

    Raises:
        Refusal: model_invalid, with a public reason; also where its preparation would take far longer than is allowed.
    """
    computing.be_deterministic(job.recipe.threads)
    model, tokenizer = open_model(job, folder)
    told = Words(progress)
    model.on_batch = told.again
    packed = {data.task.name: pack_splits(job, folder, data, model, tokenizer) for data in job.tasks}
    tasks = {data.task.name: data.task for data in job.tasks}
    start, tries, forecast = model.copy_weights(), list[Fit](), 0.0
    for name, data in packed.items():
        model.set_weights(classifying.begun(model, start, tasks[name], seed=job.recipe.selection.seed))
        pace = _Pace(job.recipe.threads)

        def on_step(step: int, name: str = name, pace: _Pace = pace) -> None:
            pace.lap()
            words = f"{name}, {CHECK_STEPS} steps on public data"
            told.say(len(tries) * CHECK_STEPS + step, len(packed) * CHECK_STEPS, words)

        lr, seed = job.recipe.lr_grid[0], job.recipe.selection.seed
        how: dict[str, Any] = {"on_step": on_step, "stop_after": CHECK_STEPS, "micro_batch": job.micro_batch}
        tries.append(fit(model, data, job.recipe, lr=lr, seed=seed, **how))
        if diverged := tries[-1].diverged:
            sentence = f"task {name}: {CHECK_STEPS} preparation steps on public data fail: {diverged}"
            raise Refusal("model_invalid", sentence, hint="check the weights")
        _read_longest(model, data[0], job.recipe, micro_batch=job.micro_batch)
        forecast += pace.seconds * planned_steps(job.recipe, len(data[0]), seeds=len(job.recipe.seeds))
    refuse_endless(forecast, job.limits.wall_seconds)
    facts = model.facts
    results: dict[str, Any] = {"architecture": facts.architecture, "parameters": facts.parameters}
    results |= {"losses": list(tries[0].losses), "forecast": round(forecast, 6)}
    return Outcome("done", "", {}, results, computing.hardware(job.recipe.dtype, job.device), computing.versions())
