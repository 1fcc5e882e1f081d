"""A competition's definition: `competition.toml`, typed. All problems are reported at once, with line numbers.

The definition's digest is sha256 over the file's bytes.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from acclimate_competitions import digests
from acclimate_competitions.recipe import Recipe


@dataclass(frozen=True)
class Task:
    """One question of the competition.

    Attributes:
        prompt: Jinja2 template over a row's columns.
        choices: the allowed answers, for kind choice; the target is one of them.
        metric: a name of metrics.METRICS.
        chance: the score of a blind guess.
    """

    name: str
    kind: Literal["choice", "generate", "perplexity", "classify"]
    prompt: str
    choices: tuple[str, ...]
    metric: str
    chance: float

    def document(self) -> dict[str, Any]:
        """The task as JSON-ready data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class RoundSettings:
    """`[round]`: dates are None where `acclimate round create` gives them."""

    name: str
    opens: datetime | None
    closes: datetime | None
    closes_latest: datetime | None
    grace: timedelta
    release_by: datetime | None
    objection_window: timedelta
    publish: Literal["manual", "auto"]
    holdout_after: Literal["public", "private"]
    audits: int


@dataclass(frozen=True)
class Custody:
    """`[custody]`: any `threshold` of the named custodians open the seal."""

    threshold: int
    custodians: tuple[str, ...]


@dataclass(frozen=True)
class Quota:
    """`per_entrant`: submissions in all, and within one calendar day of the zone `day`."""

    total: int
    per_day: int
    day: str


@dataclass(frozen=True)
class SubmissionRules:
    """`[submission]`: what may be submitted."""

    kinds: tuple[str, ...]
    architectures: tuple[str, ...]
    max_parameters: int
    max_bytes: int
    per_entrant: Quota
    weights_after: tuple[str, ...]


@dataclass(frozen=True)
class Ties:
    """How equal scores rank: `shared` is competition ranking 1-2-2-4; scores within `tolerance` are equal."""

    method: Literal["shared"]
    tolerance: float


@dataclass(frozen=True)
class Interval:
    """Rank confidence sets: kind, level, Monte Carlo draws and their seed."""

    kind: Literal["simultaneous", "marginal"]
    level: float
    draws: int
    seed: int


@dataclass(frozen=True)
class Policy:
    """`[ranking]`: everything that turns per-example scores into the ranking."""

    aggregate: Literal["mean"]
    missing: Literal["worst", "exclude", "fail"]
    ties: Ties
    interval: Interval
    cluster: str | None
    baselines: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The policy as JSON-ready data."""
        return dataclasses.asdict(self)

    @property
    def digest(self) -> str:
        """Digest of the canonical JSON of document()."""
        return digests.of_json(self.document())


@dataclass(frozen=True)
class Compute:
    """`[compute]`: the pool, its limit, and where the order of preparation is drawn from."""

    hardware: str
    max_gpu_hours: float
    order_seed: Literal["from-log"]


@dataclass(frozen=True)
class Isolation:
    """`[isolation]`: limits of a child process; memory in bytes."""

    memory: int
    wall: timedelta


@dataclass(frozen=True)
class Competition:
    """A whole definition.

    Attributes:
        raw: the file's bytes.
        digest: sha256 of raw.
        origins: dotted key -> "line N" or "default": where each effective value came from.
    """

    raw: bytes
    digest: str
    slug: str
    title: str
    licence: str
    contact: str
    data_is_public: bool
    round: RoundSettings
    custody: Custody
    submission: SubmissionRules
    tasks: tuple[Task, ...]
    preparation: Recipe
    ranking: Policy
    compute: Compute
    isolation: Isolation
    entrants_see: str
    origins: Mapping[str, str]

    def task(self, name: str) -> Task:
        """The task of this name; KeyError where there is none."""
        return {task.name: task for task in self.tasks}[name]
