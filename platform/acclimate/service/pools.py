"""The pool as the leading dispatcher last saw it, for whoever asks."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import select

from acclimate.schedule import UNMET
from acclimate.service.accounts import Account
from acclimate.store import Store, Tx, leases, pools, timestamp
from acclimate_competitions.records import parse_time

_NAME = "dispatch"
_SILENT = timedelta(minutes=1)
"""For so long nobody need lead before it is told: leaders come and go."""
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,40}")
_HOST = re.compile(r"host|node|address|\bip\b", re.IGNORECASE)


def pool(store: Store, account: Account | None) -> dict[str, Any]:
    """The pool with its age and whether a dispatcher leads; only an organizer is told the machines' names, and labels that may tell one."""
    with store.snapshot() as tx:
        row = tx.execute(select(pools).where(pools.c.name == _NAME)).first()
        expires = tx.execute(select(leases.c.expires).where(leases.c.name == _NAME)).scalar()
        now = timestamp(tx)
    leads = expires is not None and expires > now
    if row is None:
        problem = "no dispatcher has told of its machines yet"
        return {
            "leads": leads,
            "runner": None,
            "slots": 0,
            "machines": [],
            "problem": problem,
            "at": None,
            "age": None,
            "now": now,
        }
    machines = [dict(machine) for machine in row.machines]
    if account is None or account.role != "organizer":
        machines = [
            {**machine, "name": f"machine-{place}", "labels": _public(machine)}
            for place, machine in enumerate(machines, start=1)
        ]
    return {
        "leads": leads,
        "runner": row.runner,
        "slots": row.slots,
        "machines": machines,
        "problem": _problem(row.problem, is_organizer=account is not None and account.role == "organizer"),
        "at": row.at,
        "age": max(0.0, (parse_time(now) - parse_time(row.at)).total_seconds()),
        "now": now,
    }


def idle(tx: Tx, *, is_organizer: bool = False) -> str:
    """Why nothing that waits is begun now: no dispatcher leads, or it has no machine; empty where there is one."""
    expires = tx.execute(select(leases.c.expires).where(leases.c.name == _NAME)).scalar()
    if expires is None or parse_time(expires) + _SILENT < tx.now():
        return "no dispatcher is at work; the server's operator must start one"
    row = tx.execute(select(pools).where(pools.c.name == _NAME)).first()
    if row is None or row.machines:
        return ""
    return _problem(row.problem, is_organizer=is_organizer) or f"{UNMET}joined the pool"


def _public(machine: Mapping[str, Any]) -> dict[str, str]:
    """The labels by which anybody may plan, such as accelerator=A100: none that looks like a host, an address or the machine's name."""
    name = str(machine["name"]).partition(".")[0].lower()
    labels = {str(label): str(value) for label, value in dict(machine.get("labels", {})).items()}
    return {
        label: value
        for label, value in labels.items()
        if _PLAIN.fullmatch(value) and not _HOST.search(label) and name not in value.lower()
    }


def _problem(problem: str, *, is_organizer: bool) -> str:
    # It may name addresses and folders of the operator's network; that there is no machine is no secret.
    if problem.startswith(UNMET):
        return problem
    return problem if is_organizer or not problem else "the dispatcher has no machines now; its operator is told why"
