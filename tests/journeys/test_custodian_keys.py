"""A custodian's keys: made, interrupted, made after the account; and nobody else's folder taken."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Ran

from acclimate import keys


def account_in(folder: Path, *, name: str = "custodian-a", role: str = "custodian") -> None:
    """What `acclimate register` leaves in a folder, keys included."""
    if not (folder / "ed25519.pem").exists():
        keys.create(folder, age=False)
    account = {"server": "http://127.0.0.1:9", "id": name, "role": role, "token": "t"}
    (folder / "account.json").write_text(json.dumps(account))
    (folder / "account.json").chmod(0o600)


def test_a_custodian_who_registers_before_keygen_is_not_stuck(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    folder, backup = tmp_path / "a", tmp_path / "backup.txt"
    account_in(folder)
    public = keys.load(folder).public
    keygen = ("custodian", "keygen", "--name", "custodian-a", "--keys", folder, "--make-backup", backup, "--json")
    ran = acclimate(*keygen)
    assert ran.code == 0, ran.err
    opened = keys.load(folder)
    assert ran.json == json.loads((folder / "custodian.json").read_text())
    assert (ran.json["ed25519"], opened.public) == (public, public)
    assert ran.json["age"] == opened.age_recipient
    # Typed twice it says what is there, and the key is still never overwritten.
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = acclimate(*keygen)
    assert (again.code, again.json) == (0, ran.json) and "made already" in again.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    kept = backup.rename(tmp_path / "unplugged")
    again = acclimate(*keygen)
    assert (again.code, again.json, backup.exists()) == (0, ran.json, False) and "plugged in" in again.err
    # Under another name, with another backup, or with other keys it is another custodian's.
    without = ("custodian", "keygen", "--keys", folder, "--name")
    other = acclimate("custodian", "keygen", "--name", "x", "--keys", tmp_path / "x", "--json").json["age"]
    another = acclimate(*without, "custodian-b", "--json").json["error"]
    assert another["code"] == "conflict" and "{" not in another["sentence"] and "--name custodian-a" in another["hint"]
    assert "custodian 'custodian-a', asked for was 'custodian-b'" in another["sentence"]
    assert acclimate(*without, "custodian-a", "--backup", other, "--json").json["error"]["code"] == "conflict"
    assert acclimate(*without, "custodian-a", "--backup", keys.recipient_of(keys.load_age_identity(kept))).code == 0
    (folder / "ed25519.pem").write_bytes((tmp_path / "x" / "ed25519.pem").read_bytes())
    mixed = acclimate(*without, "custodian-a", "--json").json["error"]
    assert mixed["code"] == "conflict" and "other keys than those" in mixed["sentence"] and "{" not in mixed["sentence"]


@pytest.mark.parametrize("kept", ["none", "backup"])
@pytest.mark.parametrize("asked", ["none", "same", "other", "no recipient", "there", "another there", "not there"])
def test_keygen_typed_again_says_of_each_backup_what_is_so(
    kept: str, asked: str, acclimate: Callable[..., Ran], tmp_path: Path
) -> None:
    folder, stick, unplugged = tmp_path / "a", tmp_path / "stick", tmp_path / "unplugged"
    keygen = ("custodian", "keygen", "--name", "custodian-a", "--keys", folder, "--json")
    first = acclimate(*keygen, *(() if kept == "none" else ("--make-backup", stick))).json
    assert (first["backup"] is None) == (kept == "none")
    other = acclimate("custodian", "keygen", "--name", "x", "--keys", tmp_path / "x", "--json").json["age"]
    if asked == "another there" or (asked == "there" and kept == "none"):
        stick.write_bytes((tmp_path / "x" / "age.txt").read_bytes())
        stick.chmod(0o600)
    options: dict[str, tuple[object, ...]] = {
        "none": (),
        "same": ("--backup", first["backup"] or other),
        "other": ("--backup", other),
        "no recipient": ("--backup", "age1nothing"),
        "there": ("--make-backup", stick),
        "another there": ("--make-backup", stick),
        "not there": ("--make-backup", unplugged),
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    ran = acclimate(*keygen, *options[asked])
    # A success says that the backup asked for is the one in the document; nothing else is one.
    fine = {"none": {"none"}, "backup": {"none", "same", "there", "not there"}}[kept]
    code = "key_refused" if asked == "no recipient" else "conflict"
    assert (ran.code, ran.json if ran.code == 0 else ran.json["error"]["code"]) == (
        (0, first) if asked in fine else (1, code)
    )
    assert json.loads((folder / "custodian.json").read_text()) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    if kept == "none" and asked == "not there":
        # The hint's way leads to a backup.
        (folder / "custodian.json").unlink()
        made = acclimate(*keygen, *options[asked])
        assert made.json["backup"] == keys.recipient_of(keys.load_age_identity(unplugged))
        assert (made.json["age"], made.json["ed25519"]) == (first["age"], first["ed25519"])


@pytest.mark.parametrize(("name", "role"), [("custodian-a", "entrant"), ("custodian-b", "custodian")])
def test_nobody_elses_folder_becomes_a_custodians(
    name: str, role: str, acclimate: Callable[..., Ran], tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    account_in(folder, name=name, role=role)
    before = sorted(path.name for path in folder.iterdir())
    ran = acclimate("custodian", "keygen", "--name", "custodian-a", "--keys", folder, "--json")
    assert ran.json["error"]["code"] == "conflict"
    assert f"{name!r} ({role})" in ran.err
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize("left", [(), ("age.txt",), ("age.txt", "ed25519.pem"), ("age.txt", "ed25519.pem", "backup")])
def test_a_killed_keygen_is_finished_by_the_same_line(
    left: tuple[str, ...], acclimate: Callable[..., Ran], tmp_path: Path
) -> None:
    """Whatever a kill has left, in the order in which it is made."""
    whole, folder, backup = tmp_path / "whole", tmp_path / "a", tmp_path / "backup.txt"
    keygen = ("custodian", "keygen", "--name", "custodian-a", "--json", "--keys")
    made = acclimate(*keygen, whole, "--make-backup", tmp_path / "other.txt").json
    folder.mkdir(mode=0o700)
    for name in left:
        source, to = (tmp_path / "other.txt", backup) if name == "backup" else (whole / name, folder / name)
        to.write_bytes(source.read_bytes())
        to.chmod(0o600)
    ran = acclimate(*keygen, folder, "--make-backup", backup)
    assert ran.code == 0, ran.err
    for field, file in (("age", "age.txt"), ("ed25519", "ed25519.pem"), ("backup", "backup")):
        assert (ran.json[field] == made[field]) == (file in left), field
    assert ran.json["backup"] == keys.recipient_of(keys.load_age_identity(backup))
