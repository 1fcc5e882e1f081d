"""Evaluation on the holdout's inputs, by the model as submitted and by its prepared models.

It gives log-likelihoods of each choice, or of a whole text, or what the model writes.

Targets never come here; whoever holds them scores what this gives back. One engine, dtype (float32) and batch rule for all.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from acclimate_competitions import digests, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.tasks import Task
from acclimate_runners import classifying, computing, generation, layouts, network, packing
from acclimate_runners.jobs import EvaluateJob, Outcome
from acclimate_runners.network import Network
from acclimate_runners.packing import Packed
from acclimate_runners.preparation import input_path, open_model, readable
from acclimate_runners.words import Words


def evaluate(job: EvaluateJob, folder: Path, progress: Callable[[int, int, str], None]) -> Outcome:
    """Evaluate one entry: one table of predictions for each (task, seed, protocol), in the order of the inputs' rows.

    Raises:
        Refusal: model_invalid, for the entrant's faults; anything else that is raised is not the entrant's.
    """
    computing.be_deterministic(job.recipe.threads)
    model, tokenizer = open_model(job, folder)
    words = Words(progress)
    model.on_batch = words.again
    start = model.copy_weights()
    tasks = {data.task.name: data for data in job.tasks}
    questions: dict[str, tuple[list[str], Asked]] = {}
    files: dict[str, str] = {}
    predictions: list[dict[str, Any]] = []
    for number, (name, seed, protocol) in enumerate(job.stages):
        words.say(number, len(job.stages), f"{name}, {protocol}" + ("" if seed is None else f", seed {seed}"))
        began = time.monotonic()
        # 1. The rows, once for a task.
        if name not in questions:
            data = tasks[name]
            if data.holdout_inputs is None:
                raise Refusal("splits_invalid", f"the job names no holdout inputs of task {name}")
            rows = tables.read(input_path(folder, data.holdout_inputs)).to_pylist()
            make = _KINDS[data.task.kind] if model.labels is None else Labels
            asked = make(tokenizer, data.task, rows, model=model, max_length=job.recipe.max_length)
            questions[name] = ([row["example"] for row in rows], asked)
            words.again()
        # 2. The weights: a direct evaluation is of the model as submitted.
        begun = classifying.begun(model, start, tasks[name].task, seed=job.recipe.selection.seed)
        if protocol == "direct":
            model.set_weights(begun)
        else:
            path = input_path(folder, job.prepared[f"{name}/{seed}"])
            model.set_weights(network.read_weights([path], model.facts, model.held))
        words.again()
        # 3. The table.
        examples, asked = questions[name]
        file = f"{protocol}-{name}-{'none' if seed is None else seed}.parquet"
        path = folder / "out" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        tables.write(_table((job.entrant, protocol, name, seed), examples, asked.answers(model)), path)
        files[file] = digests.of_file(path)
        spent = round(time.monotonic() - began, 3)
        predictions.append(
            {"task": name, "seed": seed, "protocol": protocol, "file": file, "count": len(examples), "seconds": spent}
        )
    words.say(len(job.stages), len(job.stages), "done")
    return Outcome(
        "done", "", files, {"predictions": predictions}, computing.hardware(device=job.device), computing.versions()
    )


@dataclass(frozen=True)
class Answers:
    """What a model gave for each row; a column of which a task's kind has none is None.

    Attributes:
        loglikelihoods: one number a choice, or one of a whole text; null where one is no number.
        texts: what it wrote; None where its numbers are none.
    """

    loglikelihoods: pa.Array | None = None
    texts: list[str | None] | None = None


class Asked(Protocol):
    """A task's inputs, made once for all seeds and protocols of an entry."""

    def answers(self, model: Network) -> Answers:
        """What the model, with its weights as they are now, gives."""


class Begun:
    """Prompts to write on from; one that leaves no room for a text of max_tokens loses tokens at its left."""

    def __init__(
        self, tokenizer: Any, task: Task, rows: list[dict[str, Any]], *, model: Network, max_length: int
    ) -> None:
        self._tokenizer, self._task = tokenizer, task
        room = max_length - task.max_tokens
        self._prompts = [prompt[-room:] for prompt in packing.begun(tokenizer, task, rows)]
        readable(packing.pack(self._prompts, [[0]] * len(rows), max_length=room + 1), model, task)

    def answers(self, model: Network) -> Answers:
        """What the model writes."""
        return Answers(texts=generation.generate(model, self._tokenizer, self._task, self._prompts))


class Texts:
    """Whole texts, in windows where they are longer than a sequence may be."""

    def __init__(
        self, tokenizer: Any, task: Task, rows: list[dict[str, Any]], *, model: Network, max_length: int
    ) -> None:
        texts = packing.whole_texts(tokenizer, task, rows)
        found = [(w, row) for row, text in enumerate(texts) for w in packing.windows(text, max_length=max_length)]
        # In which batch a window is read follows from the tokens alone.
        found.sort(key=lambda one: one[0])
        self._rows, self._of = len(rows), [row for _, row in found]
        packed = packing.pack([w[0] for w, _ in found], [w[1] for w, _ in found], max_length=max_length)
        self._packed = readable(packed, model, task)

    def answers(self, model: Network) -> Answers:
        """The log-likelihood of each text."""
        each = network.answer_loglikelihoods(model, self._packed).numpy()
        parts: list[list[float]] = [[] for _ in range(self._rows)]
        for row, value in zip(self._of, each.tolist(), strict=True):
            parts[row].append(value)
        # math.fsum refuses infinities of both signs.
        sums = [math.fsum(part) if all(map(math.isfinite, part)) else math.nan for part in parts]
        return Answers(_lists(np.array(sums, dtype=np.float64)[:, None]))


class Questions:
    """A task's inputs with its choices, packed once for all seeds and protocols of an entry.

    A prompt is read once for all of its choices: where each is one token, by what is predicted behind it; else with all of them in one
    row (layouts.py). Where that can't be, as a choice's length has the prompt cut, each choice is a sequence of its own. In which batch a row
    is read follows from the rows' tokens alone, not from their order.
    """

    def __init__(
        self, tokenizer: Any, task: Task, rows: list[dict[str, Any]], *, model: Network, max_length: int
    ) -> None:
        prompts, answers = packing.asked(tokenizer, task, rows)
        single = all(len(answer) == 1 for row in answers for answer in row)
        self._count, self._rows = len(task.choices), len(rows)
        self._of_labels = task.kind == classifying.KIND
        ordered = sorted(range(len(rows)), key=lambda row: (prompts[row], answers[row]))
        fits = [row for row in ordered if not single and _shares(prompts[row], answers[row], model, max_length)]
        self._shared = [
            (part, layouts.answered(*_of(prompts, answers, part)))
            for part in _parts(fits, prompts, answers, budget=model.batch_tokens)
        ]
        self._alone = [row for row in ordered if row not in set(fits)]
        own_prompts, own = _of(prompts, answers, self._alone)
        self._singles = np.array([[answer[0] for answer in row] for row in own]) if single else None
        # Single tokens: any one of them makes the same inputs, which end where the choice would begin.
        taken = [row[:1] for row in own] if single else own
        pairs = [(prompt, answer) for prompt, row in zip(own_prompts, taken, strict=True) for answer in row]
        packed = packing.pack([p for p, _ in pairs], [a for _, a in pairs], max_length=max_length)
        self._packed: Packed = readable(packed, model, task)
        for _, part in self._shared:
            readable(Packed(part.laid.inputs, part.tokens, part.laid.positions.max(axis=1) + 1), model, task)

    def answers(self, model: Network) -> Answers:
        """For each row one number a choice, in the order of the choices."""
        found = np.zeros((self._rows, self._count))
        if self._singles is not None:
            found[self._alone] = network.last_logprobs(model, self._packed, self._singles).numpy()
        elif self._alone:
            alone = network.answer_loglikelihoods(model, self._packed)
            found[self._alone] = alone.reshape(-1, self._count).numpy()
        for rows, answers in self._shared:
            found[rows] = network.shared_loglikelihoods(model, answers).reshape(-1, self._count).numpy()
        if self._of_labels:
            # Given that it is one of them.
            found -= np.logaddexp.reduce(found, axis=1, keepdims=True)
        return Answers(_lists(found))


class Labels:
    """A task's inputs for a classifier, made once for all seeds and protocols of an entry."""

    def __init__(
        self, tokenizer: Any, task: Task, rows: list[dict[str, Any]], *, model: Network, max_length: int
    ) -> None:
        prompts = classifying.prompts(tokenizer, task, rows, model=model, max_length=max_length)
        # In which batch a row is read follows from the rows' tokens alone.
        self._order = sorted(range(len(rows)), key=lambda row: prompts[row])
        packed = packing.pack([prompts[row] for row in self._order], [[0]] * len(rows), max_length=max_length)
        self._packed = readable(packed, model, task)
        self._numbers = np.broadcast_to(np.arange(len(task.choices)), (len(rows), len(task.choices)))

    def answers(self, model: Network) -> Answers:
        """For each row one number a label, in the order of the choices; None where one of them is no number."""
        found = np.zeros((len(self._order), self._numbers.shape[1]))
        found[self._order] = network.last_logprobs(model, self._packed, self._numbers).numpy()
        return Answers(_lists(found))


_KINDS: dict[str, Callable[..., Asked]] = {
    "choice": Questions,
    "classify": Questions,
    "generate": Begun,
    "perplexity": Texts,
}


def _shares(prompt: list[int], answers: list[list[int]], model: Network, max_length: int) -> bool:
    """Whether a prompt can be read once for all of its answers.

    Attention takes memory by the square of a row, so a row with all of them is no longer than two sequences.
    """
    longest = len(prompt) + max(map(len, answers))
    short = longest <= max_length and layouts.read_tokens(prompt, answers) <= 2 * max_length
    return bool(prompt) and short and model.can_lay(longest - 1)


def _parts(
    rows: list[int], prompts: list[list[int]], answers: list[list[list[int]]], *, budget: int
) -> list[list[int]]:
    lengths = np.array([layouts.read_tokens(prompts[row], answers[row]) for row in rows], dtype=np.int64)
    return [[rows[place] for place in part.tolist()] for part in packing.batches(lengths, budget=budget)]


def _of(
    prompts: list[list[int]], answers: list[list[list[int]]], rows: list[int]
) -> tuple[list[list[int]], list[list[list[int]]]]:
    return [prompts[row] for row in rows], [answers[row] for row in rows]


def _lists(found: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> pa.Array:
    """A list of numbers for each row of [rows, numbers], null where one is none; as they lie, since a number that Python holds takes four times the room."""
    fine = np.isfinite(found).all(axis=1)
    kept = found if fine.all() else found[fine]
    ends = np.concatenate([[0], np.cumsum(fine * found.shape[1])]).astype(np.int32)
    kind = tables.PREDICTIONS.field("loglikelihoods").type
    return pa.ListArray.from_arrays(ends, kept.ravel(), type=kind, mask=pa.array(~fine))


def _table(key: tuple[str, str, str, int | None], examples: list[str], answers: Answers) -> pa.Table:
    count = len(examples)
    columns: dict[str, Any] = {
        name: [value] * count for name, value in zip(("entrant", "protocol", "task", "seed"), key, strict=True)
    }
    columns |= {
        "example": examples,
        "loglikelihoods": [None] * count if answers.loglikelihoods is None else answers.loglikelihoods,
        "text": answers.texts or [None] * count,
    }
    return pa.table(columns, schema=tables.PREDICTIONS)
