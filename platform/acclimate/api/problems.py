"""Every error as problem details (RFC 9457): code, hint, problems, request_id; never a traceback to the caller."""

import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from acclimate import database
from acclimate_competitions.errors import CODES, Refusal

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 2
_REQUEST_ID = re.compile(r"[A-Za-z0-9-]{8,64}")
_log = logging.getLogger("acclimate.api")


class RequestIds:
    """Gives each request an id, which its answer carries in X-Request-Id and its problem in request_id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = request_id

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, answer)


def problem(request: Request, refusal: Refusal, *, status: int | None = None) -> JSONResponse:
    """The answer for a refusal."""
    headers: dict[str, str] = {}
    status = status or refusal.status
    if status == 503:
        headers["Retry-After"] = str(RETRY_SECONDS)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content: Mapping[str, Any] = {
        "type": f"urn:acclimate:refusal:{refusal.code}",
        "title": CODES[refusal.code].meaning,
        "status": status,
        "detail": refusal.sentence,
        "code": refusal.code,
        "hint": refusal.hint,
        "problems": list(refusal.problems),
        "request_id": getattr(request.state, "request_id", ""),
    }
    return JSONResponse(content, status, headers=headers, media_type=MEDIA_TYPE)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    if error.status >= 500 and error.code != "busy":
        _log.error("request %s: %s: %s", request.state.request_id, error.code, error.sentence)
    return problem(request, error)


async def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = [_line(item) for item in error.errors()]
    count = "a problem" if len(found) == 1 else f"{len(found)} problems"
    refusal = Refusal(
        "request_invalid", f"the request has {count}: {found[0]}", hint="see /v1/openapi.json", problems=found
    )
    return problem(request, refusal)


def _line(item: Mapping[str, Any]) -> str:
    if item["type"] == "json_invalid":
        return f"body: not JSON, from character {item['loc'][-1]} on"
    where = ".".join(str(part) for part in item["loc"] if part not in ("body", "query", "path"))
    return f"{where or 'body'}: {item['msg']}"[:500]


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return problem(request, Refusal("not_found", f"there is nothing at {where}", hint="see /v1/openapi.json"))
    if error.status_code == 405:
        return problem(request, Refusal("not_found", f"{where} is not a method of this address"), status=405)
    return problem(request, Refusal("request_invalid", f"{where}: {error.detail}"), status=error.status_code)


async def _gone(request: Request, error: Exception) -> JSONResponse:
    # Nobody reads this answer; it keeps a broken upload out of the error log.
    return problem(request, Refusal("upload_mismatch", "the caller went away before all bytes came"), status=400)


async def _machine(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OSError)
    if database.is_full(error):
        return problem(request, Refusal("no_space", "the disk is full; nothing was lost", hint="free some space"))
    _log.error("request %s", request.state.request_id, exc_info=error)
    return _failed(request)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # The traceback follows in the server's log: starlette raises the error again once it is answered.
    _log.error("request %s: %s", getattr(request.state, "request_id", "?"), type(error).__name__)
    return _failed(request)


def _failed(request: Request) -> JSONResponse:
    request_id = getattr(request.state, "request_id", "?")
    sentence = f"the server failed; its log has the details under request {request_id}"
    return problem(request, Refusal("internal_error", sentence))


def install(app: FastAPI) -> None:
    """Answer every error of an application as a problem."""
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(OSError, _machine)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(RequestIds)
