"""Downloads: streamed from the blobs piece by piece, so many at once, each with a few MiB in memory, and none for an idle reader."""

from typing import Any, BinaryIO

import anyio
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from acclimate.api.lane import Lane

OPEN = 32
"""How many may be under way at once, with about 3 MiB in memory each; who comes when all are taken is told to come again."""
STALLED = 60.0
"""Seconds in which a reader must have taken a piece."""
_PIECE = 1 << 20


class Download(Response):
    """A stream as an answer. It is closed whatever happens.

    Args:
        stream: what is read, by threads of the lane; read in pieces, each after the one before it was taken.
        size: its bytes.
        lane: whose places are taken while it is read.
        headers: of the answer.
        media: its media type.
    """

    def __init__(
        self,
        stream: BinaryIO,
        size: int,
        *,
        lane: Lane,
        headers: dict[str, str],
        media: str = "application/octet-stream",
    ) -> None:
        self.status_code, self.media_type, self.background = 200, media, None
        self.init_headers({"Content-Length": str(size), **headers})
        self._stream, self._lane = stream, lane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it.

        Raises:
            Refusal: busy, where all places are taken; blobs_unreachable.
        """
        try:
            with self._lane.place():
                async with anyio.create_task_group() as group:
                    group.start_soon(_until_gone, receive, group.cancel_scope)
                    await self._send(send)
                    group.cancel_scope.cancel()
        except BaseExceptionGroup as error:
            raise error.exceptions[0] from None
        finally:
            with anyio.CancelScope(shield=True):
                await self._lane.run(self._stream.close, wait=True)

    async def _send(self, send: Send) -> None:
        piece = await self._lane.run(self._stream.read, _PIECE, wait=True)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while piece:
            if not await _taken(send, {"type": "http.response.body", "body": piece, "more_body": True}):
                # The server closes the connection of an answer that has no end.
                return
            piece = await self._lane.run(self._stream.read, _PIECE, wait=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _taken(send: Send, message: Message) -> bool:
    with anyio.move_on_after(STALLED) as scope:
        await send(message)
    return not scope.cancelled_caught


async def _until_gone(receive: Receive, scope: Any) -> None:
    """Cancel what is sent to a caller that has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
