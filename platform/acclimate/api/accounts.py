"""Routes about the server itself, accounts and blobs."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse

from acclimate.api import bodies, uploads
from acclimate.api.access import Guarded, challenges_of
from acclimate.api.answers import Caller, Here, answers
from acclimate.service import accounts
from acclimate_competitions.records import format_time

router = APIRouter(route_class=Guarded)
Digest = Annotated[str, Path(max_length=80, description="sha256: and 64 lower-case hex digits of the bytes")]


@router.get(
    "/v1/server",
    summary="Version, keys and clock of the server",
    tags=["server"],
    responses=answers(
        {
            "version": "0.1.0",
            "origin": "acclimate.example.org/log",
            "log": "acclimate.example.org/log+1a2b3c4d+AQ…",
            "evaluators": ["A" * 43 + "="],
            "code": "sha256:" + "3" * 64,
            "witnesses": ["witness.example.net+5e6f7a8b+BA…"],
            "quorum": 1,
            "now": "2027-03-01T00:00:00.000000Z",
            "challenge": "2027-03-01T00:00:00.000000Z.XQ2r…",
        }
    ),
)
def server(here: Here) -> dict[str, Any]:
    """What RoundDefined must name: the log's verifier key, the evaluators' keys, the digest of the code, witnesses and quorum; and the database's clock. `challenge` is for a registration, or a signed request, and holds for five minutes."""
    with here.store.snapshot() as tx:
        now = tx.now()
    return {**here.identity.document(), "now": format_time(now), "challenge": challenges_of(here).new(now)}


@router.post(
    "/v1/accounts",
    status_code=201,
    summary="Make an account, or get a new token for it",
    tags=["accounts"],
    responses=answers({"id": "team-a", "role": "entrant", "token": "acc_…"}, status=201),
)
def register(body: bodies.Registration, here: Here) -> JSONResponse:
    """The token is shown this once. The same name, role and key again give a new token and end the old one."""
    made = accounts.register(
        here.store,
        accounts.Registration(**body.model_dump()),
        challenges=challenges_of(here),
        open_roles=accounts.OPEN_ROLES if here.settings.entrants == "open" else (),
    )
    return JSONResponse(made, 201, headers={"Cache-Control": "no-store"})


@router.put(
    "/v1/blobs/{digest}",
    summary="Upload a definition, a public file or a sealed holdout",
    tags=["rounds"],
    responses=answers({"digest": "sha256:" + "4" * 64, "size": 12345}),
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
)
async def put_blob(digest: Digest, request: Request, here: Here, account: Caller) -> dict[str, Any]:
    """Raw bytes, with Content-Length; refused where they don't hash to the digest."""
    size = uploads.declared_size(request)
    await uploads.receive(request, here, digest=digest, size=size)
    return {"digest": digest, "size": size}
