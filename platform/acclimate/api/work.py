"""Routes about a round's work: what became of its stages, and what becomes of blocked ones."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from acclimate import outputs
from acclimate.api import bodies
from acclimate.api.access import Guarded, require_proof
from acclimate.api.answers import AnyCaller, Caller, Here, RoundId, answers
from acclimate.service import attempts

router = APIRouter(route_class=Guarded)
_KEY = "sha256:" + "7" * 64
_STAGE = {
    "key": _KEY,
    "kind": "prepare",
    "entrant": "team-a",
    "task": "digit",
    "seed": 11,
    "protocol": None,
    "state": "running",
    "attempts": 1,
    "tries": 10,
    "progress": 0.4,
    "place": None,
    "reason": "",
    "code": "",
    "heartbeat": "2027-04-01T12:03:00.000000Z",
    "not_before": None,
    "expected": "2027-04-01T12:09:00.000000Z",
    "machine": None,
}
_EVENT = {
    "at": "2027-04-01T12:00:00.000000Z",
    "event": "claimed",
    "fence": 1,
    "code": "",
    "reason": "",
    "machine": None,
}

_OUTPUT = {
    "fence": 1,
    "ended": "2027-04-01T12:04:00.000000Z",
    "code": "job_failed",
    "text": "KeyError: 'tint'\n",
    "left_out": 0,
    "problem": "",
}


@router.get(
    "/v1/rounds/{round_id}/stages",
    summary="The round's work and how far it is",
    responses=answers([_STAGE]),
)
def stages(round_id: RoundId, here: Here, account: AnyCaller) -> list[dict[str, Any]]:
    """Whose submission a stage belongs to is hidden until the close, except from its own entrant."""
    return attempts.stage_list(here.store, account, round_id)


@router.get(
    "/v1/rounds/{round_id}/stages/{key}",
    summary="A stage and the tries at it",
    responses=answers({"stage": _STAGE, "history": [_EVENT]}),
)
def why(round_id: RoundId, key: Annotated[str, Path(max_length=71)], here: Here, account: AnyCaller) -> dict[str, Any]:
    """By its key or any unique beginning of it; the history is the oldest first."""
    return attempts.why(here.store, account, round_id, key)


@router.get(
    "/v1/rounds/{round_id}/stages/{key}/outputs",
    summary="What the children of failed tries said",
    tags=["organizer"],
    responses=answers([_OUTPUT]),
)
def said(
    round_id: RoundId,
    key: Annotated[str, Path(max_length=71)],
    request: Request,
    response: Response,
    here: Here,
    account: Caller,
) -> list[dict[str, Any]]:
    """The end of each, at most 16 KiB, of the newest 20 tries, the oldest first. From the close on, for the round's organizer alone: it may hold words of a model or of the holdout. The header `Acclimate-Proof` signs the request."""
    tries = attempts.failed_tries(here.store, account, round_id, key)
    require_proof(request, account)
    response.headers["Cache-Control"] = "no-store"
    return outputs.of_tries(here.store.blobs, tries)


@router.post(
    "/v1/rounds/{round_id}/retries",
    summary="Try blocked stages again",
    tags=["organizer"],
    responses=answers({"round": "digits-2027-1-0123456789ab", "stages": [_KEY]}),
)
def retry(round_id: RoundId, body: bodies.Retries, here: Here, account: Caller) -> dict[str, Any]:
    """Those of these keys, or all that are blocked where there is none; the leading dispatcher then counts no try of theirs."""
    return attempts.retry(here.store, account, round_id, body.stages)


@router.post(
    "/v1/rounds/{round_id}/given-up",
    summary="Give up blocked stages",
    tags=["organizer"],
    responses=answers({"round": "digits-2027-1-0123456789ab", "stages": [_KEY]}),
)
def give_up(round_id: RoundId, body: bodies.GivenUp, here: Here, account: Caller) -> dict[str, Any]:
    """The leading dispatcher records them as failed, with this reason, and all that are blocked with them; the round then goes on."""
    return attempts.give_up(here.store, account, round_id, body.stages, reason=body.reason)
