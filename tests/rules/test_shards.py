"""Weights in shards: read as strictly as one file, and to the same numbers."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from acclimate_competitions.errors import Refusal
from acclimate_runners import models, reading, shards

INDEX = "model.safetensors.index.json"


def split(folder: Path, *, parts: int = 3) -> list[Path]:
    """Put a folder's weights into shards; the tensors go round."""
    from safetensors.torch import load_file, save_file

    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    files: list[dict[str, Any]] = [{} for _ in range(parts)]
    for number, name in enumerate(sorted(tensors)):
        files[number % parts][name] = tensors[name]
    paths = [folder / f"model-{n + 1:05}-of-{parts:05}.safetensors" for n in range(parts)]
    for path, part in zip(paths, files, strict=True):
        save_file(part, path, metadata={"format": "pt"})
    where = {name: path.name for path, part in zip(paths, files, strict=True) for name in part}
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}))
    whole.unlink()
    return paths


@pytest.fixture
def model(tiny: Any, tmp_path: Path) -> Path:
    return tiny.model(tmp_path / "model")


def of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


def refused(folder: Path, tiny: Any) -> str:
    with pytest.raises(Refusal) as caught:
        models.inspect(folder, tiny.limits)
    assert caught.value.code == "model_invalid"
    return "\n".join(caught.value.problems)


def index(folder: Path, **changes: Any) -> None:
    path = folder / INDEX
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_shards_are_read_to_the_numbers_of_one_file(model: Path, tiny: Any, tmp_path: Path) -> None:
    import torch

    from acclimate_runners import network

    shutil.copytree(model, tmp_path / "parts")
    split(tmp_path / "parts")
    one, several = (network.load(of(folder), tiny.limits, max_length=16) for folder in (model, tmp_path / "parts"))
    assert several.facts.parameters == one.facts.parameters and several.facts.config == one.facts.config
    assert several.facts.bytes == sum(path.stat().st_size for path in (tmp_path / "parts").iterdir())
    assert list(several.weights) == list(one.weights)
    assert all(torch.equal(several.weights[name], one.weights[name]) for name in one.weights)


def test_shards_that_the_library_saves_are_accepted_and_keep_their_dtype(tiny: Any, tmp_path: Path) -> None:
    import torch

    from acclimate_runners import network

    first = tiny.model(tmp_path / "first", tie_word_embeddings=False)
    loaded = network.load(of(first), tiny.limits, max_length=16)
    saved = tmp_path / "saved"
    loaded.model.to(torch.bfloat16).save_pretrained(saved, max_shard_size="3KB")
    (saved / "generation_config.json").unlink(missing_ok=True)
    (saved / "tokenizer.json").write_bytes(tiny.tokenizer.read_bytes())
    names = shards.weights_of(path.name for path in saved.iterdir())
    assert len(names) > 2 and INDEX in of(saved)
    facts = models.inspect(saved, tiny.limits)
    assert facts.parameters == loaded.facts.parameters
    assert {tensor.dtype for name in names for tensor in reading.read_header(saved / name).values()} == {"BF16"}
    again = network.load(of(saved), tiny.limits, max_length=16)
    assert all(torch.equal(again.weights[name], t.to(torch.bfloat16).float()) for name, t in loaded.weights.items())


def test_shards_that_are_missing_double_or_of_two_models_are_refused(model: Path, tiny: Any) -> None:
    whole = (model / "model.safetensors").read_bytes()
    first, second, third = split(model)
    kept = second.read_bytes()
    second.unlink()
    assert f"{second.name}: missing" in refused(model, tiny)
    second.write_bytes(kept)
    (model / "model.safetensors").write_bytes(whole)
    assert f"{INDEX}: beside model.safetensors; one file or shards, not both" in refused(model, tiny)
    (model / "model.safetensors").unlink()
    (model / "model-00004-of-00003.safetensors").write_bytes(kept)
    assert "there is no such shard of 3" in refused(model, tiny)
    (model / "model-00004-of-00003.safetensors").rename(model / "model-00001-of-00004.safetensors")
    assert "the shards are of 3 and of 4: of two models" in refused(model, tiny)
    (model / "model-00001-of-00004.safetensors").unlink()
    models.inspect(model, tiny.limits)
    second.write_bytes(third.read_bytes())
    said = refused(model, tiny)
    assert f"stands in {second.name} and {third.name}" in said and "is in none of the shards" in said
    second.write_bytes(kept)
    kept_index = (model / INDEX).read_bytes()
    (model / INDEX).unlink()
    assert f"{first.name}: a shard without {INDEX}" in refused(model, tiny)
    (model / INDEX).write_bytes(kept_index)
    for path in (first, second, third):
        path.unlink()
    assert "without shards" in refused(model, tiny)


def test_an_index_must_say_what_its_shards_do(model: Path, tiny: Any) -> None:
    first, second, _ = split(model)
    where = json.loads((model / INDEX).read_text())["weight_map"]
    name = next(name for name, file in where.items() if file == first.name)
    for changes, part in (
        ({"weight_map": {**where, name: second.name}}, f"is in {first.name}, the index says '{second.name}'"),
        ({"weight_map": {**where, name: "../../elsewhere"}}, "'../../elsewhere' is not one of its shards"),
        ({"weight_map": {**where, "more": first.name}}, "tensor 'more' is in none of the shards"),
        ({"weight_map": {n: f for n, f in where.items() if n != name}}, "the index says None"),
        ({"weight_map": [where]}, "weight_map is no object"),
        ({"weight_map": {**where, name: 1}}, "weight_map is no object"),
        ({"metadata": {"total_size": 7}}, "total_size is 7, the tensors of the shards have"),
        ({"metadata": {"total_size": "much"}}, "metadata is no object of whole numbers and texts"),
        ({"metadata": {"more": []}}, "metadata is no object of whole numbers and texts"),
        ({"code": "evil.py"}, "'code' is not one of metadata and weight_map"),
    ):
        before = (model / INDEX).read_bytes()
        index(model, **changes)
        assert part in refused(model, tiny)
        (model / INDEX).write_bytes(before)
    for text, part in ((b'{"weight_map": {}, "weight_map": {}}', "a key stands twice"), (b"[]", "not a JSON object")):
        (model / INDEX).write_bytes(text)
        assert part in refused(model, tiny)


def test_each_shard_is_read_as_strictly_as_one_file(model: Path, tiny: Any) -> None:
    first, second, third = split(model)
    first.write_bytes(b"\x80\x04 a pickle")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    second.write_bytes(struct.pack("<Q", len(header)) + header + b"1234567")
    third.write_bytes(third.read_bytes()[:-1])
    said = refused(model, tiny)
    assert f"{first.name}: this is a pickle" in said
    assert f"{second.name}: the tensors end at 8, the data at 7" in said and f"{third.name}: the tensors end at" in said


def test_shards_of_another_model_than_the_configs_are_refused(model: Path, tiny: Any) -> None:
    split(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 23}))
    assert f"{INDEX}: tensor" in refused(model, tiny)


def test_nan_in_one_shard_is_found(model: Path, tiny: Any) -> None:
    from safetensors.torch import load_file, save_file

    from acclimate_runners import network

    path = split(model)[1]
    tensors = load_file(path)
    next(iter(tensors.values())).flatten()[0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(Refusal, match="holds NaN or infinity") as caught:
        network.load(of(model), tiny.limits, max_length=16)
    assert caught.value.code == "model_invalid"


def test_what_of_a_folder_is_submitted(model: Path) -> None:
    (model / "README.md").write_text("words")
    assert sorted(reading.of_folder(model)) == sorted(reading.NAMES)
    paths = split(model, parts=2)
    assert sorted(reading.of_folder(model)) == sorted([*reading.BESIDES, INDEX, *(path.name for path in paths)])
