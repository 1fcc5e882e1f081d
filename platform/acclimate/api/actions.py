"""Routes that log what organizers and custodians sign."""

from typing import Any

from fastapi import APIRouter, Response

from acclimate.api import bodies
from acclimate.api.access import Guarded
from acclimate.api.answers import RECORD, Caller, Here, RoundId, answers, created, logged
from acclimate.service import judging, organize, publish, release
from acclimate.service.accounts import decode

router = APIRouter(route_class=Guarded)
_ENVELOPES = [{"index": 1, "to": "custodian-a", "main": "YWdlLWVuY3J5cHRpb24…", "backup": None}]


@router.post(
    "/v1/rounds",
    status_code=201,
    summary="Begin a round",
    tags=["organizer"],
    responses=answers({"round": "digits-2027-1-0123456789ab", "index": 0}, status=201),
)
def define(body: bodies.RoundDefined, response: Response, here: Here, account: Caller) -> dict[str, Any]:
    """Definition and public files must be blobs already; keys and code must be those of `GET /v1/server`. 200 if it was begun before."""
    return created(response, organize.define(here.store, here.identity, account, body.sent()))


@router.post("/v1/rounds/{round_id}/seal", summary="Seal the holdout", tags=["organizer"], responses=answers(RECORD))
def seal(round_id: RoundId, body: bodies.Sealing, here: Here, account: Caller) -> dict[str, Any]:
    """The ciphertext must be a blob already; digest, size and block root are recomputed from it."""
    sent = body.sent()
    return logged(organize.seal(here.store, account, round_id, sent["record"], envelopes=sent["envelopes"]))


@router.post(
    "/v1/rounds/{round_id}/rehearsal",
    summary="Hand in a dummy seal to rehearse with",
    tags=["organizer"],
    responses=answers({"seal": "sha256:" + "5" * 64, "round": "digits-2027-1-0123456789ab"}),
)
def rehearse(round_id: RoundId, body: bodies.Rehearsal, here: Here, account: Caller) -> dict[str, Any]:
    """A round opens only after its custodians opened a dummy seal in earnest; the newest dummy counts."""
    sent = body.sent()
    return logged(organize.rehearse(here.store, account, round_id, sent["fields"], envelopes=sent["envelopes"]))


@router.get(
    "/v1/rounds/{round_id}/envelopes",
    summary="Envelopes of the seal and of the rehearsal",
    tags=["custodian"],
    responses=answers(
        {
            "round": "digits-2027-1-0123456789ab",
            "real": {"seal": "sha256:" + "6" * 64, "fields": {}, "envelopes": _ENVELOPES, "succeeded": None},
            "rehearsal": None,
        }
    ),
)
def envelopes(round_id: RoundId, here: Here, account: Caller) -> dict[str, Any]:
    """A custodian gets its own, the round's organizer all; each opens with the custodian's age identity only."""
    return organize.envelopes(here.store, account, round_id)


@router.post(
    "/v1/rounds/{round_id}/rehearsal/shares",
    summary="Give a share of the dummy seal",
    tags=["custodian"],
    responses=answers({"seal": "sha256:" + "5" * 64, "received": 2, "needed": 2, "succeeded": True}),
)
def rehearsal_share(round_id: RoundId, body: bodies.RehearsalShare, here: Here, account: Caller) -> dict[str, Any]:
    """With the threshold's share the server opens the dummy; `succeeded` says whether it did."""
    document = decode(body.document, what="document")
    return release.rehearsal_share(here.store, here.settings, account, round_id, index=body.index, document=document)


@router.post(
    "/v1/rounds/{round_id}/acknowledgements",
    summary="Acknowledge a share",
    tags=["custodian"],
    responses=answers(RECORD),
)
def acknowledge(round_id: RoundId, body: bodies.ShareAcknowledged, here: Here, account: Caller) -> dict[str, Any]:
    """The custodian could decrypt its share, and found it to be the one committed to."""
    return logged(release.acknowledge(here.store, account, round_id, body.sent()))


@router.post("/v1/rounds/{round_id}/shares", summary="Release a share", tags=["custodian"], responses=answers(RECORD))
def share(round_id: RoundId, body: bodies.Release, here: Here, account: Caller) -> dict[str, Any]:
    """Refused, and not kept, before every entry's preparation is in the log."""
    sent = body.sent()
    document = decode(body.document, what="document")
    return logged(release.share(here.store, account, round_id, sent["record"], document=document))


@router.post(
    "/v1/rounds/{round_id}/extension",
    summary="Move the closing time later",
    tags=["organizer"],
    responses=answers(RECORD),
)
def extend(round_id: RoundId, body: bodies.ClosingExtended, here: Here, account: Caller) -> dict[str, Any]:
    """Before it passes, and never beyond closes_latest."""
    return logged(organize.extend(here.store, account, round_id, body.sent()))


@router.post(
    "/v1/rounds/{round_id}/ranking", summary="Publish the ranking", tags=["organizer"], responses=answers(RECORD)
)
def publish_ranking(round_id: RoundId, body: bodies.Publication, here: Here, account: Caller) -> dict[str, Any]:
    """The server computes the ranking again from the stored scores; both must have the signed digest."""
    sent = body.sent()
    return logged(publish.publish(here.store, account, round_id, sent["record"], document=sent["ranking"]))


@router.post(
    "/v1/rounds/{round_id}/revisions",
    summary="Publish a new version of the ranking",
    tags=["organizer"],
    responses=answers(RECORD),
)
def revise_ranking(round_id: RoundId, body: bodies.Revision, here: Here, account: Caller) -> dict[str, Any]:
    """The server judges the stored predictions again with the correction; both must have the signed digests. Older versions stay."""
    sent = body.sent()
    given = {"document": sent["ranking"], "correction": sent["correction"]}
    return logged(judging.revise(here.store, account, round_id, sent["record"], **given))


@router.post(
    "/v1/rounds/{round_id}/void", summary="Void a round", tags=["organizer", "custodian"], responses=answers(RECORD)
)
def void(round_id: RoundId, body: bodies.RoundVoided, here: Here, account: Caller) -> dict[str, Any]:
    """With a reason; after the close also with k custodians' approvals; signed by a custodian in any phase. All records stay public."""
    return logged(organize.void(here.store, account, round_id, body.sent()))
