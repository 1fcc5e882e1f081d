"""Examples a second of multiple choice on tiny Llamas: each prompt read once, beside a loop over whole sequences in batches and lm-evaluation-harness.

Same process, one thread, same numbers within 1e-4; medians of five that take turns. Then the commands as a whole, each in a process of
its own, with the same scores. The harness takes part where it is installed (`pip install lm-eval==0.4.13`).
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tiny

from acclimate_competitions import tables
from acclimate_competitions.definition import Task
from acclimate_runners import jobs, packing

SIZES = {"1.1M": (128, 4, 352), "5.6M": (256, 6, 704)}
"""Parameters -> width, layers, inner width."""
VOCABULARY, LONGEST, ITEMS, BATCH, TRIES = 2048, 128, 1000, 64, 5
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_PR_SET_CHILD_SUBREAPER = 36
TASK = Task("t", "choice", "{{ input }}", ("one", "two", "three", "four"), "accuracy", 0.25, tokenize="together")


def write_model(folder: Path, size: str) -> None:
    """A Llama of this size with random weights, and a tokenizer of words."""
    import torch

    from acclimate_runners import building, network

    width, layers, inner = SIZES[size]
    config = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": inner}
    config |= {"num_hidden_layers": layers, "num_attention_heads": 4, "max_position_embeddings": 256}
    config |= {"tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    torch.manual_seed(1)
    model = building.build(config, max_length=LONGEST)
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


def measure(folder: Path, *, tries: int = TRIES) -> list[tuple[str, float]]:
    """Examples a CPU second of each way, medians."""
    from acclimate_runners import computing, evaluation, network

    computing.be_deterministic(1)
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
            return asked.answers(model).loglikelihoods.to_pylist()

        def loop(model: Any = model, tokenizer: Any = tokenizer) -> Any:
            prompts, answers = packing.asked(tokenizer, task, rows)
            return naive(model, [(p, a) for p, row in zip(prompts, answers, strict=True) for a in row])

        slow, expected = timed(loop)
        own, others = [], []
        for _ in range(tries):
            seconds, found = timed(ours)
            np.testing.assert_allclose(np.ravel(found), expected, atol=1e-4)
            own.append(seconds)
            if theirs := harness(where, model, task, rows):
                np.testing.assert_allclose(np.ravel(found), theirs[1], atol=1e-4)
                others.append(theirs[0])
        rows_.append((f"{size} parameters", ITEMS / statistics.median(own)))
        rows_.append((f"{size}, naive loop in batches, once", ITEMS / slow))
        if others:
            rows_.append((f"{size}, lm-evaluation-harness", ITEMS / statistics.median(others)))
        rows_ += [(f"{size}, {name}", ITEMS / seconds) for name, seconds in commands(folder, where, tries=tries)]
    return rows_


def commands(folder: Path, model: Path, *, tries: int) -> list[tuple[str, float]]:
    """Median CPU seconds of both commands as a whole, of processes of their own, on the same items and with the same score."""
    task, rows = items()
    rows = [{**row, "target": task.choices[number * 7 % 4]} for number, row in enumerate(rows)]
    competition, work = _competition(folder / f"competition-{model.name}", task, rows), folder / "harness"
    ours = [sys.executable, "-m", "acclimate", "evaluate", str(model), "--competition", str(competition), "--json"]
    ways = {"`acclimate evaluate` with its start": ours}
    if importlib.util.find_spec("lm_eval") is not None:
        arguments = f"pretrained={_as_the_harness_reads(model, work / model.name)},dtype=float32,max_length={LONGEST}"
        told = {
            "--model": "hf",
            "--model_args": arguments,
            "--include_path": str(_task(work, task, rows)),
            "--tasks": "t",
        }
        told |= {"--batch_size": str(BATCH), "--device": "cpu", "--output_path": str(work / "out")}
        ways["`lm_eval` with its start"] = [
            sys.executable,
            "-m",
            "lm_eval",
            "run",
            *(w for pair in told.items() for w in pair),
        ]
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(tries):
        scores = []
        for name, command in ways.items():
            seconds, said = _processor_seconds(command)
            found[name].append(seconds)
            scores.append(_accuracy(said, work))
        assert len(set(scores)) == 1, scores
    return [(name, statistics.median(each)) for name, each in found.items()]


def _processor_seconds(command: list[str]) -> tuple[float, str]:
    """Seconds of the processor of a command and of all processes that come from it; and its output."""
    # Those that lose their parent become this process's children, or the time they took would be nobody's.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | ONE_THREAD
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, stdin=subprocess.DEVNULL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ran.stdout


def _accuracy(said: str, work: Path) -> float:
    """What a command found: ours prints JSON, the harness writes it."""
    if said.startswith("{"):
        return float(json.loads(said)["tasks"]["t"]["accuracy"])
    newest = max(work.glob("out/**/results*.json"), key=lambda path: path.stat().st_mtime)
    return float(json.loads(newest.read_text("utf-8"))["results"]["t"]["acc,none"])


def _competition(folder: Path, task: Task, rows: list[dict[str, str]]) -> Path:
    """A competition's folder whose validation split has these rows."""
    text = tiny.DEFINITION[: tiny.DEFINITION.index("[[tasks]]")]
    text += f'[[tasks]]\nname = "t"\nkind = "choice"\nprompt = "{task.prompt}"\nchoices = {json.dumps(task.choices)}\n'
    text += 'metric = "accuracy"\nchance = 0.25\ntokenize = "together"\n\n'
    text += tiny.DEFINITION[tiny.DEFINITION.index("[preparation]") :].replace(
        "max_length = 8", f"max_length = {LONGEST}"
    )
    text = text.replace("1_000_000", "100_000_000").replace("20_000_000", "200_000_000")
    path = folder / "splits" / "t" / "validation.parquet"
    path.parent.mkdir(parents=True)
    (folder / "competition.toml").write_text(text.replace('cluster = "cluster"\n', ""), "utf-8")
    tables.write(pa.Table.from_pylist(rows), path)
    return folder


def _as_the_harness_reads(model: Path, folder: Path) -> Path:
    """The model with the files that name its tokenizer's special tokens."""
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model, folder)
    PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), bos_token="<s>", eos_token="<s>", pad_token="<s>"
    ).save_pretrained(folder)
    return folder


def _task(folder: Path, task: Task, rows: list[dict[str, str]]) -> Path:
    """The task as the harness has it; its folder."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    made = {
        "task": "t",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{input}}",
        "doc_to_target": "target",
        "doc_to_choice": list(task.choices),
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / "t.yaml").write_text(json.dumps(made), "utf-8")
    return folder / "tasks"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name, rate in measure(Path(temporary), tries=int(sys.argv[1]) if sys.argv[1:] else TRIES):
            sys.stdout.write(f"{name}: {rate:.0f} examples/s\n")
