"""A round told record by record, with made-up digests: what the tests of the rules stand on."""

import base64
import functools
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import pytest
import rounds_made
from marbles import DEFINITION
from rounds_made import START, public

from acclimate_competitions import definition, digests, records, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round, entries_root
from acclimate_competitions.records import Record, format_time

OPENS, CLOSES, LATEST = (START + timedelta(days=days) for days in (1, 30, 40))
RELEASE_BY = START + timedelta(days=60)
GRACE = timedelta(seconds=60)
CUSTODIANS = ("custodian-a", "custodian-b", "custodian-c")
SECRET = b"the auditor's secret: 32 bytes.."
TICK = timedelta(microseconds=1)
SUBMITTING = {
    "EntrantRegistered",
    "SubmissionCommitted",
    "SubmissionAccepted",
    "SubmissionRefused",
    "SubmissionWithdrawn",
    "ClosingExtended",
}


def digest(name: str) -> str:
    return digests.of_bytes(name.encode())


# Hypothesis asks for the same keys over and over.
key = functools.cache(rounds_made.key)


@functools.cache
def competition(**changes: str) -> definition.Competition:
    text = DEFINITION
    for old, new in changes.items():
        words = {"window": 'objection_window = "0s"', "audits": "audits = 0", "publish": 'publish = "manual"'}
        text = text.replace(words[old], new)
    return definition.parse(text.encode())


def custodian(name: str, **changes: object) -> dict:
    return {"name": name, "age": f"age1{name}", "ed25519": public(name), "backup": f"age1{name}spare", **changes}


def defined(rules: definition.Competition, **changes: object) -> dict:
    named = rules.round.auditor
    auditor = {"auditor": {"name": named, "ed25519": public(named), "draw": digests.of_bytes(SECRET)}} if named else {}
    return {
        **auditor,
        "competition": rules.slug,
        "name": "2027-1",
        "definition": rules.digest,
        "files": {},
        "recipe": rules.preparation.digest,
        "scorer": rounds.scorer_digest(rules),
        "policy": rules.ranking.digest,
        "code": digest("code"),
        "opens": format_time(OPENS),
        "closes": format_time(CLOSES),
        "closes_latest": format_time(LATEST),
        "grace": 60,
        "release_by": format_time(RELEASE_BY),
        "k": 2,
        "custodians": [custodian(name) for name in CUSTODIANS],
        "log": "log",
        "witnesses": [],
        "quorum": 0,
        "organizer": {"ed25519": public("organizer")},
        "evaluators": [public("evaluator")],
        "id_digits": 32,
        **changes,
    }


SEAL = {
    "seal": digest("seal"),
    "format": "acclimate/seal/v1",
    "size": 100,
    "ciphertext": digest("ciphertext"),
    "block_root": digest("blocks"),
    "rows": 10,
    "row_root": digest("rows"),
    "shares": [
        {"index": i, "to": name, "commitment": digest(f"share {i}"), "envelope": digest(f"envelope {i}")}
        for i, name in enumerate(CUSTODIANS, start=1)
    ],
}


def signed(kind: str, fields: dict, *, at: datetime, by: str, round_id: str = "") -> Record:
    request = records.sign(kind, round_id, fields, key=key(by))
    return Record(kind, request["round"], at, fields, request["by"], request["sig"])


@dataclass
class Story:
    """A round that is being told: its state, its log, the time."""

    state: Round
    log: list[tuple[int, Record]] = field(default_factory=list)
    now: datetime = START

    def tell(self, kind: str, fields: dict, *, by: str | None = None, at: datetime | None = None) -> "Story":
        """One more record, or the refusal."""
        at = max(at or self.now, self.log[-1][1].at) if self.log else at or self.now  # a server's clock never runs back
        plain = Record(kind, self.state.id, at, fields)
        record = plain if by is None else signed(kind, fields, at=at, by=by, round_id=self.state.id)
        index = len(self.log)
        self.state = rounds.apply(self.state, record, index=index)
        self.log.append((index, record))
        self.now = max(self.now, at)
        return self

    # ---- one honest act each -----------------------------------------------------------------------------------

    def seal(self, **changes: object) -> "Story":
        return self.tell("HoldoutSealed", {**SEAL, **changes}, by="organizer")

    def acknowledge(self, index: int, /, **changes: object) -> "Story":
        fields = {"seal": SEAL["seal"], "index": index, "commitment": digest(f"share {index}"), **changes}
        return self.tell("ShareAcknowledged", fields, by=CUSTODIANS[index - 1])

    def open(self, at: datetime = OPENS) -> "Story":
        return self.tell("RoundOpened", {"seal": SEAL["seal"]}, at=at)

    def register(self, name: str, *, by: str = "", **changes: object) -> "Story":
        conflicts = ["baseline"] if name in self.state.competition.ranking.baselines else []
        fields = {"entrant": name, "ed25519": public(name), "conflicts": conflicts, **changes}
        return self.tell("EntrantRegistered", fields, by=by or ("organizer" if conflicts else name))

    def submission(self, kind: str, name: str, number: int, **options: object) -> "Story":
        fields = {"entrant": name, "commitment": digest(f"{name} {number}")}
        return self.tell(f"Submission{kind}", fields, **{"by": name, **options})

    def refuse(self, name: str, number: int, *, reason: str = "it does not load", **options: object) -> "Story":
        fields = {"entrant": name, "commitment": digest(f"{name} {number}"), "reason": reason}
        return self.tell("SubmissionRefused", fields, **{"by": "evaluator", **options})

    def submit(self, name: str, number: int) -> "Story":
        return self.submission("Committed", name, number).submission("Accepted", name, number)

    def close(self, at: datetime | None = None, **changes: object) -> "Story":
        entries = self.state.frozen_entries()
        fields = {"count": len(entries), "entries_root": entries_root(entries)}
        fields["forfeited"] = self.state.forfeited()
        earliest = self.state.last_acceptance if self.state.outstanding else self.state.closes
        return self.tell("RoundClosed", {**fields, **changes}, at=at or max(self.now, earliest))

    def prepare(self, plan_key: tuple, *, drop: str = "", by: str = "evaluator", **changes: object) -> "Story":
        submission, task, seed = plan_key
        fields = {"submission": submission, "task": task, "seed": seed, "recipe": self.state.defined["recipe"]}
        fields |= {"base": digest(f"base {submission}"), "code": digest("code"), "hardware": "cpu"}
        fields |= {"prepared": digest(f"{plan_key}"), "candidates": [], "selected": {"lr": 0.002, "epoch": 1}}
        fields = {name: value for name, value in {**fields, **changes}.items() if name not in drop.split()}
        return self.tell("ModelPrepared", fields, by=by)

    def prepare_all(self) -> "Story":
        for plan_key in self.state.preparation_plan():
            if plan_key not in self.state.prepared:
                self.prepare(plan_key)
        return self

    def finish(self, kind: str, **changes: object) -> "Story":
        leaves = self.state.prepared_leaves if kind == "PreparationFinished" else self.state.evaluated_leaves
        return self.tell(kind, {"count": len(leaves), "root": digests.root_of_leaves(leaves), **changes})

    def draw(self, **changes: object) -> "Story":
        fields = {"secret": base64.b64encode(SECRET).decode(), **changes}
        return self.tell("AuditDrawn", fields, by=self.state.auditor["name"])

    def audit(self, plan_key: tuple, *, by: str = "", **changes: object) -> "Story":
        submission, task, seed = plan_key
        fields = {"submission": submission, "task": task, "seed": seed, "prepared": digest(f"{plan_key}")}
        fields |= {"agrees": True, "tolerance": 0, "hardware": "cpu", "reason": "the same bytes", **changes}
        return self.tell("PreparationAudited", fields, by=by or self.state.auditor["name"])

    def audit_all(self) -> "Story":
        for plan_key in self.draw().state.drawn or ():
            self.audit(plan_key)
        return self

    def release(self, index: int, /, **changes: object) -> "Story":
        fields = {"seal": SEAL["seal"], "index": index, "document": digest(f"share {index}"), **changes}
        return self.tell("ShareReleased", fields, by=CUSTODIANS[index - 1])

    def open_holdout(self, **changes: object) -> "Story":
        fields = {"key": digest("key"), "plaintext": digest("plaintext"), "row_root": SEAL["row_root"], **changes}
        return self.tell("HoldoutOpened", fields)

    def evaluate(self, plan_key: tuple, **changes: object) -> "Story":
        submission, task, seed, protocol = plan_key
        models = self.state.model_digests()
        fields = {"submission": submission, "task": task, "seed": seed, "protocol": protocol}
        fields |= {"prepared": models.get(plan_key, digest("?")), "predictions": digest(f"{plan_key}"), "count": 10}
        return self.tell("ModelEvaluated", {**fields, **changes}, by="evaluator")

    def evaluate_all(self) -> "Story":
        for plan_key in self.state.evaluation_plan():
            if plan_key not in self.state.evaluated:
                self.evaluate(plan_key)
        return self

    def publish(self, kind: str = "RankingPublished", *, by: str = "organizer", **changes: object) -> "Story":
        fields = {"ranking": digest("ranking"), "policy": self.state.defined["policy"], "reason": "first"}
        return self.tell(kind, {**fields, **changes}, by=by)

    def void(
        self, *, by: str = "organizer", approvals: tuple = (), at: datetime | None = None, **changes: object
    ) -> "Story":
        fields: dict = {"reason": "a mistake", **changes}
        given = [records.approve("RoundVoided", self.state.id, fields, by=public(by), key=key(a)) for a in approvals]
        return self.tell("RoundVoided", {**fields, **({"approvals": given} if given else {})}, by=by, at=at)


def begin(rules: definition.Competition | None = None, **changes: object) -> Story:
    rules = rules or competition()
    record = signed("RoundDefined", defined(rules, **changes), at=START, by="organizer")
    return Story(rounds.begin(record, rules), [(0, record)])


STEPS = {
    Phase.SEALED: lambda story: story.seal(),
    Phase.OPEN: lambda story: story.acknowledge(1).acknowledge(2).acknowledge(3).open(),
    Phase.CLOSED: lambda story: story.register("ada").submit("ada", 1).register("bea").submit("bea", 1).close(),
    Phase.PREPARED: lambda story: story.prepare_all().finish("PreparationFinished"),
    Phase.RELEASED: lambda story: story.release(1).release(3),
    Phase.OPENED: lambda story: story.open_holdout(),
    Phase.EVALUATED: lambda story: story.evaluate_all().finish("EvaluationFinished"),
    Phase.PUBLISHED: lambda story: story.publish(),
}


def until(phase: Phase, rules: definition.Competition | None = None) -> Story:
    """An honest round up to a phase."""
    story = begin(rules)
    for reached, step in STEPS.items():
        if story.state.phase is phase:
            break
        step(story)
        assert story.state.phase is reached
    if phase is Phase.VOIDED:
        story = begin().void()
    assert story.state.phase is phase
    return story


def refuses(expected: str, act: object, /, *arguments: object, **named: object) -> Refusal:
    """The act is refused with this code, and changes nothing."""
    story = act.__self__
    before, length = story.state, len(story.log)
    with pytest.raises(Refusal) as caught:
        act(*arguments, **named)
    assert caught.value.code == expected, caught.value
    assert story.state is before and len(story.log) == length
    return caught.value
