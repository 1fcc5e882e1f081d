"""What a child computes on: the processor, or a GPU that it was given; how two runs give equal bytes there; and the class of hardware that says so.

The GPU's paths are CUDA's. Models and what is learned of them lie on the device; rows, results and checkpoints lie in main memory.
"""

import os
import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CPU = "cpu"
VERSIONED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "jinja2")

_HALF = ("amx_bf16", "avx512_bf16", "bf16")
"""Instructions that multiply in bfloat16, the first of which a processor has being taken; by the names that Linux has for them."""
_MAKERS = {"genuineintel": "intel", "authenticamd": "amd"}


def device(name: str) -> torch.device:
    """The device that this process computes on, by a job's name for its kind: of several processes each has a GPU of its own.

    Raises:
        RuntimeError: the machine gives no such device to this process, which is no entrant's fault.
    """
    if name != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise RuntimeError(f"the job is for a GPU, torch {torch.__version__} finds none in this process")
    number, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= found:
        raise RuntimeError(f"the job needs {number + 1} GPUs, torch finds {found} in this process")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def be_deterministic(threads: int) -> None:
    """Fix everything that could make two runs of this process differ (determinism class D1)."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory costs 5 % of a small model's step; it would only hide a kernel that reads what it never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Of GPUs: float32 is float32, sums of bfloat16 products are float32, and no kernel is chosen by how fast it was this time.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False


def multiplying(dtype: str, on: torch.device | None = None, *, keep: bool = True) -> AbstractContextManager[Any]:
    """What a forward pass is done in, by a recipe's dtype: in "bfloat16" matrices are multiplied in it, with weights as they are, float32.

    Args:
        dtype: the recipe's.
        on: the device that computes; None for the processor.
        keep: whether what a weight is in bfloat16 is kept to the end, in case it is used again; the numbers are the same.
    """
    if dtype != "bfloat16":
        return nullcontext()
    cast: AbstractContextManager[Any] = torch.autocast(on.type if on else CPU, dtype=torch.bfloat16, cache_enabled=keep)
    return cast


def in_main_memory(tensor: Tensor) -> Tensor:
    """A copy of a tensor in main memory, detached."""
    return tensor.detach().to(CPU, copy=True)


def hardware(dtype: str = "float32", device: str = CPU) -> str:
    """Hardware class: what two machines must share for equal bytes, such as "cpu/x86_64/avx512/intel" or "cuda/NVIDIA-H200".

    Torch chooses its own kernels by the processor's instructions. The library that multiplies matrices for it (MKL, OpenBLAS) chooses also by who
    made the processor, and on ARM by the core: two machines with one set of instructions and other makers give other last bits.

    Args:
        dtype: the recipe's; in bfloat16 it matters which of a processor's instructions multiply, as in "cpu/x86_64/avx512/intel/amx_bf16".
        device: the job's.
    """
    if device == "cuda":
        # Where there is none, as where a model was refused before anything was computed, none is named.
        names = [torch.cuda.get_device_name(0).replace(" ", "-")] if torch.cuda.is_available() else []
        return "/".join(["cuda", *names])
    try:
        told = Path("/proc/cpuinfo").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        told = ""
    found = f"cpu/{platform.machine()}/{torch.backends.cpu.get_cpu_capability().lower()}/{maker(told)}"
    if dtype == "float32":
        return found
    flags = told.split()
    return f"{found}/{next((name for name in _HALF if name in flags), 'bf16_by_float32')}"


def maker(cpuinfo: str) -> str:
    """Who made the processors, and on ARM which cores they are, by the text of /proc/cpuinfo: "intel", "amd", "0x41-0xd0c"; "unnamed" where it doesn't say."""
    named: dict[str, list[str]] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        named.setdefault(key.strip(), []).append("-".join(value.lower().split()))
    if vendors := [vendor for vendor in named.get("vendor_id", []) if vendor]:
        return "+".join(sorted({_MAKERS.get(vendor, vendor) for vendor in vendors}))
    cores = zip(named.get("CPU implementer", []), named.get("CPU part", []), strict=False)
    return "+".join(sorted({f"{implementer}-{part}" for implementer, part in cores})) or "unnamed"


def versions() -> dict[str, str]:
    """Versions of what can change a number; torch's also names the version of CUDA that it was built for."""
    return {"python": sys.version.split()[0], **{name: metadata.version(name) or "unknown" for name in VERSIONED}}
