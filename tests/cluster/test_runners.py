import os
import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from waiting import WITHIN, ended, until

from acclimate_competitions import digests
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.cluster import RayRunner
from acclimate_runners.local import LocalRunner


def children(mark: str) -> list[int]:
    """Process ids of child processes whose command line holds `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
            dead = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            continue
        if "acclimate_runners" in line and mark in line and not dead:
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory):
    """A job, its blobs, and what this machine's runner made of it."""
    folder = tmp_path_factory.mktemp("local")
    blobs = FolderBlobs(folder / "blobs")
    job = tiny.prepare_job(folder, blobs)
    runner = LocalRunner(folder / "work", slots=2)
    status = ended(runner.start("sha256:ab/1", job, blobs))
    runner.close()
    return folder, blobs, job, status


def test_an_attempt_gives_an_outcome_whose_files_are_in_the_blobs(prepared) -> None:
    folder, blobs, job, status = prepared
    assert status.state == "done", status.reason
    assert status.outcome is not None and status.outcome.status == "done"
    assert {(p["task"], p["seed"]) for p in status.outcome.results["prepared"]} == set(job.stages)
    assert len(status.outcome.files) == 2 and all(blobs.has(digest) for digest in status.outcome.files.values())
    assert blobs.has(status.log) and status.network in ("none", "open")
    left = {path.name for path in (folder / "work" / "attempts" / "sha256-ab" / "1").rglob("*") if path.is_file()}
    assert left == {"job.json", "manifest.json", "child.log"}


def test_a_finished_attempt_is_adopted_and_not_run_again(prepared) -> None:
    folder, blobs, job, status = prepared
    again = LocalRunner(folder / "work", slots=1)
    adopted = ended(again.start("sha256:ab/1", job, blobs))
    tries = folder / "work" / "attempts" / "sha256-ab"
    assert adopted.outcome == status.outcome and [path.name for path in tries.iterdir()] == ["1"]
    assert adopted.network == status.network
    # So it is where its runner died before it wrote a note of it.
    for name in blobs.notes("attempts/"):
        blobs.drop_note(name)
    alone = ended(LocalRunner(folder / "work", slots=1).start("sha256:ab/1", job, blobs))
    assert alone.outcome == status.outcome and alone.network == status.network != ""
    # Of another job under the same name nothing is adopted.
    other = replace(job, stages=job.stages[:1])
    fresh = ended(again.start("sha256:ab/1", other, blobs))
    assert fresh.outcome is not None and len(fresh.outcome.files) == 1
    # Nor where a file that the manifest names is gone.
    shutil.rmtree(folder / "work" / "attempts")
    again.start("sha256:ab/2", other, blobs)
    again.close()


def test_a_refused_model_is_an_outcome_and_a_broken_job_is_not(prepared, tmp_path: Path) -> None:
    folder, blobs, job, _ = prepared
    poisoned = tiny.model(tmp_path / "poisoned", seed=3, poisoned=True)
    files = {name: blobs.put(path) for name, path in poisoned.items()}
    runner = LocalRunner(tmp_path / "work", slots=2)
    refused = runner.start("refused", replace(job, model=replace(job.model, files=files)), blobs)
    limits, recipe = replace(job.limits, wall_seconds=0.2), replace(job.recipe, epochs=50_000)
    slow = runner.start("slow", replace(job, limits=limits, recipe=recipe), blobs)
    gone = runner.start("gone", replace(job, tokenizer=digests.of_bytes(b"never stored")), blobs)
    refused_status, slow_status, gone_status = ended(refused), ended(slow), ended(gone)
    assert refused_status.state == "done" and refused_status.outcome is not None
    assert refused_status.outcome.status == "refused" and "NaN" in refused_status.outcome.reason
    assert slow_status.state == "failed" and "ran longer than" in slow_status.reason
    assert slow_status.code == "limit_exceeded" and blobs.has(slow_status.log)
    assert gone_status.state == "failed" and gone_status.code == "blob_unknown"
    runner.close()


def test_a_try_that_was_killed_leaves_its_inputs_no_longer_than_to_the_next(prepared, tmp_path: Path) -> None:
    _, blobs, job, _ = prepared
    left = tmp_path / "work" / "attempts" / "sha256-ef" / "1" / "inputs"
    left.mkdir(parents=True)
    (left / "ab").write_bytes(b"what a killed process was given")
    runner = LocalRunner(tmp_path / "work", slots=1)
    assert ended(runner.start("sha256:ef/1", job, blobs)).state == "done"
    assert not left.exists()
    runner.close()


def test_cancelling_and_closing_leave_no_process(prepared, tmp_path: Path) -> None:
    _, blobs, job, _ = prepared
    endless = replace(job, recipe=replace(job.recipe, epochs=50_000))
    runner = LocalRunner(tmp_path / "work", slots=2)
    handles = [runner.start(name, endless, blobs) for name in ("one", "two")]
    until(lambda: len(children(str(tmp_path))) == 2)
    handles[0].cancel()
    assert ended(handles[0]).code == "cancelled"
    runner.close()
    assert handles[1].poll().code == "cancelled" and children(str(tmp_path)) == []
    # What was cancelled can be started again.
    again = LocalRunner(tmp_path / "work", slots=2)
    assert ended(again.start("one", job, blobs)).state == "done"
    again.close()


FULL = """
import pickle, sys, time
from pathlib import Path
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.local import LocalRunner
job, source, full, work = pickle.loads(Path(sys.argv[1]).read_bytes()), *(FolderBlobs(Path(p)) for p in sys.argv[2:4]), Path(sys.argv[4])
from acclimate_runners import jobs
for digest in jobs.inputs(job):
    full.put(source.path(digest))
filler = full.root / "filler"
with filler.open("wb", buffering=0) as stream:
    try:
        while True:
            stream.write(bytes(512))
    except OSError:
        pass
runner = LocalRunner(work, slots=1)
def ended():
    handle = runner.start("n/1", job, full)
    while (status := handle.poll()).state == "running":
        time.sleep(0.02)
    return status
first = ended()
print(first.state, first.code)
filler.unlink()
second = ended()
print(second.state, len(list(work.glob("attempts/*/*"))) == 1, all(map(full.has, second.outcome.files.values())))
"""


@pytest.mark.slow
def test_a_full_disk_loses_nothing_and_what_was_done_is_not_done_again(prepared, tmp_path: Path) -> None:
    _, blobs, job, _ = prepared
    (tmp_path / "job").write_bytes(pickle.dumps(job))
    (tmp_path / "full").mkdir()
    mounted = f'mount -t tmpfs -o size=200k none "{tmp_path / "full"}" && exec "$@"'
    unshared = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    try:
        subprocess.run([*unshared, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody mount a small disk")
    paths = [str(path) for path in (tmp_path / "job", blobs.root, tmp_path / "full", tmp_path / "work")]
    command = [*unshared, sys.executable, "-c", FULL, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN)
    assert done.stdout.split() == ["failed", "no_space", "done", "True", "True"], done.stderr


@pytest.fixture(scope="module")
def cluster(ray_clusters):
    """A real Ray of a head without seats and two nodes with one seat each."""
    made = ray_clusters()
    for _ in range(2):
        made.add(num_cpus=1, resources={"seat": 1})
    return made


def test_ray_gives_the_same_bytes_and_survives_its_nodes(prepared, cluster, with_token, tmp_path: Path) -> None:
    attempts = str(tmp_path / "work" / "attempts")
    _, blobs, job, local = prepared
    before = signal.getsignal(signal.SIGTERM)
    runner = RayRunner(tmp_path / "work", cluster.address, resources={"seat": 1})
    try:
        assert runner.slots == 2 and signal.getsignal(signal.SIGTERM) is before
        # 1. Two attempts at once, on two nodes; the bytes are those of this machine's runner.
        endless = replace(job, recipe=replace(job.recipe, epochs=50_000))
        done, first = runner.start("sha256:c/1", job, blobs), runner.start("sha256:f/1", endless, blobs)
        status = ended(done)
        assert status.state == "done", status.reason
        assert status.outcome is not None and local.outcome is not None
        assert status.outcome.files == local.outcome.files and blobs.has(status.log)
        # 2. An attempt that runs is found by its name, not started again.
        second = runner.start("sha256:f/1", endless, blobs)
        until(lambda: first.poll().step > 0 and second.poll().step > 0)
        assert len(children(f"{attempts}/sha256-f/")) == 1
        # 3. An actor that is killed takes its child along, and both handles say so.
        lost = runner.start("sha256:1/1", endless, blobs)
        os.kill(owner_of(children(f"{attempts}/sha256-f/")[0]), signal.SIGKILL)
        assert "actor is gone" in ended(first).reason and ended(second).state == "failed"
        until(lambda: not children(f"{attempts}/sha256-f/"))
        # 4. Cancelling ends actor and child.
        cancelled = runner.start("sha256:2/1", endless, blobs)
        until(lambda: children(f"{attempts}/sha256-2/") and children(f"{attempts}/sha256-1/"))
        cancelled.cancel()
        assert cancelled.poll().code == "cancelled"
        until(lambda: not children(f"{attempts}/sha256-2/"))
        # 5. A node that goes away takes its attempt along.
        for number in range(2):
            cluster.remove(number)
        assert "actor is gone" in ended(lost).reason
        until(lambda: not children(f"{attempts}/sha256-1/"))
    finally:
        runner.close()
    assert children(f"{attempts}/sha256-") == []


def owner_of(pid: int) -> int:
    """The process that holds the other end of a child's standard input; its parent may be a fork-server."""
    pipe = Path(f"/proc/{pid}/fd/0").readlink()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != pid and any(file.readlink() == pipe for file in (folder / "fd").iterdir()):
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError(f"nobody holds the pipe of {pid}")
