"""Routes for planning: which machines the leading dispatcher has, and how long a round's work should take."""

from typing import Any

from fastapi import APIRouter

from acclimate.api.access import Guarded
from acclimate.api.answers import AnyCaller, Here, RoundId, answers
from acclimate.service import forecasts, pools

router = APIRouter(route_class=Guarded, tags=["pool"])


@router.get(
    "/v1/pool",
    summary="The machines of the leading dispatcher",
    responses=answers(
        {
            "leads": True,
            "runner": "ray",
            "slots": 8,
            "machines": [
                {"name": "machine-1", "cpus": 8, "gpus": 2, "memory": 66571993088, "labels": {"accelerator": "H100"}}
            ],
            "problem": "",
            "at": "2027-04-01T12:03:00.000000Z",
            "age": 4.2,
            "now": "2027-04-01T12:03:04.200000Z",
        }
    ),
)
def pool(here: Here, account: AnyCaller) -> dict[str, Any]:
    """As last written down, at most half a minute ago where `leads` is true; `acclimate plan` reads it."""
    return pools.pool(here.store, account)


@router.get(
    "/v1/rounds/{round_id}/forecast",
    summary="How long the round's work should take",
    responses=answers(
        {
            "round": "digits-2027-1-0123456789ab",
            "entries": 2,
            "preparations": [812.5, 40.0],
            "evaluations": [108.3, 5.3],
        }
    ),
)
def forecast(round_id: RoundId, here: Here, account: AnyCaller) -> dict[str, Any]:
    """Seconds of each entry's attempts, the longest first, by the pace that its check measured or its model's size."""
    return forecasts.forecast(here.store, account, round_id)
