"""A bundle whose entry stands from an earlier round of the same log, and one with an anchor: what an auditor is told, and what is found out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import rounds_made

from acclimate import verify
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

NAME = "standing"
EARLIER = digests.of_bytes(b"the commitment of the earlier round")


@dataclass
class Past:
    """What the log has of an earlier round, and what ada's manifest says of it now."""

    accepted_by: str = "ada"
    accepted_entrant: str = "ada"
    base: str = ""
    prepared: bool = True
    prepared_by: str = "evaluator"
    stands: dict[str, Any] | None = field(default_factory=dict)
    commitment: str = EARLIER


honest_manifest, honest_seal = rounds_made.manifest_of, rounds_made.seal_holdout


def play(past: Past, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    earlier: dict[str, str] = {}

    def logged_before(made: rounds_made.Made) -> None:
        defined = records.parse(made.entries[0])
        earlier["id"] = defined.round
        fields = {"entrant": past.accepted_entrant, "commitment": past.commitment}
        accepted = records.sign("SubmissionAccepted", defined.round, fields, key=rounds_made.key(past.accepted_by))
        index = made.append(accepted)
        if past.prepared:
            base = past.base or rounds_made.base_of(honest_manifest(made, "ada", 2))
            told = {"submission": index, "task": "tint", "seed": 11, "recipe": defined["recipe"], "base": base}
            told |= {"code": rounds_made.CODE, "hardware": "cpu/x86_64", **rounds_made.fit_of("ada", "tint", 11)}
            by = rounds_made.key(past.prepared_by)
            made.append(records.sign("ModelPrepared", defined.round, told, key=by))
        honest_seal(made)

    def manifest_of(made: rounds_made.Made, entrant: str, version: int) -> dict:
        manifest = honest_manifest(made, entrant, version)
        if entrant == "ada" and version == 2 and past.stands is not None:
            manifest["stands"] = past.stands or {"round": earlier["id"], "commitment": EARLIER}
        return manifest

    monkeypatch.setattr(rounds_made, "seal_holdout", logged_before)
    monkeypatch.setattr(rounds_made, "manifest_of", manifest_of)
    return rounds_made.make(folder / "made").write(folder / "bundle")


def found(bundle: Path) -> dict[str, tuple[str, str, str]]:
    return {check.name: (check.status, check.where, check.meaning) for check in verify.verify(bundle).checks}


def test_the_same_model_in_both_rounds_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = found(play(Past(), monkeypatch, tmp_path))
    assert [name for name, (status, _, _) in checks.items() if status == "FAILED"] == []
    assert checks[NAME][:2] == ("ok", "1 standing entry")


def test_nothing_is_said_where_nothing_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert NAME not in found(play(Past(stands=None), monkeypatch, tmp_path))


@pytest.mark.parametrize(
    ("past", "why"),
    [
        (Past(base=digests.of_bytes(b"another model")), "names sha256:"),
        (Past(accepted_by="bea"), "here stands ada"),
        (Past(accepted_entrant="bea"), "it is of bea"),
        (Past(prepared_by="organizer"), "no evaluator of"),
        (Past(commitment=digests.of_bytes(b"other")), "no entry of the log before it accepts"),
        (Past(stands={"round": "marbles-none-0123456789abcdef0123456789abcdef", "commitment": EARLIER}), "no entry of"),
        (Past(stands={"round": "x"}), "exactly round and commitment"),
    ],
    ids=["another model", "another key", "another entrant", "no evaluator", "no commitment", "no round", "malformed"],
)
def test_what_only_claims_to_stand_fails(past: Past, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, _, meaning = found(play(past, monkeypatch, tmp_path))[NAME]
    assert status == "FAILED" and why in meaning


def test_an_earlier_round_that_prepared_nothing_leaves_it_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, _, meaning = found(play(Past(prepared=False), monkeypatch, tmp_path))[NAME]
    assert status == "NOT CHECKED" and "has prepared no model of ada" in meaning


def with_anchor(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    text = rounds_made.DEFINITION + f'\n[[anchors]]\nname = "untrained"\nmodel = "{model}"\n'
    monkeypatch.setattr(rounds_made, "DEFINITION", text)


def test_nothing_stands_from_a_round_that_its_organizer_did_not_sign(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever defines a round in another's name names its evaluators, too."""
    honest = records.sign

    def sign(kind: str, of: str, fields: dict, *, key: Any) -> dict:
        forged = kind == "RoundDefined" and fields["name"] == "elsewhere"
        return honest(kind, of, fields, key=rounds_made.key("mallory") if forged else key)

    monkeypatch.setattr(records, "sign", sign)
    status, _, meaning = found(play(Past(), monkeypatch, tmp_path))[NAME]
    assert status == "FAILED" and "that its organizer signed" in meaning


@pytest.fixture
def untrained(tmp_path: Path) -> Callable[[], str]:
    def digest() -> str:
        names = ("config.json", "model.safetensors")
        made = {name: digests.of_bytes(f"untrained 1 {name}".encode()) for name in names}
        return digests.of_json({**made, "tokenizer.json": digests.of_bytes(rounds_made.TOKENIZER)})

    return digest


def test_an_anchor_is_the_model_that_the_definition_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, untrained: Callable[[], str]
) -> None:
    with_anchor(monkeypatch, untrained())
    checks = found(rounds_made.make(tmp_path / "made").write(tmp_path / "bundle"))
    assert checks[NAME][:2] == ("ok", "0 standing entries; 1 of 1 anchors with a model")
    assert [name for name, (status, _, _) in checks.items() if status == "FAILED"] == []


def test_no_round_prepares_an_anchor_from_another_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_anchor(monkeypatch, digests.of_bytes(b"another"))
    with pytest.raises(Refusal, match="the definition's anchor untrained is the model sha256:.*, prepared was sha256:"):
        rounds_made.make(tmp_path / "made").fold()


def test_an_anchor_that_did_not_enter_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, untrained: Callable[[], str]
) -> None:
    with_anchor(monkeypatch, untrained())
    monkeypatch.setattr(rounds_made, "SUBMISSIONS", [("ada", 2), ("bea", 1)])
    monkeypatch.setattr(rounds_made, "SKILL", {"ada": 2.0, "bea": 1.0})
    checks = found(rounds_made.make(tmp_path / "made").write(tmp_path / "bundle"))
    assert checks[NAME][1] == "0 standing entries; 0 of 1 anchors with a model; anchors that did not enter: untrained"


@pytest.mark.parametrize("same", [True, False])
def test_an_adapter_stands_only_on_the_same_base(same: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest, calls, plain = rounds_made.defined_fields, iter(range(1000)), honest_manifest

    def defined(made: rounds_made.Made) -> dict:
        fields = honest(made)
        # The first one is the earlier round's.
        base = digests.of_bytes(b"a base" if next(calls) > 0 or same else b"another base")
        return {**fields, "files": {**fields["files"], "bases/small/config.json": base}}

    def adapter(made: rounds_made.Made, entrant: str, version: int) -> dict:
        return {**plain(made, entrant, version), "kind": "lora-adapter", "base": "small"}

    known = digests.of_json({"config.json": digests.of_bytes(b"a base")})
    kinds = f'kinds = ["hf-causal-lm", "lora-adapter"]\nbases = {{ small = "{known}" }}'
    monkeypatch.setattr(rounds_made, "DEFINITION", rounds_made.DEFINITION.replace('kinds = ["hf-causal-lm"]', kinds))
    monkeypatch.setattr(rounds_made, "defined_fields", defined)
    monkeypatch.setitem(globals(), "honest_manifest", adapter)
    status, _, meaning = found(play(Past(), monkeypatch, tmp_path))[NAME]
    assert status == ("ok" if same else "FAILED"), meaning
    assert same or "has other files than in marbles-elsewhere" in meaning
