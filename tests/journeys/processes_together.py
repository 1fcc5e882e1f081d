"""Jobs of several processes, done one after the other by the same processes: a child of each job's own would load torch again each time.

`python processes_together.py COUNT FOLDER...`: each folder's job as `python -m acclimate_runners` does it, but for the confinement and the manifest,
which goes to FOLDER/done.json with whether the job was refused. Of a folder that ends with @N only so many steps, as if killed then.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COUNT, MEETING = "TOGETHER_COUNT", "TOGETHER_MEETING"


def run(count: int, folders: list[Any], *, device: str = "") -> None:
    """Have so many processes do the jobs of folders."""
    for folder in dict.fromkeys(str(each).partition("@")[0] for each in folders if device):
        path = Path(folder) / "job.json"
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "device": device}), "utf-8")
    with tempfile.TemporaryDirectory() as meeting:
        started = []
        for rank in range(count):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), COUNT: str(count)}
            environment |= {MEETING: f"{meeting}/met", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            command = [sys.executable, __file__, *map(str, folders)]
            started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=280)[1] for process in started]
        assert [process.returncode for process in started] == [0] * count, "\n\n".join(text[-3000:] for text in said)


def outcome(folder: Path) -> dict[str, Any]:
    """What became of a folder's job: its outcome's fields, or {"refused": sentence}."""
    found: dict[str, Any] = json.loads((folder / "done.json").read_text("utf-8"))
    return found


def _do(folder: Path, own: Path, steps: int) -> dict[str, Any]:
    from acclimate_competitions.errors import Refusal
    from acclimate_runners import checkpoints, evaluation, jobs, models, preparation

    job, rate, seen = jobs.from_json((folder / "job.json").read_text("utf-8")), preparation.learning_rate, 0

    def counting(step: int, **how: Any) -> float:
        nonlocal seen
        seen += 1
        if seen == steps:
            raise KeyboardInterrupt
        if seen == steps - 1 and own == folder:
            (folder / checkpoints.ASKED).write_text("1", "utf-8")
        return rate(step, **how)

    preparation.learning_rate = counting
    does = {"check": models.check, "prepare": preparation.prepare, "evaluate": evaluation.evaluate}[job.kind]
    try:
        return dataclasses.asdict(does(job, own, lambda *words: None))
    except Refusal as refusal:
        return {"refused": refusal.sentence, "problems": list(refusal.problems)}
    finally:
        preparation.learning_rate = rate


def main(folders: list[str]) -> None:
    """One of the processes: all jobs, in its own folders where it is not the first."""
    from torch import distributed

    rank, count = int(os.environ["RANK"]), int(os.environ[COUNT])
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    gpus = any(
        json.loads((Path(f.partition("@")[0]) / "job.json").read_text("utf-8"))["device"] == "cuda" for f in folders
    )
    backend, where = "cpu:gloo,cuda:nccl" if gpus else "gloo", f"file://{os.environ[MEETING]}"
    distributed.init_process_group(backend, init_method=where, rank=rank, world_size=count)
    for given in folders:
        name, _, steps = given.partition("@")
        folder = Path(name)
        with tempfile.TemporaryDirectory() as temporary:
            own = folder if rank == 0 else Path(temporary)
            if rank:
                for part in ("inputs", "resume"):
                    (own / part).symlink_to(folder / part)
            with contextlib.suppress(KeyboardInterrupt):
                found = _do(folder, own, int(steps or 0))
                if rank == 0:
                    (folder / "done.json").write_text(json.dumps(found), "utf-8")
            # What the others leave shows who writes.
            left = sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file() and rank)
            (folder / f"left-{rank}.json").write_text(json.dumps(left), "utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
    # As a child ends: threads of what they talked through need not be taken down.
    sys.stderr.flush()
    os._exit(0)
