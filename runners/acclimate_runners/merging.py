"""An adapter merged into its base's weights, as peft's merge_and_unload does: W + scale · B A for each adapted layer, in float32."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from acclimate_competitions.errors import Refusal
from acclimate_runners.adapter_files import WEIGHTS, Adapter
from acclimate_runners.holding import Held


def merge(weights: dict[str, Tensor], path: Path, adapter: Adapter, held: Held) -> None:
    """Change the base's weights in place.

    Args:
        weights: name -> float32 weight of the base, or what is held of it.
        path: the adapter's weights, read strictly before.
        adapter: what was read of it.
        held: what this process holds of the base.

    Raises:
        Refusal: model_invalid, where a matrix holds NaN or infinity.
    """
    stored = {name: tensor.to(torch.float32) for name, tensor in load_file(path).items()}
    problems = [
        f"tensor {name!r} holds NaN or infinity" for name, tensor in stored.items() if not torch.isfinite(tensor).all()
    ]
    if problems:
        raise Refusal("model_invalid", f"{WEIGHTS}: {problems[0]}", problems=problems)
    for name, start in adapter.layers.items():
        product = stored[f"{start}.lora_B.weight"] @ stored[f"{start}.lora_A.weight"]
        # What overflows here is found when the model is tried.
        weights[name] += held.own(name, product.T if adapter.transposed else product) * adapter.scale
