"""Key folders: private, whole, never overwritten."""

import shutil
import stat
import subprocess
import sys

import pyrage
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from acclimate import custody, keys
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_private_and_loads_to_the_same_keys(tmp_path):
    made = keys.create(tmp_path / "deep" / "ada", age=True)
    loaded = keys.load(tmp_path / "deep" / "ada")
    assert (loaded.public, loaded.age_identity) == (made.public, made.age_identity)
    assert made.age_recipient.startswith("age1")
    assert keys.check_recipient(made.age_recipient) == made.age_recipient
    assert mode(made.folder) == 0o700
    assert {path.name: mode(path) for path in made.folder.iterdir()} == {"ed25519.pem": 0o600, "age.txt": 0o600}
    assert custody.unwrap(custody.wrap(b"share", made.age_recipient), made.age_identity) == b"share"


def test_the_key_signs_for_its_public_text(tmp_path):
    made = keys.create(tmp_path / "ada", age=False)
    request = records.sign("RoundVoided", "r", {"reason": "test"}, key=made.ed25519)
    assert request["by"] == made.public
    records.public_key(made.public)


def test_keys_without_an_age_identity_say_so(tmp_path):
    made = keys.create(tmp_path / "ada", age=False)
    assert made.age_identity is None
    with pytest.raises(Refusal, match="can't open envelopes") as caught:
        _ = made.age_recipient
    assert caught.value.hint


def test_no_secret_is_shown_when_keys_are_printed(tmp_path):
    made = keys.create(tmp_path / "ada", age=True)
    assert made.age_identity not in repr(made)
    assert "ed25519=" not in repr(made)


@pytest.mark.parametrize("name", ["ed25519.pem", "age.txt"])
@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o644, 0o611])
def test_a_file_that_others_may_use_is_refused_with_the_remedy(tmp_path, name, bits):
    made = keys.create(tmp_path / "ada", age=True)
    (made.folder / name).chmod(bits)
    with pytest.raises(Refusal, match=f"mode {bits:04o}") as caught:
        keys.load(made.folder)
    assert caught.value.code == "key_refused"
    assert f"chmod 600 {made.folder / name}" in caught.value.hint


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    made = keys.create(tmp_path / "ada", age=False)
    made.folder.chmod(0o770)
    with pytest.raises(Refusal) as caught:
        keys.load(made.folder)
    assert (caught.value.code, caught.value.hint) == ("key_refused", f"chmod 700 {made.folder}")


def test_an_existing_key_is_never_overwritten(tmp_path):
    made = keys.create(tmp_path / "ada", age=True)
    before = {path.name: path.read_bytes() for path in made.folder.iterdir()}
    for age in (True, False):
        with pytest.raises(Refusal, match="never overwritten"):
            keys.create(tmp_path / "ada", age=age)
    with pytest.raises(Refusal, match="never overwritten"):
        keys.create_signing_key(made.folder / "ed25519.pem")
    assert {path.name: path.read_bytes() for path in made.folder.iterdir()} == before


def test_a_creation_that_was_killed_between_its_files_is_finished_by_the_next(tmp_path):
    made = keys.create(tmp_path / "ada", age=True)
    (made.folder / "ed25519.pem").unlink()
    with pytest.raises(Refusal, match=r"ed25519\.pem"):
        keys.load(made.folder)
    finished = keys.create(tmp_path / "ada", age=True)
    assert finished.age_identity == made.age_identity


def test_of_many_that_create_at_once_one_wins_and_nothing_is_left_over(tmp_path):
    program = "import sys, pathlib; from acclimate import keys; print(keys.create(pathlib.Path(sys.argv[1]), age=False).public)"
    command = [sys.executable, "-c", program, str(tmp_path / "ada")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    results = [process.communicate(timeout=60) + (process.returncode,) for process in running]
    winners = [out.strip() for out, _, code in results if code == 0]
    assert winners == [keys.load(tmp_path / "ada").public]
    assert all("never overwritten" in err for _, err, code in results if code)
    assert [path.name for path in (tmp_path / "ada").iterdir()] == ["ed25519.pem"]


def test_a_folder_with_other_things_in_it_keeps_its_mode_and_contents(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o755)
    keys.create(tmp_path, age=False)
    assert mode(tmp_path) == 0o755
    assert (tmp_path / "notes.txt").read_text() == "mine"


def _other_kind():
    return generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize("data", [b"", b"not a key", b"\xff" * 100, _other_kind(), b"-" * 70_000])
def test_a_file_that_holds_no_such_key_is_refused(tmp_path, data):
    made = keys.create(tmp_path / "ada", age=True)
    for name in ("ed25519.pem", "age.txt"):
        broken = tmp_path / name
        shutil.copytree(made.folder, broken)
        (broken / name).write_bytes(data)
        with pytest.raises(Refusal) as caught:
            keys.load(broken)
        assert caught.value.code == "key_refused"
        assert str(data) not in caught.value.sentence or not data


def test_two_identities_in_one_file_are_refused(tmp_path):
    made = keys.create(tmp_path / "ada", age=True)
    with (made.folder / "age.txt").open("a") as stream:
        stream.write(f"{pyrage.x25519.Identity.generate()}\n")
    with pytest.raises(Refusal, match="2 age identities"):
        keys.load(made.folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(Refusal, match="nobody") as caught:
        keys.load(tmp_path / "nobody")
    assert caught.value.code == "file_unreadable" and "keygen" in caught.value.hint
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match="holds no keys") as caught:
        keys.load(tmp_path / "empty")
    assert caught.value.code == "file_unreadable" and "register" in caught.value.hint


@pytest.mark.parametrize("text", ["", "age1", "AGE1" + "Q" * 58, "ssh-ed25519 AAAA", None])
def test_a_text_that_is_no_recipient_is_refused(text):
    with pytest.raises(Refusal) as caught:
        keys.check_recipient(text)
    assert caught.value.code == "key_refused"
