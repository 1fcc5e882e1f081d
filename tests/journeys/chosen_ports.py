"""Ports for programs that bind them only later, or again after they were ended: nobody else gets one meanwhile.

The kernel gives ports of its own range to whoever asks for any, so one of those, found free, may be another's a moment later. Here one is drawn
below that range, and above those that Ray's workers take, and the test process that drew it keeps it for as long as it lives: an abstract
Unix socket has its number, which no other test process can bind then.
"""

import random
import socket
from pathlib import Path

_BELOW = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 20_000


def candidates() -> range:
    """The ports to draw from; where the kernel's own range begins lower, they are no safer than others."""
    below = int(_BELOW.read_text("ascii").split()[0]) if _BELOW.exists() else 32_768
    return range(_FIRST, below if below > _FIRST + 1000 else 32_768)


def free_port() -> int:
    """A port of this test process, on which nobody listens."""
    for port in random.sample(candidates(), 1000):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0acclimate-test-port-{port}")
            with socket.socket() as probe:
                # All addresses: some programs listen on more than they are told.
                probe.bind(("", port))
                probe.listen(1)
        except OSError:
            claim.close()
            continue
        claim.detach()  # held until the process ends
        return port
    raise AssertionError("no port is free")


def free_ports(count: int) -> list[int]:
    """So many of them."""
    return [free_port() for _ in range(count)]
