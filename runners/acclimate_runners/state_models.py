"""Models with a state in attention's place: Mamba, Falcon Mamba. Fields and tensors, as architectures.py has them of decoders."""

from collections.abc import Mapping
from typing import Any

from acclimate_runners import tensors
from acclimate_runners.config_rules import (
    ACTIVATION,
    EPSILON,
    INNER,
    LAYERS,
    SWITCH,
    VOCABULARY,
    WIDTH,
    Check,
    one_of,
    rank,
    real,
    text,
    whole,
)
from acclimate_runners.kinds import Architecture

# No attention and no positions: a token sees those before it through a state of fixed size.
_MAMBA: dict[str, Check] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "state_size": whole(1, 2**12),
    "num_hidden_layers": LAYERS,
    "expand": whole(1, 16),
    "conv_kernel": whole(1, 64),
    "time_step_rank": rank,
    "hidden_act": ACTIVATION,
    "layer_norm_epsilon": EPSILON,
    "use_bias": SWITCH,
    "use_conv_bias": SWITCH,
    "residual_in_fp32": SWITCH,
    "tie_word_embeddings": SWITCH,
}
# How the weights were once drawn, how others would compute, and what the files from before transformers had say again.
_MAMBA_TOLD: dict[str, Check] = {
    "time_step_scale": real(1e-6, 1e6),
    "time_step_min": real(0, 1e6),
    "time_step_max": real(0, 1e6),
    "time_step_floor": real(0, 1e6),
    "time_step_init_scheme": text,
    "rescale_prenorm_residual": SWITCH,
    "use_mambapy": SWITCH,
    "use_falcon_mambapy": SWITCH,
    "use_associative_scan": SWITCH,
    "fused_add_norm": SWITCH,
    "rms_norm": one_of(True),
    "ssm_cfg": one_of({}),
    "pad_vocab_size_multiple": whole(1, 2**16),
    "intermediate_size": INNER,
    "d_inner": INNER,
    "d_model": WIDTH,
    "n_layer": LAYERS,
}


def _copies(config: Mapping[str, Any]) -> list[str]:
    """Fields that say again what others do, in files of the kin of Mamba."""
    inner = config.get("expand", 2) * config["hidden_size"]
    if config["model_type"] == "falcon_mamba":
        # What the published one says of expand is something else; the library goes by this.
        inner = config.get("intermediate_size", inner)
    same = {"intermediate_size": inner, "d_inner": inner, "d_model": config["hidden_size"]}
    same |= {"n_layer": config["num_hidden_layers"]}
    return [
        f"{name} is {config[name]}, the other fields make it {value}"
        for name, value in same.items()
        if config.get(name, value) != value
    ]


def _stateful(model_class: str, *fields: Mapping[str, Check]) -> Architecture:
    """An architecture of Mamba's kin; the fields of each further mapping are allowed, too."""
    return Architecture(
        model_class=model_class,
        fields={**_MAMBA, **{name: rule for mapping in fields for name, rule in mapping.items()}},
        required=("vocab_size", "hidden_size", "num_hidden_layers", "state_size"),
        shapes=tensors.mamba,
        head="lm_head.weight",
        embedding="backbone.embeddings.weight",
        tied=True,
        positions=None,
        heads=None,
        told=_MAMBA_TOLD,
        conflicts=_copies,
    )


STATEFUL: dict[str, Architecture] = {
    "mamba": _stateful("MambaForCausalLM"),
    "falcon_mamba": _stateful("FalconMambaForCausalLM", {"mixer_rms_eps": EPSILON, "intermediate_size": INNER}),
}
"""Model type -> what is known of it."""
