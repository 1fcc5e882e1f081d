"""What is compared with lm-evaluation-harness and TRL: models, tokenizers and items that are the same on every machine.

Run as a program where these are installed (`pip install lm-eval==0.4.13 trl==1.16.0`), it writes their numbers to tests/vectors/lm-eval.json,
lm-eval-written.json and trl.json: `python harness.py FOLDER lm-eval`, or `written`, or `trl`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from acclimate_competitions.definition import Task
from acclimate_competitions.recipe import Optimizer, Recipe, Schedule, Selection

VECTORS = Path(__file__).parent.parent / "vectors" / "lm-eval.json"
LOSSES = VECTORS.with_name("trl.json")
WRITTEN = VECTORS.with_name("lm-eval-written.json")
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
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip
BEGINNINGS = {"llama": "added", "gpt2": "not added", "gpt_neox": "added", "mamba": "not added"}
"""Whether the tokenizer's own post-processor puts its beginning-of-text token before a text."""


def rows(task: Task) -> list[dict[str, str]]:
    """A task's items: example, input, target."""
    texts = [*_TEXTS, *(f"{number} {text}" for number, text in enumerate(_TEXTS[:2] + _TEXTS[4:]))]
    return [
        {"example": f"{task.name}-{number}", "input": text, "target": task.choices[number * 7 % len(task.choices)]}
        for number, text in enumerate(texts)
    ]


_FROM = {"prompt": "{{ input }}", "choices": (), "metric": "exact_match", "chance": 0.0, "tokenize": "together"}
WRITERS = ("llama", "gpt2", "gpt_neox")
"""Architectures whose texts are compared; the others are compared with themselves, one text at a time."""
WRITING = {
    # A stop string of one token, of several, of half a token's text, of many bytes; and one that is never met.
    "letter": Task("letter", "generate", **_FROM, stop=("$",), max_tokens=12),
    "several": Task("several", "generate", **_FROM, stop=("m$", " goo", "$E", "#\x14"), max_tokens=16),
    "half": Task("half", "generate", **_FROM, stop=("h", "oo", "O"), max_tokens=16),
    "bytes": Task("bytes", "generate", **_FROM, stop=("日", "🙂"), max_tokens=8),
    "never": Task("never", "generate", **_FROM, stop=("no such text",), max_tokens=20),
}
READING = Task("texts", "perplexity", "{{ input }}", (), "bits_per_byte", 8.0, tokenize="together")


def begun() -> list[dict[str, str]]:
    """Prompts to write on from; the long one is cut from the left."""
    texts_ = [text for text in _TEXTS if text] + ["ö", "日本", "A B C", "then", "in the barn", "very good", "a" * 60]
    return [{"example": str(number), "input": text} for number, text in enumerate(texts_)]


def texts() -> list[dict[str, str]]:
    """Texts to read as a whole: of one token, of a window, and of several windows with a rest."""
    found = [text for text in _TEXTS if text] + ["日本" * 30, "a" * LENGTH, "a" * (LENGTH - 1), "the " * 100 + "end"]
    return [{"example": str(number), "input": text} for number, text in enumerate(found)]


LEARNT = TASKS[1]
RATE, ROWS = 3e-3, 80
TRAINED = {"llama": {}, "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
"""Architectures whose losses are compared; dropout draws what another program can't draw again."""

RECIPE = Recipe(
    method="full",
    epochs=5,
    global_batch=8,
    max_length=LENGTH + 1,
    optimizer=Optimizer("adamw", 0.9, 0.999, 1e-8, 0.01),
    schedule=Schedule("linear", 5, 0.1),
    clip=1.0,
    lr_grid=(RATE,),
    selection=Selection("nll", 0, ("last",)),
    seeds=(11, 12, 13),
    loss="completion",
    dtype="float32",
    determinism="D1",
    threads=1,
    diverged="base",
)


def lessons() -> list[dict[str, str]]:
    """Rows of LEARNT, of different length, whose target can be learned."""
    names = ("cat", "barn", "thing", "sea", "garden", "hut")
    found = []
    for number in range(ROWS):
        input_ = f"the {names[number % 6]} " * (1 + number % 2) + f"is {number}:"
        found.append({"example": f"l{number}", "input": input_, "target": LEARNT.choices[number % 6 % 4]})
    return found


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


def write_model(folder: Path, architecture: str, **changes: Any) -> Path:
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
        **changes,
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


def written(folder: Path) -> dict[str, Any]:
    """What the harness has a model write, {"texts": {task: [text]}}, and the log-likelihoods of whole texts, {"rolling": [number]}."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    names = {"bos_token": "<s>", "pad_token": "<s>", "eos_token": "<s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    # It looks for a beginning of text in the first prompt of a batch only.
    lm = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, batch_size=1, device="cpu")
    found = {}
    for name, task in WRITING.items():
        how = {"until": list(task.stop), "max_gen_toks": task.max_tokens, "do_sample": False}
        asked = [Instance("generate_until", row, (row["input"], dict(how)), n) for n, row in enumerate(begun())]
        found[name] = lm.generate_until(asked, disable_tqdm=True)
    asked = [Instance("loglikelihood_rolling", row, (row["input"],), n) for n, row in enumerate(texts())]
    return {"texts": found, "rolling": [float(value) for value in lm.loglikelihood_rolling(asked, disable_tqdm=True)]}


def trained(folder: Path, work: Path) -> list[float]:
    """The losses of TRL's SFTTrainer, step by step: its loop, loss and clipping, our tokens, order, AdamW and schedule."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from acclimate_runners import packing, preparation

    class Ordered(SFTTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset or self.train_dataset)

    plain = packing.load_tokenizer(folder / "tokenizer.json")
    prompts, answers = packing.taught(plain, LEARNT, lessons())
    total = packing.steps(ROWS, epochs=RECIPE.epochs, global_batch=RECIPE.global_batch)
    order = [
        int(row)
        for step in range(total)
        for row in packing.batch_of_step(step, rows=ROWS, global_batch=RECIPE.global_batch, seed=11)
    ]
    whole = [(prompts[row] + answers[row])[-RECIPE.max_length :] for row in order]
    # TRL has the model read the last token, too.
    assert max(map(len, whole)) <= LENGTH
    masks = [
        [0] * (len(ids) - len(answers[row])) + [1] * len(answers[row]) for row, ids in zip(order, whole, strict=True)
    ]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    constants = RECIPE.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=RATE,
        betas=(constants.beta1, constants.beta2),
        eps=constants.eps,
        weight_decay=constants.weight_decay,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: preparation.learning_rate(min(done + 1, total), total=total, peak=1.0, schedule=RECIPE.schedule),
    )
    config = SFTConfig(
        output_dir=str(work / "trl"),
        per_device_train_batch_size=RECIPE.global_batch,
        num_train_epochs=1,
        max_grad_norm=RECIPE.clip,
        max_length=None,
        packing=False,
        completion_only_loss=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", pad_token="<s>", eos_token="<s>"
    )
    trainer = Ordered(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": whole, "completion_mask": masks}),
        processing_class=tokenizer,
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(work: Path, which: str) -> None:
    """Write the vectors of lm-eval or trl."""
    from importlib.metadata import version

    names, about = (
        ("transformers", "torch", "tokenizers"),
        "on the models and items of tests/journeys/harness.py, which is the program that wrote this",
    )
    if which == "lm-eval":
        models: dict[str, Any] = {name: measured(write_model(work / name, name), work) for name in MODELS}
        path, call, names = VECTORS, "lm_eval.simple_evaluate", ("lm_eval", *names)
    elif which == "written":
        models = {name: written(write_model(work / name, name, eos_token_id=0)) for name in WRITERS}
        path, call, names = WRITTEN, "HFLM.generate_until and loglikelihood_rolling", ("lm_eval", *names)
    else:
        models = {name: trained(write_model(work / name, name, **more), work) for name, more in TRAINED.items()}
        path, call, names = LOSSES, "trl.SFTTrainer's losses, step by step,", ("trl", *names)
    text = json.dumps(
        {"source": {n: version(n) for n in names}, "about": f"{call} {about}", "models": models}, indent=1
    )
    path.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
