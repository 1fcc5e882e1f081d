"""What MLflow gets to know of a round: entries, committed stages, and what became public of the holdout, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from acclimate_competitions.definition import Competition

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class EntryData:
    """One entry, or a baseline that has a model.

    Attributes:
        submission: the submission's id.
        manifest: the entrant's manifest.
        model: digest of the model as submitted.
    """

    entrant: str
    submission: str
    manifest: Mapping[str, Any]
    model: str


@dataclass(frozen=True)
class StageData:
    """One committed stage.

    Attributes:
        key: stage key.
        seed: None for select, and for a direct evaluation.
        protocol: direct | prepared for evaluate, else None.
        document: the element of jobs.Outcome.results that the stage gave ("selections", "prepared" or "predictions").
        at: when it was committed.
        hardware: hardware class.
        versions: of the libraries.
    """

    kind: Literal["select", "prepare", "evaluate"]
    key: str
    entrant: str
    task: str
    seed: int | None
    protocol: str | None
    document: Mapping[str, Any]
    at: datetime
    attempt: str = ""
    hardware: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Version:
    """An older version of a round's results.

    Attributes:
        competition: with its tasks as they were judged.
        scores: as RoundData.scores.
        ranking: as RoundData.ranking.
    """

    competition: Competition
    scores: "pa.Table"
    ranking: Mapping[str, Any]


@dataclass(frozen=True)
class RoundData:
    """All that the projection of a round needs.

    Attributes:
        competition: with its tasks as they are judged.
        name: the round's name, as RoundDefined has it.
        round: the round's id.
        origin: the installation: its log's origin.
        at: a fixed time of the round, such as its close: the time of the parents.
        code: digest of the code.
        engine: local | ray.
        files: digest of each public file, by name ("splits/digit/preparation.parquet").
        entries: entries and baselines that have a model.
        stages: all committed stages, select, prepare and (once opened) evaluate.
        holdout: once opened: digest of each opened file, by task; where it stays private, the row root of the seal.
        targets: once opened: task -> example -> target; none where the holdout stays private.
        scores: tables.SCORES, once evaluated: entries and all baselines.
        ranking: Ranking.document(), once ranked.
        revision: 0 for RankingPublished, n for the n-th RankingRevised.
        older: the versions before, the first one first.
        tags: more of the record for the experiment's tags, such as {"log_range": "12-340"}.
    """

    competition: Competition
    name: str
    round: str
    origin: str
    at: datetime
    code: str
    engine: str
    files: Mapping[str, str]
    entries: tuple[EntryData, ...]
    stages: tuple[StageData, ...]
    holdout: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    scores: "pa.Table | None" = None
    ranking: Mapping[str, Any] | None = None
    revision: int = 0
    older: tuple[Version, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
