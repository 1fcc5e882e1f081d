"""What a definition allows of a submission's manifest: the same rules for the server, which refuses it, and for the auditor, who reads it afterwards."""

from collections.abc import Mapping
from typing import Any

from acclimate_competitions import bases, digests
from acclimate_competitions.definition import Competition

STANDS = "stands"
"""Key of a manifest whose model is that of an earlier submission: {round, commitment}."""


def model_of(manifest: Mapping[str, Any]) -> str:
    """The digest of a manifest's model, as ModelPrepared has it in `base`."""
    return digests.of_json({item["name"]: item["sha256"] for item in manifest["files"]})


def beyond(
    manifest: Mapping[str, Any], competition: Competition, *, entrant: str, public: Mapping[str, str]
) -> list[str]:
    """Where a manifest, whose keys and files have their form, is not what the definition allows; one sentence each.

    Args:
        manifest: it.
        competition: the definition.
        entrant: whose it is; an anchor has the definition's model.
        public: RoundDefined's files: name -> digest.
    """
    problems = [*_size(manifest, competition, public), *_limits(manifest, competition)]
    anchor = competition.anchor(entrant)
    if anchor is not None and (found := model_of(manifest)) != anchor.model:
        problems.append(f"the files are the model {found}, the definition's anchor is {anchor.model}")
    return problems


def _size(manifest: Mapping[str, Any], competition: Competition, public: Mapping[str, str]) -> list[str]:
    problems, files = [], manifest["files"]
    size, most = sum(f["size"] for f in files), competition.submission.max_bytes
    if size > most:
        problems.append(f"the files have {size} bytes, at most {most} are allowed")
    fixed = public.get("tokenizer.json")
    # An adapter has its base's.
    tokenizer = {f["name"]: f["sha256"] for f in files}.get("tokenizer.json", fixed)
    if fixed is not None and tokenizer != fixed:
        problems.append(f"tokenizer.json has {tokenizer}, the competition fixes {fixed}")
    return problems


def _limits(manifest: Mapping[str, Any], competition: Competition) -> list[str]:
    rules, problems = competition.submission, []
    if manifest["kind"] not in rules.kinds:
        problems.append(f"kind is {manifest['kind']!r}, allowed: {', '.join(rules.kinds)}")
    elif manifest["kind"] == bases.KIND and manifest["base"] not in rules.bases:
        problems.append(f"base is {manifest['base']!r}, an adapter's must be one of: {', '.join(rules.bases)}")
    if manifest["weights_after"] not in rules.weights_after:
        problems.append(f"weights_after is {manifest['weights_after']!r}, allowed: {', '.join(rules.weights_after)}")
    parameters = manifest["parameters"]
    if type(parameters) is not int or not 0 < parameters <= rules.max_parameters:
        problems.append(f"parameters is {parameters!r}, must be a whole number from 1 to {rules.max_parameters}")
    return problems
