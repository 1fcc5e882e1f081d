"""What one process holds of a model that several processes learn: all of it, or some rows of each weight (sharding.py).

The rest of the preparation works on what is held, as if it were all: the optimizer, checkpoints, copies. Where more than that is needed (to ask
the model, to add up and clip gradients, to write whole tensors), it asks here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Gathering:
    """Tensors that are whole one after the other.

    Attributes:
        shapes: name -> whole shape, in the order of names.
        each: (name, whole tensor) in that order; of several processes only the first has it whole, and all must come to the end.
    """

    shapes: Mapping[str, tuple[int, ...]]
    each: "Iterator[tuple[str, Tensor]]"


class Held(Protocol):
    """What this process holds of a model.

    Attributes:
        everything: whether that is all of it.
        first: whether this process writes what is written together.
    """

    everything: bool
    first: bool

    def ask(self, question: "Callable[[], Tensor]") -> "Tensor":
        """The answer to a question that needs weights to be whole."""

    def registered(self, name: str, weight: "Tensor") -> "Tensor":
        """A weight as its module has it, of what is held of it."""

    def own(self, name: str, whole: "Tensor") -> "Tensor":
        """Of a tensor in the shape of a whole weight, the part that is held."""

    def begins(self, name: str) -> int:
        """The first row of a weight that is held."""

    def shape(self, name: str, tensor: "Tensor") -> tuple[int, ...]:
        """The whole shape of what is learned, of what is held of it."""

    def gathered(self, tensors: "Mapping[str, Tensor]") -> Gathering:
        """Tensors made whole; a name may have a word and a slash before the weight's."""

    def stored(self, path: Path) -> "dict[str, Tensor]":
        """What is held of the tensors of a safetensors file."""

    def added(self, number: float, learned: "Mapping[str, Tensor]") -> float:
        """The sum of all processes' numbers; the gradients of what is learned become those of all processes, too."""

    def clip(self, learned: "Mapping[str, Tensor]", most: float) -> None:
        """Clip the gradients of what is learned by the norm of all of them together."""

    def agreed(self, problems: Sequence[str]) -> list[str]:
        """The problems that any process found with what it holds."""

    def decided(self, one: bool) -> bool:
        """What the first process decides, where all do the same."""


class Whole:
    """All of a model is held by this process."""

    everything = first = True

    def ask(self, question: "Callable[[], Tensor]") -> "Tensor":
        """The answer."""
        return question()

    def registered(self, name: str, weight: "Tensor") -> "Tensor":
        """The weight."""
        return weight

    def own(self, name: str, whole: "Tensor") -> "Tensor":
        """The whole."""
        return whole

    def begins(self, name: str) -> int:
        """The first row of all."""
        return 0

    def shape(self, name: str, tensor: "Tensor") -> tuple[int, ...]:
        """The tensor's."""
        return tuple(tensor.shape)

    def gathered(self, tensors: "Mapping[str, Tensor]") -> Gathering:
        """The tensors."""
        named = {name: tensors[name] for name in sorted(tensors)}
        return Gathering({name: tuple(tensor.shape) for name, tensor in named.items()}, iter(named.items()))

    def stored(self, path: Path) -> "dict[str, Tensor]":
        """All tensors of the file."""
        from safetensors.torch import load_file

        return dict(load_file(path))

    def added(self, number: float, learned: "Mapping[str, Tensor]") -> float:
        """Of all processes that share a batch; each has the same gradients afterwards."""
        from acclimate_runners import ranks

        return ranks.added(number, [weight.grad for weight in learned.values()])

    def clip(self, learned: "Mapping[str, Tensor]", most: float) -> None:
        """By torch's own norm."""
        import torch

        torch.nn.utils.clip_grad_norm_(list(learned.values()), most)

    def agreed(self, problems: Sequence[str]) -> list[str]:
        """The problems."""
        return list(problems)

    def decided(self, one: bool) -> bool:
        """The same."""
        return one


def of_weight(name: str) -> str:
    """The weight's name behind a word and a slash."""
    return name.rpartition("/")[2]
