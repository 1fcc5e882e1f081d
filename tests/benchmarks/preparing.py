"""What a preparation costs beside plain loops: the same steps by hand, in time and memory, and texts of mixed length by the Trainer.

Medians of five that take turns in one process, one thread, in processor time and by the clock; memory is the most that a process of its
own held. The plain loop is what one would write: transformers' model as its class makes it, logits of all tokens, a fused AdamW. Every
token is an answer's, so that the preparation gains nothing by leaving out logits that nobody asks for.
"""

import dataclasses
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluating
import harness
import numpy as np
import pyarrow as pa

from acclimate_competitions import digests, tables
from acclimate_competitions.definition import Task
from acclimate_competitions.recipe import Recipe
from acclimate_runners import jobs, packing
from acclimate_runners.packing import Packed

TRIES = 5
ROWS, LENGTH = 32, 64
STEPS = {"1.1M": 16, "5.6M": 6}
MIXED, MIXED_BATCH, MIXED_LENGTH = 64, 16, 120
RATE = 1e-3
LIMITS = jobs.Limits(("llama",), 10**8, 10**9, memory=2**34, wall_seconds=3600)


def recipe(**changes: Any) -> Recipe:
    """A recipe of one epoch and one rate."""
    changes = {"epochs": 1, "global_batch": ROWS, "max_length": LENGTH + 1, "lr_grid": (RATE,), "threads": 1, **changes}
    return dataclasses.replace(harness.RECIPE, **changes)


def texts(count: int, *, longest: int, mixed: bool) -> Packed:
    """Drawn tokens, all of them answers but the first."""
    draw = np.random.default_rng(2)
    lengths = np.clip(draw.lognormal(3.2, 0.8, count).astype(int), 6, longest) if mixed else [longest] * count
    answers = [draw.integers(2, evaluating.VOCABULARY, length).tolist() for length in lengths]
    return packing.pack([[1]] * count, answers, max_length=longest + 1)


def loaded(folder: Path) -> Any:
    """The model as a preparation has it."""
    from acclimate_runners import network

    return network.load({path.name: path for path in folder.iterdir()}, LIMITS, max_length=LENGTH + 1)


def plain_model(folder: Path) -> Any:
    """The model as transformers makes it."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**json.loads((folder / "config.json").read_text("utf-8"))))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model


def plain_loop(model: Any, rows: Packed, *, steps: int) -> float:
    """The preparation's steps by hand; the last loss."""
    import torch
    from torch.nn import functional

    made, weights = recipe(), list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=made.optimizer.weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    inputs, labels = torch.from_numpy(rows.inputs), torch.from_numpy(rows.labels)
    model.train()
    found = 0.0
    for step in range(steps):
        part = torch.from_numpy(packing.batch_of_step(step, rows=len(rows), global_batch=ROWS, seed=11))
        logits = model(input_ids=inputs[part], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[part].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, made.clip)
        optimizer.step()
        schedule.step()
        found = loss.item()
    return found


def timed(do: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the processor and of the clock."""
    began, processor = time.perf_counter(), time.process_time()
    do()
    return time.process_time() - processor, time.perf_counter() - began


def taking_turns(ways: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
    """Median seconds of the processor and of the clock of each way, after one that warms up."""
    for do in ways.values():
        do()
    found = [{name: timed(do) for name, do in ways.items()} for _ in range(TRIES)]
    return {name: tuple(statistics.median(each[name][i] for each in found) for i in (0, 1)) for name in ways}  # type: ignore[misc]


def steps_of(folder: Path, size: str) -> dict[str, tuple[float, float]]:
    """Tokens a second of the processor and of the clock: a preparation's fit, and the plain loop."""
    import torch

    from acclimate_runners import preparation
    from acclimate_runners.checkpoints import Checkpoints
    from acclimate_runners.words import Words

    rows, steps = texts(ROWS * STEPS[size], longest=LENGTH, mixed=False), STEPS[size]
    ours, plain = loaded(folder), plain_model(folder)
    start, words = ours.copy_weights(), Words(lambda *told: None)
    ours.on_batch = words.again
    checkpoints = Checkpoints(folder.parent / "checkpoints", identity={}, seconds=60.0)

    def prepare() -> None:
        torch.use_deterministic_algorithms(True)
        ours.set_weights(start)
        data, fitting = (rows, _first(rows)), checkpoints.fitting("fit")
        on_step = lambda step: words.now(step, steps, "fit")  # noqa: E731
        preparation.fit(ours, data, recipe(), lr=RATE, seed=11, on_step=on_step, fitting=fitting)

    def loop() -> None:
        torch.use_deterministic_algorithms(False)
        plain_loop(plain, rows, steps=steps)

    seconds = taking_turns({"preparation": prepare, "plain loop": loop})
    return {name: (rows.inputs.size / each[0], rows.inputs.size / each[1]) for name, each in seconds.items()}


def mixed_of(folder: Path, work: Path) -> dict[str, tuple[float, float]]:
    """Tokens of texts of mixed length, padding not counted, a second: packed, not packed, and by transformers' Trainer, which pads."""
    import torch
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from acclimate_runners import preparation

    rows = texts(MIXED, longest=MIXED_LENGTH, mixed=True)
    ours, plain = loaded(folder), plain_model(folder)
    start = ours.copy_weights()
    data = [
        {"input_ids": rows.inputs[i, :n].tolist(), "labels": rows.labels[i, :n].tolist()}
        for i, n in enumerate(rows.lengths)
    ]

    def padded(items: list[dict[str, list[int]]]) -> dict[str, Any]:
        longest = max(len(item["input_ids"]) for item in items)
        fill = {"input_ids": 0, "labels": packing.NOT_SCORED, "attention_mask": 0}
        whole = [{**item, "attention_mask": [1] * len(item["input_ids"])} for item in items]
        return {
            name: torch.tensor([item[name] + [empty] * (longest - len(item[name])) for item in whole])
            for name, empty in fill.items()
        }

    def prepare(packed: str) -> None:
        torch.use_deterministic_algorithms(True)
        ours.set_weights(start)
        made = recipe(packing=bool(packed), global_batch=MIXED_BATCH, max_length=MIXED_LENGTH + 1)
        preparation.fit(ours, (rows, _first(rows)), made, lr=RATE, seed=11)

    def trainer() -> None:
        torch.use_deterministic_algorithms(False)
        arguments = TrainingArguments(
            output_dir=str(work),
            per_device_train_batch_size=MIXED_BATCH,
            num_train_epochs=1,
            learning_rate=RATE,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        made = Trainer(model=plain, args=arguments, train_dataset=data, data_collator=padded)
        # It would say each time how long it took.
        made.remove_callback(PrinterCallback)
        made.train()

    ways = {"packed": lambda: prepare("packed"), "not packed": lambda: prepare(""), "Trainer": trainer}
    seconds, tokens = taking_turns(ways), int(rows.lengths.sum())
    return {name: (tokens / each[0], tokens / each[1]) for name, each in seconds.items()}


def _first(rows: Packed) -> Packed:
    return Packed(rows.inputs[:1], rows.labels[:1], rows.lengths[:1])


def job_of(folder: Path, model: Path) -> None:
    """A preparation with its selection, one seed, on rows whose answers are all but their first words; written to a folder."""
    draw = np.random.default_rng(3)

    def words(count: int) -> str:
        return " ".join(f"w{number}" for number in draw.integers(0, evaluating.VOCABULARY - 2, count))

    choices = tuple(words(LENGTH - 2) for _ in range(4))
    task = Task("t", "choice", "{{ input }}", choices, "accuracy", 0.25)

    def put(path: Path) -> str:
        digest = digests.of_file(path)
        (folder / "inputs" / digest.removeprefix("sha256:")).write_bytes(path.read_bytes())
        return digest

    def split(name: str, count: int) -> str:
        rows = [{"example": f"{name}-{i}", "input": words(2), "target": choices[i % 4]} for i in range(count)]
        tables.write(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        return put(folder / f"{name}.parquet")

    (folder / "inputs").mkdir(parents=True)
    data = jobs.TaskData(task, split("preparation", 4 * ROWS), split("validation", 4 * ROWS))
    files = jobs.ModelFiles({path.name: put(path) for path in model.iterdir()})
    job = jobs.PrepareJob("prepare", files, (data,), recipe(), LIMITS, None, stages=(("t", 11),))
    (folder / "job.json").write_text(jobs.to_json(job), "utf-8")


def memory_of(folder: Path, model: Path) -> dict[str, float]:
    """Bytes that a whole preparation's process held at most, and that of the plain loop on rows of the same size; medians."""
    job_of(folder / "job", model)
    bare = [sys.executable, __file__, "plain", str(model)]
    child = [sys.executable, "-m", "acclimate_runners", str(folder / "job")]
    found: dict[str, list[int]] = {"preparation": [], "plain loop": []}
    for _ in range(TRIES):
        subprocess.run(child, check=True, stderr=subprocess.DEVNULL)
        outcome = jobs.read_outcome(folder / "job")
        assert outcome is not None and outcome.status == "done", outcome
        found["preparation"].append(outcome.results["memory"])
        found["plain loop"].append(int(subprocess.run(bare, check=True, capture_output=True, text=True).stdout))
    return {name: float(statistics.median(each)) for name, each in found.items()}


def plain_process(model: Path) -> int:
    """Bytes that this process holds at most, once it has run the plain loop."""
    import torch

    torch.set_num_threads(1)
    plain_loop(plain_model(model), texts(4 * ROWS, longest=LENGTH, mixed=False), steps=4)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    assert peak is not None
    return int(peak[1]) * 1024


def measure(folder: Path) -> list[tuple[str, str]]:
    """What was measured, and its numbers."""
    from acclimate_runners import computing

    computing.be_deterministic(1)
    found: list[tuple[str, str]] = []
    for size in STEPS:
        model = folder / size / "model"
        evaluating.write_model(model, size)
        speed, memory = steps_of(model, size), memory_of(folder / size, model)
        mixed = mixed_of(model, folder / size / "trainer")
        found += _compared(f"{size}, {ROWS} × {LENGTH} tokens", speed, against="plain loop")
        held = {name: f"{each / 2**20:.0f} MiB" for name, each in memory.items()}
        ratio = memory["preparation"] / memory["plain loop"]
        words = f"{held['preparation']}, {held['plain loop']}: {ratio:.2f} ×"
        found.append((f"{size}, memory of a whole preparation, of the plain loop", words))
        found += _compared(f"{size}, texts of mixed length", mixed, against="Trainer")
    return found


def _compared(what: str, rates: dict[str, tuple[float, float]], *, against: str) -> list[tuple[str, str]]:
    base = rates[against]
    return [
        (f"{what}, {name}", f"{each[0]:.0f} ({each[0] / base[0]:.2f} ×), {each[1]:.0f} ({each[1] / base[1]:.2f} ×)")
        for name, each in rates.items()
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["plain"]:
        sys.stdout.write(str(plain_process(Path(sys.argv[2]))))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            for name, words in measure(Path(temporary)):
                sys.stdout.write(f"{name}: {words}\n")
