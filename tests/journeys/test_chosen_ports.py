"""Ports that tests choose before a program binds them are nobody else's meanwhile."""

import socket
import subprocess
import sys
from pathlib import Path

import chosen_ports
import pytest


def test_a_chosen_port_is_none_that_the_kernel_gives() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split())
    if lowest < 21_000:
        pytest.skip("this machine's kernel gives all ports")
    chosen = chosen_ports.free_ports(50)
    assert len(set(chosen)) == 50 and not any(lowest <= port <= highest for port in chosen)


def test_a_chosen_port_is_no_other_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    port = chosen_ports.free_port()
    draw = f"import chosen_ports; chosen_ports.candidates = lambda: [{port}] * 1000; chosen_ports.free_port()"
    command = [sys.executable, "-c", draw]
    environment = {"PYTHONPATH": str(Path(chosen_ports.__file__).parent)}
    other = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert other.returncode == 1 and "no port is free" in other.stderr
    # And it is free for the program that it was chosen for.
    with socket.create_server(("127.0.0.1", port)):
        pass
