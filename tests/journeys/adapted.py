"""A tiny competition with a base, and what stands on it: adapters in peft's layout, written without peft; and classifiers."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tiny
from safetensors.numpy import load_file, save_file

from acclimate_competitions import definition, digests, tables
from acclimate_competitions.definition import Competition

BASE = "small"
TARGETS = ("q_proj", "v_proj", "down_proj")


def with_base(folder: Path) -> Competition:
    """Lay a base into a built tiny competition, and have its definition name it."""
    paths = tiny.model(folder / "bases" / BASE, seed=7)
    digest = digests.of_json({name: digests.of_file(path) for name, path in paths.items()})
    toml = folder / "competition.toml"
    kinds = f'kinds = ["hf-causal-lm", "lora-adapter"]\nbases = {{ {BASE} = "{digest}" }}'
    text = toml.read_text("utf-8").replace('kinds = ["hf-causal-lm"]', kinds)
    toml.write_text(text.replace('architectures = ["llama"]', 'architectures = ["llama", "mamba"]'), "utf-8")
    return definition.load(toml)


def adapter(folder: Path, *, seed: int, rank: int = 4, **changes: Any) -> Path:
    """Write an adapter on the base, with drawn weights."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": f"round-files/bases/{BASE}",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(TARGETS),
        "lora_dropout": 0.05,
        "modules_to_save": None,
        **changes,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    draw, weights = np.random.default_rng(seed), dict[str, Any]()
    for layer, inputs, outputs in (
        ("self_attn.q_proj", 16, 16),
        ("self_attn.v_proj", 16, 16),
        ("mlp.down_proj", 32, 16),
    ):
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            name = f"base_model.model.model.layers.0.{layer}.lora_{part}.weight"
            weights[name] = draw.normal(0, 0.1, shape).astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def mamba(folder: Path, *, seed: int) -> Path:
    """Write a submission of two Mamba layers with drawn weights."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "mamba",
        "vocab_size": len(tiny.WORDS),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "state_size": 4,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    draw = np.random.default_rng(seed)
    weights = {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in tiny.shapes(config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.write_tokenizer(folder / "tokenizer.json")
    return folder


def with_labels(folder: Path) -> Competition:
    """Have the tasks of a built tiny competition be of kind classify, and classifiers be welcome."""
    toml = folder / "competition.toml"
    text = toml.read_text("utf-8").replace('kind = "choice"', 'kind = "classify"')
    toml.write_text(
        text.replace('kinds = ["hf-causal-lm"', 'kinds = ["hf-causal-lm", "hf-sequence-classifier"'), "utf-8"
    )
    text = toml.read_text("utf-8").replace('architectures = ["llama"', 'architectures = ["bert", "llama"')
    toml.write_text(text, "utf-8")
    return definition.load(toml)


def with_images(folder: Path) -> Competition:
    """Have a built tiny competition ask of images, one for each text, and have image classifiers answer."""
    for path in (folder / "splits").glob("*/*.parquet"):
        table = tables.read(path)
        texts = [
            base64.b64encode(hashlib.shake_256(row["input"].encode()).digest(64)).decode() for row in table.to_pylist()
        ]
        tables.write(table.set_column(table.column_names.index("input"), "input", pa.array(texts)), path)
    (folder / "tokenizer.json").unlink()
    toml = folder / "competition.toml"
    text = toml.read_text("utf-8").replace('kind = "choice"', 'kind = "classify"\nimage = "8x8x1"')
    text = text.replace('kinds = ["hf-causal-lm"]', 'kinds = ["hf-image-classifier"]').replace('["llama"]', '["vit"]')
    toml.write_text(text.replace("max_length = 8", "max_length = 65"), "utf-8")
    return definition.load(toml)


def image_classifier(folder: Path, *, seed: int, labels: tuple[str, ...]) -> Path:
    """Write a submission of a ViT of one layer with drawn weights."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 1,
        "id2label": {str(number): label for number, label in enumerate(labels)},
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    draw = np.random.default_rng(seed)
    weights = {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in tiny.shapes(config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_shards(folder: Path) -> Path:
    """Put a folder's weights into two shards and their index, as a library saves large models."""
    whole = folder / "model.safetensors"
    weights, where = load_file(whole), {}
    for number in range(2):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        part = {key: weights[key] for key in sorted(weights)[number::2]}
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    (folder / f"{whole.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}), "utf-8")
    whole.unlink()
    return folder


def encoder(folder: Path, *, seed: int, labels: tuple[str, ...]) -> Path:
    """Write a submission of a BERT of two layers with drawn weights that tells labels apart."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "vocab_size": len(tiny.WORDS),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "id2label": {str(number): label for number, label in enumerate(labels)},
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    draw = np.random.default_rng(seed)
    weights = {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in tiny.shapes(config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tiny.write_tokenizer(folder / "tokenizer.json")
    return folder


def classifier(folder: Path, *, seed: int, labels: tuple[str, ...]) -> Path:
    """Write a submission of a Llama with drawn weights that tells labels apart."""
    tiny.model(folder, seed=seed)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"architectures": ["LlamaForSequenceClassification"]}
    config |= {"id2label": {str(number): label for number, label in enumerate(labels)}}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    draw = np.random.default_rng(seed)
    weights = {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in tiny.shapes(config).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
