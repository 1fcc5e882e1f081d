"""Bases: models that a competition names, on which entrants may submit adapters. They lie in its folder, and are public as its splits are.

    bases/<name>/config.json  model.safetensors (or its index and shards)  tokenizer.json

The definition names each with the digest of the canonical JSON of {file name: digest}, which is how a submitted model has its digest, too.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from acclimate_competitions import digests

FOLDER = "bases"
KIND = "lora-adapter"
"""The kind of submission that stands on one."""

_FILE = re.compile(rf"{FOLDER}/([a-z0-9][a-z0-9-]{{0,62}})/[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}")


def in_folder(folder: Path) -> dict[str, Path]:
    """The files of all bases of a competition's folder, by name, such as "bases/small/config.json"."""
    return {
        f"{FOLDER}/{path.parent.name}/{path.name}": path
        for path in sorted((folder / FOLDER).glob("*/*"))
        if path.is_file()
    }


def tokenizer(folder: Path) -> str | None:
    """Digest of the tokenizer that a competition's folder fixes, a base's too; None where it fixes none."""
    path = folder / "tokenizer.json"
    return digests.of_file(path) if path.is_file() else None


def of(files: Mapping[str, str], base: str) -> dict[str, str]:
    """The files of one base among a round's public files: file name -> digest."""
    start = f"{FOLDER}/{base}/"
    return {name.removeprefix(start): digest for name, digest in files.items() if name.startswith(start)}


def problems(files: Mapping[str, str], named: Mapping[str, str]) -> list[str]:
    """Where public files are not exactly those of the bases that a definition names.

    Args:
        files: name -> digest, of all public files; those that are no base's are left alone.
        named: base -> digest.
    """
    found = []
    for name in files:
        known = _FILE.fullmatch(name)
        if name.startswith(f"{FOLDER}/") and (known is None or known[1] not in named):
            found.append(f"{name}: the definition names no such base")
    for base, digest in named.items():
        there = of(files, base)
        if not there:
            found.append(f"{FOLDER}/{base}: the base is missing")
        elif (made := digests.of_json(there)) != digest:
            found.append(f"{FOLDER}/{base}: the digest of its files is {made}, the definition says {digest}")
    return found
