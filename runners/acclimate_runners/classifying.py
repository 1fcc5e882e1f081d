"""Tasks of the kind classify: a sequence classifier answers with a number for each label, a language model with the labels' words.

A classifier's head stands where a language model's predicts the next token: on what the model makes of the last token of the prompt. So labels
are to a classifier what tokens are to a language model, and all else (batches, loss, checkpoints) is the same. An encoder's head reads the first token, which has seen all others. A language
model is taught
and asked as in a task of the kind choice; its log-likelihoods are made those of the labels, given that it is one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acclimate_competitions import splits
from acclimate_competitions.definition import Task
from acclimate_competitions.errors import Refusal
from acclimate_runners import architectures, packing
from acclimate_runners.network import Network
from acclimate_runners.prompts import filled

KIND = "classify"
_DEVIATION = 0.02


def begun(model: Network, weights: Mapping[str, Tensor], task: Task, *, seed: int) -> Mapping[str, Tensor]:
    """The weights that everything of a task begins with; a classifier's head then has the task's labels, in their order.

    The head that was submitted counts where its labels are the task's, in whatever order. Else a fresh one is made: normal with deviation
    0.02, drawn with the seed, the same for all entrants of one width.

    Args:
        model: whose head is made to fit.
        weights: as submitted.
        task: with its choices.
        seed: the recipe's selection seed.

    Raises:
        Refusal: model_invalid, where a classifier meets a task of another kind.
    """
    if model.labels is None:
        return weights
    if task.kind != KIND:
        raise Refusal(
            "model_invalid", f"task {task.name} is of the kind {task.kind}, which a sequence classifier can't do"
        )
    kind = architectures.ARCHITECTURES[model.facts.architecture]
    if model.sees != (task.pixels is not None):
        reads = "images" if model.sees else "texts"
        raise Refusal("model_invalid", f"the model reads {reads}, which the rows of task {task.name} are not")
    model.image = task.pixels
    submitted = weights[kind.score]
    bias = weights[kind.score_bias] if kind.score_bias is not None else None
    names = model.submitted_labels
    if sorted(names) == sorted(task.choices):
        order = [names.index(choice) for choice in task.choices]
        head, bias = submitted[order], None if bias is None else bias[order]
    else:
        generator = torch.Generator().manual_seed(seed)
        head = torch.randn(len(task.choices), submitted.shape[1], generator=generator) * _DEVIATION
        bias = None if bias is None else torch.zeros(len(task.choices))
    config = architectures.with_labels(model.facts.config, task.choices)
    model.facts = replace(model.facts, config=config)
    layer = torch.nn.Linear(head.shape[1], head.shape[0], bias=bias is not None).to(model.device)
    model.model.set_submodule(kind.score.removesuffix(".weight"), layer)
    made = {kind.score: head} | ({} if kind.score_bias is None or bias is None else {kind.score_bias: bias})
    model.weights |= {name: layer.weight if name == kind.score else layer.bias for name in made}
    return {**weights, **made}


def taught(
    tokenizer: Any, task: Task, rows: Sequence[Mapping[str, Any]], *, model: Network, max_length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of each row's prompt, and of its target, which to a classifier is one number.

    Raises:
        Refusal: as packing.taught.
    """
    if model.labels is None:
        return packing.taught(tokenizer, task, rows, max_length=max_length)
    numbers = {choice: number for number, choice in enumerate(task.choices)}
    return prompts(tokenizer, task, rows, model=model, max_length=max_length), [
        [numbers[row["target"]]] for row in rows
    ]


def prompts(
    tokenizer: Any, task: Task, rows: Sequence[Mapping[str, Any]], *, model: Network, max_length: int
) -> list[list[int]]:
    """Tokens of each row's prompt, for a classifier; an encoder's with what its tokenizer puts around a text.

    Raises:
        Refusal: model_invalid, where there is none to answer behind.
    """
    if model.sees:
        return images(task, rows, model=model)
    if model.encodes:
        # A sequence's last token is the label, which is not read.
        found = packing.framed(tokenizer, filled(task, rows), most=max_length - 1)
    else:
        found = packing.prompt_tokens(tokenizer, task, rows)
    if not all(found):
        raise Refusal("model_invalid", f"the tokenizer gives no token for a prompt of task {task.name}")
    return found


def images(task: Task, rows: Sequence[Mapping[str, Any]], *, model: Network) -> list[list[int]]:
    """The numbers of each row's image, from 0 to 255, which are to a model of images what tokens are to others.

    Raises:
        Refusal: model_invalid, where the model reads images of another size; splits_invalid, where a row has none.
    """
    config, least = model.facts.config, architectures.ARCHITECTURES[model.facts.architecture].least
    channels = config["num_channels"]
    if least is not None:
        _require_room(task, channels, least(config))
    elif task.pixels != ((size := config["image_size"]), size, channels):
        raise Refusal(
            "model_invalid",
            f"task {task.name} has images of {task.image or 'no size'}, the model reads {size}x{size}x{channels}",
            hint="set image_size and num_channels, with the weights that belong to them",
        )
    found = []
    for row in rows:
        if (numbers := splits.image_bytes(row["input"], task)) is None:
            raise Refusal("splits_invalid", f"the input of {row['example']!r} is no image of {task.image} in base64")
        found.append(list(numbers))
    return found


def _require_room(task: Task, channels: int, least: int) -> None:
    """Refuse images of other channels than a model of any size reads, or of which it would leave nothing."""
    height, width, there = task.pixels or (0, 0, 0)
    if there != channels or min(height, width) < least:
        raise Refusal(
            "model_invalid",
            f"task {task.name} has images of {task.image or 'no size'}, the model reads such of {channels} channels and at least {least}x{least}",
        )
