"""What the guards of a round's transitions are made of."""

import base64
from collections.abc import Mapping
from itertools import product

from acclimate_competitions import recipe, records
from acclimate_competitions.definition import Competition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.metrics import MAJORITY
from acclimate_competitions.phases import Round
from acclimate_competitions.records import Record


def require(condition: bool, sentence: str, code: str = "guard_failed", *, hint: str = "") -> None:
    """Refuse unless the condition holds.

    Raises:
        Refusal: of this code.
    """
    if not condition:
        raise Refusal(code, sentence, hint=hint)


def require_baseline(competition: Competition, name: str, *, baseline: bool) -> None:
    """Refuse a baseline that the definition does not name, or an entrant who has the name of one that it does.

    Raises:
        Refusal: guard_failed.
    """
    named = [one for one in competition.ranking.baselines if one != MAJORITY]
    if baseline and name not in named:
        raise Refusal(
            "guard_failed",
            f"{name!r} is no baseline that the organizer enters: the definition names {', '.join(named) or 'none'}",
            hint="name one of them" if named else "a baseline must stand in the definition before the round is created",
        )
    if not baseline and name in named:
        raise Refusal(
            "guard_failed",
            f"{name!r} is the name of a baseline, and a baseline is the organizer's",
            hint="an entrant takes an account of another name",
        )


def require_micro_batch(state: Round, record: Record) -> None:
    """Refuse a ModelPrepared whose micro-batch the rule does not give, or is another than that of its entry's other preparations.

    Raises:
        Refusal: guard_failed.
    """
    whole, submission = state.competition.preparation.global_batch, record["submission"]
    size = record.fields.get("micro_batch", whole)
    smaller = [recipe.micro_batch(whole, halved=times) for times in range(1, recipe.halvings(whole) + 1)]
    given = "micro_batch" in record.fields
    require(not given or size in smaller, f"micro-batch {size} is not the batch of {whole}, halved once or more often")
    tasks, seeds = (task.name for task in state.competition.tasks), state.competition.preparation.seeds
    keys = ((submission, *each) for each in product(tasks, seeds))
    other = next((state.prepared[key] for key in keys if key in state.prepared), None)
    had = size if other is None else other.fields.get("micro_batch", whole)
    require(size == had, f"one entry was prepared with the micro-batches {had} and {size}")


def bases_with(state: Round, record: Record) -> Mapping[int, str]:
    """The models that preparations started from, with that of a ModelPrepared: one an entry; an anchor's is the definition's.

    Raises:
        Refusal: guard_failed.
    """
    submission, base = record["submission"], record["base"]
    known = state.bases.get(submission)
    require(known in (None, base), "one entry was prepared from two models")
    if known is not None:
        return state.bases
    if state.competition.anchors:
        name = next(entry.entrant for entry in state.entries if entry.submission == submission)
        anchor = state.competition.anchor(name)
        if anchor is not None:
            require(
                anchor.model == base, f"the definition's anchor {name} is the model {anchor.model}, prepared was {base}"
            )
    return {**state.bases, submission: base}


def secret_of(text: str) -> bytes:
    """The 32 bytes of an auditor's secret, given as base64.

    Raises:
        Refusal: record_invalid.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        raw = b""
    require(
        len(raw) == 32 and base64.b64encode(raw).decode() == text,
        "a secret is the base64 of 32 bytes",
        "record_invalid",
    )
    return raw


def check_audit(audited: Record, first: Record, *, declared: float) -> None:
    """Refuse a PreparationAudited that claims an agreement which its own values deny.

    Args:
        audited: the named auditor's record.
        first: the ModelPrepared that was made again.
        declared: the definition's audit_tolerance, in nats.

    Raises:
        Refusal: guard_failed.
    """
    require(audited["tolerance"] <= declared, f"tolerance {audited['tolerance']} is above the declared {declared}")
    require(audited["agrees"] or bool(audited["reason"].strip()), "a re-run that does not agree gives its reason")
    if not audited["agrees"]:
        return
    here, there = audited["prepared"], first.fields.get("prepared")
    require(
        (here is None) == (there is None),
        f"a re-run agrees only with an outcome of its kind: here {here or 'it failed'}, first {there or 'it failed'}",
    )
    require(
        here == there or audited["hardware"] != first["hardware"],
        f"on the same hardware class, {first['hardware']}, only equal bytes agree: here {here}, first {there}",
    )


def agreed_to_void(state: Round, record: Record) -> set[int]:
    """The shares whose custodians signed a RoundVoided, or approved it over the same bytes."""
    assert record.by is not None
    covered = records.statement(record.type, record.round, record.fields, by=record.by)
    agreed = {state.custodian_index(record.by)}
    for approval in record.fields.get("approvals", []):
        records.check_signature(approval["by"], approval["sig"], covered, what="an approval of RoundVoided")
        agreed.add(state.custodian_index(approval["by"]))
    return {index for index in agreed if index is not None}
