"""Weights in one file or in several: which files a submission has, and that an index and its shards say the same.

Weights are `model.safetensors`; or, as save_pretrained writes what is larger than a shard, `model.safetensors.index.json` with
`model-00001-of-0000N.safetensors` to N. With the standard library alone, and before any other touches a file.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOST = 128
"""Shards of a model."""

_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)
_TOTALS = ("total_size", "total_parameters")


def is_shard(name: str) -> bool:
    """Whether a file is called as a shard is."""
    return _SHARD.fullmatch(name) is not None


def weights_of(names: Iterable[str]) -> list[str]:
    """Names of the safetensors files among a submission's files, in the order of their numbers."""
    return sorted(name for name in names if name == WHOLE or is_shard(name))


def of_folder(folder: Path, *, besides: Iterable[str]) -> dict[str, Path]:
    """The files of a model's folder that make a submission, name -> path; whether they are there is not asked.

    Args:
        folder: anything else in it is no part of the submission.
        besides: names of the files other than the weights.
    """
    names = list(besides)
    if (folder / INDEX).exists():
        names += [INDEX, *sorted(path.name for path in folder.iterdir() if is_shard(path.name))]
    if (folder / WHOLE).exists() or INDEX not in names:
        names.append(WHOLE)
    return {name: folder / name for name in sorted(names)}


def lacking(names: Iterable[str]) -> list[str]:
    """What is wrong with the names of a submission's weight files; empty where they are one file, or an index and all its shards."""
    given = set(names)
    found = {name: match for name in sorted(given) if (match := _SHARD.fullmatch(name))}
    if WHOLE in given:
        return [f"{name}: beside {WHOLE}; one file or shards, not both" for name in (INDEX, *found) if name in given]
    if INDEX not in given:
        return [f"{WHOLE}: missing", *(f"{name}: a shard without {INDEX}" for name in found)]
    totals = {int(match[2]) for match in found.values()}
    if not totals:
        return [f"{INDEX}: without shards (model-00001-of-0000N.safetensors)"]
    if len(totals) > 1:
        return [f"the shards are of {' and of '.join(map(str, sorted(totals)))}: of two models"]
    (total,) = totals
    if not 1 <= total <= MOST:
        return [f"{total} shards, at most {MOST} are read"]
    expected = [f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)]
    found_problems = [f"{name}: missing" for name in expected if name not in given]
    return found_problems + [f"{name}: there is no such shard of {total}" for name in found if name not in expected]


def compare(index: Mapping[str, Any], shards: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Differences between a parsed index and the headers of its shards.

    Args:
        index: the object of model.safetensors.index.json.
        shards: file name -> tensor's name -> its bytes.
    """
    extra = sorted(set(index) - {"metadata", "weight_map"})
    problems = [f"{INDEX}: {repr(name)[:60]} is not one of metadata and weight_map" for name in extra]
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        return [*problems, f"{INDEX}: weight_map is no object of tensor names and file names"]
    problems += [
        f"{INDEX}: {repr(file)[:120]} is not one of its shards" for file in sorted(set(where.values()) - set(shards))
    ]
    holders: dict[str, list[str]] = {}
    for file, tensors in shards.items():
        for name in tensors:
            holders.setdefault(name, []).append(file)
    for name, files in holders.items():
        shown = repr(name)[:120]
        if len(files) > 1:
            problems.append(f"tensor {shown} stands in {' and '.join(files)}")
        elif where.get(name) != files[0]:
            problems.append(f"{INDEX}: tensor {shown} is in {files[0]}, the index says {repr(where.get(name))[:120]}")
    problems += [
        f"{INDEX}: tensor {repr(name)[:120]} is in none of the shards" for name in where if name not in holders
    ]
    problems += [f"{file}: it holds no tensor" for file, tensors in shards.items() if not tensors]
    return problems + _totals(index.get("metadata", {}), sum(sum(tensors.values()) for tensors in shards.values()))


def _totals(metadata: Any, size: int) -> list[str]:
    fine = isinstance(metadata, dict) and all(type(value) in (int, str) for value in metadata.values())
    if not fine or any(type(metadata.get(name, 0)) is not int for name in _TOTALS):
        return [f"{INDEX}: metadata is no object of whole numbers and texts"]
    if metadata.get("total_size", size) != size:
        return [f"{INDEX}: total_size is {metadata['total_size']}, the tensors of the shards have {size} bytes"]
    return []
