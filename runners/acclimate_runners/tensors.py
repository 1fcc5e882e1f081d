"""Name and shape of each tensor of a model, of its checked config.json, in plain Python; a tied or untied head is left out (architectures.py).

They are those of transformers' classes; a test holds them equal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shapes = dict[str, tuple[int, ...]]

PARTS = {
    "attention": ("attention", "attn", "self_attention", "self_attn", "mixer"),
    "mlp": ("mlp", "intermediate", "output", "ffn", "ffn_output", "pwconv1", "pwconv2"),
}
"""A layer's parts, as a recipe names them -> their names in files, of all architectures; Mamba's mixer is in attention's place."""

_NO_LAYERS = ("dt_proj", "out_proj")
"""Matrices that Mamba's mixer, or a kernel of it, multiplies with by itself: nothing stands where an adapter could; peft refuses them, too."""


def linear(shapes: Shapes, parts: Sequence[str]) -> list[str]:
    """Names of the weights of all linear layers in these parts of a model's layers, sorted; neither embeddings nor the head.

    The rule: a matrix whose name is …layers' list.number.part.….weight; where lists stand in lists, the innermost counts.
    """
    named = {name for part in parts for name in PARTS[part]}
    found = []
    for name, shape in shapes.items():
        words = name.split(".")
        at = max((place for place, word in enumerate(words) if word.isdecimal()), default=None)
        # Other matrices than a linear layer's, such as Mamba's A_log, are no weights by name.
        linear_ = len(shape) == 2 and words[-1] == "weight" and words[-2] not in _NO_LAYERS
        if at is not None and linear_ and words[at + 1] in named:
            found.append(name)
    return sorted(found)


def dense(name: str, outputs: int, inputs: int) -> Shapes:
    """A linear layer's weight and bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> Shapes:
    """A norm's gain and bias."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


_STILL = (".running_mean", ".running_var")


def stands_still(name: str) -> bool:
    """Whether numbers of this name belong to a model and are not learned: what a batch norm has seen of earlier images."""
    return name.endswith(_STILL)


def batch_norm(name: str, width: int) -> Shapes:
    """A batch norm's gain and bias, and the means and variances that it norms by."""
    return norm(name, width) | {name + part: (width,) for part in _STILL}


def counter_of(name: str) -> str:
    """The batch norm's mean that stands beside the counter of this name, which files may have and nobody reads; empty for other names."""
    stem = name.removesuffix(COUNTER)
    return "" if stem == name else stem + _STILL[0]


COUNTER = ".num_batches_tracked"


def decoder(
    config: Mapping[str, Any],
    *,
    biased: Callable[[str], bool],
    norms: Mapping[str, int] | None = None,
    head_norms: Callable[[int, int, int], tuple[int, int]] | None = None,
    last: bool = True,
) -> Shapes:
    """A decoder with Llama's names.

    Args:
        config: checked.
        biased: whether a projection, such as "self_attn.q_proj", has a bias.
        norms: the norms of a layer -> their width; None for Llama's two.
        head_norms: widths of the norms of queries and keys, of (a head's, all queries', all keys'); None where there are none.
        last: whether there is a norm after the last layer.
    """
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, width)}
    if last:
        shapes["model.norm.weight"] = (width,)
    linear = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    if norms is None:
        norms = {"input_layernorm": width, "post_attention_layernorm": width}
    own = (
        dict(zip(("self_attn.q_norm", "self_attn.k_norm"), head_norms(head, queries, keys), strict=True))
        if head_norms
        else {}
    )
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in linear.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            if biased(name):
                shapes[f"model.layers.{layer}.{name}.bias"] = (rows,)
        for name, size in {**norms, **own}.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (size,)
    return shapes


def _attention(config: Mapping[str, Any]) -> Callable[[str], bool]:
    return lambda name: name.startswith("self_attn") and bool(config.get("attention_bias", False))


def llama(config: Mapping[str, Any]) -> Shapes:
    """Llama's; Mistral's and Gemma's, too, whose configurations lack what they don't have."""
    switches = {"self_attn": "attention_bias", "mlp": "mlp_bias"}
    return decoder(config, biased=lambda name: bool(config.get(switches[name.partition(".")[0]], False)))


def qwen2(config: Mapping[str, Any]) -> Shapes:
    """Qwen 2's: queries, keys and values have a bias."""
    return decoder(config, biased=lambda name: name[-6:] in ("q_proj", "k_proj", "v_proj"))


def qwen3(config: Mapping[str, Any]) -> Shapes:
    """Qwen 3's: queries and keys are normed head by head."""
    return decoder(config, biased=_attention(config), head_norms=lambda head, queries, keys: (head, head))


def olmo(config: Mapping[str, Any]) -> Shapes:
    """OLMo's, whose norms have no weights."""
    return decoder(config, biased=_attention(config), norms={}, last=False)


def olmo2(config: Mapping[str, Any]) -> Shapes:
    """OLMo 2's: norms after attention and feed-forward, and of all queries and keys at once."""
    norms = dict.fromkeys(("post_attention_layernorm", "post_feedforward_layernorm"), int(config["hidden_size"]))
    return decoder(
        config, biased=_attention(config), norms=norms, head_norms=lambda head, queries, keys: (queries, keys)
    )


def gemma2(config: Mapping[str, Any]) -> Shapes:
    """Gemma 2's: norms before and after both attention and feed-forward."""
    return decoder(config, biased=_attention(config), norms=_four_norms(config))


def gemma3(config: Mapping[str, Any]) -> Shapes:
    """Gemma 3's: as Gemma 2's, queries and keys normed head by head."""
    own = lambda head, queries, keys: (head, head)  # noqa: E731
    return decoder(config, biased=_attention(config), norms=_four_norms(config), head_norms=own)


def _four_norms(config: Mapping[str, Any]) -> dict[str, int]:
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    return dict.fromkeys((f"{name}_layernorm" for name in names), int(config["hidden_size"]))


def falcon(config: Mapping[str, Any]) -> Shapes:
    """Falcon's, of the old architecture (7B) and the new one (40B, 180B)."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    inner, head = config.get("ffn_hidden_size") or 4 * width, width // heads
    newer = config.get("new_decoder_architecture", False)
    keys = (config.get("num_kv_heads") or heads) if newer else 1 if config.get("multi_query", True) else heads
    linear = {
        "self_attention.query_key_value": (width + 2 * keys * head, width),
        "self_attention.dense": (width, width),
        "mlp.dense_h_to_4h": (inner, width),
        "mlp.dense_4h_to_h": (width, inner),
    }
    norms = ["input_layernorm"]
    if not config.get("parallel_attn", True):
        norms.append("post_attention_layernorm")
    elif newer and config.get("num_ln_in_parallel_attn") != 1:
        norms = ["ln_attn", "ln_mlp"]
    shapes: Shapes = {"transformer.word_embeddings.weight": (config["vocab_size"], width)}
    shapes |= {f"transformer.ln_f.{part}": (width,) for part in ("weight", "bias")}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, columns) in linear.items():
            shapes[f"transformer.h.{layer}.{name}.weight"] = (rows, columns)
            if config.get("bias", False):
                shapes[f"transformer.h.{layer}.{name}.bias"] = (rows,)
        for name in norms:
            shapes |= {f"transformer.h.{layer}.{name}.{part}": (width,) for part in ("weight", "bias")}
    return shapes


def phi3(config: Mapping[str, Any]) -> Shapes:
    """Phi 3's, and the larger Phi 4's: Llama's, with what reads the same in one matrix."""
    apart = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    apart |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    found: Shapes = {}
    for name, shape in llama(config).items():
        own = name.split(".")[-2]
        joined = name.replace(own, apart.get(own, own))
        found[joined] = (found.get(joined, (0,))[0] + shape[0], *shape[1:])
    return found


def phi(config: Mapping[str, Any]) -> Shapes:
    """Phi 1's and 2's; the output embedding has a bias."""
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    keys = (config.get("num_key_value_heads") or heads) * (width // heads)
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.final_layernorm.weight": (width,),
        "model.final_layernorm.bias": (width,),
        "lm_head.bias": (vocabulary,),
    }
    linear = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.dense": (width, width),
        "mlp.fc1": (inner, width),
        "mlp.fc2": (width, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {**linear, "input_layernorm": (width,)}.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    return shapes


def gpt2(config: Mapping[str, Any]) -> Shapes:
    """GPT-2's."""
    width, inner = config["n_embd"], config.get("n_inner") or 4 * config["n_embd"]
    shapes: Shapes = {
        "transformer.wte.weight": (config["vocab_size"], width),
        "transformer.wpe.weight": (config["n_positions"], width),
        "transformer.ln_f.weight": (width,),
        "transformer.ln_f.bias": (width,),
    }
    # GPT-2 keeps its projections transposed: (inputs, outputs).
    projections = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    for layer in range(config["n_layer"]):
        for name, shape in projections.items():
            shapes[f"transformer.h.{layer}.{name}.weight"] = shape
            shapes[f"transformer.h.{layer}.{name}.bias"] = (shape[1],)
        for name in ("ln_1", "ln_2"):
            shapes[f"transformer.h.{layer}.{name}.weight"] = (width,)
            shapes[f"transformer.h.{layer}.{name}.bias"] = (width,)
    return shapes


def gpt_neox(config: Mapping[str, Any]) -> Shapes:
    """GPT-NeoX's, and so Pythia's."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {
        "gpt_neox.embed_in.weight": (config["vocab_size"], width),
        "gpt_neox.final_layer_norm.weight": (width,),
        "gpt_neox.final_layer_norm.bias": (width,),
    }
    for layer in range(config["num_hidden_layers"]):
        linear = {
            "attention.query_key_value": (3 * width, width, config.get("attention_bias", True)),
            "attention.dense": (width, width, config.get("attention_bias", True)),
            "mlp.dense_h_to_4h": (inner, width, True),
            "mlp.dense_4h_to_h": (width, inner, True),
        }
        for name, (rows, columns, bias) in linear.items():
            shapes[f"gpt_neox.layers.{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"gpt_neox.layers.{layer}.{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"gpt_neox.layers.{layer}.{name}.weight"] = (width,)
            shapes[f"gpt_neox.layers.{layer}.{name}.bias"] = (width,)
    return shapes


def mamba(config: Mapping[str, Any]) -> Shapes:
    """Mamba's, and Falcon Mamba's, whose further norms have no weights."""
    width, state = config["hidden_size"], config["state_size"]
    inner = config.get("intermediate_size", config.get("expand", 2) * width)
    given = config.get("time_step_rank", "auto")
    rank, kernel = -(-width // 16) if given == "auto" else given, config.get("conv_kernel", 4)
    shapes: Shapes = {
        "backbone.embeddings.weight": (config["vocab_size"], width),
        "backbone.norm_f.weight": (width,),
    }
    mixer: Shapes = {
        "A_log": (inner, state),
        "D": (inner,),
        "conv1d.weight": (inner, 1, kernel),
        "in_proj.weight": (2 * inner, width),
        "x_proj.weight": (rank + 2 * state, inner),
        "dt_proj.weight": (inner, rank),
        "dt_proj.bias": (inner,),
        "out_proj.weight": (width, inner),
    }
    if config.get("use_conv_bias", True):
        mixer["conv1d.bias"] = (inner,)
    if config.get("use_bias", False):
        mixer |= {"in_proj.bias": (2 * inner,), "out_proj.bias": (width,)}
    for layer in range(config["num_hidden_layers"]):
        shapes[f"backbone.layers.{layer}.norm.weight"] = (width,)
        shapes |= {f"backbone.layers.{layer}.mixer.{name}": shape for name, shape in mixer.items()}
    return shapes
