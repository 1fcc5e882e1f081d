import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
from waiting import WITHIN

from acclimate_runners import isolation, jobs
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.isolation import Child, Ended
from acclimate_runners.jobs import Job
from acclimate_runners.nursery import Nursery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a fork-server")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[FolderBlobs, Job]:
    folder = tmp_path_factory.mktemp("job")
    blobs = FolderBlobs(folder / "blobs")
    return blobs, tiny.prepare_job(folder, blobs)


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return Nursery()


def laid_out(folder: Path, made: tuple[FolderBlobs, Job], **changes: object) -> tuple[Path, Job]:
    blobs, job = made
    job = replace(job, **changes)
    for name in ("inputs", "out"):
        (folder / name).mkdir(parents=True)
    (folder / "job.json").write_text(jobs.to_json(job), "utf-8")
    for digest in jobs.inputs(job):
        blobs.get(digest, folder / "inputs" / digest[7:])
    return folder, job


def endless(made: tuple[FolderBlobs, Job]) -> dict[str, object]:
    return {"recipe": replace(made[1].recipe, epochs=500_000)}


def start(given: tuple[Path, Job], nursery: Nursery | None, stop: threading.Event | None = None) -> Child:
    folder, job = given
    fork = None if nursery is None else partial(nursery.start, stop=stop or threading.Event())
    return isolation.spawn(folder, limits=job.limits, threads=job.recipe.threads, fork=fork)


def run(given: tuple[Path, Job], nursery: Nursery | None) -> tuple[Child, Ended]:
    child = start(given, nursery)
    return child, child.supervise(threading.Event())


@contextmanager
def running(given: tuple[Path, Job], nursery: Nursery) -> Iterator[tuple[Child, list[Ended]]]:
    """A child that is at work, supervised by a thread; killed in the end."""
    stop, ended = threading.Event(), list[Ended]()
    child = start(given, nursery)
    thread = threading.Thread(target=lambda: ended.append(child.supervise(stop)))
    thread.start()
    try:
        wait_until(lambda: child.progress.step > 0 or ended)
        assert not ended, ended
        yield child, ended
    finally:
        stop.set()
        thread.join(WITHIN)
    assert len(ended) == 1


def wait_until(condition, *, within: float = WITHIN) -> None:
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return ["gone", "0"]


def gone(pid: int) -> bool:
    # PID 1 of a container may never reap what is left to it.
    return stat(pid)[0] in ("gone", "Z", "X")


def parent_of(pid: int) -> int:
    return int(stat(pid)[1])


def children_of(pid: int) -> list[int]:
    return [int(n) for f in Path(f"/proc/{pid}/task").glob("*/children") for n in f.read_text().split()]


def test_a_server_that_was_begun_before_is_the_one_that_forks(tmp_path: Path, made) -> None:
    nursery, (folder, job) = Nursery(), laid_out(tmp_path, made)
    before = set(children_of(os.getpid()))
    nursery.begin(isolation.environment(tmp_path / "elsewhere", threads=job.recipe.threads))
    wait_until(lambda: set(children_of(os.getpid())) - before)
    (server,) = set(children_of(os.getpid())) - before
    child = start((folder, job), nursery)
    assert parent_of(child.pid) == server
    child.kill()
    child.supervise(threading.Event())


@pytest.mark.slow
def test_a_forked_child_makes_the_bytes_of_a_fresh_process(tmp_path: Path, made, nursery: Nursery) -> None:
    outcomes = {}
    for threads in (1, 2):
        recipe = replace(made[1].recipe, threads=threads)
        for kind, used in (("fresh", None), ("forked", nursery), ("again", nursery)):
            given = laid_out(tmp_path / kind / str(threads), made, recipe=recipe)
            child, ended = run(given, used)
            assert ended == Ended("") and child.isolation is not None, (given[0] / "child.log").read_text()
            assert child.isolation.parent_death
            outcomes[kind, threads] = jobs.read_outcome(given[0])
    for threads in (1, 2):
        fresh, forked = outcomes["fresh", threads], outcomes["forked", threads]
        assert fresh.files and fresh.files == forked.files == outcomes["again", threads].files
        assert (fresh.hardware, fresh.versions) == (forked.hardware, forked.versions)
        assert [p["losses"] for p in fresh.results["prepared"]] == [p["losses"] for p in forked.results["prepared"]]


def contained(pid: int) -> dict[str, object]:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    wanted = ("NoNewPrivs", "SigBlk", "SigIgn", "Umask", "Seccomp", "CapEff")
    limits = [line.split() for line in (process / "limits").read_text().splitlines()]
    return {
        **{name: status[name] for name in wanted},
        "limits": limits,
        "files": {
            int(f.name): (f.readlink().as_posix().split(":")[0], (process / "fdinfo" / f.name).read_text().split()[3])
            for f in (process / "fd").iterdir()
        },
        "folder": (process / "cwd").readlink().name,
        "leads": os.getsid(pid) == os.getpgid(pid) == pid,
        "own network": (process / "ns" / "net").readlink() != Path("/proc/self/ns/net").readlink(),
    }


def test_a_forked_child_is_contained_as_a_fresh_one(tmp_path: Path, made, nursery: Nursery) -> None:
    secret = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(secret, True)
    fresh, forked = (laid_out(tmp_path / kind / "1", made, **endless(made)) for kind in ("fresh", "forked"))
    try:
        with (
            running(fresh, None) as (one, _),
            running(forked, nursery) as (two, _),
            running_again(tmp_path, made, nursery),
        ):
            seen = contained(one.pid), contained(two.pid)
            title = Path(f"/proc/{two.pid}/cmdline").read_bytes().decode()
            server = parent_of(two.pid)
            assert parent_of(one.pid) == os.getpid() == parent_of(server)
            assert one.isolation == two.isolation
    finally:
        os.close(secret)
    assert seen[0] == seen[1]
    assert seen[0]["files"].keys() == {0, 1, 2, 3} and seen[0]["leads"]
    assert f"-m acclimate_runners {forked[0]}" in title


@contextmanager
def running_again(folder: Path, made, nursery: Nursery):
    """A second child of the server at the same time, of whose files the first must have none."""
    with running(laid_out(folder / "second" / "1", made, **endless(made)), nursery) as (child, _):
        yield child


PROBE = """
import json, os, socket, sys, tempfile
from acclimate_runners import __main__ as program, nursery
def main(arguments):
    print(json.dumps([dict(os.environ), os.getcwd(), tempfile.gettempdir(), arguments]))
    return 7
program.main, folder = main, sys.argv[1]
tempfile.gettempdir()
os.environ["ACCLIMATE_TOKEN"] = "acc_secret"
nursery._become({"folder": folder, "environment": {"TMPDIR": folder, "A": "b"}, "memory": 5}, [0, 1, 2], os.getppid(), socket.socketpair()[0])
"""


def test_a_forked_child_sees_the_environment_it_was_asked_for(
    tmp_path: Path, made, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1. The server has a child's environment, and none of its owner's secrets.
    monkeypatch.setenv("ACCLIMATE_TOKEN", "acc_secret")
    with running(laid_out(tmp_path / "job", made, **endless(made)), nursery) as (child, _):
        words = Path(f"/proc/{parent_of(child.pid)}/environ").read_bytes().split(b"\0")
    variables = dict(word.decode().split("=", 1) for word in words if word)
    asked = isolation.environment(tmp_path, threads=1)
    assert variables == {**asked, "HOME": "/nonexistent", "TMPDIR": "/nonexistent"}
    # 2. A fork has none of the server's.
    command = [sys.executable, "-c", PROBE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    arguments = [str(tmp_path), "--parent", str(os.getpid()), "--progress", "3", "--memory", "5"]
    assert json.loads(done.stdout) == [{"TMPDIR": str(tmp_path), "A": "b"}, str(tmp_path), str(tmp_path), arguments]


def test_ends_of_children_are_reported_and_nothing_is_left(tmp_path: Path, made, nursery: Nursery) -> None:
    limits = made[1].limits
    # 1. Killed from outside.
    with running(laid_out(tmp_path / "killed", made, **endless(made)), nursery) as (child, ended):
        server = parent_of(child.pid)
        os.kill(child.pid, signal.SIGSEGV)
        wait_until(lambda: ended)
        assert "killed by SIGSEGV" in ended[0].reason
    # 2. Its limits hold.
    slow = laid_out(tmp_path / "slow", made, **endless(made), limits=replace(limits, wall_seconds=1.0))
    assert "ran longer than the 1 s allowed" in run(slow, nursery)[1].reason
    large = laid_out(tmp_path / "large", made, **endless(made), limits=replace(limits, memory=100 << 20))
    assert "0.10 GiB are allowed" in run(large, nursery)[1].reason
    # 3. It fails by itself, with an exit status and a traceback.
    broken = laid_out(tmp_path / "broken", made)
    (broken[0] / "job.json").write_text("{")
    assert run(broken, nursery)[1].reason.startswith("exited with status 1: json.decoder.JSONDecodeError")
    # 4. Cancelled while it waits for the server: no child.
    stop, new, before = threading.Event(), Nursery(), set(children_of(os.getpid()))
    new.begin(isolation.environment(tmp_path / "elsewhere", threads=made[1].recipe.threads))
    wait_until(lambda: set(children_of(os.getpid())) - before)
    (mute,) = set(children_of(os.getpid())) - before
    os.kill(mute, signal.SIGSTOP)
    threading.Timer(0.2, stop.set).start()
    cancelled = start(laid_out(tmp_path / "cancelled", made, **endless(made)), new, stop)
    assert cancelled.supervise(stop) == Ended("cancelled", "cancelled") and stat(mute)[0] == "T"
    os.kill(mute, signal.SIGKILL)
    # 5. Killed the moment it is there, and let go of without a word.
    for number in range(5):
        hasty = start(laid_out(tmp_path / f"hasty-{number}", made, **endless(made)), nursery)
        assert hasty.supervise(stop) == Ended("cancelled", "cancelled")
    (words, told), dropped = os.pipe(), laid_out(tmp_path / "dropped", made, **endless(made))
    variables = isolation.environment(dropped[0], threads=1)
    forked = nursery.start(dropped[0], environment=variables, memory=0, words=told, stop=threading.Event())
    assert forked is not None
    forked._status.close()
    wait_until(lambda: gone(forked.pid))
    for end_ in (forked.stdin, forked.stdout):
        end_.close()
    os.close(words)
    os.close(told)
    # 6. No zombie, no file left in the server.
    wait_until(lambda: not children_of(server))
    assert len(list(Path(f"/proc/{server}/fd").iterdir())) <= 5


@pytest.mark.slow
def test_the_death_of_the_server_ends_its_children_and_the_next_child_has_a_new_one(
    tmp_path: Path, made, nursery: Nursery
) -> None:
    with running(laid_out(tmp_path / "one", made, **endless(made)), nursery) as (child, ended):
        server = parent_of(child.pid)
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: ended and gone(child.pid))
        assert "killed by SIGKILL" in ended[0].reason
    again, ended_again = run(laid_out(tmp_path / "two", made), nursery)
    assert ended_again == Ended("") and again.isolation is not None
    wait_until(lambda: gone(server) and server not in children_of(os.getpid()))


def test_without_a_server_children_are_started_plainly(
    tmp_path: Path, made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nursery = Nursery()
    given = laid_out(tmp_path / "one", made, **endless(made))
    with monkeypatch.context() as patched:
        # The interpreter that it is to be started with is not there.
        patched.setattr(sys, "executable", str(tmp_path / "no-python"))
        assert nursery.start(tmp_path, environment={}, memory=0, words=1, stop=threading.Event()) is None
    assert "no fork-server" in caplog.text
    stop = threading.Event()
    child = start(given, nursery, stop)
    assert parent_of(child.pid) == os.getpid()
    stop.set()
    assert child.supervise(stop) == Ended("cancelled", "cancelled")


OWNER = """
import pickle, sys, threading
from functools import partial
from pathlib import Path
from acclimate_runners import isolation
from acclimate_runners.nursery import Nursery
job, folder, shared = pickle.loads(sys.stdin.buffer.read())
fork = partial(Nursery(shared=shared, linger=1.5).start, stop=threading.Event())
child = isolation.spawn(folder, limits=job.limits, threads=1, fork=fork)
print(child.pid, flush=True)
child.supervise(threading.Event())
"""


def owner(given: tuple[Path, Job], shared: Path | None) -> tuple["subprocess.Popen[bytes]", int]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin as stream:
        stream.write(pickle.dumps((given[1], given[0], shared)))
    return process, int(process.stdout.readline())


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(WITHIN)
    assert process.stdout is not None
    process.stdout.close()


def test_the_death_of_the_owner_ends_server_and_child(tmp_path: Path, made) -> None:
    process, child = owner(laid_out(tmp_path / "one", made, **endless(made)), None)
    server = parent_of(child)
    assert parent_of(server) == process.pid
    end(process)
    wait_until(lambda: gone(child) and gone(server))


@pytest.mark.slow
def test_processes_of_a_folder_share_a_server_that_ends_when_it_is_idle(tmp_path: Path, made) -> None:
    first, one = owner(laid_out(tmp_path / "one", made, **endless(made)), tmp_path)
    second, two = owner(laid_out(tmp_path / "two", made, **endless(made)), tmp_path)
    server = parent_of(one)
    assert server == parent_of(two) and server not in children_of(first.pid)
    # Who started it goes, with its own child alone.
    end(first)
    wait_until(lambda: gone(one))
    assert not gone(two) and not gone(server)
    end(second)
    wait_until(lambda: gone(two) and gone(server))
