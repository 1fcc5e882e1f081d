"""The accepted architectures: which fields a config.json may have, and which tensors follow from it, in plain Python.

Everything here is arithmetic on a parsed config; neither torch nor transformers is imported, so that a server can refuse a wrong
model before any library touches it. The shapes (tensors.py) are those of transformers' classes; a test holds
them equal.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from acclimate_runners import config_conflicts, encoders, image_classifiers, state_models, tensors
from acclimate_runners.config_rules import (
    ACTIVATION,
    CLASSIFYING,
    DESCRIPTIVE,
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
    attentions,
    full_attention,
    notes,
    one_of,
    plain_rope,
    real,
    rope,
    shown,
    two_ropes,
    whole,
)
from acclimate_runners.kinds import Architecture as Architecture
from acclimate_runners.tensors import Shapes as Shapes

UNBOUNDED = sys.maxsize
"""How many tokens a sequence may have where nothing in the model bounds it."""


_DECODER: dict[str, Check] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": whole(1, 2**12, optional=True),
    "hidden_act": ACTIVATION,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": SWITCH,
    "rope_parameters": rope,
    "rope_scaling": rope,
    "rope_theta": real(1, 1e9),
    "attention_dropout": SHARE,
}
_NORM: dict[str, Check] = {"rms_norm_eps": EPSILON}
_BIAS: dict[str, Check] = {"attention_bias": SWITCH}
_HEAD: dict[str, Check] = {"head_dim": whole(2, 2**12, optional=True)}
_OWN_HEAD: dict[str, Check] = {"head_dim": whole(2, 2**12)}
# Qwen's sliding windows are switched off in every model that was published with its configuration.
_QWEN: dict[str, Check] = {
    "use_sliding_window": one_of(False),
    "sliding_window": whole(1, 2**22, optional=True),
    "max_window_layers": whole(0, 1024),
    "layer_types": full_attention,
}
_CAUSAL: dict[str, Check] = {"use_bidirectional_attention": one_of(None, False)}
# Of the two names of their activation, the classes of Gemma 2 and 3 read the longer one.
_LATER_GEMMA: dict[str, Check] = {
    **_NORM,
    **_BIAS,
    **_OWN_HEAD,
    **_CAUSAL,
    "num_key_value_heads": whole(1, 2**12),
    "hidden_act": one_of("gelu_pytorch_tanh"),
    "hidden_activation": ACTIVATION,
    "query_pre_attn_scalar": whole(1, 2**16),
    "sliding_window": whole(1, 2**22),
    "layer_types": attentions,
    "final_logit_softcapping": real(0.1, 1e6, optional=True),
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _kin(
    model_class: str,
    shapes: Callable[[Mapping[str, Any]], Shapes],
    positions: int,
    *fields: Mapping[str, Check],
    tied: bool = False,
    says_keys: bool = False,
    told: Mapping[str, Check] | None = None,
) -> Architecture:
    """An architecture whose files name their tensors as Llama's do; the fields of each further mapping are allowed, too.

    says_keys: whether num_key_value_heads has a number as its default in transformers' class, so that a config must say it.
    told: fields of published files that say nothing more.
    """
    more = {name: rule for mapping in fields for name, rule in mapping.items()}
    # What can't be left out has another default in each of them.
    own = [name for name in ("head_dim", "num_key_value_heads") if name in more and more[name](None)]
    own += ["num_key_value_heads"] if says_keys else []
    return Architecture(
        model_class=model_class,
        fields={**_DECODER, **more},
        required=(*_SIZES, *own),
        shapes=shapes,
        head="lm_head.weight",
        embedding="model.embed_tokens.weight",
        tied=tied,
        positions=("max_position_embeddings", positions),
        heads=("hidden_size", "num_attention_heads"),
        told=told or {},
    )


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _kin(
        "LlamaForCausalLM",
        tensors.llama,
        2048,
        _NORM,
        _BIAS,
        _HEAD,
        {"mlp_bias": SWITCH},
        told={"is_llama_config": one_of(True), "rope_interleaved": one_of(False)},
    ),
    "mistral": _kin(
        "MistralForCausalLM",
        tensors.llama,
        131072,
        _NORM,
        _HEAD,
        {"sliding_window": whole(1, 2**22, optional=True)},
        says_keys=True,
    ),
    "qwen2": _kin(
        "Qwen2ForCausalLM",
        tensors.qwen2,
        32768,
        _NORM,
        _QWEN,
        says_keys=True,
        told={"use_mrope": one_of(False)},
    ),
    "qwen3": _kin("Qwen3ForCausalLM", tensors.qwen3, 32768, _NORM, _BIAS, _OWN_HEAD, _QWEN, says_keys=True),
    "gemma": _kin(
        "GemmaForCausalLM",
        tensors.llama,
        8192,
        _NORM,
        _BIAS,
        _OWN_HEAD,
        _CAUSAL,
        tied=True,
        says_keys=True,
        # Transformers reads hidden_act, and "gelu" there as what this says.
        told={"hidden_activation": one_of(None, "gelu_pytorch_tanh")},
    ),
    "gemma2": _kin(
        "Gemma2ForCausalLM",
        tensors.gemma2,
        8192,
        _LATER_GEMMA,
        {"attn_logit_softcapping": real(0.1, 1e6, optional=True)},
        tied=True,
    ),
    "gemma3_text": _kin(
        "Gemma3ForCausalLM",
        tensors.gemma3,
        131072,
        _LATER_GEMMA,
        {
            "rope_parameters": two_ropes,
            "rope_local_base_freq": real(1, 1e9),
            "sliding_window_pattern": whole(1, 1024),
            "_sliding_window_pattern": whole(1, 1024),
            # The faster attention, which long sequences take, has none.
            "attn_logit_softcapping": one_of(None),
        },
        tied=True,
    ),
    "olmo": _kin("OlmoForCausalLM", tensors.olmo, 2048, _BIAS, {"clip_qkv": one_of(None)}),
    "olmo2": _kin("Olmo2ForCausalLM", tensors.olmo2, 2048, _NORM, _BIAS),
    "phi": _kin(
        "PhiForCausalLM",
        tensors.phi,
        2048,
        {
            "layer_norm_eps": EPSILON,
            "resid_pdrop": SHARE,
            "embd_pdrop": SHARE,
            "qk_layernorm": one_of(False),
            "partial_rotary_factor": real(0.01, 1),
            "tie_word_embeddings": one_of(False),
        },
    ),
    "phi3": _kin(
        "Phi3ForCausalLM",
        tensors.phi3,
        4096,
        _NORM,
        {
            "rope_parameters": plain_rope,
            "rope_scaling": plain_rope,
            "sliding_window": whole(1, 2**22, optional=True),
            "resid_pdrop": SHARE,
            "embd_pdrop": SHARE,
        },
        told={"attention_bias": one_of(False), "original_max_position_embeddings": POSITIONS},
    ),
    "falcon": Architecture(
        model_class="FalconForCausalLM",
        fields={
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "ffn_hidden_size": whole(1, 2**18, optional=True),
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_kv_heads": whole(1, 2**12, optional=True),
            # What transformers' class finds from the others and saves with them since 5.25.
            "num_key_value_heads": whole(1, 2**12),
            "num_ln_in_parallel_attn": whole(1, 2, optional=True),
            "activation": ACTIVATION,
            "layer_norm_epsilon": EPSILON,
            "max_position_embeddings": POSITIONS,
            "alibi": one_of(False),
            "new_decoder_architecture": SWITCH,
            "multi_query": SWITCH,
            "parallel_attn": SWITCH,
            "bias": SWITCH,
            "rope_parameters": rope,
            "rope_scaling": rope,
            "rope_theta": real(1, 1e9),
            "hidden_dropout": SHARE,
            "attention_dropout": SHARE,
            "tie_word_embeddings": SWITCH,
        },
        required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        told={"apply_residual_connection_post_layernorm": one_of(False)},
        shapes=tensors.falcon,
        head="lm_head.weight",
        embedding="transformer.word_embeddings.weight",
        tied=True,
        positions=("max_position_embeddings", 2048),
        heads=("hidden_size", "num_attention_heads"),
    ),
    "gpt2": Architecture(
        model_class="GPT2LMHeadModel",
        fields={
            "vocab_size": VOCABULARY,
            "n_positions": POSITIONS,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_inner": whole(1, 2**18, optional=True),
            "activation_function": ACTIVATION,
            "resid_pdrop": SHARE,
            "embd_pdrop": SHARE,
            "attn_pdrop": SHARE,
            "layer_norm_epsilon": EPSILON,
            "scale_attn_weights": SWITCH,
            "scale_attn_by_inverse_layer_idx": SWITCH,
            "reorder_and_upcast_attn": one_of(False),
            "tie_word_embeddings": SWITCH,
        },
        required=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"),
        # Of what else the model might be for.
        told={"_num_labels": whole(0, 4096), "id2label": notes, "label2id": notes},
        shapes=tensors.gpt2,
        head="lm_head.weight",
        embedding="transformer.wte.weight",
        tied=True,
        positions=("n_positions", 1024),
        heads=("n_embd", "n_head"),
    ),
    "gpt_neox": Architecture(
        model_class="GPTNeoXForCausalLM",
        fields={
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "hidden_act": ACTIVATION,
            "max_position_embeddings": POSITIONS,
            "layer_norm_eps": EPSILON,
            "tie_word_embeddings": SWITCH,
            "use_parallel_residual": SWITCH,
            "rope_parameters": rope,
            "rope_scaling": rope,
            "rotary_emb_base": real(1, 1e9),
            "rotary_pct": real(0.01, 1),
            "attention_bias": SWITCH,
            "attention_dropout": SHARE,
            "hidden_dropout": SHARE,
        },
        required=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        # Other names of the first files for what is off anyway.
        told={"attention_probs_dropout_prob": SHARE, "hidden_dropout_prob": SHARE},
        shapes=tensors.gpt_neox,
        head="embed_out.weight",
        embedding="gpt_neox.embed_in.weight",
        tied=False,
        positions=("max_position_embeddings", 2048),
        heads=("hidden_size", "num_attention_heads"),
    ),
    **state_models.STATEFUL,
    **encoders.ENCODERS,
    **image_classifiers.IMAGES,
}


def problems(config: Mapping[str, Any], allowed: tuple[str, ...]) -> list[str]:
    """What is wrong with a parsed config.json; empty where it is acceptable.

    Args:
        config: the parsed object.
        allowed: the competition's architectures.
    """
    name = config.get("model_type")
    # Ways to name code: each would be an unknown field anyway, but deserves its own sentence.
    found = [f"{field}: remote code is never run" for field in ("auto_map", "trust_remote_code") if field in config]
    if not isinstance(name, str) or name not in allowed or name not in ARCHITECTURES:
        return [*found, f"model_type is {shown(name)}, allowed are " + ", ".join(allowed)]
    kind = ARCHITECTURES[name]
    classifies = kind.classifier is not None and config.get("architectures") == [kind.classifier]
    if config.get("architectures") not in (None, [kind.model_class]) and not classifies:
        expected = " or ".join(f"[{name!r}]" for name in dict.fromkeys((kind.model_class, kind.classifier)) if name)
        found.append(f"architectures is {shown(config['architectures'])}, expected {expected}")
    elif kind.encodes and not classifies:
        found.append(f"architectures is missing, expected [{kind.model_class!r}]")
    rules = {**DESCRIPTIVE, **kind.told, **kind.fields, **(CLASSIFYING if classifies else {})}
    if classifies and not found:
        found += config_conflicts.labelled(config)
    for key, value in config.items():
        if key in ("auto_map", "trust_remote_code"):
            continue
        if key not in rules:
            found.append(f"{shown(key)} is not an allowed field of {name}")
        elif wrong := rules[key](value):
            found.append(f"{key} is {shown(value)}, expected {wrong}")
    found += [f"{key} is missing" for key in kind.required if key not in config]
    found = found or (config_conflicts.divisions(config, kind, kind.heads) if kind.heads is not None else [])
    return found or kind.conflicts(config)


def labels(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """What a sequence classifier tells apart, in the order of its outputs, for a checked config; None for a language model."""
    if config.get("architectures") != [ARCHITECTURES[config["model_type"]].classifier]:
        return None
    told = config["id2label"]
    return tuple(told[str(number)] for number in range(len(told)))


def with_labels(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The config of the same classifier for other labels."""
    kept = {name: value for name, value in config.items() if name not in CLASSIFYING}
    return {**kept, "id2label": {str(number): name for number, name in enumerate(names)}}


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output embedding is the input embedding, for a checked config."""
    return bool(config.get("tie_word_embeddings", ARCHITECTURES[config["model_type"]].tied))


def positions(config: Mapping[str, Any]) -> int:
    """How many tokens a sequence may have, for a checked config."""
    named = ARCHITECTURES[config["model_type"]].positions
    return (
        UNBOUNDED if named is None else int(config.get(named[0], named[1])) - ARCHITECTURES[config["model_type"]].first
    )


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Name and shape of each parameter, for a checked config; a tied head is left out."""
    kind = ARCHITECTURES[config["model_type"]]
    found = kind.shapes(config)
    if (names := labels(config)) is not None:
        whole = {name: shape for name, shape in found.items() if not name.startswith("lm_head.")}
        biases = {kind.score_bias: (len(names),)} if kind.score_bias is not None else {}
        width = (
            config[kind.heads[0]]
            if kind.heads is not None
            else found[kind.embedding][1]
            if kind.width is None
            else kind.width(config)
        )
        return {**whole, kind.score: (len(names), width), **biases}
    if not is_tied(config):
        found[kind.head] = found[kind.embedding]
    return found


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a checked config that make the model: what transformers' config class is called with."""
    kind = ARCHITECTURES[config["model_type"]]
    # Copies, as transformers' classes write into what they are given.
    kept = {field: _as_read(kind, field, deepcopy(value)) for field, value in config.items() if field in kind.fields}
    if "num_key_value_heads" in kept and kept["num_key_value_heads"] is None:
        # Some classes take null for as many as there are heads, others refuse it.
        kept["num_key_value_heads"] = config["num_attention_heads"]
    return {**kept, "tie_word_embeddings": is_tied(config), **dict.fromkeys(_NUMBERED)}


def _as_read(kind: Architecture, field: str, value: Any) -> Any:
    """A field's value; a whole number where a real one stands as a real one, without which transformers' classes refuse it."""
    return float(value) if type(value) is int and kind.fields[field](float(value)) is None else value


# A padding token's embedding would not be learned.
_NUMBERED = ("bos_token_id", "eos_token_id", "pad_token_id")
