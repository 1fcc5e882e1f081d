"""How the program of a child imports transformers: what a model's forward pass needs, without what costs seconds and gives it nothing.

Half of the time goes to the garbage collector, which walks over everything that is there again and again and finds nothing; to optional packages
of things that a job never asks for; and to a list of what every module of every architecture exports.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import pyarrow as pa

_OPTIONAL = ("PIL", "accelerate", "boto3", "datasets", "kernels", "peft", "scipy", "sklearn", "tabulate", "torchvision")
"""Packages that torch and transformers import where a machine has them: for the Trainer, for losses and images that no job has, for clouds and prints;
and kernels, by which some versions have Mamba compute with code from a server: a child reaches none, and numbers are to be those of everywhere else."""
_TABLES = "pandas"
"""What pyarrow looks for, once, when it is first given values."""
_MODELS = "transformers.models"


def lean() -> None:
    """Have this process import no more than jobs need; for programs whose only work are jobs, before anything else is imported."""
    for name in _OPTIONAL:
        # None has an import fail, and a search find nothing.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    without_pandas()


def without_pandas() -> None:
    """Have pyarrow take values without importing pandas; for programs that are given no values of pandas. Arrow's tables still become pandas'."""
    if _TABLES not in sys.modules:
        sys.meta_path.insert(0, absent := _Absent())
        try:
            pa.array([0])
        finally:
            sys.meta_path.remove(absent)


class _Absent(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == _TABLES:
            raise ModuleNotFoundError(name=name)


def transformers() -> None:
    """Import transformers and what all of its architectures share, without the list of what each of them exports."""
    with quickly():
        package = import_module("transformers")
        if _MODELS not in sys.modules:
            models = ModuleType(_MODELS)
            models.__path__ = [str(Path(folder) / "models") for folder in package.__path__]
            sys.modules[_MODELS] = models
        import_module("transformers.modeling_layers")


@contextmanager
def quickly() -> Iterator[None]:
    """Within this, the garbage collector rests: what is imported stays."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
