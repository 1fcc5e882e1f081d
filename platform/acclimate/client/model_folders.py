"""A model's folder on an entrant's machine: read as strictly as the server will, and its manifest made."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acclimate import files
from acclimate.client.connection import Client
from acclimate_competitions import bases, digests
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import Record
from acclimate_runners import adapter_files, reading
from acclimate_runners.reading import ModelFacts


def manifest(
    client: Client, model: Path, about: Mapping[str, Any], *, of: tuple[Record, Competition], entrant: str
) -> dict[str, Any]:
    """The manifest of a model's folder that the server will accept, so that nothing is committed to, and no quota used, in vain.

    Args:
        client: a connection, by which the config of an adapter's base is got.
        model: the folder; each file is read once for its digest.
        about: title, family, base, released, weights_after; the base of an adapter is taken from its files.
        of: the round's definition.
        entrant: whose it is.

    Raises:
        Refusal: model_invalid, manifest_invalid, file_unreadable.
    """
    defined, competition = of
    rules, given = competition.submission, adapter_files.of_folder(model)
    if about["weights_after"] not in rules.weights_after:
        raise Refusal(
            "manifest_invalid",
            f"weights after the round: {about['weights_after']!r}; this round allows {', '.join(rules.weights_after)}",
            hint="--weights-after says what becomes of them",
        )
    base = adapter_files.stands_on(given, rules, folder=model)
    if base is not None and about["base"] not in (None, "", base):
        sentence = f"--base is {about['base']!r}, the adapter stands on {base!r}"
        raise Refusal("manifest_invalid", sentence, hint="leave it out; nothing was sent or written")
    facts = _inspected(client, given, defined, competition, base=base)
    try:
        listed: list[dict[str, Any]] = [
            {"name": name, "size": path.stat().st_size, "sha256": digests.of_file(path)} for name, path in given.items()
        ]
    except OSError as error:
        raise files.failed(model, error) from error
    return {
        "v": 1,
        "round": defined.round,
        "entrant": entrant,
        "kind": adapter_files.kind_of(given),
        "files": listed,
        **about,
        "base": base or about["base"],
        "parameters": facts.parameters,
    }


def _inspected(
    client: Client, given: Mapping[str, Path], defined: Record, competition: Competition, *, base: str | None
) -> ModelFacts:
    rules = competition.submission
    if base is None:
        return reading.inspect(given, rules, tokenizer=defined["files"].get("tokenizer.json"))
    with tempfile.TemporaryDirectory(prefix="acclimate-") as folder:
        config = Path(folder) / "config.json"
        name = f"{bases.FOLDER}/{base}/{config.name}"
        client.file(defined.round, name, config)
        if digests.of_file(config) != defined["files"].get(name):
            raise Refusal("log_inconsistent", f"the server's {name} is not the file that {defined.round} commits to")
        return adapter_files.inspect(given, rules, config=config).facts
