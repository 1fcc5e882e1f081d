"""How a driver of Ray finds its machine's node where that is another container of the same pod, with the same network.

Ray 2.60 looks for its node among the processes that it sees, and a container of its own hides those. Its address doesn't.
"""

import importlib
import socket
from typing import Any

_ANSWERS = 5.0


def find_nodes_by_address(address: str) -> None:
    """Have Ray find this machine's nodes by their addresses too; for a process that joins the cluster at HOST:PORT."""
    services: Any = importlib.import_module("ray._private.services")
    raylet: Any = importlib.import_module("ray._raylet")
    by_process = services.find_node_ids

    def find_node_ids() -> set[str]:
        told = raylet.GcsClient(address=address).get_all_node_info(timeout=_ANSWERS)
        # Those that are gone are left out by whoever asks.
        return set(by_process()) | {key.hex() for key, node in told.items() if is_here(node.node_manager_address)}

    services.find_node_ids = find_node_ids


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's own, or of this pod's."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True
