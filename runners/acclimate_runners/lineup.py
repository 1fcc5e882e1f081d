"""The demo's entrants: tiny Llamas, trained here in seconds from the public rows, so that the demo needs no download.

Seven honest ones of different size and training; each has practised some of the tasks a little, by chance, as real models have.
One weak one crammed a single task. And the untrained baseline. The line-up is chosen to show the effect of preparation: directly
evaluated, a model's score tells how much it practised; prepared, all have practised, and the score tells what it can learn.

An entrant is trained on the images' pixel tokens (next token, the labels left out), and on labels alone in its practice steps, which are
mixed into the second half. It depends on its row of LINEUP and the data only, not on the others or on the number of processes.
"""

import argparse
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from acclimate_competitions import definition, tables
from acclimate_competitions.errors import Refusal
from acclimate_runners import isolation, packing, placing
from acclimate_runners.packing import Packed

HEADS, BATCH, PEAK, WARMUP, FINAL, DECAY, CLIP, SPREAD = 4, 32, 3e-3, 20, 0.1, 0.01, 1.0, 0.05
PRACTICE = (0, 10, 20, 40)
"""Practice steps for each task, of which one number is drawn for each honest entrant and task."""

RELEASED = "2026-11-01"


@dataclass(frozen=True)
class Spec:
    """One entrant.

    Attributes:
        steps: of language modelling.
        seed: of weights, batches and practice.
        practice: whether some steps of each task are drawn.
        cram: steps on one task alone.
        crams: which one, by its number.
        even: steps of each task, where none are drawn and none is crammed.
        architecture: llama | gpt2 | gpt_neox.
    """

    name: str
    title: str
    family: str
    width: int
    layers: int
    steps: int
    seed: int
    practice: bool = True
    cram: int = 0
    crams: int = 0
    even: int = 0
    architecture: str = "llama"

    @property
    def cost(self) -> int:
        """A rough measure of its training time."""
        return (self.steps + self.cram + 70) * self.layers * (self.width + 32)


# Seeds 201 to 209 were taken, of the three series tried, for showing the effect in its usual size: mean tau-b between tasks 0.27
# directly and 0.76 prepared, the crammer first on its task and then fifth. With 1 to 9 it is 0.08 and 0.60, with 101 to 109 0.19 and
# 0.60, the crammer then fifth and fourth.
LINEUP = (
    Spec("alder", "Alder", "broadleaf", 16, 1, 150, 201),
    Spec("birch", "Birch", "broadleaf", 24, 1, 400, 202),
    Spec("cedar", "Cedar", "conifer", 32, 1, 600, 203),
    Spec("elm", "Elm", "broadleaf", 32, 2, 200, 204),
    Spec("fir", "Fir", "conifer", 32, 2, 700, 205),
    Spec("juniper", "Juniper", "conifer", 48, 2, 600, 206),
    Spec("larch", "Larch", "conifer", 64, 2, 900, 207),
    Spec("crammer", "Crammer", "broadleaf", 16, 1, 150, 208, practice=False, cram=800),
    Spec("untrained", "Untrained baseline", "baseline", 32, 2, 0, 209, practice=False),
)

NAMES = tuple(spec.name for spec in LINEUP)
BASELINES = ("untrained",)
CRAMMER = "crammer"


def make(
    out: Path,
    data: Path,
    *,
    processes: int,
    progress: Callable[[int, int, str], None] = lambda ready, total, name: None,
    names: Sequence[str] | None = None,
    specs: Sequence[Spec] = LINEUP,
) -> list[str]:
    """Make what is missing of a line-up.

    Args:
        out: gets <entrant>/{config.json, model.safetensors, tokenizer.json, entrant.json}; entrant.json comes last, so an
            entrant that has it is complete and is left alone.
        data: a built competition's folder: competition.toml, tokenizer.json, splits/<task>/preparation.parquet.
        processes: how many to train at once, one thread each.
        progress: called from this thread with (entrants ready, all, name of the last).
        names: which of the line-up; all of it by default.
        specs: the line-up; the demo's by default.

    Raises:
        Refusal: job_failed, with the end of what the process said; no_space.
    """
    with placing.space(out / "entrant.json"):
        out.mkdir(parents=True, exist_ok=True)
    wanted = [spec for spec in specs if names is None or spec.name in names]
    missing = [spec for spec in wanted if not (out / spec.name / "entrant.json").exists()]
    ready = len(wanted) - len(missing)
    progress(ready, len(wanted), "")
    # Longest first, to the process that has least to do.
    shares: list[list[Spec]] = [[] for _ in range(max(1, min(processes, len(missing))))]
    for spec in sorted(missing, key=lambda spec: -spec.cost):
        min(shares, key=lambda share: sum(s.cost for s in share)).append(spec)
    said: queue.Queue[str] = queue.Queue()
    workers = [_Worker(out, data, share, said) for share in shares if share]
    try:
        while any(worker.running() for worker in workers) or not said.empty():
            try:
                name = said.get(timeout=0.2)
            except queue.Empty:
                continue
            ready += 1
            progress(ready, len(wanted), name)
    finally:
        for worker in workers:
            worker.stop()
    for worker in workers:
        worker.require_success()
    return [spec.name for spec in wanted]


_READY = "ready "


class _Worker:
    """A process of this module, which makes some entrants and says which is ready."""

    def __init__(self, out: Path, data: Path, specs: Sequence[Spec], said: queue.Queue[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "acclimate_runners.lineup", str(out), str(data), *map(_to_json, specs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._said, self._words = said, list[str]()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                if line.startswith(_READY):
                    self._said.put(line.removeprefix(_READY).strip())
                else:
                    self._words = [*self._words[-2:], line.strip()]

    def running(self) -> bool:
        return self._reader.is_alive()

    def stop(self) -> None:
        if self._process.poll() is None and self._reader.is_alive():
            self._process.kill()
        self._process.wait()
        self._reader.join()

    def require_success(self) -> None:
        said = " / ".join(self._words)
        if self._process.returncode == isolation.NO_SPACE:
            hint = "free some space and do the same again; the models that are complete stay"
            raise Refusal("no_space", f"the line-up could not be made: {said}", hint=hint)
        if self._process.returncode != 0:
            raise Refusal("job_failed", f"the line-up could not be made: {said}")


# ---- one entrant, in a process with torch ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Lessons:
    """What an entrant may learn from: texts without labels, and each task's labels."""

    texts: Packed
    tasks: dict[str, Packed]
    vocabulary: int


def read_lessons(data: Path) -> Lessons:
    """The public preparation rows of a built competition as sequences."""
    competition = definition.load(data / "competition.toml")
    tokenizer = packing.load_tokenizer(data / "tokenizer.json")
    texts: list[list[int]] = []
    tasks: dict[str, Packed] = {}
    for task in competition.tasks:
        rows = tables.read(data / "splits" / task.name / "preparation.parquet").to_pylist()
        prompts, answers = packing.prompt_tokens(tokenizer, task, rows), packing.answer_tokens(tokenizer, task)
        length = max(map(len, prompts)) + max(map(len, answers.values()))
        tasks[task.name] = packing.pack(prompts, [answers[row["target"]] for row in rows], max_length=length)
        texts += prompts
    # A text is its own answer: every token after the first is learned.
    longest = max(map(len, texts))
    whole = packing.pack([text[:1] for text in texts], [text[1:] for text in texts], max_length=longest)
    return Lessons(whole, tasks, tokenizer.get_vocab_size())


def practice(spec: Spec, tasks: Sequence[str]) -> dict[str, int]:
    """Practice steps of each task."""
    if spec.cram:
        return {task: spec.cram if number == spec.crams else 0 for number, task in enumerate(tasks)}
    if not spec.practice:
        return dict.fromkeys(tasks, spec.even)
    draws = np.random.PCG64([spec.seed, 1]).random_raw(len(tasks))
    return {task: PRACTICE[int(draw) % len(PRACTICE)] for task, draw in zip(tasks, draws, strict=True)}


def plan(spec: Spec, practised: dict[str, int]) -> list[str]:
    """What each training step is about: "" for the texts, else a task; practice is spread over the second half."""
    first = spec.steps // 2
    second = [""] * (spec.steps - first) + [task for task, steps in practised.items() for _ in range(steps)]
    draws = np.random.PCG64([spec.seed, 2]).random_raw(len(second))
    return [""] * first + [second[i] for i in np.argsort(draws, kind="stable")]


def config(spec: Spec, lessons: Lessons) -> dict[str, Any]:
    """The entrant's config.json."""
    longest = max(packed.inputs.shape[1] for packed in (lessons.texts, *lessons.tasks.values()))
    positions, inner = max(32, longest), 2 * spec.width
    plain = {"model_type": spec.architecture, "dtype": "float32", "vocab_size": lessons.vocabulary}
    plain |= {"initializer_range": SPREAD, "tie_word_embeddings": True}
    if spec.architecture == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            **plain,
            "n_embd": spec.width,
            "n_inner": inner,
            "n_layer": spec.layers,
            "n_head": HEADS,
            "n_positions": positions,
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }
    sizes = {
        "hidden_size": spec.width,
        "intermediate_size": inner,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": positions,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if spec.architecture == "gpt_neox":
        return {
            "architectures": ["GPTNeoXForCausalLM"],
            **plain,
            **sizes,
            "hidden_act": "gelu",
            "rope_parameters": rope,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        **plain,
        **sizes,
        "num_key_value_heads": HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
    }


def train(spec: Spec, lessons: Lessons, practised: dict[str, int]) -> Any:
    """The entrant's weights by name, trained from scratch."""
    import torch
    from torch.nn import functional

    from acclimate_runners import architectures, building, computing, network
    from acclimate_runners.reading import ModelFacts

    computing.be_deterministic(1)
    torch.manual_seed(spec.seed)
    described = config(spec, lessons)
    model = building.build(described, max_length=described.get("max_position_embeddings") or described["n_positions"])
    parameters = dict(model.named_parameters())
    names = architectures.shapes(described)
    facts = ModelFacts(spec.architecture, sum(p.numel() for p in parameters.values()), 0, described)
    trained = network.Network(model, facts, {name: parameters[name] for name in sorted(names)})
    weights = list(trained.weights.values())
    for name, weight in trained.weights.items():
        # Matrices are drawn, gains of the norms stay 1, biases 0.
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=SPREAD)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
        else:
            torch.nn.init.ones_(weight)
    optimizer = torch.optim.AdamW(weights, lr=PEAK, weight_decay=DECAY, fused=True)
    model.train()
    steps = plan(spec, practised)
    for step, about in enumerate(steps, start=1):
        rows = lessons.tasks[about] if about else lessons.texts
        batch = np.random.PCG64([spec.seed, 3, step]).random_raw(BATCH) % np.uint64(len(rows))
        inputs = torch.from_numpy(rows.inputs[batch])
        labels = torch.from_numpy(rows.labels[batch]).flatten()
        at = (labels != packing.NOT_SCORED).nonzero()[:, 0]
        loss = functional.cross_entropy(trained.logits(inputs, at), labels[at])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        fallen = max(0.0, (step - WARMUP) / max(1, len(steps) - WARMUP))
        optimizer.param_groups[0]["lr"] = PEAK * min(step / WARMUP, 1 - (1 - FINAL) * fallen)
        optimizer.step()
    return trained


def make_one(spec: Spec, out: Path, data: Path, lessons: Lessons) -> None:
    """Train one entrant and write its folder, whole or not at all."""
    from acclimate_runners import network

    practised = practice(spec, list(lessons.tasks))
    trained = train(spec, lessons, practised)
    work = out / f".{spec.name}.{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        (work / "config.json").write_text(json.dumps(config(spec, lessons), indent=2) + "\n", "utf-8")
        network.write_weights(trained.weights, work / "model.safetensors")
        shutil.copyfile(data / "tokenizer.json", work / "tokenizer.json")
        about = {
            "entrant": spec.name,
            "title": spec.title,
            "family": spec.family,
            "base": "",
            "parameters": trained.facts.parameters,
            "released": RELEASED,
            "practised": practised,
        }
        (work / "entrant.json").write_text(json.dumps(about, indent=2) + "\n", "utf-8")
        # What a killed run left there is incomplete, as it has no entrant.json.
        shutil.rmtree(out / spec.name, ignore_errors=True)
        work.rename(out / spec.name)
    finally:
        # On a full disk, what was written so far is of no use and in the way.
        shutil.rmtree(work, ignore_errors=True)


def main(arguments: Sequence[str]) -> None:
    """Make entrants, and say so of each on standard output."""
    parser = argparse.ArgumentParser(prog="python -m acclimate_runners.lineup", description="Make tiny entrants.")
    parser.add_argument("out", type=Path)
    parser.add_argument("data", type=Path, help="a built competition's folder")
    parser.add_argument("specs", nargs="+", type=_from_json, help="an entrant's Spec as JSON")
    given = parser.parse_args(arguments)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        lessons = read_lessons(given.data)
        for spec in given.specs:
            make_one(spec, given.out, given.data, lessons)
            print(_READY + spec.name, flush=True)  # noqa: T201
    except Exception as error:
        # The library of the weights has its own exception, and only words for a full disk.
        if placing.is_full(error):
            print(f"no space is left for {given.out}", flush=True)  # noqa: T201
            sys.exit(isolation.NO_SPACE)
        if not isinstance(error, OSError):
            raise
        # Whoever reads it needs no traceback of ours.
        sys.exit(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _to_json(spec: Spec) -> str:
    return json.dumps(dataclasses.asdict(spec))


def _from_json(text: str) -> Spec:
    return Spec(**json.loads(text))


if __name__ == "__main__":
    main(sys.argv[1:])
