"""Image classifiers: read strictly, their log-probabilities those of transformers' own forward, prepared and resumed to the same bytes."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from acclimate_competitions import splits, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.recipe import Lora, Selection
from acclimate_competitions.tasks import Task, from_values
from acclimate_runners import (
    adapter_files,
    architectures,
    image_classifiers,
    jobs,
    models,
    packing,
    reading,
    shards,
    tensors,
)

TASK = Task("hue", "classify", "{{ input }}", ("dark", "light"), "accuracy", 0.5, image="8x8x3")


IMAGES = sorted(image_classifiers.IMAGES)
# What of an architecture's fields changes its tensors or numbers.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in IMAGES},
    "vit of other pixels": ("vit", {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.4, 0.3], "qkv_bias": False}),
    "convnext without scales": (
        "convnext",
        {"layer_scale_init_value": 0.0, "patch_size": 4, "image_mean": [0.1, 0.2, 0.3], "hidden_act": "relu"},
    ),
    "resnet of plain layers": ("resnet", {"layer_type": "basic", "downsample_in_first_stage": True}),
    "resnet that halves early": (
        "resnet",
        {"downsample_in_bottleneck": True, "embedding_size": 8, "image_std": [0.2, 0.3, 0.4], "hidden_act": "silu"},
    ),
    "convnext of one stage": ("convnext", {"depths": [2], "hidden_sizes": [6], "num_stages": 1}),
}


def image_model(
    tiny: Any, out: Path, architecture: str = "vit", *, labels: Any = ("light", "dark"), **more: Any
) -> Path:
    return tiny.model(out, architecture, id2label={str(n): label for n, label in enumerate(labels)}, **more)


def pictures(count: int, *, seed: int) -> list[dict[str, str]]:
    draw, rows = np.random.default_rng(seed), []
    for number in range(count):
        light = bool(draw.integers(2))
        numbers = draw.integers(90 * light, 166 + 90 * light, (8, 8, 3), dtype=np.uint8)
        text = base64.b64encode(numbers.tobytes()).decode()
        rows.append({"example": f"{seed}-{number}", "input": text, "target": TASK.choices[light]})
    return rows


def image_job(tiny: Any, folder: Path, model: Path, kind: str, **more: Any) -> Any:
    """A job of one task of images, with its inputs in place, and written to the folder."""
    job = tiny.job(folder, model, kind, **{"recipe": tiny.recipe(max_length=193), **more})
    paths = []
    for name, count in (("preparation", 42), ("validation", 10), ("asked", 13)):
        table = pa.Table.from_pylist(pictures(count, seed=count))
        path = folder / f"{name}.parquet"
        tables.write(table.drop_columns(["target"]) if name == "asked" else table, path)
        paths.append(tiny.put(folder, path))
    job = replace(job, tasks=(jobs.TaskData(TASK, *paths),), tokenizer=None)
    (folder / "job.json").write_text(jobs.to_json(job), "utf-8")
    return job


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_and_log_probabilities_are_those_of_the_library(tiny: Any, tmp_path: Path, variant: str) -> None:
    """Transformers' whole way, with the processor that ViT was published with or another, one image at a time."""
    import torch
    from transformers import AutoModelForImageClassification

    from acclimate_runners import building, classifying, network

    architecture, changes = VARIANTS[variant]
    folder = image_model(tiny, tmp_path / "model", architecture, **changes)
    theirs, told = AutoModelForImageClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    told["missing_keys"] = {name for name in told["missing_keys"] if not name.endswith(".num_batches_tracked")}
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = network.load({path.name: path for path in folder.iterdir()}, tiny.limits, max_length=193)
    assert loaded.labels == ("light", "dark")
    own = {name: tuple(t.shape) for name, t in loaded.weights.items()}
    assert {
        name: tuple(t.shape) for name, t in building.by_file_name(theirs, architecture).items()
    } == own and loaded.facts.parameters == sum(np.prod(shape) for shape in own.values())
    loaded.set_weights(classifying.begun(loaded, loaded.copy_weights(), TASK, seed=0))
    rows = pictures(5, seed=3)
    packed = packing.pack(classifying.images(TASK, rows, model=loaded), [[0]] * 5, max_length=193)
    found = network.last_logprobs(loaded, packed, np.tile(np.arange(2), (5, 1)))
    for row, each in zip(rows, found, strict=True):
        numbers = np.frombuffer(base64.b64decode(row["input"]), np.uint8).reshape(8, 8, 3)
        mean, deviation = (np.float32(changes.get(name, 0.5)) for name in ("image_mean", "image_std"))
        pixels = torch.from_numpy((numbers.astype(np.float32) / 255 - mean) / deviation).permute(2, 0, 1)[None]
        with torch.no_grad():
            expected = theirs.eval()(pixel_values=pixels).logits[0].log_softmax(-1)
        torch.testing.assert_close(each.float(), expected[[1, 0]], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("architecture", IMAGES)
def test_many_images_are_read_at_once(tiny: Any, tmp_path: Path, architecture: str) -> None:
    """Which are 192 numbers each, that is, not so many tokens."""
    from acclimate_runners import classifying, network

    folder, batches = image_model(tiny, tmp_path / "model", architecture), list[int]()
    loaded = network.load({path.name: path for path in folder.iterdir()}, tiny.limits, max_length=193)
    loaded.set_weights(classifying.begun(loaded, loaded.copy_weights(), TASK, seed=0))
    loaded.on_batch = lambda: batches.append(1)
    packed = packing.pack(classifying.images(TASK, pictures(100, seed=3), model=loaded), [[0]] * 100, max_length=193)
    network.last_logprobs(loaded, packed, np.tile(np.arange(2), (100, 1)))
    assert len(batches) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_the_library_saves_is_accepted(tiny: Any, tmp_path: Path, variant: str) -> None:
    from transformers import AutoModelForImageClassification

    architecture, changes = VARIANTS[variant]
    folder, saved = image_model(tiny, tmp_path / "model", architecture, **changes), tmp_path / "saved"
    AutoModelForImageClassification.from_pretrained(folder).save_pretrained(saved)
    assert models.inspect(saved, tiny.limits).parameters == models.inspect(folder, tiny.limits).parameters
    files = reading.of_folder(saved)
    assert sorted(files) == ["config.json", "model.safetensors"]
    assert adapter_files.kind_of(files) == "hf-image-classifier"


@pytest.mark.parametrize("architecture", IMAGES)
def test_shards_that_the_library_saves_are_read_to_the_numbers_of_one_file(
    tiny: Any, tmp_path: Path, architecture: str
) -> None:
    """As large models are saved; a ResNet's counters stand in shards, too."""
    from transformers import AutoModelForImageClassification

    from acclimate_runners import checking, network

    folder, saved = image_model(tiny, tmp_path / "model", architecture), tmp_path / "saved"
    AutoModelForImageClassification.from_pretrained(folder).save_pretrained(saved, max_shard_size="2KB")
    files = reading.of_folder(saved)
    assert len(shards.weights_of(files)) > 2 and set(files) == {path.name for path in saved.iterdir()}
    assert adapter_files.kind_of(files) == "hf-image-classifier"
    one = network.load(reading.of_folder(folder), tiny.limits, max_length=193)
    several = network.load(files, tiny.limits, max_length=193)
    assert several.facts.parameters == one.facts.parameters and list(several.weights) == list(one.weights)
    assert all(several.weights[name].equal(tensor) for name, tensor in one.weights.items())
    job = image_job(tiny, tmp_path / "job", saved, "check")
    assert len(checking.check(job, tmp_path / "job", lambda *words: None).results["losses"]) == 3


def test_imagenets_own_labels_are_read_and_its_two_cranes_told_apart_by_the_task(tiny: Any, tmp_path: Path) -> None:
    """A thousand names in 70 KiB, of which some are those of two kinds; a head with such names begins anew in a task, one that says them as the task does counts."""
    from acclimate_runners import classifying, network

    names = [f"{number}, of the family of things of kind {number}" for number in range(1000)]
    names[517], names[639] = names[134], names[638]
    for back in (134, 517):
        both = {name: number for number, name in enumerate(names)} | {names[134]: back}
        folder = image_model(tiny, tmp_path / str(back), labels=names, label2id=both)
        assert (folder / "config.json").stat().st_size > 1 << 16
        assert reading.besides_of(folder / "config.json") == reading.IMAGE_BESIDES
        facts = models.inspect(folder, tiny.limits)
        assert adapter_files.kind_of(reading.of_folder(folder)) == "hf-image-classifier"
    config = {**facts.config, "label2id": {**facts.config["label2id"], names[134]: 135}}
    assert "label2id is" in architectures.problems(config, tiny.limits.architectures)[0]
    small = image_model(tiny, tmp_path / "small", labels=("crane", "crane", "kite"))
    model = network.load({path.name: path for path in small.iterdir()}, tiny.limits, max_length=193)
    weights, choices = model.copy_weights(), ("kite", "crane (bird)", "crane (machine)")
    fresh = classifying.begun(model, weights, replace(TASK, choices=choices), seed=0)["classifier.weight"]
    assert model.labels == choices and not fresh[0].equal(weights["classifier.weight"][2])
    told = image_model(tiny, tmp_path / "told", labels=("crane (bird)", "crane (machine)", "kite"))
    model = network.load({path.name: path for path in told.iterdir()}, tiny.limits, max_length=193)
    weights = model.copy_weights()
    kept = classifying.begun(model, weights, replace(TASK, choices=choices), seed=0)["classifier.weight"]
    assert kept.equal(weights["classifier.weight"][[2, 0, 1]])


def test_what_is_no_image_classifier_is_refused(tiny: Any, tmp_path: Path) -> None:
    folder = image_model(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text("utf-8"))

    def said(**changes: Any) -> str:
        (folder / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
        with pytest.raises(Refusal) as caught:
            models.inspect(folder, tiny.limits)
        return "\n".join(caught.value.problems)

    assert "image_size 8 is not a multiple of patch_size 3" in said(patch_size=3)
    assert "expected ['ViTForImageClassification']" in said(architectures=["ViTForMaskedImageModeling"])
    assert "config.json asks for [1, 17, 16]" in said(image_size=16)
    (folder / "tokenizer.json").write_bytes(tiny.tokenizer.read_bytes())
    assert "tokenizer.json: a model of images has none" in said()


@pytest.mark.parametrize(
    ("architecture", "changes", "part"),
    [
        ("vit", {"image_mean": [0.5]}, "image_mean has 1 entries, num_channels is 3"),
        ("convnext", {"image_std": [0.5, 0.5, 0]}, "image_std is [0.5, 0.5, 0], expected a list of 1 to 9, each a number from 0.001 to 1000"),
        ("convnext", {"depths": [1, 2, 1]}, "hidden_sizes is 2, depths has 3 entries"),
        ("convnext", {"num_stages": 3}, "num_stages is 3, depths has 2 entries"),
        ("convnext", {"depths": [1, 10**9]}, "depths is [1, 1000000000], expected a list of 1 to 7, each a whole number from 1 to 1024"),
        ("convnext", {"depths": [1] * 8}, "depths is [1, 1, 1, 1, 1, 1, 1, 1], expected a list of 1 to 7"),
        ("convnext", {"depths": 3}, "depths is 3, expected a list of 1 to 7"),
        ("convnext", {"hidden_sizes": [-6, 8]}, "hidden_sizes is [-6, 8], expected a list of 1 to 7, each a whole number from 1 to 16384"),
        ("convnext", {"hidden_sizes": [8, 8]}, "tensor 'convnext.embeddings.patch_embeddings.bias' has shape [6], config.json asks for [8]"),
        ("convnext", {"layer_scale_init_value": 0}, "layer_scale_parameter' is not part of the model that config.json describes"),
        ("convnextv2", {"layer_scale_init_value": 0}, "'layer_scale_init_value' is not an allowed field of convnextv2"),
        ("convnextv2", {"hidden_sizes": [16384, 16384], "depths": [1024, 1024]}, "parameters, at most 100000 are allowed"),
        ("resnet", {"hidden_sizes": [8, 3]}, "hidden_sizes has 3, of which a bottleneck, 4 times narrower, leaves nothing"),
        ("resnet", {"hidden_sizes": [8]}, "hidden_sizes is 1, depths has 2 entries"),
        ("resnet", {"layer_type": "basic"}, "convolution.weight' has shape [2, 4, 1, 1], config.json asks for [8, 4, 3, 3]"),
        ("resnet", {"embedding_size": 0}, "embedding_size is 0, expected a whole number from 1 to 16384"),
        ("resnet", {"depths": [1024] * 2, "hidden_sizes": [16384] * 2}, "parameters, at most 100000 are allowed"),
        ("resnet", {"num_channels": 2**60}, "num_channels is 1152921504606846976, expected a whole number from 1 to 9"),
        ("convnextv2", {"drop_path_rate": 1}, "drop_path_rate is 1, expected a number from 0 to 0.9"),
    ],
)  # fmt: skip
def test_configs_that_are_refused(
    tiny: Any, tmp_path: Path, architecture: str, changes: dict[str, Any], part: str
) -> None:
    folder = image_model(tiny, tmp_path / "model", architecture)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")
    with pytest.raises(Refusal) as caught:
        models.inspect(folder, tiny.limits)
    assert part in "\n".join(caught.value.problems)


def test_images_of_any_size_are_read_where_something_is_left_of_them(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import classifying, network

    folder = image_model(tiny, tmp_path / "model", "convnext")
    model = network.load({path.name: path for path in folder.iterdir()}, tiny.limits, max_length=193)
    found = []
    for image in ("4x6x3", "8x3x3", "3x4x3", "8x8x1"):
        task = replace(TASK, image=image)
        height, width, channels = map(int, image.split("x"))
        numbers = np.arange(height * width * channels, dtype=np.uint8)
        rows = [{"example": "a", "input": base64.b64encode(numbers.tobytes()).decode()}]
        if image != "4x6x3":
            with pytest.raises(Refusal, match="the model reads such of 3 channels and at least 4x4"):
                classifying.images(task, rows, model=model)
            continue
        model.set_weights(classifying.begun(model, model.copy_weights(), task, seed=0))
        packed = packing.pack(classifying.images(task, rows, model=model), [[0]], max_length=193)
        found.append(network.last_logprobs(model, packed, np.tile(np.arange(2), (1, 1))))
    assert len(found) == 1 and abs(float(found[0].exp().sum()) - 1) < 1e-6


def test_what_batch_norms_have_seen_is_read_and_never_changed(tiny: Any, tmp_path: Path) -> None:
    """Counters, which the library writes too, are read over; the statistics are part of what is prepared, the same as submitted."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForImageClassification

    from acclimate_runners import network, preparation

    folder = image_model(tiny, tmp_path / "model", "resnet")
    files = {path.name: path for path in folder.iterdir()}
    saved = load_file(folder / "model.safetensors")
    seen = {name: tensor for name, tensor in saved.items() if ".running_" in name}
    assert len(seen) == 2 * sum(name.endswith("normalization.bias") for name in saved)
    # Of images that differ from row to row and batch to batch.
    given = {"recipe": tiny.recipe(epochs=1, lr_grid=(1e-2,), max_length=193, selection=Selection("nll", 0, ("last",)))}
    job = image_job(tiny, tmp_path / "job", folder, "prepare", stages=(("hue", 11),), **given)
    (entry,) = preparation.prepare(job, tmp_path / "job", lambda *words: None).results["prepared"]
    made = load_file(tmp_path / "job/out" / entry["file"])
    assert made.keys() == saved.keys() and all(torch.equal(made[name], tensor) for name, tensor in seen.items())
    moved = {
        name for name, tensor in made.items() if not name.startswith("classifier") and not tensor.equal(saved[name])
    }
    assert moved == {name for name in saved if not name.startswith("classifier")} - seen.keys()
    # A file with the library's counters is the same model, and one whose counter is anything else is none.
    AutoModelForImageClassification.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    counted = load_file(tmp_path / "saved/model.safetensors")
    counters = counted.keys() - saved.keys()
    assert counters and all(counted[name].dtype == torch.int64 for name in counters)
    loaded = network.load(
        {**files, "model.safetensors": tmp_path / "saved/model.safetensors"}, tiny.limits, max_length=193
    )
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in saved.items())
    one = min(counters)
    for changes, part in (
        ({one: torch.zeros(1, dtype=torch.int64)}, "has dtype 'I64', allowed are"),
        ({one: torch.zeros(())}, "is not part of the model that config.json describes"),
        ({"resnet.other.num_batches_tracked": torch.tensor(3)}, "is not part of the model that config.json describes"),
        ({min(seen): torch.zeros(seen[min(seen)].shape, dtype=torch.int64)}, "has dtype 'I64', allowed are"),
    ):
        save_file({**counted, **changes}, folder / "model.safetensors")
        with pytest.raises(Refusal) as caught:
            models.inspect(folder, tiny.limits)
        assert part in "\n".join(caught.value.problems)
    save_file({**saved, max(seen): -saved[max(seen)]}, folder / "model.safetensors")
    with pytest.raises(Refusal, match="holds a variance below 0"):
        network.load(files, tiny.limits, max_length=193)


def test_adapters_have_no_place_in_convolutions(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import preparation

    recipe = tiny.recipe(max_length=193, method="lora", lora=Lora(2, 4.0, ("attention", "mlp")))
    folder = image_model(tiny, tmp_path / "model", "resnet")
    job = image_job(tiny, tmp_path / "job", folder, "prepare", stages=(("hue", 11),), recipe=recipe)
    with pytest.raises(Refusal, match="adapters on attention and mlp, which resnet has no layers of"):
        preparation.prepare(job, tmp_path / "job", lambda *words: None)


def test_images_and_texts_are_told_apart(tiny: Any, tmp_path: Path) -> None:
    from acclimate_runners import classifying, network

    def loaded(folder: Path) -> Any:
        return network.load({path.name: path for path in folder.iterdir()}, tiny.limits, max_length=16)

    sees = loaded(image_model(tiny, tmp_path / "sees"))
    reads = loaded(tiny.model(tmp_path / "reads", "bert", id2label={"0": "dark", "1": "light"}))
    for model, task, says in (
        (sees, replace(TASK, image=""), "reads images, which the rows of task hue are not"),
        (reads, TASK, "reads texts, which the rows of task hue are not"),
    ):
        with pytest.raises(Refusal, match=says):
            classifying.begun(model, model.copy_weights(), task, seed=0)
    with pytest.raises(Refusal, match="has images of 8x8x1, the model reads 8x8x3"):
        classifying.images(replace(TASK, image="8x8x1"), [], model=sees)
    with pytest.raises(Refusal, match="the input of 'a' is no image of 8x8x3 in base64"):
        classifying.images(TASK, [{"example": "a", "input": "AAAA"}], model=sees)
    assert splits.image_bytes("no base64!", TASK) is None
    assert from_values(json.loads(json.dumps(TASK.document() | {"tokenize": "apart"}))) == TASK
    assert "image" not in replace(TASK, image="").document()


@pytest.mark.parametrize(
    ("architecture", "method"),
    [(name, method) for name in IMAGES for method in ("full", "lora") if (name, method) != ("resnet", "lora")],
)
def test_it_is_checked_prepared_and_evaluated_to_the_same_bytes(
    tiny: Any, tmp_path: Path, architecture: str, method: str
) -> None:
    from acclimate_runners import checking, evaluation, preparation

    model = image_model(tiny, tmp_path / "model", architecture, labels=("many", "few", "none"))
    how = {"method": "lora", "lora": Lora(2, 4.0, ("attention", "mlp"))} if method == "lora" else {}
    recipe = tiny.recipe(
        epochs=2, lr_grid=(1e-2,), max_length=193, selection=Selection("nll", 0, ("last",)), packing=True, **how
    )
    made = []
    for name in ("first", "again"):
        job = image_job(tiny, tmp_path / name, model, "prepare", stages=(("hue", 11),), recipe=recipe)
        assert jobs.from_json(jobs.to_json(job)) == job
        made.append(preparation.prepare(job, tmp_path / name, lambda *words: None))
    assert made[0].files == made[1].files and len(made[0].files) == 1
    (entry,) = made[0].results["prepared"]
    assert not entry["base"] and abs(entry["losses"][0] - np.log(2)) < 0.3 and entry["losses"][-1] < entry["losses"][0]
    kind = image_classifiers.IMAGES[architecture]
    assert reading.read_header(tmp_path / "first/out" / entry["file"])[kind.score].shape[0] == 2
    check = image_job(tiny, tmp_path / "check", model, "check", recipe=recipe)
    assert len(checking.check(check, tmp_path / "check", lambda *words: None).results["losses"]) == 3
    prepared = {"hue/11": tiny.put(tmp_path / "asked", tmp_path / "first/out" / entry["file"])}
    stages = (("hue", None, "direct"), ("hue", 11, "prepared"))
    more: dict[str, Any] = {"entrant": "fox", "stages": stages, "prepared": prepared, "recipe": recipe}
    job = image_job(tiny, tmp_path / "asked", model, "evaluate", **more)
    outcome = evaluation.evaluate(job, tmp_path / "asked", lambda *words: None)
    truths = [row["target"] for row in pictures(13, seed=13)]
    for entry in outcome.results["predictions"]:
        table = tables.read(tmp_path / "asked/out" / entry["file"], tables.PREDICTIONS)
        logs = np.array(table.column("loglikelihoods").to_pylist())
        np.testing.assert_allclose(np.exp(logs).sum(axis=1), 1, atol=1e-6)
    # What is light is told from what is dark after a few steps.
    assert [TASK.choices[place] for place in logs.argmax(axis=1)] == truths


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_preparation_of_images_counts_by_the_image(tiny: Any, tmp_path: Path, method: str) -> None:
    """For each weight, patch and image 6 operations; 4 where adapters are learned, and 6 for these and the head."""
    from acclimate_runners import efforts, preparation

    targets = ("attention", "mlp")
    how = {"method": "lora", "lora": Lora(2, 4.0, targets)} if method == "lora" else {}
    recipe = tiny.recipe(epochs=1, lr_grid=(1e-2,), max_length=193, **how)
    model = image_model(tiny, tmp_path / "model", "vit")
    job = image_job(tiny, tmp_path / "job", model, "prepare", stages=(("hue", 11),), recipe=recipe)
    outcome = preparation.prepare(job, tmp_path / "job", lambda *words: None)
    (selection,) = outcome.results["selections"]
    cost = selection["cost"]
    config, image = json.loads((model / "config.json").read_text("utf-8")), (8, 8, 3)
    each = 6 * efforts.products(config, image)
    if method == "lora":
        shapes = architectures.shapes(config)
        # Adapters of rank 2 on 5 tokens, 4 patches and one before them; and one gradient more of the head.
        beside = 5 * 2 * sum(sum(shapes[name]) for name in tensors.linear(shapes, targets))
        each = 4 * efforts.products(config, image) + 6 * beside + 2 * 2 * 16
    assert cost["tokens"] == 42 * 8 * 8 * 3 and cost["flops"] == 42 * each


@pytest.mark.parametrize("architecture", IMAGES)
@pytest.mark.parametrize("checkpoint", [3, 6, 10])
def test_cut_off_it_goes_on_to_the_same_bytes(tiny: Any, tmp_path: Path, architecture: str, checkpoint: int) -> None:
    """While a checkpoint is written: in the fit of the rate, near its end, and in that of the seed."""
    model = image_model(tiny, tmp_path / "model", architecture)
    recipe = tiny.recipe(epochs=1, lr_grid=(1e-2,), max_length=193, selection=Selection("nll", 0, ("last",)))
    given = {"recipe": recipe, "stages": (("hue", 11),)}
    tiny.require_same_bytes_cut_off(
        tmp_path, lambda folder, **more: image_job(tiny, folder, model, "prepare", **given, **more), checkpoint
    )


@pytest.mark.parametrize("architecture", IMAGES)
def test_parts_of_a_batch_give_the_same_loss_and_recomputing_the_same_bytes(
    tiny: Any, tmp_path: Path, architecture: str
) -> None:
    from acclimate_runners import classifying, computing, preparation

    computing.be_deterministic(1)
    job = image_job(tiny, tmp_path, image_model(tiny, tmp_path / "model", architecture), "check")
    model, tokenizer = preparation.open_model(job, tmp_path)
    data = preparation.pack_splits(job, tmp_path, job.tasks[0], model, tokenizer)
    start = dict(classifying.begun(model, model.copy_weights(), TASK, seed=0))

    def fitted(micro: int | None, dtype: str = "float32") -> Any:
        model.set_weights(start)
        recipe = tiny.recipe(max_length=193, dtype=dtype)
        done = preparation.fit(model, data, recipe, lr=0.003, seed=12, stop_after=3, micro_batch=micro)
        return done.losses, model.copy_weights()

    made = {micro: fitted(micro) for micro in (None, 1, 2, 4)}
    for losses, _ in made.values():
        np.testing.assert_allclose(losses, made[None][0], atol=1e-5)
    half, _ = fitted(None, "bfloat16")
    assert half != made[None][0] and half == pytest.approx(made[None][0], rel=0.02)
    assert fitted(None, "bfloat16")[0] == half
    model.recompute()
    losses, weights = fitted(2)
    assert losses == made[2][0] and all(weights[name].equal(each) for name, each in made[2][1].items())
