"""Running the API: one process, one line with its address, a graceful end."""

import logging
import socket
import sys

import uvicorn

from acclimate.api.app import create_app
from acclimate.config import Settings
from acclimate_competitions.errors import Refusal


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; requests that are being answered are finished.

    Raises:
        Refusal: data_version, config_invalid where the port is taken, …
    """
    app = create_app(settings)
    listener = listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    shown = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"Acclimate API on http://{shown}:{port} (data: {settings.data})\n")
    sys.stdout.flush()
    server = uvicorn.Server(configure(app))
    with listener:
        server.run(sockets=[listener])


def configure(app: object) -> uvicorn.Config:
    """Uvicorn's settings: quiet, no header that names it, ten seconds for what is under way at the end."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=30,
        lifespan="on",
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        Refusal: config_invalid, where host or port can't be used.
    """
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise Refusal(
            "config_invalid",
            f"can't listen on {host}:{port}: {error.strerror or error}",
            hint="is another server running? choose another with --port or ACCLIMATE_PORT",
        ) from error
    return listener
