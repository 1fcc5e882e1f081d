"""What the guards of a round's transitions are made of."""

import base64

from acclimate_competitions import records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_competitions.records import Record


def require(condition: bool, sentence: str, code: str = "guard_failed") -> None:
    """Refuse unless the condition holds.

    Raises:
        Refusal: of this code.
    """
    if not condition:
        raise Refusal(code, sentence)


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
