"""What this machine gives a child process, as JSON lines: `python -m acclimate_runners.devices`.

A process of its own, as it tries out what can't be undone (leaving the network), and as importing torch takes seconds and memory.
"""

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from acclimate_runners import isolation


def isolate() -> dict[str, Any]:
    """What a child of this machine can be kept from: {network, how, parent_death, no_new_privileges, watched}.

    `network` is none or open, `how` it is left: namespace (as a privileged user), user namespace, or empty where it can't be.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        # Only this process leaves the network; it must have no threads, so it is forked before torch brings any.
        found: dict[str, Any] = {"network": "open", "how": "", "no_new_privileges": False}
        try:
            users = _namespace("user")
            if isolation._leave_network():
                found |= {"network": "none", "how": "namespace" if _namespace("user") == users else "user namespace"}
            found["no_new_privileges"] = isolation._prctl(isolation._PR_SET_NO_NEW_PRIVS, 1)
        finally:
            os.write(write_end, json.dumps(found).encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(text)
    result["parent_death"] = sys.platform == "linux" and hasattr(isolation._libc(), "prctl")
    result["watched"] = isolation.resident_bytes(os.getpid()) > 0
    return result


def visible_gpus() -> str:
    """The GPUs that this process may give to a child, as CUDA_VISIBLE_DEVICES names them; empty for none. Nothing is imported or started for it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return "" if named == "-1" else named
    try:
        found = sorted(Path("/proc/driver/nvidia/gpus").iterdir())
    except OSError:
        return ""
    return ",".join(str(number) for number in range(len(found)))


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return ""


def compute() -> dict[str, Any]:
    """What torch finds: {torch, cuda, devices: [{name, memory}], threads, seconds, problem}."""
    began = time.monotonic()
    found: dict[str, Any] = {"torch": None, "cuda": None, "devices": [], "threads": 0, "problem": ""}
    try:
        import torch

        found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
        if torch.cuda.is_available():
            properties = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
            found["devices"] = [{"name": one.name, "memory": one.total_memory} for one in properties]
    except Exception as error:
        # A torch that was installed for another machine fails in many ways; each is what is to be told.
        found["problem"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return found | {"seconds": round(time.monotonic() - began, 2)}


def main() -> None:
    """Print what is found, the quick part on a line of its own: who asks need not wait for torch."""
    quick = {"isolation": isolate(), "machine": platform.machine(), "system": platform.system()}
    sys.stdout.write(json.dumps(quick) + "\n")
    sys.stdout.flush()
    sys.stdout.write(json.dumps(compute()) + "\n")


if __name__ == "__main__":
    main()
