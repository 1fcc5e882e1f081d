"""Finding a round by what a caller calls it, and whether the caller may act on it."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Row, select

from acclimate.service.accounts import Account
from acclimate.store import Tx, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round

_BEFORE_CLOSE = frozenset({Phase.DRAFT, Phase.SEALED, Phase.OPEN})


def row(tx: Tx, given: str) -> Row[Any]:
    """The rounds' row of an id or of any unique prefix of one.

    Raises:
        Refusal: round_unknown.
    """
    query = select(rounds).where(rounds.c.id >= given, rounds.c.id < given + "\U0010ffff")
    if not given:
        raise Refusal(
            "round_unknown", "the round's id is empty", hint="`acclimate round list --server URL` shows them all"
        )
    # No id holds U+0000, and no question to the database may.
    found = [] if "\0" in given else tx.execute(query.order_by(rounds.c.id).limit(6)).all()
    exact = [row for row in found if row.id == given]
    if exact or len(found) == 1:
        only: Row[Any] = (exact or found)[0]
        return only
    if found:
        names = ", ".join(row.id for row in found[:5]) + (", …" if len(found) > 5 else "")
        raise Refusal("round_unknown", f"several rounds begin with {given!r}: {names}", hint="give more of the id")
    raise Refusal(
        "round_unknown", f"there is no round {given!r}", hint="`acclimate round list --server URL` shows them all"
    )


def find(tx: Tx, given: str) -> Round:
    """Where the round stands that the caller means.

    Raises:
        Refusal: round_unknown.
    """
    return tx.round(row(tx, given).id)


def is_owner(tx: Tx, round_id: str, account: Account | None) -> bool:
    """Whether the account is the organizer of the round."""
    return account is not None and account.role == "organizer" and row(tx, round_id).owner == account.id


def require_owner(tx: Tx, round_id: str, account: Account | None) -> None:
    """Refuse anybody but the organizer of the round.

    Raises:
        Refusal: role_missing.
    """
    if not is_owner(tx, round_id, account):
        who = "nobody" if account is None else f"{account.id} ({account.role})"
        raise Refusal("role_missing", f"round {round_id} belongs to another organizer than {who}")


def hides_models(state: Round) -> bool:
    """Whether whose a model is, and how large, is for its entrant alone: until the close, and for good where the round was voided before."""
    return state.phase in _BEFORE_CLOSE or (state.phase is Phase.VOIDED and state.closed is None)


def is_auditor(state: Round, account: Account | None) -> bool:
    """Whether the account is the auditor whom the round names: role and key."""
    named = state.auditor
    return (
        account is not None and account.role == "auditor" and named is not None and account.ed25519 == named["ed25519"]
    )


def require_auditor(state: Round, account: Account | None) -> None:
    """Refuse anybody but the auditor whom the round names.

    Raises:
        Refusal: role_missing.
    """
    if not is_auditor(state, account):
        who = "nobody" if account is None else f"{account.id} ({account.role})"
        named = "no auditor" if state.auditor is None else f"{state.auditor['name']}, with another key,"
        raise Refusal("role_missing", f"round {state.id} names {named} as its auditor: {who} is not it")


def custodian_index(state: Round, account: Account) -> int:
    """The account's share index in the round.

    Raises:
        Refusal: role_missing.
    """
    index = state.custodian_index(account.ed25519)
    if index is None:
        raise Refusal("role_missing", f"{account.id} is not a custodian of round {state.id}: it has another key")
    return index


def require_kind(request: Mapping[str, Any], kind: str, state: Round) -> None:
    """Refuse a signed request of another type or round than the address says.

    Raises:
        Refusal: record_invalid.
    """
    if request.get("type") != kind:
        raise Refusal("record_invalid", f"this address takes {kind}, the request is {request.get('type')}")
    if request.get("round") != state.id:
        raise Refusal("record_invalid", f"the request is for round {request.get('round')}, the address for {state.id}")
