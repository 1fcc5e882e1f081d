"""Sequence classifiers: read strictly, their log-probabilities those of transformers' own forward, and prepared to the same bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_competitions import metrics, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.recipe import Lora, Selection
from acclimate_runners import adapter_files, architectures, jobs, models, packing, reading

ATTENDING = sorted(name for name, kind in architectures.ARCHITECTURES.items() if kind.attends and not kind.encodes)
STILL = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
OTHERS = ("more", "less", "no", "yes")


def classifier(
    tiny: Any, out: Path, architecture: str = "llama", *, labels: Any = ("more", "less"), **more: Any
) -> Path:
    kind = architectures.ARCHITECTURES[architecture]
    given = {"architectures": [kind.classifier], "id2label": {str(n): label for n, label in enumerate(labels)}}
    return tiny.model(out, architecture, **{**STILL.get(architecture, {}), **given, **more})


def classify_job(tiny: Any, folder: Path, model: Path, kind: str, **more: Any) -> Any:
    """The tiny job whose tasks are of kind classify."""
    job = tiny.job(folder, model, kind, **more)
    return replace(job, tasks=tuple(replace(d, task=replace(d.task, kind="classify")) for d in job.tasks))


def edit(folder: Path, *drop: str, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text("utf-8")), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in drop}), "utf-8")


def refused(tiny: Any, folder: Path) -> str:
    with pytest.raises(Refusal) as caught:
        models.inspect(folder, tiny.limits)
    assert caught.value.code == "model_invalid"
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("architecture", ATTENDING)
def test_tensors_and_log_probabilities_are_those_of_the_library(tiny: Any, tmp_path: Path, architecture: str) -> None:
    """Transformers' whole way, from the folder to the pooled logits, one row at a time, so that nothing is padded."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from acclimate_runners import classifying, network

    folder = classifier(tiny, tmp_path / "model", architecture, labels=OTHERS)
    theirs, told = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = network.load({path.name: path for path in folder.iterdir()}, tiny.limits, max_length=16)
    assert loaded.labels == OTHERS and {name: tuple(t.shape) for name, t in loaded.weights.items()} == {
        name: tuple(t.shape) for name, t in theirs.named_parameters()
    }
    assert loaded.facts.parameters == sum(t.numel() for t in theirs.parameters())
    task = replace(tiny.tasks[0], kind="classify", choices=("yes", "less", "more", "no"))
    # The submitted labels in the task's own order.
    loaded.set_weights(classifying.begun(loaded, loaded.copy_weights(), task, seed=0))
    prompts = [[1, 3, 4, 5], [1, 6], [1, 3, 3, 7, 8, 9]]
    packed = packing.pack(prompts, [[0]] * 3, max_length=16)
    found = network.last_logprobs(loaded, packed, np.tile(np.arange(4), (3, 1)))
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = theirs.eval()(torch.tensor([prompt])).logits[0].log_softmax(-1)
        order = [OTHERS.index(choice) for choice in task.choices]
        torch.testing.assert_close(found[row].float(), expected[order], atol=1e-5, rtol=1e-5)


def test_what_the_library_saves_is_accepted(tiny: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = classifier(tiny, tmp_path / "model")
    saved = tmp_path / "saved"
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(saved)
    (saved / "tokenizer.json").write_bytes(tiny.tokenizer.read_bytes())
    assert models.inspect(saved, tiny.limits).parameters == models.inspect(folder, tiny.limits).parameters
    files = reading.of_folder(saved)
    assert adapter_files.kind_of(files) == "hf-sequence-classifier"
    assert adapter_files.inspect_submitted(files, tiny.limits, on=None, kind="hf-sequence-classifier")
    with pytest.raises(Refusal, match="by its files it is a hf-sequence-classifier, its manifest says hf-causal-lm"):
        adapter_files.inspect_submitted(files, tiny.limits, on=None, kind="hf-causal-lm")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "an object of 2 to 32768 labels by number"),
        ({"id2label": {"0": "a", "1": "a"}}, "an object of 2 to 32768 labels by number"),
        ({"id2label": {"0": "a"}}, "an object of 2 to 32768 labels by number"),
        ({"id2label": ["a", "b"]}, "an object of 2 to 32768 labels by number"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "tensor 'score.weight' has shape [2, 16], config.json asks for [3, 16]"),
        ({"label2id": {"more": 1, "less": 0}}, "id2label makes it {'more': 0, 'less': 1}"),
        ({"label2id": {"more": 0}}, "id2label makes it {'more': 0, 'less': 1}"),
        ({"label2id": {"more": 0, "less": True}}, "id2label makes it {'more': 0, 'less': 1}"),
        ({"label2id": ["more", "less"]}, "id2label makes it {'more': 0, 'less': 1}"),
        ({"num_labels": 3}, "num_labels is 3, id2label makes it 2"),
        ({"num_labels": 2.0}, "num_labels is 2.0, id2label makes it 2"),
        ({"problem_type": "regression"}, "problem_type is 'regression', expected one of"),
        ({"architectures": ["LlamaForCausalLM"]}, "'id2label' is not an allowed field of llama"),
        ({"architectures": ["BertForSequenceClassification"]}, "or ['LlamaForSequenceClassification']"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(tiny: Any, tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    folder = classifier(tiny, tmp_path / "model")
    edit(folder, **changes)
    assert part in refused(tiny, folder)


def test_a_head_for_words_is_no_part_of_it_and_mamba_has_none(tiny: Any, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = classifier(tiny, tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"]}, folder / "model.safetensors")
    assert "tensor 'lm_head.weight' is not part of the model" in refused(tiny, folder)
    mamba = tiny.model(tmp_path / "mamba", "mamba", architectures=["MambaForSequenceClassification"])
    assert "expected ['MambaForCausalLM']" in refused(tiny, mamba)


def test_a_head_of_other_labels_begins_anew_and_the_same_for_all(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import classifying, network

    loaded = network.load(reading.of_folder(classifier(tiny, tmp_path / "a")), tiny.limits, max_length=16)
    other = network.load(reading.of_folder(classifier(tiny, tmp_path / "b", "gpt2")), tiny.limits, max_length=16)
    weights, task = loaded.copy_weights(), replace(tiny.tasks[1], kind="classify")
    fresh = classifying.begun(loaded, weights, task, seed=0)["score.weight"]
    assert tuple(fresh.shape) == (3, 16) and 0.01 < float(fresh.std()) < 0.03
    assert fresh.equal(classifying.begun(other, other.copy_weights(), task, seed=0)["score.weight"])
    assert not fresh.equal(classifying.begun(loaded, weights, task, seed=1)["score.weight"])
    assert loaded.labels == task.choices and loaded.weights["score.weight"].shape == fresh.shape
    # Back to the task whose labels are the submitted ones.
    again = classifying.begun(loaded, weights, replace(tiny.tasks[0], kind="classify"), seed=0)
    assert again["score.weight"].equal(weights["score.weight"]) and loaded.labels == ("more", "less")
    with pytest.raises(Refusal, match="is of the kind choice, which a sequence classifier can't do") as caught:
        classifying.begun(loaded, weights, tiny.tasks[0], seed=0)
    assert caught.value.code == "model_invalid"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_it_is_checked_prepared_and_evaluated_to_the_same_bytes(tiny: Any, tmp_path: Path, method: str) -> None:
    from acclimate_runners import checking, evaluation, preparation

    model = classifier(tiny, tmp_path / "model", "gpt2")
    how = {"method": "lora", "lora": Lora(2, 4.0, ("attention",))} if method == "lora" else {}
    # The model as submitted is no candidate: it may be as good as what so few steps make of it.
    recipe = tiny.recipe(epochs=2, lr_grid=(1e-2,), packing=True, selection=Selection("nll", 0, ("last",)), **how)
    given = {"recipe": recipe}
    stages = tuple((task.name, 11) for task in tiny.tasks)
    made = []
    for name in ("first", "again"):
        job = classify_job(tiny, tmp_path / name, model, "prepare", stages=stages, **given)
        assert jobs.from_json(jobs.to_json(job)) == job
        made.append(preparation.prepare(job, tmp_path / name, lambda *words: None))
    assert made[0].files == made[1].files and len(made[0].files) == 2
    for task, entry in zip(tiny.tasks, made[0].results["prepared"], strict=True):
        # Of as many labels as there are; the first loss is that of a guess.
        assert not entry["base"] and abs(entry["losses"][0] - np.log(len(task.choices))) < 0.3
        assert reading.read_header(tmp_path / "first/out" / entry["file"])["score.weight"].shape[0] == len(task.choices)
    check = classify_job(tiny, tmp_path / "check", model, "check", **given)
    assert len(checking.check(check, tmp_path / "check", lambda *words: None).results["losses"]) == 3
    prepared = {
        f"{e['task']}/11": tiny.put(tmp_path / "asked", tmp_path / "first/out" / e["file"])
        for e in made[0].results["prepared"]
    }
    asked = [(t.name, s, p) for t in tiny.tasks for s, p in ((None, "direct"), (11, "prepared"))]
    job = classify_job(
        tiny, tmp_path / "asked", model, "evaluate", entrant="fox", stages=tuple(asked), prepared=prepared, **given
    )
    outcome = evaluation.evaluate(job, tmp_path / "asked", lambda *words: None)
    for entry, data in zip(outcome.results["predictions"], [d for d in job.tasks for _ in range(2)], strict=True):
        table = tables.read(tmp_path / "asked/out" / entry["file"], tables.PREDICTIONS)
        sums = np.exp(np.array(table.column("loglikelihoods").to_pylist())).sum(axis=1)
        np.testing.assert_allclose(sums, 1, atol=1e-6)
        holdout = tables.read(tiny.data / "splits" / data.task.name / "holdout.parquet")
        for metric in ("accuracy", "nll"):
            scores = metrics.score_predictions(table, holdout, data.task, cluster=None, metric=metric)
            assert scores.column("score").null_count == 0


def test_a_language_model_answers_such_a_task_by_its_words(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import evaluation

    model = tiny.model(tmp_path / "model")
    stages = tuple((task.name, None, "direct") for task in tiny.tasks)
    given: dict[str, Any] = {"entrant": "fox", "stages": stages, "prepared": {}}
    numbers = []
    for name, make in (("choice", tiny.job), ("classify", lambda *a, **k: classify_job(tiny, *a, **k))):
        job = make(tmp_path / name, model, "evaluate", **given)
        outcome = evaluation.evaluate(job, tmp_path / name, lambda *words: None)
        files = [tmp_path / name / "out" / entry["file"] for entry in outcome.results["predictions"]]
        numbers.append([np.array(tables.read(file).column("loglikelihoods").to_pylist()) for file in files])
    for sums, labels in zip(*numbers, strict=True):
        np.testing.assert_allclose(labels, sums - np.log(np.exp(sums).sum(axis=1, keepdims=True)), atol=1e-9)
        np.testing.assert_allclose(np.exp(labels).sum(axis=1), 1, atol=1e-9)
