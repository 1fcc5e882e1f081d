"""The actor of an attempt, in a process without Ray: when it leaves its place, and what it leaves behind."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from dispatching import children
from waiting import until

from acclimate_runners.blobs import FolderBlobs

ATTENDANT = """
import pickle, sys, time
from pathlib import Path
from acclimate_runners.attendant import Attendant, Post
from acclimate_runners.code import code_digest
from acclimate_runners.watch import Patience
job, blobs, work = pickle.loads(Path(sys.argv[1]).read_bytes())
head, patience = work / "head", Patience(unasked=4.0)
post = Post(work, code_digest(), here=lambda: "m", reached=lambda: head.exists() is (sys.argv[2] == "there"), patience=patience)
actor = Attendant(sys.argv[3], job, blobs, post, gpus=False)
while (status := actor.poll()).state == "running" and status.step < 3:
    time.sleep(0.05)
print(status.state, status.machine, flush=True)
sys.stdin.readline()
while sys.argv[2] == "gone" and (status := actor.poll()).state == "running":
    time.sleep(0.05)
print(status.code, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("head", ["there", "gone"])
def test_an_attempt_that_nobody_asks_for_or_whose_head_is_gone_leaves_after_a_checkpoint(
    tmp_path: Path, head: str
) -> None:
    blobs, work = FolderBlobs(tmp_path / "blobs"), tmp_path / "work"
    job = tiny.prepare_job(tmp_path, blobs)
    endless = replace(job, recipe=replace(job.recipe, epochs=50_000))
    work.mkdir()
    (tmp_path / "job").write_bytes(pickle.dumps((endless, blobs, work)))
    if head == "there":
        (work / "head").touch()
    command = [sys.executable, "-c", ATTENDANT, str(tmp_path / "job"), head, "sha256:aa/1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None and actor.stdin is not None
        assert actor.stdout.readline().split() == ["running", "m"] and len(children(str(work))) == 1
        (work / "head").touch()
        actor.stdin.write("go on\n")
        actor.stdin.flush()
        if head == "gone":
            # Whoever still reaches it is told why.
            assert actor.stdout.readline().strip() == "preempted"
        # Then nobody asks any more, and it makes room.
        assert actor.wait(240) == 0
    until(lambda: not children(str(work)))
    (name,) = [name for name in blobs.notes("attempts/") if name.endswith("/1/checkpoint.json")]
    assert json.loads(blobs.note(name) or b"")["step"] >= 3


UNFIT = """
import pickle, sys, time
from pathlib import Path
from acclimate_runners.attendant import Attendant, Post
from acclimate_runners.watch import Patience
job, blobs, work = pickle.loads(Path(sys.argv[1]).read_bytes())
post = Post(work, "sha256:other", here=lambda: "m", reached=lambda: True, patience=Patience(unasked=2.0))
actor = Attendant("sha256:aa/1", job, blobs, post, gpus=False)
while (status := actor.poll()).state == "running":
    time.sleep(0.05)
print(status.unfit, flush=True)
time.sleep(600)
"""


def test_an_actor_whose_machine_is_unfit_leaves_when_nobody_asks(tmp_path: Path) -> None:
    blobs, work = FolderBlobs(tmp_path / "blobs"), tmp_path / "work"
    work.mkdir()
    (tmp_path / "job").write_bytes(pickle.dumps((tiny.prepare_job(tmp_path, blobs), blobs, work)))
    command = [sys.executable, "-c", UNFIT, str(tmp_path / "job")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None and actor.stdout.readline().strip() == "m"
        assert actor.wait(240) == 0


DEAD = """
import ctypes, os, pickle, sys, time
from pathlib import Path
from acclimate_runners.attendant import Attendant, Post
from acclimate_runners.code import code_digest
from acclimate_runners.watch import Patience
job, blobs, work = pickle.loads(Path(sys.argv[1]).read_bytes())
# A file system whose server never says a word, as of a file server that is gone.
server = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
assert ctypes.CDLL(None).mount(b"dead", os.fsencode(work), b"fuse", 0, options) == 0
post = Post(work, code_digest(), here=lambda: "m", reached=lambda: True, patience=Patience(hang=3.0, unasked=2.0))
actor = Attendant("sha256:aa/1", job, blobs, post, gpus=False)
print(actor.poll().state, flush=True)
while (status := actor.poll()).state == "running":
    time.sleep(0.05)
print(status.code, status.unfit, status.machine, actor.stop(), flush=True)
print(status.reason, flush=True)
time.sleep(600)
"""


def test_an_actor_whose_folder_lies_on_a_dead_mount_answers_and_says_so(tmp_path: Path) -> None:
    try:
        mounts = ["unshare", "--user", "--map-root-user", "--mount"]
        subprocess.run([*mounts, "sh", "-c", "exec 3<>/dev/fuse"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody mount a file system of his own")
    blobs, work = FolderBlobs(tmp_path / "blobs"), tmp_path / "work"
    work.mkdir()
    (tmp_path / "job").write_bytes(pickle.dumps((tiny.prepare_job(tmp_path, blobs), blobs, work)))
    command = [*mounts, sys.executable, "-c", DEAD, str(tmp_path / "job")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None and actor.stdout.readline().strip() == "running"
        assert actor.stdout.readline().split() == ["runner_failed", "m", "m", "True"]
        assert f"has looked at its folder {work} for" in actor.stdout.readline()
        # Then it leaves, although one of its threads waits for ever.
        assert actor.wait(240) == 0
