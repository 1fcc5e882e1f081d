"""Several processes of one node that share each batch of a preparation.

Each does all that the others do, but for the batch: it reads its own share, and the gradients are added up (data parallelism). Each holds the whole
model, or some rows of each weight (sharding.py); then they check and evaluate together, too, all reading everything. Batch and step stay those of the recipe, so that the losses are those of one process but for the last bits; the bytes
depend on the number of processes, which is the job's, and are equal again for the same number. The child of a job is the first, and writes; it
starts the others inside its own confinement: in its process group and network namespace, with its environment and limits. They work in
folders of their own, which nobody reads. Gloo adds up what lies in main memory, NCCL what lies on GPUs, of which each process has one.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, distributed

from acclimate_competitions.errors import Refusal
from acclimate_runners import packing
from acclimate_runners.jobs import Job, PrepareJob
from acclimate_runners.packing import Integers

_ENDED_WITHIN = 30.0
_LOOK = 0.2


@contextmanager
def joined(job: Job, folder: Path) -> Iterator[Path]:
    """The folder that this process works in, once all of the job's processes are there.

    Raises:
        Refusal: request_invalid, where the job is for several nodes.
    """
    if isinstance(job, PrepareJob) and job.nodes != 1:
        raise Refusal(
            "request_invalid", f"the job is for {job.nodes} nodes: one entry is prepared on one node only, so far"
        )
    if job.processes == 1:
        yield folder
        return
    with ExitStack() as stack:
        first = "RANK" not in os.environ
        meeting = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="acclimate-"))) / "met" if first else None
        rank = int(os.environ.get("RANK", "0"))
        if meeting is not None:
            stack.enter_context(_others(folder, meeting, count=job.processes))
        # They talk over the loopback interface, whatever other the machine has.
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        backend = "gloo" if job.device == "cpu" else f"cpu:gloo,{job.device}:nccl"
        method = f"file://{meeting or os.environ['ACCLIMATE_MEETING']}"
        distributed.init_process_group(backend, init_method=method, rank=rank, world_size=job.processes)
        stack.callback(distributed.destroy_process_group)
        if rank == 0:
            yield folder
            return
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="acclimate-")))
        for name in ("inputs", "resume"):
            (own / name).symlink_to(folder / name)
        yield own


@contextmanager
def _others(folder: Path, meeting: Path, *, count: int) -> Iterator[None]:
    """All processes but the first: started, and gone afterwards."""
    command = [sys.executable, "-P", "-m", "acclimate_runners", str(folder), "--rank-of", str(os.getpid())]
    started: list[subprocess.Popen[bytes]] = []
    over = threading.Event()
    watching = threading.Thread(target=_watch, args=(started, over), daemon=True)
    try:
        for rank in range(1, count):
            environment = {**os.environ, **_named(rank, meeting)}
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, cwd=folder))
        watching.start()
        yield
        over.set()
        until = time.monotonic() + _ENDED_WITHIN
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    except RuntimeError:
        # What this one sees of another's end is a connection that closed; its own end comes by how the other ended.
        if watching.is_alive():
            watching.join(_ENDED_WITHIN)
        raise
    finally:
        over.set()
        for process in started:
            process.kill()
            process.wait()


def _named(rank: int, meeting: Path) -> Mapping[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCLIMATE_MEETING": str(meeting)}


def _watch(started: Sequence["subprocess.Popen[bytes]"], over: threading.Event) -> None:
    """End this process as one of the others ended, before they had to: whoever supervises it judges by its end alone."""
    while not over.wait(_LOOK):
        for process in started:
            status = process.poll()
            if status is None or status == 0:
                continue
            if status < 0:
                os.kill(os.getpid(), -status)
            os._exit(max(1, status))


def parts(batch: Integers, micro_batch: int | None) -> list[Integers]:
    """This process's share of a batch, in parts that are read at once; of an empty part nothing counts.

    All have as many parts as the one that has most rows, as they may have to do all together (sharding.py).

    Args:
        batch: row numbers, at least one.
        micro_batch: how many sequences all processes together read at once, each at least one; None for all of the batch.
    """
    count, rank = _count(), distributed.get_rank() if _count() > 1 else 0
    size = micro_batch if micro_batch is None else max(1, micro_batch // count)
    own, most = (packing.micro_batches(batch[first::count], size=size) for first in (rank, 0))
    return own + [batch[:0]] * (len(most) - len(own))


def added(number: float, gradients: Iterable[Tensor | None] = ()) -> float:
    """The sum of all processes' numbers; gradients are summed in place.

    Args:
        number: of this process's share.
        gradients: of this process's share.
    """
    if _count() == 1:
        return number
    mine = [each for each in gradients if each is not None]
    total = torch.tensor(number, dtype=torch.float64)
    begun = [distributed.all_reduce(each, async_op=True) for each in mine]
    distributed.all_reduce(total)
    for work in begun:
        work.wait()
    return float(total)


def _count() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
