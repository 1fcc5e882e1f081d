"""Where a round stands: the state that its records lead to, as data; rounds.py says how it changes."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from acclimate_competitions import digests
from acclimate_competitions.definition import Competition
from acclimate_competitions.records import Record, parse_time


class Phase(enum.StrEnum):
    """Where a round stands."""

    DRAFT = "draft"
    SEALED = "sealed"
    OPEN = "open"
    CLOSED = "closed"
    PREPARED = "prepared"
    RELEASED = "released"
    OPENED = "opened"
    EVALUATED = "evaluated"
    PUBLISHED = "published"
    VOIDED = "voided"


@dataclass(frozen=True)
class Submission:
    """One commitment of an entrant; `committed` and `accepted` are log indices."""

    entrant: str
    commitment: str
    committed: int | None
    accepted: int | None = None
    withdrawn: bool = False


@dataclass(frozen=True)
class Entry:
    """The submission that counts for an entrant: `submission` is the log index of its SubmissionAccepted."""

    entrant: str
    submission: int
    commitment: str

    def document(self) -> dict[str, Any]:
        """The entry as JSON-ready data."""
        return {"entrant": self.entrant, "submission": self.submission, "commitment": self.commitment}


PreparationKey = tuple[int, str, int]
"""(submission, task, seed)"""
EvaluationKey = tuple[int, str, int | None, str]
"""(submission, task, seed or None, protocol)"""


@dataclass(frozen=True)
class Round:
    """The state that a round's records lead to.

    Attributes:
        defined: the RoundDefined record.
        closes: the closing time in force (ClosingExtended moves it).
        acknowledged: share indices whose custodian could decrypt.
        entrants: entrant id -> public key.
        submissions: commitment -> Submission.
        entries: what RoundClosed froze, by entrant id.
        prepared, evaluated: the terminal records by key.
        prepared_leaves, evaluated_leaves: those records' bytes in log order, for the roots.
        released: share index -> digest of the share document.
        rankings: (ranking digest, reason), the newest last.
    """

    id: str
    competition: Competition
    defined: Record
    phase: Phase
    closes: datetime
    seal: Record | None = None
    acknowledged: frozenset[int] = frozenset()
    entrants: Mapping[str, str] = field(default_factory=dict)
    baselines: frozenset[str] = frozenset()
    submissions: Mapping[str, Submission] = field(default_factory=dict)
    closed: Record | None = None
    entries: tuple[Entry, ...] = ()
    prepared: Mapping[PreparationKey, Record] = field(default_factory=dict)
    prepared_leaves: tuple[bytes, ...] = ()
    audited: int = 0
    released: Mapping[int, str] = field(default_factory=dict)
    opened: Record | None = None
    evaluated: Mapping[EvaluationKey, Record] = field(default_factory=dict)
    evaluated_leaves: tuple[bytes, ...] = ()
    rankings: tuple[tuple[str, str], ...] = ()
    phases: tuple[tuple[Phase, datetime], ...] = ()

    @property
    def opens(self) -> datetime:
        """When submissions may begin."""
        return parse_time(self.defined["opens"])

    @property
    def grace(self) -> timedelta:
        """How long after `closes` committed submissions may still be accepted."""
        return timedelta(seconds=self.defined["grace"])

    @property
    def threshold(self) -> int:
        """k: shares that open the seal."""
        return int(self.defined["k"])

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Commitments that were neither accepted nor withdrawn, in order."""
        return tuple(sorted(c for c, s in self.submissions.items() if s.accepted is None and not s.withdrawn))

    @property
    def acknowledgements_needed(self) -> int:
        """Custodians that must have acknowledged before the round opens: k + 1, or k where n = k."""
        return min(self.threshold + 1, len(self.defined["custodians"]))

    @property
    def last_acceptance(self) -> datetime:
        """The moment before which the close must not come while commitments are outstanding."""
        return self.closes + self.grace

    def frozen_entries(self) -> tuple[Entry, ...]:
        """Each entrant's last accepted submission that stands, by entrant id; what RoundClosed freezes."""
        last: dict[str, Entry] = {}
        standing = (s for s in self.submissions.values() if s.accepted is not None and not s.withdrawn)
        for s in sorted(standing, key=lambda s: s.accepted or 0):
            assert s.accepted is not None
            last[s.entrant] = Entry(s.entrant, s.accepted, s.commitment)
        return tuple(last[name] for name in sorted(last))

    def preparation_plan(self) -> tuple[PreparationKey, ...]:
        """Every (submission, task, seed) that must end in a ModelPrepared record."""
        seeds = self.competition.preparation.seeds
        return tuple((e.submission, t.name, s) for e in self.entries for t in self.competition.tasks for s in seeds)

    def evaluation_plan(self) -> tuple[EvaluationKey, ...]:
        """Every (submission, task, seed, protocol) to evaluate: all direct ones, and each preparation that did not fail."""
        direct: list[EvaluationKey] = [
            (e.submission, t.name, None, "direct") for e in self.entries for t in self.competition.tasks
        ]
        ready = [
            key for key in self.preparation_plan() if key in self.prepared and "failed" not in self.prepared[key].fields
        ]
        return tuple(direct + [(submission, task, seed, "prepared") for submission, task, seed in ready])

    def model_digests(self) -> dict[EvaluationKey, str]:
        """The digest of the model that each evaluation of the plan must use."""
        bases = {submission: record["base"] for (submission, _, _), record in self.prepared.items()}
        return {
            key: bases[key[0]] if key[2] is None else self.prepared[(key[0], key[1], key[2])]["prepared"]
            for key in self.evaluation_plan()
        }

    def custodian_index(self, key: str | None) -> int | None:
        """The share index (from 1) of the custodian with this public key."""
        keys = [custodian["ed25519"] for custodian in self.defined["custodians"]]
        return keys.index(key) + 1 if key in keys else None


def entries_root(entries: Iterable[Entry]) -> str:
    """RFC 6962 root over the canonical JSON of the entries, by entrant id."""
    return digests.root_of_leaves(digests.canonical(entry.document()) for entry in entries)
