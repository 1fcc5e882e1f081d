"""Two commands at once in one key folder: each finds what the other kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from strange_servers import answering
from waiting import WITHIN

from acclimate import keys as key_files
from acclimate.client import Client, auditor, folder_lock, organizer
from acclimate_competitions import errors
from acclimate_competitions.errors import Refusal

# Each process keeps so many, as fast as it can, once the file `go` is there.
BEGIN = """
import sys, time
from pathlib import Path
from acclimate import keys as key_files
from acclimate_competitions.errors import Refusal
folder, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
keys = key_files.load(folder)
def wait():
    (folder / ("ready-" + name)).touch()
    while not (folder / "go").exists():
        time.sleep(0.001)
"""
PINS = """
from acclimate.client.pins import Pin, keep
wait()
for i in range(count):
    keep(keys, Pin(f"{name}-{i}", "d", "l", "o", "c", f"s-{name}-{i}", 1, "k"), envelope={"index": 1})
"""
DRAWS = """
from acclimate.client import auditor
wait()
for i in range(count):
    print(auditor.keygen(keys, name="lab", again=True)["draw"])
"""
ROUNDS = """
from acclimate.client import Client, organizer
code = {"a": "server_unreachable", "b": "conflict"}[name]
with Client({"a": "http://127.0.0.1:9", "b": sys.argv[4]}[name], patience=0) as client:
    wait()
    for i in range(count):
        try:
            organizer._define(client, keys, {"round": f"{name}-{i}"}, holdout="", say=lambda line: None)
        except Refusal as refusal:
            assert refusal.code == code, refusal
"""
COUNT = 50


def at_once(code: str, folder: Path, *more: str) -> list[str]:
    key_files.create(folder, age=False)
    command = [sys.executable, "-P", "-c", BEGIN + code, str(folder)]
    running = [
        subprocess.Popen([*command, name, str(COUNT), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    while not all((folder / f"ready-{name}").exists() for name in ("a", "b")):
        assert all(process.poll() is None for process in running), [p.communicate() for p in running]
    (folder / "go").touch()
    said = []
    for process in running:
        out, err = process.communicate(timeout=WITHIN)
        assert process.returncode == 0, err
        said += out.split()
    return said


def test_no_pin_is_lost(tmp_path: Path) -> None:
    at_once(PINS, tmp_path / "keys")
    kept = json.loads((tmp_path / "keys" / "pins.json").read_text())
    assert set(kept) == {f"{name}-{i}" for name in ("a", "b") for i in range(COUNT)}


def test_no_secret_of_a_draw_is_lost(tmp_path: Path) -> None:
    draws = at_once(DRAWS, tmp_path / "keys")
    assert len(set(draws)) == 2 * COUNT
    opened = key_files.load(tmp_path / "keys")
    assert all(auditor.secret_of(opened, draw) for draw in draws)


def test_no_round_of_an_organizer_is_lost(tmp_path: Path) -> None:
    # What may be in the log is kept, what a server refuses is forgotten.
    with answering(b"{}", status=409) as url:
        at_once(ROUNDS, tmp_path / "keys", url)
    kept = json.loads((tmp_path / "keys" / "rounds.json").read_text())
    assert set(kept) == {f"a-{i}" for i in range(COUNT)}


@pytest.mark.parametrize("code", [code for code, about in errors.CODES.items() if about.status >= 500])
def test_a_round_that_a_server_in_trouble_may_have_logged_is_not_forgotten(tmp_path: Path, code: str) -> None:
    keys = key_files.create(tmp_path / "keys", age=False)
    refusal = Refusal(code, "in trouble")
    body = json.dumps({**refusal.document(), "detail": refusal.sentence}).encode()
    with answering(body, status=refusal.status) as url, Client(url, patience=0) as client, pytest.raises(Refusal):
        organizer._define(client, keys, {"round": "a-1"}, holdout="sha256:…", say=lambda line: None)
    kept = json.loads((tmp_path / "keys" / "rounds.json").read_text())
    assert kept == {"a-1": {"server": url, "holdout": "sha256:…"}}


def held(path: Path) -> "subprocess.Popen[str]":
    code = (
        "import sys; from pathlib import Path; from acclimate.client import folder_lock\n"
        "with folder_lock.alone(Path(sys.argv[1]), doing='x'): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_who_is_too_late_is_told_and_a_killed_command_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    process = held(path)
    try:
        with pytest.raises(Refusal) as caught, folder_lock.alone(path, doing="sealing r", within=0.1):
            raise AssertionError("both have it")
        assert (caught.value.code, "sealing r" in caught.value.sentence) == ("busy", True)
    finally:
        process.kill()
        process.communicate()
    with folder_lock.alone(path, doing="sealing r", within=5.0):
        assert path.stat().st_mode & 0o077 == 0
    with folder_lock.alone(path, doing="sealing r", within=0.0):
        pass


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught, folder_lock.alone(tmp_path / "none" / ".lock", doing="x"):
        raise AssertionError("there is no such folder")
    assert caught.value.code == "file_unreadable" and str(tmp_path / "none") in caught.value.sentence
    assert list(tmp_path.iterdir()) == []
