"""Running the API: one process a data folder, one line with its address, a graceful end."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

# Several threads would import it at once.
import pyarrow.compute  # noqa: F401
import uvicorn

from acclimate import config, console, ports
from acclimate.api.app import begin, create_app
from acclimate.api.state import Services
from acclimate.config import Settings

FINISH_SECONDS = 10
"""How long requests that are under way may take once the server has stopped accepting."""
_HURRY_SECONDS = 2
_OPTION = "--port or ACCLIMATE_PORT"
_log = logging.getLogger("acclimate.api")


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; requests that are being answered are finished, unless a second signal comes.

    Raises:
        Refusal: data_version, busy where another API has the data folder, config_invalid where the port is taken, …
    """
    listener = listen(settings.host, settings.port)
    with listener:
        config.claim(settings)
        with config.lock(settings, "api"):
            console.configure(settings, part="api")
            for doubt in config.doubts(settings):
                console.say("setting", level="warning", name=doubt.name, reason=doubt.sentence, hint=doubt.hint)
            app = create_app(settings)
            services: Services = app.state.services
            begin(services)
            _accept(listener, settings)
            host, port = listener.getsockname()[:2]
            sys.stdout.write(f"Acclimate API on http://{ports.name(host, port)} (data: {settings.data})\n")
            sys.stdout.flush()
            _log.info("started", extra={"facts": {"host": host, "port": port, "code": services.identity.code}})
            server = uvicorn.Server(configure(app))
            server.handle_exit = Ending(server, services)
            server.run(sockets=[listener])
            _log.info("stopped")


def configure(app: object) -> uvicorn.Config:
    """Uvicorn's settings: quiet, no header that names it, ten seconds for what is under way at the end.

    The parser is h11, whatever else is installed: where a request's body ends must not depend on the machine (tests/journeys/test_framing.py).
    """
    return uvicorn.Config(
        app,
        http="h11",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=FINISH_SECONDS,
        timeout_keep_alive=30,
        lifespan="on",
    )


class Ending:
    """Takes the signals that ask a server to end, in the place of uvicorn's own way.

    1. At the first signal /readyz turns 503, while everything is still answered for the seconds of the setting `drain`.
    2. Then nothing is accepted any more, and requests under way have ten seconds.
    3. A second signal, or a request that doesn't end, ends the process at once: what was not committed didn't happen.

    The signal is not raised again at the end, as uvicorn would: a process that was asked to end and did has status 0.
    """

    def __init__(self, server: uvicorn.Server, services: Services) -> None:
        self._server, self._services = server, services

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        stopping, drain = self._services.health.stopping, self._services.settings.drain
        if not stopping.is_set():
            stopping.set()
            _later(drain, self._close)
            _later(drain + FINISH_SECONDS + _HURRY_SECONDS, _leave)
            return
        self._server.should_exit = self._server.force_exit = True
        _later(_HURRY_SECONDS, _leave)

    def _close(self) -> None:
        self._server.should_exit = True


def _later(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


def _leave() -> None:
    # A thread of a request that doesn't end would keep the interpreter from ending.
    _log.warning("ended with requests under way")
    os._exit(128 + signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; it accepts nothing yet.

    Raises:
        Refusal: config_invalid, where host or port can't be used.
    """
    try:
        return ports.bound(host, port)
    except OSError as error:
        raise ports.unusable(error, host, port, option=_OPTION) from error


def _accept(listener: socket.socket, settings: Settings) -> None:
    # Two sockets may be bound to a port as long as neither listens; the second to listen is refused only here.
    try:
        listener.listen(2048)
    except OSError as error:
        raise ports.unusable(error, settings.host, settings.port, option=_OPTION) from error
