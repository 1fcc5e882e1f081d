"""A place that can't be made or read, for whatever reason of the system, is refused in words by each command that somebody names it to."""

from pathlib import Path

import pytest
from commands import Run

from acclimate import config, files

LONG = "x" * 300
WAYS = {
    "competition build": ("competition", "build", "digits", "--out", "{}"),
    "custodian keygen": ("custodian", "keygen", "--name", "custodian-a", "--keys", "{}"),
    "custodian backup": ("custodian", "keygen", "--name", "custodian-a", "--keys", "keys", "--make-backup", "{}"),
    "witness keygen": ("witness", "keygen", "--name", "witness-a", "--keys", "{}"),
    "audit keygen": ("audit", "keygen", "--name", "auditor", "--keys", "{}"),
    "register": ("register", "--server", "http://127.0.0.1:9", "--name", "ada", "--keys", "{}"),
    "backup": ("backup", "{}", "--data", "data"),
    "restore": ("restore", "kept", "--data", "{}"),
    "db check": ("db", "check", "--data", "{}"),
    "log mirror": ("log", "mirror", "--out", "{}", "--server", "http://127.0.0.1:9"),
    "round request": ("round", "request", "r-1", "--out", "{}", "--server", "http://127.0.0.1:9"),
    "round files": ("round", "files", "r-1", "--out", "{}", "--server", "http://127.0.0.1:9"),
    "round bundle": ("round", "bundle", "r-1", "--out", "{}", "--server", "http://127.0.0.1:9"),
    "round report": ("round", "report", "r-1", "--out", "{}", "--server", "http://127.0.0.1:9"),
    "export": ("export", "--items", "items.csv", "--format", "csv", "--out", "{}"),
}
PLACES = ["way/x", LONG, "way", "/proc/x"]


@pytest.mark.parametrize("place", PLACES, ids=["below a file", "too long", "a file", "no such"])
@pytest.mark.parametrize("command", WAYS.values(), ids=list(WAYS))
def test_a_place_in_the_way_is_told(
    command: tuple[str, ...], place: str, acclimate: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("way").write_text("a file of somebody", "utf-8")
    Path("items.csv").write_text("entrant,example,score\na,1,0.5\na,2,1\nb,1,0.25\nb,2,1\n", "utf-8")
    config.claim(config.load(Path("data"), environ={}))
    ran = acclimate(*(part.format(place) for part in command), "--json")
    assert ran.code == 1, ran
    assert "Traceback" not in ran.err and ran.json["error"]["hint"], ran.err
    assert ran.json["error"]["code"] not in ("server_unreachable", "internal_error"), ran.err
    assert Path("way").read_text("utf-8") == "a file of somebody"


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OSError(28, "No space left on device", "x/y")]
)
def test_a_full_disk_is_no_fault_of_ours(error: OSError) -> None:
    refusal = files.of_the_system(error)
    assert refusal is not None and refusal.code == "no_space" and refusal.hint


def test_what_says_nothing_of_a_file_stays_a_fault() -> None:
    assert files.of_the_system(OSError(9, "Bad file descriptor")) is None
