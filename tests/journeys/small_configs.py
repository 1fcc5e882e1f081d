"""A small config.json of each accepted architecture."""

from typing import Any

WORDS = ["<pad>", "<bos>", "<unk>", *"abcdef", "more", "less", "yes", "no", "very"]

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": len(WORDS),
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_inner": 24,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": len(WORDS),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    },
}
# The kin of Llama, each with what sets it apart.
_KIN: dict[str, dict[str, Any]] = {
    "mistral": {"head_dim": 6, "sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 8},
    "qwen3": {"head_dim": 6, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": False},
    "gemma": {"head_dim": 6, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        "head_dim": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 200,
        "query_pre_attn_scalar": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 200,
        "query_pre_attn_scalar": 6,
    },
    "olmo": {"clip_qkv": None, "tie_word_embeddings": False},
    "olmo2": {"tie_word_embeddings": False},
    "phi": {"tie_word_embeddings": False, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
    "phi3": {"tie_word_embeddings": False, "sliding_window": 200, "pad_token_id": None},
}
CONFIGS["falcon"] = {
    "model_type": "falcon",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
CONFIGS |= {
    name: {"model_type": name, "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    for name in ("mamba", "falcon_mamba")
}
CONFIGS |= {name: {**CONFIGS["llama"], "model_type": name, **changes} for name, changes in _KIN.items()}


_ENCODER: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
# Sequence classifiers alone; the others may be language models, too.
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **_ENCODER},
    "roberta": {
        "model_type": "roberta",
        "architectures": ["RobertaForSequenceClassification"],
        **_ENCODER,
        "max_position_embeddings": 18,
    },
    "xlm-roberta": {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaForSequenceClassification"],
        **_ENCODER,
        "max_position_embeddings": 18,
        "type_vocab_size": 1,
    },
    "electra": {
        "model_type": "electra",
        "architectures": ["ElectraForSequenceClassification"],
        **_ENCODER,
        "embedding_size": 6,
    },
    "albert": {
        "model_type": "albert",
        "architectures": ["AlbertForSequenceClassification"],
        **_ENCODER,
        "embedding_size": 6,
        "num_hidden_layers": 3,
    },
    "distilbert": {
        "model_type": "distilbert",
        "architectures": ["DistilBertForSequenceClassification"],
        "vocab_size": len(WORDS),
        "dim": 16,
        "hidden_dim": 24,
        "n_layers": 2,
        "n_heads": 2,
        "max_position_embeddings": 16,
    },
    "deberta-v2": {
        "model_type": "deberta-v2",
        "architectures": ["DebertaV2ForSequenceClassification"],
        **_ENCODER,
        "relative_attention": True,
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "max_relative_positions": -1,
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    "modernbert": {
        "model_type": "modernbert",
        "architectures": ["ModernBertForSequenceClassification"],
        **_ENCODER,
        "local_attention": 4,
        "pad_token_id": 0,
        "classifier_pooling": "mean",
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 3,
    },
    "convnext": {
        "model_type": "convnext",
        "architectures": ["ConvNextForImageClassification"],
        "hidden_sizes": [6, 8],
        "depths": [1, 2],
        "num_stages": 2,
        "patch_size": 2,
        "num_channels": 3,
        "drop_path_rate": 0.5,
    },
}
ENCODERS["convnextv2"] = {
    **ENCODERS["convnext"],
    "model_type": "convnextv2",
    "architectures": ["ConvNextV2ForImageClassification"],
}
ENCODERS["resnet"] = {
    "model_type": "resnet",
    "architectures": ["ResNetForImageClassification"],
    "embedding_size": 4,
    "hidden_sizes": [8, 12],
    "depths": [1, 2],
    "layer_type": "bottleneck",
    "num_channels": 3,
}
