"""The mandated preparation as data: the same for every entry, with a digest over everything that can change a number."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from acclimate_competitions import digests
from acclimate_competitions.fields import Table, out_of_bounds

LARGEST_SEED = 2**32 - 1
"""What every generator takes, with room for a step's number beside it."""


LARGEST_RANK = 1024


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its constants."""

    name: Literal["adamw"]
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Schedule:
    """Learning rate over the steps: linear warm-up, then linear to `final` × peak at the last step."""

    name: Literal["linear"]
    warmup_steps: int
    final: float


@dataclass(frozen=True)
class Selection:
    """Which candidate is prepared further: lowest validation NLL over lr_grid × candidates at `seed`; ties to the lower lr."""

    metric: Literal["nll"]
    seed: int
    candidates: tuple[Literal["base", "last"], ...]


LINEAR = ("attention", "mlp")
"""The parts of a layer that have linear layers; which ones these are follows from the architecture."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: what is learned in place of the weights.

    Attributes:
        rank: of each adapter.
        alpha: an adapter's product counts alpha / rank times.
        targets: parts of each layer whose linear layers have one.
    """

    rank: int
    alpha: float
    targets: tuple[Literal["attention", "mlp"], ...]


@dataclass(frozen=True)
class Recipe:
    """The recipe; field by field `[preparation]` of competition.toml.

    Attributes:
        global_batch: sequences in one optimizer step.
        max_length: tokens of a sequence, prompt and answer.
        clip: gradient norm bound.
        lr_grid: peak learning rates tried with the selection seed.
        seeds: reporting seeds, at the chosen learning rate; disjoint from the selection seed.
        dtype: in which the forward pass of a step multiplies; weights, gradients, the optimizer, the loss and validation are float32.
        threads: CPU threads of the child process; part of the determinism class D1.
        diverged: what counts for an entry whose preparation diverged.
        packing: whether several sequences stand in one row that the model reads, each seeing itself only.
        lora: the adapters, where the method is "lora"; else None.
    """

    method: Literal["full", "lora"]
    epochs: int
    global_batch: int
    max_length: int
    optimizer: Optimizer
    schedule: Schedule
    clip: float
    lr_grid: tuple[float, ...]
    selection: Selection
    seeds: tuple[int, ...]
    loss: Literal["completion"]
    dtype: Literal["float32", "bfloat16"]
    determinism: Literal["D1"]
    threads: int
    diverged: Literal["base", "missing", "fail"]
    packing: bool = False
    lora: Lora | None = None

    def document(self) -> dict[str, Any]:
        """The recipe as JSON-ready data; without what an earlier version did not know, where it is as it was then."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _LATER or value}

    @cached_property
    def digest(self) -> str:
        """Digest of the canonical JSON of document()."""
        return digests.of_json(self.document())


_LATER = ("packing", "lora")
"""Fields that came later; they stand in the document only where they say something."""


def halvings(global_batch: int) -> int:
    """How often a batch can be halved until it is 1, each half rounded down."""
    return global_batch.bit_length() - 1


def micro_batch(global_batch: int, *, halved: int) -> int:
    """How many sequences of a batch are read at once after so many tries that ran out of memory; at least 1."""
    return max(1, global_batch >> halved)


def from_document(document: dict[str, Any]) -> Recipe:
    """The recipe of data that Recipe.document made (a job's file, a record)."""
    values = dict(document)
    values["optimizer"] = Optimizer(**values["optimizer"])
    values["schedule"] = Schedule(**values["schedule"])
    if values.get("lora"):
        values["lora"] = Lora(**{**values["lora"], "targets": tuple(values["lora"]["targets"])})
    selection = dict(values["selection"])
    values["selection"] = Selection(**{**selection, "candidates": tuple(selection["candidates"])})
    values["lr_grid"], values["seeds"] = tuple(values["lr_grid"]), tuple(values["seeds"])
    return Recipe(**values)


def _lora(table: Table | None) -> Lora | None:
    if table is None:
        return None
    found = Lora(
        rank=table.integer("rank", least=1, most=LARGEST_RANK),
        alpha=table.number("alpha", above=0),
        targets=table.words("targets", LINEAR, default=LINEAR),
    )
    table.finish()
    return found


def read(table: Table) -> Recipe:
    """The table's values; problems are noted in its document."""
    optimizer, schedule, selection = (table.table(name) for name in ("optimizer", "schedule", "selection"))
    recipe = Recipe(
        method=table.word("method", ("full", "lora"), default="full"),
        epochs=table.integer("epochs", least=1),
        global_batch=table.integer("global_batch", least=1),
        max_length=table.integer("max_length", least=2),
        optimizer=Optimizer(
            name=optimizer.word("name", ("adamw",), default="adamw"),
            beta1=optimizer.number("beta1", 0.9, below=1),
            beta2=optimizer.number("beta2", 0.999, below=1),
            eps=optimizer.number("eps", 1e-8, above=0),
            weight_decay=optimizer.number("weight_decay", 0.01),
        ),
        schedule=Schedule(
            name=schedule.word("name", ("linear",), default="linear"),
            warmup_steps=schedule.integer("warmup_steps", 0),
            final=schedule.number("final", 0.1),
        ),
        clip=table.number("clip", 1.0, above=0),
        lr_grid=table.list_("lr_grid", float),
        selection=Selection(
            metric=selection.word("metric", ("nll",), default="nll"),
            seed=selection.integer("seed", 0, most=LARGEST_SEED),
            candidates=selection.words("candidates", ("base", "last"), default=("base", "last")),
        ),
        seeds=table.list_("seeds", int),
        loss=table.word("loss", ("completion",), default="completion"),
        dtype=table.word("dtype", ("float32", "bfloat16"), default="float32"),
        determinism=table.word("determinism", ("D1",), default="D1"),
        threads=table.integer("threads", 1, least=1, most=1024),
        diverged=table.word("diverged", ("base", "missing", "fail"), default="base"),
        packing=table.boolean("packing", False),
        lora=_lora(table.optional("lora")),
    )
    if table.good("method", "lora"):
        if recipe.method == "lora" and recipe.lora is None:
            table.problem("lora", 'is missing: `method = "lora"` needs it, such as lora = { rank = 8, alpha = 16 }')
        if recipe.method != "lora" and recipe.lora is not None:
            table.problem("lora", f'is for `method = "lora"`: with "{recipe.method}" all weights are learned')
    if schedule.good("final") and recipe.schedule.final > 1:
        schedule.problem("final", f"= {recipe.schedule.final}: must be at most 1")
    if table.good("lr_grid") and not recipe.lr_grid:
        table.problem("lr_grid", "must not be empty")
    for index, rate in enumerate(recipe.lr_grid):
        if reason := out_of_bounds(rate, above=0):
            table.problem("lr_grid", f"= {rate}: {reason}", index=index)
    for index, seed in enumerate(recipe.seeds):
        if seed < 0:
            table.problem("seeds", f"= {seed}: must not be negative", index=index)
        elif seed > LARGEST_SEED:
            table.problem("seeds", f"= {seed}: must be at most {LARGEST_SEED}", index=index)
        elif selection.good("seed") and seed == recipe.selection.seed:
            table.problem("seeds", f"= {seed} is the selection seed: reporting seeds must be others", index=index)
    if table.good("seeds") and len(recipe.seeds) < 3:
        table.problem("seeds", f"are {len(recipe.seeds)}: at least 3 reporting seeds are needed")
    for part in (optimizer, schedule, selection, table):
        part.finish()
    return recipe
