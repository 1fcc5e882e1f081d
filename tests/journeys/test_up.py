"""`acclimate up` as an operator runs it: real processes, signals, ports and files."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from chosen_ports import free_port
from ups import PATIENCE, Starter, Up, children, environment, of_sessions, start, until

from acclimate import aside, leader, supervision

pytest.importorskip("mlflow")
pytest.importorskip("fastapi")

__all__ = ["start"]

LOCAL = ("--runner", "local")


@pytest.fixture(scope="module")
def live(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One that finds port 5000 taken, whether it was free on this machine or not."""
    data = tmp_path_factory.mktemp("live") / "data"
    try:
        taken = socket.create_server(("127.0.0.1", 5000))
    except OSError:
        taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        yield start(data, *LOCAL, "--json").ready()


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


def test_mlflow_shows_its_page_where_its_default_port_is_taken_on_another(live: Up) -> None:
    assert not live.facts["mlflow"].endswith(":5000")
    assert "port 5000 is taken; MLflow takes " in live.told
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


@pytest.mark.slow
def test_killed_it_takes_its_parts_along_and_starts_again_at_once(start: Starter, tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = start(data, *LOCAL, "--mlflow-port", "0", "--json").ready()
    key = first.facts["log_key"]
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    # No waiting here: the next one does that.
    second = start(data, *LOCAL, "--no-mlflow").ready()
    first.assert_gone()
    assert key in second.printed
    # What the first one printed is withdrawn.
    join = ["register", "--role", "organizer", "--name", "late", "--keys", tmp_path / "late", "--server"]
    address = re.search(r"API +(http\S+)", second.printed)
    assert address is not None
    line = [sys.executable, "-m", "acclimate", *join, address[1], "--invitation", first.facts["organizer_invitation"]]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "needs an unused invitation" in done.stderr
    assert (data / "up.invitation").read_text().count("sha256:") == 1
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
    assert (folder / "lab" / "auditor.json").exists() and (folder / "witness" / "witness.vkey").exists()


def test_who_does_not_want_to_wait_asks_twice(start: Starter, tmp_path: Path) -> None:
    up = start(tmp_path / "data", *LOCAL, "--no-mlflow", "--json").ready()
    # A part that can't react.
    for pid in up.sessions:
        os.kill(pid, signal.SIGSTOP)
    up.process.send_signal(signal.SIGINT)
    until(lambda: "stopping" in up.told, "the first one")
    assert up.end(signal.SIGINT) == 1
    assert "dispatch did not end in time and was killed" in up.told
    up.assert_gone()


# ---- what is refused at the start ----------------------------------------------------------------------------------


def test_a_taken_port_is_refused_before_anything_starts(start: Starter, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ("--port", "--mlflow-port")
        ups = {option: start(tmp_path / option, *LOCAL, option, port, "--json") for option in options}
        for option, up in ups.items():
            document = refused(up, "config_invalid")
            assert f"127.0.0.1:{port}" in document["sentence"]
            assert option in document["hint"]
            assert not (tmp_path / option / "logs").exists()


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
    given += ("--host", "127.0.0.2")
    health = free_port()
    # A log so quiet that the dispatcher doesn't tell of its start.
    up = start(
        tmp_path / "data",
        *given,
        ACCLIMATE_LOG_LEVEL="error",
        ACCLIMATE_LOG_FILE=str(tmp_path / "one.log"),
        ACCLIMATE_DISPATCH_PORT=str(health),
    ).ready()
    assert httpx.get(f"http://127.0.0.2:{health}/healthz", trust_env=False).status_code == 200
    assert up.facts["log_key"].startswith("rounds.example.org/log+")
    assert not (tmp_path / "one.log").exists()
    for pid in of_sessions(up.sessions):
        assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert (tmp_path / "s3cret.db").exists()
    assert up.end(signal.SIGTERM) == 0
    up.assert_gone()


def test_a_dispatcher_that_waits_for_work_before_it_hands_over_is_not_killed_meanwhile() -> None:
    """What takes longer is done again by the next leader; killed before it gave back what runs, it would leave that to be found."""
    assert aside.PATIENCE <= leader.PATIENCE <= supervision.GRACE - 5


@pytest.mark.slow
def test_an_api_has_its_drain_to_end(start: Starter, tmp_path: Path) -> None:
    """Also one that is longer than what other parts get."""
    seconds = str(int(supervision.GRACE) + 1)
    up = start(tmp_path / "data", *LOCAL, "--no-mlflow", "--json", ACCLIMATE_DRAIN=seconds).ready()
    assert up.end(signal.SIGTERM) == 0, up.told
    assert '"event": "stopped"' in (tmp_path / "data" / "logs" / "api.log").read_text("utf-8")
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
