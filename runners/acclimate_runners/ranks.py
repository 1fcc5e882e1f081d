"""Several processes of one node that share each batch of a preparation: `torchrun --standalone --nproc-per-node N -m acclimate_runners FOLDER`.

Each holds the whole model and does all that the others do, but for the batch: it reads its own share, and the gradients are added up (data
parallelism). Batch and step stay those of the recipe, so that the losses are those of one process but for the last bits; the bytes
depend on the number of processes, which is the job's, and are equal again for the same number. The first writes; the others work
in a folder of their own, which nobody reads. Gloo adds the gradients up, on CPUs. No runner starts more than one process for
a job yet: a job for more is refused in its child, with the reason.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed

from acclimate_competitions.errors import Refusal
from acclimate_runners.jobs import PrepareJob
from acclimate_runners.packing import Integers


@contextmanager
def joined(job: PrepareJob, folder: Path) -> Iterator[Path]:
    """The folder that this process works in, once all of the job's processes are there.

    Raises:
        Refusal: request_invalid, where the job is for others than were started.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if job.nodes != 1:
        raise Refusal(
            "request_invalid", f"the job is for {job.nodes} nodes: one entry is prepared on one node only, so far"
        )
    if job.processes != started:
        raise Refusal(
            "request_invalid",
            f"the job is for {job.processes} processes, {started} {'was' if started == 1 else 'were'} started",
            hint=f"torchrun --standalone --nproc-per-node {job.processes} -m acclimate_runners FOLDER",
        )
    if started == 1:
        yield folder
        return
    distributed.init_process_group("gloo")
    try:
        if distributed.get_rank() == 0:
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix="acclimate-") as own:
            for name in ("inputs", "resume"):
                (Path(own) / name).symlink_to(folder / name)
            yield Path(own)
    finally:
        distributed.destroy_process_group()


def share(batch: Integers) -> Integers:
    """This process's part of a batch.

    Raises:
        Refusal: request_invalid, where a process would have none.
    """
    if (count := _count()) == 1:
        return batch
    if len(batch) < count:
        raise Refusal("request_invalid", f"a batch of {len(batch)} sequences can't be shared by {count} processes")
    return batch[distributed.get_rank() :: count]


def added(number: float, gradients: Iterable[Tensor | None] = ()) -> float:
    """The sum of all processes' numbers; gradients are summed in place."""
    if _count() == 1:
        return number
    total = torch.tensor(number, dtype=torch.float64)
    begun = [distributed.all_reduce(each, async_op=True) for each in gradients if each is not None]
    distributed.all_reduce(total)
    for work in begun:
        work.wait()
    return float(total)


def _count() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
