"""The quota: a ledger of debits and refunds with reasons, read and written in the transaction that logs the commitment.

- A debit of 1 is made with each SubmissionCommitted.
- `refused`: the check refused the model. The submission no longer counts towards the round's total, since the entrant can mend the model
  and submit again; it still counts as a try of its day, so that broken uploads can't be sent without end.
- `cancelled`: withdrawn while it was uploading, before any work was done for it: counts for neither.
- `platform`: the fault was ours: counts for neither.
- A submission withdrawn after it was accepted stays debited.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import insert, select

from acclimate.store import Tx, quota_ledger, timestamp
from acclimate_competitions import zones
from acclimate_competitions.definition import Quota
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time, parse_time

_FREES_DAY = frozenset({"cancelled", "platform"})


def used(tx: Tx, round_id: str, entrant: str, *, zone: str, at: datetime) -> tuple[int, int]:
    """Submissions that count for (the round, the calendar day of `at` in the zone)."""
    rows = tx.execute(
        select(quota_ledger).where(quota_ledger.c.round == round_id, quota_ledger.c.entrant == entrant)
    ).all()
    today = at.astimezone(zones.zone(zone)).date()
    days = {
        row.submission: parse_time(row.at).astimezone(zones.zone(zone)).date() for row in rows if row.kind == "debit"
    }
    freed = {row.submission for row in rows if row.kind in _FREES_DAY}
    return -sum(row.delta for row in rows), sum(1 for s, day in days.items() if day == today and s not in freed)


def debit(tx: Tx, round_id: str, entrant: str, *, submission: str, quota: Quota, at: datetime) -> None:
    """Take one submission off the entrant's quota; `at` is the date of its record, by which an auditor counts its day.

    Raises:
        Refusal: quota_exceeded.
    """
    total, today = used(tx, round_id, entrant, zone=quota.day, at=at)
    if total >= quota.total:
        raise Refusal(
            "quota_exceeded",
            f"entrant {entrant!r} has used {total} of {quota.total} submissions of the round",
            hint="a refused model is refunded; an accepted one is not, even if it is withdrawn",
        )
    if today >= quota.per_day:
        day = at.astimezone(zones.zone(quota.day)).date()
        raise Refusal(
            "quota_exceeded",
            f"entrant {entrant!r} has used {today} of {quota.per_day} tries of {day} ({quota.day})",
            hint=f"the next day begins at midnight, {quota.day}",
        )
    _book(tx, round_id, entrant, submission=submission, kind="debit", reason="submission committed", at=at)


def refund(tx: Tx, submission: str, *, kind: str, reason: str) -> bool:
    """Give a submission's debit back, at most once; whether it was given back now."""
    rows = tx.execute(select(quota_ledger).where(quota_ledger.c.submission == submission)).all()
    debits = [row for row in rows if row.kind == "debit"]
    if len(rows) != 1 or not debits:
        return False
    _book(tx, debits[0].round, debits[0].entrant, submission=submission, kind=kind, reason=reason)
    return True


def _book(tx: Tx, round_id: str, entrant: str, *, at: datetime | None = None, **named: str) -> None:
    row: dict[str, Any] = {"round": round_id, "entrant": entrant, **named}
    tx.execute(
        insert(quota_ledger),
        {**row, "delta": -1 if named["kind"] == "debit" else 1, "at": timestamp(tx) if at is None else format_time(at)},
    )


def ledger(tx: Tx, round_id: str, entrant: str) -> list[dict[str, object]]:
    """The entrant's debits and refunds of a round, the oldest first."""
    query = select(quota_ledger).where(quota_ledger.c.round == round_id, quota_ledger.c.entrant == entrant)
    return [
        {"at": row.at, "submission": row.submission, "kind": row.kind, "delta": row.delta, "reason": row.reason}
        for row in tx.execute(query.order_by(quota_ledger.c.id))
    ]
