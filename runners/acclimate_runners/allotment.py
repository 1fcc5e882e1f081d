"""What of this machine's memory and CPUs this process may use: the machine's own, or less where a control group (a container, a service) allows less.

A limit may stand on any group above the process's own, so all of them up to the root are read. Both versions of control groups are known;
a group that can't be seen from inside a container is taken for the root that is mounted there.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class Allotment:
    """What this process may use.

    Attributes:
        memory: bytes; 0 where the system doesn't say.
        memory_by: what sets it: "machine", or the file that holds the limit.
        cpus: at least 1; part of one CPU counts as none beside a whole one.
        cpus_by: "machine", "affinity", or the file that holds the limit.
    """

    memory: int
    memory_by: str
    cpus: int
    cpus_by: str


def allotted(root: Path | None = None) -> Allotment:
    """This process's allotment.

    Args:
        root: where proc/ and sys/ lie; None for this machine's root.
    """
    root = root or _ROOT
    memory, memory_by = _machine_memory(), "machine"
    for path in _files(root, "memory", new="memory.max", old="memory.limit_in_bytes"):
        limit = _number(_words(path)[:1])
        if limit and (not memory or limit < memory):
            memory, memory_by = limit, str(path)
    cpus, cpus_by = _cpus()
    for path in _files(root, "cpu", new="cpu.max", old="cpu.cfs_quota_us"):
        words = _words(path)
        period = words[1:2] if path.name == "cpu.max" else _words(path.with_name("cpu.cfs_period_us"))[:1]
        quota, each = _number(words[:1]), _number(period)
        if quota and each and max(1, quota // each) < cpus:
            cpus, cpus_by = max(1, quota // each), str(path)
    return Allotment(memory, memory_by, cpus, cpus_by)


def free(found: Allotment, root: Path | None = None) -> int | None:
    """Bytes that the process may still take, of the machine's and of the allotment's; None where the system doesn't say.

    What a group keeps of files and can drop at once is free.
    """
    left = [
        int(line.split()[1]) * 1024
        for line in _text((root or _ROOT) / "proc/meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    if found.memory_by != "machine":
        limit = Path(found.memory_by)
        name = "memory.current" if limit.name == "memory.max" else "memory.usage_in_bytes"
        stat = dict(line.split()[:2] for line in _text(limit.with_name("memory.stat")).splitlines() if " " in line)
        dropped = _number([stat.get("total_inactive_file", stat.get("inactive_file", ""))])
        if used := _number(_words(limit.with_name(name))[:1]):
            left.append(max(0, found.memory - max(0, used - dropped)))
    return min(left) if left else None


def _files(root: Path, controller: str, *, new: str, old: str) -> Iterator[Path]:
    """The files of a limit, from this process's group up to the root's."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            tops = [mounts] if (mounts / "cgroup.controllers").exists() else [mounts / "unified"]
            wanted = new
        elif controller in controllers.split(","):
            tops, wanted = [mounts / controllers, mounts / controller], old
        else:
            continue
        for top in dict.fromkeys(tops):
            parts = [part for part in name.split("/") if part not in ("", ".", "..")]
            for depth in range(len(parts), -1, -1):
                path = top.joinpath(*parts[:depth], wanted)
                if path.is_file():
                    yield path


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _number(words: list[str]) -> int:
    """A number above 0; else 0: "max" and -1 are no limit."""
    return int(words[0]) if words and words[0].isascii() and words[0].isdecimal() else 0


def _machine_memory() -> int:
    try:
        return max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return 0


def _cpus() -> tuple[int, str]:
    every = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    return (usable, "affinity") if usable < every else (every, "machine")
