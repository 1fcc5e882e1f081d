"""MLflow's tables in a database of SQLite: all of them or none, whoever is killed, and whoever makes them at once."""

import contextlib
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from acclimate import sqlite_urls, tracking, tracking_tables

pytest.importorskip("mlflow")
KILLED = """
import os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
left = int(sys.argv[2])

@event.listens_for(Engine, "after_cursor_execute")
def count(connection, cursor, statement, parameters, context, executemany):
    global left
    left -= statement.strip().upper().startswith(("CREATE", "ALTER"))
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

from acclimate import tracking_tables
tracking_tables.begin(f"sqlite:///{sys.argv[1]}", None)
"""
MADE = "import sys; from acclimate import tracking_tables; tracking_tables.begin(f'sqlite:///{sys.argv[1]}', None)"


def experiments(path: Path) -> list[str]:
    from mlflow import MlflowClient

    return [experiment.name for experiment in MlflowClient(f"sqlite:///{path}").search_experiments()]


def killed(path: Path, after: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(after)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    "after", [30, pytest.param(1, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.slow)]
)
def test_killed_while_it_makes_the_tables_the_next_one_makes_them(tmp_path: Path, after: int) -> None:
    path = tmp_path / "deep" / "mlflow.db"
    killed(path, after)
    assert (tmp_path / "deep" / "mlflow.db.new").exists()
    tracking_tables.begin(f"sqlite:///{path}", tmp_path / "artifacts")
    assert experiments(path) == ["Default"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["mlflow.db", "mlflow.db.lock"]
    # Where there are tables, nothing is done.
    before = path.read_bytes()
    tracking_tables.begin(f"sqlite:///{path}", None)
    assert path.read_bytes() == before


def test_who_has_the_database_open_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA user_version = 0")
        path.touch()
        tracking_tables.begin(f"sqlite:///{path}", None)
        other.execute("CREATE TABLE its_own (number)")
        assert other.execute("SELECT name FROM experiments").fetchall() == [("Default",)]
        assert ("its_own",) in sqlite3.connect(path).execute("SELECT name FROM sqlite_master").fetchall()
    # One that is making them itself while the copy is being made is not disturbed.
    made, late = tracking_tables._create, tmp_path / "late.db"

    def meanwhile(uri: str, artifacts: str) -> None:
        made(uri, artifacts)
        with contextlib.closing(sqlite3.connect(late)) as connection:
            connection.execute("CREATE TABLE experiments (its_own)")

    monkeypatch.setattr(tracking_tables, "_create", meanwhile)
    late.touch()
    tracking_tables.begin(f"sqlite:///{late}", None)
    with contextlib.closing(sqlite3.connect(late)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("experiments",)]


@pytest.mark.slow
def test_several_at_once_make_one_database(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.touch()
    many = [subprocess.Popen([sys.executable, "-c", MADE, str(path)]) for _ in range(3)]
    assert [one.wait(300) for one in many] == [0, 0, 0]
    assert experiments(path) == ["Default"]


def test_what_is_no_file_of_sqlite_is_left_alone() -> None:
    for uri in ("http://127.0.0.1:1", "postgresql://nobody@127.0.0.1:1/none", "sqlite://", "sqlite:///:memory:"):
        tracking_tables.begin(uri, None)


def test_a_folder_with_a_percent_sign_gets_no_second_one_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    path = tmp_path / "100% of %41" / "deep" / "mlflow.db"
    uri = sqlite_urls.of(path)
    tracking_tables.begin(uri, tmp_path / "artifacts")
    assert tracking.rounds(uri).empty and path.exists()
    assert [found.name for found in tmp_path.iterdir()] == ["100% of %41"]
    # One that is somebody's stays.
    theirs = tmp_path / "100%25 of %2541"
    theirs.mkdir()
    assert tracking.rounds(uri).empty
    assert list(theirs.iterdir()) == []
