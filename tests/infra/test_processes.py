"""The processes of the compose file, run on this machine with its own command lines, variables and health checks."""

import os
import shutil
import subprocess
import sys
import time
from typing import Any

import httpx
import psutil
import pytest
import yaml
from machines import BIN, INFRA, PATIENCE, Machine, Read, machine, start_postgres, start_s3

from acclimate import keys
from acclimate_competitions import records

__all__ = ["machine"]


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
    assert found["in_shards"]["same_bytes_twice"] is True
    assert found["in_shards"]["largest_difference_of_a_loss"] < 1e-4


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
