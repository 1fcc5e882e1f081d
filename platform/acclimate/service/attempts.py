"""What a round's organizer asks of the dispatcher about stages that failed, and what everybody may know of their tries."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select

from acclimate.service import finding
from acclimate.service.accounts import Account
from acclimate.store import Store, stages, timestamp, wishes
from acclimate_competitions.errors import Refusal


def retry(store: Store, account: Account, given: str, keys: Sequence[str]) -> dict[str, Any]:
    """Ask the leading dispatcher to try blocked stages again, with no try counted.

    Args:
        store: the store.
        account: the round's organizer.
        given: the round.
        keys: of stages; none for all that are blocked.

    Returns:
        {"round", "stages": keys of those asked for}.

    Raises:
        Refusal: role_missing; not_found, for a key that the round lacks; phase_wrong, for a stage that isn't blocked, or none.
    """
    with store.transaction() as tx:
        state = finding.find(tx, given)
        finding.require_owner(tx, state.id, account)
        rows = {row.key: row for row in tx.execute(select(stages).where(stages.c.round == state.id)).all()}
        if missing := [key for key in keys if key not in rows]:
            raise Refusal(
                "not_found", f"round {state.id} has no stage {missing[0]}", hint="acclimate stage list shows them"
            )
        wanted = list(keys) or [key for key, row in rows.items() if row.state == "blocked"]
        if not wanted:
            raise Refusal(
                "phase_wrong", f"no stage of round {state.id} is blocked", hint="all else is tried again by itself"
            )
        for key in wanted:
            if rows[key].state != "blocked":
                sentence = f"stage {key} is {rows[key].state}; only what is blocked waits for you"
                raise Refusal(
                    "phase_wrong", sentence, hint=f"acclimate stage why {state.id} {key[:19]} tells what it waits for"
                )
        asked = set(
            tx.execute(select(wishes.c.stage).where(wishes.c.round == state.id, wishes.c.done.is_(None))).scalars()
        )
        new = [key for key in wanted if key not in asked]
        if new:
            row = {"round": state.id, "wish": "retry", "account": account.id, "at": timestamp(tx)}
            tx.execute(insert(wishes), [row | {"stage": key} for key in new])
        return {"round": state.id, "stages": sorted(wanted)}
