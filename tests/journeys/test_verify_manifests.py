"""An organizer with a server of their own accepts what the definition does not allow: the signatures are good, and the audit names it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rounds_made

from acclimate import verify

honest_manifest = rounds_made.manifest_of
Edit = Callable[[dict[str, Any]], dict[str, Any]]


def failed(folder: Path) -> dict[str, tuple[str, str]]:
    bundle = rounds_made.make(folder / "made").write(folder / "bundle")
    return {check.name: (check.where, check.meaning) for check in verify.verify(bundle).failed}


def larger(manifest: dict[str, Any]) -> dict[str, Any]:
    return {**manifest, "files": [{**file, "size": 10_000_000} for file in manifest["files"]]}


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda m: {**m, "kind": "hf-sequence-classifier"}, "kind is 'hf-sequence-classifier', allowed: hf-causal-lm"),
        (
            lambda m: {**m, "parameters": 7_000_000_000},
            "parameters is 7000000000, must be a whole number from 1 to 1000000",
        ),
        (lambda m: {**m, "weights_after": "never"}, "weights_after is 'never', allowed: publish, auditor, delete"),
        (larger, "the files have 30000000 bytes, at most 20000000 are allowed"),
        (lambda m: {**m, "kind": "lora-adapter", "base": "mine"}, "kind is 'lora-adapter'"),
    ],
)
def test_an_entry_that_the_definition_does_not_allow_is_named(
    edit: Edit, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def manifest_of(made: rounds_made.Made, entrant: str, version: int) -> dict[str, Any]:
        manifest = honest_manifest(made, entrant, version)
        return edit(manifest) if (entrant, version) == ("ada", 2) else manifest

    monkeypatch.setattr(rounds_made, "manifest_of", manifest_of)
    found = failed(tmp_path)
    assert set(found) == {"submissions"}
    where, meaning = found["submissions"]
    assert where.startswith("submissions.jsonl, line ")
    assert f"the definition does not allow this submission of ada: {why}" in meaning


@pytest.mark.parametrize(
    ("quota", "why"),
    [
        ("total = 1, per_day = 1", "2 submissions of ada were accepted, the definition allows 1"),
        ("total = 5, per_day = 1", "2 submissions of ada that were committed on 2027-03-01 (UTC) were accepted"),
    ],
)
def test_more_submissions_of_one_entrant_than_the_definition_gives_are_named(
    quota: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    definition = rounds_made.DEFINITION.replace("total = 5, per_day = 5", quota)
    assert definition != rounds_made.DEFINITION
    if quota.startswith("total = 1"):
        honest_append = rounds_made.Made.append
        days = iter(range(20))

        def append(made: rounds_made.Made, request: dict[str, Any], **options: Any) -> int:
            if request["type"] == "SubmissionCommitted":
                made.now = made.now.replace(day=2 + next(days))
            return honest_append(made, request, **options)

        monkeypatch.setattr(rounds_made.Made, "append", append)
    monkeypatch.setattr(rounds_made, "DEFINITION", definition)
    found = failed(tmp_path)
    assert found["submissions"][0] == "submissions.jsonl"
    assert why in found["submissions"][1]
    assert set(found) == {"submissions"}
