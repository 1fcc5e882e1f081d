"""Transformers' model of a checked config.json: which class, which attention, and what its parameters are called in files."""

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from acclimate_runners import architectures, importing, tensors

# Up to this length the plain attention is the faster one on a CPU; the choice depends on the recipe alone, so it is the same for all.
EAGER_UP_TO = 128

_CONFIGS = {
    "llama": "LlamaConfig",
    "gpt2": "GPT2Config",
    "gpt_neox": "GPTNeoXConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma": "GemmaConfig",
    "olmo": "OlmoConfig",
    "olmo2": "Olmo2Config",
    "phi": "PhiConfig",
    "phi3": "Phi3Config",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "falcon": "FalconConfig",
    "mamba": "MambaConfig",
    "falcon_mamba": "FalconMambaConfig",
    "bert": "BertConfig",
    "roberta": "RobertaConfig",
    "xlm-roberta": "XLMRobertaConfig",
    "electra": "ElectraConfig",
    "albert": "AlbertConfig",
    "distilbert": "DistilBertConfig",
    "deberta-v2": "DebertaV2Config",
    "modernbert": "ModernBertConfig",
    "vit": "ViTConfig",
    "convnext": "ConvNextConfig",
    "convnextv2": "ConvNextV2Config",
    "resnet": "ResNetConfig",
}
"""Names of transformers' configuration classes, each in the module of its model type, or in that of _MODULES."""

_MODULES = {"gemma3_text": "gemma3", "deberta-v2": "deberta_v2", "xlm-roberta": "xlm_roberta"}
_VIT_NAMES = {
    "vit.layers.": "vit.encoder.layer.",
    "attention.q_proj.": "attention.attention.query.",
    "attention.k_proj.": "attention.attention.key.",
    "attention.v_proj.": "attention.attention.value.",
    "attention.o_proj.": "attention.output.dense.",
    "mlp.fc1.": "intermediate.dense.",
    "mlp.fc2.": "output.dense.",
}
"""Parts of names in memory -> in files, which are what versions of transformers share."""
_EAGER_ONLY = ("gemma2", "mamba", "falcon_mamba", "deberta-v2", "convnext", "convnextv2", "resnet")
"""Architectures whose attention the faster one can't do, or that have none."""
_KERNELS = ("mamba_ssm", "causal_conv1d", "mambapy", "kernels")
"""Packages that transformers would take for Mamba where a machine has them, with other numbers than everywhere else; the last fetches such code."""


def classes(kind: str) -> tuple[Any, Any]:
    """Transformers' classes of an architecture: of its configuration and of its language model."""
    for name in _KERNELS:
        # None has an import fail.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    with importing.quickly():
        found = import_module(f"transformers.models.{_MODULES.get(kind, kind)}")
        return getattr(found, _CONFIGS[kind]), getattr(found, architectures.ARCHITECTURES[kind].model_class)


def _classifier(kind: str) -> Any:
    """Transformers' class of an architecture's sequence classifiers."""
    return getattr(
        import_module(f"transformers.models.{_MODULES.get(kind, kind)}"),
        str(architectures.ARCHITECTURES[kind].classifier),
    )


def build(config: Mapping[str, Any], *, max_length: int) -> Any:
    """Transformers' model of a checked config, with weights of no meaning; nothing is looked up outside this process."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config_class, model_class = classes(config["model_type"])
    eager = max_length <= EAGER_UP_TO or config["model_type"] in _EAGER_ONLY
    given = architectures.effective(config)
    if (names := architectures.labels(config)) is not None:
        model_class, given["num_labels"] = _classifier(config["model_type"]), len(names)
    made = config_class(**given, attn_implementation="eager" if eager else "sdpa")
    _drop_nothing(made)
    model = model_class(made).float().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = _Standing
    return model


class _Standing(nn.BatchNorm2d):  # type: ignore[misc]
    """A batch norm that norms by what the file says, while it is learned, too, and never changes that.

    By the batch's own statistics a row's answer would depend on which others are read with it (docs/decisions/0040).
    """

    def forward(self, images: Tensor) -> Tensor:
        norms = (self.running_mean, self.running_var, self.weight, self.bias)
        return functional.batch_norm(images, *norms, training=False, eps=self.eps)


def _drop_nothing(config: Any) -> None:
    """Switch dropout off, and of layers, too: how strongly a fine-tune is held back is the recipe's to say, the same for all, and no entrant's.

    Its noise would also depend on which sequences are read at once.
    """
    for name, value in vars(config).items():
        if name.endswith(("dropout", "pdrop", "dropout_prob", "drop_path_rate")) and value is not None:
            setattr(config, name, 0.0)


def by_file_name(model: Any, architecture: str) -> dict[str, Tensor]:
    """A model's parameters, and what its batch norms have seen, under the names that files give them; GPT-NeoX files call the head `embed_out`, ViT's have those of its first version."""
    if architecture == "vit":
        return {_vit_file_name(name): tensor for name, tensor in model.named_parameters()}
    head = architectures.ARCHITECTURES[architecture].head
    found = {head if name == "lm_head.weight" else name: tensor for name, tensor in model.named_parameters()}
    return found | {name: tensor for name, tensor in model.named_buffers() if tensors.stands_still(name)}


def _vit_file_name(name: str) -> str:
    for here, there in _VIT_NAMES.items():
        name = name.replace(here, there)
    return name
