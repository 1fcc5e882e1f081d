"""The parts of an installation on one machine: API, dispatcher and MLflow, started, watched and ended together by `acclimate up`.

The API comes first, as it begins the installation where there is none; dispatcher and MLflow then start at the same time. Every part is
an `acclimate` command like those that an operator runs alone. What lasts is in the database, the blobs and the data folder, so that
starting again goes on where it was.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import httpx

from acclimate import config, locks, ports, supervision, tracking_places
from acclimate.config import Settings
from acclimate_competitions.errors import Refusal

READY_WITHIN = 120.0
"""Seconds for the API to be ready, and then for the dispatcher."""
ENDED_WITHIN = 60.0
"""Seconds for the parts of a supervisor that was killed to end."""
STOP_ORDER = ("dispatch", "api", "mlflow")
_LOOK = 0.1
Say = Callable[[str], None]


@dataclass(frozen=True)
class Addresses:
    """Where the parts are.

    Attributes:
        api: address of the API, as this machine reaches it.
        mlflow: address of MLflow's pages; None where none runs.
        tracking: what an analyst gives as tracking URI.
        log_key: the log's verifier key, which auditors need from elsewhere than the server.
    """

    api: str
    mlflow: str | None
    tracking: str
    log_key: str


class Stopped(Exception):
    """The operator asked for the end before everything was ready."""


class Parts:
    """API, dispatcher and MLflow of one data folder; a context manager that ends them all.

    Args:
        settings: of the installation.
        given: settings that the command line gave, which the parts must hear of.
        mlflow: whether to run MLflow.
        say: told what happens, a line each.
        stop: set once the operator wants the end.
        hurry: set once the operator is not willing to wait for it.

    Attributes:
        killed: at the end, the parts that had to be killed.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        given: Mapping[str, Any],
        mlflow: bool,
        say: Say,
        stop: threading.Event,
        hurry: threading.Event,
    ) -> None:
        self._settings, self._say, self._stop, self._hurry = settings, say, stop, hurry
        # A tracking server elsewhere has its own pages.
        self._with_mlflow = mlflow and not tracking_places.is_server(settings.tracking)
        self._environment = _environment(settings, given)
        self.supervisor = supervision.Supervisor(settings.data / "logs", say=say, heard=self._heard)
        self._began = time.monotonic()
        self._dispatching = threading.Event()
        self._mlflow: str | None = None
        self._mlflow_ready, self._looked = False, 0.0
        self._lock: IO[str] | None = None
        self.killed = list[str]()

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.killed = self.supervisor.stop(order=STOP_ORDER, hurry=self._hurry)
        finally:
            if self._lock is not None:
                self._lock.close()

    def start(self) -> Addresses:
        """Start everything; returns once the API is ready and the dispatcher works.

        Raises:
            Refusal: busy, config_invalid, no_space, server_unreachable; whatever a part refuses with.
            Stopped: the operator asked for the end.
        """
        settings = self._settings
        config.claim(settings)
        self._lock = config.lock(settings, "up")
        held = [settings.data / f"{part}.lock" for part in ("api", "dispatcher", "mlflow")]
        locks.await_free(held, within=ENDED_WITHIN + settings.drain, say=self._say, stop=self._stop)
        port = ports.free(
            settings.host, settings.port, option="--port or ACCLIMATE_PORT; --port 0 takes a free one", patience=1.0
        )
        pages = self._mlflow_port(port) if self._with_mlflow else 0
        url = f"http://{ports.name(ports.here(settings.host), port)}"
        self._start("api", "--host", settings.host, "--port", str(port))
        with httpx.Client(base_url=url, trust_env=False, timeout=2.0) as http:
            self._await("the API", lambda: _is_ready(http), why=lambda: _reasons(http))
            self.supervisor.establish("api")
            self._say(f"API ready ({self._seconds()})")
            self._start("dispatch")
            if self._with_mlflow:
                self._mlflow = f"http://127.0.0.1:{pages}"
                self._start("mlflow", "--port", str(pages))
            self._await("the dispatcher", self._dispatches)
            self.supervisor.establish("dispatch")
            self._say(f"dispatcher ready ({self._seconds()})")
            log_key = str(http.get("/v1/server", timeout=30.0).json()["log"])
        return Addresses(url, self._mlflow, self._mlflow or settings.tracking, log_key)

    def watch(self) -> None:
        """Keep everything running until the operator wants the end.

        Raises:
            Refusal: of MLflow, where it can't start.
        """
        while not self._stop.wait(_LOOK):
            self._step()

    def _start(self, name: str, *arguments: str) -> None:
        data = ("--data", str(self._settings.data))
        grace = supervision.GRACE + (self._settings.drain if name == "api" else 0)
        part = supervision.server(name, *data, *arguments, environment=self._environment, grace=grace)
        self.supervisor.start(part)

    def _step(self) -> None:
        self.supervisor.step()
        now = time.monotonic()
        if self._mlflow is not None and not self._mlflow_ready and now - self._looked > 0.5:
            self._looked = now
            # OSError: httpx reads certificates first, which takes an open file.
            with contextlib.suppress(httpx.HTTPError, OSError):
                self._mlflow_ready = (
                    httpx.get(f"{self._mlflow}/health", trust_env=False, timeout=1.0).status_code == 200
                )
            if self._mlflow_ready:
                self.supervisor.establish("mlflow")
                self._say(f"MLflow ready ({self._seconds()})")

    def _await(self, what: str, is_ready: Callable[[], bool], *, why: Callable[[], str] = lambda: "") -> None:
        deadline = time.monotonic() + READY_WITHIN
        while not is_ready():
            if self._stop.wait(_LOOK):
                raise Stopped
            self._step()
            if time.monotonic() > deadline:
                reasons = why()
                raise Refusal(
                    "server_unreachable",
                    f"{what} is not ready after {READY_WITHIN:.0f} s{': ' if reasons else ''}{reasons}",
                    hint=f"see the logs in {self.supervisor.logs}",
                )

    def _mlflow_port(self, api_port: int) -> int:
        """The port for MLflow: the one asked for; where nobody asked and 5000 is taken, a free one."""
        wanted = self._settings.mlflow_port
        by_default = self._settings.origins["mlflow_port"] == "default"
        try:
            if wanted == api_port:
                raise Refusal(
                    "config_invalid",
                    f"the API has port {wanted}, MLflow can't have it too",
                    hint="choose another with --mlflow-port or ACCLIMATE_MLFLOW_PORT; 0 takes a free one",
                )
            option = "--mlflow-port or ACCLIMATE_MLFLOW_PORT; 0 takes a free one"
            return ports.free("127.0.0.1", wanted, option=option, patience=0.0 if by_default else 1.0)
        except Refusal:
            if not by_default:
                raise
            chosen = ports.free("127.0.0.1", 0, option="--mlflow-port")
            self._say(f"port {wanted} is taken; MLflow takes {chosen} this time (--mlflow-port chooses one)")
            return chosen

    def _dispatches(self) -> bool:
        """Whether the dispatcher works or stands by; where its log is too quiet to say so, whether it has the data folder."""
        quiet = self._settings.log_level not in ("debug", "info")
        return self._dispatching.is_set() or (quiet and locks.holder(self._settings.data / "dispatcher.lock") != "")

    def _heard(self, part: str, event: Mapping[str, Any]) -> None:
        """Tell the operator what matters of a part's events; all of them are in its log."""
        kind = event["event"]
        if part == "dispatch" and kind == "started":
            self._dispatching.set()
        told = _NOTICES.get(kind)
        if told is not None:
            self._say(told.format_map(_Facts(event)))

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:.1f} s"


_NOTICES = {
    "standby": "the dispatcher stands by: {leader} leads, until {until} at least",
    "stepped down": "the dispatcher leads no more: {reason}",
    "runner ready": "runner ready: {slots} jobs at once",
    "runner lost": "the runner is lost: {reason}",
    "no runner": "no runner yet, it is tried again and again: {reason}",
    "transition": "round {made}",
    "blocked": "work is blocked ({kind} of {entrant} in {round}): {reason}",
}


class _Facts(dict[str, Any]):
    """An event's facts; one that it lacks is a question mark."""

    def __missing__(self, key: str) -> str:
        return "?"


def _environment(settings: Settings, given: Mapping[str, Any]) -> dict[str, str]:
    """What the parts get besides this process's environment: passwords must not stand in a command line."""
    environment = {config.PREFIX + name.upper(): str(value) for name, value in given.items() if value is not None}
    if settings.file is not None:
        environment[config.PREFIX + "CONFIG"] = str(settings.file)
    # Each part's lines go to a file of its own, whatever the settings say of one process.
    environment[config.PREFIX + "LOG_FILE"] = ""
    return environment


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def _reasons(http: httpx.Client) -> str:
    """What /readyz says is wrong."""
    try:
        return http.get("/readyz").text[:1000]
    except httpx.HTTPError as error:
        return f"{type(error).__name__}"
