"""Rules for the fields of a config.json: what each may be, in plain Python, and what is said of one that isn't."""

from collections.abc import Callable
from typing import Any

Check = Callable[[Any], str | None]
"""A field's rule: None where the value is fine, else what it should have been."""

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "tanh")
DTYPES = ("float32", "float16", "bfloat16")
ROPE_TYPES = ("default", "linear", "llama3")


def whole(low: int, high: int, *, optional: bool = False) -> Check:
    """A whole number, or null where it is optional."""

    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        return None if type(value) is int and low <= value <= high else f"a whole number from {low} to {high}"

    return check


def real(low: float, high: float, *, optional: bool = False) -> Check:
    """A number, or null where it is optional."""

    def check(value: Any) -> str | None:
        if value is None and optional:
            return None
        fine = type(value) in (int, float) and low <= value <= high
        return None if fine else f"a number from {low:g} to {high:g}"

    return check


def one_of(*allowed: Any) -> Check:
    """One of these values, type included."""

    def check(value: Any) -> str | None:
        # True == 1 in Python, but not in a config.
        fine = any(value == a and type(value) is type(a) for a in allowed)
        return None if fine else "one of " + ", ".join(map(str, allowed))

    return check


def text(value: Any) -> str | None:
    """A text."""
    return None if isinstance(value, str) and len(value) <= 200 else "a text of at most 200 characters"


def optional_text(value: Any) -> str | None:
    """A text, or null."""
    return None if value is None or text(value) is None else "a text of at most 200 characters, or null"


def texts(value: Any) -> str | None:
    """A few texts."""
    fine = isinstance(value, list) and len(value) <= 8 and all(text(item) is None for item in value)
    return None if fine else "a list of at most 8 texts"


def rank(value: Any) -> str | None:
    """The rank of Mamba's time steps."""
    fine = value == "auto" or (type(value) is int and 1 <= value <= 2**16)
    return None if fine else '"auto", or a whole number from 1 to 65536'


def full_attention(value: Any) -> str | None:
    """Kinds of attention by layer, all of them full."""
    fine = isinstance(value, list) and len(value) <= 1024 and all(item == "full_attention" for item in value)
    return None if fine or value is None else 'null, or a list of "full_attention", one a layer'


def attentions(value: Any) -> str | None:
    """Kinds of attention by layer, full or with a window."""
    known = ("full_attention", "sliding_attention")
    fine = isinstance(value, list) and len(value) <= 1024 and all(item in known for item in value)
    return None if fine or value is None else f"null, or a list of {' and '.join(known)}, one a layer"


def tokens(value: Any) -> str | None:
    """Numbers of tokens."""
    if value is None or (isinstance(value, list) and len(value) <= 64 and all(type(item) is int for item in value)):
        return None
    return None if type(value) is int else "a token's number, a list of them, or null"


def parts_of(value: Any) -> list[str]:
    """Words of a list, or of a text with | between them; none of null."""
    return [part.strip() for part in value.split("|")] if isinstance(value, str) and value else list(value or [])


def some_of(*allowed: str) -> Check:
    """Some of these words, each once, in a list or a text with | between them; or null."""

    def check(value: Any) -> str | None:
        fine = value is None or isinstance(value, str)
        fine = fine or (isinstance(value, list) and all(isinstance(item, str) for item in value))
        parts = parts_of(value) if fine and value else []
        fine = fine and len(set(parts)) == len(parts) and set(parts) <= set(allowed)
        return None if fine else "null, or some of " + " and ".join(allowed) + ", in a list or with | between them"

    return check


def several(rule: Check, *, most: int) -> Check:
    """A list of so many values at most, and of one at least, that each follow a rule."""

    def check(value: Any) -> str | None:
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            return f"a list of 1 to {most}"
        wrong = next((found for found in map(rule, value) if found), None)
        return f"a list of 1 to {most}, each {wrong}" if wrong else None

    return check


def notes(value: Any) -> str | None:
    """What some program wrote for itself."""
    return None if value is None or isinstance(value, dict) else "an object, or null"


ROPE: dict[str, Check] = {
    "rope_type": one_of(*ROPE_TYPES),
    "type": one_of(*ROPE_TYPES),
    "rope_theta": real(1, 1e9),
    "factor": real(1, 1024),
    "low_freq_factor": real(0.01, 1024),
    "high_freq_factor": real(0.01, 1024),
    "original_max_position_embeddings": whole(1, 2**22),
    "partial_rotary_factor": real(0.01, 1),
}


def rope(value: Any) -> str | None:
    """Parameters of rotary positions."""
    if value is None:
        return None
    if not isinstance(value, dict):
        return "an object of rope parameters, or null"
    for name, item in value.items():
        if name not in ROPE:
            return "without " + repr(name)[:60]
        if wrong := ROPE[name](item):
            return f"with {name} {wrong}"
    # Transformers before 4.45 called it so.
    older = value.get("type", "default")
    kind = str(value.get("rope_type", older))
    if "type" in value and older != kind:
        return f"with one rope_type, not {kind} and {older}"
    optional = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
    lacking = {"linear": {"factor"}, "llama3": set(ROPE) - optional}.get(kind, set()) - set(value)
    return "with " + ", ".join(sorted(lacking)) if lacking else None


def plain_rope(value: Any) -> str | None:
    """Parameters of rotary positions that are neither stretched nor of a part of a head."""
    if wrong := rope(value):
        return wrong
    given = value or {}
    plain = {given.get(name, "default") for name in ("rope_type", "type")} == {"default"}
    return None if plain and given.get("partial_rotary_factor", 1) == 1 else "without stretched or partial positions"


def two_ropes(value: Any) -> str | None:
    """Parameters of rotary positions, by kind of attention."""
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) - {"full_attention", "sliding_attention"}:
        return "an object of rope parameters for full_attention and sliding_attention, or null"
    wrong = ["without null" if item is None else rope(item) for item in value.values()]
    return next((each for each in wrong if each), None)


MOST_LABELS = 1 << 15
"""Of a classifier: the largest that are published tell 21,841 apart."""


def label_names(value: Any) -> str | None:
    """Labels by number, as JSON has them. Two may be called the same, as ImageNet's two cranes are."""
    fine = isinstance(value, dict) and 2 <= len(value) <= MOST_LABELS
    fine = fine and all(text(item) is None for item in value.values()) and len(set(value.values())) > 1
    fine = fine and set(value) == set(map(str, range(len(value))))
    return None if fine else f'an object of 2 to {MOST_LABELS} labels by number, from "0" on'


def shown(value: Any) -> str:
    """A value as a problem's sentence quotes it: cut where it is long."""
    quoted = repr(value)
    return quoted if len(quoted) <= 60 else quoted[:57] + "…"


def _anything(value: Any) -> str | None:
    """What is checked elsewhere."""
    return None


VOCABULARY, WIDTH, LAYERS = whole(1, 2**20), whole(1, 2**16), whole(1, 1024)
HEADS, POSITIONS, INNER = whole(1, 2**12), whole(1, 2**22), whole(1, 2**18)
SWITCH, SHARE, EPSILON = one_of(True, False), real(0, 0.9), real(1e-12, 0.1)
ACTIVATION = one_of(*ACTIVATIONS)
BLOCKS: dict[str, Check] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_act": ACTIVATION,
    "hidden_dropout_prob": SHARE,
    "attention_probs_dropout_prob": SHARE,
    "layer_norm_eps": EPSILON,
}
"""A transformer's layers, as BERT calls their sizes, and those do that came of it."""

# Fields that say nothing about the computation here: read, checked, and then left out of the model that is built. A padding token
# is among them: sequences are padded on the right, where a causal model can't see it.
DESCRIPTIVE: dict[str, Check] = {
    "architectures": texts,
    "model_type": text,
    "transformers_version": text,
    "_name_or_path": text,
    "dtype": one_of(*DTYPES),
    "torch_dtype": one_of(*DTYPES),
    "bos_token_id": tokens,
    "eos_token_id": tokens,
    "pad_token_id": tokens,
    "use_cache": SWITCH,
    "initializer_range": real(0, 1),
    "pretraining_tp": one_of(1),
    "is_decoder": one_of(False),
    "add_cross_attention": one_of(False),
    "classifier_dropout": real(0, 1),
    "summary_type": text,
    "summary_use_proj": SWITCH,
    "summary_activation": one_of(None),
    "summary_proj_to_labels": SWITCH,
    "summary_first_dropout": real(0, 1),
    "n_ctx": POSITIONS,
    "cache_implementation": text,
    # Of programs that made or prepared the file for themselves.
    "_attn_implementation_autoset": SWITCH,
    "task_specific_params": notes,
    "transformers.js_config": notes,
    "unsloth_fixed": SWITCH,
    "unsloth_version": text,
}

# Fields of sequence classifiers alone; the first three are held against each other.
CLASSIFYING: dict[str, Check] = {
    "id2label": label_names,
    "label2id": _anything,
    "num_labels": _anything,
    "problem_type": one_of(None, "single_label_classification"),
    # Of the program that trained it, and how many labels it once had: transformers goes by id2label.
    "finetuning_task": optional_text,
    "_num_labels": whole(0, MOST_LABELS),
}
