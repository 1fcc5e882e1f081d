"""Refusals of a connection: those that a server sends, a problem document (RFC 9457) or no more than a status; and those of what it sends."""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import httpx

from acclimate_competitions import reading
from acclimate_competitions.errors import CODES, Refusal

_SLOWEST_START, _SLOWEST = 60.0, 1024.0
"""Seconds that any answer may take, and bytes a second that a longer one has at least."""
_ROOM = 1 << 28
"""Bytes that a download leaves free on the disk, or a tenth of what was free before it, where that is less."""


def refusal_of(response: httpx.Response, *, url: str, renewal: str = "") -> Refusal:
    """The refusal that a problem document (RFC 9457) carries; where there is none, one made from the status alone.

    Args:
        response: the server's.
        url: the server's address, for the commands in its hints, which say `--server URL`.
        renewal: what to do where the account's token is none of the server's, which the server can't say as well.
    """
    problem: Any = None
    with contextlib.suppress(ValueError):
        problem = reading.parse_json(response.content)
    if not isinstance(problem, dict):
        problem = {}
    status = response.status_code
    if response.is_redirect:
        return _elsewhere(response)
    code = str(problem.get("code"))
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
    problems = problem.get("problems")
    if not isinstance(problems, list):
        problems = ()
    hint = str(problem.get("hint") or "").replace("--server URL", f"--server {url}")
    if code == "token_invalid" and renewal:
        hint = renewal
    return Refusal(code, str(sentence), hint=hint, problems=[str(line) for line in problems])


def unreachable(url: str, error: Exception) -> Refusal:
    """Of a server that can't be reached, or breaks off."""
    what = str(error) or type(error).__name__
    return Refusal(
        "server_unreachable",
        f"{url} does not answer: {what}",
        hint="check the address, and that the server runs; a new address is taken by `acclimate register --renew --server URL`",
    )


def _elsewhere(response: httpx.Response) -> Refusal:
    """Of an address that leads to another one: no token follows there unasked."""
    asked = response.request.url
    try:
        led = asked.join(response.headers.get("Location", ""))
        led = led.copy_with(path=led.path.removesuffix(asked.path) or "/", query=None, fragment=None, userinfo=b"")
    except (httpx.InvalidURL, ValueError):
        led = asked
    return Refusal(
        "server_unreachable",
        f"{asked.copy_with(path='/', query=None)} leads to {str(led)[:200]}",
        hint="if that is the server's new address: `acclimate register --renew --server URL` with your name and key folder takes it",
    )


def odd_answer(url: str) -> Refusal:
    """Of a server that answers with something else than it is asked for."""
    return Refusal("server_unreachable", f"{url} answers, but not as an Acclimate server", hint="check the address")


def fitting(folder: Path) -> int:
    """Bytes that a download may have: a server that sends without end fills no disk."""
    free = shutil.disk_usage(folder).free
    return free - min(_ROOM, free // 10)


def no_room(to: Path) -> Refusal:
    """Of a download that does not fit."""
    hint = "free some space and repeat the command; nothing of it was kept"
    return Refusal("no_space", f"no space to write {to}", hint=hint)


def require_pace(url: str, begun: float, taken: int) -> None:
    """Refuse a server that keeps somebody waiting by a byte now and then.

    Args:
        url: the server's.
        begun: when its answer began, by time.monotonic.
        taken: bytes of it that came since.

    Raises:
        Refusal: server_unreachable.
    """
    allowed = _SLOWEST_START + taken / _SLOWEST
    if time.monotonic() - begun > allowed:
        raise Refusal(
            "server_unreachable",
            f"{url} gave {taken} bytes of an answer in {allowed:.0f} s",
            hint="try again with a better connection; if it stays so, ask the server's operator",
        )
