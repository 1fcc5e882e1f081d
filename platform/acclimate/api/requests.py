"""What happens to every request, whichever route it is for: an id, a line in the log, numbers for the metrics, and never a traceback.

The line has the route's template, not the address: no query, no header, no body and nothing that was sent in them. Of the path it has the
round alone. Probes and scrapes are logged at level debug, as they come every few seconds.
"""

import logging
import re
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from acclimate import framing
from acclimate.api import problems
from acclimate.metrics import Metrics
from acclimate_competitions.errors import Refusal

_REQUEST_ID = re.compile(r"[A-Za-z0-9-]{8,64}")
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,119}")
_ROUND = 100
_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
NOWHERE = "(none)"
"""The route of an address that there isn't."""
_log = logging.getLogger("acclimate.requests")


def _ambiguous(scope: Scope) -> ASGIApp:
    """The answer to a request of which nobody can say where it ends: a proxy before us may have seen two in it, so the connection ends too."""
    refusal = Refusal(
        "request_invalid",
        "the request says how long its body is in two ways, Content-Length and Transfer-Encoding",
        hint="send one of them",
    )
    answer = problems.problem(Request(scope), refusal, status=400)
    answer.headers["Connection"] = "close"
    return answer


class Requests:
    """Gives each request an id, which its answer carries in X-Request-Id and its problem in request_id, and takes note of its end."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = request_id
        began, status, sent, came = time.monotonic(), 0, 0, 0

        async def answer(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        async def count() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            return message

        self._metrics.began()
        try:
            if framing.is_ambiguous(scope["headers"]):
                await _ambiguous(scope)(scope, count, answer)
            else:
                await self._app(scope, count, answer)
        except Exception as error:
            problem = problems.unexpected(Request(scope), error)
            if not status:
                await problem(scope, count, answer)
        finally:
            # Also where the process is ending and the request was cancelled: it has no status then.
            self._end(scope, status or 499, time.monotonic() - began, received=came, sent=sent)

    def _end(self, scope: Scope, status: int, seconds: float, **bytes_: int) -> None:
        route = getattr(scope.get("route"), "path", NOWHERE)
        self._metrics.ended(method=scope["method"], route=route, status=status, seconds=seconds)
        if scope["method"] == "PUT":
            self._metrics.uploaded(bytes_["received"])
        account = scope["state"].get("account")
        facts: dict[str, Any] = {
            "request_id": scope["state"]["request_id"],
            "method": scope["method"][:10],
            "route": route,
            "status": status,
            "ms": round(seconds * 1000, 1),
            **bytes_,
            "account": account.id if account is not None else None,
            "round": given[:_ROUND]
            if _ID.fullmatch(given := str(scope.get("path_params", {}).get("round_id", "")))
            else None,
        }
        level = logging.DEBUG if route in _PROBES and status < 400 else logging.INFO
        _log.log(level, "request", extra={"facts": facts})
