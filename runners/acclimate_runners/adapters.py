"""Low-rank adapters, for recipes of the method "lora" (Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021).

A linear layer of weight W [outputs, inputs] gives W x + (alpha / rank) B A x while A [rank, inputs] and B [outputs, rank] are learned
and everything else stands still; there is no dropout before A. Afterwards (alpha / rank) B A is added to W. So what is prepared is a
whole model, as with the method "full": who evaluates it, or makes it again, needs to know nothing of adapters.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from acclimate_competitions.errors import Refusal
from acclimate_competitions.recipe import Lora
from acclimate_runners import architectures, efforts, tensors
from acclimate_runners.network import Network


@contextmanager
def learned(model: Network, lora: Lora | None, *, seed: int) -> Iterator[dict[str, Tensor]]:
    """What a fit learns, by name: the model's own weights, or adapters, which are merged into these at the end.

    Args:
        model: left without adapters, whatever happens.
        lora: None for the weights themselves.
        seed: what A is drawn with.

    Raises:
        Refusal: model_invalid, where the architecture has no layer for any of them.
    """
    if lora is None:
        yield {name: weight for name, weight in model.weights.items() if not tensors.stands_still(name)}
        return
    names = tensors.linear(architectures.shapes(model.facts.config), lora.targets)
    if not names:
        sentence = f"the recipe has adapters on {' and '.join(lora.targets)}, which {model.facts.architecture} has no layers of"
        raise Refusal("model_invalid", sentence)
    # Files may name weights otherwise than transformers does in memory.
    owners = {
        id(module.weight): module for module in model.model.modules() if getattr(module, "weight", None) is not None
    }
    own = {name: model.held.registered(name, weight) for name, weight in model.weights.items()}
    layers = {name: owners[id(own[name])] for name in names}
    made = _drawn(layers, lora.rank, seed=seed)
    scale = lora.alpha / lora.rank
    with ExitStack() as stack:
        for name, layer in layers.items():
            pair = (made[f"{name}.A"], made[f"{name}.B"])
            stack.callback(layer.register_forward_hook(partial(_added, pair, scale)).remove)
        # A classifier's head may have learned nothing yet.
        scoring = architectures.ARCHITECTURES[model.facts.architecture].scoring if model.labels is not None else ()
        head = {name: weight for name, weight in model.weights.items() if name.startswith(scoring)}
        for weight in own.values():
            weight.requires_grad_(False)
            stack.callback(weight.requires_grad_, True)
        for name in head:
            own[name].requires_grad_(True)
        yield made | head
    with torch.no_grad():
        for name, layer in layers.items():
            product = made[f"{name}.B"] @ made[f"{name}.A"] * scale
            model.weights[name].add_(model.held.own(name, product if _is_plain(layer) else product.T))


def operations(learned: Mapping[str, Tensor], lora: Lora | None, model: Network) -> int:
    """Floating-point operations of one token or image that a fit with adapters makes beyond those of a model that stands still, by all processes that hold it; 0 without."""
    if lora is None:
        return 0
    times = efforts.times(model.facts.config, model.image)
    # Of a head, which is learned with them, there is one gradient more than of a weight that stands still.
    return sum(
        (2 if name in model.weights else 6)
        * math.prod(model.held.shape(name, tensor))
        * times(name.removesuffix(".A").removesuffix(".B"))
        for name, tensor in learned.items()
    )


def _drawn(layers: dict[str, Any], rank: int, *, seed: int) -> dict[str, Tensor]:
    """Adapters that add nothing yet: B is zero, A uniform within 1 / sqrt(inputs), drawn layer by layer in the order of names."""
    generator = torch.Generator().manual_seed(seed * 1_000_003)
    made: dict[str, Tensor] = {}
    for name in sorted(layers):
        weight = layers[name].weight
        outputs, inputs = weight.shape if _is_plain(layers[name]) else reversed(weight.shape)
        first = torch.empty(rank, inputs).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
        pair = {f"{name}.A": first, f"{name}.B": torch.zeros(outputs, rank)}
        made |= {key: tensor.to(weight.device).requires_grad_() for key, tensor in pair.items()}
    return made


def _added(pair: tuple[Tensor, Tensor], scale: float, layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output + functional.linear(functional.linear(inputs[0], pair[0]), pair[1]) * scale


def _is_plain(layer: Any) -> bool:
    """Whether a layer keeps its weight as [outputs, inputs]; GPT-2's are transposed."""
    return isinstance(layer, torch.nn.Linear)
