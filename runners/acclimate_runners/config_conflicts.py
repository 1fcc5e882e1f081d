"""Fields of a config.json that are each for itself fine and together no model, of whatever architecture, in plain Python."""

from collections.abc import Mapping
from typing import Any

from acclimate_runners.config_rules import label_names, shown
from acclimate_runners.kinds import Architecture


def divisions(config: Mapping[str, Any], kind: Architecture, names: tuple[str, str]) -> list[str]:
    """Widths that heads don't divide, and what else of an attention no class computes; names: the fields of width and heads."""
    width, heads = (config[name] for name in names)
    found = []
    if width % heads:
        found.append(f"{names[0]} {width} is not a multiple of {names[1]} {heads}")
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
        if not newer and not config.get("multi_query", True) and config.get("num_kv_heads") not in (None, heads):
            found.append(f"num_kv_heads is {config['num_kv_heads']}, without multi_query there are {heads}")
        one = not newer and config.get("multi_query", True)
        keys = 1 if one else config.get("num_kv_heads") or heads
        if config.get("num_key_value_heads", keys) != keys:
            found.append(f"num_key_value_heads is {config['num_key_value_heads']}, the other fields make it {keys}")
    if "rope_parameters" in kind.fields and not found and (config.get("head_dim") or width // heads) % 2:
        found.append("the width of a head is odd, which rotary positions can't have")
    if not {"partial_rotary_factor", "rotary_pct"} & set(kind.fields):
        found += [
            f"{field} has a partial_rotary_factor, which {config['model_type']} can't have"
            for field in ("rope_parameters", "rope_scaling")
            if _is_partial(config.get(field))
        ]
    if "partial_rotary_factor" in kind.fields and not found:
        places = [config, *(config.get(field) or {} for field in ("rope_parameters", "rope_scaling"))]
        given = [place["partial_rotary_factor"] for place in places if "partial_rotary_factor" in place]
        # Unlike the others, this architecture's class takes an odd number of them and fails when it is run.
        if any(int(width // heads * share) % 2 for share in given or [0.5]):
            found.append("the part of a head's width that partial_rotary_factor gives is odd")
    return found


def _is_partial(ropes: Any) -> bool:
    """Whether parameters of rotary positions, or those of a kind of attention among them, are of a part of a head."""
    each = (ropes, *(inner for inner in (ropes or {}).values() if isinstance(inner, dict)))
    return any((rope or {}).get("partial_rotary_factor", 1) != 1 for rope in each)


def labelled(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the labels of a sequence classifier."""
    told = config.get("id2label")
    if wrong := label_names(told):
        return [f"id2label is {shown(told)}, expected {wrong}"]
    assert isinstance(told, dict)
    found = []
    # The library writes null for what it can make of id2label.
    if (count := config.get("num_labels")) is not None and (type(count) is not int or count != len(told)):
        found.append(f"num_labels is {shown(count)}, id2label makes it {len(told)}")
    if (back := config.get("label2id")) is not None and not _leads_back(back, told):
        made = {name: int(number) for number, name in told.items()}
        found.append(f"label2id is {shown(back)}, id2label makes it {shown(made)}")
    return found


def _leads_back(back: Any, told: Mapping[str, str]) -> bool:
    """Whether labels have the numbers at which they stand; of two that are called the same, either's."""
    return (
        isinstance(back, dict)
        and set(back) == set(told.values())
        and all(type(number) is int and told.get(str(number)) == name for name, number in back.items())
    )
