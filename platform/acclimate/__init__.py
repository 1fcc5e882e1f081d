"""The platform: keeps the record and serves people. Core modules (client, custody, verify) need no extra.

`acclimate.rank` and `acclimate.stability` are what the commands of these names call; they are imported when they are asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acclimate.analysis import rank, stability

__all__ = ["__version__", "rank", "stability"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("rank", "stability"):
        from acclimate import analysis

        return getattr(analysis, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
