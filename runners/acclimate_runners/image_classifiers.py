"""Image classifiers: ViT. Fields and tensors, as architectures.py has them of decoders; shapes are those of transformers' classes, a test holds them equal."""

from collections.abc import Mapping
from typing import Any

from acclimate_runners import config_rules as rules
from acclimate_runners import tensors
from acclimate_runners.config_rules import Check
from acclimate_runners.kinds import Architecture
from acclimate_runners.tensors import Shapes

_VIT: dict[str, Check] = {
    "hidden_size": rules.WIDTH,
    "intermediate_size": rules.INNER,
    "num_hidden_layers": rules.LAYERS,
    "num_attention_heads": rules.HEADS,
    "hidden_act": rules.ACTIVATION,
    "hidden_dropout_prob": rules.SHARE,
    "attention_probs_dropout_prob": rules.SHARE,
    "layer_norm_eps": rules.EPSILON,
    "image_size": rules.whole(1, 4096),
    "patch_size": rules.whole(1, 4096),
    "num_channels": rules.whole(1, 9),
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
    return [f"image_size {side} is not a multiple of patch_size {patch}"] if side % patch else []


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
            "encoder_stride": rules.whole(1, 4096),
            "pooler_act": rules.text,
            "pooler_output_size": rules.whole(1, 2**16, optional=True),
            "tie_word_embeddings": rules.SWITCH,
        },
        score="classifier.weight",
        score_bias="classifier.bias",
        scoring=("classifier.",),
        encodes=True,
        sees=True,
        conflicts=_vit_conflicts,
    ),
}
"""Model type -> what is known of it."""
