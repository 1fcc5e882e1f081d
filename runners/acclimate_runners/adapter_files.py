"""Reading a submitted adapter before any library touches it: peft's two files, on a base that the competition names.

`adapter_config.json` may say what a low-rank adapter on linear layers needs, and nothing of what else peft can do: each key is allow-listed.
`adapter_model.safetensors` holds exactly the two matrices of each layer that it names. How they are merged is in merging.py.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acclimate_competitions import bases
from acclimate_competitions.definition import IMAGES, Competition, SubmissionRules
from acclimate_competitions.errors import Refusal
from acclimate_runners import architectures, reading, tensors
from acclimate_runners.config_rules import SWITCH, Check, one_of, real, text, whole
from acclimate_runners.reading import ModelFacts, Rules

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAMES = (CONFIG, WEIGHTS)
CLASSIFIER = "hf-sequence-classifier"
PREFIX = "base_model.model."
"""What peft puts before the names of a model's layers."""

_CONFIG_BYTES = 1 << 16
_LARGEST_RANK = 4096
_SHOWN = 12


def _targets(value: Any) -> str | None:
    fine = isinstance(value, list) and 0 < len(value) <= 4096 and all(text(item) is None for item in value)
    return None if fine else "a list of names of layers; a pattern is not taken"


_NOTHING = one_of(None, False, {}, [])
_RULES: dict[str, Check] = {
    "peft_type": one_of("LORA"),
    "base_model_name_or_path": text,
    "r": whole(1, _LARGEST_RANK),
    "lora_alpha": real(1e-6, 1e6),
    "target_modules": _targets,
    "use_rslora": SWITCH,
    "bias": one_of("none"),
    # These say nothing about what comes out: how it was trained, by what, and how a layer keeps its weights, which is known here.
    "task_type": one_of("CAUSAL_LM", None),
    "peft_version": text,
    "revision": lambda value: None if value is None else text(value),
    "inference_mode": SWITCH,
    "lora_dropout": real(0, 1),
    "fan_in_fan_out": SWITCH,
    "init_lora_weights": one_of(True, False, "gaussian"),
    "ensure_weight_tying": SWITCH,
    "qalora_group_size": whole(1, 2**16),
    "megatron_core": one_of("megatron.core", None),
    # What else peft can do is switched off.
    **dict.fromkeys(
        "modules_to_save layers_to_transform layers_pattern rank_pattern alpha_pattern exclude_modules megatron_config"
        " trainable_token_indices loftq_config eva_config corda_config lora_ga_config velora_config monteclora_config arrow_config"
        " kasa_config use_dora alora_invocation_tokens use_qalora layer_replication lora_bias target_parameters use_bdlora"
        " auto_mapping".split(),
        _NOTHING,
    ),
}
_REQUIRED = ("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules")


@dataclass(frozen=True)
class Adapter:
    """What a strict reading tells of an adapter.

    Attributes:
        scale: what the product of its two matrices is multiplied with.
        layers: name of a base's weight -> beginning of the names of its two matrices.
        transposed: whether the base keeps these weights as [inputs, outputs].
        facts: of the model that it makes of its base; bytes are those of the adapter's own files.
    """

    scale: float
    layers: Mapping[str, str]
    transposed: bool
    facts: ModelFacts


@dataclass(frozen=True)
class _Unlimited:
    architectures: tuple[str, ...]
    max_parameters: int
    max_bytes: int


def unlimited(rules: Rules) -> Rules:
    """The same rules, for files that are the competition's own."""
    return _Unlimited(rules.architectures, rules.max_parameters, 1 << 62)


def are(names: Collection[str]) -> bool:
    """Whether files of these names are an adapter's, rather than a whole model's."""
    return CONFIG in names and "config.json" not in names


def kind_of(files: Mapping[str, Path]) -> str:
    """What files are submitted as, in a manifest's words: by their names, and by the class that config.json names."""
    if are(files):
        return bases.KIND
    path = files.get("config.json")
    config = reading.read_object("config.json", path, reading.CONFIG_BYTES, []) if path and path.is_file() else None
    told = (config or {}).get("architectures")
    if reading.classes_end(told, "ForImageClassification"):
        return IMAGES
    return CLASSIFIER if reading.classes_end(told, "ForSequenceClassification") else "hf-causal-lm"


def of_folder(folder: Path) -> dict[str, Path]:
    """The files of a folder that make a submission, an adapter's or a whole model's, name -> path; others in it are left alone.

    Raises:
        Refusal: file_unreadable, where it is no folder.
    """
    there = {path.name: path for path in sorted(folder.iterdir())} if folder.is_dir() else {}
    return {name: there[name] for name in NAMES if name in there} if are(there) else reading.of_folder(folder)


def stands_on(files: Mapping[str, Path], rules: SubmissionRules, *, folder: Path) -> str | None:
    """The base that the files of a folder stand on; None for a whole model.

    Raises:
        Refusal: model_invalid, where the competition takes no submissions of this kind, or has no such base.
    """
    if (kind := kind_of(files)) not in rules.kinds:
        raise Refusal("model_invalid", f"{folder} is a {kind} by its files, allowed: {', '.join(rules.kinds)}")
    return base_of(files[CONFIG], rules.bases) if kind == bases.KIND else None


def base_of(path: Path, named: Collection[str]) -> str:
    """Which base an adapter_config.json stands on: base_model_name_or_path is its name, or a path that ends in it.

    Raises:
        Refusal: model_invalid, where the competition names no such base.
    """
    problems: list[str] = []
    config = reading.read_object(CONFIG, path, _CONFIG_BYTES, problems) or {}
    told = config.get("base_model_name_or_path")
    if not problems:
        found = str(told).rstrip("/").rpartition("/")[2]
        if isinstance(told, str) and found in named:
            return found
        known = ", ".join(sorted(named)) or "none"
        said = "is missing" if told is None else f"is {repr(told)[:80]}"
        problems = [f"{CONFIG}: base_model_name_or_path {said}; the competition's bases are: {known}"]
    raise reading.refusal(problems)


def inspect(files: Mapping[str, Path], rules: Rules, *, config: Path) -> Adapter:
    """Read an adapter strictly.

    Args:
        files: name -> path.
        rules: the competition's limits; max_parameters are those of the model that it makes.
        config: the base's config.json.

    Raises:
        Refusal: model_invalid, with all problems found.
    """
    problems = [f"{name[:80]}: not one of the files of an adapter" for name in files if name not in NAMES]
    problems += [f"{name}: missing" for name in NAMES if name not in files]
    sizes = {name: files[name].stat().st_size for name in NAMES if name in files}
    problems += [f"{name}: 0 bytes" for name, size in sizes.items() if size == 0]
    if (total := sum(sizes.values())) > rules.max_bytes:
        problems.append(f"the files have {total} bytes, at most {rules.max_bytes} are allowed")
    base = reading.read_config(config, rules, problems)
    if problems or base is None:
        raise reading.refusal(problems)
    given = reading.read_object(CONFIG, files[CONFIG], _CONFIG_BYTES, problems)
    found = reading.read_tensors(WEIGHTS, files[WEIGHTS], problems)
    shapes = architectures.shapes(base)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    if parameters > rules.max_parameters:
        problems.append(f"its base has {parameters} parameters, at most {rules.max_parameters} are allowed")
    if given is not None:
        problems += [f"{CONFIG}: {line}" for line in _wrong(given)]
    if given is None or problems:
        raise reading.refusal(problems)
    transposed = base["model_type"] == "gpt2"
    layers = _layers(given, shapes, problems)
    if found is not None and not problems:
        problems += [f"{WEIGHTS}: {line}" for line in _compare(found, _expected(given, layers, shapes, transposed))]
    if problems:
        raise reading.refusal(problems)
    rank = given["r"]
    scale = given["lora_alpha"] / (math.sqrt(rank) if given.get("use_rslora", False) else rank)
    return Adapter(scale, layers, transposed, ModelFacts(str(base["model_type"]), parameters, total, base))


def inspect_submitted(
    files: Mapping[str, Path],
    rules: Rules,
    *,
    on: tuple[str, Path] | None,
    tokenizer: str | None = None,
    kind: str | None = None,
) -> ModelFacts:
    """Read a submission strictly, be it a whole model or an adapter.

    Args:
        files: name -> path.
        rules: the competition's limits.
        on: name and config.json of the base that it is said to stand on; None for a whole model.
        tokenizer: the digest that a whole model's tokenizer.json must have, where the competition fixes it.
        kind: what it is said to be; None where nobody says so.

    Raises:
        Refusal: model_invalid, with all problems found.
    """
    if kind not in (None, kind_of(files)):
        raise Refusal("model_invalid", f"by its files it is a {kind_of(files)}, its manifest says {kind}")
    if on is None:
        return reading.inspect(files, rules, tokenizer=tokenizer)
    name, config = on
    if CONFIG in files:
        base_of(files[CONFIG], (name,))
    return inspect(files, rules, config=config).facts


def check_bases(folder: Path, competition: Competition) -> None:
    """Read the bases of a competition's folder as strictly as any model.

    Raises:
        Refusal: splits_invalid, where an entrant's adapter would be refused for its base.
    """
    problems = []
    for base in competition.submission.bases:
        try:
            given = reading.of_folder(folder / bases.FOLDER / base)
            fixed = bases.tokenizer(folder)
            facts = reading.inspect(given, unlimited(competition.submission), tokenizer=fixed)
            if architectures.labels(facts.config) is not None:
                problems.append(f"{bases.FOLDER}/{base}: a base is a language model, this one is a classifier")
        except Refusal as refusal:
            problems += [f"{bases.FOLDER}/{base}: {line}" for line in refusal.problems or (refusal.sentence,)]
    if problems:
        raise Refusal(
            "splits_invalid",
            f"the bases of {competition.slug!r} have {len(problems)} problem{'' if len(problems) == 1 else 's'}: {problems[0]}",
            hint="a base obeys the rules of [submission], but for max_bytes",
            problems=problems,
        )


def _wrong(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with a parsed adapter_config.json."""
    found = []
    for name, value in config.items():
        if name not in _RULES:
            found.append(f"{repr(name)[:60]} is not an allowed key")
        elif wrong := _RULES[name](value):
            said = (
                "not carried: only null, false or an empty value is"
                if _RULES[name] is _NOTHING
                else f"expected {wrong}"
            )
            found.append(f"{name} is {repr(value)[:60]}, {said}")
    return found + [f"{name} is missing" for name in _REQUIRED if name not in config]


def _layers(config: Mapping[str, Any], shapes: tensors.Shapes, problems: list[str]) -> dict[str, str]:
    """The weights that are adapted, as peft finds them: a target is a layer's name, or the end of it after a dot."""
    linear = tensors.linear(shapes, tuple(tensors.PARTS))
    found: dict[str, str] = {}
    for target in config["target_modules"]:
        layers = {name: name.removesuffix(".weight") for name in linear}
        matched = {name: layer for name, layer in layers.items() if layer == target or layer.endswith(f".{target}")}
        if not matched:
            known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers.values()}))
            problems.append(
                f"{CONFIG}: target_modules has {repr(target)[:60]}, which no linear layer of the base is called; they are: {known}"
            )
        found |= {name: PREFIX + layer for name, layer in matched.items()}
    return dict(sorted(found.items()))


def _expected(
    config: Mapping[str, Any], layers: Mapping[str, str], shapes: tensors.Shapes, transposed: bool
) -> tensors.Shapes:
    found: tensors.Shapes = {}
    for name, start in layers.items():
        outputs, inputs = reversed(shapes[name]) if transposed else shapes[name]
        found |= {f"{start}.lora_A.weight": (config["r"], inputs), f"{start}.lora_B.weight": (outputs, config["r"])}
    return found


def _compare(found: Mapping[str, reading.Tensor], expected: tensors.Shapes) -> list[str]:
    problems = [f"tensor {name!r} is missing" for name in expected if name not in found]
    for name, tensor in found.items():
        if name not in expected:
            problems.append(f"tensor {repr(name)[:120]} is of no layer that target_modules names")
        elif tensor.shape != expected[name]:
            problems.append(
                f"tensor {name!r} has shape {list(tensor.shape)}, r and the base ask for {list(expected[name])}"
            )
    return problems
