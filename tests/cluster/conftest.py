"""Real Ray clusters, each held by a process of its own, so that this one never imports ray and each has its own authentication."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOKEN = "0123456789abcdef" * 4
OWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Seconds: by itself Ray gives a node thirty to come up, which a machine with much else to do may not keep.
    "RAY_raylet_start_wait_time_s": "150",
}

HOLDER = '''
import json, os, signal, subprocess, sys, time
from ray.cluster_utils import Cluster

SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}

def persistent(make):
    # On a busy machine a node may not come up at the first try.
    for turn in range(4):
        try:
            return make()
        except Exception:
            if turn == 3:
                raise

cluster = persistent(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL}))
nodes, small = [], []

def metadata(**changes):
    # What a cluster says of itself lies in its head's store, where it was written at the start.
    from ray._raylet import GcsClient
    client = GcsClient(address=cluster.address)
    known = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster"))
    client.internal_kv_put(b"CLUSTER_METADATA", json.dumps({**known, **changes}).encode(), True, b"cluster")
    return known

def behead():
    for process in cluster.head_node.all_processes["gcs_server"]:
        process.process.kill()
        process.process.wait()

def drain(number):
    # As a cloud does that takes a machine away: in five minutes, and whoever runs there should be gone by then.
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2
    until = int(time.time() * 1000) + 300_000
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    return GcsClient(address=cluster.address).drain_node(nodes[number].node_id, reason, "going", until)[0]

def add_small(path, size, options):
    # A node with a disk of its own at that path: mounted where only its processes see it.
    mount = f'mount -t tmpfs -o size={size} none "{path}" && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", sys.executable, "-P", "-c", NODE]
    given = json.dumps({"gcs_address": cluster.address, "object_store_memory": 80 << 20, **options})
    small.append(subprocess.Popen([*command, given], start_new_session=True))

NODE = """
import json, sys, time
from ray._private.node import Node
from ray._private.parameter import RayParams
plain = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True, "node_manager_port": 0}
params = RayParams(**plain, min_worker_port=0, max_worker_port=0, dashboard_agent_listen_port=None, **json.loads(sys.argv[1]))
node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
time.sleep(100_000)
"""

def act(kind, value):
    if kind == "add":
        nodes.append(persistent(lambda: cluster.add_node(**SMALL, **value)))
    elif kind == "remove":
        cluster.remove_node(nodes[value], allow_graceful=False)
    elif kind == "metadata":
        return metadata(**value)
    elif kind == "behead":
        behead()
    elif kind == "drain":
        return drain(value)
    elif kind == "add small":
        add_small(*value)

print(json.dumps(cluster.address), flush=True)
for line in sys.stdin:
    print(json.dumps(act(*json.loads(line))), flush=True)
for process in small:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
if cluster.head_node.remaining_processes_alive():
    cluster.shutdown()
else:
    for node in [*nodes, cluster.head_node]:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
'''


class RayCluster:
    """A head without CPUs, and the nodes that are added to it."""

    def __init__(self, environment: dict[str, str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        # To a file, for whoever looks for why it ended.
        self._said = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", HOLDER],
            env={**kept, **OWN, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd="/",
        )
        try:
            self.address: str = self._answer()
        except BaseException:
            self.close()
            raise

    def add(self, **node: Any) -> None:
        """Add a node; arguments as of ray.cluster_utils.Cluster.add_node."""
        self._ask("add", node)

    def remove(self, number: int) -> None:
        """Kill the node that was added as this one, counted from 0."""
        self._ask("remove", number)

    def drain(self, number: int) -> bool:
        """Give notice that this node will go; whether it was taken."""
        return bool(self._ask("drain", number))

    def add_small(self, folder: Path, size: str, **node: Any) -> None:
        """Add a node for which a disk of this size lies at a folder; it comes by and by."""
        self._ask("add small", [str(folder), size, node])

    def metadata(self, **changes: str) -> dict[str, str]:
        """Change what the cluster says of its versions; what it said before."""
        return self._ask("metadata", changes)

    def workers(self) -> list[int]:
        """The processes of its nodes in which an attempt is looked after."""
        return [pid for pid in _descendants(self._process.pid) if _words(pid).startswith("ray::Attendant")]

    def behead(self) -> None:
        """Kill the head's server."""
        self._ask("behead", None)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(240)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._said.close()

    def _ask(self, kind: str, value: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, value]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            raise AssertionError(f"the process that holds the cluster ended: {self._said.read()[-3000:]}")
        return json.loads(line)


def _descendants(root: int) -> list[int]:
    found, left = list[int](), [root]
    while left:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{left.pop()}/task").glob("*/children"):
                begun = [int(word) for word in path.read_text().split()]
                left += begun
                found += begun
    return found


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


@pytest.fixture(scope="session")
def ray_clusters() -> Iterator[Callable[..., RayCluster]]:
    """Makes clusters that ask for TOKEN, or for none with open_=True; ended after the tests."""
    made: list[RayCluster] = []

    def make(*, open_: bool = False) -> RayCluster:
        mode = {"RAY_AUTH_MODE": "disabled"} if open_ else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        made.append(RayCluster(mode))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of an operator who has the token."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
