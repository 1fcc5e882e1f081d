"""Where a round stands: the state that its records lead to, as data; rounds.py says how it changes."""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from acclimate_competitions import digests
from acclimate_competitions.definition import Competition
from acclimate_competitions.ledger import Ledger
from acclimate_competitions.records import Record, parse_time, was_given_up


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
    refused: bool = False

    @property
    def ended(self) -> bool:
        """Whether it is out for good: nothing more can be said of it."""
        return self.withdrawn or self.refused

    @property
    def order(self) -> int:
        """Its place among the entrant's submissions: the log index of the commitment, else of the acceptance."""
        return self.committed if self.committed is not None else self.accepted or 0


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
        unranked: entrants that declared a conflict of interest, and baselines.
        submissions: commitment -> Submission.
        entries: what RoundClosed froze, by entrant id.
        preparations: every preparation that must end in a ModelPrepared record, known from RoundClosed; the values say nothing.
        bases: submission -> digest of the model that its preparations started from.
        models: every evaluation to be made -> digest of the model that it must use; known from PreparationFinished.
        finished: the PreparationFinished record.
        prepared, evaluated: the terminal records by key, in log order.
        drawn: the preparations that the second operator must make again; None before AuditDrawn.
        audited: what came of each of them: PreparationAudited, in log order.
        released: share index -> digest of the share document.
        rankings: (ranking digest, reason), the newest last.
        corrections: digest of what each of them was judged with; empty for the definition and the opened holdout alone.
        reports: what the round's auditor said of the whole bundle: RoundAudited, the newest last.
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
    unranked: frozenset[str] = frozenset()
    submissions: Mapping[str, Submission] = field(default_factory=dict)
    closed: Record | None = None
    entries: tuple[Entry, ...] = ()
    preparations: Mapping[PreparationKey, None] = field(default_factory=dict)
    bases: Mapping[int, str] = field(default_factory=dict)
    prepared: Ledger[PreparationKey, Record] = field(default_factory=Ledger)
    models: Mapping[EvaluationKey, str] = field(default_factory=dict)
    finished: Record | None = None
    drawn: tuple[PreparationKey, ...] | None = None
    audited: Mapping[PreparationKey, Record] = field(default_factory=dict)
    released: Mapping[int, str] = field(default_factory=dict)
    opened: Record | None = None
    evaluated: Ledger[EvaluationKey, Record] = field(default_factory=Ledger)
    rankings: tuple[tuple[str, str], ...] = ()
    corrections: tuple[str, ...] = ()
    reports: tuple[Record, ...] = ()
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
    def auditor(self) -> Mapping[str, Any] | None:
        """{name, ed25519, draw} of the auditor whom the round names, or None."""
        found: Mapping[str, Any] | None = self.defined.fields.get("auditor")
        return found

    @property
    def private(self) -> bool:
        """Whether the holdout stays secret after the round."""
        return self.competition.round.holdout_after == "private"

    @property
    def publishes_itself(self) -> datetime | None:
        """From when on an evaluator may publish the ranking without its organizer; None: not before it is evaluated, or never."""
        settings = self.competition.round
        wait = timedelta(0) if settings.publish == "auto" else settings.publish_within
        evaluated = dict(self.phases).get(Phase.EVALUATED)
        return None if wait is None or evaluated is None else evaluated + wait

    @property
    def audits_due(self) -> int:
        """How many preparations are to be drawn and made again: as the definition says, all where there are fewer."""
        return min(self.competition.round.audits, len(self.preparations))

    @property
    def drawn_given_up(self) -> tuple[PreparationKey, ...]:
        """The drawn preparations that nobody makes again, as their organizer gave them up; none before the draw."""
        return tuple(key for key in self.drawn or () if was_given_up(self.prepared[key]))

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Commitments that were neither accepted nor refused nor withdrawn, in order."""
        return tuple(sorted(c for c, s in self.submissions.items() if s.accepted is None and not s.ended))

    @property
    def acknowledgements_needed(self) -> int:
        """Custodians that must have acknowledged before the round opens: k + 1, or k where n = k."""
        return min(self.threshold + 1, len(self.defined["custodians"]))

    @property
    def last_acceptance(self) -> datetime:
        """The moment before which the close must not come while commitments are outstanding."""
        return self.closes + self.grace

    @cached_property
    def prepared_leaves(self) -> tuple[bytes, ...]:
        """The bytes of the ModelPrepared records, in log order."""
        return tuple(record.encode() for record in self.prepared.values())

    @cached_property
    def evaluated_leaves(self) -> tuple[bytes, ...]:
        """The bytes of the ModelEvaluated records, in log order."""
        return tuple(record.encode() for record in self.evaluated.values())

    def forfeited(self) -> dict[str, Any]:
        """Count and root of the outstanding commitments, as RoundClosed names them."""
        leaves = [commitment.encode() for commitment in self.outstanding]
        return {"count": len(leaves), "root": digests.root_of_leaves(leaves)}

    def frozen_entries(self) -> tuple[Entry, ...]:
        """What RoundClosed freezes, by entrant id: of each entrant's accepted submissions that stand, the one committed last.

        Not the one accepted last: how fast checks run must not decide which submission counts.
        """
        last: dict[str, Entry] = {}
        standing = (s for s in self.submissions.values() if s.accepted is not None and not s.ended)
        for s in sorted(standing, key=lambda s: s.order):
            assert s.accepted is not None
            last[s.entrant] = Entry(s.entrant, s.accepted, s.commitment)
        return tuple(last[name] for name in sorted(last))

    def preparation_plan(self) -> tuple[PreparationKey, ...]:
        """Every (submission, task, seed) that must end in a ModelPrepared record."""
        return tuple(self.preparations)

    def evaluation_plan(self) -> tuple[EvaluationKey, ...]:
        """Every (submission, task, seed, protocol) to evaluate: all direct ones, and each preparation that did not fail."""
        return tuple(self.models)

    def model_digests(self) -> Mapping[EvaluationKey, str]:
        """The digest of the model that each evaluation of the plan must use."""
        return self.models

    def planned_preparations(self, entries: Iterable[Entry]) -> dict[PreparationKey, None]:
        """The preparations of these entries, by entry, task and seed."""
        tasks, seeds = self.competition.tasks, self.competition.preparation.seeds
        return dict.fromkeys((e.submission, task.name, seed) for e in entries for task in tasks for seed in seeds)

    def planned_evaluations(self) -> dict[EvaluationKey, str]:
        """The evaluations that follow from the preparations' outcomes, with their models."""
        models: dict[EvaluationKey, str] = {
            (entry.submission, task.name, None, "direct"): self.bases[entry.submission]
            for entry in self.entries
            for task in self.competition.tasks
        }
        for key in self.preparations:
            record = self.prepared[key]
            if "failed" not in record.fields:
                models[*key, "prepared"] = record["prepared"]
        return models

    def custodian_index(self, key: str | None) -> int | None:
        """The share index (from 1) of the custodian with this public key."""
        keys = [custodian["ed25519"] for custodian in self.defined["custodians"]]
        return keys.index(key) + 1 if key in keys else None


def entries_root(entries: Iterable[Entry]) -> str:
    """RFC 6962 root over the canonical JSON of the entries, by entrant id."""
    return digests.root_of_leaves(digests.canonical(entry.document()) for entry in entries)
