"""Evaluation: it agrees with one choice of one row at a time, keeps the rows' order, and never pools direct with prepared."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from acclimate_competitions import tables
from acclimate_competitions.errors import Refusal
from acclimate_runners import packing, prompts


def evaluated(tiny: Any, folder: Path, model: Path, stages: Any, **more: Any) -> Any:
    from acclimate_runners import evaluation

    values = {"entrant": "fox", "stages": stages, "prepared": {}, **more}
    job = tiny.job(folder, model, "evaluate", **values)
    return evaluation.evaluate(job, folder, lambda *words: None)


def naive(tiny: Any, model: Path, task: Any) -> list[list[float]]:
    """One choice of one row at a time, whole sequence, the library's own logits, summed by hand."""
    import json

    import torch

    from acclimate_runners import network

    files = {path.name: path for path in model.iterdir()}
    loaded = network.load(files, tiny.limits, max_length=16)
    vocabulary = json.loads(tiny.tokenizer.read_text())["model"]["vocab"]
    found = []
    for row in tables.read(tiny.data / "splits" / task.name / "holdout.parquet").to_pylist():
        prompt = [
            vocabulary["<bos>"],
            *(vocabulary[w] for w in task.prompt.replace("{{ input }}", row["input"]).split()),
        ]
        sums = []
        for choice in task.choices:
            answer = [vocabulary[word] for word in choice.split()]
            with torch.no_grad():
                chances = loaded.model(input_ids=torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            sums.append(sum(float(chances[len(prompt) + i - 1, token]) for i, token in enumerate(answer)))
        found.append(sums)
    return found


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "mamba"])
def test_it_agrees_with_one_at_a_time(tiny: Any, tmp_path: Path, architecture: str) -> None:
    model = tiny.model(tmp_path / "model", architecture)
    stages = tuple((task.name, None, "direct") for task in tiny.tasks)
    outcome = evaluated(tiny, tmp_path / "job", model, stages)
    for task, entry in zip(tiny.tasks, outcome.results["predictions"], strict=True):
        table = tables.read(tmp_path / "job" / "out" / entry["file"], tables.PREDICTIONS)
        holdout = tables.read(tiny.data / "splits" / task.name / "holdout.parquet")
        assert table["example"].to_pylist() == holdout["example"].to_pylist()
        assert entry["count"] == len(table) == 13 and entry["seed"] is None
        assert set(table["entrant"].to_pylist()) == {"fox"} and set(table["protocol"].to_pylist()) == {"direct"}
        assert table["seed"].null_count == table["text"].null_count == 13
        np.testing.assert_allclose(table["loglikelihoods"].to_pylist(), naive(tiny, model, task), atol=1e-5)


def test_the_logits_of_a_few_positions_at_a_time_give_the_same(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One position, and all of a batch: shared prompts and single tokens, and the validation split."""
    from acclimate_runners import network

    model = tiny.model(tmp_path / "model")
    stages = tuple((task.name, None, "direct") for task in tiny.tasks)
    loaded = network.load({path.name: path for path in model.iterdir()}, tiny.limits, max_length=16)
    rows = packing.pack([[1, 3], [1, 4, 5, 6]], [[7, 8, 9], [10]], max_length=16)
    found, sums = [], []
    for held in (network.LOGITS, 1):
        monkeypatch.setattr(network, "LOGITS", held)
        outcome = evaluated(tiny, tmp_path / str(held), model, stages)
        paths = [tmp_path / str(held) / "out" / entry["file"] for entry in outcome.results["predictions"]]
        found.append(
            np.concatenate([np.ravel(tables.read(path)["loglikelihoods"].combine_chunks().flatten()) for path in paths])
        )
        sums.append(network.answer_loglikelihoods(loaded, rows).numpy())
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    np.testing.assert_allclose(sums[1], sums[0], atol=1e-5)


def test_small_batches_give_the_same(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(tmp_path / "model")
    stages = tuple((task.name, None, "direct") for task in tiny.tasks)
    tables_of = []
    for budget in (8192, 15):
        monkeypatch.setattr(packing, "CACHED_TOKENS", budget)
        folder = tmp_path / str(budget)
        outcome = evaluated(tiny, folder, model, stages)
        tables_of.append(
            [tables.read(folder / "out" / name)["loglikelihoods"].to_pylist() for name in sorted(outcome.files)]
        )
    for large, small in zip(*tables_of, strict=True):
        np.testing.assert_allclose(large, small, atol=1e-5)


def test_batches_hold_every_row_once_within_the_budget() -> None:
    lengths = np.array([5, 1, 9, 3, 3, 20, 2, 1])
    found = packing.batches(lengths, budget=10)
    assert sorted(np.concatenate(found).tolist()) == list(range(8))
    assert [lengths[rows].tolist() for rows in found] == [[1, 1, 2], [3, 3], [5], [9], [20]]
    assert packing.batches(np.array([], dtype=np.int64)) == []


def test_each_stage_uses_its_own_weights(tiny: Any, tmp_path: Path) -> None:
    model, other = tiny.model(tmp_path / "model"), tiny.model(tmp_path / "other", "llama")
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, other / "model.safetensors")
    folder = tmp_path / "job"
    digest = tiny.put(folder, other / "model.safetensors")
    stages = (("more", 11, "prepared"), ("more", None, "direct"), ("more", 12, "prepared"))
    outcome = evaluated(tiny, folder, model, stages, prepared={"more/11": digest, "more/12": digest})
    assert list(outcome.files) == [
        "prepared-more-11.parquet",
        "direct-more-none.parquet",
        "prepared-more-12.parquet",
    ]
    read = {name: tables.read(folder / "out" / name, tables.PREDICTIONS) for name in outcome.files}
    numbers = {name: table["loglikelihoods"].to_pylist() for name, table in read.items()}
    np.testing.assert_allclose(numbers["direct-more-none.parquet"], naive(tiny, model, tiny.tasks[0]), atol=1e-5)
    np.testing.assert_allclose(numbers["prepared-more-11.parquet"], naive(tiny, other, tiny.tasks[0]), atol=1e-5)
    assert numbers["prepared-more-11.parquet"] == numbers["prepared-more-12.parquet"]
    assert read["prepared-more-12.parquet"]["seed"].to_pylist() == [12] * 13
    # The same stages again give the same bytes.
    assert evaluated(tiny, tmp_path / "again", model, stages[1:2]).files == {
        "direct-more-none.parquet": outcome.files["direct-more-none.parquet"]
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_counts_as_submitted_predicts_the_same_to_the_bit(tiny: Any, tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from acclimate_runners import network
    from acclimate_runners.preparation import open_model

    model = tiny.model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    save_file({n: tensor.to(getattr(torch, dtype)) for n, tensor in weights.items()}, model / "model.safetensors")
    # As a preparation writes it where the selection leaves the model as submitted.
    job = tiny.job(tmp_path / "first", model, "evaluate", entrant="fox", stages=(), prepared={})
    network.write_weights(open_model(job, tmp_path / "first")[0].copy_weights(), tmp_path / "prepared")
    digest = tiny.put(tmp_path / "job", tmp_path / "prepared")
    stages = tuple((task.name, *key) for task in tiny.tasks for key in ((None, "direct"), (11, "prepared")))
    given = {f"{task.name}/11": digest for task in tiny.tasks}
    outcome = evaluated(tiny, tmp_path / "job", model, stages, prepared=given)
    for task in tiny.tasks:
        direct, prepared = (
            tables.read(tmp_path / "job" / "out" / f"{name}.parquet", tables.PREDICTIONS)
            for name in (f"direct-{task.name}-none", f"prepared-{task.name}-11")
        )
        for column in ("loglikelihoods", "text"):
            assert direct[column].to_pylist() == prepared[column].to_pylist()
    assert outcome.hardware


def test_what_is_no_number_stays_unpredicted(tiny: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny.model(tmp_path / "model", tie_word_embeddings=False)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][WORDS_MORE] = 3e38
    save_file(weights, model / "model.safetensors")
    outcome = evaluated(tiny, tmp_path / "job", model, (("more", None, "direct"),))
    table = tables.read(tmp_path / "job" / "out" / "direct-more-none.parquet", tables.PREDICTIONS)
    assert outcome.results["predictions"][0]["count"] == 13
    assert 0 < table["loglikelihoods"].null_count <= 13


WORDS_MORE = 9


def test_prepared_weights_of_another_shape_are_refused(tiny: Any, tmp_path: Path) -> None:
    model, other = tiny.model(tmp_path / "model"), tiny.model(tmp_path / "other", hidden_size=8)
    digest = tiny.put(tmp_path / "job", other / "model.safetensors")
    with pytest.raises(Refusal, match="has shape"):
        evaluated(tiny, tmp_path / "job", model, (("more", 11, "prepared"),), prepared={"more/11": digest})


def test_prompts_are_rendered_in_a_sandbox_without_the_target(tiny: Any) -> None:
    from dataclasses import replace

    task = tiny.tasks[0]
    row = {"example": "1", "input": "a b", "target": "more", "hint": "c"}
    assert prompts.filled(replace(task, prompt="{{ hint }} {{ input }}"), [row]) == ["c a b"]
    for prompt in ("{{ target }}", "{{ missing }}", "{{ input.__class__.__mro__ }}", "{% for"):
        with pytest.raises(Refusal, match="does not fit the rows"):
            prompts.filled(replace(task, prompt=prompt), [row])


def test_numbers_become_lists_without_a_python_number_each_and_the_same_bytes(tmp_path: Path) -> None:
    """2.5 million of them take no more than a few times their 20 MB; a row with one that is none is null."""
    import tracemalloc

    from acclimate_runners import evaluation

    found = np.random.default_rng(0).normal(size=(50_000, 50))
    found[7, 3], found[20, 0] = np.inf, np.nan
    expected = [None if number in (7, 20) else row for number, row in enumerate(found.tolist())]
    key, ids = ("fox", "direct", "more", None), [f"e{number}" for number in range(len(found))]
    tracemalloc.start()
    lists = evaluation._lists(found)
    table = evaluation._table(key, ids, evaluation.Answers(lists))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * found.nbytes and lists.to_pylist() == expected
    plain = table.set_column(5, table.schema.field(5), [pa.array(expected, lists.type)])
    for name, each in (("lists", table), ("plain", plain)):
        tables.write(each, tmp_path / name)
    assert (tmp_path / "lists").read_bytes() == (tmp_path / "plain").read_bytes()
    assert evaluation._lists(found[:0]).to_pylist() == []
