"""Routes of the transparency log: checkpoint, entries, receipts, consistency."""

import time
from typing import Annotated

import anyio
from fastapi import APIRouter, Path, Query, Response
from starlette.concurrency import run_in_threadpool

from acclimate import cosignatures
from acclimate.api.access import Guarded
from acclimate.api.answers import Here, WholeNumber, answers
from acclimate.api.state import Services
from acclimate.quorum import Quorum
from acclimate.service import finding
from acclimate.store import Tx
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal

router = APIRouter(route_class=Guarded, tags=["log"])
PAGE = 1000
WAIT_SECONDS = 2.0
"""How long a receipt waits for the witnesses' quorum."""
_LOOK_SECONDS = 0.05
Size = Annotated[WholeNumber, Query(ge=0, le=2**53 - 1)]
_NOTE = "acclimate.example.org/log\n31\nRcCI1Nk56ZcSmIEfIn0SleqtV7uvrlXNccFx595Iwl0=\n\n— acclimate.example.org/log …\n"


@router.get(
    "/v1/log/checkpoint",
    summary="The newest signed checkpoint",
    responses=answers(_NOTE, media="text/plain", meaning="a signed note (C2SP tlog-checkpoint)"),
)
def checkpoint(
    here: Here,
    cosigned: Annotated[
        bool, Query(description="the newest one that a quorum of witnesses cosigned; without, the newest of all")
    ] = False,
    round_id: Annotated[
        str | None,
        Query(
            alias="round", max_length=records.LONGEST_ROUND_ID, description="whose witnesses; without, the server's own"
        ),
    ] = None,
) -> Response:
    """Over the log as it is now, with the cosignatures that are here already; or, `cosigned`, the newest with a quorum's.

    A round's witnesses and quorum are those of its RoundDefined, which the server's need no longer be.
    """
    here.sequencer.advance()
    with here.store.snapshot() as tx:
        quorum = here.collector.quorum
        if round_id is not None:
            quorum = Quorum.of(finding.find(tx, round_id).defined.fields)
        note = cosignatures.checkpoint(tx, quorum if cosigned else Quorum(quorum.witnesses, 0))
    return Response(note, media_type="text/plain; charset=utf-8")


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
async def proof(index: Annotated[WholeNumber, Path(ge=0, le=2**53 - 1)], here: Here) -> Response:
    """Entry, inclusion proof and signed checkpoint in one file.

    The checkpoint is the newest that a quorum of the round's witnesses cosigned. Where none of these holds the entry yet, it waits up to 2 s, and
    then it is the newest of all, with what cosignatures it has: the entry's own existence never waits for witnesses.
    """
    plain = await run_in_threadpool(here.sequencer.receipt, index)
    until = time.monotonic() + WAIT_SECONDS
    # In no thread: many may wait at once, and each place of the pool is for somebody who can be answered.
    while here.collector.hopeful(index) and time.monotonic() < until:
        await anyio.sleep(_LOOK_SECONDS)
    found = await run_in_threadpool(_receipt, here, index)
    return Response(found or plain, media_type="text/plain; charset=utf-8")


def _receipt(here: Services, index: int) -> str:
    """The receipt by the quorum's checkpoint, else by the newest with what cosignatures it has; empty where nobody cosigns."""
    with here.store.snapshot() as tx:
        quorum = _quorum_of(tx, index) or here.collector.quorum
        if not quorum.witnesses:
            return ""
        size = cosignatures.newest(tx, quorum)
        if size <= index:
            size = cosignatures.newest(tx, Quorum(quorum.witnesses, 0))
        note = cosignatures.note(tx, size, quorum.keys)
    return here.sequencer.receipt_by(index, note)


def _quorum_of(tx: Tx, index: int) -> Quorum | None:
    """The quorum of the round that a log entry belongs to; None where it is of none."""
    name = records.parse(tx.entry(index)).round
    return Quorum.of(tx.round(name).defined.fields) if name else None


@router.get(
    "/v1/log/consistency",
    summary="Proof that the log only grew",
    responses=answers({"proof": ["RcCI1Nk56ZcSmIEfIn0SleqtV7uvrlXNccFx595Iwl0="]}),
)
def consistency(here: Here, first: Size, second: Size) -> dict[str, list[str]]:
    """That the log of `first` entries is the beginning of that of `second` (RFC 6962)."""
    return {"proof": here.sequencer.consistency(first, second)}
