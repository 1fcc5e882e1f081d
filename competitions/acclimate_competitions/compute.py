"""`[compute]`: what one attempt takes of a machine, and which machines may take it.

None of it but `hardware`, `processes` and `weights` changes a result, so that nothing else of it is in a stage's key: a round whose pool grows goes on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from acclimate_competitions.fields import Table

LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_PART = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
LABEL_KEY = re.compile(rf"((?=[^/]{{1,253}}/){_LABEL_PART}(\.{_LABEL_PART})*/)?{LABEL_VALUE.pattern}")
"""As schedulers take it: Ray as Kubernetes bounds a prefix, too."""
DEVICES = ("cpu", "cuda")
MOST_PROCESSES = 64
WEIGHTS = ("whole", "shards")
_LABEL_MEANING = (
    "at most 63 letters, digits, dots, hyphens and underscores, beginning and ending with a letter or digit"
)


@dataclass(frozen=True)
class Compute:
    """`[compute]`: the pool, its limit, what an attempt takes, and where the order of preparation is drawn from.

    Attributes:
        hardware: the class of machines that results are declared for: cpu or cuda, alone or with a slash and more of it.
        cpus: CPUs that one attempt sets aside.
        gpus: GPUs that one attempt is given: whole ones, or a share of one.
        memory: bytes of main memory that one attempt sets aside; 0 for none.
        labels: label -> value that a machine must carry.
        processes: that share each batch of one preparation on one machine; on GPUs each has one of its own.
        weights: whole, each process has all of them; or shards, each has a part of each.
    """

    hardware: str
    max_gpu_hours: float
    order_seed: Literal["from-log"]
    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    weights: Literal["whole", "shards"] = "whole"

    @property
    def device(self) -> str:
        """The kind of device that computes: cpu or cuda."""
        return self.hardware.partition("/")[0]


def read(table: Table) -> Compute:
    """The table's values; problems are noted in its document."""
    compute = Compute(
        hardware=table.text("hardware", "cpu"),
        max_gpu_hours=table.number("max_gpu_hours", 0.0),
        order_seed=table.word("order_seed", ("from-log",), default="from-log"),
        cpus=table.number("cpus", 1.0, above=0, below=100_000),
        gpus=table.number("gpus", 0.0, below=100_000),
        memory=table.size("memory", 0, zero=True),
        labels=table.texts("labels", names=LABEL_KEY, values=LABEL_VALUE, form=_LABEL_MEANING),
        processes=table.integer("processes", 1, least=1, most=MOST_PROCESSES),
        weights=table.word("weights", WEIGHTS, default="whole"),
    )
    for name, count in (("cpus", compute.cpus), ("gpus", compute.gpus)):
        # Schedulers count in small fixed steps; a finer share would be rounded where nobody sees it.
        if table.good(name) and round(count * 100) / 100 != count:
            table.problem(name, f"= {count:g}: must be a multiple of 0.01")
    if table.good("gpus") and compute.gpus > 1 and not compute.gpus.is_integer():
        table.problem("gpus", f"= {compute.gpus:g}: must be whole, or a share below 1 of one GPU")
    if table.good("hardware") and compute.device not in DEVICES:
        table.problem(
            "hardware", f"= {compute.hardware!r}: must be cpu or cuda, perhaps with a slash and more behind it"
        )
    if table.good("hardware", "gpus") and compute.device == "cuda" and compute.gpus == 0:
        table.problem(
            "gpus", '= 0: hardware = "cuda" computes on a GPU, so that an attempt needs at least a share of one'
        )
    if table.good("processes", "cpus") and compute.processes > max(1, compute.cpus):
        table.problem("processes", f"= {compute.processes}: each needs a CPU, cpus is {compute.cpus:g}")
    if table.good("processes", "gpus", "hardware") and compute.device == "cuda" and compute.gpus > 0:
        needed = compute.gpus if compute.gpus > 1 else 1
        if compute.processes != needed:
            table.problem("processes", f"= {compute.processes}: each has a GPU of its own, gpus is {compute.gpus:g}")
    if table.good("processes", "weights") and compute.weights == "shards" and compute.processes == 1:
        table.problem("weights", '= "shards": of one process there is one shard only; set processes to 2 or more')
    table.finish()
    return compute
