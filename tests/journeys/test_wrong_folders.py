"""Folders that are not what their user thinks: told so, and nothing is made in the wrong place."""

import io
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from waiting import WITHIN

from acclimate import config, console, demo, demo_servers, plots
from acclimate.cli import competition
from acclimate.cli.competition import _source
from acclimate.cli.demo import show
from acclimate.cli.main import app
from acclimate.cli.rounds import ranking_lines
from acclimate.dispatch import names_of
from acclimate.store import Store
from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(demo_servers.command(*words), capture_output=True, text=True, check=False, timeout=WITHIN)


def test_an_invitation_makes_no_database_beside_the_one_that_lies_elsewhere(tmp_path: Path) -> None:
    config.claim(config.load(tmp_path / "data", environ={}))
    ran = run("invite", "--data", str(tmp_path / "data"), "--role", "custodian")
    assert ran.returncode == 1
    assert "has no database of its own" in ran.stderr and "--database" in ran.stderr
    assert not (tmp_path / "data" / "acclimate.db").exists()


def test_a_backup_key_goes_to_no_folder_that_is_not_there(tmp_path: Path) -> None:
    stick = tmp_path / "stick" / "backup.txt"
    ran = run(
        "custodian", "keygen", "--name", "custodian-a", "--keys", str(tmp_path / "keys"), "--make-backup", str(stick)
    )
    assert ran.returncode == 1 and f"there is no folder {stick.parent}" in ran.stderr
    assert not stick.parent.exists() and not list((tmp_path / "keys").glob("*.pem"))
    stick.parent.mkdir()
    ran = run(
        "custodian", "keygen", "--name", "custodian-a", "--keys", str(tmp_path / "keys"), "--make-backup", str(stick)
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "nul\0"])
def test_a_data_folder_that_no_path_can_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        config.load(Path(name) if name.startswith("~") else tmp_path / name, environ={})
    assert caught.value.code == "config_invalid" and "data (argument)" in caught.value.sentence


def test_a_file_of_settings_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="is no regular file, but a device"):
        config.load(tmp_path, file=Path("/dev/zero"), environ={})
    long = tmp_path / "long.toml"
    with long.open("wb") as stream:
        stream.truncate(1 << 34)
    with pytest.raises(Refusal, match="too long for a file of settings"):
        config.load(tmp_path, file=long, environ={})
    deep = tmp_path / "deep.toml"
    deep.write_text("a=" + "[" * 20_000, "utf-8")
    with pytest.raises(Refusal, match="deep.toml"):
        config.load(tmp_path, file=deep, environ={})


@pytest.mark.parametrize("content", ["-----BEGIN PRIVATE KEY-----\n", "SQLite format 3\0"])
def test_a_log_is_written_to_no_file_that_is_something_else(content: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(content, "utf-8")
    with pytest.raises(Refusal, match="something else than a log"):
        console.RotatingFile(other, alone=True)
    assert other.read_text("utf-8") == content


def test_a_dispatchers_names_that_were_damaged_are_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "dispatcher.id").write_bytes(bytes(range(128, 256)))
    name, _ = names_of(tmp_path)
    assert name and names_of(tmp_path)[0] != name


def test_a_damaged_database_is_told_in_a_sentence(tmp_path: Path) -> None:
    settings = config.load(tmp_path / "data", environ={})
    Store.open(settings).close()
    database = settings.data / "acclimate.db"
    whole = database.read_bytes()
    database.write_bytes(whole[:4096] + b"\xff" * 8192 + whole[12288:])
    with pytest.raises(Refusal) as caught:
        opened = Store.open(settings)
        with opened.snapshot() as tx:
            tx.size()
    assert caught.value.code == "data_version" and "damaged" in caught.value.sentence


@pytest.mark.parametrize("form", ["folder", "./folder", "round.zip", "x" * 300 + "/round.zip"])
def test_a_bundle_where_a_round_is_asked_for_is_named_with_the_commands_that_take_it(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/MANIFEST").write_text("", "utf-8")
    (tmp_path / "round.zip").write_bytes(b"PK")
    for words in (["ranking"], ["ranking", "--server", "http://127.0.0.1:1"], ["status"]):
        done = CliRunner().invoke(app, [words[0], form, *words[1:]])
        if form.startswith("x") or (form == "folder" and words != ["ranking"]):  # a round's id may be its bundle's name
            assert "is a bundle" not in str(done.exception)
            continue
        assert isinstance(done.exception, Refusal) and done.exception.code == "round_unknown"
        assert done.exception.hint.startswith(f"its ranking: acclimate rank --bundle {form};")


def test_the_demo_shows_of_baselines_what_the_ranking_says() -> None:
    row = {"entrant": "majority", "score": 0.5, "se": 0.0125, "n": 8, "seeds": 3, "direct_score": 0.25}
    ranked = {**row, "entrant": "ada", "se": 0.03, "rank": 1, "rank_low": 1, "rank_high": 1, "direct_rank": 1}
    agreement = {f"{kind}{protocol}": None for kind in ("", "half_", "ceiling_") for protocol in ("direct", "prepared")}
    document = {
        **{name: name for name in ("round", "report", "bundle", "tracking_uri", "competition", "round_name")},
        "ranking": [ranked],
        "baselines": [row],
        "agreement": agreement,
        "crammer": {"entrant": "ada", "task": "t", "direct_rank": 1, "prepared_rank": 1},
    }
    console = Console(file=io.StringIO(), width=120)
    show(demo.Result(document, 0, "valid", "mlflow", "verify"), console)
    (line,) = [one for one in console.file.getvalue().splitlines() if "majority" in one]  # type: ignore[attr-defined]
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == [
        "–",
        "–",
        "majority",
        "0.500",
        "0.013",
        "0.250",
        "–",
        "3",
    ]


@pytest.mark.parametrize(("name", "words"), [("majority", "baseline"), ("bob", "unranked: conflict declared")])
def test_who_stands_below_the_ranking_is_told_why(name: str, words: str) -> None:
    row = {"entrant": name, "score": 0.5, "se": 0.0125, "n": 8, "seeds": 3, "direct_score": 0.25}
    lines = ranking_lines({"ranking": [], "baselines": [row], "policy": {"baselines": ["majority"]}})
    assert f"{name} ({words})" in lines[-1] and "0.0125" in lines[-1]
    policy = {"baselines": ["majority"], "interval": {"kind": "simultaneous", "level": 0.95}}
    assert words in plots.rank_intervals({"ranking": [], "baselines": [row], "policy": policy})


BUILD = """
import shutil
from pathlib import Path

def main(out):
    out.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "competition.toml", out)
    (out / "notes.txt").write_text("made")
"""


def own_folder(folder: Path, *, script: str = "") -> bytes:
    """A folder with a definition of one's own under a shipped competition's name, and perhaps what builds it; its definition's bytes."""
    folder.mkdir()
    text = (definition.shipped("digits") / "competition.toml").read_text("utf-8").replace("Handwritten", "My own")
    (folder / "competition.toml").write_text(text, "utf-8")
    if script:
        (folder / "build.py").write_text(script, "utf-8")
    return text.encode()


def test_an_own_folder_with_a_shipped_name_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = own_folder(tmp_path / "digits")
    for out in ("out", "digits"):
        done = CliRunner().invoke(app, ["competition", "build", "digits", "--out", out])
        assert (
            isinstance(done.exception, Refusal) and "and a folder here that has no build.py" in done.exception.sentence
        )
        assert done.exception.hint.startswith("for the folder: ./digits;")
    assert not (tmp_path / "out").exists() and (tmp_path / "digits/competition.toml").read_bytes() == text
    done = CliRunner().invoke(app, ["competition", "build", "./digits", "--out", "out"])
    assert isinstance(done.exception, Refusal) and done.exception.sentence == "digits has no build.py"
    # What an earlier build of the shipped one left is no folder of one's own.
    shutil.copy(definition.shipped("digits") / "competition.toml", tmp_path / "digits")
    assert _source("digits", "build.py") == definition.shipped("digits")


@pytest.mark.parametrize(
    ("source", "out"), [("mine", "mine"), ("mine", "./mine/"), ("mine", "other"), ("mine/inner", "mine")]
)
def test_a_build_does_not_replace_what_builds_a_competition(
    source: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own_folder(tmp_path / "mine", script=BUILD)
    own_folder(tmp_path / "mine/inner", script=BUILD)
    own_folder(tmp_path / "other", script="# of another competition\n" + BUILD)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(Refusal, match="a build there would replace it") as caught:
        competition.build_into(Path(source), Path(out))
    assert caught.value.code == "file_unreadable"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # A new folder, and what a build left that copied its script.
    competition._require_no_source(Path("made"), Path(source) / "build.py")
    shutil.copytree(source, "made")
    competition._require_no_source(Path("made"), Path(source) / "build.py")
