"""A model's weights in shards over the processes of a node, by PyTorch's fully_shard (FSDP2).

Of each weight, its gradient and the optimizer's moments a process holds some rows: of n rows, process k of p has ceil(n / p), from
k * ceil(n / p) on. A layer is whole in every process while it is computed, forward and backward, and its gradient is added up row by row into
whoever holds the row. What lies outside the layers (embeddings, the last norm, the head) is whole while the model is asked. So all processes must
ask the same number of times, in the same order. The numbers are float32 on their way.

A classifier's own head is whole in every process, as each task begins with a new one; so are adapters. Their gradients are added up as those of
processes that hold everything are (ranks.py).
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from acclimate_competitions.errors import Refusal
from acclimate_runners import ranks
from acclimate_runners.holding import Gathering, of_weight

_MMAP_THRESHOLD, _LARGE = -3, 1 << 20
"""Of mallopt (malloc.h), and the bytes from which on memory that is given back is the machine's again."""


def give_back() -> None:
    """Have this process give large pieces of main memory back as soon as they are free.

    glibc keeps freed pieces of up to 32 MiB, as those of a whole layer are; they lie between others and are too rarely of a size to be used again,
    so that a process would come to hold as much as with whole weights. Other libraries of C are left as they are.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)


def require_sums() -> None:
    """Refuse a torch whose FSDP2 can only average gradients.

    Raises:
        Refusal: request_invalid.
    """
    if not all(
        hasattr(FSDPModule, name) for name in ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
    ):
        sentence = f"torch {torch.__version__} can't add up the gradients of weights in shards"
        raise Refusal("request_invalid", sentence, hint='install a newer torch, or say weights = "whole"')


@contextmanager
def unfilled() -> Iterator[None]:
    """Modules that are made here have parameters without memory; their buffers are as ever."""
    plain = nn.Module.register_parameter

    def bare(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        plain(module, name, parameter)

    nn.Module.register_parameter = bare
    try:
        yield
    finally:
        nn.Module.register_parameter = plain


class _Root(nn.Module):  # type: ignore[misc]
    """What a model is asked through: FSDP2 makes whole what lies outside the layers for as long as its forward takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, question: Callable[[], Tensor]) -> Tensor:
        return question()


class Shards:
    """Some rows of each weight are held by this process (holding.Held).

    Args:
        model: made within `unfilled`; its parameters get memory here, of no meaning yet.
        named: the model's parameters by the names of files, as they are now.
        device: where the rows lie.
        whole: names of those that stay whole in every process.
        like: name -> name of the weight whose rows are read of it, where files may have a tensor twice.

    Attributes:
        weights: what is held, by name; changing it in place changes the model.
    """

    everything = False

    def __init__(
        self,
        model: nn.Module,
        named: Callable[[], Mapping[str, Tensor]],
        *,
        device: torch.device,
        whole: Sequence[str] = (),
        like: Mapping[str, str] | None = None,
    ) -> None:
        self._count, self._rank = distributed.get_world_size(), distributed.get_rank()
        self.first = self._rank == 0
        self._like, self._asking = dict(like or {}), False
        require_sums()
        give_back()
        mesh = init_device_mesh(device.type, (self._count,))
        # Layer by layer, so that never more than one is there whole.
        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            _fill(layer, device)
            fully_shard(layer, mesh=mesh)
        self._root: Any = _Root(model)
        _fill(self._root, device)
        kept = {parameter for name, parameter in named().items() if name in whole}
        fully_shard(self._root, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                # The parts' losses are shares of the batch's: gradients are added up, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        found: Mapping[str, Any] = named()
        self._parameters = {name: parameter for name, parameter in found.items() if name not in whole}
        with torch.no_grad():
            rows = {name: parameter.to_local().detach() for name, parameter in self._parameters.items()}
        self.weights: dict[str, Tensor] = {name: rows.get(name, found[name]) for name in sorted(found)}

    def ask(self, question: Callable[[], Tensor]) -> Tensor:
        """The answer, for which all processes ask together; a question within a question is part of it."""
        if self._asking:
            return question()
        self._asking = True
        try:
            answer: Tensor = self._root(question)
        finally:
            self._asking = False
        return answer

    def registered(self, name: str, weight: Tensor) -> Tensor:
        """The weight as FSDP2 has it, in the shape of the whole."""
        return self._parameters.get(name, weight)

    def _rows(self, name: str) -> slice | None:
        """The rows of a weight that are held; None for one that is held whole."""
        if name not in self._parameters:
            return None
        count = self._parameters[name].shape[0]
        each = -(-count // self._count)
        return slice(min(count, self._rank * each), min(count, (self._rank + 1) * each))

    def own(self, name: str, whole: Tensor) -> Tensor:
        """The rows of the whole that are held."""
        rows = self._rows(name)
        return whole if rows is None else whole[rows]

    def begins(self, name: str) -> int:
        """The first row of a weight that is held."""
        rows = self._rows(of_weight(name))
        return 0 if rows is None else int(rows.start)

    def shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """The whole shape."""
        return tuple(self._parameters.get(of_weight(name), tensor).shape)

    def gathered(self, tensors: Mapping[str, Tensor]) -> Gathering:
        """Whole tensors in the first process's main memory, one after the other; the others give their rows."""
        shapes = {name: self.shape(name, tensors[name]) for name in sorted(tensors)}
        return Gathering(shapes, ((name, self._whole(name, tensors[name])) for name in shapes))

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if of_weight(name) not in self._parameters:
            return tensor
        count, *row = self.shape(name, tensor)
        each = -(-count // self._count)
        mine = torch.zeros(each, *row)
        mine[: len(tensor)] = tensor.detach().cpu()
        if not self.first:
            distributed.gather(mine, dst=0)
            return mine
        whole = torch.empty(each * self._count, *row)
        distributed.gather(mine, list(whole.split(each)), dst=0)
        return whole[:count]

    def stored(self, path: Path) -> dict[str, Tensor]:
        """What is held of the tensors of a safetensors file; of the others nothing is read."""
        found: dict[str, Tensor] = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                rows = self._rows(self._like.get(name, name))
                found[name] = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        return found

    def added(self, number: float, learned: Mapping[str, Tensor]) -> float:
        """The sum of all processes' numbers. Gradients of rows were added up on their way here; those of whole tensors are now."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if name in learned:
                    learned[name].grad = None if parameter.grad is None else parameter.grad.to_local()
                parameter.grad = None
        return ranks.added(number, [weight.grad for name, weight in learned.items() if name not in self._parameters])

    def clip(self, learned: Mapping[str, Tensor], most: float) -> None:
        """By the norm of all rows of all processes and of what is whole."""
        found = [(name in self._parameters, weight.grad) for name, weight in learned.items() if weight.grad is not None]
        rows, whole = (_square([grad for in_rows, grad in found if in_rows is which]) for which in (True, False))
        norm = torch.tensor(ranks.added(rows) + whole, dtype=torch.float64).sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(list(learned.values()), most, norm)

    def agreed(self, problems: Sequence[str]) -> list[str]:
        """The problems that any process found, each once, in the order of their words."""
        found: list[Any] = [None] * self._count
        distributed.all_gather_object(found, list(problems))
        return sorted({problem for each in found for problem in each})

    def decided(self, one: bool) -> bool:
        """What the first process says."""
        said = torch.tensor([one], dtype=torch.uint8)
        distributed.broadcast(said, src=0)
        return bool(said.item())


def _fill(module: nn.Module, device: torch.device) -> None:
    """Give memory to the parameters below a module that have none, tied ones once, and bring its buffers to the device."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device))
                each._parameters[name] = made[parameter]
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else buffer.to(device)


def _square(gradients: Sequence[Tensor]) -> float:
    """Of their common norm."""
    if not gradients:
        return 0.0
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms)).square())
