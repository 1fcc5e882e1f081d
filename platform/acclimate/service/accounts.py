r"""Accounts: who may call which route. A token opens routes, never a seal: what the protocol needs is signed besides.

- A token is "acc_" and 32 random bytes; only its sha256 is stored, and it is shown once.
- Registering again with the same name, role and key, proven by that key, gives a new token and ends the old one: so a client
  that lost the answer, or whose token leaked, helps itself.
- The proof covers the log's key and a challenge of this server: who saw it once, at another server or on its way, has no use for it.
- Entrants register freely, unless the installation invites them, too; the other roles need an invitation, which works once.
"""

import base64
import hmac
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, insert, select, update

from acclimate.service import names
from acclimate.store import Store, Tx, accounts, invitations, timestamp
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

ROLES = ("organizer", "entrant", "custodian", "auditor", "analyst")
OPEN_ROLES = frozenset({"entrant"})
CHALLENGE_SECONDS = 300
"""For how long a registration may sign a challenge."""


@dataclass(frozen=True)
class Account:
    """Who calls; `id` is the entrant's id for good."""

    id: str
    role: str
    ed25519: str


@dataclass(frozen=True)
class Registration:
    """What is sent to make an account, or to get a new token for it.

    Attributes:
        name, role, ed25519: of the account.
        proof: signature of the key over `statement`, base64.
        challenge: of the server; None from clients that know none.
        invitation: a code, where the role needs one.
    """

    name: str
    role: str
    ed25519: str
    proof: str
    challenge: str | None = None
    invitation: str | None = None


@dataclass(frozen=True)
class Challenges:
    """Times of this server that nobody else can name, for registrations to sign.

    Attributes:
        log: the log's verifier key.
        secret: the log's private key, or whatever else only this installation has.
    """

    log: str
    secret: bytes

    def new(self, now: datetime) -> str:
        """A challenge of this moment."""
        at = records.format_time(now)
        return f"{at}.{base64.urlsafe_b64encode(self._mac(at)).decode().rstrip('=')}"

    def check(self, challenge: str | None, now: datetime) -> str:
        """The time of a challenge that this installation gave less than CHALLENGE_SECONDS ago.

        Raises:
            Refusal: challenge_invalid.
        """
        again = "ask `GET /v1/server` for a new one; `acclimate register` does"
        if challenge is None:
            raise Refusal(
                "challenge_invalid",
                "the registration signs no challenge of the server",
                hint="the client is too old: install the version that `GET /v1/server` names",
            )
        at = challenge[:27]
        try:
            given = records.parse_time(at)
        except Refusal as refusal:
            raise Refusal(
                "challenge_invalid", f"the challenge has no time: {refusal.sentence}", hint=again
            ) from refusal
        if not hmac.compare_digest(challenge.encode(), self.new(given).encode()):
            raise Refusal("challenge_invalid", f"the challenge of {at} is not of this server's", hint=again)
        if abs(age := (now - given).total_seconds()) > CHALLENGE_SECONDS:
            said = (
                f"the challenge is of {at}, {age:.0f} s ago by the database's clock; it holds for {CHALLENGE_SECONDS} s"
            )
            raise Refusal("challenge_invalid", said, hint=again)
        return at

    def _mac(self, at: str) -> bytes:
        return hmac.digest(self.secret, b"acclimate/challenge/v1\n" + at.encode(), "sha256")


def statement(*, name: str, role: str, ed25519: str, log: str, challenge: str) -> bytes:
    """The bytes that `proof` of a registration signs."""
    signed = {"name": name, "role": role, "ed25519": ed25519, "log": log, "challenge": challenge}
    return b"acclimate/account/v2\n" + digests.canonical(signed)


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
    store: Store, asked: Registration, *, challenges: Challenges, open_roles: Collection[str] = OPEN_ROLES
) -> dict[str, str]:
    """Make an account, or give the same account a new token.

    1. The challenge is this server's and of just now.
    2. The key has signed it, with the account and the log's key.
    3. No registration of the account with this challenge or a later one was accepted.
    4. Name and key are of one account, and the invitation is unused.

    Returns:
        {id, role, token}; the token is not stored and can't be shown again.

    Raises:
        Refusal: name_invalid, request_invalid, challenge_invalid, key_refused, signature_invalid, invitation_invalid, name_taken, conflict.
    """
    name, role, ed25519 = asked.name, asked.role, asked.ed25519
    names.check_id(name, what="account name")
    if role not in ROLES:
        raise Refusal("request_invalid", f"there is no role {role!r}", hint="roles: " + ", ".join(ROLES))
    token = "acc_" + secrets.token_urlsafe(32)
    row = {"id": name, "role": role, "ed25519": ed25519, "token_hash": digests.of_bytes(token.encode())}
    # 1
    with store.snapshot() as tx:
        at = challenges.check(asked.challenge, now := tx.now())
    # 2
    signed = statement(name=name, role=role, ed25519=ed25519, log=challenges.log, challenge=str(asked.challenge))
    records.check_signature(ed25519, asked.proof, signed, what="the registration")
    with store.transaction() as tx:
        known = tx.execute(select(accounts).where(accounts.c.id == name)).one_or_none()
        if known is not None and (known.role, known.ed25519) == (role, ed25519):
            # 3
            if _used(at, known.proven, now):
                raise Refusal(
                    "challenge_invalid",
                    f"{name} has registered with the challenge of {known.proven}; this one is of {at}",
                    hint="each registration signs a new challenge: ask again",
                )
            tx.execute(update(accounts).where(accounts.c.id == name).values(token_hash=row["token_hash"], proven=at))
        # 4
        elif known is not None:
            raise Refusal(
                "name_taken",
                f"the name {name!r} is taken",
                hint="if it is yours, name the folder that has its key: --keys DIR; else choose another name",
            )
        else:
            if tx.execute(select(accounts.c.id).where(accounts.c.ed25519 == ed25519)).first() is not None:
                raise Refusal(
                    "conflict", "another account has this key", hint="make a key of your own for each account"
                )
            tx.execute(insert(accounts), {**row, "created": timestamp(tx), "proven": at})
            if role not in open_roles:
                _use(tx, asked.invitation, role=role, by=name)
    return {"id": name, "role": role, "token": token}


def _used(at: str, proven: str | None, now: datetime) -> bool:
    """Whether a challenge is the last that was accepted, or one before it."""
    if proven is None:
        return False
    # A time that is far ahead was given by a clock that has been set right since; it must not lock the owner out until then.
    ahead = records.parse_time(proven) - now > timedelta(seconds=CHALLENGE_SECONDS)
    return at <= proven and not ahead


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
            "token_invalid",
            "the API token is unknown",
            hint="with the same key there is a new one: acclimate register --renew --server URL --name NAME --role ROLE --keys DIR, "
            "all as before",
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


def require_proof(
    given: str | None, account: Account, *, path: str, query: str, challenges: Challenges, now: datetime
) -> None:
    """Refuse a request for what is secret that the account's key did not sign; its token alone is not enough.

    1. The proof is `<challenge> <base64 of a signature>`; the challenge is this server's, and of just now.
    2. The account's key signed it, with this address and the log's key.

    Raises:
        Refusal: signature_invalid, challenge_invalid.
    """
    # 1
    challenge, _, sig = (given or "").partition(" ")
    if not sig:
        raise Refusal(
            "signature_invalid",
            f"{path} is for {account.id} only, and the request is not signed by its key",
            hint="name the key folder: --keys DIR; a client that can't sign it is too old: install the version that `GET /v1/server` names",
        )
    challenges.check(challenge, now)
    # 2
    signed = records.request_statement(path, query, by=account.ed25519, log=challenges.log, challenge=challenge)
    records.check_signature(account.ed25519, sig, signed, what="the request")


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
