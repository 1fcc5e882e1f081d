"""Ports of this machine: which are free, who has one, and under which name a server is reached here."""

import errno
import http.client
import json
import socket
import time

from acclimate_competitions.errors import Refusal

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Addresses to listen on that stand for all of a machine, and how the machine itself reaches what listens there."""
_LOOK = 0.05


def name(host: str, port: int) -> str:
    """An address as it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def here(host: str) -> str:
    """The host by which this machine reaches what listens on `host`."""
    return EVERYWHERE.get(host, host)


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to the address; it accepts nothing yet.

    Raises:
        OSError: where host or port can't be used.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def is_taken(host: str, port: int) -> bool:
    """Whether another program listens there, so that nobody else can.

    Raises:
        OSError: where the address can't be used for another reason.
    """
    try:
        _probe(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return True
        raise
    return False


def free(host: str, port: int, *, option: str, patience: float = 0.0) -> int:
    """The port, if a server could listen there now; for 0 one that is free.

    Args:
        host: the address to listen on.
        port: the port.
        option: what names it, for the hint.
        patience: seconds to wait for a server that is ending.

    Raises:
        Refusal: config_invalid, where it is taken or the address can't be used.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return _probe(host, port)
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(_LOOK)
                continue
            raise unusable(error, host, port, option=option) from error


def unusable(error: OSError, host: str, port: int, *, option: str) -> Refusal:
    """The refusal of an address that can't be used; it says who has it.

    Args:
        error: what the system said.
        host: the address to listen on.
        port: the port.
        option: what names another, for the hint.
    """
    hint = f"choose another with {option}"
    if error.errno == errno.EADDRINUSE:
        hint = f"{who_answers(host, port) or 'another server'} has it; stop that one, or {hint}"
    return Refusal("config_invalid", f"can't listen on {name(host, port)}: {error.strerror or error}", hint=hint)


def who_answers(host: str, port: int, *, timeout: float = 1.0) -> str:
    """Which server of ours answers at an address, in words; empty where none does.

    Args:
        host: where it listens; addresses that stand for all are asked on this machine.
        port: likewise.
        timeout: seconds to wait for each answer.
    """
    found = _ask(host, port, "/v1/server", timeout=timeout)
    try:
        server = json.loads(found)
        return f"an Acclimate API (version {server['version']}, log {server['origin']})"
    except (ValueError, LookupError, TypeError):
        pass
    return "an MLflow server" if found and _ask(host, port, "/health", timeout=timeout).strip() == b"OK" else ""


def _probe(host: str, port: int) -> int:
    with bound(host, port) as probe:
        # Two sockets may be bound to a port as long as neither listens.
        probe.listen(1)
        return int(probe.getsockname()[1])


def _ask(host: str, port: int, path: str, *, timeout: float) -> bytes:
    connection = http.client.HTTPConnection(here(host), port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().read(65536)
    except (OSError, http.client.HTTPException, ValueError):
        return b""
    finally:
        connection.close()
