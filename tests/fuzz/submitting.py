"""Targets of the fuzzer: a submission's files, of a whole model and of an adapter, as a server's check reads them before any library does."""

import contextlib
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import small_configs
from edits import Bytes, edited

from acclimate_competitions.errors import Refusal
from acclimate_runners import adapter_files, architectures, reading

_WORDS = [f"w{number}" for number in range(8)]
_ENCODER = {
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}
_LLAMA = {"model_type": "llama", **_ENCODER, "num_key_value_heads": 1, "tie_word_embeddings": True}
CONFIGS: tuple[dict[str, Any], ...] = (
    _LLAMA,
    {"model_type": "gpt2", "vocab_size": 8, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 4},
    {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "a", "1": "b"},
        "label2id": {"a": 0, "b": 1},
        **_ENCODER,
    },
    {
        "model_type": "deberta-v2",
        "architectures": ["DebertaV2ForSequenceClassification"],
        "id2label": {"0": "a", "1": "b"},
        **_ENCODER,
        "relative_attention": True,
        "position_buckets": 4,
        "pos_att_type": "p2c|c2p",
        "conv_kernel_size": 3,
    },
    {
        "model_type": "modernbert",
        "architectures": ["ModernBertForSequenceClassification"],
        "id2label": {"0": "a", "1": "b"},
        **_ENCODER,
        "layer_types": ["full_attention"],
        "rope_parameters": {"full_attention": {"rope_theta": 1000.0, "rope_type": "default"}},
    },
    *(
        {**small_configs.ENCODERS[name], "id2label": {"0": "a", "1": "b"}}
        for name in ("vit", "convnext", "convnextv2", "resnet")
    ),
    {"model_type": "mamba", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "state_size": 2},
    {**_LLAMA, "model_type": "gemma2", "head_dim": 2, "hidden_activation": "gelu_pytorch_tanh"},
)
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 0, "content": "w0", "special": True}],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"}, {"type": "NFC"}],
    },
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    "model": {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(_WORDS)}, "unk_token": "w0"},
}
LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "small",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
}


@dataclass(frozen=True)
class Rules:
    """What a competition allows: reading.Rules."""

    architectures: tuple[str, ...] = tuple(architectures.ARCHITECTURES)
    max_parameters: int = 100_000
    max_bytes: int = 1 << 20


def model(data: bytes) -> None:
    """A whole model's files."""
    choices = Bytes(data)
    document = edited(choices.one_of([_model(number) for number in range(len(CONFIGS))]), choices)
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:
        folder = Path(name)
        _write(folder, document, {"config.json": "config", "tokenizer.json": "tokenizer"}, "model.safetensors")
        with contextlib.suppress(Refusal):
            facts = reading.inspect(folder, Rules())
            size = (folder / "model.safetensors").stat().st_size
            # A number takes two bytes at least: what is said to have more numbers was not read.
            _true(2 * facts.parameters <= size and facts.parameters <= Rules().max_parameters, facts)
            _true(facts.bytes == sum(path.stat().st_size for path in folder.iterdir()), facts)
            _true(facts.config["model_type"] == facts.architecture, facts)


def adapter(data: bytes) -> None:
    """An adapter's files, on a base of the competition."""
    choices = Bytes(data)
    number = choices.below(2)
    document = edited(_adapter(number), choices)
    with tempfile.TemporaryDirectory(dir=_MEMORY) as name:
        folder = Path(name)
        config = folder / "config.json"
        config.write_text(json.dumps(CONFIGS[number]), "utf-8")
        _write(folder, document, {adapter_files.CONFIG: "lora"}, adapter_files.WEIGHTS)
        given = {each: folder / each for each in adapter_files.NAMES if (folder / each).exists()}
        if not adapter_files.are(given):
            return
        with contextlib.suppress(Refusal):
            adapter_files.base_of(folder / adapter_files.CONFIG, ["small"])
            found = adapter_files.inspect(given, Rules(), config=config)
            shapes = architectures.shapes(CONFIGS[number])
            _true(bool(found.layers) and all(layer in shapes for layer in found.layers), found)
            _true(0 < found.scale < float("inf"), found)


def models() -> list[bytes]:
    """Inputs to begin with."""
    return [
        bytes([0, number, 0, 0, 0, place, 0, act])
        for number in range(len(CONFIGS))
        for place in range(12)
        for act in range(2)
    ]


def adapters() -> list[bytes]:
    """Inputs to begin with."""
    return [
        bytes([0, number, 0, 0, 0, place, 0, act]) for number in range(2) for place in range(16) for act in range(2)
    ]


WORDS = ("model_type", "dtype", "F32", "BF16", "data_offsets", "shape", "__metadata__", "Regex", "Replace", "vocab")


def unchanged() -> None:
    """The documents that are edited are taken as they are: else all of this would be refused, and show nothing."""
    for number in range(len(CONFIGS)):
        with tempfile.TemporaryDirectory() as name:
            document = _model(number)
            _write(Path(name), document, {"config.json": "config", "tokenizer.json": "tokenizer"}, "model.safetensors")
            reading.inspect(Path(name), Rules())
    for number in range(2):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "config.json").write_text(json.dumps(CONFIGS[number]), "utf-8")
            _write(folder, _adapter(number), {adapter_files.CONFIG: "lora"}, adapter_files.WEIGHTS)
            given = {each: folder / each for each in adapter_files.NAMES}
            adapter_files.inspect(given, Rules(), config=folder / "config.json")


_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def _true(held: bool, of: object) -> None:
    if not held:
        raise AssertionError(f"taken as {of!r}")


@cache
def _model(number: int) -> dict[str, Any]:
    config = CONFIGS[number]
    reads = {} if architectures.ARCHITECTURES[config["model_type"]].sees else {"tokenizer": TOKENIZER}
    return {"config": config, **reads, **_tensors(dict(architectures.shapes(config)))}


@cache
def _adapter(number: int) -> dict[str, Any]:
    lora = LORA if number == 0 else {**LORA, "target_modules": ["c_attn"]}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in architectures.shapes(CONFIGS[number]).items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in lora["target_modules"] and name != layer:
            rows, columns = shape if number == 0 else shape[::-1]
            shapes[f"base_model.model.{layer}.lora_A.weight"] = (2, columns)
            shapes[f"base_model.model.{layer}.lora_B.weight"] = (rows, 2)
    return {"lora": lora, **_tensors(shapes)}


def _tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """A safetensors header of float32 tensors, and how many bytes of them follow."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return {"header": header, "bytes": at}


def _write(folder: Path, document: dict[str, Any], texts: dict[str, str], weights: str) -> None:
    """The files that a document stands for; a part that was dropped is a file that is missing."""
    for name, part in texts.items():
        if part in document:
            (folder / name).write_bytes(json.dumps(document[part]).encode("utf-8", "surrogatepass"))
    if "header" in document:
        header = json.dumps(document["header"]).encode("utf-8", "surrogatepass")
        size = document.get("bytes")
        size = min(size, 1 << 16) if type(size) is int and size >= 0 else 0
        (folder / weights).write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
