"""Routes of entrants: register for a round, submit, upload, ask, withdraw."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from acclimate.api import bodies, uploads
from acclimate.api.access import Guarded
from acclimate.api.answers import RECORD, Caller, Here, RoundId, SubmissionId, answers, created, logged
from acclimate.service import submit
from acclimate_competitions.errors import Refusal

router = APIRouter(route_class=Guarded, tags=["entrant"])
_STATE = {"submission": "0b8e4c62-7d0b-4d2f-a2b7-6a1f8f1f2c11", "state": "checking", "reason": ""}


@router.post("/v1/rounds/{round_id}/entrants", summary="Register for a round", responses=answers(RECORD))
def register(round_id: RoundId, body: bodies.EntrantRegistered, here: Here, account: Caller) -> dict[str, Any]:
    """An entrant registers itself; the round's organizer registers the baselines that the definition names."""
    return logged(submit.register(here.store, account, round_id, body.sent()))


@router.post(
    "/v1/rounds/{round_id}/submissions",
    status_code=201,
    summary="Commit to a submission",
    responses=answers(
        {
            "submission": _STATE["submission"],
            "state": "uploading",
            "index": 12,
            "missing": ["sha256:" + "7" * 64],
        },
        status=201,
        meaning="committed; 200 if it was before",
    ),
)
def create(
    round_id: RoundId, body: bodies.Submission, response: Response, here: Here, account: Caller
) -> dict[str, Any]:
    """Logs SubmissionCommitted and debits the quota, in one transaction, before the round closes; then the missing files are sent."""
    sent = body.sent()
    made = submit.create(
        here.store,
        account,
        round_id,
        committed=sent["committed"],
        accepted=sent["accepted"],
        opening=(sent["nonce"], sent["manifest"]),
    )
    return created(response, made)


@router.put(
    "/v1/submissions/{submission}/files/{digest}",
    summary="Upload a file of a submission",
    responses=answers({**_STATE, "state": "uploading", "missing": []}),
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
)
async def put_file(
    submission: SubmissionId,
    digest: Annotated[str, Path(max_length=80, description="as in the manifest")],
    request: Request,
    here: Here,
    account: Caller,
) -> dict[str, Any]:
    """Raw bytes, with Content-Length; only files of the manifest, of the size that it declares."""
    size = uploads.declared_size(request)
    expected = await run_in_threadpool(submit.expected_size, here.store, account, submission, digest)
    if size != expected:
        raise Refusal("upload_mismatch", f"the upload declares {size} bytes, the manifest {expected}")
    await uploads.receive(request, here, digest=digest, size=size)
    return await run_in_threadpool(submit.received, here.store, account, submission, digest)


@router.post("/v1/submissions/{submission}/complete", summary="All files are there", responses=answers(_STATE))
def complete(submission: SubmissionId, here: Here, account: Caller) -> dict[str, Any]:
    """The files are read strictly, without running anything; then they wait for the check, or are refused with the reason."""
    return submit.complete(here.store, account, submission, identity=here.identity)


@router.get(
    "/v1/submissions/{submission}",
    summary="How a submission stands",
    responses=answers(
        {
            **_STATE,
            "round": "digits-2027-1-0123456789ab",
            "entrant": "team-a",
            "commitment": "sha256:" + "8" * 64,
            "committed_index": 12,
            "accepted_index": None,
            "missing": [],
            "quota": {"used": 1, "total": 5, "used_today": 1, "per_day": 3},
        }
    ),
)
def status(submission: SubmissionId, here: Here, account: Caller) -> dict[str, Any]:
    """For its own entrant and the round's organizer; to others it does not exist."""
    return submit.status(here.store, account, submission)


@router.post("/v1/rounds/{round_id}/withdrawals", summary="Withdraw a submission", responses=answers(RECORD))
def withdraw(round_id: RoundId, body: bodies.SubmissionWithdrawn, here: Here, account: Caller) -> dict[str, Any]:
    """Before the round closes."""
    return logged(submit.withdraw(here.store, account, round_id, body.sent()))
