"""Several processes that share each batch: the losses of one process, the same bytes for the same number of them, and reasons for what isn't run."""

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import waiting
from children import ran, started

from acclimate_runners import isolation, jobs
from acclimate_runners.checkpoints import RESUME, STATE, WRITTEN


def job_in(tiny: Any, folder: Path, model: Path, **changes: Any) -> Any:
    """A job of one fit of eleven steps of 8 sequences; the last batch of an epoch has 2."""
    limits = dataclasses.replace(tiny.limits, checkpoint_seconds=0.0)
    values = {"stages": (("words", 11),), "lr": 0.003, "recipe": tiny.recipe(epochs=2), "limits": limits, **changes}
    return tiny.job(folder, model, "prepare", **values)


def group(child: isolation.Child) -> set[int]:
    """Processes of a child's group that still run."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == child.pid and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found


def gone(child: isolation.Child) -> bool:
    """Whether none of them runs soon after the child's end: those that were killed with it end when the machine comes to it."""
    waiting.until(lambda: not group(child))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "packing": True}], ids=["float32", "bfloat16, packed"])
def test_two_processes_have_the_losses_of_one_and_the_same_bytes_again_and_resumed(
    tiny: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model, recipe = tiny.model(tmp_path / "model"), tiny.recipe(epochs=2, **changes)
    outcomes = {}
    for name, processes in {"one": 1, "two": 2, "again": 2}.items():
        job_in(tiny, tmp_path / name, model, processes=processes, recipe=recipe)
        outcomes[name] = ran(tmp_path / name)
    one, two = (outcomes[name].results["prepared"][0] for name in ("one", "two"))
    near = 2e-2 if changes else 1e-5
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=near)
    assert len(one["losses"]) == 12 and one["cost"]["tokens"] == two["cost"]["tokens"]
    assert outcomes["two"].files == outcomes["again"].files != outcomes["one"].files
    # Memory is that of both.
    assert outcomes["two"].results["memory"] > 1.5 * outcomes["one"].results["memory"]
    # Killed, and gone on from what its first process left.
    job_in(tiny, tmp_path / "killed", model, processes=2, recipe=recipe)
    child, whole, stop = started(tmp_path / "killed"), tmp_path / "killed" / WRITTEN / "whole", threading.Event()
    supervising = threading.Thread(target=child.supervise, args=(stop,))
    supervising.start()
    until = time.monotonic() + 240
    while not (whole / STATE).exists() and supervising.is_alive() and time.monotonic() < until:
        time.sleep(0.005)
    stop.set()
    supervising.join()
    assert gone(child)
    shutil.rmtree(tmp_path / "killed" / "out", ignore_errors=True)
    state = json.loads((whole / STATE).read_text("utf-8"))
    if state["done"] == {}:
        whole.rename(tmp_path / "killed" / RESUME)
    assert ran(tmp_path / "killed").files == outcomes["two"].files


def test_three_processes_of_a_confined_child_have_the_losses_of_one_and_leave_nothing(
    tiny: Any, tmp_path: Path
) -> None:
    """The last batch of an epoch has two rows, so that one of them has none."""
    model = tiny.model(tmp_path / "model")
    losses = {}
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        job_in(tiny, folder, model, processes=processes)
        child = started(folder)
        ended = child.supervise(threading.Event())
        assert not ended.reason, (ended, (folder / "child.log").read_text("utf-8")[-3000:])
        assert gone(child) and child.isolation is not None
        outcome = jobs.read_outcome(folder)
        assert outcome is not None and outcome.network == child.isolation.network
        losses[processes] = outcome.results["prepared"][0]["losses"]
        assert not list(folder.glob("acclimate-*"))
    assert len(losses[3]) == 12
    np.testing.assert_allclose(losses[3], losses[1], rtol=1e-5)


@pytest.mark.slow
def test_memory_is_that_of_all_processes_together(tiny: Any, tmp_path: Path) -> None:
    job_in(tiny, tmp_path / "one", tiny.model(tmp_path / "model"), processes=1)
    alone = ran(tmp_path / "one").results["memory"]
    job_in(tiny, tmp_path / "three", tiny.model(tmp_path / "model"), processes=3)
    child = started(tmp_path / "three", memory=int(1.6 * alone))
    ended = child.supervise(threading.Event())
    assert ended.code == "out_of_memory" and gone(child), ended


@pytest.mark.parametrize("when", ["starting", "at work"])
def test_a_process_that_is_killed_ends_the_child_as_it_ended(tiny: Any, tmp_path: Path, when: str) -> None:
    """What a kill means is told by how the child ended: it is the same whichever of its processes was meant."""
    job_in(tiny, tmp_path / "job", tiny.model(tmp_path / "model"), processes=2, recipe=tiny.recipe(epochs=2000))
    child, found = started(tmp_path / "job"), list[isolation.Ended]()
    supervising = threading.Thread(target=lambda: found.append(child.supervise(threading.Event())))
    supervising.start()
    until = time.monotonic() + 240
    while supervising.is_alive() and time.monotonic() < until:
        others = group(child) - {child.pid}
        if others and (when == "starting" or child.progress.step >= 3):
            break
        time.sleep(0.01)
    (other,) = others
    os.kill(other, signal.SIGKILL)
    supervising.join()
    assert found[0].code == "runner_failed" and "SIGKILL" in found[0].reason and gone(child), found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
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
