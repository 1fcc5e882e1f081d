"""A Ray of the dispatcher's own whose node ends: no other node will come, so it is made anew."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import WITHIN

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from acclimate.hosting import Host
from acclimate_runners.cluster import RayRunner

made = []

def factory():
    made.append(RayRunner(Path(sys.argv[1]), "local", 1))
    return made[-1]

def until(condition):
    while not condition():
        time.sleep(0.1)

def raylets():
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text("utf-8").partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name.startswith("raylet") and rest.split()[1] == str(os.getpid()):
            found.append(int(path.parent.name))
    return found

host = Host(factory)
host.start()
until(lambda: host.runner is not None and host.machines)
first, (raylet,) = host.runner, raylets()
os.kill(raylet, signal.SIGKILL)
until(lambda: host.runner is not None and host.runner is not first and host.machines)
print(len(made), host.problem, raylets() != [raylet], flush=True)
host.close()
"""


@pytest.mark.slow
def test_a_local_ray_without_its_node_is_made_anew(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "work")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=WITHIN)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err[-3000:]
    assert out.splitlines()[-1] == "2  True"
