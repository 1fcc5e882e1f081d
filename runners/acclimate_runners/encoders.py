"""Encoders as classifiers of texts: BERT, RoBERTa, DistilBERT, DeBERTa, ModernBERT. Fields and tensors, as architectures.py has them of decoders.

Each token sees all others, and what the model makes of the first one is what the head reads: [CLS] or <s>, which the tokenizer's own post-processor
puts there. Shapes are those of transformers' classes; a test holds them equal.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from acclimate_runners import config_rules as rules
from acclimate_runners import tensors
from acclimate_runners.config_rules import Check
from acclimate_runners.kinds import RELU, Architecture
from acclimate_runners.tensors import Shapes

_BERT: dict[str, Check] = {
    **rules.BLOCKS,
    "vocab_size": rules.VOCABULARY,
    "max_position_embeddings": rules.POSITIONS,
    "type_vocab_size": rules.whole(1, 1024),
}
# The embeddings have a width of their own.
_NARROW: dict[str, Check] = {**_BERT, "embedding_size": rules.WIDTH}
_ALBERT: dict[str, Check] = {
    **_NARROW,
    "num_hidden_groups": rules.whole(1, 1024),
    "inner_group_num": rules.whole(1, 1024),
}
_DISTILBERT: dict[str, Check] = {
    "vocab_size": rules.VOCABULARY,
    "dim": rules.WIDTH,
    "hidden_dim": rules.INNER,
    "n_layers": rules.LAYERS,
    "n_heads": rules.HEADS,
    "activation": rules.one_of("gelu", "relu"),
    "dropout": rules.SHARE,
    "attention_dropout": rules.SHARE,
    "max_position_embeddings": rules.POSITIONS,
    # The positions are weights in files, however they were once made.
    "sinusoidal_pos_embds": rules.one_of(False),
}
# What says nothing here: dropout of heads, which is off; what only other heads read; how older versions computed by default.
_TOLD: dict[str, Check] = {
    "classifier_dropout": rules.real(0, 1, optional=True),
    "tie_word_embeddings": rules.SWITCH,
    "position_embedding_type": rules.one_of("absolute"),
    "gradient_checkpointing": rules.one_of(False),
    "output_past": rules.SWITCH,
    "directionality": rules.text,
    **{
        f"pooler_{name}": rules.whole(1, 2**16)
        for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head")
    },
    "pooler_type": rules.text,
}
_ELECTRA_TOLD: dict[str, Check] = {"summary_activation": rules.text, "summary_last_dropout": rules.real(0, 1)}
_ALBERT_TOLD: dict[str, Check] = {
    "classifier_dropout_prob": rules.real(0, 1),
    "down_scale_factor": rules.one_of(1),
    "gap_size": rules.one_of(0),
    "layers_to_keep": rules.one_of([]),
    "net_structure_type": rules.one_of(0),
    "num_memory_blocks": rules.one_of(0),
}
# Versions 2 and 3, which differ in their fields alone.
_DEBERTA: dict[str, Check] = {
    **_BERT,
    "type_vocab_size": rules.whole(0, 1024),
    "relative_attention": rules.SWITCH,
    "max_relative_positions": rules.whole(-1, 2**22),
    "position_buckets": rules.whole(-1, 2**12),
    "norm_rel_ebd": rules.one_of("none", "layer_norm"),
    "share_att_key": rules.SWITCH,
    "pos_att_type": rules.some_of("c2p", "p2c"),
    "position_biased_input": rules.SWITCH,
    "embedding_size": rules.WIDTH,
    "conv_kernel_size": rules.whole(0, 63),
    "conv_groups": rules.whole(1, 2**16),
    "conv_act": rules.ACTIVATION,
    "pooler_hidden_act": rules.ACTIVATION,
}
_DEBERTA_TOLD: dict[str, Check] = {
    "attention_head_size": rules.whole(1, 2**16),
    "pooler_hidden_size": rules.WIDTH,
    "pooler_dropout": rules.SHARE,
    "cls_dropout": rules.real(0, 0.9, optional=True),
    "legacy": rules.SWITCH,
    # Steps with the last layer, which no file's config switches on.
    "z_steps": rules.one_of(0),
}
_MODERN: dict[str, Check] = {
    "vocab_size": rules.VOCABULARY,
    "hidden_size": rules.WIDTH,
    "intermediate_size": rules.INNER,
    "num_hidden_layers": rules.LAYERS,
    "num_attention_heads": rules.HEADS,
    "hidden_activation": rules.ACTIVATION,
    "max_position_embeddings": rules.POSITIONS,
    "norm_eps": rules.EPSILON,
    "norm_bias": rules.SWITCH,
    "attention_bias": rules.SWITCH,
    "mlp_bias": rules.SWITCH,
    "attention_dropout": rules.SHARE,
    "embedding_dropout": rules.SHARE,
    "mlp_dropout": rules.SHARE,
    "layer_types": rules.attentions,
    "global_attn_every_n_layers": rules.whole(1, 1024),
    "local_attention": rules.whole(2, 2**22),
    "rope_parameters": rules.two_ropes,
    "global_rope_theta": rules.real(1, 1e9),
    "local_rope_theta": rules.real(1, 1e9),
    "classifier_pooling": rules.one_of("cls", "mean"),
    "classifier_bias": rules.SWITCH,
    "classifier_activation": rules.ACTIVATION,
}
# Of the masked language model, of other kernels, and of the weights' first draw.
_MODERN_TOLD: dict[str, Check] = {
    **dict.fromkeys(("decoder_bias", "sparse_prediction", "deterministic_flash_attn"), rules.SWITCH),
    "repad_logits_with_grad": rules.SWITCH,
    "reference_compile": rules.one_of(None, True, False),
    "sparse_pred_ignore_index": rules.whole(-(2**31), 2**31),
    "initializer_cutoff_factor": rules.real(0, 100, optional=True),
    "layer_norm_eps": rules.EPSILON,
    "cls_token_id": rules.tokens,
    "sep_token_id": rules.tokens,
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _embeddings(config: Mapping[str, Any], stem: str, width: int) -> Shapes:
    """BERT's embeddings of words, positions and kinds of text, of a width."""
    at = f"{stem}.embeddings"
    return {
        f"{at}.word_embeddings.weight": (config["vocab_size"], width),
        f"{at}.position_embeddings.weight": (config.get("max_position_embeddings", 512), width),
        f"{at}.token_type_embeddings.weight": (config.get("type_vocab_size", 2), width),
        **tensors.norm(f"{at}.LayerNorm", width),
    }


def _bert_like(config: Mapping[str, Any], stem: str, *, pooled: str) -> Shapes:
    """BERT's tensors under a stem; pooled: the layer through which the head reads the first token."""
    width = config["hidden_size"]
    found = _embeddings(config, stem, config.get("embedding_size", width))
    return found | _layers(config, stem, ("query", "key", "value")) | tensors.dense(pooled, width, width)


def _layers(config: Mapping[str, Any], stem: str, projections: Sequence[str]) -> Shapes:
    """The layers of BERT and of those that came of it; projections: the names of an attention's own matrices."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    found: Shapes = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"{stem}.encoder.layer.{layer}"
        for name in projections:
            found |= tensors.dense(f"{at}.attention.self.{name}", width, width)
        found |= tensors.dense(f"{at}.attention.output.dense", width, width)
        found |= tensors.norm(f"{at}.attention.output.LayerNorm", width)
        found |= tensors.dense(f"{at}.intermediate.dense", inner, width)
        found |= tensors.dense(f"{at}.output.dense", width, inner)
        found |= tensors.norm(f"{at}.output.LayerNorm", width)
    return found


def _bert(config: Mapping[str, Any]) -> Shapes:
    """BERT's."""
    return _bert_like(config, "bert", pooled="bert.pooler.dense")


def _roberta(config: Mapping[str, Any]) -> Shapes:
    """RoBERTa's, and XLM-RoBERTa's."""
    return _bert_like(config, "roberta", pooled="classifier.dense")


def _electra(config: Mapping[str, Any]) -> Shapes:
    """ELECTRA's discriminator's: embeddings of another width are made as wide as the layers."""
    found, own, width = (
        _bert_like(config, "electra", pooled="classifier.dense"),
        config["embedding_size"],
        config["hidden_size"],
    )
    return found | (tensors.dense("electra.embeddings_project", width, own) if own != width else {})


def _albert(config: Mapping[str, Any]) -> Shapes:
    """ALBERT's, whose layers are passed several times each, by groups of them."""
    own, width, inner = config["embedding_size"], config["hidden_size"], config["intermediate_size"]
    found = _embeddings(config, "albert", own)
    found |= tensors.dense("albert.encoder.embedding_hidden_mapping_in", width, own)
    for group in range(config.get("num_hidden_groups", 1)):
        for layer in range(config.get("inner_group_num", 1)):
            at = f"{_GROUPS}{group}.albert_layers.{layer}"
            for name in ("query", "key", "value", "dense"):
                found |= tensors.dense(f"{at}.attention.{name}", width, width)
            found |= tensors.norm(f"{at}.attention.LayerNorm", width)
            found |= tensors.dense(f"{at}.ffn", inner, width) | tensors.dense(f"{at}.ffn_output", width, inner)
            found |= tensors.norm(f"{at}.full_layer_layer_norm", width)
    return found | tensors.dense("albert.pooler", width, width)


_PASSES = 1024
_GROUPS = "albert.encoder.albert_layer_groups."


def _albert_conflicts(config: Mapping[str, Any]) -> list[str]:
    """More groups than layers, of which some would never be passed; and more passes than others may have layers."""
    groups, layers, within = (
        config.get("num_hidden_groups", 1),
        config["num_hidden_layers"],
        config.get("inner_group_num", 1),
    )
    found = [f"num_hidden_groups is {groups}, num_hidden_layers {layers}"] if groups > layers else []
    if layers * within > _PASSES:
        found.append(f"num_hidden_layers {layers} times inner_group_num {within} is more than {_PASSES}")
    return found


def _albert_times(config: Mapping[str, Any], image: tuple[int, int, int]) -> Callable[[str], int]:
    """How often each group is passed, by the rule of transformers' class."""
    groups, layers = config.get("num_hidden_groups", 1), config["num_hidden_layers"]
    passed = Counter(int(layer / (layers / groups)) for layer in range(layers))
    return lambda name: passed[int(name[len(_GROUPS) :].partition(".")[0])] if name.startswith(_GROUPS) else 1


def _distilbert(config: Mapping[str, Any]) -> Shapes:
    """DistilBERT's."""
    stem, width, inner = "distilbert", config["dim"], config["hidden_dim"]
    found: Shapes = {
        f"{stem}.embeddings.word_embeddings.weight": (config["vocab_size"], width),
        f"{stem}.embeddings.position_embeddings.weight": (config.get("max_position_embeddings", 512), width),
        **tensors.norm(f"{stem}.embeddings.LayerNorm", width),
    }
    for layer in range(config["n_layers"]):
        at = f"{stem}.transformer.layer.{layer}"
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            found |= tensors.dense(f"{at}.attention.{name}", width, width)
        found |= tensors.norm(f"{at}.sa_layer_norm", width)
        found |= tensors.dense(f"{at}.ffn.lin1", inner, width) | tensors.dense(f"{at}.ffn.lin2", width, inner)
        found |= tensors.norm(f"{at}.output_layer_norm", width)
    return found | tensors.dense("pre_classifier", width, width)


def _relative(config: Mapping[str, Any]) -> tuple[int, int]:
    """How far apart two tokens may be told apart at all, and how many distances of either sign have an embedding."""
    far = config.get("max_relative_positions", -1)
    far = far if far >= 1 else config.get("max_position_embeddings", 512)
    buckets = config.get("position_buckets", -1)
    return far, buckets if buckets > 0 else far


def _deberta(config: Mapping[str, Any]) -> Shapes:
    """DeBERTa's of versions 2 and 3: distances between tokens are embedded, and positions only where the input has them."""
    stem, width = "deberta", config["hidden_size"]
    own, relative = config.get("embedding_size", width), config.get("relative_attention", False)
    found: Shapes = {
        f"{stem}.embeddings.word_embeddings.weight": (config["vocab_size"], own),
        **tensors.norm(f"{stem}.embeddings.LayerNorm", width),
    }
    if config.get("position_biased_input", True):
        found[f"{stem}.embeddings.position_embeddings.weight"] = (config.get("max_position_embeddings", 512), own)
    if kinds := config.get("type_vocab_size", 0):
        found[f"{stem}.embeddings.token_type_embeddings.weight"] = (kinds, own)
    if own != width:
        found[f"{stem}.embeddings.embed_proj.weight"] = (width, own)
    projections = ["query_proj", "key_proj", "value_proj"]
    if relative:
        found[f"{stem}.encoder.rel_embeddings.weight"] = (2 * _relative(config)[1], width)
        kept = {} if config.get("share_att_key", False) else {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
        projections += [name for kind, name in kept.items() if kind in rules.parts_of(config.get("pos_att_type"))]
    if config.get("norm_rel_ebd", "none") == "layer_norm":
        found |= tensors.norm(f"{stem}.encoder.LayerNorm", width)
    if kernel := config.get("conv_kernel_size", 0):
        at = f"{stem}.encoder.conv"
        found |= {f"{at}.conv.weight": (width, width // config.get("conv_groups", 1), kernel)}
        found |= {f"{at}.conv.bias": (width,), **tensors.norm(f"{at}.LayerNorm", width)}
    return found | _layers(config, stem, projections) | tensors.dense("pooler.dense", width, width)


def _deberta_conflicts(config: Mapping[str, Any]) -> list[str]:
    """Fields that don't go together: copies that differ, weights that nothing would read, distances that can't be computed."""
    width, found = config["hidden_size"], []
    same = {"pooler_hidden_size": width, "attention_head_size": width // config["num_attention_heads"]}
    for name, value in same.items():
        if config.get(name, value) != value:
            found.append(f"{name} is {config[name]}, the other fields make it {value}")
    parts = rules.parts_of(config.get("pos_att_type"))
    if config.get("relative_attention", False) != bool(parts):
        found.append("relative_attention is true without a pos_att_type, or false with one: no model is of both")
    if config.get("norm_rel_ebd", "none") != "none" and not config.get("relative_attention", False):
        found.append("norm_rel_ebd is layer_norm, relative_attention false: there is nothing to norm")
    far, buckets = _relative(config)
    if config.get("position_buckets", -1) > 0 and not 2 <= buckets < 2 * (far - 1):
        found.append(f"position_buckets is {buckets}, which distances up to {far} can't be put into")
    kernel, groups = config.get("conv_kernel_size", 0), config.get("conv_groups", 1)
    if kernel and kernel % 2 == 0:
        found.append(f"conv_kernel_size {kernel} is even, which changes a text's length")
    if width % groups:
        found.append(f"hidden_size {width} is not a multiple of conv_groups {groups}")
    return found


def _modern(config: Mapping[str, Any]) -> Shapes:
    """ModernBERT's: no positions, gates in the feed-forward, and no norm before the first attention."""
    width, inner = config["hidden_size"], config["intermediate_size"]

    def dense(name: str, outputs: int, inputs: int, switch: str) -> Shapes:
        found = tensors.dense(name, outputs, inputs)
        return {key: shape for key, shape in found.items() if len(shape) == 2 or config.get(switch, False)}

    def norm(name: str) -> Shapes:
        return {
            key: shape
            for key, shape in tensors.norm(name, width).items()
            if key.endswith("weight") or config.get("norm_bias", False)
        }

    found: Shapes = {"model.embeddings.tok_embeddings.weight": (config["vocab_size"], width)}
    found |= norm("model.embeddings.norm") | norm("model.final_norm") | norm("head.norm")
    found |= dense("head.dense", width, width, "classifier_bias")
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= norm(f"{at}.attn_norm") if layer else {}
        found |= norm(f"{at}.mlp_norm")
        found |= dense(f"{at}.attn.Wqkv", 3 * width, width, "attention_bias")
        found |= dense(f"{at}.attn.Wo", width, width, "attention_bias")
        found |= dense(f"{at}.mlp.Wi", 2 * inner, width, "mlp_bias")
        found |= dense(f"{at}.mlp.Wo", width, inner, "mlp_bias")
    return found


def _kin(
    model_class: str,
    stem: str,
    shapes: Callable[[Mapping[str, Any]], Shapes],
    *,
    answering: tuple[str, ...],
    **more: Any,
) -> Architecture:
    """An encoder whose fields are named as BERT's are; more: what else there is to know of it."""
    known: dict[str, Any] = {
        "fields": _BERT,
        "required": _SIZES,
        "positions": ("max_position_embeddings", 512),
        "heads": ("hidden_size", "num_attention_heads"),
        "told": _TOLD,
        "score": "classifier.weight",
        "score_bias": "classifier.bias",
        "embedding": f"{stem}.embeddings.word_embeddings.weight",
    }
    return Architecture(
        model_class=model_class,
        shapes=shapes,
        answering=answering,
        head="",
        tied=True,
        encodes=True,
        **{**known, **more},
    )


# Positions are counted from behind the padding token's number, and the head takes all tokens' numbers, of which it reads the first.
_ROBERTA: dict[str, Any] = {
    "answering": ("classifier",),
    "of_tokens": True,
    "told": {**_TOLD, "pad_token_id": rules.one_of(1)},
    "score": "classifier.out_proj.weight",
    "score_bias": "classifier.out_proj.bias",
    "first": 2,
}

ENCODERS: dict[str, Architecture] = {
    "bert": _kin(
        "BertForSequenceClassification", "bert", _bert, answering=("bert.pooler", "classifier"), of_tokens=True
    ),
    "roberta": _kin("RobertaForSequenceClassification", "roberta", _roberta, **_ROBERTA),
    "xlm-roberta": _kin("XLMRobertaForSequenceClassification", "roberta", _roberta, **_ROBERTA),
    "electra": _kin(
        "ElectraForSequenceClassification",
        "electra",
        _electra,
        fields=_NARROW,
        required=(*_SIZES, "embedding_size"),
        told={**_TOLD, **_ELECTRA_TOLD},
        answering=("classifier",),
        of_tokens=True,
        score="classifier.out_proj.weight",
        score_bias="classifier.out_proj.bias",
    ),
    "albert": _kin(
        "AlbertForSequenceClassification",
        "albert",
        _albert,
        fields=_ALBERT,
        required=(*_SIZES, "embedding_size"),
        told={**_TOLD, **_ALBERT_TOLD},
        answering=("albert.pooler", "albert.pooler_activation", "classifier"),
        conflicts=_albert_conflicts,
        times=_albert_times,
    ),
    "distilbert": _kin(
        "DistilBertForSequenceClassification",
        "distilbert",
        _distilbert,
        fields=_DISTILBERT,
        required=("vocab_size", "dim", "hidden_dim", "n_layers", "n_heads"),
        heads=("dim", "n_heads"),
        told={
            **_TOLD,
            "qa_dropout": rules.SHARE,
            "seq_classif_dropout": rules.SHARE,
            # Of the language model's head.
            "tie_weights_": rules.SWITCH,
        },
        answering=("pre_classifier", RELU, "classifier"),
    ),
    "deberta-v2": _kin(
        "DebertaV2ForSequenceClassification",
        "deberta",
        _deberta,
        fields=_DEBERTA,
        told={**_TOLD, **_DEBERTA_TOLD},
        answering=("pooler", "classifier"),
        of_tokens=True,
        conflicts=_deberta_conflicts,
    ),
    "modernbert": _kin(
        "ModernBertForSequenceClassification",
        "model",
        _modern,
        fields=_MODERN,
        told={**_TOLD, **_MODERN_TOLD},
        embedding="model.embeddings.tok_embeddings.weight",
        positions=("max_position_embeddings", 8192),
        answering=("head", "classifier"),
    ),
}
"""Model type -> what is known of it."""
