"""`acclimate up` as an operator runs it: real processes, signals, ports and files. And supervision alone, with small programs."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from acclimate import supervision
from acclimate_competitions.errors import Refusal

pytest.importorskip("mlflow")
pytest.importorskip("fastapi")

PATIENCE = 120.0
NEXT_TO_PYTHON = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ACCLIMATE_", "MLFLOW_"))}
    return {**clean, "PATH": f"{NEXT_TO_PYTHON}{os.pathsep}{os.environ['PATH']}", **more}


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (result := found()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)
    return result


def processes() -> dict[int, tuple[int, int]]:
    """pid -> (parent, session) of all that runs; what has ended and waits for its parent doesn't."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if state != "Z":
                table[int(entry.name)] = (int(parent), int(session))
    return table


def children(pid: int) -> set[int]:
    return {one for one, (parent, _) in processes().items() if parent == pid}


def of_sessions(sessions: set[int]) -> set[int]:
    return {pid for pid, (_, session) in processes().items() if session in sessions}


@dataclass
class Up:
    """`acclimate up` under way."""

    process: subprocess.Popen[str]
    out: Path
    err: Path
    sessions: set[int] = field(default_factory=set)

    @property
    def told(self) -> str:
        return self.err.read_text("utf-8")

    @property
    def printed(self) -> str:
        return self.out.read_text("utf-8")

    def ready(self) -> "Up":
        def there() -> bool:
            assert self.process.poll() is None, self.told + self.printed
            # Of the JSON line and of the page for people, the end is written last.
            return self.printed.endswith("\n") and ("Ctrl-C" in self.printed or self.printed.startswith("{"))

        until(there, "ready")
        self.look()
        return self

    def look(self) -> None:
        """Remember the sessions of its parts."""
        self.sessions |= children(self.process.pid)

    @property
    def facts(self) -> Any:
        return json.loads(self.printed)

    def end(self, number: int) -> int:
        self.look()
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def assert_gone(self) -> None:
        """Nothing of it is left: no part, and nothing that a part started."""
        assert self.sessions
        until(lambda: not of_sessions(self.sessions), f"the end of {of_sessions(self.sessions)}")


class Starter:
    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, list[Up]()

    def __call__(self, data: Path, *arguments: object, **more: str) -> Up:
        number = len(self.made)
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        line = [sys.executable, "-m", "acclimate", "up", "--data", data, "--port", "0", *arguments]
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [str(word) for word in line],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment(**more),
                text=True,
            )
        self.made.append(Up(process, out, err))
        return self.made[-1]

    def close(self) -> None:
        for one in self.made:
            if one.process.poll() is None:
                one.look()
                one.process.kill()
                one.process.wait()
            if one.sessions:
                one.assert_gone()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("ups"))
    yield starter
    starter.close()


LOCAL = ("--runner", "local")


@pytest.fixture(scope="module")
def live(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Up:
    data = tmp_path_factory.mktemp("live") / "data"
    return start(data, *LOCAL, "--mlflow-port", "0", "--json").ready()


def refused(up: Up, code: str) -> dict[str, str]:
    """It ended with a refusal: for people on stderr, and for programs on stdout."""
    assert up.process.wait(PATIENCE) == 1, up.told
    document: dict[str, str] = json.loads(up.printed)["error"]
    assert document["code"] == code, document
    assert f"error: {document['sentence']}\n" in up.told
    assert f"hint: {document['hint']}\n" in up.told
    assert "Traceback" not in up.told
    return document


# ---- answering -----------------------------------------------------------------------------------------------------


def test_one_line_says_where_everything_is(live: Up) -> None:
    facts = live.facts
    assert live.printed.count("\n") == 1
    assert set(facts) == {
        "api", "mlflow", "tracking", "data", "logs", "log_key", "pid", "organizer_invitation",
    }  # fmt: skip
    assert facts["pid"] == live.process.pid
    assert facts["organizer_invitation"].startswith("inv_")
    server = httpx.get(f"{facts['api']}/v1/server", trust_env=False).json()
    assert server["log"] == facts["log_key"]
    assert httpx.get(f"{facts['api']}/readyz", trust_env=False).status_code == 200


def test_mlflow_shows_its_page(live: Up) -> None:
    until(lambda: "MLflow ready" in live.told, "MLflow")
    page = httpx.get(live.facts["mlflow"], trust_env=False, follow_redirects=True)
    assert page.status_code == 200
    assert "<title>MLflow</title>" in page.text


def test_each_part_has_a_log_of_its_own(live: Up) -> None:
    logs = Path(live.facts["logs"])
    assert {"api.log", "dispatch.log", "mlflow.log"} <= {path.name for path in logs.iterdir()}
    assert '"event": "started"' in (logs / "dispatch.log").read_text("utf-8")
    assert all(path.stat().st_mode & 0o077 == 0 for path in logs.iterdir())


def test_a_second_one_on_the_same_folder_is_refused(live: Up, start: Starter) -> None:
    document = refused(start(live.facts["data"], *LOCAL, "--json"), "busy")
    assert f"process {live.process.pid} " in document["sentence"]
    assert "stop process" in document["hint"]


def test_a_part_that_was_killed_is_started_again(live: Up) -> None:
    def dispatcher() -> int | None:
        for pid in children(live.process.pid):
            if b"\0dispatch\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    killed = until(dispatcher, "the dispatcher")
    live.look()
    os.kill(killed, signal.SIGKILL)
    assert until(lambda: (found := dispatcher()) != killed and found, "another dispatcher") != killed
    assert "dispatch ended: by SIGKILL; it is started again in 0.5 s" in live.told
    log = Path(live.facts["logs"]) / "dispatch.log"
    until(lambda: log.read_text("utf-8").count('"event": "started"') >= 2, "its start")
    assert httpx.get(f"{live.facts['api']}/readyz", trust_env=False).status_code == 200


def test_sigterm_ends_everything(live: Up) -> None:
    """The last of those that use `live`."""
    assert live.end(signal.SIGTERM) == 0
    live.assert_gone()
    assert live.told.endswith("stopped\n")
    for line in (Path(live.facts["logs"]) / "dispatch.log", Path(live.facts["logs"]) / "api.log"):
        assert '"event": "stopped"' in line.read_text("utf-8")


# ---- ends and starts -----------------------------------------------------------------------------------------------


def test_killed_it_takes_its_parts_along_and_starts_again_at_once(start: Starter, tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = start(data, *LOCAL, "--mlflow-port", "0", "--json").ready()
    key = first.facts["log_key"]
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    # No waiting here: the next one does that.
    second = start(data, *LOCAL, "--no-mlflow").ready()
    first.assert_gone()
    assert key in second.printed
    run_first_steps(second.printed, tmp_path)
    assert second.end(signal.SIGINT) == 0
    second.assert_gone()


def run_first_steps(page: str, folder: Path) -> None:
    """Every printed command without a blank to fill in works, in the order in which they stand."""
    lines = [line.strip() for line in page.splitlines() if re.match(r"  (acclimate|python) ", line)]
    assert len(lines) > 10
    told = ""
    for line in lines:
        if re.search(r"\b(ROUND|CODE)\b|round\.zip", line):
            # What fills the blank was printed by a command before it.
            if "CODE" not in line:
                continue
            line = line.replace("CODE", told.strip())
        done = subprocess.run(
            shlex.split(line), cwd=folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        if " invite " in line:
            told = done.stdout
    assert (folder / "organizer" / "account.json").exists()
    assert (folder / "custodian-a" / "account.json").exists()


def test_who_does_not_want_to_wait_asks_twice(start: Starter, tmp_path: Path) -> None:
    up = start(tmp_path / "data", *LOCAL, "--no-mlflow", "--json").ready()
    # A part that can't react.
    for pid in up.sessions:
        os.kill(pid, signal.SIGSTOP)
    up.process.send_signal(signal.SIGINT)
    until(lambda: "stopping" in up.told, "the first one")
    assert up.end(signal.SIGINT) == 0
    up.assert_gone()


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
            supervision.await_free([tmp_path / "api.lock", path], within=2.2, say=said.append)
        assert caught.value.code == "busy"
        assert "process 123" in caught.value.sentence
        assert said == ["waiting for process 123, which still runs on this data folder (dispatcher.lock)"]
        threading.Timer(0.3, other.stdin.close).start()
        supervision.await_free([tmp_path / "api.lock", path], within=PATIENCE)


# ---- what is refused at the start ----------------------------------------------------------------------------------


def test_a_taken_port_is_refused_before_anything_starts(start: Starter, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--port", "--mlflow-port"):
            up = start(tmp_path / "data", *LOCAL, option, port, "--json")
            document = refused(up, "config_invalid")
            assert f"127.0.0.1:{port}" in document["sentence"]
            assert option in document["hint"]
    assert not (tmp_path / "data" / "logs").exists()


def test_the_default_port_of_mlflow_gives_way(start: Starter, tmp_path: Path) -> None:
    """Whether port 5000 is free on this machine or not: it is taken from then on."""
    try:
        taken = socket.create_server(("127.0.0.1", 5000))
    except OSError:
        taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        up = start(tmp_path / "data", *LOCAL, "--json").ready()
        assert not up.facts["mlflow"].endswith(":5000")
        assert "port 5000 is taken; MLflow takes " in up.told
        assert up.end(signal.SIGTERM) == 0
        up.assert_gone()


@pytest.mark.parametrize("place", ["/dev/null/data", "/proc/acclimate"])
def test_a_folder_that_can_not_be_written_is_refused(start: Starter, place: str) -> None:
    document = refused(start(Path(place), *LOCAL, "--json"), "config_invalid")
    assert place in document["sentence"]


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    # A file may have no size at all: what a full disk is to whoever writes.
    line = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    line += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); from acclimate.cli.main import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", line, "up", "--data", str(tmp_path / "data"), "--port", "0"],
        capture_output=True,
        text=True,
        env=environment(PYTHONDONTWRITEBYTECODE="1"),
        timeout=PATIENCE,
    )
    assert done.returncode == 1, done.stderr
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_part_refuses_up_refuses(start: Starter, tmp_path: Path) -> None:
    """Also where the part is the only one that could know; without ever printing the password."""
    url = "postgresql://acclimate:s3cret-word@127.0.0.1:1/acclimate"
    up = start(tmp_path / "data", *LOCAL, "--json", ACCLIMATE_DATABASE=url)
    refused(up, "database_unreachable")
    assert "s3cret" not in up.told + up.printed
    for log in (tmp_path / "data" / "logs").iterdir():
        assert "s3cret" not in log.read_text("utf-8")


def test_what_up_is_told_reaches_its_parts_but_no_place_reaches_their_command_lines(
    start: Starter, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('runner = "local"\norigin = "rounds.example.org/log"\n')
    given = ("--config", file, "--database", f"sqlite:///{tmp_path}/s3cret.db", "--no-mlflow", "--json")
    # A log so quiet that the dispatcher doesn't tell of its start.
    up = start(
        tmp_path / "data", *given, ACCLIMATE_LOG_LEVEL="error", ACCLIMATE_LOG_FILE=str(tmp_path / "one.log")
    ).ready()
    assert up.facts["log_key"].startswith("rounds.example.org/log+")
    assert not (tmp_path / "one.log").exists()
    for pid in of_sessions(up.sessions):
        assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert (tmp_path / "s3cret.db").exists()
    assert up.end(signal.SIGTERM) == 0
    up.assert_gone()


@pytest.mark.slow
def test_with_a_local_ray(start: Starter, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    up = start(tmp_path / "data", "--mlflow-port", "0", "--json").ready()
    until(lambda: "runner ready: " in up.told, "Ray")
    assert any(b"raylet" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in of_sessions(up.sessions))
    assert up.end(signal.SIGTERM) == 0
    up.assert_gone()
    again = start(tmp_path / "data", "--no-mlflow", "--json").ready()
    until(lambda: "runner ready: " in again.told, "Ray")
    assert again.end(signal.SIGKILL) == -signal.SIGKILL
    again.assert_gone()


# ---- MLflow alone --------------------------------------------------------------------------------------------------


def mlflow_of(data: Path, *arguments: object, **more: str) -> tuple[subprocess.Popen[str], str]:
    """`acclimate mlflow` once its page answers, and the address."""
    line = [sys.executable, "-m", "acclimate", "mlflow", "--data", data, "--port", "0", *arguments]
    log = (data.parent / f"{data.name}-mlflow.err").open("w+")
    with log:
        process = subprocess.Popen(
            [str(word) for word in line],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment(**more),
            text=True,
            start_new_session=True,
        )
    url = until(lambda: re.search(r"MLflow on (\S+)", Path(log.name).read_text("utf-8")), "its address")[1]

    def answers() -> bool:
        assert process.poll() is None, Path(log.name).read_text("utf-8")
        try:
            return httpx.get(f"{url}/health", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    until(answers, "MLflow")
    return process, url


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("stdin", marks=pytest.mark.slow)])
def test_mlflow_ends_wholly(tmp_path: Path, how: str) -> None:
    tracking = f"sqlite:///{tmp_path}/results.db"
    process, url = mlflow_of(tmp_path / "data", "--stop-with-stdin", ACCLIMATE_TRACKING=tracking)
    assert process.stdin is not None
    with process.stdin:
        assert len(of_sessions({process.pid})) >= 2
        refusal = subprocess.run(
            [sys.executable, "-m", "acclimate", "mlflow", "--data", tmp_path / "other", "--port", url.rpartition(":")[2]],
            env=environment(ACCLIMATE_TRACKING=tracking), capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert refusal.returncode == 1
        assert "error: can't listen on 127.0.0.1:" in refusal.stderr
        if how == "stdin":
            process.stdin.close()
        else:
            process.send_signal(getattr(signal, how))
        assert process.wait(PATIENCE) == (-signal.SIGKILL if how == "SIGKILL" else 0)
    until(lambda: not of_sessions({process.pid}), "the end of MLflow")


def test_mlflow_for_a_network_answers_to_the_names_it_is_given(tmp_path: Path) -> None:
    tracking = f"sqlite:///{tmp_path}/results.db"
    process, url = mlflow_of(
        tmp_path / "data", "--host", "0.0.0.0", "--allowed-hosts", "mlflow:*,0.0.0.0:*", ACCLIMATE_TRACKING=tracking
    )
    assert process.stdin is not None
    with process.stdin:
        path = f"{url.replace('0.0.0.0', '127.0.0.1')}/api/2.0/mlflow/experiments/search?max_results=1"
        for name, status in {"mlflow:5000": 200, "evil.example.org": 403}.items():
            assert httpx.get(path, headers={"Host": name}, trust_env=False).status_code == status
        process.terminate()
        assert process.wait(PATIENCE) == 0
    assert not of_sessions({process.pid})


def test_mlflow_needs_something_to_serve(tmp_path: Path) -> None:
    def run(**more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "acclimate", "mlflow", "--data", tmp_path / "none"],
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 1
        return done.stderr

    assert f"error: no data folder here: {tmp_path / 'none'}" in run()
    assert "at another MLflow server" in run(ACCLIMATE_TRACKING="http://mlflow.example.org:5000")
    assert not (tmp_path / "none").exists()


# ---- supervision alone ---------------------------------------------------------------------------------------------


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


def test_a_part_that_keeps_crashing_at_its_start_ends_the_supervision(tmp_path: Path, said: list[str]) -> None:
    supervisor = supervised(tmp_path, said, program("weak", "raise SystemExit('no luck')"))
    with pytest.raises(Refusal) as caught:
        stepped(supervisor, lambda: False)
    supervisor.stop()
    assert caught.value.code == "server_unreachable"
    assert "weak ended 5 times at its start, the last time with status 1" in caught.value.sentence
    assert "no luck" in caught.value.hint
    pauses = [float(found[1]) for line in said if (found := re.search(r"again in (\S+) s", line))]
    assert pauses == [0.5, 1.0, 2.0, 4.0]


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
    supervisor.stop(order=("dispatch", "api", "mlflow"))
    assert ends.read_text().split() == ["dispatch", "api", "mlflow"]
    until(lambda: not of_sessions({pid}), "the stubborn one's end")


def test_a_port_that_is_being_given_up_is_waited_for() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with pytest.raises(Refusal):
        supervision.free_port("127.0.0.1", port, option="--port")
    threading.Timer(0.2, taken.close).start()
    assert supervision.free_port("127.0.0.1", port, option="--port", patience=PATIENCE) == port
    with pytest.raises(Refusal, match="can't listen on no-such-host.invalid:1"):
        supervision.free_port("no-such-host.invalid", 1, option="--host")
