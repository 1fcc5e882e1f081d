"""What is known of a Ray cluster before Ray is asked: its address, whether something listens there, and the token to join it with."""

import os
import secrets
import socket
from pathlib import Path

from acclimate_competitions.errors import Refusal

CONNECTS = 5.0
"""Seconds for a connection to a cluster's head."""
_STATUS = "see that `ray status` works on this machine, and that ray_address is the head's HOST:PORT"
TOKEN = "put the cluster's token into RAY_AUTH_TOKEN, or the path of a file that holds it into RAY_AUTH_TOKEN_PATH"


def settle_environment(*, local: bool) -> None:
    """What Ray reads from the environment when it is imported; what the operator set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    token_given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if local and "RAY_AUTH_MODE" not in os.environ and not token_given:
        # A Ray without a token runs code for everyone who reaches its ports.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ.setdefault("RAY_AUTH_MODE", "token")


def reachable(address: str) -> None:
    """Whether there is something to join and a token to join it with; asks nothing of Ray.

    Raises:
        Refusal: config_invalid; runner_failed.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or "/" in address:
        raise Refusal("config_invalid", f"ray_address = {address}: must be local, or HOST:PORT of a Ray cluster's head")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTS).close()
    except (OSError, OverflowError) as error:
        raise Refusal("runner_failed", f"there is no Ray cluster at {address}: {error}", hint=_STATUS) from error
    # Unless the operator allowed none.
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "disabled" and (why := no_token()):
        raise Refusal("runner_failed", f"{why} for the Ray cluster at {address}", hint=TOKEN)


def no_token() -> str:
    """Why there is no token; empty where there is one."""
    if os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return ""
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given) if given else Path.home() / ".ray" / "auth_token"
    try:
        # Ray aborts the process over a file that it can't read.
        return "" if path.read_text("utf-8").strip() else f"the file {path} holds no token"
    except (OSError, UnicodeDecodeError):
        return (
            f"RAY_AUTH_TOKEN_PATH names {path}, which can't be read: there is no token"
            if given
            else "there is no token"
        )
