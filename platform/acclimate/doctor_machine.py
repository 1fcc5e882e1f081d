"""The doctor's checks of this machine: what is installed, its devices, Ray, CPUs, memory, space, clock, proxies."""

import ctypes
import importlib.metadata
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from acclimate import ports
from acclimate.config import Settings
from acclimate.redaction import beginning, hidden
from acclimate_competitions.errors import installing
from acclimate_runners import allotment

WITHIN = 11.0
"""Seconds for all checks."""
_EXTRAS = {
    "server": ("fastapi", "uvicorn", "sqlalchemy", "alembic", "psycopg", "s3fs", "prometheus_client", "mlflow"),
    "runner": ("torch", "transformers", "tokenizers", "jinja2", "ray", "datasets", "s3fs"),
    "analysis": ("mlflow", "scipy", "matplotlib", "pandas", "sklearn"),
}
_GIB = 1 << 30
_LITTLE, _NOTHING = 2 * _GIB, 64 << 20
_OPEN_FILES = 4096
State = Literal["ok", "warning", "missing"]


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it stands, what was found, and what to do."""

    name: str
    state: State
    found: str
    hint: str = ""

    def document(self) -> dict[str, str]:
        """As JSON-ready data."""
        return asdict(self)


# ---- what is installed ---------------------------------------------------------------------------------------------


def python(_: Settings) -> Iterator[Finding]:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", f"{version} ({sys.executable})")


def extras(settings: Settings) -> Iterator[Finding]:
    """What of the extras is not installed."""
    for extra, modules in _EXTRAS.items():
        needed = [name for name in modules if name != "ray" or settings.runner == "ray"]
        missing = [name for name in needed if not is_there(name)]
        if missing:
            state: State = "warning" if extra == "analysis" else "missing"
            found = f"{', '.join(missing)} not installed"
            yield Finding(f"extra {extra}", state, found, installing(extra))
        else:
            yield Finding(f"extra {extra}", "ok", "installed")


def is_there(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def version_of(distribution: str) -> str:
    """A distribution's version; empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def devices(_: Settings) -> Iterator[Finding]:
    """Torch, its devices, and the isolation of children; in a process of its own, see acclimate_runners.devices."""
    command = [sys.executable, "-P", "-m", "acclimate_runners.devices"]
    try:
        said = subprocess.run(command, capture_output=True, timeout=WITHIN - 1, check=False).stdout
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
    found: dict[str, Any] = {}
    for line in said.splitlines():
        found |= json.loads(line)
    if "torch" not in found:
        yield Finding(
            "torch",
            "warning",
            f"could not be asked within {WITHIN - 1:.0f} s: the machine is busy, or its disk is slow",
            "nothing is known to be wrong with it; ask again when less runs here: acclimate doctor",
        )
    elif found["torch"] is not None:
        yield Finding("torch", "ok", f"{found['torch']}, {found['threads']} threads")
        yield _gpus(found)
    elif is_there("torch"):
        # Where it is not installed at all, the extra's line says so.
        yield Finding("torch", "missing", f"can't be imported: {found['problem']}", installing("runner"))
    if "isolation" in found:
        yield _isolation(found["isolation"])


def _gpus(found: Mapping[str, Any]) -> Finding:
    devices = [f"{one['name']} ({one['memory'] / _GIB:.0f} GiB)" for one in found["devices"]]
    if devices:
        return Finding("devices", "ok", f"{len(devices)} GPU: {', '.join(devices)}")
    if found["cuda"] and Path("/proc/driver/nvidia").exists():
        return Finding(
            "devices",
            "warning",
            "this machine has a GPU driver, torch sees no GPU",
            "compare `nvidia-smi` with torch's CUDA version",
        )
    return Finding("devices", "ok", "no GPU: models are prepared and evaluated on the CPU")


def _isolation(found: Mapping[str, Any]) -> Finding:
    if not found["parent_death"]:
        return Finding(
            "isolation", "warning", "not Linux: children are neither kept from the network nor bound to their parent"
        )
    rest = "no new privileges, death with the parent" if found["no_new_privileges"] else "death with the parent"
    if found["network"] == "none":
        return Finding("isolation", "ok", f"children have no network (by {found['how']}); {rest}")
    return Finding(
        "isolation",
        "warning",
        f"children have the network open; {rest}",
        "allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0); entries run no code of "
        "theirs either way, and each result says so: network open",
    )


def ray(settings: Settings) -> Iterator[Finding]:
    """Ray's version, and the cluster that the settings name."""
    version = version_of("ray")
    if settings.runner != "ray" or not version:
        return
    tokens = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    mode = os.environ.get("RAY_AUTH_MODE", "token" if tokens or settings.ray_address == "local" else "disabled")
    if settings.ray_address == "local":
        yield Finding("ray", "ok", f"{version}; a local one, with a token of its own")
        return
    yield _cluster(settings, version)
    if mode != "token":
        yield Finding(
            "ray token",
            "warning",
            f"RAY_AUTH_MODE is {mode}: whoever reaches the cluster's ports runs code on it",
            "start Ray with RAY_AUTH_MODE=token, and give the dispatcher RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH",
        )


# As the dispatcher would, in a process that is left as it stands: an orderly farewell takes longer than the doctor has.
_INSPECT = """
import json, os, pathlib, sys
from acclimate_competitions.errors import Refusal
from acclimate_runners.cluster import RayRunner
try:
    machines = RayRunner(pathlib.Path(sys.argv[2]), sys.argv[1]).machines()
    found = {"machines": [{"name": m.name, "cpus": m.cpus, "gpus": m.gpus} for m in machines]}
except Refusal as refusal:
    found = {"problem": refusal.sentence, "hint": refusal.hint}
print(json.dumps(found), flush=True)
os._exit(0)
"""


def _cluster(settings: Settings, version: str) -> Finding:
    address = settings.ray_address
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except OSError as error:
        hint = "is the head started, is this its HOST:PORT (6379), does the network let this machine through?"
        return Finding("ray", "missing", f"{version} here; {address}: {error.strerror or error}", hint)
    command = [sys.executable, "-P", "-c", _INSPECT, address, str(settings.node_work)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=WITHIN - 1, check=False, text=True)
    except subprocess.TimeoutExpired:
        found = f"{version} here; something listens at {address}, but no Ray answered within {WITHIN - 1:.0f} s"
        return Finding("ray", "warning", found, "ask again on a quieter machine; see that `ray status` works here")
    if not done.stdout:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        return Finding("ray", "warning", f"{version} here; {address} can't be asked: {beginning(last[0], 300)}")
    answer = json.loads(done.stdout)
    if "problem" in answer:
        return Finding("ray", "missing", hidden(answer["problem"]), answer["hint"])
    machines = ", ".join(f"{m['name']}: {m['cpus']:g} CPU, {m['gpus']:g} GPU" for m in answer["machines"])
    return Finding("ray", "ok", f"{version}; {address} has {len(answer['machines'])} machines ({machines})")


# ---- the machine ---------------------------------------------------------------------------------------------------


def machine(_: Settings) -> Iterator[Finding]:
    """CPUs, memory, open files; which limit counts, where it is not the machine itself."""
    found = allotment.allotted()
    by = "" if found.cpus_by == "machine" else f" (by {found.cpus_by})"
    yield Finding("cpu", "ok", f"{found.cpus} of {os.cpu_count()} CPUs usable{by}, load {os.getloadavg()[0]:.1f}")
    free = allotment.free(found)
    if free is not None:
        hint = "each job takes a process of its own; lower `slots`" if free < _LITTLE else ""
        by = "" if found.memory_by == "machine" else f" (by {found.memory_by})"
        text = f"{free / _GIB:.1f} GiB free of {found.memory / _GIB:.1f}{by}"
        yield Finding("memory", "warning" if hint else "ok", text, hint)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hint = (
        f"`ulimit -n {min(hard, _OPEN_FILES) if hard > 0 else _OPEN_FILES}` before the start"
        if 0 <= soft < _OPEN_FILES
        else ""
    )
    yield Finding("open files", "warning" if 0 <= soft < 1024 else "ok", f"{soft} at once, {hard} at most", hint)


def space(settings: Settings) -> Iterator[Finding]:
    """Room on the disks that the settings use."""
    folders: dict[str, Path | str | None] = {
        "data": settings.data,
        "blobs": settings.blobs,
        "node_work": settings.node_work,
        "log_file": settings.log_file,
    }
    seen: dict[int, str] = {}
    for name, place in folders.items():
        if place is None or "://" in str(place):
            continue
        there = next(path for path in (Path(place), *Path(place).parents) if path.exists())
        device = there.stat().st_dev
        if device in seen:
            continue
        seen[device] = name
        free = shutil.disk_usage(there).free
        state: State = "missing" if free < _NOTHING else "warning" if free < _LITTLE else "ok"
        hint = "" if state == "ok" else f"free some space, or set `{name}` to another disk"
        yield Finding(f"space {name}", state, f"{free / _GIB:.1f} GiB free at {there}", hint)
    if not os.access(next(p for p in (settings.data, *settings.data.parents) if p.exists()), os.W_OK | os.X_OK):
        yield Finding("data folder", "missing", f"{settings.data} can't be written", "choose another with --data")


def clock(_: Settings) -> Iterator[Finding]:
    """Whether the kernel says that this machine's clock is kept in step."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "adjtimex"):
        return
    # struct timex; with modes = 0 it only reads. Status is its sixth field, a long at most.
    timex = (ctypes.c_long * 64)()
    if libc.adjtimex(ctypes.byref(timex)) < 0:
        yield Finding("clock", "ok", "whether it is kept in step can't be told here")
        return
    if timex[5] & 0x40:
        hint = "run chrony or systemd-timesyncd; the API's decisions are by the database's clock"
        yield Finding("clock", "warning", "this machine's clock is not kept in step", hint)
    else:
        yield Finding("clock", "ok", "kept in step")


def proxies(settings: Settings) -> Iterator[Finding]:
    """Proxies of the environment that would be asked for this machine's own addresses."""
    names = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
    given = ", ".join(name for name in names if os.environ.get(name) or os.environ.get(name.upper()))
    if not given:
        return
    exempt = {part.strip() for name in ("no_proxy", "NO_PROXY") for part in os.environ.get(name, "").split(",")}
    needed = {"localhost", "127.0.0.1"} | ({settings.host} - ports.EVERYWHERE.keys())
    lacking = sorted(needed - exempt) if "*" not in exempt else []
    if lacking:
        hint = f"NO_PROXY={','.join(sorted(exempt - {''} | needed))}"
        yield Finding("proxy", "warning", f"{given} would be asked for {', '.join(lacking)}, too", hint)
    else:
        yield Finding("proxy", "ok", f"{given}, but not for this machine")
