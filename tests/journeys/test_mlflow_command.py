"""`acclimate mlflow` as an operator runs it."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from ups import PATIENCE, environment, of_sessions, until

pytest.importorskip("mlflow")


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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "stdin"])
def test_mlflow_ends_wholly(tmp_path: Path, how: str) -> None:
    tracking = f"sqlite:///{tmp_path}/results.db"
    process, _ = mlflow_of(tmp_path / "data", "--stop-with-stdin", ACCLIMATE_TRACKING=tracking)
    assert process.stdin is not None
    with process.stdin:
        if how == "stdin":
            process.stdin.close()
        else:
            process.terminate()
        assert process.wait(PATIENCE) == 0
    assert not of_sessions({process.pid})


@pytest.mark.slow
def test_mlflow_for_a_network_answers_to_the_names_it_is_given_and_ends_wholly_when_it_is_killed(
    tmp_path: Path,
) -> None:
    tracking = f"sqlite:///{tmp_path}/results.db"
    process, url = mlflow_of(
        tmp_path / "data",
        *("--host", "0.0.0.0", "--allowed-hosts", "mlflow:*,0.0.0.0:*"),
        ACCLIMATE_TRACKING=tracking,
        ACCLIMATE_ARTIFACTS=str(tmp_path / "s3cret"),
    )
    assert process.stdin is not None
    with process.stdin:
        path = f"{url.replace('0.0.0.0', '127.0.0.1')}/api/2.0/mlflow/experiments/search?max_results=1"
        for name, status in {"mlflow:5000": 200, "evil.example.org": 403}.items():
            assert httpx.get(path, headers={"Host": name}, trust_env=False).status_code == status
        # Where artifacts lie may hold a login: everybody may read command lines.
        for pid in of_sessions({process.pid}):
            assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        there = f"{url.replace('0.0.0.0', '127.0.0.1')}/api/2.0/mlflow-artifacts/artifacts/one.txt"
        assert httpx.put(there, content=b"one", headers={"Host": "mlflow:5000"}, trust_env=False).status_code == 200
        assert (tmp_path / "s3cret" / "one.txt").read_bytes() == b"one"
        # Nobody else gets its port.
        line = ["mlflow", "--data", tmp_path / "other", "--host", "0.0.0.0", "--port", url.rpartition(":")[2]]
        refusal = subprocess.run(
            [sys.executable, "-m", "acclimate", *line],
            env=environment(ACCLIMATE_TRACKING=tracking),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert refusal.returncode == 1
        assert "error: can't listen on 0.0.0.0:" in refusal.stderr
        assert "an MLflow server has it" in refusal.stderr
        assert len(of_sessions({process.pid})) >= 2
        process.kill()
        assert process.wait(PATIENCE) == -signal.SIGKILL
    until(lambda: not of_sessions({process.pid}), "the end of MLflow")


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
