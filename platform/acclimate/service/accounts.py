r"""Accounts: who may call which route. A token opens routes, never a seal: what the protocol needs is signed besides.

- A token is "acc_" and 32 random bytes; only its sha256 is stored, and it is shown once.
- Registering again with the same name, role and key, proven by that key, gives a new token and ends the old one: so a client
  that lost the answer, or whose token leaked, helps itself.
- Entrants register freely; the other roles need an invitation, which works once.
"""

import base64
import hmac
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from sqlalchemy import delete, insert, select, update

from acclimate.service import names
from acclimate.store import Store, Tx, accounts, invitations, timestamp
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

ROLES = ("organizer", "entrant", "custodian", "auditor", "analyst")
OPEN_ROLES = frozenset({"entrant"})


@dataclass(frozen=True)
class Account:
    """Who calls; `id` is the entrant's id for good."""

    id: str
    role: str
    ed25519: str


def statement(*, name: str, role: str, ed25519: str) -> bytes:
    """The bytes that `proof` of a registration signs."""
    return b"acclimate/account/v1\n" + digests.canonical({"name": name, "role": role, "ed25519": ed25519})


def invite(store: Store, role: str) -> str:
    """A new invitation for one account of this role; only its hash is stored.

    Raises:
        Refusal: request_invalid.
    """
    if role not in ROLES:
        raise Refusal("request_invalid", f"there is no role {role!r}", hint="roles: " + ", ".join(ROLES))
    code = _code()
    with store.transaction() as tx:
        tx.execute(insert(invitations), {"code_hash": hash_of(code), "role": role})
    return code


def first_organizer(store: Store, made: Collection[str], note: Callable[[str], None]) -> str | None:
    """An invitation for the first organizer in place of those that were made for the same before; None where there is an organizer.

    Args:
        store: the store.
        made: hashes of the invitations made before; of them none that is unused is left.
        note: called with the new one's hash before it is valid, so that whoever keeps it can withdraw it whatever happens next.

    Raises:
        Refusal: busy, database_unreachable, no_space.
    """
    code = _code()
    note(hash_of(code))
    with store.transaction() as tx:
        tx.execute(delete(invitations).where(invitations.c.code_hash.in_(list(made)), invitations.c.used_by.is_(None)))
        if tx.execute(select(accounts.c.id).where(accounts.c.role == "organizer").limit(1)).first() is not None:
            return None
        tx.execute(insert(invitations), {"code_hash": hash_of(code), "role": "organizer"})
    return code


def hash_of(code: str) -> str:
    """What is stored of an invitation."""
    return digests.of_bytes(code.encode())


def _code() -> str:
    return "inv_" + secrets.token_urlsafe(32)


def register(
    store: Store, *, name: str, role: str, ed25519: str, proof: str, invitation: str | None = None
) -> dict[str, str]:
    """Make an account, or give the same account a new token.

    Returns:
        {id, role, token}; the token is not stored and can't be shown again.

    Raises:
        Refusal: name_invalid, request_invalid, key_refused, signature_invalid, invitation_invalid, name_taken, conflict.
    """
    names.check_id(name, what="account name")
    if role not in ROLES:
        raise Refusal("request_invalid", f"there is no role {role!r}", hint="roles: " + ", ".join(ROLES))
    records.check_signature(ed25519, proof, statement(name=name, role=role, ed25519=ed25519), what="the registration")
    token = "acc_" + secrets.token_urlsafe(32)
    row = {"id": name, "role": role, "ed25519": ed25519, "token_hash": digests.of_bytes(token.encode())}
    with store.transaction() as tx:
        known = tx.execute(select(accounts).where(accounts.c.id == name)).one_or_none()
        if known is not None and (known.role, known.ed25519) == (role, ed25519):
            tx.execute(update(accounts).where(accounts.c.id == name).values(token_hash=row["token_hash"]))
        elif known is not None:
            raise Refusal("name_taken", f"the name {name!r} is taken", hint="choose another name")
        else:
            if tx.execute(select(accounts.c.id).where(accounts.c.ed25519 == ed25519)).first() is not None:
                raise Refusal(
                    "conflict", "another account has this key", hint="make a key of your own for each account"
                )
            tx.execute(insert(accounts), {**row, "created": timestamp(tx)})
            if role not in OPEN_ROLES:
                _use(tx, invitation, role=role, by=name)
    return {"id": name, "role": role, "token": token}


def _use(tx: Tx, invitation: str | None, *, role: str, by: str) -> None:
    used = tx.execute(
        update(invitations)
        .where(
            invitations.c.code_hash == hash_of(invitation or ""),
            invitations.c.role == role,
            invitations.c.used_by.is_(None),
        )
        .values(used_by=by)
    )
    if used.rowcount != 1:
        raise Refusal(
            "invitation_invalid",
            f"an account of role {role} needs an unused invitation for this role",
            hint=f"whoever runs the server makes one: acclimate invite --role {role}",
        )


def authenticate(store: Store, token: str) -> Account:
    """The account of a token.

    Raises:
        Refusal: token_invalid.
    """
    presented = digests.of_bytes(token.encode("utf-8", "surrogateescape"))
    with store.snapshot() as tx:
        row = tx.execute(select(accounts).where(accounts.c.token_hash == presented)).one_or_none()
    # Only hashes are looked up and compared, so timing tells nothing about a token.
    if row is None or not hmac.compare_digest(row.token_hash, presented):
        raise Refusal(
            "token_invalid", "the API token is unknown", hint="register again with the same key for a new one"
        )
    return Account(row.id, row.role, row.ed25519)


def require_signer(request: dict[str, object], account: Account) -> None:
    """Refuse a signed request whose signer is not the account that sends it.

    Raises:
        Refusal: signature_invalid.
    """
    if request.get("by") != account.ed25519:
        raise Refusal(
            "signature_invalid",
            f"the request is signed by {request.get('by')}, the account {account.id} has another key",
            hint="sign with the key that the account was registered with",
        )


def decode(text: str, *, what: str, length: int | None = None) -> bytes:
    """The bytes of strict base64.

    Raises:
        Refusal: request_invalid.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise Refusal("request_invalid", f"{what} is not base64") from error
    if base64.b64encode(data).decode() != text or (length is not None and len(data) != length):
        raise Refusal("request_invalid", f"{what} is not the base64 of {length or 'whole'} bytes")
    return data
