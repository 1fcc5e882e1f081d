"""Work of each kind that takes long between its steps and stages, against a bound that is shorter than that: it ends; one that is stopped is killed."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import tiny
from dispatching import children
from waiting import ended, until

from acclimate_competitions import tables
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.jobs import CheckJob, EvaluateJob, Job, Limits, ModelFiles, PrepareJob, TaskData
from acclimate_runners.local import LocalRunner
from acclimate_runners.watch import Patience

HANG = 4.0
"""Seconds. A word may come a second late; a batch takes half a second of a free CPU, what has no step or stage many times that."""
ROWS = 8_000


def jobs(folder: Path, blobs: FolderBlobs) -> dict[str, Job]:
    """A job of each kind with few steps or stages, each of many rows."""
    built = tiny.competition(folder / "competition")
    files = {name: blobs.put(path) for name, path in tiny.model(folder / "model", seed=1, width=256).items()}

    def table(rows: int) -> str:
        columns = {
            "example": [f"e{i}" for i in range(rows)],
            "input": [" ".join(f"m{i // 8**place % 8}" for place in range(5)) for i in range(rows)],
            "target": ["red"] * rows,
            "cluster": [f"c{i}" for i in range(rows)],
        }
        tables.write(pa.table(columns), folder / f"{rows}.parquet")
        return blobs.put(folder / f"{rows}.parquet")

    task, few, many = built.task("tint"), table(1024), table(ROWS)
    recipe = replace(built.preparation, epochs=3, global_batch=512)
    limits = Limits(("llama",), 10**7, 10**8, memory=4 << 30, wall_seconds=600.0)
    given = {"model": ModelFiles(files), "recipe": recipe, "limits": limits, "tokenizer": files["tokenizer.json"]}
    public = (TaskData(task, preparation=few, validation=many),)
    secret = (TaskData(task, holdout_inputs=many),)
    stages = (("tint", None, "direct"),)
    return {
        "check": CheckJob("check", tasks=public, **given),
        "prepare": PrepareJob("prepare", tasks=public, stages=(("tint", 11),), **given),
        "evaluate": EvaluateJob("evaluate", tasks=secret, stages=stages, entrant="ada", prepared={}, **given),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["check", "prepare", "evaluate"])
def test_slow_work_that_goes_on_is_not_ended_and_stopped_work_is(kind: str, tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    job = jobs(tmp_path, blobs)[kind]
    # A new server's imports may take longer than the bound, and nothing moves meanwhile.
    first = LocalRunner(tmp_path / "first", slots=1)
    begun = first.start("first/1", job, blobs)
    until(lambda: begun.poll().what.startswith("tint"))
    runner = LocalRunner(tmp_path / "work", slots=2, patience=Patience(hang=HANG))
    begun.cancel()
    ended(begun)

    stopped = runner.start("stopped/1", job, blobs)
    until(lambda: stopped.poll().what.startswith("tint"))
    for child in children(str(tmp_path / "work")):
        os.kill(child, signal.SIGSTOP)
    assert ended(stopped).code == "hung" and children(str(tmp_path / "work")) == []

    goes_on = runner.start("slow/1", job, blobs)
    status = ended(goes_on)
    assert status.state == "done" and status.outcome is not None and status.outcome.status == "done", status.reason
    runner.close()
    first.close()
