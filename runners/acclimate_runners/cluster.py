"""Runs jobs on Ray; the only module that imports ray, and only once a runner is made.

Ray is a disposable executor here: it places a detached, named actor per attempt, and nothing of it is trusted to remember. Its own
retries are off (max_restarts 0, max_task_retries 0). The actor runs the same attempt as local.py, so the bytes are the same. A
dispatcher that restarts finds a running attempt by its name; one whose actor is gone is started again elsewhere.

The cluster's machines need this package installed in the same version, and the blobs under the same path (a shared file system).
"""

import contextlib
import logging
import os
import secrets
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from acclimate_runners.attempts import Attempt
from acclimate_runners.jobs import Job
from acclimate_runners.nursery import Nursery
from acclimate_runners.runner import BlobAccess, Demand, Machine, Status

NAMESPACE = "acclimate"
_ONE_CPU = Demand()
_PATIENCE = 10.0
_LINGER = 20.0
"""Seconds that a machine's fork-server outlives its last attempt."""
_OBJECT_STORE = 80 << 20
"""Bytes of Ray's object store; files go through blobs, so this is close to the least that Ray takes."""


class Attendant:
    """The actor: one attempt and its child, on the machine that Ray chose."""

    def __init__(self, name: str, job: Job, blobs: BlobAccess, workdir: Path) -> None:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        # An actor lives for one attempt, so the actors of a machine share their imports.
        nursery = Nursery(shared=workdir, linger=_LINGER)
        self._attempt = Attempt(name, job, blobs, work=workdir, nursery=nursery, devices=devices)
        # The attempt's thread lives as long as its child, whatever Ray does with its own threads.
        self._attempt.start()

    def poll(self) -> Status:
        """Where the attempt stands."""
        return self._attempt.poll()

    def stop(self) -> bool:
        """Kill the child; says whether it is gone."""
        self._attempt.cancel()
        return self._attempt.join(_PATIENCE)


class RayRunner:
    """A runner of a Ray cluster.

    Make it in a thread that lives as long as the process: a local Ray dies with the thread that started it.

    Args:
        workdir: folder for the attempts, on each machine; made where it is missing.
        address: "local" for a Ray of this process's own, which ends with it; else a cluster's address.
        slots: how many jobs at once; None for one a CPU.
        resources: custom resources that each attempt needs, such as {"acclimate": 1}, where not every node may take one.
    """

    def __init__(
        self,
        workdir: Path,
        address: str = "local",
        slots: int | None = None,
        *,
        resources: dict[str, float] | None = None,
    ) -> None:
        _settle_environment(local=address == "local")
        with _quiet():
            import ray

            # Only after the import, which sets a level of its own.
            logging.getLogger("ray").setLevel(logging.ERROR)
            cpus = {"num_cpus": slots or os.cpu_count() or 1} if address == "local" else {}
            own = {"object_store_memory": _OBJECT_STORE, "include_dashboard": False} if address == "local" else {}
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                **cpus,
                **own,
            )
        self._ray: Any = ray
        self._local = address == "local"
        self._workdir = workdir.resolve()
        self._resources = dict(resources or {})
        self._actors: dict[str, Any] = {}
        self._class = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 4})(Attendant)
        self.slots = slots or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def machines(self) -> tuple[Machine, ...]:
        """The cluster's machines."""
        found = [node for node in self._ray.nodes() if node["Alive"]]
        return tuple(
            Machine(
                name=node["NodeManagerHostname"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                memory=int(node["Resources"].get("memory", 0)),
                labels=dict(node.get("Labels", {})),
            )
            for node in found
        )

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand = _ONE_CPU) -> "ActorHandle":
        """Start an attempt, or adopt the actor of this name; returns at once, though Ray may place it later."""
        ray = self._ray
        # num_cpus sets no threads: the child's environment does.
        options = {"num_cpus": 1, "resources": self._resources, "name": f"a/{name}", "lifetime": "detached"}
        actor = self._class.options(get_if_exists=True, **options).remote(name, job, blobs, self._workdir)
        self._actors = {n: a for n, a in self._actors.items() if n != name} | {name: actor}
        return ActorHandle(ray, actor, forget=lambda: self._actors.pop(name, None))

    def close(self, *, keep: bool = False) -> None:
        """Kill what still runs here, and leave the cluster; a local one ends."""
        ray = self._ray
        with contextlib.suppress(Exception):
            stops = [a.stop.options(concurrency_group="control").remote() for a in self._actors.values()]
            ray.wait(stops, num_returns=len(stops), timeout=_PATIENCE) if stops else None
        for actor in list(self._actors.values()):
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        self._actors.clear()
        with _quiet():
            ray.shutdown()


class ActorHandle:
    """An attempt in an actor."""

    def __init__(self, ray: Any, actor: Any, *, forget: Any) -> None:
        self._ray, self._actor, self._forget = ray, actor, forget
        self._status = Status("running", what="waiting for a machine")
        self._asked: Any = None
        self._lock = threading.Lock()

    def poll(self) -> Status:
        """The last answer that came; asks for the next one. An actor that is gone is a failed attempt."""
        with self._lock:
            if self._status.state != "running":
                return self._status
            try:
                self._ask()
            except self._ray.exceptions.RayError as error:
                first = str(error).strip().splitlines()[:1]
                reason = f"its Ray actor is gone: {type(error).__name__}: {first[0] if first else ''}"
                self._status = Status("failed", reason=reason, code="runner_failed")
            if self._status.state != "running":
                self._end()
            return self._status

    def cancel(self) -> None:
        """Kill the child, then the actor."""
        with self._lock:
            if self._status.state == "running":
                self._status = Status("failed", reason="cancelled", code="cancelled")
                self._end()

    def _ask(self) -> None:
        if self._asked is None:
            self._asked = self._actor.poll.options(concurrency_group="control").remote()
        ready, _ = self._ray.wait([self._asked], timeout=0)
        if ready:
            asked, self._asked = self._asked, None
            self._status = self._ray.get(asked)

    def _end(self) -> None:
        # Killing the actor kills its process, and the child with it (see isolation.py).
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)
        self._forget()


def _settle_environment(*, local: bool) -> None:
    """What Ray reads from the environment when it is imported; what the operator set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    token_given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if local and "RAY_AUTH_MODE" not in os.environ and not token_given:
        # A Ray without a token runs code for everyone who reaches its ports.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        token_given = True
    os.environ.setdefault("RAY_AUTH_MODE", "token" if token_given else "disabled")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray's warnings off the user's terminal, and its handlers off this process's signals."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in before.items():
                    if handler is not None:
                        signal.signal(number, handler)
