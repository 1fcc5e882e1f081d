"""How commands end that are ended from outside: by a signal at any time, by an output that takes no more."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import rounds_made
from by_hand import ada, evaluate_all, prepared_round, publish_checked, release_share, served, staged
from live import Actor, Staged
from waiting import WITHIN

import acclimate
from acclimate.verify import files

__all__ = ["ada", "served", "staged"]
ACCLIMATE = (sys.executable, "-m", "acclimate")
PLACES = [str(Path(acclimate.__file__).parents[1])]
# A signal comes while a module of the commands is imported.
EARLY = """
import os, sys
wanted, number = sys.argv[1], int(sys.argv[2])
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == wanted:
            os.kill(os.getpid(), number)
from acclimate.__main__ import run
for name in [name for name in sys.modules if name == wanted or name.startswith(wanted + ".")]:
    del sys.modules[name]
sys.meta_path.insert(0, Hook())
sys.argv = ["acclimate", "--help"]
run()
"""


@pytest.fixture(scope="module")
def zipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = rounds_made.make(tmp_path_factory.mktemp("round")).write(tmp_path_factory.mktemp("bundle"))
    path = tmp_path_factory.mktemp("zip") / "bundle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(p for p in made.rglob("*") if p.is_file()):
            archive.write(file, file.relative_to(made).as_posix())
    return path


def early(module: str, number: signal.Signals) -> "subprocess.CompletedProcess[str]":
    """A command that is sent a signal while it imports a module."""
    command = [sys.executable, "-c", EARLY, module, str(int(number))]
    return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN)


@pytest.mark.parametrize(
    "module",
    ["acclimate.command", "contextlib", "typing", "acclimate.cli.main", "typer", "acclimate.cli.witness", "rich"],
)
def test_ctrl_c_while_a_command_starts_is_one_line(module: str) -> None:
    done = early(module, signal.SIGINT)
    if module == "rich" and done.returncode == 0:
        return  # help needs no colours
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_while_a_command_starts_end_it_without_a_word(number: signal.Signals) -> None:
    # By the signal itself, before it is caught: whoever waits for the process is told the same of both.
    for module, status in (("contextlib", -number), ("acclimate.cli.main", 128 + number)):
        done = early(module, number)
        assert (done.returncode, done.stdout, done.stderr) == (status, "", ""), module


@pytest.mark.slow
def test_a_terminal_that_lacks_our_characters_gets_others(staged: Staged, ada: Actor) -> None:
    served = staged.live
    for index, document in list(prepared_round(staged, ada).items())[:2]:
        release_share(staged, index, document)
    served.tick()
    evaluate_all(staged)
    assert served.tick() == ["EvaluationFinished"]
    publish_checked(staged, served.organizer().get(f"{staged.path}/ranking").json())

    def said(encoding: str, *words: str) -> str:
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
        done = subprocess.run([*ACCLIMATE, *words], capture_output=True, timeout=WITHIN, env=environment)
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
        return done.stdout.decode(encoding)

    where = [staged.round, "--server", served.url]
    for encoding in ("latin-1", "iso-8859-7"):
        assert "->" in said(encoding, "status", *where)
        assert "1-1" in said(encoding, "ranking", *where)
    assert "1–1" in said("utf-8", "ranking", *where)
    assert "Usage" in said("latin-1", "status", "--help")
    # A program reads the same value, whatever the encoding.
    assert json.loads(said("latin-1", "ranking", *where, "--json")) == json.loads(
        said("utf-8", "ranking", *where, "--json")
    )


def test_nothing_is_imported_before_ctrl_c_is_seen_to() -> None:
    """What Python itself imports at its start is out of our hands; from then on it has two small modules to read."""
    more = "import sys; had = {*sys.modules}; import acclimate.__main__; print(*sorted({*sys.modules} - had))"
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", f"import sys; sys.path[:0] = {PLACES!r}; {more}"],
        capture_output=True,
        text=True,
        timeout=WITHIN,
    )
    assert done.stdout.split() == ["acclimate", "acclimate.__main__"], done.stderr


@pytest.mark.parametrize(
    "command", [("--help",), ("config",), ("config", "--json"), ("verify", "BUNDLE"), ("verify", "BUNDLE", "--json")]
)
def test_an_output_that_is_full_is_one_error_and_no_verdict(command: tuple[str, ...], zipped: Path) -> None:
    line = [*ACCLIMATE, *(str(zipped) if word == "BUNDLE" else word for word in command)]
    # As a shell's > does: the device is opened for writing, and nothing is put in its place.
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=WITHIN)
    assert done.returncode == 4, done.stderr
    error, hint = done.stderr.splitlines()
    assert error == "error: the result can't be written to standard output: No space left on device"
    assert hint.startswith("hint: ")


def test_notes_that_nobody_can_read_end_no_command(zipped: Path) -> None:
    line = [*ACCLIMATE, "verify", str(zipped)]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=full, text=True, timeout=WITHIN)
    assert done.returncode == 0, done.stdout
    assert "ok:" in done.stdout


def unpacking(zipped: Path, temporary: Path) -> "subprocess.Popen[str]":
    """A verification that has begun to unpack."""
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen([*ACCLIMATE, "verify", str(zipped)], env=environment, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + WITHIN
    while not list(temporary.glob("acclimate-verify-*/MANIFEST")):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.001)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_verification_that_is_ended_leaves_no_opened_holdout(
    number: signal.Signals, zipped: Path, tmp_path: Path
) -> None:
    # A bundle this small may be verified before the signal comes.
    for _ in range(20):
        process = unpacking(zipped, tmp_path)
        process.send_signal(number)
        process.communicate(timeout=WITHIN)
        if process.returncode:
            break
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_verification_left_is_removed_by_the_next(zipped: Path, tmp_path: Path) -> None:
    process = unpacking(zipped, tmp_path)
    process.kill()
    process.communicate(timeout=WITHIN)
    (left,) = tmp_path.iterdir()
    again = [*ACCLIMATE, "verify", str(zipped)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    # What was made just now may be another one's that has not yet got its lock.
    assert subprocess.run(again, env=environment, stdout=subprocess.PIPE, timeout=WITHIN).returncode == 0
    assert list(tmp_path.iterdir()) == [left]
    os.utime(left, (0, 0))
    assert subprocess.run(again, env=environment, stdout=subprocess.PIPE, timeout=WITHIN).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_one_that_still_runs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "acclimate-verify-file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "acclimate-verify-link").symlink_to(elsewhere)
    with files.aside() as first:
        os.utime(first, (0, 0))
        with files.aside() as second:
            assert first.is_dir() and first != second
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "acclimate-verify-file",
        "acclimate-verify-link",
        "elsewhere",
    ]
