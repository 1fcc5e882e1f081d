"""The dispatcher's health and metrics over HTTP, where a port is set for them: /healthz, /readyz, /metrics.

Whoever leads and whoever stands by are both ready. Aggregates only, and no round's: but as they count failed attempts, the port is for the operator's
own network (the setting `host` says where it listens).
"""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sqlalchemy import func, select

from acclimate.schedule import UNMET
from acclimate.stages import STATES
from acclimate.store import Store, stages
from acclimate_competitions.errors import CODES, Refusal

PATIENCE = 60.0
"""Seconds without a runner after which a leading dispatcher is not ready."""
STARTING = "the runner is being started"
_TIMEOUT = 10.0


@dataclass
class Vitals:
    """What a dispatcher notes of itself; written by its own thread, read by others.

    Attributes:
        leading: whether it leads.
        lease_left: seconds that its lease holds without being renewed.
        running: attempts under way.
        slots, machines: of the pool.
        started: kind -> attempts started. failed: code -> attempts that failed. transitions: record's type -> how many were made.
        step_seconds: how long the last step took.
        stepped: when the last step began, by the monotonic clock; patience: seconds after which it hangs.
        trouble: why the last step did not reach its end, as code and sentence; empty where it did.
        no_runner: since when there is no runner or none with machines, by the monotonic clock, and why; None where there is one.
    """

    leading: bool = False
    lease_left: Callable[[], float] = lambda: 0.0
    running: int = 0
    slots: int = 0
    machines: int = 0
    started: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    transitions: Counter[str] = field(default_factory=Counter)
    step_seconds: float = 0.0
    stepped: float = field(default_factory=time.monotonic)
    patience: float = 900.0
    trouble: tuple[str, str] = ("", "")
    no_runner: tuple[float, str] | None = None

    @property
    def hung(self) -> bool:
        """Whether its step hangs; then it leads no more, and only another start helps."""
        return time.monotonic() - self.stepped > self.patience

    def unready(self) -> list[str]:
        """Why it is not ready, in words."""
        found = []
        if self.trouble[0] in ("database_unreachable", "blobs_unreachable"):
            # Its sentence names hosts, buckets and settings; the log has it.
            found.append(f"{self.trouble[0]}: {CODES[self.trouble[0]].meaning.rstrip('.')}")
        if self.leading and self.lease_left() <= 0:
            found.append("lease_lost: it leads no more, and has not noticed yet or can't stop")
        if self.no_runner is not None and time.monotonic() - self.no_runner[0] > PATIENCE:
            found.append(
                f"nothing to run on for {time.monotonic() - self.no_runner[0]:.0f} s: {_plainly(self.no_runner[1])}"
            )
        if self.hung:
            found.append(f"a step has hung for more than {self.patience:.0f} s")
        return found


def _plainly(problem: str) -> str:
    """A problem of the pool without what Ray or a system said of it, which names hosts and files; the log and the round's organizers have that."""
    told = problem == STARTING or problem.startswith(UNMET)
    return problem if told else "the pool can't be reached, or its runner does not start; the dispatcher's log says why"


class HealthServer:
    """Serves a dispatcher's vitals in a thread.

    Args:
        vitals: of the dispatcher.
        store: for counting stages; only read.
        address: host and port.

    Raises:
        Refusal: config_invalid, where nothing can listen there.
    """

    def __init__(self, vitals: Vitals, store: Store, address: tuple[str, int]) -> None:
        # Only where a port is set: the client's and the runners' machines lack it.
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(vitals, store))
        handler = _handler(vitals, lambda: generate_latest(registry))
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        kind = type("Health", (ThreadingHTTPServer,), {"daemon_threads": True, "address_family": family})
        try:
            self._server = kind(address, handler)
        except OSError as error:
            raise Refusal(
                "config_invalid",
                f"the dispatcher's metrics can't be served on {address[0]}:{address[1]}: {error.strerror or error}",
                hint="set ACCLIMATE_DISPATCH_PORT to a port that is free, or to 0 for none",
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(vitals: Vitals, metrics: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT
        server_version, sys_version = "acclimate", ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, metrics(), "text/plain; version=0.0.4; charset=utf-8")
            elif path == "/healthz":
                self._document(503 if vitals.hung else 200, {"alive": not vitals.hung})
            elif path == "/readyz":
                reasons = vitals.unready()
                role = "leading" if vitals.leading else "standby"
                self._document(503 if reasons else 200, {"ready": not reasons, "role": role, "reasons": reasons})
            else:
                self._document(404, {"code": "not_found"})

        def log_message(self, *_: Any, **__: Any) -> None:
            pass

        def _document(self, status: int, document: dict[str, Any]) -> None:
            self._answer(status, json.dumps(document).encode() + b"\n", "application/json")

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


class _Collected:
    """The metrics, made when they are asked for."""

    def __init__(self, vitals: Vitals, store: Store) -> None:
        self._vitals, self._store = vitals, store

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        vitals = self._vitals
        for name, meaning, value in (
            ("leader", "1 where this dispatcher leads, 0 where it stands by", float(vitals.leading)),
            ("lease_seconds_left", "seconds that its lease holds without being renewed", vitals.lease_left()),
            ("running_attempts", "attempts under way", vitals.running),
            ("slots", "attempts that the runner takes at once; 0 without a runner", vitals.slots),
            ("machines", "machines of the pool", vitals.machines),
            ("step_seconds", "how long the last step took", vitals.step_seconds),
            ("step_age_seconds", "time since the last step began", time.monotonic() - vitals.stepped),
        ):
            yield GaugeMetricFamily(f"acclimate_dispatcher_{name}", meaning, value=value)
        for name, meaning, label, counts in (
            ("acclimate_attempts_started", "attempts started", "kind", vitals.started),
            ("acclimate_attempts_failed", "attempts that failed", "code", vitals.failed),
            ("acclimate_transitions", "transitions made", "record", vitals.transitions),
        ):
            counter = CounterMetricFamily(name, f"{meaning}, by this process", labels=[label])
            for key, count in sorted(counts.copy().items()):
                counter.add_metric([key], count)
            yield counter
        states = GaugeMetricFamily("acclimate_stages", "stages of all rounds", labels=["state"])
        for state, count in self._stages().items():
            states.add_metric([state], count)
        yield states

    def _stages(self) -> dict[str, int]:
        """State -> how many stages; empty where the database does not answer."""
        try:
            with self._store.snapshot() as tx:
                found = tx.execute(select(stages.c.state, func.count()).group_by(stages.c.state)).all()
        except Refusal:
            return {}
        return dict.fromkeys(STATES, 0) | {row[0]: int(row[1]) for row in found}
