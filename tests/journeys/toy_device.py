"""A device that no machine has: its tensors are the processor's under another name, and operations that mix them with the processor's are
refused as a GPU refuses them. So code for GPUs can be held to its placement, and its numbers to the processor's, where no GPU is.

PyTorch's own way to write a device in Python. It holds for the whole process, so that whoever uses it begins one.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "toy"
_aten = torch.ops.aten
_MOVES = (_aten._to_copy.default, _aten.copy_.default)


class OnToy(torch.Tensor):
    """A tensor of the device; `held` is the processor's that it stands for."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "OnToy":
        """The device's tensor of these numbers."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do on the processor what is asked of the device."""
        kwargs = dict(kwargs or {})
        given = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func not in _MOVES and any(not isinstance(each, OnToy) and each.dim() for each in given):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {NAME} and cpu")
        stays = "device" not in kwargs or torch.device(kwargs["device"] or NAME).type == NAME
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        known = {id(each.held): each for each in given if isinstance(each, OnToy)}
        bare = _pytree.tree_map_only(OnToy, lambda each: each.held, (args, kwargs))
        found = func(*bare[0], **bare[1])
        if func is _aten.copy_.default:
            return args[0]
        if not stays:
            return found
        return _pytree.tree_map_only(
            torch.Tensor, lambda each: known[id(each)] if id(each) in known else OnToy(each), found
        )


class _Module(_DummyBackendModule):
    """What `torch.cuda` is to CUDA."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may multiply in."""
        return [torch.bfloat16]


def install() -> None:
    """Have this process know the device."""
    # Moved to it, a parameter stays the same object, as it does on its way to a GPU: else tied ones would come apart.
    torch.__future__.set_swap_module_params_on_conversion(True)
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return OnToy(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return OnToy(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Any, to: Any, *_: Any) -> Any:
        # How torch.tensor makes its first numbers.
        getattr(to, "held", to).copy_(getattr(source, "held", source))
        return to

    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    globals()["_library"] = library


def _begin(folder: Path, steps: int) -> None:
    from acclimate_runners import checkpoints, jobs, preparation

    rate, seen = preparation.learning_rate, 0

    def counting(step: int, **how: Any) -> float:
        nonlocal seen
        seen += 1
        if seen == steps:
            raise KeyboardInterrupt
        if seen == steps - 1:
            (folder / checkpoints.ASKED).write_text("1", "utf-8")
        return rate(step, **how)

    preparation.learning_rate = counting
    try:
        job = jobs.from_json((folder / "job.json").read_text("utf-8"))
        with contextlib.suppress(KeyboardInterrupt):
            preparation.prepare(job, folder, lambda *words: None)
    finally:
        preparation.learning_rate = rate


def main(folders: list[str]) -> int:
    """Run the jobs of folders, one after the other, in this process; of a folder that ends with @N only so many steps, with
    a checkpoint just before the last, as if killed then."""
    from acclimate_runners import __main__

    install()
    for given in folders:
        folder, _, steps = given.partition("@")
        if steps:
            _begin(Path(folder), int(steps))
        elif status := __main__.main([folder]):
            return status
    return 0


if __name__ == "__main__":
    from acclimate_runners import __main__

    # As a child ends: torch's threads hold tensors of this device, and an interpreter that takes itself down trips over them.
    __main__._end(main(sys.argv[1:]))
