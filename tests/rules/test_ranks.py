"""Several processes that share each batch: the losses of one process, the same bytes for the same number of them, and reasons for what isn't run."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from acclimate_runners import jobs
from acclimate_runners.checkpoints import RESUME, STATE, WRITTEN


def job_in(tiny: Any, folder: Path, model: Path, **changes: Any) -> Any:
    """A job of one fit of eleven steps of 8 sequences; the last batch of an epoch has 2."""
    limits = dataclasses.replace(tiny.limits, checkpoint_seconds=0.0)
    values = {"stages": (("words", 11),), "lr": 0.003, "recipe": tiny.recipe(epochs=2), "limits": limits, **changes}
    return tiny.job(folder, model, "prepare", **values)


def started(folder: Path, processes: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = command if processes > 1 else [sys.executable]
    command += ["-m", "acclimate_runners", str(folder)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def ran(folder: Path, processes: int) -> jobs.Outcome:
    process = started(folder, processes)
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    outcome = jobs.read_outcome(folder)
    assert outcome is not None
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "packing": True}], ids=["float32", "bfloat16, packed"])
def test_two_processes_have_the_losses_of_one_and_the_same_bytes_again_and_resumed(
    tiny: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model, recipe = tiny.model(tmp_path / "model"), tiny.recipe(epochs=2, **changes)
    outcomes = {}
    for name, processes in {"one": 1, "two": 2, "again": 2}.items():
        job_in(tiny, tmp_path / name, model, processes=processes, recipe=recipe)
        outcomes[name] = ran(tmp_path / name, processes)
    one, two = (outcomes[name].results["prepared"][0] for name in ("one", "two"))
    near = 2e-2 if changes else 1e-5
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=near)
    assert len(one["losses"]) == 12 and one["cost"]["tokens"] == two["cost"]["tokens"]
    assert outcomes["two"].files == outcomes["again"].files != outcomes["one"].files
    # Memory is that of both.
    assert outcomes["two"].results["memory"] > 1.5 * outcomes["one"].results["memory"]
    # Killed, and gone on from what its first process left.
    job_in(tiny, tmp_path / "killed", model, processes=2, recipe=recipe)
    process, whole = started(tmp_path / "killed", 2), tmp_path / "killed" / WRITTEN / "whole"
    until = time.monotonic() + 240
    while not (whole / STATE).exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    shutil.rmtree(tmp_path / "killed" / "out", ignore_errors=True)
    state = json.loads((whole / STATE).read_text("utf-8"))
    if state["done"] == {}:
        whole.rename(tmp_path / "killed" / RESUME)
    assert ran(tmp_path / "killed", 2).files == outcomes["two"].files


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"processes": 2}, "the job is for 2 processes, 1 was started"),
        ({"nodes": 2}, "the job is for 2 nodes: one entry is prepared on one node only"),
    ],
)
def test_what_is_not_run_is_refused_with_the_reason(
    tiny: Any, tmp_path: Path, changes: dict[str, int], reason: str
) -> None:
    from acclimate_competitions.errors import Refusal
    from acclimate_runners import ranks

    job = job_in(tiny, tmp_path, tiny.model(tmp_path / "model"), **changes)
    assert jobs.from_json(jobs.to_json(job)) == job
    with pytest.raises(Refusal, match=reason), ranks.joined(job, tmp_path):
        pass
