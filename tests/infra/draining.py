"""How long a worker of Ray needs that is told to go, and what tells Ray to wait for it."""

import importlib.util
from pathlib import Path

from acclimate_runners import gateway
from acclimate_runners.watch import Patience

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Read by the installed Ray, or nobody reads it."""


def drains() -> float:
    """Seconds until a dispatcher has seen that a node is to go, and its attempts have written a checkpoint and ended."""
    found = importlib.util.find_spec("ray")
    assert found is not None and found.origin is not None
    assert f'"{DRAIN}"' in (Path(found.origin).parent / "_private" / "ray_constants.py").read_text("utf-8")
    patience = Patience()
    return gateway._LOOK_EVERY + patience.checkpoint + patience.end
