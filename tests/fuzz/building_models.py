"""A target of the fuzzer: whatever config.json the rules accept, transformers' class takes, with the tensors that the rules say, and it computes.

What a server's check accepts and the library then refuses, or breaks on in its first step, would be a fault that nobody had told the entrant.
"""

import copy
import math
from functools import cache
from typing import Any

import small_configs
from edits import Bytes

from acclimate_runners import architectures

CONFIGS: dict[str, dict[str, Any]] = {**small_configs.CONFIGS, **small_configs.ENCODERS}
NAMES = sorted(CONFIGS)
MOST = 30_000
"""Parameters of what is built."""
_LENGTHS = (9, 200)
_ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_type": "default", "rope_theta": 100},
    {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 4.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    {"partial_rotary_factor": 0.25},
    {"partial_rotary_factor": 1},
)
_BY_KIND = [{kind: rope} for kind in ("full_attention", "sliding_attention") for rope in (*_ROPES, None)]
_TYPES = [[f"{name}_attention" for name in names] for names in (["full"], ["sliding"], ["full", "sliding"])]
VALUES: tuple[Any, ...] = (
    None, True, False, *range(-1, 9), 12, 16, 17, 24, 31, 32, 63, 64, 100, 1024, 4096, 2**16, 2**20, 2**22,
    0.0, 1e-12, 1e-6, 0.01, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 1.0, 2.5, 1e6, 1e9,
    "auto", "gelu", "relu", "silu", "tanh", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "none", "layer_norm", "c2p", "c2p|p2c",
    "cls", "mean", "basic", "bottleneck", "absolute", "first", "max", [], [1], [2], [1, 1], [2, 2], [3, 1], [8], [4, 4], [16, 8], [8, 12], [1, 2, 1],
    [4, 8, 16], [3, 6], ["c2p"], ["p2c", "c2p"], *_TYPES, ["full_attention"] * 2, *_ROPES, *_BY_KIND,
)  # fmt: skip


@cache
def _changes(name: str) -> list[tuple[str, list[Any]]]:
    """The fields of an architecture, each with the values that its own rule accepts."""
    kind = architectures.ARCHITECTURES[name]
    rules = {**kind.told, **kind.fields}
    found = {field: [value for value in VALUES if rules[field](value) is None] for field in sorted(rules)}
    return [(field, values) for field, values in found.items() if values]


def config(choices: Bytes) -> dict[str, Any]:
    """A small config, of which one to four fields are changed, or left out."""
    name = choices.one_of(NAMES)
    made = copy.deepcopy(CONFIGS[name])
    if architectures.ARCHITECTURES[name].encodes:
        made["id2label"] = {"0": "a", "1": "b"}
    for _ in range(1 + choices.below(4)):
        field, values = choices.one_of(_changes(name))
        if choices.below(6):
            made[field] = choices.one_of(values)
        else:
            made.pop(field, None)
    return made


def built(data: bytes) -> None:
    """What is accepted is built, and learns from one batch."""
    choices = Bytes(data)
    made = config(choices)
    name = made["model_type"]
    if architectures.problems(made, (name,)):
        return
    expected = architectures.shapes(made)
    if (parameters := sum(map(math.prod, expected.values()))) > MOST:
        return
    import torch

    from acclimate_runners import building, network
    from acclimate_runners.reading import ModelFacts

    kept = copy.deepcopy(made)
    model = building.build(made, max_length=choices.one_of(_LENGTHS))
    weights = building.by_file_name(model, name)
    found = {key: tuple(tensor.shape) for key, tensor in weights.items()}
    if found != expected or made != kept:
        raise AssertionError(f"{made} has {sorted(set(found.items()) ^ set(expected.items()))[:4]}")
    opened = network.Network(model, ModelFacts(name, parameters, 0, made), weights)
    if (inputs := _inputs(opened)) is None:
        return
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in weights.values():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) / 10)
    scores = opened.logits(inputs, torch.arange(1, len(inputs) + 1) * inputs.shape[1] - 1)
    scores.square().sum().backward()
    learned = [tensor.grad for tensor in weights.values() if tensor.grad is not None]
    if len(scores) != len(inputs) or not all(bool(each.isfinite().all()) for each in (scores, *learned)):
        raise AssertionError(f"{made} computes {scores}")


def _inputs(model: Any) -> Any:
    """Two rows for a model; None where a job would refuse it, or where they would take long."""
    import torch

    facts = model.facts.config
    if not model.sees:
        length = min(8, model.positions)
        return torch.arange(2 * length).view(2, length) % facts["vocab_size"] if length > 0 else None
    least = architectures.ARCHITECTURES[model.facts.architecture].least
    side = facts["image_size"] if least is None else least(facts)
    model.image = (side, side, facts["num_channels"])
    size = math.prod(model.image)
    return torch.arange(2 * size).view(2, size) % 256 if side <= 32 else None


def seeds() -> list[bytes]:
    """Inputs to begin with: each architecture with one field of it changed."""
    return [bytes([0, number, 0, 0, 0, number % 3, 0, 1, 0, 2]) for number in range(len(NAMES))]


def unchanged() -> None:
    """The configs that are changed are accepted as they are, and there is one of each architecture."""
    assert set(NAMES) == set(architectures.ARCHITECTURES)
    for number, name in enumerate(NAMES):
        assert NAMES[number] == name
        made = {**CONFIGS[name]}
        if architectures.ARCHITECTURES[name].encodes:
            made["id2label"] = {"0": "a", "1": "b"}
        assert architectures.problems(made, (name,)) == []
        assert sum(map(math.prod, architectures.shapes(made).values())) <= MOST
