"""The numbers of others on the same models and items: lm-evaluation-harness's scores, TRL's losses.

Log-likelihoods are equal within 1e-4, acc and acc_norm exactly, the losses within 1e-3 at every of 50 steps. tests/vectors/lm-eval.json and
trl.json say what they were written by; tests/journeys/harness.py makes models and items, and can write them again.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pyarrow as pa
import pytest

from acclimate_competitions import metrics, tables
from acclimate_competitions.definition import Task
from acclimate_competitions.errors import Refusal
from acclimate_runners import jobs, packing


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    found = json.loads(harness.VECTORS.read_text("utf-8"))
    assert found["source"]["lm_eval"] == "0.4.13"
    return found["models"]


@pytest.fixture(scope="module", params=sorted(harness.MODELS))
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.write_model(tmp_path_factory.mktemp("harness") / request.param, request.param)


def evaluated(
    tiny: Any, folder: Path, model: Path, tasks: dict[str, tuple[Task, list[dict[str, str]]]]
) -> dict[str, Any]:
    """Predictions of a model on rows of tasks, by the job of a round."""
    from acclimate_runners import evaluation

    data = []
    for name, (task, rows) in tasks.items():
        (folder / name).mkdir(parents=True)
        path = folder / name / "rows.parquet"
        tables.write(pa.Table.from_pylist([{k: v for k, v in row.items() if k != "target"} for row in rows]), path)
        data.append(jobs.TaskData(task, holdout_inputs=tiny.put(folder, path)))
    limits = dataclasses.replace(
        tiny.limits, architectures=tuple(harness.MODELS), max_parameters=10**6, max_bytes=10**7
    )
    job = jobs.EvaluateJob(
        kind="evaluate",
        model=jobs.ModelFiles({path.name: tiny.put(folder, path) for path in model.iterdir()}),
        tasks=tuple(data),
        # What a model reads lacks the last token.
        recipe=tiny.recipe(max_length=harness.LENGTH + 1),
        limits=limits,
        tokenizer=None,
        entrant="fox",
        stages=tuple((name, None, "direct") for name in tasks),
        prepared={},
    )
    outcome = evaluation.evaluate(job, folder, lambda *words: None)
    return {
        p["task"]: tables.read(folder / "out" / p["file"], tables.PREDICTIONS) for p in outcome.results["predictions"]
    }


def test_scores_are_those_of_the_harness(tiny: Any, tmp_path: Path, model: Path, theirs: dict[str, Any]) -> None:
    tasks = {task.name: (task, harness.rows(task)) for task in harness.TASKS}
    predictions = evaluated(tiny, tmp_path, model, tasks)
    for name, (task, rows) in tasks.items():
        expected = theirs[model.name][name]
        found = predictions[name].column("loglikelihoods").to_pylist()
        np.testing.assert_allclose(found, expected["loglikelihoods"], atol=1e-4, rtol=0)
        holdout = pa.Table.from_pylist(rows)
        for metric, theirs_called in (("accuracy", "acc"), ("acc_norm", "acc_norm")):
            scores = metrics.score_predictions(predictions[name], holdout, task, cluster=None, metric=metric)
            assert np.mean(scores.column("score").to_pylist()) == expected[theirs_called], (name, metric)


def test_one_pass_for_single_tokens_has_the_same_numbers(
    tiny: Any, tmp_path: Path, model: Path, theirs: dict[str, Any]
) -> None:
    task, expected = harness.TASKS[0], theirs[model.name]["single"]["loglikelihoods"]
    # Blanks at a prompt's end are tokens of the answer.
    kept = [(n, row) for n, row in enumerate(harness.rows(task)) if row["input"] == row["input"].rstrip()]
    assert 10 < len(kept) < len(expected)
    tokenizer = packing.load_tokenizer(model / "tokenizer.json")
    _, answers = packing.asked(tokenizer, task, [row for _, row in kept])
    assert all(len(answer) == 1 for row in answers for answer in row)
    predictions = evaluated(tiny, tmp_path, model, {"single": (task, [row for _, row in kept])})
    found = predictions["single"].column("loglikelihoods").to_pylist()
    np.testing.assert_allclose(found, [expected[n] for n, _ in kept], atol=1e-4, rtol=0)


def test_what_is_taught_is_what_is_asked(model: Path) -> None:
    tokenizer = packing.load_tokenizer(model / "tokenizer.json")
    for task in harness.TASKS:
        rows = harness.rows(task)
        contexts, answers = packing.taught(tokenizer, task, rows)
        asked, choices = packing.asked(tokenizer, task, rows)
        assert contexts == asked
        assert answers == [row[task.choices.index(r["target"])] for row, r in zip(choices, rows, strict=True)]


def test_together_begins_as_the_tokenizer_says_and_an_empty_prompt_with_the_beginning(tmp_path: Path) -> None:
    task = harness.TASKS[0]
    rows = [{"input": text} for text in ("x", "", "<s> x")]
    for way, first in (("added", [0]), ("not added", [])):
        harness.write_tokenizer(tmp_path / "tokenizer.json", beginning=way)
        tokenizer = packing.load_tokenizer(tmp_path / "tokenizer.json")
        contexts, answers = packing.asked(tokenizer, task, rows)
        x = tokenizer.token_to_id("x")
        # One that is written out is not doubled.
        assert contexts == [[*first, x], [0], [0, tokenizer.token_to_id("Ġ"), x]]
        assert answers[0] == answers[1] == answers[2] == [[tokenizer.token_to_id(f"Ġ{c}")] for c in "ABC"]


def test_apart_and_together_differ_where_tokens_run_together(tmp_path: Path) -> None:
    harness.write_tokenizer(tmp_path / "tokenizer.json", beginning="not added")
    tokenizer = packing.load_tokenizer(tmp_path / "tokenizer.json")
    task = Task("t", "choice", "{{ input }}", ("e", "x"), "accuracy", 0.5, tokenize="together")
    rows = [{"input": "th", "target": "e"}]
    # "the" is one token, as is "th": nothing of it is left for the answer.
    with pytest.raises(Refusal, match="leaves nothing of an answer of task t") as caught:
        packing.asked(tokenizer, task, rows)
    assert caught.value.code == "model_invalid"
    apart = dataclasses.replace(task, tokenize="apart")
    assert packing.taught(tokenizer, apart, rows) == (
        [[0, tokenizer.token_to_id("th")]],
        [[tokenizer.token_to_id("e")]],
    )


@pytest.mark.parametrize("architecture", sorted(harness.TRAINED))
@pytest.mark.parametrize("micro_batch", [None, 3])
def test_losses_are_those_of_trl(tmp_path: Path, architecture: str, micro_batch: int | None) -> None:
    from acclimate_runners import computing, network, preparation

    written = json.loads(harness.LOSSES.read_text("utf-8"))
    expected = written["models"][architecture]
    assert written["source"]["trl"] and len(expected) == 50
    folder = harness.write_model(tmp_path / architecture, architecture, **harness.TRAINED[architecture])
    limits = jobs.Limits((architecture,), 10**6, 10**7, memory=2**31, wall_seconds=60)
    computing.be_deterministic(1)
    model = network.load({path.name: path for path in folder.iterdir()}, limits, max_length=harness.LENGTH + 1)
    tokenizer = packing.load_tokenizer(folder / "tokenizer.json")
    rows = packing.pack(*packing.taught(tokenizer, harness.LEARNT, harness.lessons()), max_length=harness.LENGTH + 1)
    done = preparation.fit(model, (rows, rows), harness.RECIPE, lr=harness.RATE, seed=11, micro_batch=micro_batch)
    np.testing.assert_allclose(done.losses, expected, atol=1e-3, rtol=0)
    assert expected[-1] < 0.7 * expected[0]
