"""What is compared with lm-evaluation-harness: models, tokenizers and items that are the same on every machine.

Run as a program where the harness is installed (`pip install lm-eval==0.4.13`), it writes its numbers to tests/vectors/lm-eval.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from acclimate_competitions.definition import Task

VECTORS = Path(__file__).parent.parent / "vectors" / "lm-eval.json"
LENGTH = 40
"""Tokens that a model reads; longer prompts are cut from the left."""

MERGES = (
    "Ġ A", "Ġ B", "Ġ C", "t h", "th e", "Ġ t", "Ġ the", "i n", "a n", "Ġ g", "o o", "Ġg oo", "Ġgoo d", "Ġ b", "Ġb a", "Ġba d", "Ġ v",
    "e r", "Ġv er", "Ġver y", "Ã ¶", "o n", "r e",
)  # fmt: skip

# One token each; several tokens of different number and length, with prefixes in common; letters of many bytes. A prompt ends in the
# blank that the harness calls target_delimiter.
TASKS = (
    Task("single", "choice", "{{ input }} ", ("A", "B", "C"), "accuracy", 1 / 3, tokenize="together"),
    Task("several", "choice", "{{ input }} ", ("good", "very good", "very bad", "neither of these"), "acc_norm", 0.25, tokenize="together"),
    Task("letters", "choice", "{{ input }} ", ("schön", "日本", "naïve 🙂", "plain"), "acc_norm", 0.25, tokenize="together"),
)  # fmt: skip

_TEXTS = (
    "the cat sat on the mat. Answer:",
    "",
    "Größe und Übermut — 日本語のテキスト 🙂",
    "a\nline and another\n",
    "very very long: " + "on and on, " * 20 + "then?",
    "x",
    "<s> begins it",
    "trailing blanks   ",
    "the thing in the barn",
    "good or bad in the end",
)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
    },
    "gpt2": {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24},
    "gpt_neox": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": LENGTH, "rotary_pct": 0.5,
    },
}  # fmt: skip
BEGINNINGS = {"llama": "added", "gpt2": "not added", "gpt_neox": "added"}
"""Whether the tokenizer's own post-processor puts its beginning-of-text token before a text."""


def rows(task: Task) -> list[dict[str, str]]:
    """A task's items: example, input, target."""
    texts = [*_TEXTS, *(f"{number} {text}" for number, text in enumerate(_TEXTS[:2] + _TEXTS[4:]))]
    return [
        {"example": f"{task.name}-{number}", "input": text, "target": task.choices[number * 7 % len(task.choices)]}
        for number, text in enumerate(texts)
    ]


def write_tokenizer(path: Path, *, beginning: str) -> int:
    """A tokenizer of bytes with a few merges, as GPT-2's; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    vocabulary = {word: number for number, word in enumerate(["<s>", *words])}
    tokenizer = Tokenizer(BPE(vocabulary, [tuple(merge.split(" ")) for merge in MERGES]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    if beginning == "added":
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 0)])
    tokenizer.save(str(path))
    return len(vocabulary)


def write_model(folder: Path, architecture: str) -> Path:
    """A model whose weights are exact binary fractions, so that they are the same everywhere."""
    import torch

    from acclimate_runners import architectures, network

    folder.mkdir(parents=True)
    size = write_tokenizer(folder / "tokenizer.json", beginning=BEGINNINGS[architecture])
    kind = architectures.ARCHITECTURES[architecture]
    config = {
        "model_type": architecture,
        "architectures": [kind.model_class],
        "vocab_size": size,
        **MODELS[architecture],
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    weights = {}
    for number, (name, shape) in enumerate(sorted(architectures.shapes(config).items())):
        draws = np.random.PCG64([11, number]).random_raw(int(np.prod(shape))) >> np.uint64(56)
        gain = np.float32(1 if len(shape) == 1 and name.endswith("weight") else 0)
        weights[name] = torch.from_numpy(((draws.astype(np.float32) - 127.5) / 256).reshape(shape) + gain)
    network.write_weights(weights, folder / "model.safetensors")
    return folder


# ---- the harness's side ---------------------------------------------------------------------------------------------


def measured(folder: Path, work: Path) -> dict[str, Any]:
    """The harness's own numbers of a model: {task: {"acc", "acc_norm", "loglikelihoods": [rows, choices]}}."""
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", pad_token="<s>")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    lm = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, batch_size=4, device="cpu")
    found = {}
    for task in TASKS:
        path = work / f"{task.name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(task)), "utf-8")
        made = ConfigurableTask(
            config={
                "task": task.name,
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(path)}},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{input}}",
                "doc_to_target": "target",
                "doc_to_choice": list(task.choices),
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            }
        )
        done = lm_eval.simple_evaluate(model=lm, tasks=[made], log_samples=True, bootstrap_iters=0)
        samples = sorted(done["samples"][task.name], key=lambda sample: sample["doc_id"])
        found[task.name] = {
            **{name: done["results"][task.name][f"{name},none"] for name in ("acc", "acc_norm")},
            "loglikelihoods": [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples],
        }
    return found


def main(work: Path) -> None:
    """Write the vectors."""
    from importlib.metadata import version

    numbers = {name: measured(write_model(work / name, name), work) for name in MODELS}
    source = {name: version(name) for name in ("lm_eval", "transformers", "torch", "tokenizers")}
    about = "lm_eval.simple_evaluate on the models and items of tests/journeys/harness.py, which is the program that wrote this"
    text = json.dumps({"source": source, "about": about, "models": numbers}, indent=1)
    VECTORS.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
