"""A worker's wall clock that jumps, for the runner and for its child, changes nothing."""

import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import tiny
from waiting import ended

from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.local import LocalRunner

PATCHED = """
import os, time
from pathlib import Path
real, real_ns, clock = time.time, time.time_ns, Path(os.environ["CLOCK"])
def off():
    return float(clock.read_text())
time.time = lambda: real() + off()
time.time_ns = lambda: real_ns() + int(off() * 1e9)
(clock.parent / f"patched-{os.getpid()}").touch()
"""
"""As `sitecustomize`, what Python runs first."""

JUMPING = """
import os, pickle, sys, time
from pathlib import Path
from acclimate_runners import isolation
from acclimate_runners.local import LocalRunner
job, blobs, work, real = pickle.loads(Path(sys.argv[1]).read_bytes())
plain, patched = isolation.environment, {name: os.environ[name] for name in ("PYTHONPATH", "CLOCK")}
isolation.environment = lambda *given, **named: plain(*given, **named) | patched
clock = Path(os.environ["CLOCK"])
def jump(by):
    clock.with_suffix(".new").write_text(by)
    clock.with_suffix(".new").rename(clock)
began, runner = time.monotonic(), LocalRunner(work, slots=1)
handle, jumps = runner.start("sha256:aa/1", job, blobs), {2: "3e7", 8: "-3e7"}
while (status := handle.poll()).state == "running":
    if jumps and status.step >= min(jumps):
        jump(jumps.pop(min(jumps)))
        away = abs(time.time() - real)
    assert 0 <= status.silent < 600
    time.sleep(0.005)
runner.close()
print(status.state, away > 2e7, time.monotonic() - began < 500, *(word for pair in sorted(status.outcome.files.items()) for word in pair))
"""


def test_a_wall_clock_that_jumps_to_and_fro_changes_no_byte_and_ends_no_attempt(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    job = tiny.prepare_job(tmp_path, blobs)
    job = replace(job, recipe=replace(job.recipe, epochs=20))
    runner = LocalRunner(tmp_path / "plain", slots=1)
    plain = ended(runner.start("sha256:aa/1", job, blobs))
    runner.close()
    assert plain.outcome is not None
    for note in blobs.notes("attempts/"):
        blobs.drop_note(note)
    (tmp_path / "job").write_bytes(pickle.dumps((job, blobs, tmp_path / "jumping", time.time())))
    (tmp_path / "clock").write_text("0")
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(PATCHED)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "patch"), "CLOCK": str(tmp_path / "clock")}
    command = [sys.executable, "-c", JUMPING, str(tmp_path / "job")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=250)
    files = [word for pair in sorted(plain.outcome.files.items()) for word in pair]
    assert done.stdout.split() == ["done", "True", "True", *files], done.stderr
    # The runner, and the server whose forks its children are, had that clock.
    assert len(list(tmp_path.glob("patched-*"))) >= 2
