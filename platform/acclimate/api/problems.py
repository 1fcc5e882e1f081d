"""Every error as problem details (RFC 9457): code, hint, problems, request_id; never a traceback to the caller."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from acclimate.files import is_full
from acclimate_competitions.errors import CODES, Refusal

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 2
_TOLD = frozenset({"busy", "quorum_missing"})
"""What a server says of itself that is no trouble of its own: nobody need look at its log."""
_OF_THE_SERVER = {
    "database_unreachable": "the server's database can't be used now; nothing was changed",
    "blobs_unreachable": "the server's store of blobs can't be used now; nothing was lost",
    "no_space": "the server has no room for this now; nothing was lost",
    "data_version": "the server's database is of another version than the server",
    "other_installation": "the server's database, blobs and keys do not belong together",
    "lease_lost": "another process of the server does this now",
    "log_inconsistent": "the server's log contradicts itself",
    "config_invalid": "a setting of the server is wrong",
    "file_unreadable": "a file of the server can't be read or written",
    "extra_missing": "the server lacks a part that this needs",
    "runner_failed": "a machine or a process of the server failed",
    "blob_corrupt": "a file that the server kept is damaged; it was set aside",
}
"""What callers are told in the place of the refusal's own words, which name hosts, folders, buckets and settings to the operator."""
_log = logging.getLogger("acclimate.api")


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
    request_id = request.state.request_id
    if error.code in _OF_THE_SERVER or (error.status >= 500 and error.code not in _TOLD):
        facts = {"request_id": request_id, "code": error.code, "reason": error.sentence, "hint": error.hint or None}
        _log.error("request %s: %s: %s", request_id, error.code, error.sentence, extra={"facts": facts})
    return problem(request, _told(error, request_id))


def _told(refusal: Refusal, request_id: str) -> Refusal:
    """What a caller is told of a refusal: of what only the operator can mend no more than that it is so."""
    if refusal.code not in _OF_THE_SERVER:
        return refusal
    again = "the same request again later will do; " if refusal.status in (503, 507) else ""
    hint = f"{again}where it stays so, tell the server's operator: its log says why, under {request_id}"
    return Refusal(refusal.code, _OF_THE_SERVER[refusal.code], hint=hint)


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
    if is_full(error):
        where = f" ({error.filename})" if error.filename else ""
        return await _refused(request, Refusal("no_space", f"the disk is full{where}", hint="free some space there"))
    folder = str(request.app.state.services.settings.blobs)
    if "://" not in folder and Path(str(error.filename or "")).is_relative_to(folder):
        sentence = f"the folder of blobs can't be used: {error.strerror} ({error.filename})"
        hint = "the account that runs this server must be able to read and write there"
        return await _refused(request, Refusal("blobs_unreachable", sentence, hint=hint))
    return unexpected(request, error)


def unexpected(request: Request, error: Exception) -> JSONResponse:
    """The answer for what nobody foresaw: the log gets the traceback, the caller the request's id."""
    request_id = getattr(request.state, "request_id", "?")
    facts = {"request_id": request_id}
    _log.error("request %s: %s", request_id, type(error).__name__, exc_info=error, extra={"facts": facts})
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
