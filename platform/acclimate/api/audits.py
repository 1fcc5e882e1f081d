"""Routes of a round's auditor: the draw, the files of drawn entries, the outcomes of their re-runs, the report on the bundle."""

from typing import Any

from fastapi import APIRouter, Request, Response

from acclimate.api import bodies
from acclimate.api.access import Guarded, require_proof
from acclimate.api.accounts import Digest
from acclimate.api.answers import RECORD, Caller, Here, RoundId, answers, logged
from acclimate.api.downloads import Download
from acclimate.service import audits

router = APIRouter(route_class=Guarded, tags=["auditor"])


@router.post("/v1/rounds/{round_id}/draw", summary="Draw the preparations to make again", responses=answers(RECORD))
def draw(round_id: RoundId, body: bodies.AuditDrawn, here: Here, account: Caller) -> dict[str, Any]:
    """The secret that RoundDefined commits to, told once every preparation is in the log; what is drawn follows from both."""
    return logged(audits.log(here.store, account, round_id, body.sent(), kind="AuditDrawn"))


@router.get(
    "/v1/rounds/{round_id}/audits",
    summary="The drawn preparations",
    responses=answers(
        [
            {
                "submission": 21,
                "entrant": "team-a",
                "task": "digit",
                "seed": 11,
                "files": {"config.json": "sha256:" + "7" * 64},
                "base": None,
                "versions": {"python": "3.11.9", "torch": "2.9.1"},
            }
        ]
    ),
)
def jobs(round_id: RoundId, request: Request, here: Here, account: Caller) -> list[dict[str, Any]]:
    """With the submitted files of each, the competition's base that an adapter stands on, and the versions that the first preparation ran with. The header `Acclimate-Proof` signs the request."""
    found = audits.jobs(here.store, account, round_id)
    require_proof(request, account)
    return found


@router.post("/v1/rounds/{round_id}/audits", summary="Say what came of a re-run", responses=answers(RECORD))
def audited(round_id: RoundId, body: bodies.PreparationAudited, here: Here, account: Caller) -> dict[str, Any]:
    """Of a drawn preparation, once. No share is released before all of them agree."""
    return logged(audits.log(here.store, account, round_id, body.sent(), kind="PreparationAudited"))


@router.get(
    "/v1/rounds/{round_id}/audits/files/{digest}",
    summary="A file of a drawn job",
    responses=answers("…", media="application/octet-stream", meaning="the bytes with this digest"),
)
def file(round_id: RoundId, digest: Digest, request: Request, here: Here, account: Caller) -> Response:
    """A submitted file of a drawn entry, or the model that a drawn job prepared from it. The header `Acclimate-Proof` signs the request."""
    found = audits.file_of(here.store, account, round_id, digest)
    require_proof(request, account)
    stream, size = here.store.blobs.sized(found)
    return Download(stream, size, lane=here.downloads, headers={"ETag": f'"{found}"', "Cache-Control": "no-store"})


@router.post("/v1/rounds/{round_id}/reports", summary="Report on the whole bundle", responses=answers(RECORD))
def report(round_id: RoundId, body: bodies.RoundAudited, here: Here, account: Caller) -> dict[str, Any]:
    """The round's auditor verified the bundle with this MANIFEST; `checks` counts its lines. Once the ranking is published."""
    return logged(audits.log(here.store, account, round_id, body.sent(), kind="RoundAudited"))
