"""Whether the API lives, can serve, and how much it does: /healthz, /readyz, /metrics."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from acclimate.api.access import Guarded
from acclimate.api.answers import Here, answers
from acclimate.health import CHECKS
from acclimate.metrics import MEDIA_TYPE
from acclimate_competitions.errors import Refusal

router = APIRouter(route_class=Guarded, tags=["server"])
RETRY_SECONDS = 2


@router.get("/healthz", summary="The process is alive", responses=answers({"status": "ok"}))
async def healthz() -> dict[str, str]:
    """Answers as long as the process can answer at all."""
    return {"status": "ok"}


_READY = {
    "status": "ready",
    "checks": {name: "ok" for name in CHECKS},
    "log": {"entries": 31, "unsigned": 0, "checkpoint_age": 12.5},
    "clock_offset": 0.004,
}


@router.get("/readyz", summary="The server can serve", responses=answers(_READY))
async def readyz(here: Here) -> JSONResponse:
    """503, with what is wrong, where database, blobs or disk can't be used or written, nothing can be logged, the log isn't signed, or the server is stopping.

    A clock that differs from the database's by seconds is told and is no reason: decisions are by the database's.
    """
    state = await here.looks.run(here.health.state, wait=True)
    reasons = dict(state.reasons)
    if here.health.stopping.is_set():
        reasons["stopping"] = "the server is stopping"
    checks = {name: state.reasons.get(name) or state.warnings.get(name) or "ok" for name in CHECKS}
    log = state.facts.log if state.facts is not None else None
    content = {
        "status": "not ready" if reasons else "ready",
        "checks": checks | ({"stopping": reasons["stopping"]} if "stopping" in reasons else {}),
        "log": None
        if log is None
        else {"entries": log.entries, "unsigned": log.unsigned, "checkpoint_age": log.checkpoint_age},
        "clock_offset": None if state.offset is None else round(state.offset, 4),
    }
    if not reasons:
        return JSONResponse(content)
    return JSONResponse(content, 503, headers={"Retry-After": str(RETRY_SECONDS)})


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    responses=answers("acclimate_ready 1.0\n", media="text/plain", meaning="Prometheus's text format"),
)
async def metrics(here: Here) -> Response:
    """Sums over all rounds. Who gets it is decided by the setting `metrics`: where it is off, it is not there."""
    if here.settings.metrics != "on":
        raise Refusal("not_found", "there is nothing at GET /metrics", hint="see /v1/openapi.json")
    return Response(await here.looks.run(here.metrics.text, wait=True), media_type=MEDIA_TYPE)
