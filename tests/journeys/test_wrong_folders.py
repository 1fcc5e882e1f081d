"""Folders that are not what their user thinks: told so, and nothing is made in the wrong place."""

import subprocess
from pathlib import Path

import pytest

from acclimate import config, demo_servers
from acclimate.cli.rounds import ranking_lines


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(demo_servers.command(*words), capture_output=True, text=True, check=False, timeout=120)


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


@pytest.mark.parametrize(("name", "words"), [("majority", "baseline"), ("bob", "unranked: conflict declared")])
def test_who_stands_below_the_ranking_is_told_why(name: str, words: str) -> None:
    row = {"entrant": name, "score": 0.5, "se": 0.0125, "n": 8, "seeds": 3, "direct_score": 0.25}
    lines = ranking_lines({"ranking": [], "baselines": [row], "policy": {"baselines": ["majority"]}})
    assert f"{name} ({words})" in lines[-1] and "0.0125" in lines[-1]
