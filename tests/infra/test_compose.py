"""The compose file: valid by the compose specification's model, and with the properties that its comments claim."""

import os
import re
import stat
import subprocess
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from draining import DRAIN, drains

from acclimate import keys

FOLDER = Path(__file__).parents[2] / "infra" / "compose"
ONCE = {"bucket", "migrate"}
RAY_NODES = {"ray-head", "ray-worker"}
BESIDE = "dispatcher-node"
Read = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def document(read: Read) -> dict[str, Any]:
    return read("compose.yaml", ORIGIN="acclimate.example.org/log")


@pytest.fixture(scope="module")
def services(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return document["services"]


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_model_of_the_specification_takes_it_and_knows_every_key(name: str, read: Read) -> None:
    found = read(name, ORIGIN="acclimate.example.org/log")
    whole = compose_spec.ComposeSpecification.model_validate(found)
    assert whole.services
    known = {f.alias or n for n, f in compose_spec.Service.model_fields.items()}
    for service in found["services"].values():
        assert service.keys() <= known, service.keys() - known
    top = {f.alias or n for n, f in compose_spec.ComposeSpecification.model_fields.items()}
    assert {key for key in found if not key.startswith("x-")} <= top


def test_the_second_implementation_takes_it(document: dict[str, Any]) -> None:
    shown = {key: value for key, value in document.items() if not key.startswith("x-")}
    # It takes a tag or a digest; references may have both.
    text = re.sub(r":[\w.-]+@sha256:", "@sha256:", yaml.safe_dump(shown))
    parsed = compose_spec.PyCompose.from_yaml(text)
    parsed.validate()
    assert set(parsed.service_names()) == set(document["services"])


def test_it_does_not_start_without_a_name_for_the_log(read: Read) -> None:
    with pytest.raises(AssertionError, match="ORIGIN: set ORIGIN"):
        read("compose.yaml")


def test_images_are_pinned_or_built_here(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        image = service["image"]
        if "build" in service:
            assert image == f"acclimate-{service['build']['target']}:0.1.0"
            assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        else:
            assert re.fullmatch(r"docker\.io/[a-z]+/[a-z]+:[\w.-]+@sha256:[0-9a-f]{64}", image), name
        assert ":latest" not in image


def test_no_container_has_more_rights_than_it_needs(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["read_only"] is True, name
        assert not {"privileged", "devices", "pid", "ipc", "userns_mode"} & service.keys(), name
        shared = {"bucket": "service:s3", BESIDE: "service:dispatcher"}
        assert service.get("network_mode") == shared.get(name), name
        assert "docker.sock" not in str(service), name
        user = str(service.get("user", "10001:10001" if "build" in service else "root"))
        assert name == "s3" or user.split(":")[0] not in {"root", "0"}, name
        assert "cap_add" not in service or name == "s3", name


def test_each_container_has_limits_and_shows_its_health(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        limits = service["deploy"]["resources"]["limits"]
        assert limits.keys() == {"cpus", "memory", "pids"}, name
        if name in ONCE:
            assert service["restart"] == "no"
        else:
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"][0] == "CMD", name
        for other, how in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if other in ONCE else "service_healthy"
            # The dispatcher is healthy only with its node, which lives in its network.
            assert how["condition"] == ("service_started" if name == BESIDE and other == "dispatcher" else wanted), name


def test_a_worker_that_is_to_go_has_time_for_a_checkpoint(services: dict[str, dict[str, Any]]) -> None:
    worker = services["ray-worker"]
    drain = float(worker["environment"][DRAIN])
    assert drain > drains() and float(worker["stop_grace_period"].removesuffix("s")) >= drain + 15


def reaches(services: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    networks = {name: set(service.get("networks", ())) for name, service in services.items() if name not in ONCE}
    return {(a, b) for a, b in permutations(networks, 2) if networks[a] & networks[b]}


def test_rays_nodes_reach_each_other_and_s3_and_nothing_else(document: dict[str, Any]) -> None:
    services = document["services"]
    near = {a: {b for c, b in reaches(services) if c == a} for a in services}
    for node in RAY_NODES:
        assert near[node] == (RAY_NODES | {"dispatcher", "s3"}) - {node}
        assert services[node]["networks"] == ["compute"]
    assert near["postgres"] == {"api", "dispatcher", "mlflow", "s3"}
    # The only network with a way out is that of what people open in a browser.
    assert {n for n, options in document["networks"].items() if not options.get("internal")} == {"edge"}
    assert {n for n, s in services.items() if "edge" in s.get("networks", ())} == {"api", "mlflow", "grafana"}


def test_published_ports_are_this_machines_own(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert (port.split(":")[0] if isinstance(port, str) else port["host_ip"]) == "127.0.0.1", name
    low, high = services["api"]["ports"][0]["published"].split("-")
    assert int(high) - int(low) + 1 >= int(services["api"]["deploy"]["replicas"]) == 2


def test_each_process_has_its_own_secrets_only(services: dict[str, dict[str, Any]]) -> None:
    def held(name: str) -> set[str]:
        return {s if isinstance(s, str) else s["source"] for s in services[name].get("secrets", ())}

    assert held("api") == {"log_key"}
    assert held("dispatcher") == {"evaluator_key", "ray_token"}
    assert held("ray-head") == held("ray-worker") == held(BESIDE) == {"ray_token"}
    assert held("mlflow") == set()
    assert held("migrate") == {"log_key", "evaluator_key"}
    assert {n for n, s in services.items() if "secrets/worker.env" in s.get("env_file", ())} == {"ray-worker"}


def test_who_has_rays_token_finds_nothing_of_the_dispatchers_in_its_node(
    document: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    node, dispatcher = services[BESIDE], services["dispatcher"]
    assert node["environment"].keys() == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"} and "env_file" not in node
    assert not {"pid", "ipc", "volumes_from", "configs"} & (node.keys() | dispatcher.keys())
    shared = {v for v in node["volumes"] if v in dispatcher["volumes"] and ":" in v}
    assert shared == {"sessions:/tmp/ray"}
    assert document["volumes"]["sessions"]["driver_opts"]["o"] == "uid=10001,gid=10001,mode=0700,size=1g"
    # It ends with Ray's head, and is started again; so is the dispatcher, whose command starts no Ray.
    assert node["command"] == ["ray-node", "beside", "ray-head:6379"] and node["restart"] == "unless-stopped"
    assert "ray-node" not in dispatcher["command"] and dispatcher["deploy"]["replicas"] == 1


def test_the_images_hold_a_folder_of_their_user_for_each_volume(services: dict[str, dict[str, Any]]) -> None:
    """A new volume takes over owner and mode from the image; without a folder there it is root's, and nothing can be written."""
    dockerfile = (FOLDER.parent / "Dockerfile").read_text("utf-8")
    made = re.search(r"install -d -o 10001 -g 10001 -m 0700 (.*)$", dockerfile, re.M)
    assert made
    targets = {
        v.split(":")[1] if ":" in v else v for s in services.values() if "build" in s for v in s.get("volumes", ())
    }
    assert targets == set(made[1].split())


def test_every_variable_is_a_setting_and_none_a_password(
    services: dict[str, dict[str, Any]], variables_are_ours: Callable[[dict[str, str]], None]
) -> None:
    for service in services.values():
        environment = service.get("environment", {})
        variables_are_ours(environment)
        for name, value in environment.items():
            assert not re.search("PASSWORD|SECRET|TOKEN|KEY$", name) or str(value).startswith("/run/secrets/"), name


def test_every_command_line_is_one_of_ours(
    services: dict[str, dict[str, Any]], parses: Callable[[list[str]], None]
) -> None:
    seen = []
    for service in services.values():
        if "build" not in service:
            continue
        command = service["command"]
        command = command[1:] if command[0] == "acclimate" else command
        if command[0] != "ray-node":
            parses(command)
            seen.append(command[0])
    assert sorted(seen) == ["api", "db", "dispatch", "mlflow"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_by_sudo_all_but_the_keys_is_of_who_called(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    caller = os.environ | {"SUDO_UID": "4711", "SUDO_GID": "4712"}
    subprocess.run([FOLDER / "secrets.sh", folder], check=True, capture_output=True, env=caller)
    assert (folder.stat().st_uid, folder.stat().st_gid) == (4711, 4712)
    for path in folder.iterdir():
        assert path.stat().st_uid == (10001 if path.suffix == ".pem" else 4711), path.name


def test_the_secrets_are_made_once_and_are_what_the_file_names(tmp_path: Path, document: dict[str, Any]) -> None:
    folder = tmp_path / "secrets"
    for _ in range(2):
        subprocess.run([FOLDER / "secrets.sh", folder], check=True, capture_output=True)
        now = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert now == locals().get("before", now)
        before = now
    needed = {Path(s["file"]).name for s in document["secrets"].values()}
    needed |= {Path(f).name for s in document["services"].values() for f in s.get("env_file", ())}
    assert needed <= before.keys()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # No two are alike, and the keys are keys.
    passwords = [before[name] for name in before if name.endswith(("_password", "_token"))]
    assert len(set(passwords)) == len(passwords) == 5
    for name in ("log.pem", "evaluator.pem"):
        if os.getuid() == 0:
            assert (folder / name).stat().st_uid == 10001
        keys.load_signing_key(folder / name)
    assert b"PGPASSWORD" not in before["worker.env"]
    assert before["worker.env"] != before["api.env"]
