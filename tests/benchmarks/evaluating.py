"""Examples a second of multiple choice on tiny Llamas: each prompt read once, beside a loop over whole sequences in batches and lm-evaluation-harness.

Same process, one thread, same numbers within 1e-4; the harness takes part where it is installed (`pip install lm-eval==0.4.13`).
"""

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from acclimate_competitions.definition import Task
from acclimate_runners import jobs, packing

SIZES = {"1.1M": (128, 4, 352), "5.6M": (256, 6, 704)}
"""Parameters -> width, layers, inner width."""
VOCABULARY, LONGEST, ITEMS, BATCH = 2048, 128, 1000, 64
TASK = Task("t", "choice", "{{ input }}", ("one", "two", "three", "four"), "accuracy", 0.25, tokenize="together")


def write_model(folder: Path, size: str) -> None:
    """A Llama of this size with random weights, and a tokenizer of words."""
    import torch

    from acclimate_runners import network

    width, layers, inner = SIZES[size]
    config = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": inner}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 4, "max_position_embeddings": 256}
    config |= {"tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    torch.manual_seed(1)
    model = network.build(config, max_length=LONGEST)
    network.write_weights(dict(model.named_parameters()), folder / "model.safetensors")
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = ["<s>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 2))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def items() -> tuple[Task, list[dict[str, str]]]:
    """A task of four answers of one to four words, and prompts of 20 to 100."""
    import dataclasses

    draw = np.random.default_rng(1)

    def words(count: int) -> str:
        return " ".join(f"w{number}" for number in draw.integers(0, VOCABULARY - 2, count))

    task = dataclasses.replace(TASK, choices=tuple(" " + words(count) for count in (1, 2, 3, 4)))
    return task, [{"example": str(n), "input": words(int(draw.integers(20, 101)))} for n in range(ITEMS)]


def naive(model: Any, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    """Whole sequences in batches of a fixed number, as they come, all logits made."""
    import torch

    found = []
    with torch.no_grad():
        for start in range(0, len(pairs), BATCH):
            part = pairs[start : start + BATCH]
            packed = packing.pack([p for p, _ in part], [a for _, a in part], max_length=LONGEST)
            logits = model.model(input_ids=torch.from_numpy(packed.inputs)).logits.log_softmax(-1)
            labels = torch.from_numpy(packed.labels)
            picked = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0]
            found += picked.masked_fill(labels < 0, 0).sum(1).tolist()
    return found


def harness(folder: Path, model: Any, task: Task, rows: list[dict[str, str]]) -> tuple[float, list[float]] | None:
    """The harness's seconds and log-likelihoods; None where it is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        return None
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<s>")
    lm = HFLM(pretrained=model.model, tokenizer=tokenizer, batch_size=BATCH, max_length=LONGEST, device="cpu")
    asked = [
        Instance("loglikelihood", {}, (row["input"], choice), number, ("t", number, 1))
        for number, row in enumerate(rows)
        for choice in task.choices
    ]
    seconds, found = timed(lambda: [pair[0] for pair in lm.loglikelihood(asked, disable_tqdm=True)])
    return seconds, found


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, as others may use the machine; one thread's are the clock's where it is alone."""
    began = time.process_time()
    found = do()
    return time.process_time() - began, found


def measure(folder: Path) -> list[tuple[str, float]]:
    """Examples a CPU second of each way."""
    from acclimate_runners import evaluation, network

    network.be_deterministic(1)
    rows_: list[tuple[str, float]] = []
    task, rows = items()
    limits = jobs.Limits(("llama",), 10**8, 10**9, memory=2**33, wall_seconds=600)
    for size in SIZES:
        where = folder / size
        write_model(where, size)
        model = network.load({path.name: path for path in where.iterdir()}, limits, max_length=LONGEST)
        tokenizer = packing.load_tokenizer(where / "tokenizer.json")

        def ours(model: Any = model, tokenizer: Any = tokenizer) -> Any:
            asked = evaluation.Questions(tokenizer, task, rows, model=model, max_length=LONGEST)
            return asked.loglikelihoods(model)

        def loop(model: Any = model, tokenizer: Any = tokenizer) -> Any:
            prompts, answers = packing.asked(tokenizer, task, rows)
            return naive(model, [(p, a) for p, row in zip(prompts, answers, strict=True) for a in row])

        seconds, found = timed(ours)
        slow, expected = timed(loop)
        np.testing.assert_allclose(np.ravel(found), expected, atol=1e-4)
        rows_ += [(f"{size} parameters", ITEMS / seconds), (f"{size}, naive loop in batches", ITEMS / slow)]
        theirs = harness(where, model, task, rows)
        if theirs:
            np.testing.assert_allclose(np.ravel(found), theirs[1], atol=1e-4)
            rows_.append((f"{size}, lm-evaluation-harness", ITEMS / theirs[0]))
    return rows_


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, rate in measure(Path(temporary)):
            sys.stdout.write(f"{name}: {rate:.0f} examples/s\n")
