"""The platform: keeps the record and serves people. Core modules (client, custody, verify) need no extra.

`acclimate.rank`, `compare`, `stability` and `gap` are what the commands of these names call, and so are `acclimate.check`,
`acclimate.prepare` and `acclimate.evaluate`; `acclimate.load_rounds` reads rounds from MLflow. They are imported when they are asked for.
"""

# As of typing, whose import would take most of a command's first moments, in which Ctrl-C shows a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from acclimate.analysis import compare, rank, stability
    from acclimate.gap_analysis import gap
    from acclimate.loaded_rounds import load_rounds
    from acclimate.trials import check, evaluate, prepare

__all__ = ["__version__", "check", "compare", "evaluate", "gap", "load_rounds", "prepare", "rank", "stability"]
__version__ = "0.1.0"

_MODULES = {
    "compare": "analysis",
    "load_rounds": "loaded_rounds",
    "gap": "gap_analysis",
    "rank": "analysis",
    "stability": "analysis",
    "check": "trials",
    "evaluate": "trials",
    "prepare": "trials",
}


def __getattr__(name: str) -> "Any":
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"acclimate.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
