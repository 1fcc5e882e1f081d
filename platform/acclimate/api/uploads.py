"""Uploads: streamed to the blobs piece by piece, in constant memory; limits hold before the first byte is read."""

import logging

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from acclimate.api.state import Services
from acclimate_competitions.errors import Refusal

_PIECE = 1 << 20
_log = logging.getLogger(__name__)
_SPARE = 64 << 20


def declared_size(request: Request) -> int:
    """The size that an upload declares.

    Raises:
        Refusal: request_invalid.
    """
    header = request.headers.get("Content-Length", "")
    if not header.isdecimal() or len(header) > 18:
        raise Refusal(
            "request_invalid",
            "an upload must declare its size",
            hint="send Content-Length, the size of the file in bytes",
        )
    return int(header)


async def receive(request: Request, services: Services, *, digest: str, size: int) -> None:
    """Store an upload that must have this digest and size.

    Raises:
        Refusal: upload_mismatch, no_space, blob_unknown where the digest is none.
    """
    blobs = services.store.blobs
    await run_in_threadpool(_check_space, services, size)
    incoming = await run_in_threadpool(blobs.incoming, digest=digest, size=size)
    try:
        pieces = bytearray()
        async for chunk in request.stream():
            pieces += chunk
            if len(pieces) >= _PIECE:
                await run_in_threadpool(incoming.write, bytes(pieces))
                pieces.clear()
        await run_in_threadpool(incoming.write, bytes(pieces))
        await run_in_threadpool(incoming.finish)
    finally:
        await run_in_threadpool(incoming.abort)


def _check_space(services: Services, size: int) -> None:
    limit = services.settings.upload_limit
    if size > limit:
        raise Refusal("upload_mismatch", f"the upload has {size} bytes, this server takes {limit} at most")
    free = services.store.blobs.free()
    if free is not None and size + _SPARE > free:
        # How much is free is the operator's to know.
        _log.error("an upload of %d bytes was refused: %d bytes are free for blobs", size, free)
        raise Refusal(
            "no_space",
            f"the upload has {size} bytes, for which there is no room",
            hint="tell the operator; send it later",
        )
