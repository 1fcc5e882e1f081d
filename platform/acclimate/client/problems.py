"""A refusal as a server sends it: a problem document (RFC 9457), or no more than a status."""

import contextlib
import json
from typing import Any

import httpx

from acclimate_competitions.errors import CODES, Refusal


def refusal_of(response: httpx.Response) -> Refusal:
    """The refusal that a problem document (RFC 9457) carries; where there is none, one made from the status alone."""
    problem: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        problem = json.loads(response.content)
    if not isinstance(problem, dict):
        problem = {}
    status = response.status_code
    code = problem.get("code")
    sentence = problem.get("detail") or problem.get("title")
    if code not in CODES or not sentence:
        where = f"{response.request.method} {response.request.url.path}"
        request = f" (request {problem['request_id']})" if "request_id" in problem else ""
        by_status = {
            401: "token_invalid",
            403: "role_missing",
            404: "not_found",
            409: "conflict",
            422: "request_invalid",
        }
        code = code if code in CODES else by_status.get(status, "server_unreachable")
        sentence = f"{where} was answered with {status}: {sentence or response.reason_phrase}{request}"
    elif code == "internal_error":
        sentence = f"{sentence} (request {problem.get('request_id', 'unknown')})"
    problems = problem.get("problems") or ()
    return Refusal(code, str(sentence), hint=str(problem.get("hint") or ""), problems=[str(line) for line in problems])
