"""Encoders as classifiers: of texts BERT, RoBERTa and DistilBERT, of images ViT. Fields and tensors, as architectures.py has them of decoders.

Each token sees all others, and what the model makes of the first one is what the head reads: [CLS] or <s>, which the tokenizer's own post-processor
puts there. Shapes are those of transformers' classes; a test holds them equal.
"""

from collections.abc import Mapping
from typing import Any

from acclimate_runners.config_rules import (
    ACTIVATION,
    EPSILON,
    HEADS,
    INNER,
    LAYERS,
    POSITIONS,
    SHARE,
    SWITCH,
    VOCABULARY,
    WIDTH,
    Check,
    one_of,
    real,
    text,
    whole,
)
from acclimate_runners.kinds import Architecture
from acclimate_runners.tensors import Shapes

_BERT: dict[str, Check] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_act": ACTIVATION,
    "hidden_dropout_prob": SHARE,
    "attention_probs_dropout_prob": SHARE,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": whole(1, 1024),
    "layer_norm_eps": EPSILON,
}
_DISTILBERT: dict[str, Check] = {
    "vocab_size": VOCABULARY,
    "dim": WIDTH,
    "hidden_dim": INNER,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "activation": one_of("gelu", "relu"),
    "dropout": SHARE,
    "attention_dropout": SHARE,
    "max_position_embeddings": POSITIONS,
    # The positions are weights in files, however they were once made.
    "sinusoidal_pos_embds": one_of(False),
}
_VIT: dict[str, Check] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_act": ACTIVATION,
    "hidden_dropout_prob": SHARE,
    "attention_probs_dropout_prob": SHARE,
    "layer_norm_eps": EPSILON,
    "image_size": whole(1, 4096),
    "patch_size": whole(1, 4096),
    "num_channels": whole(1, 9),
    "qkv_bias": SWITCH,
}
# What says nothing here: dropout of heads, which is off; what only other heads read; how older versions computed by default.
_TOLD: dict[str, Check] = {
    "classifier_dropout": real(0, 1, optional=True),
    "tie_word_embeddings": SWITCH,
    "position_embedding_type": one_of("absolute"),
    "gradient_checkpointing": one_of(False),
    "output_past": SWITCH,
    "directionality": text,
    **{
        f"pooler_{name}": whole(1, 2**16)
        for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head")
    },
    "pooler_type": text,
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _bert_like(config: Mapping[str, Any], stem: str, *, positions: int, pooled: str) -> Shapes:
    """BERT's tensors under a stem; pooled: the layer through which the head reads the first token."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    found: Shapes = {
        f"{stem}.embeddings.word_embeddings.weight": (config["vocab_size"], width),
        f"{stem}.embeddings.position_embeddings.weight": (config.get("max_position_embeddings", positions), width),
        f"{stem}.embeddings.token_type_embeddings.weight": (config.get("type_vocab_size", 2), width),
        **_norm(f"{stem}.embeddings.LayerNorm", width),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"{stem}.encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            found |= _linear(f"{at}.attention.self.{name}", width, width)
        found |= _linear(f"{at}.attention.output.dense", width, width) | _norm(
            f"{at}.attention.output.LayerNorm", width
        )
        found |= _linear(f"{at}.intermediate.dense", inner, width) | _linear(f"{at}.output.dense", width, inner)
        found |= _norm(f"{at}.output.LayerNorm", width)
    return found | _linear(pooled, width, width)


def bert(config: Mapping[str, Any]) -> Shapes:
    """BERT's."""
    return _bert_like(config, "bert", positions=512, pooled="bert.pooler.dense")


def roberta(config: Mapping[str, Any]) -> Shapes:
    """RoBERTa's."""
    return _bert_like(config, "roberta", positions=512, pooled="classifier.dense")


def distilbert(config: Mapping[str, Any]) -> Shapes:
    """DistilBERT's."""
    stem, width, inner = "distilbert", config["dim"], config["hidden_dim"]
    found: Shapes = {
        f"{stem}.embeddings.word_embeddings.weight": (config["vocab_size"], width),
        f"{stem}.embeddings.position_embeddings.weight": (config.get("max_position_embeddings", 512), width),
        **_norm(f"{stem}.embeddings.LayerNorm", width),
    }
    for layer in range(config["n_layers"]):
        at = f"{stem}.transformer.layer.{layer}"
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            found |= _linear(f"{at}.attention.{name}", width, width)
        found |= _norm(f"{at}.sa_layer_norm", width)
        found |= _linear(f"{at}.ffn.lin1", inner, width) | _linear(f"{at}.ffn.lin2", width, inner)
        found |= _norm(f"{at}.output_layer_norm", width)
    return found | _linear("pre_classifier", width, width)


def vit(config: Mapping[str, Any]) -> Shapes:
    """ViT's, under the names of files; transformers has others in memory (building.by_file_name)."""
    width, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    found: Shapes = {
        "vit.embeddings.cls_token": (1, 1, width),
        "vit.embeddings.position_embeddings": (1, (config["image_size"] // patch) ** 2 + 1, width),
        "vit.embeddings.patch_embeddings.projection.weight": (width, config["num_channels"], patch, patch),
        "vit.embeddings.patch_embeddings.projection.bias": (width,),
        **_norm("vit.layernorm", width),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"vit.encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            whole_ = _linear(f"{at}.attention.attention.{name}", width, width)
            found |= {key: shape for key, shape in whole_.items() if config.get("qkv_bias", True) or len(shape) == 2}
        found |= _linear(f"{at}.attention.output.dense", width, width)
        found |= _linear(f"{at}.intermediate.dense", inner, width) | _linear(f"{at}.output.dense", width, inner)
        found |= _norm(f"{at}.layernorm_before", width) | _norm(f"{at}.layernorm_after", width)
    return found


ENCODERS: dict[str, Architecture] = {
    "bert": Architecture(
        model_class="BertForSequenceClassification",
        fields=_BERT,
        required=_SIZES,
        shapes=bert,
        head="",
        embedding="bert.embeddings.word_embeddings.weight",
        tied=True,
        positions=("max_position_embeddings", 512),
        heads=("hidden_size", "num_attention_heads"),
        told=_TOLD,
        score="classifier.weight",
        score_bias="classifier.bias",
        scoring=("bert.pooler.", "classifier."),
        encodes=True,
    ),
    "roberta": Architecture(
        model_class="RobertaForSequenceClassification",
        fields=_BERT,
        required=_SIZES,
        shapes=roberta,
        head="",
        embedding="roberta.embeddings.word_embeddings.weight",
        tied=True,
        positions=("max_position_embeddings", 512),
        heads=("hidden_size", "num_attention_heads"),
        # Positions are counted from behind the padding token's number.
        told={**_TOLD, "pad_token_id": one_of(1)},
        score="classifier.out_proj.weight",
        score_bias="classifier.out_proj.bias",
        scoring=("classifier.",),
        encodes=True,
        first=2,
    ),
    "distilbert": Architecture(
        model_class="DistilBertForSequenceClassification",
        fields=_DISTILBERT,
        required=("vocab_size", "dim", "hidden_dim", "n_layers", "n_heads"),
        shapes=distilbert,
        head="",
        embedding="distilbert.embeddings.word_embeddings.weight",
        tied=True,
        positions=("max_position_embeddings", 512),
        heads=("dim", "n_heads"),
        told={**_TOLD, "qa_dropout": SHARE, "seq_classif_dropout": SHARE},
        score="classifier.weight",
        score_bias="classifier.bias",
        scoring=("pre_classifier.", "classifier."),
        encodes=True,
    ),
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
        shapes=vit,
        head="",
        embedding="vit.embeddings.patch_embeddings.projection.weight",
        tied=True,
        positions=None,
        heads=("hidden_size", "num_attention_heads"),
        told={
            "encoder_stride": whole(1, 4096),
            "pooler_act": text,
            "pooler_output_size": whole(1, 2**16, optional=True),
            "tie_word_embeddings": SWITCH,
        },
        score="classifier.weight",
        score_bias="classifier.bias",
        scoring=("classifier.",),
        encodes=True,
        sees=True,
    ),
}
"""Model type -> what is known of it."""
