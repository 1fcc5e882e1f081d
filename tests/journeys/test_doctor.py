"""`acclimate doctor`, and what it and the API say of clocks."""

import json
import os
import re
import socket
import threading
from pathlib import Path

import engines
import pytest
from apis import SECRET, acclimate, api, served
from live import Live

from acclimate import config, doctor, doctor_machine, doctor_places

__all__ = ["served"]


_AN_HOUR_AHEAD = """
CREATE OR REPLACE FUNCTION acclimate_now() RETURNS text LANGUAGE sql VOLATILE AS $$
  SELECT to_char((clock_timestamp() + interval '1 hour') AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') $$
"""


def test_a_clock_that_differs_from_the_databases_is_told_at_the_start_and_by_the_doctor(
    tmp_path: Path, postgresql: engines.Server, postgresql_url: str
) -> None:
    data, name = tmp_path / "data", postgresql_url.rpartition("/")[2]
    with api(data, ACCLIMATE_DATABASE=postgresql_url) as server:
        assert server.end() == 0
    assert not any("clock" in line["event"] for line in server.lines())
    postgresql.sql(_AN_HOUR_AHEAD, database=name)
    with api(data, ACCLIMATE_DATABASE=postgresql_url) as server:
        assert server.get("/readyz").status_code == 200
        assert server.get("/readyz").json()["clock_offset"] > 3000
        server.end()
    assert any(re.search(r"the database's clock is (3600|3599)", line["event"]) for line in server.lines())
    settings = config.load(data, environ={"ACCLIMATE_DATABASE": postgresql_url})
    found = {one.name: one for one in doctor_places.database_(settings)}
    assert found["database clock"].state == "warning" and re.search(r"\+(3600|3599)", found["database clock"].found)
    assert found["installation"].state == "ok"


# ---- the doctor -------------------------------------------------------------------------------------------------------


def test_the_doctor_looks_at_everything_and_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = acclimate("doctor", "--data", str(data), "--json", ACCLIMATE_PORT="0", ACCLIMATE_MLFLOW_PORT="0")
    found = json.loads(done.stdout)
    states = {one["name"]: one["state"] for one in found["findings"]}
    assert {"python", "extra server", "extra runner", "torch", "ray", "cpu", "open files", "space data", "isolation",
            "data folder", "database", "blobs", "key log.pem", "mlflow"} <= set(states)  # fmt: skip
    assert done.returncode == 0 and found["ok"] and "missing" not in states.values()
    assert all(one["hint"] for one in found["findings"] if one["state"] == "warning" and "busy" not in one["found"])
    assert not data.exists()


def test_the_doctor_of_a_core_install_says_what_to_install(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "ray", "mlflow", "sqlalchemy", "alembic", "psycopg", "fastapi", "uvicorn", "s3fs")
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {heavy!r}: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from acclimate.cli.main import run\n"
        "run()\n"
    )
    done = acclimate("doctor", "--data", str(tmp_path / "data"), code=code)
    assert done.returncode == 1
    assert "pip install '.[server]'" in done.stdout and "pip install '.[runner]'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "needed for running a server here: extra server, extra runner" in done.stderr


@pytest.mark.parametrize("wrong", ["password", "port"])
def test_the_doctor_tells_a_database_that_cannot_be_used_without_its_password(
    tmp_path: Path, postgresql: engines.Server, postgresql_url: str, wrong: str
) -> None:
    url = postgresql_url.replace(postgresql.password, SECRET)
    if wrong == "port":
        url = url.replace(f":{postgresql.port}/", ":1/")
    settings = config.load(tmp_path, environ={}, given={"database": url, "runner": "local"})
    found = [one for one in doctor.examine(settings) if one.name == "database"]
    assert [one.state for one in found] == ["missing"] and found[0].hint
    assert SECRET not in json.dumps(found[0].document())


def test_the_doctor_reads_a_running_server(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = served.settings
    found = {one.name: one for check in (doctor_places.database_, doctor_places.blobs_, doctor_places.keys)
             for one in check(settings)}  # fmt: skip
    assert {one.state for one in found.values()} == {"ok"}, found
    (settings.keys / "log.pem").chmod(0o644)
    assert [one.state for one in doctor_places.keys(settings)] == ["missing", "ok"]
    with config.lock(settings, "api"):
        assert f"api (process {os.getpid()})" in next(iter(doctor_places.folder(settings))).found
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.org:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert [one.state for one in doctor_machine.proxies(settings)] == ["warning"]
    monkeypatch.setenv("NO_PROXY", "localhost,127.0.0.1")
    assert [one.state for one in doctor_machine.proxies(settings)] == ["ok"]


def test_a_check_that_hangs_costs_the_doctor_its_own_line_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hangs(_: config.Settings) -> list[doctor.Finding]:
        release.wait()
        return []

    def fails(_: config.Settings) -> list[doctor.Finding]:
        raise RuntimeError(f"http://u:{SECRET}@h")

    checks = {"python": doctor_machine.python, "database": hangs, "clock": fails}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    # A slow machine is given longer for what doesn't hang.
    for within in (0.5, 5.0, 50.0):
        found = {one.name: one for one in doctor.examine(config.load(tmp_path, environ={}), within=within)}
        if found["python"].state == "ok" and found["clock"].state == "warning":
            break
    release.set()
    assert {name: one.state for name, one in found.items()} == {
        "python": "ok",
        "database": "missing",
        "clock": "warning",
    }
    assert SECRET not in found["clock"].found


def test_a_cluster_that_does_not_answer_is_missing(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    found = list(doctor_machine.ray(config.load(tmp_path, environ={}, given={"ray_address": address})))
    assert found[0].state == "missing" and address in found[0].found
    assert found[1].name == "ray token" and "RAY_AUTH" in found[1].hint


def test_a_file_with_a_login_that_others_may_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "acclimate.toml"
    file.write_text(f'database = "postgresql://u:{SECRET}@h/d"\n', "utf-8")
    file.chmod(0o644)
    found = list(doctor_places.folder(config.load(tmp_path / "data", file=file, environ={})))
    assert [(one.name, one.state) for one in found] == [("data folder", "ok"), ("config file", "warning")]
    file.chmod(0o600)
    assert len(list(doctor_places.folder(config.load(tmp_path / "data", file=file, environ={})))) == 1


def test_a_machine_too_busy_to_ask_torch_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "WITHIN", 1.001)
    settings = config.load(tmp_path, environ={})
    found = {one.name: one for one in doctor_machine.devices(settings)}
    assert found["torch"].state == "warning" and "could not be asked" in found["torch"].found
    assert "acclimate doctor" in found["torch"].hint


def test_what_has_no_answer_in_time_says_what_to_do(tmp_path: Path) -> None:
    late = [one for one in doctor.examine(config.load(tmp_path, environ={}), within=0.0) if "no answer" in one.found]
    assert late and all(one.state != "ok" and "acclimate doctor" in one.hint for one in late)
