"""The route of the pool: which machines the leading dispatcher has."""

from typing import Any

from fastapi import APIRouter

from acclimate.api.access import Guarded
from acclimate.api.answers import AnyCaller, Here, answers
from acclimate.service import pools

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
