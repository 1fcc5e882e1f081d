"""Runs jobs on Ray; the only module that imports ray, and only once a runner is made.

Ray is a disposable executor here: it places a detached, named actor per attempt, and nothing of it is trusted to remember. Its own
retries are off (max_restarts 0, max_task_retries 0). The actor runs the same attempt as local.py, so the bytes are the same. A
dispatcher that restarts finds a running attempt by its name; one whose actor is gone is started again elsewhere.

A cluster's machines need this package in the same version, and the blobs under the same address (a shared folder or S3). This
process's machine must be a node of the cluster, which may offer no CPUs: `ray start --address=HEAD:6379 --num-cpus=0`.

With a cluster's address the calls to Ray are made in a process of their own (gateway.py): when a cluster's head is gone, many of
Ray's calls never return, and after a minute Ray ends the process that made them.
"""

import contextlib
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from acclimate_competitions.errors import Refusal
from acclimate_runners import placement
from acclimate_runners.actor_handles import ActorHandle, Keeper
from acclimate_runners.allotment import allotted
from acclimate_runners.attendant import Attendant, Post
from acclimate_runners.code import code_digest
from acclimate_runners.fitness import SetAside
from acclimate_runners.gateway import Gateway
from acclimate_runners.jobs import Job
from acclimate_runners.joining import CONNECTS, TOKEN, reachable, settle_environment
from acclimate_runners.runner import Absent, BlobAccess, Demand, Handle, Machine, Status
from acclimate_runners.watch import Patience

NAMESPACE = "acclimate"
_ONE_CPU = Demand()
_PATIENCE = Patience()
_OBJECT_STORE = 80 << 20
"""Bytes of Ray's object store; files go through blobs, so this is close to the least that Ray takes."""
_NODE = "ray.io/node-id"
"""The label that Ray gives each node."""
_TOLD_LABELS = frozenset(
    f"ray.io/{name}" for name in ("accelerator-type", "availability-region", "availability-zone", "market-type")
)


class RayRunner:
    """A runner of a Ray cluster.

    Make it in a thread that lives as long as the process: a local Ray dies with the thread that started it.

    Args:
        workdir: folder for the attempts, on each machine; made where it is missing.
        address: "local" for a Ray of this process's own, which ends with it; else a cluster's address, HOST:PORT.
        slots: how many jobs at once; None for one a CPU, as machines join and go.
        resources: custom resources that each attempt needs, such as {"acclimate": 1}, where not every node may take one.
        namespace: of the actors' names; installations that share a cluster need different ones.
        patience: how long it and its actors wait.

    Raises:
        ImportError: ray is not installed.
        Refusal: config_invalid; runner_failed where the cluster isn't there, is of another version, refuses the token or asks for none.
    """

    def __init__(
        self,
        workdir: Path,
        address: str = "local",
        slots: int | None = None,
        *,
        resources: dict[str, float] | None = None,
        namespace: str = NAMESPACE,
        patience: Patience = _PATIENCE,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ImportError("ray is not installed")
        self._slots = slots
        self._last: tuple[Machine, ...] = ()
        # A path that only this machine could resolve is of no use to the others.
        workdir = workdir.resolve() if address == "local" else workdir.absolute()
        self._ray: Driver | Gateway
        if address == "local":
            self._ray = Driver(
                workdir, address, slots=slots, resources=resources, namespace=namespace, patience=patience
            )
        else:
            reachable(address)
            settings = {"resources": resources or {}, "namespace": namespace, "patience": patience}
            self._ray = Gateway(workdir, address, settings)
        self.machines()

    @property
    def slots(self) -> int:
        """How many jobs at once; 0 while there is no machine."""
        if not self._last:
            return 0
        return self._slots or max(1, int(sum(machine.cpus for machine in self._last)))

    def machines(self) -> tuple[Machine, ...]:
        """The cluster's machines that may take an attempt.

        Raises:
            ConnectionError: the cluster is lost; make another runner.
        """
        self._last = self._ray.machines()
        return self._last

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand = _ONE_CPU) -> Handle:
        """Start an attempt, or adopt the actor of this name; returns at once, though Ray may place it later.

        Raises:
            ConnectionError: the cluster is lost.
        """
        return self._ray.start(name, job, blobs, demand=demand)

    def find(self, name: str, job: Job, blobs: BlobAccess) -> Handle:
        """Take up the actor of this name, if there is one; else the handle says not_found.

        Raises:
            ConnectionError: the cluster is lost.
        """
        return self._ray.find(name)

    def aside(self) -> dict[str, str]:
        """The machines that are there and take no attempt for now: name -> why."""
        return self._ray.aside()

    def keep_only(self, names: frozenset[str]) -> list[str]:
        """End the attempts of this namespace that have none of these names; returns those that were found and ended since the last call."""
        return self._ray.keep_only(names)

    def close(self, *, keep: bool = False) -> None:
        """Leave the cluster; what still runs is killed, or with `keep` goes on and is found by its name. A local one ends."""
        self._ray.close(keep=keep)


class Driver:
    """This process's connection to Ray; arguments as of RayRunner."""

    def __init__(
        self,
        workdir: Path,
        address: str,
        *,
        slots: int | None = None,
        resources: dict[str, float] | None = None,
        namespace: str = NAMESPACE,
        patience: Patience = _PATIENCE,
    ) -> None:
        settle_environment(local=address == "local")
        with _quiet():
            import ray

            # Only after the import, which sets a level of its own.
            logging.getLogger("ray").setLevel(logging.ERROR)
            cpus = {"num_cpus": slots or allotted().cpus} if address == "local" else {}
            own = {"object_store_memory": _OBJECT_STORE, "include_dashboard": False} if address == "local" else {}
            before = _children()
            try:
                ray.init(
                    address=address,
                    namespace=namespace,
                    log_to_driver=False,
                    configure_logging=False,
                    logging_level=logging.ERROR,
                    **cpus,
                    **own,
                )
            except BaseException as error:
                _end_remains(before)
                if address == "local" and isinstance(error, Exception):
                    said = " ".join(str(error).split())[:200]
                    hint = (
                        "is the machine busy? the dispatcher tries again by itself; other commands can be given again"
                    )
                    raise Refusal("runner_failed", f"Ray did not start here: {said}", hint=hint) from error
                raise
        self._ray: Any = ray
        self._local = address == "local"
        self._resources = dict(resources or {})
        self._post = Post(workdir, code_digest(), here=here, reached=reached, patience=patience)
        self._handles: dict[str, ActorHandle] = {}
        self._aside = SetAside()
        # What Ray calls a machine -> its host and its name; kept, as those that are gone are still spoken of.
        self._known: dict[str, tuple[str, str]] = {}
        self._without: dict[str, str] = {}
        self._class = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 4})(Attendant)

    def machines(self) -> tuple[Machine, ...]:
        """The nodes that may take an attempt: not one without CPUs, nor one set aside as unfit, nor one that is to be drained.

        Raises:
            ConnectionError: a Ray of this process's own has lost its one node, for which no other will come.
        """
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        if self._local and not alive:
            raise ConnectionError("the processes of the Ray on this machine ended")
        nodes = [node for node in alive if self._may_take(node["Resources"])]
        new = {n["NodeID"]: n["NodeManagerHostname"] for n in nodes if n["NodeID"] not in self._known}
        hosts = [host for host, _ in self._known.values()] + list(new.values())
        # Nodes of one machine are told apart, and keep their names.
        self._known |= {n: (host, host if hosts.count(host) == 1 else f"{host}/{n[:6]}") for n, host in new.items()}
        without = {node: self._aside.why(node) for node in self._aside.now()}
        without |= dict.fromkeys(self._drain(), "it is to be drained")
        self._without = {self._named(n["NodeID"]): without[n["NodeID"]] for n in nodes if n["NodeID"] in without}
        return tuple(
            Machine(
                name=self._named(node["NodeID"]),
                cpus=node["Resources"]["CPU"],
                gpus=node["Resources"].get("GPU", 0.0),
                memory=int(node["Resources"].get("memory", 0)),
                labels={
                    name: value
                    for name, value in (node.get("Labels") or {}).items()
                    if not name.startswith("ray.io/") or (name in _TOLD_LABELS and value)
                },
            )
            for node in nodes
            if node["NodeID"] not in without
        )

    def aside(self) -> dict[str, str]:
        """As RayRunner.aside, of when machines() was last asked."""
        return self._without

    def keep_only(self, names: frozenset[str]) -> list[str]:
        """As RayRunner.keep_only."""
        ended = []
        for name in self._ray.util.list_named_actors():
            if name.startswith("a/") and name[2:] not in names:
                # One that is gone by now has ended.
                with contextlib.suppress(ValueError):
                    self._ray.kill(self._ray.get_actor(name), no_restart=True)
                    ended.append(name[2:])
        return ended

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand = _ONE_CPU) -> ActorHandle:
        """As RayRunner.start."""
        self._supersede(name)
        # num_cpus sets no threads: the child's environment does.
        options: dict[str, Any] = {"num_cpus": demand.cpus, "num_gpus": demand.gpus, "resources": self._resources}
        options |= {"memory": demand.memory} if demand.memory else {}
        without = sorted({*self._aside.now(), *self._avoided(demand)})
        labels = dict(demand.labels) | ({_NODE: f"!in({', '.join(without)})"} if without else {})
        options |= {"label_selector": labels} if labels else {}
        options |= {"name": f"a/{name}", "lifetime": "detached", "get_if_exists": True}
        actor = self._class.options(**options).remote(name, job, blobs, self._post, gpus=demand.gpus > 0)
        return self._handle(name, actor, demand)

    def find(self, name: str) -> ActorHandle | Absent:
        """As RayRunner.find."""
        try:
            return self._handle(name, self._ray.get_actor(f"a/{name}"), None)
        except ValueError:
            return Absent()

    def _handle(self, name: str, actor: Any, demand: Demand | None) -> ActorHandle:
        keeper = Keeper(
            self._ray,
            forget=lambda: self._handles.pop(name, None),
            set_aside=self._set_aside,
            named=self._named,
            seek=lambda: self._seek(actor, demand),
            # A batch may take longer than that where it is allowed to; an answer of its actor does not.
            patience=min(self._post.patience.hang, _PATIENCE.hang),
        )
        self._handles[name] = ActorHandle(actor, keeper)
        return self._handles[name]

    def _seek(self, actor: Any, demand: Demand | None) -> tuple[str, bool]:
        """As Keeper.seek; of another driver's actor it isn't known what it takes, nor which machines it should avoid by now."""
        from ray.core.generated.gcs_pb2 import ActorTableData

        told = self._ray._private.state.state._connect_and_get_accessor().get_actor_info(actor._actor_id)
        found = ActorTableData.FromString(told or b"")
        if found.pid:
            # Without a process it only has the name of a machine that was asked.
            return found.address.node_id.hex(), False
        kept_off = set(re.findall(r"[0-9a-f]{40,}", found.label_selector.get(_NODE, "")))
        if not kept_off:
            return "", False
        able = {machine.name for machine in self.machines() if demand is None or placement.fits(demand, machine)}
        avoided = self._avoided(demand) if demand is not None else set()
        return "", any(self._named(node) in able for node in kept_off - avoided)

    def _named(self, node: str) -> str:
        return self._known.get(node, ("", node))[1]

    def _set_aside(self, node: str, status: Status) -> None:
        # A full disk is no accident of one attempt.
        once = {"enough": 1} if status.code == "no_space" else {}
        self._aside.note(node, reason=status.reason, **once)

    def _avoided(self, demand: Demand) -> set[str]:
        """What Ray calls the machines that a demand stays away from; none where no other could take it."""
        if not demand.avoid:
            return set()
        machines = self.machines()
        # Another driver may have called it by its host alone, or may not.
        own = {name for _, name in self._known.values()}
        found = {
            node: name
            for node, (host, name) in self._known.items()
            if demand.avoid & {name, f"{host}/{node[:6]}"} or (host in demand.avoid and host not in own)
        }
        return set(found) if placement.avoided(replace(demand, avoid=frozenset(found.values())), machines) else set()

    def _drain(self) -> set[str]:
        """The nodes that are to go; the attempts on them are told to leave."""
        leaving = set(self._ray._private.state.state.get_draining_nodes())
        for handle in list(self._handles.values()):
            if handle.node in leaving:
                handle.leave(f"the machine {self._named(handle.node)} is to be drained")
        return leaving

    def close(self, *, keep: bool = False) -> None:
        """As RayRunner.close."""
        ray = self._ray
        if not keep:
            with contextlib.suppress(Exception):
                stops = [h.actor.stop.options(concurrency_group="control").remote() for h in self._handles.values()]
                ray.wait(stops, num_returns=len(stops), timeout=self._post.patience.end) if stops else None
            for handle in list(self._handles.values()):
                with contextlib.suppress(Exception):
                    ray.kill(handle.actor, no_restart=True)
        self._handles.clear()
        with _quiet():
            ray.shutdown()

    def _may_take(self, resources: dict[str, float]) -> bool:
        wanted = {"CPU": 0.01, **self._resources}
        return all(resources.get(name, 0.0) >= count for name, count in wanted.items())

    def _supersede(self, name: str) -> None:
        """End what earlier tries of an attempt left: after a lost connection nobody asks for them any more.

        There may be many thousands of tries, of which hardly one is still there: all there are is asked once.
        """
        attempt, _, number = name.rpartition("/")
        if not number.isdecimal() or int(number) < 2:
            return
        for actor in self._ray.util.list_named_actors():
            before, _, earlier = actor.rpartition("/")
            if before == f"a/{attempt}" and earlier.isdecimal() and int(earlier) < int(number):
                with contextlib.suppress(ValueError):
                    self._ray.kill(self._ray.get_actor(actor), no_restart=True)


def here() -> str:
    """What Ray calls this process's machine."""
    from ray import get_runtime_context

    return str(get_runtime_context().get_node_id())


def reached() -> bool:
    """Whether the cluster's head answers this process of Ray."""
    from ray._private.worker import global_worker

    try:
        global_worker.gcs_client.internal_kv_exists(b"acclimate", b"acclimate", timeout=CONNECTS)
    except Exception:
        return False
    return True


def _children() -> set[int]:
    """This process's children; none where the kernel doesn't say."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= set(map(int, path.read_text().split()))
    return found


def _end_remains(before: set[int]) -> None:
    """End what a failed ray.init has started, which Ray leaves running until this process ends.

    A machine under load takes longer to start a Ray than Ray waits; each further try would find it with less to give.
    """
    for pid in _children() - before:
        with contextlib.suppress(OSError):
            if "/ray/" in Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace"):
                os.kill(pid, signal.SIGKILL)


def prepare() -> None:
    """What a process does before it joins a cluster: settle the environment, and import ray."""
    settle_environment(local=False)
    # Ray's own patience is longer than that of those who wait for this process.
    os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", "12")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")
    with _quiet():
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        assert ray.__version__


def check(address: str) -> None:
    """Whether a reachable cluster may be joined, before Ray is asked to, which would say less and wait longer.

    1. The cluster asks for a token, which a call without one shows: a Ray without a token runs code for everyone who reaches its
       ports, and is joined only where the operator said so. And it takes ours.
    2. It is of this version of Ray and of Python.

    Raises:
        Refusal: runner_failed.
    """
    # 1
    open_allowed = os.environ["RAY_AUTH_MODE"].lower() == "disabled"
    asks = _cluster_of(address, mode="disabled") is None
    if not asks and not open_allowed:
        raise Refusal(
            "runner_failed",
            f"the Ray cluster at {address} asks for no token: it runs code for everyone who reaches its ports",
            hint="start it with RAY_AUTH_MODE=token; or set RAY_AUTH_MODE=disabled here, if nobody else can reach it",
        )
    if asks and open_allowed:
        raise Refusal(
            "runner_failed", f"the Ray cluster at {address} asks for a token", hint=f"RAY_AUTH_MODE=token, and {TOKEN}"
        )
    found = _cluster_of(address, mode="disabled" if open_allowed else "token")
    if found is None:
        raise Refusal("runner_failed", f"the Ray cluster at {address} does not take the token", hint=TOKEN)
    # 2
    here = versions()
    # A patch of Python may differ where the operator tells Ray so.
    parts = 2 if os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL") == "minor" else 3
    if found[0] != here[0] or found[1].split(".")[:parts] != here[1].split(".")[:parts]:
        raise Refusal(
            "runner_failed",
            f"the Ray cluster at {address} has Ray {found[0]} and Python {found[1]}; here are Ray {here[0]} and Python {here[1]}",
            hint="install the same on both sides, such as the same image",
        )


def not_joined(error: Exception, address: str) -> Refusal:
    """The refusal for what ray.init says of a cluster that check() let pass."""
    said = " ".join(str(error).split())[:300]
    sentence = f"the Ray cluster at {address} can't be joined: {type(error).__name__}: {said}"
    hint = f"this machine must be a node of the cluster, which may offer no CPUs: ray start --address={address} --num-cpus=0"
    return Refusal("runner_failed", sentence, hint=hint)


def versions() -> tuple[str, str]:
    """Ray's and Python's."""
    import ray

    return str(ray.__version__), ".".join(map(str, sys.version_info[:3]))


def _cluster_of(address: str, *, mode: str) -> tuple[str, str] | None:
    """What a cluster says of its versions, asked in a mode of authentication; None where it refuses to talk."""
    import ray

    raylet: Any = importlib.import_module("ray._raylet")
    before = os.environ["RAY_AUTH_MODE"]
    try:
        # Ray remembers the mode that it found first.
        os.environ["RAY_AUTH_MODE"] = mode
        raylet.Config.initialize("")
        told = raylet.GcsClient(address=address).internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=CONNECTS)
    except ray.exceptions.AuthenticationError:
        return None
    finally:
        os.environ["RAY_AUTH_MODE"] = before
        raylet.Config.initialize("")
    known = json.loads(told or b"{}")
    return str(known.get("ray_version", "unknown")), str(known.get("python_version", "unknown"))


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
