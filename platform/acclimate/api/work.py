"""Routes about a round's work: what became of its stages, and trying again what is blocked."""

from typing import Any

from fastapi import APIRouter

from acclimate.api import bodies
from acclimate.api.access import Guarded
from acclimate.api.answers import Caller, Here, RoundId, answers
from acclimate.service import attempts

router = APIRouter(route_class=Guarded)
_KEY = "sha256:" + "7" * 64


@router.post(
    "/v1/rounds/{round_id}/retries",
    summary="Try blocked stages again",
    tags=["organizer"],
    responses=answers({"round": "digits-2027-1-0123456789ab", "stages": [_KEY]}),
)
def retry(round_id: RoundId, body: bodies.Retries, here: Here, account: Caller) -> dict[str, Any]:
    """Those of these keys, or all that are blocked where there is none; the leading dispatcher then counts no try of theirs."""
    return attempts.retry(here.store, account, round_id, body.stages)
