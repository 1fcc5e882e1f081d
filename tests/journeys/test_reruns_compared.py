"""When a preparation made again agrees with the first one, told without a machine; and the keys of whoever makes it."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import live as staging
import numpy as np
from labs import (
    ORIGINAL,
    refuses,
)
from typer.testing import CliRunner

from acclimate import keys, rerun
from acclimate.cli.main import app
from acclimate.client import auditor, parties
from acclimate_competitions import definition, digests, records
from acclimate_competitions.errors import Refusal

# ---- comparing, without a machine -----------------------------------------------------------------------------------


def first(**changes: Any) -> records.Record:
    fields = {
        "hardware": "cpu/a",
        "prepared": "sha256:1",
        "candidates": [CANDIDATE],
        "selected": {"lr": 0.1, "epoch": 2},
    }
    return records.Record("ModelPrepared", "r", staging.START, {**fields, **changes})


CANDIDATE = {"lr": 0.1, "epoch": 2, "validation": 1.0}


def again(**changes: Any) -> rerun.Remade:
    selection = {"candidates": [CANDIDATE], "selected": {"lr": 0.1, "epoch": 2}, "diverged": False}
    return rerun.Remade(**{"prepared": "sha256:1", "selection": selection, "hardware": "cpu/a", **changes})


def compared(
    there: records.Record, here: rerun.Remade, *, tolerance: float = 0.1, nlls: Any = (1.0, 1.05)
) -> rerun.Verdict:
    return rerun.compare(there, here, tolerance=tolerance, measure=lambda: nlls)


FAILED = {"failed": {"reason": "it ran longer than the 5 s allowed", "log": "sha256:2"}}


def test_equal_bytes_agree_unless_the_selection_was_told_otherwise() -> None:
    assert compared(first(), again()) == rerun.Verdict(agrees=True, tolerance=0, reason="the same bytes")
    lied = first(candidates=[{**CANDIDATE, "validation": 0.9999}])
    assert not compared(lied, again()).agrees and "selection" in compared(lied, again()).reason
    assert compared(lied, again(hardware="cpu/b")).agrees


def test_other_bytes_agree_by_measure_on_other_hardware_only() -> None:
    other = again(prepared="sha256:9", hardware="cpu/b")
    assert compared(first(), other).agrees
    assert not compared(first(), other, nlls=(1.0, 1.2)).agrees
    assert not compared(first(), other, nlls=(None, 1.0)).agrees
    assert compared(first(), other, nlls=(None, None)).agrees
    assert not compared(first(candidates=[{**CANDIDATE, "validation": 1.3}]), other).agrees
    assert not compared(first(candidates=[{**CANDIDATE, "lr": 0.2}]), other).agrees
    assert not compared(first(), again(prepared="sha256:9")).agrees
    refuses("rerun_undecided", compared, first(), other, tolerance=0.0)


def test_a_failure_agrees_with_a_failure_and_a_machines_limits_decide_nothing() -> None:
    failed = again(prepared=None, failed="it diverged")
    assert compared(first(**FAILED), failed).agrees
    assert not compared(first(**FAILED), again()).agrees
    assert not compared(first(), failed).agrees
    refuses("rerun_undecided", compared, first(**FAILED), again(hardware="cpu/b"))
    refuses("rerun_undecided", compared, first(), again(prepared=None, failed="too slow", limited=True))


def test_other_libraries_are_told_from_other_work() -> None:
    own = {"python": sys.version.split()[0], "numpy": np.__version__}
    assert rerun.other_versions(own) == []
    found = rerun.other_versions({**own, "numpy": "1.0", "nothing-of-this-name": "3"})
    assert found == ["nothing-of-this-name 3 there, none here", f"numpy 1.0 there, {np.__version__} here"]


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_keygen_is_finished_by_the_same_command_and_a_secret_is_never_replaced(tmp_path: Path) -> None:
    where = tmp_path / "lab"
    command = ["audit", "keygen", "--name", "lab", "--keys", str(where), "--json"]
    made = json.loads(CliRunner().invoke(app, command).stdout)
    secret = auditor.secret_of(keys.load(where), made["draw"])
    assert digests.of_bytes(base64.b64decode(secret)) == made["draw"]
    for name in ("draws.json", "auditor.json", "ed25519.pem"):
        assert (where / name).stat().st_mode & 0o077 == 0
    assert secret not in (where / "auditor.json").read_text()
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, Refusal) and refused.exception.code == "key_refused"
    # Killed between secret and public part, the same command makes a new pair; the old secret stays.
    (where / "auditor.json").unlink()
    second = json.loads(CliRunner().invoke(app, command).stdout)
    assert second["ed25519"] == made["ed25519"] and second["draw"] != made["draw"]
    assert auditor.secret_of(keys.load(where), made["draw"]) == secret
    refuses("conflict", auditor.keygen, keys.load(where), name="other", again=True)
    refuses("file_unreadable", auditor.secret_of, keys.load(where), digests.of_bytes(b"lost"))


def test_a_round_is_created_with_the_auditor_whom_its_definition_names(tmp_path: Path) -> None:
    rules = definition.parse(ORIGINAL.replace("audits = 0", 'audits = 1\nauditor = "lab"').encode())
    plain = definition.parse(ORIGINAL.encode())
    public = {"name": "lab", "ed25519": "k", "draw": "d"}
    assert parties.auditor(rules, {**public, "secret": "s"}) == {"auditor": public}
    assert parties.auditor(plain, None) == {}
    for competition, given in ((rules, None), (plain, public), (rules, {**public, "name": "other"}), (rules, ["lab"])):
        assert "audit keygen" in refuses("definition_invalid", parties.auditor, competition, given).hint
