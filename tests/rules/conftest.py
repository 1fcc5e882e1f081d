"""A tiny competition and tiny models, made in a moment: what the tests of runners stand on."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from small_configs import CONFIGS, ENCODERS, WORDS

from acclimate_competitions import digests, tables
from acclimate_competitions.definition import Task
from acclimate_competitions.recipe import Optimizer, Recipe, Schedule, Selection
from acclimate_runners import jobs

# How long an example takes says more of the machine than of the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

RECIPE = Recipe(
    method="full",
    epochs=3,
    global_batch=8,
    max_length=16,
    optimizer=Optimizer("adamw", 0.9, 0.999, 1e-8, 0.01),
    schedule=Schedule("linear", 2, 0.1),
    clip=1.0,
    lr_grid=(3e-3, 1e-2),
    selection=Selection("nll", 0, ("base", "last")),
    seeds=(11, 12, 13),
    loss="completion",
    dtype="float32",
    determinism="D1",
    threads=1,
    diverged="base",
)

# The first task's answers are one token each and its rows equally long; the second's are one to three tokens, its rows of any length.
TASKS = (
    Task("more", "choice", "{{ input }}", ("more", "less"), "accuracy", 0.5),
    Task("words", "choice", "{{ input }} very", ("yes", "no no", "very very yes"), "accuracy", 1 / 3),
)


def _rows(task: Task, split: str, count: int) -> list[dict[str, str]]:
    stream = np.random.PCG64([len(split), len(task.choices)])
    rows = []
    for number in range(count):
        draws = stream.random_raw(8)
        length = 5 if task.name == "more" else 2 + int(draws[7] % np.uint64(5))
        letters = ["abcdef"[int(draw % np.uint64(6))] for draw in draws[:length]]
        answer = sum("abcdef".index(letter) for letter in letters) % len(task.choices)
        row = {"example": f"{task.name}-{split}-{number}", "input": " ".join(letters), "target": task.choices[answer]}
        rows.append(row)
    return rows


class Tiny:
    """Makes splits, models and jobs below one folder."""

    tasks, configs, words = TASKS, CONFIGS, WORDS
    every_config = {**CONFIGS, **ENCODERS}
    limits = jobs.Limits((*CONFIGS, *ENCODERS), 100_000, 2_000_000, 2**31, 300.0)

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        for task in TASKS:
            for split, count in (("preparation", 42), ("validation", 10), ("holdout", 13)):
                path = self.data / "splits" / task.name / f"{split}.parquet"
                path.parent.mkdir(parents=True, exist_ok=True)
                tables.write(pa.Table.from_pylist(_rows(task, split, count)), path)
        self.tokenizer = self.data / "tokenizer.json"
        vocabulary = {word: number for number, word in enumerate(WORDS)}
        text = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        }
        self.tokenizer.write_text(json.dumps(text), "utf-8")

    def model(self, out: Path, architecture: str = "llama", **changes: Any) -> Path:
        """A model whose weights are exact binary fractions, drawn by name: the same on every machine."""
        import torch

        from acclimate_runners import architectures, network

        out.mkdir(parents=True, exist_ok=True)
        config = {**{**CONFIGS, **ENCODERS}[architecture], **changes}
        (out / "config.json").write_text(json.dumps(config), "utf-8")
        weights = {}
        for number, (name, shape) in enumerate(sorted(architectures.shapes(config).items())):
            draws = np.random.PCG64([7, number]).random_raw(int(np.prod(shape))) >> np.uint64(56)
            values = (draws.astype(np.float32) - 127.5) / 1024
            # The gains of the norms stand around 1.
            gain = 1.0 if len(shape) == 1 and name.endswith(("weight", "running_var")) else 0.0
            weights[name] = torch.from_numpy(values.reshape(shape) + np.float32(gain))
        network.write_weights(weights, out / "model.safetensors")
        if not architectures.ARCHITECTURES[architecture].sees:
            shutil.copyfile(self.tokenizer, out / "tokenizer.json")
        return out

    def put(self, folder: Path, path: Path) -> str:
        """Make a file an input of a job's folder."""
        digest = digests.of_file(path)
        to = folder / "inputs" / digest.removeprefix("sha256:")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        return digest

    def job(self, folder: Path, model: Path, kind: str, **more: Any) -> Any:
        """A job with all of its inputs in place, and written to the folder; `more` overrides its fields."""
        data = []
        for task in TASKS:
            splits = self.data / "splits" / task.name
            asked = folder / f"{task.name}.parquet"
            folder.mkdir(parents=True, exist_ok=True)
            tables.write(tables.read(splits / "holdout.parquet").drop_columns(["target"]), asked)
            paths = (splits / "preparation.parquet", splits / "validation.parquet", asked)
            data.append(jobs.TaskData(task, *(self.put(folder, path) for path in paths)))
        values: dict[str, Any] = {
            "kind": kind,
            "model": jobs.ModelFiles({path.name: self.put(folder, path) for path in model.iterdir()}),
            "tasks": tuple(data),
            "recipe": RECIPE,
            "limits": self.limits,
            "tokenizer": self.put(folder, self.tokenizer),
            **more,
        }
        made = {"check": jobs.CheckJob, "prepare": jobs.PrepareJob, "evaluate": jobs.EvaluateJob}[kind](**values)
        (folder / "job.json").write_text(jobs.to_json(made), "utf-8")
        return made

    def require_same_bytes_cut_off(self, folder: Path, made: Callable[..., Any], checkpoint: int) -> None:
        """Whether a preparation that is cut off while this checkpoint is written goes on to the bytes of one that is not.

        `made` gives the job of a folder; whose limits it takes as `limits`.
        """
        from acclimate_runners import checkpoints, preparation

        limits = dataclasses.replace(self.limits, checkpoint_seconds=0.0)
        whole, again = (made(folder / name, limits=limits) for name in ("whole", "again"))
        undisturbed = preparation.prepare(whole, folder / "whole", lambda *words: None)
        plain, count = checkpoints.write_tensors, 0

        def cut(*args: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == checkpoint:
                raise KeyboardInterrupt
            return plain(*args, **named)

        with pytest.MonkeyPatch.context() as patched:
            # As often as they are asked for, whatever share of the time they take.
            patched.setattr(checkpoints, "_SHARE", 0)
            patched.setattr(checkpoints, "write_tensors", cut)
            with pytest.raises(KeyboardInterrupt):
                preparation.prepare(again, folder / "again", lambda *words: None)
        (folder / "again" / checkpoints.WRITTEN / "whole").rename(folder / "again" / checkpoints.RESUME)
        found = json.loads((folder / "again" / checkpoints.RESUME / checkpoints.STATE).read_text("utf-8"))
        assert found["step"] == checkpoint - 1
        resumed = preparation.prepare(again, folder / "again", lambda *words: None)
        assert resumed.files == undisturbed.files and len(resumed.files) == 1

    def recipe(self, **changes: Any) -> Recipe:
        """The tiny recipe, with some fields changed."""
        return dataclasses.replace(RECIPE, **changes)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))
