import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from waiting import WITHIN

from acclimate_runners import isolation
from acclimate_runners.isolation import Child, Ended
from acclimate_runners.jobs import Limits
from acclimate_runners.oom_kills import OomKills

CONFINED = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from acclimate_runners import isolation
folder, parent, words, memory = Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[5]), int(sys.argv[7])
isolation.tell(words, asdict(isolation.confine(parent=parent, memory=memory)))
"""
PLENTY = Limits((), 10**9, 10**9, memory=2 << 30, wall_seconds=3600)


def child(folder: Path, body: str, *, limits: Limits = PLENTY) -> tuple[Child, Ended]:
    spawned = start(folder, body, limits=limits)
    return spawned, spawned.supervise(threading.Event())


def start(folder: Path, body: str, *, limits: Limits = PLENTY) -> Child:
    script = folder / "script.py"
    script.write_text(CONFINED + textwrap.dedent(body))
    return isolation.spawn(folder, limits=limits, threads=3, program=[str(script)])


def gone(pid: int, *, within: float = WITHIN) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_child_sees_nothing_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCLIMATE_TOKEN", "acc_secret")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    secret = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        _, ended = child(
            tmp_path,
            """
            import resource, signal
            seen = {
                "environment": dict(os.environ),
                "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
                "core": resource.getrlimit(resource.RLIMIT_CORE),
                "session": os.getsid(0) == os.getpid(),
                "open": sorted(int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
                "words": words,
                "path": sys.path,
            }
            (folder / "seen.json").write_text(json.dumps(seen))
            """,
        )
    finally:
        os.close(secret)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert ended == Ended("")
    assert set(seen["environment"]) - {"LC_CTYPE"} == set(isolation.environment(tmp_path, threads=3))
    assert seen["environment"]["OMP_NUM_THREADS"] == "3" and seen["environment"]["HOME"] == str(tmp_path)
    assert seen["blocked"] == [] and seen["core"] == [0, 0] and seen["session"]
    assert set(seen["open"]) <= {0, 1, 2, seen["words"]}
    assert "" not in seen["path"] and str(tmp_path) not in seen["path"]


def test_a_child_has_no_network_or_says_that_it_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        spawned, ended = child(
            tmp_path,
            f"""
            import socket
            try:
                socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=2)
                print("connected")
            except OSError:
                print("unreachable")
            """,
        )
    assert ended == Ended("") and spawned.isolation is not None
    said = (tmp_path / "child.log").read_text().strip()
    assert said == {"none": "unreachable", "open": "connected"}[spawned.isolation.network]
    assert spawned.isolation.parent_death == sys.platform.startswith("linux")


def test_progress_and_the_reason_of_a_failure_are_heard(tmp_path: Path) -> None:
    spawned, ended = child(
        tmp_path,
        """
        os.write(words, b"not json\\n[1]\\n{}\\n")
        for step in range(1, 2001):
            isolation.tell(words, {"step": step, "total": 2000, "what": "digit, lr 0.002"})
        raise RuntimeError("the disk is on fire")
        """,
    )
    assert spawned.progress == isolation.Progress(2000, 2000, "digit, lr 0.002")
    assert ended.reason == "exited with status 1: RuntimeError: the disk is on fire"


@pytest.mark.parametrize(
    ("body", "limits", "reason", "code"),
    [
        (
            "kept = [b'x' * (1 << 20) for _ in range(400)]; time.sleep(1000)",
            {"memory": 200 << 20},
            "0.20 GiB are allowed",
            "out_of_memory",
        ),
        ("kept = bytearray(1 << 40)", {"memory": 200 << 20}, "MemoryError", "job_failed"),
        ("sys.exit(isolation.NO_MEMORY)", {"memory": 200 << 20}, "more memory than the 0.20 GiB", "out_of_memory"),
        (
            "print(\"terminate called after throwing an instance of 'std::bad_alloc'\", flush=True); os.abort()",
            {},
            "bad_alloc",
            "out_of_memory",
        ),
        (
            "print('memory allocation of 8589934592 bytes failed', flush=True); os.abort()",
            {},
            "8589934592",
            "out_of_memory",
        ),
        (
            # A file of a model that is read while there is too little memory is no invalid model.
            """
            from acclimate_competitions.errors import Refusal
            from acclimate_runners import __main__, packing
            (folder / "tokenizer.json").touch()
            os.truncate(folder / "tokenizer.json", 64 << 30)
            try:
                packing.load_tokenizer(folder / "tokenizer.json")
            except Refusal as refusal:
                assert refusal.code == "model_invalid"
                sys.exit(__main__._shortage(refusal.__cause__, by_words=False))
            """,
            {"memory": 200 << 20},
            "more memory than the 0.20 GiB",
            "out_of_memory",
        ),
        ("os.abort()", {}, "killed by SIGABRT", "job_failed"),
        ("sys.exit(isolation.NO_SPACE)", {}, "exited with status", "no_space"),
        ("time.sleep(1000)", {"wall_seconds": 0.5}, "ran longer than", "limit_exceeded"),
        ("os.kill(os.getpid(), 11)", {}, "killed by SIGSEGV", "job_failed"),
        ("os.kill(os.getpid(), 9)", {}, "killed by SIGKILL, by somebody else than the kernel", "runner_failed"),
        ("raise ValueError('a bug of ours')", {}, "ValueError: a bug of ours", "job_failed"),
    ],
)
def test_a_child_that_ends_early_says_why_and_whose_fault_it_is(
    tmp_path: Path, body: str, limits: dict[str, int], reason: str, code: str
) -> None:
    given = Limits((), 1, 1, **{"memory": PLENTY.memory, "wall_seconds": PLENTY.wall_seconds, **limits})
    spawned, ended = child(tmp_path, body, limits=given)
    assert reason in ended.reason and ended.code == code
    assert "perhaps" not in ended.reason  # the kernel says how many it killed for want of memory
    assert gone(spawned.pid)


def test_a_shortage_has_an_exit_status_of_its_own() -> None:
    import torch

    from acclimate_competitions.errors import Refusal
    from acclimate_runners.__main__ import _shortage

    torchs = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    assert _shortage(MemoryError()) == _shortage(torchs) == isolation.NO_MEMORY
    assert _shortage(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))) == isolation.NO_MEMORY
    # As torch.cuda raises it, and as it says it where a kernel meets it.
    assert _shortage(torch.OutOfMemoryError("Tried to allocate 2.00 GiB")) == isolation.NO_MEMORY
    assert _shortage(torch.cuda.OutOfMemoryError("no words that anybody knows")) == isolation.NO_MEMORY
    assert _shortage(RuntimeError("CUDA error: out of memory")) == isolation.NO_MEMORY
    # What only bears its name is another's.
    assert _shortage(type("OutOfMemoryError", (Exception,), {})("the queue is full")) == 0
    # Words that a model may have put there say nothing; types do.
    assert _shortage(ValueError("CUDA out of memory: No space left on device"), by_words=False) == 0
    assert _shortage(torch.OutOfMemoryError(), by_words=False) == isolation.NO_MEMORY and _shortage(None) == 0
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    assert _shortage(full) == _shortage(said) == _shortage(Refusal("no_space", "full")) == isolation.NO_SPACE
    assert _shortage(OSError(errno.EACCES, "no")) == _shortage(RuntimeError("shape mismatch")) == 0


@pytest.mark.gpu
def test_what_a_device_refuses_is_known_by_its_type() -> None:
    import torch

    from acclimate_runners.__main__ import _shortage

    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
    assert _shortage(raised.value, by_words=False) == isolation.NO_MEMORY


GROUP = """
import os, sys, threading
from pathlib import Path
from acclimate_runners import isolation
from acclimate_runners.jobs import Limits
Path(sys.argv[2]).write_text(str(os.getpid()))
folder = Path(sys.argv[1])
child = isolation.spawn(folder, limits=Limits((), 1, 1, 2 << 30, 3600.0), threads=1, program=[str(folder / "script.py")])
print(child.supervise(threading.Event()).code)
"""


def test_what_the_kernel_kills_for_want_of_memory_is_told_from_what_others_kill(tmp_path: Path) -> None:
    groups = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    group = groups / f"acclimate-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("this process may make no control group")
    try:
        limit = next((path for path in (group / "memory.limit_in_bytes", group / "memory.max") if path.exists()), None)
        if limit is None:
            pytest.skip("its groups have no limit of memory")
        limit.write_text(str(200 << 20))
        said = []
        for body in ("kept = [b'x' * (1 << 20) for _ in range(400)]", "os.kill(os.getpid(), 9)"):
            (tmp_path / "script.py").write_text(CONFINED + body)
            command = [sys.executable, "-c", GROUP, str(tmp_path), str(group / "cgroup.procs")]
            said.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
        # The second comes within seconds of the first: a kill that was counted before it is not its own.
        assert said == ["machine_memory", "runner_failed"]
    finally:
        group.rmdir()


def test_the_counts_of_kills_are_read_in_either_form(tmp_path: Path) -> None:
    kills = OomKills(os.getpid())
    assert not kills.grown()
    for text in ("low 0\nhigh 0\noom 3\noom_kill {}\n", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"):
        path = tmp_path / "counts"
        path.write_text(text.format(7))
        kills._files = [(path, "oom_kill")]
        kills._before = kills._last = kills._count()
        assert not kills.grown()
        path.write_text(text.format(8))
        assert kills.grown()


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    child(tmp_path, "print('first'); [print('x' * 999) for _ in range(3000)]; print('last words')")
    log = (tmp_path / "child.log").read_bytes()
    assert log.startswith(b"first") and log.endswith(b"last words\n") and b"bytes more" in log
    assert len(log) < isolation.LOG_BYTES + 5000


def test_cancelling_kills_the_whole_group(tmp_path: Path) -> None:
    body = """
    import subprocess
    (folder / "grandchild").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    isolation.tell(words, {"step": 1, "total": 1})
    time.sleep(1000)
    """
    spawned, stop = start(tmp_path, body), threading.Event()
    threading.Timer(0.1, lambda: (wait_for(tmp_path / "grandchild"), stop.set())).start()
    assert spawned.supervise(stop) == Ended("cancelled", "cancelled")
    assert gone(spawned.pid) and gone(int((tmp_path / "grandchild").read_text()))


def test_nothing_of_a_child_outlives_its_end(tmp_path: Path) -> None:
    _, ended = child(
        tmp_path,
        """
        import subprocess
        (folder / "grandchild").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        """,
    )
    assert ended == Ended("") and gone(int((tmp_path / "grandchild").read_text()))


PARENT = """
import sys, threading
from pathlib import Path
from acclimate_runners import isolation
from acclimate_runners.jobs import Limits
folder = Path(sys.argv[1])
child = isolation.spawn(folder, limits=Limits((), 1, 1, 2 << 30, 3600.0), threads=1, program=[str(folder / "script.py")])
child.supervise(threading.Event())
"""


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CONFINED + "(folder / 'pid').write_text(str(os.getpid())); time.sleep(1000)")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    pid = int(wait_for(tmp_path / "pid"))
    assert not gone(pid, within=0.2)
    parent.kill()
    parent.wait()
    assert gone(pid)


def test_a_child_ends_at_the_end_of_its_pipe(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CONFINED + "(folder / 'pid').write_text(str(os.getpid())); time.sleep(1000)")
    read_end, write_end = os.pipe()
    arguments = [str(tmp_path), "--parent", str(os.getpid()), "--progress", str(write_end), "--memory", "0"]
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), *arguments],
        stdin=subprocess.PIPE,
        pass_fds=[write_end],
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert int(wait_for(tmp_path / "pid")) == process.pid
        process.stdin.close()
        assert process.wait(WITHIN) == -signal.SIGKILL
    os.close(read_end)
    os.close(write_end)


def wait_for(path: Path) -> str:
    until = time.monotonic() + WITHIN
    while time.monotonic() < until:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path.name} did not come")


def test_what_a_child_could_read_of_its_parent_is_what_the_docstring_says(tmp_path: Path) -> None:
    """Nothing reaches it, but nothing stops it from looking: if this fails, something was contained, and the docstring should say so."""
    _, ended = child(
        tmp_path,
        """
        seen = {"own": sorted(os.environ), "parent": Path(f"/proc/{parent}/environ").read_bytes() != b""}
        (folder / "seen.json").write_text(json.dumps(seen))
        """,
    )
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert ended == Ended("")
    assert not [name for name in seen["own"] if name.startswith(("AWS_", "RAY_", "ACCLIMATE_"))]
    assert seen["parent"] and "/proc/<pid>/environ" in str(isolation.__doc__)
