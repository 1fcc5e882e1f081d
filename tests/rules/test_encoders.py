"""Encoders as sequence classifiers: read strictly, their log-probabilities those of transformers' own forward, prepared to the same bytes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_competitions import tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.recipe import Lora, Selection
from acclimate_runners import adapter_files, encoders, jobs, models, packing, reading, tensors

ENCODERS = sorted(name for name, kind in encoders.ENCODERS.items() if not kind.sees)
LABELS = ("more", "less", "no", "yes")


def encoder(tiny: Any, out: Path, architecture: str = "bert", *, labels: Any = ("more", "less"), **more: Any) -> Path:
    return tiny.model(out, architecture, id2label={str(n): label for n, label in enumerate(labels)}, **more)


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


@pytest.mark.parametrize("architecture", ENCODERS)
@pytest.mark.parametrize("max_length", [17, 200])
def test_tensors_and_log_probabilities_are_those_of_the_library(
    tiny: Any, tmp_path: Path, architecture: str, max_length: int
) -> None:
    """Transformers' whole way, one row at a time, so that nothing is padded; 200 tokens take another attention."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from acclimate_runners import classifying, network

    first = encoders.ENCODERS[architecture].first
    folder = encoder(
        tiny, tmp_path / "model", architecture, labels=LABELS, max_position_embeddings=max_length - 1 + first
    )
    theirs, told = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = network.load({path.name: path for path in folder.iterdir()}, tiny.limits, max_length=max_length)
    assert loaded.labels == LABELS and {name: tuple(t.shape) for name, t in loaded.weights.items()} == {
        name: tuple(t.shape) for name, t in theirs.named_parameters()
    }
    assert loaded.facts.parameters == sum(t.numel() for t in theirs.parameters())
    assert loaded.positions == max_length - 1
    task = replace(tiny.tasks[0], kind="classify", choices=("yes", "less", "more", "no"))
    # The submitted labels in the task's own order; none of the tokens is RoBERTa's padding.
    loaded.set_weights(classifying.begun(loaded, loaded.copy_weights(), task, seed=0))
    prompts = [[2, 3, 4, 5], [2, 6], [2, 3, 3, 7, 8, 9], [2 + n % 8 for n in range(max_length - 1)]]
    packed = packing.pack(prompts, [[0]] * len(prompts), max_length=max_length)
    found = network.last_logprobs(loaded, packed, np.tile(np.arange(4), (len(prompts), 1)))
    order = [LABELS.index(choice) for choice in task.choices]
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = theirs.eval()(torch.tensor([prompt])).logits[0].log_softmax(-1)
        torch.testing.assert_close(found[row].float(), expected[order], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("architecture", ENCODERS)
def test_what_the_library_saves_is_accepted(tiny: Any, tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, saved = encoder(tiny, tmp_path / "model", architecture), tmp_path / "saved"
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(saved)
    (saved / "tokenizer.json").write_bytes(tiny.tokenizer.read_bytes())
    assert models.inspect(saved, tiny.limits).parameters == models.inspect(folder, tiny.limits).parameters
    assert adapter_files.kind_of(reading.of_folder(saved)) == "hf-sequence-classifier"


@pytest.mark.parametrize(
    ("architecture", "changes", "part"),
    [
        ("bert", {"architectures": ["BertForMaskedLM"]}, "expected ['BertForSequenceClassification']"),
        ("bert", {"architectures": None}, "architectures is missing, expected ['BertForSequenceClassification']"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', expected one of absolute"),
        ("bert", {"is_decoder": True}, "is_decoder is True, expected one of False"),
        ("bert", {"num_attention_heads": 3}, "hidden_size 16 is not a multiple of num_attention_heads 3"),
        ("bert", {"id2label": {"0": "a", "1": "b", "2": "c"}}, "tensor 'classifier.bias' has shape [2], config.json asks for [3]"),
        ("roberta", {"pad_token_id": 0}, "pad_token_id is 0, expected one of 1"),
        ("distilbert", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds is True, expected one of False"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(
    tiny: Any, tmp_path: Path, architecture: str, changes: dict[str, Any], part: str
) -> None:
    folder = encoder(tiny, tmp_path / "model", architecture)
    edit(folder, *(name for name, value in changes.items() if value is None), **changes)
    assert part in refused(tiny, folder)


def test_a_text_keeps_its_frame_and_loses_tokens_at_its_left(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    shutil.copyfile(tiny.tokenizer, path)
    framed(path, first=tiny.words[2], last=tiny.words[3])
    tokenizer = packing.load_tokenizer(path)
    words = tiny.words[4:10]
    whole, short = packing.framed(tokenizer, [" ".join(words), words[0]], most=6)
    assert whole == [2, 6, 7, 8, 9, 3] and short == [2, 4, 3]
    with pytest.raises(Refusal, match="have no room beside what the tokenizer puts around a text"):
        packing.framed(tokenizer, ["a"], most=2)


def framed(path: Path, *, first: str, last: str) -> None:
    """Have a tokenizer put two tokens around each text, as BERT's does."""
    told = json.loads(path.read_text("utf-8"))
    numbers = told["model"]["vocab"]
    told["post_processor"] = {"type": "BertProcessing", "cls": [first, numbers[first]], "sep": [last, numbers[last]]}
    path.write_text(json.dumps(told), "utf-8")


@pytest.mark.parametrize("architecture", ENCODERS)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_it_is_checked_prepared_and_evaluated_to_the_same_bytes(
    tiny: Any, tmp_path: Path, architecture: str, method: str
) -> None:
    """Twice, and with packing, which an encoder's rows are not: all of it gives the same bytes."""
    from acclimate_runners import checking, evaluation, preparation

    model = encoder(tiny, tmp_path / "model", architecture)
    how = {"method": "lora", "lora": Lora(2, 4.0, ("attention", "mlp"))} if method == "lora" else {}
    recipe = tiny.recipe(epochs=2, lr_grid=(1e-2,), selection=Selection("nll", 0, ("last",)), **how)
    stages, made = tuple((task.name, 11) for task in tiny.tasks), []
    for name, packed in (("first", False), ("again", False), ("packed", True)):
        given = replace(recipe, packing=packed)
        job = classify_job(tiny, tmp_path / name, model, "prepare", stages=stages, recipe=given)
        assert jobs.from_json(jobs.to_json(job)) == job
        made.append(preparation.prepare(job, tmp_path / name, lambda *words: None))
    assert made[0].files == made[1].files == made[2].files and len(made[0].files) == 2
    kind = encoders.ENCODERS[architecture]
    for task, entry in zip(tiny.tasks, made[0].results["prepared"], strict=True):
        assert not entry["base"] and abs(entry["losses"][0] - np.log(len(task.choices))) < 0.3
        header = reading.read_header(tmp_path / "first/out" / entry["file"])
        assert header[kind.score].shape[0] == header[str(kind.score_bias)].shape[0] == len(task.choices)
    check = classify_job(tiny, tmp_path / "check", model, "check", recipe=recipe)
    assert len(checking.check(check, tmp_path / "check", lambda *words: None).results["losses"]) == 3
    prepared = {
        f"{e['task']}/11": tiny.put(tmp_path / "asked", tmp_path / "first/out" / e["file"])
        for e in made[0].results["prepared"]
    }
    asked = [(t.name, s, p) for t in tiny.tasks for s, p in ((None, "direct"), (11, "prepared"))]
    more = {"entrant": "fox", "stages": tuple(asked), "prepared": prepared, "recipe": recipe}
    job = classify_job(tiny, tmp_path / "asked", model, "evaluate", **more)
    outcome = evaluation.evaluate(job, tmp_path / "asked", lambda *words: None)
    for entry in outcome.results["predictions"]:
        table = tables.read(tmp_path / "asked/out" / entry["file"], tables.PREDICTIONS)
        sums = np.exp(np.array(table.column("loglikelihoods").to_pylist())).sum(axis=1)
        np.testing.assert_allclose(sums, 1, atol=1e-6)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_parts_of_a_batch_give_the_same_loss_and_recomputing_the_same_bytes(
    tiny: Any, tmp_path: Path, architecture: str
) -> None:
    from acclimate_runners import classifying, computing, preparation

    computing.be_deterministic(1)
    job = classify_job(tiny, tmp_path, encoder(tiny, tmp_path / "model", architecture), "check")
    model, tokenizer = preparation.open_model(job, tmp_path)
    data = preparation.pack_splits(job, tmp_path, job.tasks[1], model, tokenizer)
    start = dict(classifying.begun(model, model.copy_weights(), job.tasks[1].task, seed=0))

    def fitted(micro: int | None) -> Any:
        model.set_weights(start)
        done = preparation.fit(model, data, tiny.recipe(), lr=0.003, seed=12, stop_after=3, micro_batch=micro)
        return done.losses, model.copy_weights()

    made = {micro: fitted(micro) for micro in (None, 1, 2, 4)}
    for losses, _ in made.values():
        np.testing.assert_allclose(losses, made[None][0], atol=1e-5)
    model.recompute()
    for micro in (None, 2):
        losses, weights = fitted(micro)
        assert losses == made[micro][0] and all(weights[name].equal(each) for name, each in made[micro][1].items())


def test_the_order_of_rows_changes_nobodys_numbers(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import evaluation

    model = encoder(tiny, tmp_path / "model", labels=("yes", "no", "more"))
    stages = tuple((task.name, None, "direct") for task in tiny.tasks)
    found = []
    for name, turned in (("as they are", False), ("turned", True)):
        job = classify_job(tiny, tmp_path / name, model, "evaluate", entrant="fox", stages=stages, prepared={})
        data = []
        for each in job.tasks:
            rows = tables.read(tiny.data / "splits" / each.task.name / "holdout.parquet").drop_columns(["target"])
            tables.write(rows.take(list(range(rows.num_rows))[:: -1 if turned else 1]), tmp_path / "rows.parquet")
            data.append(replace(each, holdout_inputs=tiny.put(tmp_path / name, tmp_path / "rows.parquet")))
        outcome = evaluation.evaluate(replace(job, tasks=tuple(data)), tmp_path / name, lambda *words: None)
        files = [tmp_path / name / "out" / entry["file"] for entry in outcome.results["predictions"]]
        found.append([{r["example"]: r["loglikelihoods"] for r in tables.read(file).to_pylist()} for file in files])
    assert found[0] == found[1] and list(found[0][0]) == list(found[1][0])[::-1]


def test_what_adapters_of_a_recipe_stand_on(tiny: Any) -> None:
    found = {}
    for name in ENCODERS:
        kind = encoders.ENCODERS[name]
        shapes = kind.shapes({**kind.fields, **CONFIG, "model_type": name})
        found[name] = [
            {layer.split(".0.")[1].removesuffix(".weight") for layer in tensors.linear(shapes, (part,))}
            for part in ("attention", "mlp")
        ]
    theirs = [
        {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"},
        {"intermediate.dense", "output.dense"},
    ]
    assert found["bert"] == found["roberta"] == theirs
    assert found["distilbert"] == [{f"attention.{n}_lin" for n in ("q", "k", "v", "out")}, {"ffn.lin1", "ffn.lin2"}]


CONFIG = {
    "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "max_position_embeddings": 8,
    "type_vocab_size": 2, "dim": 4, "hidden_dim": 6, "n_layers": 1,
}  # fmt: skip
