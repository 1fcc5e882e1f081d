"""Who may call which route: one table, deny by default.

A route that has no row can't be built, so the server doesn't start with one. The table decides by role; whether a round or a
submission is the caller's own is decided where it is looked up (service/), by the same refusals. What the protocol protects is
signed besides: a stolen token opens no seal.
"""

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.types import Message, Receive

from acclimate.api.state import Services, services_of
from acclimate.service import accounts
from acclimate.service.accounts import Account
from acclimate_competitions.errors import Refusal

PROOF = "Acclimate-Proof"
"""The header of a signed request: a challenge of `GET /v1/server`, a blank, the signature."""
LARGEST_JSON = 16 << 20
"""Bytes of a JSON body; uploads have limits of their own."""
MOST_VALUES = 1_000_000
"""Values and keys that a body may hold at most, counted before any is made: each takes up to a hundred bytes, however short it is in the body."""
_BESIDE_VALUES = (b"[", b"{", b",", b":")


@dataclass(frozen=True)
class Access:
    """Who may call a route.

    Attributes:
        roles: with "anonymous" for callers without a token.
        note: what is decided further on.
        blobs: whether the route waits for the store of blobs; see acclimate.api.lane.
        probe: whether it is a probe, which is answered whatever the database does: it looks at no token.
    """

    roles: frozenset[str]
    note: str = ""
    blobs: bool = False
    probe: bool = False


_ALL = frozenset({"anonymous", *accounts.ROLES})


def _all(note: str = "", *, blobs: bool = False, probe: bool = False) -> Access:
    return Access(_ALL, note, blobs, probe)


def _only(*roles: str, note: str = "", blobs: bool = False) -> Access:
    return Access(frozenset(roles), note, blobs)


_RESULTS = "once published; the round's organizer once evaluated"
_OWN_ROUND = "of the round's own organizer"
_OWN_SUBMISSION = "of the submission's own entrant; a baseline's is the round's organizer"

ACCESS: dict[tuple[str, str], Access] = {
    ("GET", "/healthz"): _all(probe=True),
    ("GET", "/readyz"): _all(probe=True),
    ("GET", "/metrics"): _all("where the setting metrics is on", probe=True),
    ("GET", "/v1/openapi.json"): _all(),
    ("GET", "/v1/server"): _all(),
    ("GET", "/v1/pool"): _all("only an organizer is told the machines' names, and labels that may tell one"),
    ("POST", "/v1/accounts"): _all("roles other than entrant need an invitation"),
    ("PUT", "/v1/blobs/{digest}"): _only("organizer"),
    ("POST", "/v1/rounds"): _only("organizer", blobs=True),
    ("GET", "/v1/rounds"): _all(),
    ("GET", "/v1/rounds/{round_id}"): _all(),
    ("GET", "/v1/rounds/{round_id}/definition"): _all(blobs=True),
    ("GET", "/v1/rounds/{round_id}/files/{name:path}"): _all("public files only", blobs=True),
    ("GET", "/v1/rounds/{round_id}/records"): _all(),
    ("GET", "/v1/rounds/{round_id}/stages"): _all("whose a stage is: hidden until the close, except from its entrant"),
    ("GET", "/v1/rounds/{round_id}/stages/{key}"): _all("as the list of stages"),
    ("GET", "/v1/rounds/{round_id}/stages/{key}/outputs"): _only(
        "organizer", note="of the round's own organizer, from the close on; signed by its key", blobs=True
    ),
    ("GET", "/v1/rounds/{round_id}/forecast"): _all(
        "before the close only the round's organizer reads how long entries take"
    ),
    ("POST", "/v1/rounds/{round_id}/retries"): _only("organizer", note=_OWN_ROUND),
    ("POST", "/v1/rounds/{round_id}/given-up"): _only("organizer", note=_OWN_ROUND),
    ("POST", "/v1/rounds/{round_id}/seal"): _only("organizer", note=_OWN_ROUND, blobs=True),
    ("POST", "/v1/rounds/{round_id}/rehearsal"): _only("organizer", note=_OWN_ROUND, blobs=True),
    ("GET", "/v1/rounds/{round_id}/envelopes"): _only(
        "custodian", "organizer", note="a custodian of the round sees its own, the round's organizer all"
    ),
    ("POST", "/v1/rounds/{round_id}/rehearsal/shares"): _only("custodian", note="a custodian of the round"),
    ("POST", "/v1/rounds/{round_id}/acknowledgements"): _only("custodian", note="a custodian of the round"),
    ("POST", "/v1/rounds/{round_id}/extension"): _only("organizer", note=_OWN_ROUND),
    ("POST", "/v1/rounds/{round_id}/entrants"): _only(
        "entrant", "organizer", note="an entrant itself; baselines the round's organizer"
    ),
    ("POST", "/v1/rounds/{round_id}/submissions"): _only("entrant", "organizer", note=_OWN_SUBMISSION),
    ("PUT", "/v1/submissions/{submission}/files/{digest}"): _only("entrant", "organizer", note=_OWN_SUBMISSION),
    ("POST", "/v1/submissions/{submission}/complete"): _only("entrant", "organizer", note=_OWN_SUBMISSION, blobs=True),
    ("GET", "/v1/submissions/{submission}"): _only(
        "entrant", "organizer", note="the submission's own entrant and the round's own organizer"
    ),
    ("POST", "/v1/rounds/{round_id}/withdrawals"): _only("entrant", "organizer", note=_OWN_SUBMISSION),
    ("POST", "/v1/rounds/{round_id}/shares"): _only("custodian", note="a custodian of the round", blobs=True),
    ("POST", "/v1/rounds/{round_id}/ranking"): _only("organizer", note=_OWN_ROUND, blobs=True),
    ("POST", "/v1/rounds/{round_id}/revisions"): _only("organizer", note=_OWN_ROUND, blobs=True),
    ("POST", "/v1/rounds/{round_id}/draw"): _only("auditor", note="the round's own auditor"),
    ("GET", "/v1/rounds/{round_id}/audits"): _only(
        "auditor", note="the round's own auditor, of drawn jobs; signed by its key"
    ),
    ("POST", "/v1/rounds/{round_id}/audits"): _only("auditor", note="the round's own auditor, of drawn jobs"),
    ("GET", "/v1/rounds/{round_id}/audits/files/{digest}"): _only(
        "auditor", note="the round's own auditor, files of drawn jobs; signed by its key", blobs=True
    ),
    ("POST", "/v1/rounds/{round_id}/reports"): _only("auditor", note="the round's own auditor"),
    ("POST", "/v1/rounds/{round_id}/void"): _only(
        "custodian", "organizer", note="the round's own organizer; a custodian of the round, for k of them"
    ),
    ("GET", "/v1/rounds/{round_id}/ranking"): _all(_RESULTS, blobs=True),
    ("GET", "/v1/rounds/{round_id}/versions"): _all("of what is published", blobs=True),
    ("GET", "/v1/rounds/{round_id}/bundle"): _all(
        f"{_RESULTS}; the whole one of a private holdout is signed for", blobs=True
    ),
    ("GET", "/v1/rounds/{round_id}/report"): _all(_RESULTS, blobs=True),
    ("GET", "/v1/log/checkpoint"): _all(),
    ("GET", "/v1/log/entries"): _all(),
    ("GET", "/v1/log/proof/{index}"): _all(),
    ("GET", "/v1/log/consistency"): _all(),
    ("GET", "/v1/log/rotations"): _all(),
    ("GET", "/v1/log/tile/{path:path}"): _all(),
}


class Guarded(APIRoute):
    """A route that asks the table before it reads a byte of the body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with access decided first.

        Raises:
            KeyError: where the table has no row for this route.
        """
        (method,) = self.methods or {"?"}
        access, inner = ACCESS[method, self.path], super().get_route_handler()

        async def handle(request: Request) -> Response:
            request.state.account = await _admit(request, access)
            # The limit stands for JSON; an upload reads its stream itself, by its declared size.
            bounded = request if method == "PUT" else _bounded(request)
            with services_of(request).lane.place() if access.blobs else nullcontext():
                return await inner(bounded)

        return handle


async def account_of(request: Request) -> Account | None:
    """Who calls, as admitted; None for a caller without a token."""
    account: Account | None = request.state.account
    return account


async def caller(request: Request) -> Account:
    """Who calls, on routes that need a role."""
    account = await account_of(request)
    if account is None:
        raise _missing()
    return account


async def _admit(request: Request, access: Access) -> Account | None:
    header = request.headers.get("Authorization")
    if access.probe:
        return None
    if header is None:
        # On the event loop: whoever needs no account must not need a thread for being let in.
        if "anonymous" not in access.roles:
            raise _missing()
        return None
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Refusal("token_invalid", "the Authorization header is malformed", hint="Authorization: Bearer acc_…")
    account = await run_in_threadpool(accounts.authenticate, services_of(request).store, token.strip())
    if account.role not in access.roles:
        allowed = ", ".join(sorted(access.roles - {"anonymous"}))
        raise Refusal(
            "role_missing",
            f"the account {account.id} has role {account.role}, this needs {allowed}",
            hint="take the key folder of an account with that role; `acclimate register` makes a new one",
        )
    return account


def challenges_of(here: Services) -> accounts.Challenges:
    """What registrations and requests for secrets sign."""
    return accounts.Challenges(here.identity.vkey, here.identity.signer.key.private_bytes_raw())


def require_proof(request: Request, account: Account) -> None:
    """Refuse a request for what is secret that the account's key has not signed.

    Raises:
        Refusal: signature_invalid, challenge_invalid.
    """
    here = services_of(request)
    with here.store.snapshot() as tx:
        now = tx.now()
    accounts.require_proof(
        request.headers.get(PROOF),
        account,
        path=request.scope["path"],
        query=request.scope["query_string"].decode("latin-1"),
        challenges=challenges_of(here),
        now=now,
    )


def _missing() -> Refusal:
    return Refusal(
        "token_invalid",
        "this needs an API token, and none was sent",
        hint="`acclimate register` gets one; send it as Authorization: Bearer acc_…",
    )


def _bounded(request: Request) -> Request:
    declared = request.headers.get("Content-Length", "0")
    if not declared.isdecimal() or int(declared) > LARGEST_JSON:
        raise _too_large()
    return Request(request.scope, _counting(request.receive), request._send)


def _counting(receive: Receive) -> Receive:
    seen = values = 0

    async def count() -> Message:
        nonlocal seen, values
        message = await receive()
        part = message.get("body", b"")
        seen += len(part)
        if seen > LARGEST_JSON:
            raise _too_large()
        values += sum(map(part.count, _BESIDE_VALUES))
        if values > MOST_VALUES:
            raise HTTPException(413, f"the body may hold more than {MOST_VALUES} values and keys")
        return message

    return count


def _too_large() -> HTTPException:
    # FastAPI lets this exception pass while it reads a body; a refusal it would turn into a bare 400.
    return HTTPException(413, f"the body has more than {LARGEST_JSON} bytes")
