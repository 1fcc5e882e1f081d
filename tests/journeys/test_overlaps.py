"""A backup and an installation never share a folder, however its path is spelled; nor is anything restored into one that is there."""

import os
import shutil
from pathlib import Path

import kept
import pytest
from backed_up import back_up, contents, refused, restore, target

from acclimate import backups, config, locks


@pytest.fixture
def whole(tmp_path):
    found = kept.installation(tmp_path)
    yield found
    found.store.close()


def files(folder: Path) -> dict[str, bytes]:
    # A database's side files come and go with its connections.
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".db-shm", ".db-wal", ".lock")
    }


def test_no_backup_is_made_in_the_installation(whole, tmp_path, monkeypatch):
    data = whole.settings.data
    (tmp_path / "link").symlink_to(data)
    (tmp_path / "deep").symlink_to(data / "backups" / "daily")
    monkeypatch.chdir(data / "blobs")
    before = files(data)
    for to in (
        data,
        data / "backup",
        data / "a" / "b",
        data / "blobs",
        data / "blobs" / "backup",
        data / "keys",
        tmp_path / "link" / "backup",
        tmp_path / "deep",
        tmp_path / "made" / ".." / "data" / "backup",
        Path("../backup"),
        Path(),
        tmp_path,
    ):
        told = refused("backup_invalid", back_up, whole, to, keys=True)
        assert "lies in" in told, to
    assert files(data) == before and contents(whole.settings)[1]
    # A name that only begins with the same letters is another folder.
    assert back_up(whole, tmp_path / "data-backup")["lost"] == []


@pytest.mark.parametrize("name", ["blobs", "server_keys", "database", "artifacts", "tracking"])
def test_no_backup_is_made_around_a_part_of_the_installation_that_lies_elsewhere(tmp_path, name):
    """Database, blobs and keys below one folder look like a backup that never came to its end."""
    to = tmp_path / "elsewhere"
    place = {"server_keys": "keys", "database": "blobs/acclimate.db", "tracking": "keys/mlflow.db"}.get(name, "blobs")
    (to / place).parent.mkdir(parents=True)
    url = "sqlite:///" if name in ("database", "tracking") else ""
    whole = kept.installation(tmp_path, **{name: f"{url}{to / place}"})
    under_way = to / place / "tmp" / "upload"
    if name == "blobs":
        under_way.parent.mkdir(exist_ok=True)
        under_way.write_bytes(b"an upload that is under way")
    told = refused("backup_invalid", back_up, whole, to, keys=True)
    assert "lies in the backup's folder" in told
    assert name != "blobs" or under_way.exists()
    whole.store.close()


def test_no_backup_is_made_in_a_folder_that_is_mounted_twice(whole, tmp_path):
    """As the kernel knows it, not by its name."""
    other = tmp_path / "other"
    other.mkdir()
    if os.geteuid() or os.system(f"mount --bind '{whole.settings.data}' '{other}' 2>/dev/null"):
        pytest.skip("this process may not mount")
    try:
        assert "lies in" in refused("backup_invalid", back_up, whole, other / "backup")
    finally:
        os.system(f"umount '{other}'")


def test_nothing_is_restored_into_its_backup_or_around_it(whole, tmp_path, monkeypatch):
    backup = tmp_path / "backup"
    back_up(whole, backup, keys=True)
    before = files(backup)
    (tmp_path / "link").symlink_to(backup)
    monkeypatch.chdir(backup)
    new = tmp_path / "new"
    (tmp_path / "around").mkdir()
    shutil.copytree(backup, tmp_path / "around" / "keys" / "backup")
    for data, given in (
        (backup, {}),
        (backup / "new", {}),
        (Path("new"), {}),
        (Path("tables") / ".." / "new", {}),
        (tmp_path / "link" / "new", {}),
        (new, {"blobs": str(backup / "blobs")}),
        (new, {"blobs": str(tmp_path / "link" / "blobs")}),
        (new, {"server_keys": str(backup / "keys")}),
        (new, {"database": f"sqlite:///{backup / 'blobs' / 'acclimate.db'}"}),
        (new, {"artifacts": str(backup / "mlartifacts")}),
    ):
        told = refused("backup_invalid", restore, backup, target(whole, data, **given))
        assert "lies in the backup's folder" in told, (data, given)
        assert not new.exists()
    told = refused(
        "backup_invalid", restore, tmp_path / "around" / "keys" / "backup", target(whole, tmp_path / "around")
    )
    assert "lies in the data folder" in told
    assert files(backup) == before
    restore(backup, target(whole, new))


def test_nothing_is_restored_in_a_living_installation(whole, tmp_path, monkeypatch):
    backup, data = tmp_path / "backup", whole.settings.data
    back_up(whole, backup, keys=True)
    config.claim(whole.settings)
    (tmp_path / "link").symlink_to(data)
    monkeypatch.chdir(data)
    before = files(data)
    for folder in (data / "new", data / "a" / "b", Path("new"), tmp_path / "link" / "new"):
        told = refused("backup_invalid", restore, backup, target(whole, folder))
        assert "lies in" in told and "the data folder of an installation" in told
    for folder in (data, tmp_path / "link"):
        assert "not empty" in refused("backup_invalid", restore, backup, target(whole, folder))
    # Its blobs are taken for a new database, but not while another one uses them.
    settings = target(whole, tmp_path / "new", blobs=whole.settings.blobs)
    with locks.take(data / "api.lock"):
        told = refused("busy", restore, backup, settings)
        assert f"process {os.getpid()}" in told and str(data) in told
    assert files(data) == before and not (tmp_path / "new").exists()
    restore(backup, settings)


def test_the_commands_refuse_it_with_what_to_do(whole, tmp_path, acclimate):
    settings = tmp_path / "settings.toml"
    settings.write_text(f'origin = "{whole.settings.origin}"\n')
    data = whole.settings.data
    given = ["--data", data, "--config", settings]
    for command in (["backup", data / "backup"], ["backup", data / "blobs"]):
        ran = acclimate(*command, *given)
        assert ran.code == 1 and "lies in the data folder" in ran.err and "hint: name a folder outside" in ran.err
    assert acclimate("backup", tmp_path / "backup", *given).code == 0
    ran = acclimate("restore", tmp_path / "backup", "--data", tmp_path / "backup" / "new", "--config", settings)
    assert ran.code == 1 and "hint: name places outside of the backup" in ran.err
    assert (
        backups.damage(tmp_path / "backup", backups.read(tmp_path / "backup"), blobs=True, progress=lambda *_: 0) == []
    )
