"""A tiny competition and tiny models for it, in the wire formats, without torch: what a test can prepare in a second."""

import json
import random
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors.numpy import save_file

from acclimate_competitions import definition, tables
from acclimate_competitions.definition import Competition
from acclimate_runners import architectures
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.jobs import Limits, ModelFiles, PrepareJob, TaskData

TASKS = {"tint": ("red", "green", "blue"), "size": ("small", "large")}
WORDS = ["<pad>", "<bos>", "<unk>", *(f"m{i}" for i in range(8)), *TASKS["tint"], *TASKS["size"]]

DEFINITION = """\
schema = 1
slug = "marbles"
title = "Marbles in two respects"
licence = "CC0-1.0"
contact = "organizers@example.org"
data_is_public = true

[round]
name = "tiny"
grace = "0s"
objection_window = "0s"
publish = "manual"
holdout_after = "public"
audits = 0

[custody]
threshold = 2
custodians = ["custodian-a", "custodian-b", "custodian-c"]

[submission]
kinds = ["hf-causal-lm"]
architectures = ["llama"]
max_parameters = 1_000_000
max_bytes = 20_000_000
per_entrant = { total = 5, per_day = 5, day = "UTC" }
weights_after = ["publish", "auditor", "delete"]

[[tasks]]
name = "tint"
kind = "choice"
prompt = "{{ input }}"
choices = ["red", "green", "blue"]
metric = "accuracy"
chance = 0.333

[[tasks]]
name = "size"
kind = "choice"
prompt = "{{ input }}"
choices = ["small", "large"]
metric = "accuracy"
chance = 0.5

[preparation]
method = "full"
epochs = 2
global_batch = 8
max_length = 8
optimizer = { name = "adamw", beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01 }
schedule = { name = "linear", warmup_steps = 2, final = 0.1 }
clip = 1.0
lr_grid = [2e-2]
selection = { metric = "nll", seed = 0, candidates = ["base", "last"] }
seeds = [11, 12, 13]
loss = "completion"
dtype = "float32"
determinism = "D1"
threads = 1
diverged = "base"

[ranking]
aggregate = "mean"
missing = "worst"
ties = { method = "shared", tolerance = 0.0 }
interval = { kind = "simultaneous", level = 0.95, draws = 200, seed = 1 }
cluster = "cluster"
baselines = ["majority"]

[compute]
hardware = "cpu"
max_gpu_hours = 0
order_seed = "from-log"

[isolation]
memory = "2GiB"
wall = "5m"

[logs]
entrants_see = "tail:200"
"""


def competition(folder: Path) -> Competition:
    """Write a built competition: definition, tokenizer, splits."""
    draw = random.Random(5)
    (folder / "splits").mkdir(parents=True)
    (folder / "competition.toml").write_text(DEFINITION, "utf-8")
    write_tokenizer(folder / "tokenizer.json")
    # Drawn without repetition: no input stands in two splits, of whichever tasks.
    drawn = iter(draw.sample(list(product(range(8), repeat=3)), 44 * len(TASKS)))
    for task, answers in TASKS.items():
        for split, count in {"preparation": 24, "validation": 8, "holdout": 12}.items():
            marbles = [next(drawn) for _ in range(count)]
            rows = {
                "example": [f"{task}-{split}-{i}" for i in range(count)],
                "input": [" ".join(f"m{m}" for m in marble) + f" m{i % 8}" for i, marble in enumerate(marbles)],
                "target": [answers[sum(marble) % len(answers)] for marble in marbles],
                "cluster": [f"{split}-{i // 2}" for i in range(count)],
            }
            path = folder / "splits" / task / f"{split}.parquet"
            path.parent.mkdir(exist_ok=True)
            tables.write(pa.table(rows), path)
    return definition.load(folder / "competition.toml")


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:3])
    tokenizer.save(str(path))


def model(folder: Path, *, seed: int, width: int = 16, poisoned: bool = False) -> dict[str, Path]:
    """Write a submission of one Llama layer with drawn weights; `poisoned` ones hold a NaN.

    Returns:
        File name -> path.
    """
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(WORDS),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    draw = np.random.default_rng(seed)
    weights = {name: draw.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes(config).items()}
    if poisoned:
        next(iter(weights.values())).flat[0] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder / "tokenizer.json")
    return {path.name: path for path in folder.iterdir()}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    return architectures.shapes(config)


def prepare_job(folder: Path, blobs: FolderBlobs, *, seed: int = 1, wall_seconds: float = 120.0) -> PrepareJob:
    """A preparation of a tiny model for the task tint, with all its inputs in the blobs."""
    built = competition(folder / "competition")
    files = {name: blobs.put(path) for name, path in model(folder / "model", seed=seed).items()}
    splits = {
        name: blobs.put(folder / f"competition/splits/tint/{name}.parquet") for name in ("preparation", "validation")
    }
    return PrepareJob(
        kind="prepare",
        model=ModelFiles(files),
        tasks=(TaskData(built.task("tint"), **splits),),
        recipe=built.preparation,
        limits=Limits(("llama",), 10**6, 10**7, memory=2 << 30, wall_seconds=wall_seconds),
        tokenizer=files["tokenizer.json"],
        stages=(("tint", 11), ("tint", 12)),
    )
