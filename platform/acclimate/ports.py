"""Who has a port of this machine."""

import errno
import http.client
import json
import socket

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def is_taken(host: str, port: int) -> bool:
    """Whether another program listens there, so that nobody else can.

    Raises:
        OSError: where the address can't be used for another reason.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False


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


def _ask(host: str, port: int, path: str, *, timeout: float) -> bytes:
    connection = http.client.HTTPConnection(_EVERYWHERE.get(host, host), port, timeout=timeout)
    try:
        connection.request("GET", path)
        return connection.getresponse().read(65536)
    except (OSError, http.client.HTTPException, ValueError):
        return b""
    finally:
        connection.close()
