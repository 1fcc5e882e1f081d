"""The mandated preparation as data: the same for every entry, with a digest over everything that can change a number."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from acclimate_competitions import digests


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


@dataclass(frozen=True)
class Recipe:
    """The recipe; field by field `[preparation]` of competition.toml.

    Attributes:
        global_batch: sequences in one optimizer step.
        max_length: tokens of a sequence, prompt and answer.
        clip: gradient norm bound.
        lr_grid: peak learning rates tried with the selection seed.
        seeds: reporting seeds, at the chosen learning rate; disjoint from the selection seed.
        threads: CPU threads of the child process; part of the determinism class D1.
        diverged: what counts for an entry whose preparation diverged.
    """

    method: Literal["full"]
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
    dtype: Literal["float32"]
    determinism: Literal["D1"]
    threads: int
    diverged: Literal["base", "missing", "fail"]

    def document(self) -> dict[str, Any]:
        """The recipe as JSON-ready data."""
        return dataclasses.asdict(self)

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON of document()."""
        return digests.of_json(self.document())


def from_document(document: dict[str, Any]) -> Recipe:
    """The recipe of data that Recipe.document made (a job's file, a record)."""
    values = dict(document)
    values["optimizer"] = Optimizer(**values["optimizer"])
    values["schedule"] = Schedule(**values["schedule"])
    selection = dict(values["selection"])
    values["selection"] = Selection(**{**selection, "candidates": tuple(selection["candidates"])})
    values["lr_grid"], values["seeds"] = tuple(values["lr_grid"]), tuple(values["seeds"])
    return Recipe(**values)
