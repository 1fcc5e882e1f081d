"""docs/witnesses.md is played: its commands run, in their order, and its tables say what the code does."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import typer.main
import witnessed
from witnessed import SmallLog

from acclimate import witness_folder, witness_http
from acclimate.cli.main import app
from acclimate.witness import CLOCK_STEP
from acclimate.witness_client import CLOCK_TOLERANCE, parse_endpoint
from acclimate_competitions.errors import installing

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "witnesses.md").read_text("utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
FOLDER = "/var/lib/acclimate-witness"


def test_the_page_is_played(tmp_path: Path) -> None:
    small = SmallLog(size=3)
    (tmp_path / "log.vkey").write_text(f"{small.vkey}\n", "utf-8")
    keygen, run, status = COMMANDS
    own = [shlex.split(line.replace(FOLDER, str(tmp_path / "w1")))[1:] for line in (keygen, run, status)]
    made = subprocess.run(
        [sys.executable, "-m", "acclimate", *own[0]], capture_output=True, text=True, check=True, timeout=120
    )
    vkey = made.stdout.splitlines()[-1]
    assert own[1][:4] == ["witness", "run", "--keys", str(tmp_path / "w1")] and own[1][4:] == [
        "--log-key",
        "log.vkey",
        "--port",
        "8480",
    ]
    with witnessed.witness(tmp_path / "w1", [str(tmp_path / "log.vkey")], "--prefix", "/witness") as running:
        assert parse_endpoint(f"{running.url} {vkey}").verifier.name == "witness.example.org"
        assert running.post(small.request(0)).status_code == 200
        shown = witnessed.acclimate(*own[2])
        assert shown.returncode == 0 and small.signer.origin in shown.stdout
        assert vkey in httpx.get(f"{running.url}/", trust_env=False).text
    files = set(re.findall(r"^\| `([^` ]+)` \|", PAGE, re.MULTILINE))
    assert files == {path.name for path in (tmp_path / "w1").iterdir()}
    assert files == {"ed25519.pem", witness_folder.VKEY_FILE, witness_folder.STATE_FILE, witness_folder.LOCK_FILE}


def test_it_is_installed_from_what_was_given_by_no_name_of_an_index() -> None:
    hint = installing("witness")
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for line in path.read_text("utf-8").splitlines():
            # What is installed is this folder or a file: `.` or `….whl`, with or without extras.
            for what in re.findall(r"""pip install (?:--upgrade )?['"]?([^\s'"`\[]*)""", line):
                assert what == "." or what.endswith(".whl"), f"{path.name}: {line}"
    assert "pip install '.[witness]'" in PAGE and "pip install '.[witness]'" in hint
    for path in (path for folder in ("platform", "runners", "competitions") for path in (ROOT / folder).rglob("*.py")):
        assert not re.search(r"""pip install (?:--upgrade )?['"]?acclimate""", path.read_text("utf-8")), path


def test_its_service_is_a_command_that_parses() -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", PAGE, re.MULTILINE)
    words = shlex.split(line)
    command = typer.main.get_command(app).commands["witness"].commands["run"]  # type: ignore[attr-defined]
    assert words[0].endswith("/acclimate") and words[1:3] == ["witness", "run"]
    command.make_context("run", words[3:])


def test_its_numbers_are_the_codes() -> None:
    limits = witness_http.Limits()
    assert f"at most {limits.connections} connections" in PAGE
    assert limits.head == limits.body == 15 and "silent for 15 seconds" in PAGE
    assert CLOCK_STEP == 60 and "more than a minute" in PAGE
    assert CLOCK_TOLERANCE == 300 and "more than five minutes" in PAGE
    assert "client_max_body_size 128k" in PAGE
