"""How many multiplications a model makes of a token, or of an image: what the FLOPs of a ledger are counted by, in plain Python.

A weight is multiplied once for each token that is read, which is the usual estimate; but a convolution's at each place of an image, a ViT's for each
patch, and a layer's that stands for several as often as it is passed. The products of an attention's scores are left out, as usual.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from acclimate_runners import architectures

Image = tuple[int, int, int]
"""Height, width and channels."""


def times(config: Mapping[str, Any], image: Image | None) -> Callable[[str], int]:
    """How often each number of a weight is multiplied for one token, or for one image, by the weight's name.

    Args:
        config: checked.
        image: of the task; None where it reads texts.
    """
    kind = architectures.ARCHITECTURES[config["model_type"]]
    return (lambda name: 1) if kind.times is None else kind.times(config, image or (0, 0, 0))


def products(config: Mapping[str, Any], image: Image | None) -> int:
    """Multiplications that are made of one token, or of one image, each with an addition; as times."""
    each = times(config, image)
    return sum(math.prod(shape) * each(name) for name, shape in architectures.shapes(config).items())


def flops(config: Mapping[str, Any], *, tokens: int, image: Image | None, beside: int) -> int:
    """Floating-point operations of a fit: of each product 6, forward and for the gradients of inputs and weight; 4 where the weight stands still.

    Args:
        config: checked.
        tokens: that it read, over all steps; of images, their numbers.
        image: as times.
        beside: operations of one token or image for adapters and a head that is learned with them, as the weights then stand still; 0 where these are learned.
    """
    own = products(config, image)
    # An image is its numbers, and each is read as a whole.
    units = tokens if image is None else tokens // math.prod(image)
    return units * (4 * own + beside if beside else 6 * own)
