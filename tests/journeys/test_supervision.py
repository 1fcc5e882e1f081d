"""Supervision alone, with small programs; the locks and ports that it looks at."""

import fcntl
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ups import PATIENCE, of_sessions, until

from acclimate import config, locks, ports, supervision
from acclimate_competitions.errors import Refusal


def program(name: str, source: str, *, grace: float = 20.0) -> supervision.Part:
    return supervision.Part(name, [sys.executable, "-c", source], grace=grace)


@pytest.fixture
def said() -> list[str]:
    return []


def supervised(folder: Path, said: list[str], *parts: supervision.Part, **sizes: int) -> supervision.Supervisor:
    supervisor = supervision.Supervisor(folder / "logs", say=said.append, **sizes)
    for part in parts:
        supervisor.start(part)
    return supervisor


def stepped(supervisor: supervision.Supervisor, found: Callable[[], Any]) -> None:
    def look() -> Any:
        supervisor.step()
        return found()

    until(look, "what the parts do")


def test_logs_begin_anew_when_they_are_full_and_long_lines_are_cut(tmp_path: Path, said: list[str]) -> None:
    source = "print('x' * 3_000_000); [print(f'{n:010d}') for n in range(3000)]; import sys; print('end', flush=True); sys.stdin.read()"
    supervisor = supervised(tmp_path, said, program("busy", source), size=10_000, keep=2)
    log = tmp_path / "logs" / "busy.log"
    stepped(supervisor, lambda: log.read_text("utf-8").endswith("end\n"))
    supervisor.stop()
    files = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in files] == ["busy.log", "busy.log.1", "busy.log.2"]
    assert all(path.stat().st_size <= 10_000 for path in files)
    lines = "".join(path.read_text("utf-8") for path in reversed(files)).split()
    assert lines[-1] == "end"
    assert [int(line) for line in lines[:-1]] == list(range(3000 - len(lines) + 1, 3000))

    supervisor = supervised(tmp_path / "long", said, program("busy", source))
    log = tmp_path / "long" / "logs" / "busy.log"
    stepped(supervisor, lambda: log.exists() and log.read_text("utf-8").endswith("end\n"))
    supervisor.stop()
    first = log.read_text("utf-8").splitlines()[0]
    assert first == "x" * 1_000_000 + " …"


def test_a_part_that_keeps_crashing_at_its_start_ends_the_supervision(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "PAUSES", (0.1, 0.3))
    supervisor = supervised(tmp_path, said, program("weak", "raise SystemExit('no luck')"))
    with pytest.raises(Refusal) as caught:
        stepped(supervisor, lambda: False)
    supervisor.stop()
    assert caught.value.code == "server_unreachable"
    assert "weak ended 5 times at its start, the last time with status 1" in caught.value.sentence
    assert "no luck" in caught.value.hint
    pauses = [float(found[1]) for line in said if (found := re.search(r"again in (\S+) s", line))]
    assert pauses == [0.1, 0.2, 0.3, 0.3]


def test_a_part_for_which_there_is_no_room_is_tried_again(tmp_path: Path, said: list[str]) -> None:
    supervisor = supervised(tmp_path, said, program("small", "import sys; print('on', flush=True); sys.stdin.read()"))
    log = tmp_path / "logs" / "small.log"
    stepped(supervisor, lambda: log.read_text("utf-8") == "on\n")
    pid = supervisor.pid("small")
    assert pid is not None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.kill(pid, signal.SIGKILL)
    stepped(supervisor, lambda: said)
    # No file can be opened, so no pipe for a child either.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        stepped(supervisor, lambda: len(said) == 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert said[1] == "small can't be started: Too many open files; it is tried again in 1 s"
    stepped(supervisor, lambda: log.read_text("utf-8") == "on\non\n")
    assert supervisor.stop() == []
    assert said[2].startswith("small started again")


def test_a_part_that_can_not_be_started_at_all_is_refused(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(Refusal) as caught:
        supervised(tmp_path, said, supervision.Part("nothing", [str(tmp_path / "nothing")]))
    assert caught.value.code == "server_unreachable"
    assert "acclimate nothing can't be started: No such file or directory" in caught.value.sentence


@pytest.mark.parametrize(
    "line",
    [
        '{"event":' + "[" * 200_000,
        json.dumps({"event": supervision.REFUSED, "code": [], "problems": {}}),
        json.dumps({"event": "one that its listener fails at"}),
        json.dumps({"event": {"event": 1}}),
    ],
    ids=["deep", "refused", "event", "nested"],
)
def test_whatever_a_part_writes_it_is_read_on(tmp_path: Path, line: str) -> None:
    def heard(part: str, event: Mapping[str, Any]) -> None:
        raise ValueError(event)

    file = tmp_path / "line"
    file.write_text(line)
    # More than a pipe holds.
    source = f"print(open({str(file)!r}).read()); [print('x' * 1000) for _ in range(500)]; print('done', flush=True)"
    supervisor = supervision.Supervisor(tmp_path / "logs", heard=heard)
    supervisor.start(program("odd", f"{source}; import sys; sys.stdin.read()"))
    stepped(supervisor, lambda: (tmp_path / "logs" / "odd.log").read_text("utf-8").endswith("done\n"))
    assert supervisor.stop() == []


def test_a_part_that_was_ready_is_started_again_whatever_it_says(tmp_path: Path, said: list[str]) -> None:
    mark = tmp_path / "times"
    event = json.dumps(
        {"event": supervision.REFUSED, "code": "busy", "sentence": "not now", "hint": "", "problems": []}
    )
    source = (
        f"print({event!r}); p = __import__('pathlib').Path({str(mark)!r}); p.open('a').write('x'); raise SystemExit(1)"
    )
    supervisor = supervised(tmp_path, said, program("moody", source))
    supervisor.establish("moody")
    stepped(supervisor, lambda: mark.exists() and len(mark.read_text()) >= 3)
    supervisor.stop()
    assert "moody ended: not now; it is started again in 0.5 s" in said[0]


def test_parts_end_in_order_and_a_stubborn_one_is_killed_with_what_it_started(tmp_path: Path, said: list[str]) -> None:
    ends = tmp_path / "ends"
    polite = (
        "import signal, sys; h = lambda *_: (open({path!r}, 'a').write({name!r} + ' '), sys.exit(0)); "
        "signal.signal(signal.SIGTERM, h); print('on', flush=True); signal.pause()"
    )
    stubborn = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']); print('on', flush=True)\n"
        "while True: signal.pause()"
    )
    parts = [program(name, polite.format(path=str(ends), name=name)) for name in ("mlflow", "api", "dispatch")]
    supervisor = supervised(tmp_path, said, *parts, program("stubborn", stubborn, grace=0.2))
    logs = [tmp_path / "logs" / f"{name}.log" for name in ("mlflow", "api", "dispatch", "stubborn")]
    stepped(supervisor, lambda: all(log.read_text("utf-8") == "on\n" for log in logs))
    pid = supervisor.pid("stubborn")
    assert pid is not None
    assert len(of_sessions({pid})) == 2
    assert supervisor.stop(order=("dispatch", "api", "mlflow")) == ["stubborn"]
    assert said == [f"stubborn did not end in time and was killed (see {logs[-1]})"]
    assert ends.read_text().split() == ["dispatch", "api", "mlflow"]
    until(lambda: not of_sessions({pid}), "the stubborn one's end")


def test_a_port_that_is_being_given_up_is_waited_for() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with pytest.raises(Refusal):
        ports.free("127.0.0.1", port, option="--port")
    threading.Timer(0.2, taken.close).start()
    assert ports.free("127.0.0.1", port, option="--port", patience=PATIENCE) == port
    with pytest.raises(Refusal, match="can't listen on no-such-host.invalid:1"):
        ports.free("no-such-host.invalid", 1, option="--host")


# ---- locks -----------------------------------------------------------------------------------------------------


def test_a_part_beside_it_is_waited_for_and_then_refused(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "dispatcher.lock"
    line = (
        f"import fcntl, sys, time; f = open({str(path)!r}, 'w'); fcntl.flock(f, 2); f.write('123'); f.flush(); print()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{line}; sys.stdout.flush(); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        with pytest.raises(Refusal) as caught:
            locks.await_free([tmp_path / "api.lock", path], within=2.2, say=said.append)
        assert caught.value.code == "busy"
        assert "process 123" in caught.value.sentence
        assert said == ["waiting for process 123, which still runs on this data folder (dispatcher.lock)"]
        threading.Timer(0.3, other.stdin.close).start()
        locks.await_free([tmp_path / "api.lock", path], within=PATIENCE)


def test_who_only_looks_at_a_lock_keeps_nobody_from_it(tmp_path: Path) -> None:
    settings = config.load(tmp_path, environ={})
    path = tmp_path / "api.lock"
    path.touch(mode=0o644)
    with path.open() as looking:
        # As one who looks does, only for longer.
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert locks.holder(path) == ""
        threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with config.lock(settings, "api"):
            assert locks.holder(path) == f"process {os.getpid()}"
            with pytest.raises(Refusal, match=f"process {os.getpid()} runs the api") as caught:
                config.lock(settings, "api")
            assert caught.value.code == "busy"
    assert locks.holder(path) == ""


def test_a_lock_is_its_owners_alone(tmp_path: Path) -> None:
    settings = config.load(tmp_path, environ={})
    before = os.umask(0o022)
    try:
        (tmp_path / "api.lock").touch(mode=0o644)
        for part in ("api", "up"):
            config.lock(settings, part).close()
            assert (tmp_path / f"{part}.lock").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
