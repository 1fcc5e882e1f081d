"""Routes of the transparency log: checkpoint, entries, receipts, consistency."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from acclimate.api.access import Guarded
from acclimate.api.answers import Here, answers
from acclimate_competitions.errors import Refusal

router = APIRouter(route_class=Guarded, tags=["log"])
PAGE = 1000
Size = Annotated[int, Query(ge=0, le=2**53 - 1)]
_NOTE = "acclimate.example.org/log\n31\nRcCI1Nk56ZcSmIEfIn0SleqtV7uvrlXNccFx595Iwl0=\n\n— acclimate.example.org/log …\n"


@router.get(
    "/v1/log/checkpoint",
    summary="The newest signed checkpoint",
    responses=answers(_NOTE, media="text/plain", meaning="a signed note (C2SP tlog-checkpoint)"),
)
def checkpoint(here: Here) -> Response:
    """Over the log as it is now."""
    return Response(here.sequencer.checkpoint(), media_type="text/plain; charset=utf-8")


@router.get(
    "/v1/log/entries",
    summary="Log entries",
    responses=answers('{"at":"2027-02-01T09:00:00.000000Z",…}', media="application/jsonl", meaning="one entry a line"),
)
def entries(here: Here, start: Size, end: Size) -> Response:
    """Entries start ≤ index < end, at most 1000 of them and fewer at the log's end; a line without its newline is the leaf's data."""
    if start >= end:
        raise Refusal("request_invalid", f"start is {start}, end {end}: start must be below end")
    with here.store.snapshot() as tx:
        found = tx.entries(start, min(end, start + PAGE))
        if not found:
            raise Refusal("entry_unknown", f"the log has {tx.size()} entries, none from {start} on")
    return Response(b"".join(entry + b"\n" for entry in found), media_type="application/jsonl")


@router.get(
    "/v1/log/proof/{index}",
    summary="The receipt of a log entry",
    responses=answers("c2sp.org/tlog-proof@v1\n…", media="text/plain", meaning="a receipt (C2SP tlog-proof)"),
)
def proof(index: Annotated[int, Path(ge=0, le=2**53 - 1)], here: Here) -> Response:
    """Entry, inclusion proof and signed checkpoint in one file; waits up to 2 s for the checkpoint."""
    return Response(here.sequencer.receipt(index), media_type="text/plain; charset=utf-8")


@router.get(
    "/v1/log/consistency",
    summary="Proof that the log only grew",
    responses=answers({"proof": ["RcCI1Nk56ZcSmIEfIn0SleqtV7uvrlXNccFx595Iwl0="]}),
)
def consistency(here: Here, first: Size, second: Size) -> dict[str, list[str]]:
    """That the log of `first` entries is the beginning of that of `second` (RFC 6962)."""
    return {"proof": here.sequencer.consistency(first, second)}
