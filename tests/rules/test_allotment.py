"""Limits of control groups, read from folders that are laid out as the kernel does; and that whoever counts memory or CPUs goes by them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from acclimate import config, doctor_machine, hosting
from acclimate_runners import allotment
from acclimate_runners.allotment import allotted
from acclimate_runners.local import LocalRunner

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GiB and 16 CPUs, whatever runs this."""
    monkeypatch.setattr(allotment, "_machine_memory", lambda: 64 * GIB)
    monkeypatch.setattr(allotment, "_cpus", lambda: (16, "machine"))


def laid_out(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{n}": t for n, t in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


NEW, OLD = {"cgroup.controllers": "cpu memory"}, "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n0::/docker/ab"
NONE = str(2**63 - 4096)
CASES = {
    "no groups": ("", {}, 64 * GIB, 16),
    "no limit": ("0::/a", {**NEW, "a/memory.max": "max", "a/cpu.max": "max 100000"}, 64 * GIB, 16),
    "its own": ("0::/a/b", {**NEW, "a/b/memory.max": str(4 * GIB), "a/b/cpu.max": "200000 100000"}, 4 * GIB, 2),
    "one above": ("0::/a/b/c", {**NEW, "a/memory.max": str(3 * GIB), "a/b/memory.max": "max", "a/b/c/memory.max": str(9 * GIB),
                                "a/cpu.max": "400000 100000", "a/b/c/cpu.max": "max 100000"}, 3 * GIB, 4),
    "a container's own root": ("0::/", {**NEW, "memory.max": str(GIB), "cpu.max": "50000 100000"}, GIB, 1),
    "a path that is not mounted": ("0::/kubepods/pod1/x", {**NEW, "memory.max": str(GIB), "cpu.max": "250000 100000"}, GIB, 2),
    "a path from outside": ("0::/../../x", {**NEW, "memory.max": str(GIB)}, GIB, 16),
    "more than there is": ("0::/a", {**NEW, "a/memory.max": str(999 * GIB), "a/cpu.max": "9900000 100000"}, 64 * GIB, 16),
    "damaged": ("0::/a\nnonsense\n::", {**NEW, "a/memory.max": "", "a/cpu.max": "many"}, 64 * GIB, 16),
    "of old": (OLD, {"memory/docker/ab/memory.limit_in_bytes": str(2 * GIB), "memory/memory.limit_in_bytes": NONE,
                     "cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "300000", "cpu,cpuacct/docker/ab/cpu.cfs_period_us": "100000"}, 2 * GIB, 3),
    "of old, above": (OLD, {"memory/docker/ab/memory.limit_in_bytes": NONE, "memory/docker/memory.limit_in_bytes": str(5 * GIB),
                            "cpu/docker/cpu.cfs_quota_us": "-1", "cpu/docker/cpu.cfs_period_us": "100000"}, 5 * GIB, 16),
    "of old, in a container": (OLD, {"memory/memory.limit_in_bytes": str(GIB), "cpu/cpu.cfs_quota_us": "100000",
                                     "cpu/cpu.cfs_period_us": "100000"}, GIB, 1),
    "both": (OLD, {"unified/docker/ab/memory.max": str(GIB), "memory/docker/ab/memory.limit_in_bytes": str(2 * GIB)}, GIB, 16),
}  # fmt: skip


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("cgroup", "files", "memory", "cpus"), CASES.values(), ids=CASES)
def test_the_least_of_all_limits_holds(
    tmp_path: Path, cgroup: str, files: dict[str, str], memory: int, cpus: int
) -> None:
    found = allotted(laid_out(tmp_path, cgroup, files))
    assert (found.memory, found.cpus) == (memory, cpus)
    assert (found.memory_by == "machine") == (memory == 64 * GIB)
    assert (found.cpus_by == "machine") == (cpus == 16)


def test_affinity_counts() -> None:
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from acclimate_runners.allotment import allotted; print(allotted().cpus, allotted().cpus_by)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "1"


@pytest.mark.usefixtures("machine")
def test_the_local_runner_and_the_doctor_go_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a/memory.max": str(4 * GIB), "a/cpu.max": "200000 100000", "a/memory.current": str(3 * GIB)}
    files["a/memory.stat"] = f"anon 5\ninactive_file {GIB}"
    monkeypatch.setattr(allotment, "_ROOT", laid_out(tmp_path, "0::/a", {**NEW, **files}))
    (offered,) = LocalRunner(tmp_path / "work", 1).machines()
    assert (offered.memory, offered.cpus) == (4 * GIB, 2.0)
    settings = config.load(tmp_path / "data", environ={}, given={"runner": "local"})
    assert hosting.runner_of(settings).slots == 2
    found = {each.name: each.found for each in doctor_machine.machine(settings)}
    assert "2 of" in found["cpu"] and "a/cpu.max)" in found["cpu"]
    assert found["memory"].startswith("2.0 GiB free of 4.0 (by ") and "a/memory.max)" in found["memory"]
