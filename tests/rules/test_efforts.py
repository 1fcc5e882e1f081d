"""The FLOPs of a ledger: of images those that torch itself counts, of texts the usual estimate."""

import math
from typing import Any

import pytest
from small_configs import CONFIGS, ENCODERS

from acclimate_runners import architectures, efforts, image_classifiers

IMAGES = sorted(image_classifiers.IMAGES)
SIZES = {"vit": [(8, 8)]}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "vit": [{}, {"patch_size": 2, "qkv_bias": False}],
    "convnext": [{}, {"patch_size": 4, "depths": [2, 1, 3], "hidden_sizes": [4, 6, 10], "num_stages": 3}],
    "convnextv2": [{}],
    "resnet": [
        {},
        {"layer_type": "basic", "downsample_in_first_stage": True},
        {"downsample_in_bottleneck": True, "hidden_sizes": [8, 16, 8], "depths": [2, 2, 1]},
        {"layer_type": "basic", "embedding_size": 8},
    ],
}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    return {**ENCODERS[architecture], "id2label": {"0": "a", "1": "b", "2": "c"}, **changes}


def counted(model: Any, height: int, width: int, *, backward: bool = False) -> dict[str, int]:
    """What torch counts of one image, by operation."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        scores = model(pixel_values=torch.ones(1, 3, height, width)).logits
        if backward:
            scores.sum().backward()
    return {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize(
    ("architecture", "changes", "size"),
    [
        (name, changes, size)
        for name in IMAGES
        for changes in CHANGES[name]
        for size in SIZES.get(name, [(32, 32), (33, 57)])
    ],
)
def test_of_an_image_they_are_what_torch_counts(
    architecture: str, changes: dict[str, Any], size: tuple[int, int]
) -> None:
    from acclimate_runners import building

    config = config_of(architecture, **changes)
    assert architectures.problems(config, (architecture,)) == []
    model = building.build(config, max_length=16)
    found = counted(model, *size)
    # An attention's scores are left out, as in the usual estimate.
    plain = sum(flops for name, flops in found.items() if "bmm" not in name)
    assert efforts.products(config, (*size, 3)) * 2 == plain
    if architecture.startswith("convnext"):  # torch counts gradients of convolutions in groups as if there were none
        return
    learned = counted(model, *size, backward=True)
    taken = efforts.flops(config, tokens=math.prod(size) * 3, image=(*size, 3), beside=0)
    # No gradient of the pixels is needed.
    assert 0.6 * taken < sum(flops for name, flops in learned.items() if "bmm" not in name) <= taken


def test_of_a_large_image_they_are_those_that_are_published() -> None:
    """ResNet-50 and ConvNeXt-T, 4.1 and 4.5 thousand million multiplications of an image of 224 x 224; ViT-B/16 17.56 with the 0.71 of its attention's scores."""
    labels = {"id2label": {str(number): f"kind {number}" for number in range(1000)}}
    resnet = {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "embedding_size": 64}
    convnext = {"hidden_sizes": [96, 192, 384, 768], "depths": [3, 3, 9, 3], "num_stages": 4, "patch_size": 4}
    vit = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    vit |= {"image_size": 224, "patch_size": 16}
    for name, changes, most in (("resnet", resnet, 4.09), ("convnext", convnext, 4.45), ("vit", vit, 16.85)):
        found = efforts.products(config_of(name, **changes, **labels), (224, 224, 3)) / 1e9
        assert found == pytest.approx(most, abs=0.02)


@pytest.mark.parametrize("architecture", [name for name in (*CONFIGS, *ENCODERS) if name not in (*IMAGES, "albert")])
def test_of_a_token_they_are_six_for_each_parameter(architecture: str) -> None:
    encodes = architectures.ARCHITECTURES[architecture].encodes
    config = config_of(architecture) if encodes else CONFIGS[architecture]
    parameters = sum(math.prod(shape) for shape in architectures.shapes(config).values())
    assert efforts.flops(config, tokens=7, image=None, beside=0) == 6 * 7 * parameters


def test_layers_that_are_passed_several_times_count_as_often() -> None:
    """An ALBERT's of two groups: three passes of the first, two of the second."""
    config = config_of("albert", num_hidden_layers=5, num_hidden_groups=2)
    shapes = architectures.shapes(config)
    passes = {0: 3, 1: 2}
    expected = sum(
        math.prod(shape) * next((times for group, times in passes.items() if f"layer_groups.{group}." in name), 1)
        for name, shape in shapes.items()
    )
    assert efforts.products(config, None) == expected > sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize("architecture", ["bert", "albert", "vit", "llama"])
def test_with_adapters_they_are_four_and_six_of_these_and_a_head_s_six(architecture: str) -> None:
    from types import SimpleNamespace

    import torch

    from acclimate_competitions.recipe import Lora
    from acclimate_runners import adapters, building, network

    encodes = architectures.ARCHITECTURES[architecture].encodes
    config = config_of(architecture) if encodes else CONFIGS[architecture]
    model = building.build(config, max_length=16)
    facts: Any = SimpleNamespace(config=config, architecture=architecture)
    image = (8, 8, 3) if architecture in IMAGES else None
    loaded = network.Network(model, facts, building.by_file_name(model, architecture), image=image)
    lora, times = Lora(rank=2, alpha=4.0, targets=("attention",)), efforts.times(config, image)
    with adapters.learned(loaded, lora, seed=0) as learned:
        beside = adapters.operations(learned, lora, loaded)
        head = sum(torch.numel(tensor) * times(name) for name, tensor in learned.items() if name in loaded.weights)
        own = sum(torch.numel(t) * times(name[:-2]) for name, t in learned.items() if name not in loaded.weights)
    assert adapters.operations(loaded.weights, None, loaded) == 0 and bool(head) == encodes
    taken = efforts.flops(config, tokens=math.prod(image or (1,)), image=image, beside=beside)
    assert taken == 4 * (efforts.products(config, image) - head) + 6 * own + 6 * head
