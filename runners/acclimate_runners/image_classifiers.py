"""Image classifiers: ViT, ConvNeXt, ResNet. Fields and tensors, as architectures.py has them of decoders; shapes are those of transformers' classes, a test holds them equal."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from acclimate_runners import config_rules as rules
from acclimate_runners import tensors
from acclimate_runners.config_rules import Check
from acclimate_runners.kinds import Architecture
from acclimate_runners.tensors import Shapes

_CHANNELS = 9
# What a processor makes of pixels before the model reads them: without an effect on the tensors, but not on the numbers.
_SEEN: dict[str, Check] = {
    "image_mean": rules.several(rules.real(-1e3, 1e3), most=_CHANNELS),
    "image_std": rules.several(rules.real(1e-3, 1e3), most=_CHANNELS),
}
_STAGES, _NARROWER = 7, 4
_CONVNEXT: dict[str, Check] = {
    "num_channels": rules.whole(1, _CHANNELS),
    "patch_size": rules.whole(1, 4096),
    "num_stages": rules.whole(1, _STAGES),
    "hidden_sizes": rules.several(rules.whole(1, 2**14), most=_STAGES),
    "depths": rules.several(rules.whole(1, 1024), most=_STAGES),
    "hidden_act": rules.ACTIVATION,
    "layer_norm_eps": rules.EPSILON,
    "drop_path_rate": rules.SHARE,
}
# Of those who read what lies between the stages; and the size of the images that it was once trained on.
_STAGES_TOLD: dict[str, Check] = {
    **_SEEN,
    "image_size": rules.whole(1, 4096),
    "out_features": rules.texts,
    "out_indices": rules.several(rules.whole(0, 1024), most=_STAGES + 1),
    "stage_names": rules.texts,
    "tie_word_embeddings": rules.SWITCH,
}
_RESNET: dict[str, Check] = {
    "num_channels": rules.whole(1, _CHANNELS),
    "embedding_size": rules.whole(1, 2**14),
    "hidden_sizes": rules.several(rules.whole(1, 2**14), most=_STAGES),
    "depths": rules.several(rules.whole(1, 1024), most=_STAGES),
    "layer_type": rules.one_of("basic", "bottleneck"),
    "hidden_act": rules.ACTIVATION,
    "downsample_in_first_stage": rules.SWITCH,
    "downsample_in_bottleneck": rules.SWITCH,
}
_VIT: dict[str, Check] = {
    **rules.BLOCKS,
    "image_size": rules.whole(1, 4096),
    "patch_size": rules.whole(1, 4096),
    "num_channels": rules.whole(1, _CHANNELS),
    "qkv_bias": rules.SWITCH,
}


def _vit(config: Mapping[str, Any]) -> Shapes:
    """ViT's, under the names of files; transformers has others in memory (building.by_file_name)."""
    width, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    found: Shapes = {
        "vit.embeddings.cls_token": (1, 1, width),
        "vit.embeddings.position_embeddings": (1, (config["image_size"] // patch) ** 2 + 1, width),
        "vit.embeddings.patch_embeddings.projection.weight": (width, config["num_channels"], patch, patch),
        "vit.embeddings.patch_embeddings.projection.bias": (width,),
        **tensors.norm("vit.layernorm", width),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"vit.encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            whole_ = tensors.dense(f"{at}.attention.attention.{name}", width, width)
            found |= {key: shape for key, shape in whole_.items() if config.get("qkv_bias", True) or len(shape) == 2}
        found |= tensors.dense(f"{at}.attention.output.dense", width, width)
        found |= tensors.dense(f"{at}.intermediate.dense", inner, width) | tensors.dense(
            f"{at}.output.dense", width, inner
        )
        found |= tensors.norm(f"{at}.layernorm_before", width) | tensors.norm(f"{at}.layernorm_after", width)
    return found


def _vit_conflicts(config: Mapping[str, Any]) -> list[str]:
    side, patch = config["image_size"], config["patch_size"]
    found = [f"image_size {side} is not a multiple of patch_size {patch}"] if side % patch else []
    return found + _channels_that_differ(config)


def _channels_that_differ(config: Mapping[str, Any]) -> list[str]:
    channels = config["num_channels"]
    return [
        f"{name} has {len(config[name])} entries, num_channels is {channels}"
        for name in ("image_mean", "image_std")
        if name in config and len(config[name]) != channels
    ]


def _stages_that_differ(config: Mapping[str, Any], **said: int) -> list[str]:
    """Counts of stages that are not that of depths; said: further ones, by their fields' names."""
    stages = len(config["depths"])
    counts = {"hidden_sizes": len(config["hidden_sizes"]), **said}
    return _channels_that_differ(config) + [
        f"{name} is {found}, depths has {stages} entries" for name, found in counts.items() if found != stages
    ]


def _convnext_conflicts(config: Mapping[str, Any]) -> list[str]:
    return _stages_that_differ(config, num_stages=config.get("num_stages", 4))


def _resnet_conflicts(config: Mapping[str, Any]) -> list[str]:
    found = _stages_that_differ(config)
    least = min(config["hidden_sizes"])
    if _is_narrow(config) and least < _NARROWER:
        found.append(f"hidden_sizes has {least}, of which a bottleneck, {_NARROWER} times narrower, leaves nothing")
    return found


def _is_narrow(config: Mapping[str, Any]) -> bool:
    return bool(config.get("layer_type", "bottleneck") == "bottleneck")


def _convnext(config: Mapping[str, Any], stem: str, layer: Callable[[str, int], Shapes]) -> Shapes:
    """ConvNeXt's tensors under a stem; layer: those that its second version has otherwise, of a layer's name and width."""
    sizes, patch = config["hidden_sizes"], config["patch_size"]
    found: Shapes = {
        f"{stem}.embeddings.patch_embeddings.weight": (sizes[0], config["num_channels"], patch, patch),
        f"{stem}.embeddings.patch_embeddings.bias": (sizes[0],),
        **tensors.norm(f"{stem}.embeddings.layernorm", sizes[0]),
        **tensors.norm(f"{stem}.layernorm", sizes[-1]),
    }
    for stage, (width, depth) in enumerate(zip(sizes, config["depths"], strict=True)):
        at = f"{stem}.encoder.stages.{stage}"
        if stage:
            found |= tensors.norm(f"{at}.downsampling_layer.0", sizes[stage - 1])
            found |= {f"{at}.downsampling_layer.1.weight": (width, sizes[stage - 1], 2, 2)}
            found |= {f"{at}.downsampling_layer.1.bias": (width,)}
        for number in range(depth):
            name = f"{at}.layers.{number}"
            found |= {f"{name}.dwconv.weight": (width, 1, 7, 7), f"{name}.dwconv.bias": (width,)}
            found |= tensors.norm(f"{name}.layernorm", width)
            found |= tensors.dense(f"{name}.pwconv1", 4 * width, width) | layer(name, width)
            found |= tensors.dense(f"{name}.pwconv2", width, 4 * width)
    return found


def _convnext_1(config: Mapping[str, Any]) -> Shapes:
    """ConvNeXt's of version 1."""
    scaled = config.get("layer_scale_init_value", 1e-6) > 0
    return _convnext(
        config, "convnext", lambda name, width: {f"{name}.layer_scale_parameter": (width,)} if scaled else {}
    )


def _convnext_2(config: Mapping[str, Any]) -> Shapes:
    """ConvNeXt's of version 2, whose layers norm their responses."""

    def responses(name: str, width: int) -> Shapes:
        return {f"{name}.grn.{part}": (1, 1, 1, 4 * width) for part in ("weight", "bias")}

    return _convnext(config, "convnextv2", responses)


def _resnet(config: Mapping[str, Any]) -> Shapes:
    """ResNet's; a layer that changes the size or the width has a shortcut with weights."""

    def convolution(name: str, outputs: int, inputs: int, kernel: int) -> Shapes:
        weight: Shapes = {f"{name}.convolution.weight": (outputs, inputs, kernel, kernel)}
        return weight | tensors.batch_norm(f"{name}.normalization", outputs)

    before = config["embedding_size"]
    found = convolution("resnet.embedder.embedder", before, config["num_channels"], 7)
    for stage, (width, depth) in enumerate(zip(config["hidden_sizes"], config["depths"], strict=True)):
        halves, within = bool(stage) or config.get("downsample_in_first_stage", False), width // _NARROWER
        for number in range(depth):
            at = f"resnet.encoder.stages.{stage}.layers.{number}"
            if before != width or (halves and not number):
                found |= convolution(f"{at}.shortcut", width, before, 1)
            steps = ((within, before, 1), (within, within, 3), (width, within, 1))
            plain = ((width, before, 3), (width, width, 3))
            for place, (outputs, inputs, kernel) in enumerate(steps if _is_narrow(config) else plain):
                found |= convolution(f"{at}.layer.{place}", outputs, inputs, kernel)
            before = width
    return found


_NORMS = ("layernorm", "grn", "normalization", "layernorm_before", "layernorm_after", "downsampling_layer.0")
Pixels = tuple[int, int, int]


def _is_multiplied(name: str) -> bool:
    """Whether a name is that of a layer's or a convolution's weight, rather than of a norm's, a bias or a position's embedding."""
    return name.endswith(".weight") and not name.removesuffix(".weight").endswith(_NORMS)


def _stage(name: str) -> int:
    return int(name.partition(".stages.")[2].partition(".")[0])


def _vit_times(config: Mapping[str, Any], image: Pixels) -> Callable[[str], int]:
    patches = (config["image_size"] // config["patch_size"]) ** 2

    def times(name: str) -> int:
        if not _is_multiplied(name):
            return 0
        # A token stands before the patches, which the head reads.
        return 1 if name.startswith("classifier") else patches + (".layer." in name)

    return times


def _convnext_times(config: Mapping[str, Any], image: Pixels) -> Callable[[str], int]:
    sides = [side // config["patch_size"] for side in image[:2]]
    places = [math.prod(side >> stage for side in sides) for stage in range(len(config["depths"]))]

    def times(name: str) -> int:
        if not _is_multiplied(name):
            return 0
        return places[_stage(name)] if ".stages." in name else places[0] if ".embeddings." in name else 1

    return times


def _resnet_times(config: Mapping[str, Any], image: Pixels) -> Callable[[str], int]:
    def halved(sides: Sequence[int]) -> list[int]:
        return [-(-side // 2) for side in sides]

    stem = halved(image[:2])
    before, places = halved(stem), list[tuple[int, int]]()
    for stage in range(len(config["depths"])):
        after = halved(before) if stage or config.get("downsample_in_first_stage", False) else before
        # The first convolution of a bottleneck is at the places before, where its second takes every other one.
        early = before if _is_narrow(config) and not config.get("downsample_in_bottleneck", False) else after
        places.append((math.prod(early), math.prod(after)))
        before = after

    def times(name: str) -> int:
        if not _is_multiplied(name):
            return 0
        if ".stages." not in name:
            return math.prod(stem) if ".embedder." in name else 1
        return places[_stage(name)][0 if ".layers.0.layer.0." in name else 1]

    return times


def _in_stages(
    model_class: str, shapes: Callable[[Mapping[str, Any]], Shapes], fields: Mapping[str, Check], **more: Any
) -> Architecture:
    """A network of stages, of which each has images of half the size; it reads images of any size."""
    known: dict[str, Any] = {
        "score": "classifier.weight",
        "score_bias": "classifier.bias",
        "conflicts": _convnext_conflicts,
        "times": _convnext_times,
    }
    return Architecture(
        model_class=model_class,
        fields=fields,
        shapes=shapes,
        head="",
        tied=True,
        positions=None,
        heads=None,
        told=_STAGES_TOLD,
        answering=("classifier",),
        encodes=True,
        sees=True,
        width=lambda config: int(config["hidden_sizes"][-1]),
        **{**known, **more},
    )


def _patched(config: Mapping[str, Any]) -> int:
    """The side of an image of which something is left after the last stage."""
    return int(config["patch_size"]) << (len(config["depths"]) - 1)


IMAGES: dict[str, Architecture] = {
    "vit": Architecture(
        model_class="ViTForImageClassification",
        fields=_VIT,
        required=(
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "image_size",
            "patch_size",
            "num_channels",
        ),
        shapes=_vit,
        head="",
        embedding="vit.embeddings.patch_embeddings.projection.weight",
        tied=True,
        positions=None,
        heads=("hidden_size", "num_attention_heads"),
        told={
            **_SEEN,
            "encoder_stride": rules.whole(1, 4096),
            "pooler_act": rules.text,
            "pooler_output_size": rules.whole(1, 2**16, optional=True),
            "tie_word_embeddings": rules.SWITCH,
        },
        score="classifier.weight",
        score_bias="classifier.bias",
        answering=("classifier",),
        encodes=True,
        sees=True,
        conflicts=_vit_conflicts,
        times=_vit_times,
    ),
    "convnext": _in_stages(
        "ConvNextForImageClassification",
        _convnext_1,
        {**_CONVNEXT, "layer_scale_init_value": rules.real(0, 1e6)},
        required=("hidden_sizes", "depths", "num_channels", "patch_size"),
        embedding="convnext.embeddings.patch_embeddings.weight",
        least=_patched,
    ),
    "convnextv2": _in_stages(
        "ConvNextV2ForImageClassification",
        _convnext_2,
        _CONVNEXT,
        required=("hidden_sizes", "depths", "num_channels", "patch_size"),
        embedding="convnextv2.embeddings.patch_embeddings.weight",
        least=_patched,
    ),
    "resnet": _in_stages(
        "ResNetForImageClassification",
        _resnet,
        _RESNET,
        required=("hidden_sizes", "depths", "num_channels", "embedding_size"),
        embedding="resnet.embedder.embedder.convolution.weight",
        score="classifier.1.weight",
        score_bias="classifier.1.bias",
        least=lambda config: 1,
        conflicts=_resnet_conflicts,
        times=_resnet_times,
    ),
}
"""Model type -> what is known of it."""
