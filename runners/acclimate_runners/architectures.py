"""The accepted architectures: which fields a config.json may have, and which tensors follow from it, in plain Python.

Everything here is arithmetic on a parsed config; neither torch nor transformers is imported, so that a server can refuse a wrong
model before any library touches it. The shapes (tensors.py) are those of transformers' classes; a test holds
them equal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from acclimate_runners import tensors
from acclimate_runners.tensors import Shapes as Shapes

Check = Callable[[Any], str | None]
"""A field's rule: None where the value is fine, else what it should have been."""

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "tanh")
DTYPES = ("float32", "float16", "bfloat16")
ROPE_TYPES = ("default", "linear", "llama3")


def _whole(low: int, high: int, *, optional: bool = False) -> Check:
    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        return None if type(value) is int and low <= value <= high else f"a whole number from {low} to {high}"

    return check


def _real(low: float, high: float, *, optional: bool = False) -> Check:
    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        fine = type(value) in (int, float) and low <= value <= high
        return None if fine else f"a number from {low:g} to {high:g}"

    return check


def _one_of(*allowed: Any) -> Check:
    def check(value: Any) -> str | None:
        # True == 1 in Python, but not in a config.
        fine = any(value == a and type(value) is type(a) for a in allowed)
        return None if fine else "one of " + ", ".join(map(str, allowed))

    return check


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and len(value) <= 200 else "a text of at most 200 characters"


def _texts(value: Any) -> str | None:
    fine = isinstance(value, list) and len(value) <= 8 and all(_text(item) is None for item in value)
    return None if fine else "a list of at most 8 texts"


def _full_attention(value: Any) -> str | None:
    fine = isinstance(value, list) and len(value) <= 1024 and all(item == "full_attention" for item in value)
    return None if fine or value is None else 'null, or a list of "full_attention", one a layer'


def _attentions(value: Any) -> str | None:
    known = ("full_attention", "sliding_attention")
    fine = isinstance(value, list) and len(value) <= 1024 and all(item in known for item in value)
    return None if fine or value is None else f"null, or a list of {' and '.join(known)}, one a layer"


def _tokens(value: Any) -> str | None:
    if value is None or (isinstance(value, list) and len(value) <= 64 and all(type(item) is int for item in value)):
        return None
    return None if type(value) is int else "a token's number, a list of them, or null"


_ROPE: dict[str, Check] = {
    "rope_type": _one_of(*ROPE_TYPES),
    "rope_theta": _real(1, 1e9),
    "factor": _real(1, 1024),
    "low_freq_factor": _real(0.01, 1024),
    "high_freq_factor": _real(0.01, 1024),
    "original_max_position_embeddings": _whole(1, 2**22),
    "partial_rotary_factor": _real(0.01, 1),
}


def _rope(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        return "an object of rope parameters, or null"
    for name, item in value.items():
        if name not in _ROPE:
            return "without " + repr(name)[:60]
        if wrong := _ROPE[name](item):
            return f"with {name} {wrong}"
    needed = {"linear": {"factor"}, "llama3": set(_ROPE) - {"rope_theta", "partial_rotary_factor"}}
    lacking = needed.get(value.get("rope_type", "default"), set()) - set(value)
    return "with " + ", ".join(sorted(lacking)) if lacking else None


def _two_ropes(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) - {"full_attention", "sliding_attention"}:
        return "an object of rope parameters for full_attention and sliding_attention, or null"
    wrong = [_rope(item) for item in value.values()]
    return next((each for each in wrong if each), None)


_VOCABULARY, _WIDTH, _LAYERS = _whole(1, 2**20), _whole(1, 2**16), _whole(1, 1024)
_HEADS, _POSITIONS, _INNER = _whole(1, 2**12), _whole(1, 2**22), _whole(1, 2**18)
_SWITCH, _SHARE, _EPSILON = _one_of(True, False), _real(0, 0.9), _real(1e-12, 0.1)
_ACTIVATION = _one_of(*ACTIVATIONS)

# Fields that say nothing about the computation here: read, checked, and then left out of the model that is built. A padding token
# is among them: sequences are padded on the right, where a causal model can't see it.
_DESCRIPTIVE: dict[str, Check] = {
    "architectures": _texts,
    "model_type": _text,
    "transformers_version": _text,
    "_name_or_path": _text,
    "dtype": _one_of(*DTYPES),
    "torch_dtype": _one_of(*DTYPES),
    "bos_token_id": _tokens,
    "eos_token_id": _tokens,
    "pad_token_id": _tokens,
    "use_cache": _SWITCH,
    "initializer_range": _real(0, 1),
    "pretraining_tp": _one_of(1),
    "is_decoder": _one_of(False),
    "add_cross_attention": _one_of(False),
    "classifier_dropout": _real(0, 1),
    "summary_type": _text,
    "summary_use_proj": _SWITCH,
    "summary_activation": _one_of(None),
    "summary_proj_to_labels": _SWITCH,
    "summary_first_dropout": _real(0, 1),
    "n_ctx": _POSITIONS,
    "cache_implementation": _text,
}


@dataclass(frozen=True)
class Architecture:
    """One accepted architecture.

    Attributes:
        model_class: the name of transformers' class, for `architectures` in config.json.
        fields: allowed fields with their rules, without the descriptive ones.
        required: fields that have no default here, because the size of the model follows from them.
        shapes: tensor name -> shape, of a checked config.
        head: the output embedding's name in files.
        embedding: the input embedding's name, to which the head may be tied.
        tied: whether `tie_word_embeddings` is true where the config is silent.
        positions: name of the field that bounds a sequence's length, and its default.
        heads: names of the fields of width and heads.
    """

    model_class: str
    fields: Mapping[str, Check]
    required: tuple[str, ...]
    shapes: Callable[[Mapping[str, Any]], Shapes]
    head: str
    embedding: str
    tied: bool
    positions: tuple[str, int]
    heads: tuple[str, str]


_DECODER: dict[str, Check] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _whole(1, 2**12, optional=True),
    "hidden_act": _ACTIVATION,
    "max_position_embeddings": _POSITIONS,
    "tie_word_embeddings": _SWITCH,
    "rope_parameters": _rope,
    "rope_scaling": _rope,
    "rope_theta": _real(1, 1e9),
    "attention_dropout": _SHARE,
}
_NORM: dict[str, Check] = {"rms_norm_eps": _EPSILON}
_BIAS: dict[str, Check] = {"attention_bias": _SWITCH}
_HEAD: dict[str, Check] = {"head_dim": _whole(2, 2**12, optional=True)}
_OWN_HEAD: dict[str, Check] = {"head_dim": _whole(2, 2**12)}
# Qwen's sliding windows are switched off in every model that was published with its configuration.
_QWEN: dict[str, Check] = {
    "use_sliding_window": _one_of(False),
    "sliding_window": _whole(1, 2**22, optional=True),
    "max_window_layers": _whole(0, 1024),
    "layer_types": _full_attention,
}
_CAUSAL: dict[str, Check] = {"use_bidirectional_attention": _one_of(None, False)}
# Of the two names of their activation, the classes of Gemma 2 and 3 read the longer one.
_LATER_GEMMA: dict[str, Check] = {
    **_NORM,
    **_BIAS,
    **_OWN_HEAD,
    **_CAUSAL,
    "num_key_value_heads": _whole(1, 2**12),
    "hidden_act": _one_of("gelu_pytorch_tanh"),
    "hidden_activation": _ACTIVATION,
    "query_pre_attn_scalar": _whole(1, 2**16),
    "sliding_window": _whole(1, 2**22),
    "layer_types": _attentions,
    "final_logit_softcapping": _real(0.1, 1e6, optional=True),
}
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _kin(
    model_class: str,
    shapes: Callable[[Mapping[str, Any]], Shapes],
    positions: int,
    *fields: Mapping[str, Check],
    tied: bool = False,
) -> Architecture:
    """An architecture whose files name their tensors as Llama's do; the fields of each further mapping are allowed, too."""
    more = {name: rule for mapping in fields for name, rule in mapping.items()}
    # What can't be left out has another default in each of them.
    own = [name for name in ("head_dim", "num_key_value_heads") if name in more and more[name](None)]
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
    )


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _kin("LlamaForCausalLM", tensors.llama, 2048, _NORM, _BIAS, _HEAD, {"mlp_bias": _SWITCH}),
    "mistral": _kin(
        "MistralForCausalLM", tensors.llama, 131072, _NORM, _HEAD, {"sliding_window": _whole(1, 2**22, optional=True)}
    ),
    "qwen2": _kin("Qwen2ForCausalLM", tensors.qwen2, 32768, _NORM, _QWEN),
    "qwen3": _kin("Qwen3ForCausalLM", tensors.qwen3, 32768, _NORM, _BIAS, _OWN_HEAD, _QWEN),
    "gemma": _kin("GemmaForCausalLM", tensors.llama, 8192, _NORM, _BIAS, _OWN_HEAD, _CAUSAL, tied=True),
    "gemma2": _kin(
        "Gemma2ForCausalLM",
        tensors.gemma2,
        8192,
        _LATER_GEMMA,
        {"attn_logit_softcapping": _real(0.1, 1e6, optional=True)},
        tied=True,
    ),
    "gemma3_text": _kin(
        "Gemma3ForCausalLM",
        tensors.gemma3,
        131072,
        _LATER_GEMMA,
        {
            "rope_parameters": _two_ropes,
            "rope_local_base_freq": _real(1, 1e9),
            "sliding_window_pattern": _whole(1, 1024),
            "_sliding_window_pattern": _whole(1, 1024),
            # The faster attention, which long sequences take, has none.
            "attn_logit_softcapping": _one_of(None),
        },
        tied=True,
    ),
    "olmo": _kin("OlmoForCausalLM", tensors.olmo, 2048, _BIAS, {"clip_qkv": _one_of(None)}),
    "olmo2": _kin("Olmo2ForCausalLM", tensors.olmo2, 2048, _NORM, _BIAS),
    "phi": _kin(
        "PhiForCausalLM",
        tensors.phi,
        2048,
        {
            "layer_norm_eps": _EPSILON,
            "resid_pdrop": _SHARE,
            "embd_pdrop": _SHARE,
            "qk_layernorm": _one_of(False),
            "partial_rotary_factor": _real(0.01, 1),
            "tie_word_embeddings": _one_of(False),
        },
    ),
    "falcon": Architecture(
        model_class="FalconForCausalLM",
        fields={
            "vocab_size": _VOCABULARY,
            "hidden_size": _WIDTH,
            "ffn_hidden_size": _whole(1, 2**18, optional=True),
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "num_kv_heads": _whole(1, 2**12, optional=True),
            "num_ln_in_parallel_attn": _whole(1, 2, optional=True),
            "activation": _ACTIVATION,
            "layer_norm_epsilon": _EPSILON,
            "max_position_embeddings": _POSITIONS,
            "alibi": _one_of(False),
            "new_decoder_architecture": _SWITCH,
            "multi_query": _SWITCH,
            "parallel_attn": _SWITCH,
            "bias": _SWITCH,
            "rope_parameters": _rope,
            "rope_scaling": _rope,
            "rope_theta": _real(1, 1e9),
            "hidden_dropout": _SHARE,
            "attention_dropout": _SHARE,
            "tie_word_embeddings": _SWITCH,
        },
        required=("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
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
            "vocab_size": _VOCABULARY,
            "n_positions": _POSITIONS,
            "n_embd": _WIDTH,
            "n_layer": _LAYERS,
            "n_head": _HEADS,
            "n_inner": _whole(1, 2**18, optional=True),
            "activation_function": _ACTIVATION,
            "resid_pdrop": _SHARE,
            "embd_pdrop": _SHARE,
            "attn_pdrop": _SHARE,
            "layer_norm_epsilon": _EPSILON,
            "scale_attn_weights": _SWITCH,
            "scale_attn_by_inverse_layer_idx": _SWITCH,
            "reorder_and_upcast_attn": _one_of(False),
            "tie_word_embeddings": _SWITCH,
        },
        required=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"),
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
            "vocab_size": _VOCABULARY,
            "hidden_size": _WIDTH,
            "intermediate_size": _INNER,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "hidden_act": _ACTIVATION,
            "max_position_embeddings": _POSITIONS,
            "layer_norm_eps": _EPSILON,
            "tie_word_embeddings": _SWITCH,
            "use_parallel_residual": _SWITCH,
            "rope_parameters": _rope,
            "rope_scaling": _rope,
            "rotary_emb_base": _real(1, 1e9),
            "rotary_pct": _real(0.01, 1),
            "attention_bias": _SWITCH,
            "attention_dropout": _SHARE,
            "hidden_dropout": _SHARE,
        },
        required=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        shapes=tensors.gpt_neox,
        head="embed_out.weight",
        embedding="gpt_neox.embed_in.weight",
        tied=False,
        positions=("max_position_embeddings", 2048),
        heads=("hidden_size", "num_attention_heads"),
    ),
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
        return [*found, f"model_type is {_short(name)}, allowed are " + ", ".join(allowed)]
    kind = ARCHITECTURES[name]
    if config.get("architectures") not in (None, [kind.model_class]):
        found.append(f"architectures is {_short(config['architectures'])}, expected [{kind.model_class!r}]")
    rules = {**_DESCRIPTIVE, **kind.fields}
    for field, value in config.items():
        if field in ("auto_map", "trust_remote_code"):
            continue
        if field not in rules:
            found.append(f"{_short(field)} is not an allowed field of {name}")
        elif wrong := rules[field](value):
            found.append(f"{field} is {_short(value)}, expected {wrong}")
    found += [f"{field} is missing" for field in kind.required if field not in config]
    return found or _divisions(config, kind)


def _divisions(config: Mapping[str, Any], kind: Architecture) -> list[str]:
    width, heads = (config[field] for field in kind.heads)
    found = []
    if width % heads:
        found.append(f"{kind.heads[0]} {width} is not a multiple of {kind.heads[1]} {heads}")
    for name in ("num_key_value_heads", "num_kv_heads"):
        keys = config.get(name) or heads
        if heads % keys:
            found.append(f"num_attention_heads {heads} is not a multiple of {name} {keys}")
    types = config.get("layer_types")
    if types is not None and len(types) != config["num_hidden_layers"]:
        found.append(f"layer_types has {len(types)} entries, num_hidden_layers is {config['num_hidden_layers']}")
    if "new_decoder_architecture" in kind.fields:
        newer = config.get("new_decoder_architecture", False)
        if newer and not config.get("parallel_attn", True):
            found.append("new_decoder_architecture is true, parallel_attn false: no model is of both")
        if not newer and config.get("num_ln_in_parallel_attn") == 2:
            found.append("num_ln_in_parallel_attn is 2, new_decoder_architecture false: no model is of both")
    if "rope_parameters" in kind.fields and not found and (config.get("head_dim") or width // heads) % 2:
        found.append("the width of a head is odd, which rotary positions can't have")
    if "partial_rotary_factor" in kind.fields and not found:
        places = [config, *(config.get(field) or {} for field in ("rope_parameters", "rope_scaling"))]
        given = [place["partial_rotary_factor"] for place in places if "partial_rotary_factor" in place]
        # Unlike the others, this architecture's class takes an odd number of them and fails when it is run.
        if any(int(width // heads * share) % 2 for share in given or [0.5]):
            found.append("the part of a head's width that partial_rotary_factor gives is odd")
    return found


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the output embedding is the input embedding, for a checked config."""
    return bool(config.get("tie_word_embeddings", ARCHITECTURES[config["model_type"]].tied))


def positions(config: Mapping[str, Any]) -> int:
    """How many tokens a sequence may have, for a checked config."""
    field, default = ARCHITECTURES[config["model_type"]].positions
    return int(config.get(field, default))


def shapes(config: Mapping[str, Any]) -> Shapes:
    """Name and shape of each parameter, for a checked config; a tied head is left out."""
    kind = ARCHITECTURES[config["model_type"]]
    found = kind.shapes(config)
    if not is_tied(config):
        found[kind.head] = found[kind.embedding]
    return found


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a checked config that make the model: what transformers' config class is called with."""
    kind = ARCHITECTURES[config["model_type"]]
    kept = {field: value for field, value in config.items() if field in kind.fields}
    return {**kept, "tie_word_embeddings": is_tied(config), **dict.fromkeys(_NUMBERED)}


# A padding token's embedding would not be learned.
_NUMBERED = ("bos_token_id", "eos_token_id", "pad_token_id")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
