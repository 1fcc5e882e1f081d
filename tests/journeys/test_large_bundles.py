"""A round with a thousand entrants: its bundle verifies in memory below 1 GiB."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import rounds_made

ENTRANTS, ROWS = 1000, 60
GIBIBYTE = 1 << 20  # in KiB, as the peak

# An audit in a process of its own, so that the peak is the audit's.
PROGRAM = """
import json, pathlib, sys
from acclimate import verify
report = verify.verify(pathlib.Path(sys.argv[1]), log_key=sys.argv[2])
peak = int(pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])
places = {check.name: [check.status, check.where] for check in report.checks}
print(json.dumps({"summary": report.summary, "failed": len(report.failed), "checks": places, "peak": peak}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_bundle_of_a_thousand_entrants_verifies_below_a_gibibyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(3)
    skill = {f"entrant-{number}": 2 * draw.random() for number in range(ENTRANTS)} | {"untrained": 0.0}
    monkeypatch.setattr(rounds_made, "SKILL", skill)
    monkeypatch.setattr(rounds_made, "SUBMISSIONS", [(name, 1) for name in skill])
    monkeypatch.setattr(rounds_made, "FAILED", ("nobody", "", 0))
    monkeypatch.setattr(rounds_made, "ROWS", ROWS)
    made = rounds_made.make(tmp_path / "round")
    path = made.write(tmp_path / "bundle")
    command = [sys.executable, "-c", PROGRAM, str(path), made.signer.vkey]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200)
    found = json.loads(done.stdout)
    assert found["failed"] == 0, found["summary"]
    assert found["checks"]["receipts"][0] == found["checks"]["scores"][0] == found["checks"]["ranking"][0] == "ok"
    assert found["checks"]["ranking"][1].startswith(f"{ENTRANTS} entrants ranked")
    assert found["peak"] < GIBIBYTE
