"""Routes for who follows the whole log: hand-overs of its key, and tiles (C2SP tlog-tiles, whose prefix is /v1/log)."""

import re
import struct
from typing import Annotated

from fastapi import APIRouter, Path, Response

from acclimate.api.access import Guarded
from acclimate.api.answers import Here, answers
from acclimate.service import hand_over
from acclimate_competitions.errors import Refusal

router = APIRouter(route_class=Guarded, tags=["log"])
HEIGHT = 8
WIDTH = 1 << HEIGHT
"""Hashes, or entries, of a full tile."""
_PATH = re.compile(r"(entries|0|[1-9]|[1-5][0-9]|6[0-3])/((?:x[0-9]{3}/){0,5}[0-9]{3})(?:\.p/([1-9][0-9]{0,2}))?")


@router.get(
    "/v1/log/rotations",
    summary="Receipts of all hand-overs of the log's key",
    responses=answers({"receipts": ["c2sp.org/tlog-proof@v1\n…"]}),
)
def hand_overs(here: Here) -> dict[str, list[str]]:
    """In the log's order, each by the checkpoint that the old and the new key signed; none where there was no hand-over."""
    with here.store.snapshot() as tx:
        found = hand_over.logged(tx)
    return {"receipts": [here.sequencer.receipt_by(index, note) for index, note in found]}


@router.get(
    "/v1/log/tile/{path:path}",
    summary="A tile of the log: hashes or entries",
    responses=answers("…", media="application/octet-stream", meaning="a tile (C2SP tlog-tiles)"),
)
def tile(
    path: Annotated[
        str, Path(max_length=60, description="`<L>/<N>` or `entries/<N>`, with `.p/<W>` for the first W of a tile")
    ],
    here: Here,
) -> Response:
    """Up to 256 hashes of complete subtrees of 256^L entries, 32 bytes each, or entries, each with its length before it in 2 bytes.

    N is the tile's number in groups of three digits, all but the last with an x before: 1234067 is x001/x234/067. A
    tile never changes, so it may be kept for good.
    """
    match = _PATH.fullmatch(path)
    width = WIDTH if match is None or match[3] is None else int(match[3])
    if match is None or width > WIDTH or (match[3] is not None and width == WIDTH) or "x000/" in match[2][:5]:
        raise Refusal(
            "request_invalid",
            f"{path[:60]!r} is no tile's path",
            hint="such as 0/x001/234, 1/000.p/17, or entries/003",
        )
    start = int(match[2].replace("x", "").replace("/", "")) * WIDTH
    if match[1] != "entries":
        body = b"".join(here.sequencer.hashes(int(match[1]) * HEIGHT, start, start + width))
    else:
        here.sequencer.hashes(0, start, start + width)  # only what is signed is shown as the log
        with here.store.snapshot() as tx:
            body = b"".join(struct.pack(">H", len(entry)) + entry for entry in tx.entries(start, start + width))
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(body, media_type="application/octet-stream", headers=headers)
