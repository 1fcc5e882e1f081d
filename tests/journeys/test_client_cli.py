"""The command line where no server is needed, or none answers: key folders, accounts, receipts, bundles, and how it ends."""

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from commands import Run, done
from scripted import BUSY, SERVER, scripted
from waiting import WITHIN

from acclimate import keys, log
from acclimate.cli import output
from acclimate.client.holdouts import Seen, require_disjoint
from acclimate_competitions import corrections, digests, records
from acclimate_competitions.errors import Refusal

NOW = datetime(2027, 3, 1, 12, tzinfo=UTC)


def test_a_problem_that_the_sentence_has_is_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"v": 1, "metrics": {"digit": "none"}, "targets": 1, "void": 2, "nonce": "A" * 43 + "="}
    for count, wrong in ((3, document), (1, {**document, "targets": {}, "void": {}})):
        with pytest.raises(Refusal) as caught:
            corrections.parse(wrong)
        output.complain(caught.value, as_json=True)
        shown = capsys.readouterr()
        problems = json.loads(shown.out)["error"]["problems"]
        assert len(problems) == count
        assert [shown.err.count(problem) for problem in problems] == [1] * count
    holdout = Seen("digits-1", "PUBLISHED", "kept digests", "", ("digit: e1 is there", "digit: e2 is there"))
    with pytest.raises(Refusal) as caught:
        require_disjoint([holdout])
    output.complain(caught.value, as_json=False)
    said = capsys.readouterr().err
    assert [said.count(word) for word in ("e1 is there", "e2 is there")] == [1, 1]


def test_a_problem_that_the_sentence_only_ends_like_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    problems = ("a.parquet is missing", "missing", "digit", "is missing")
    for sentence, skipped in (("2 problems: a.parquet is missing", 1), ("there is no task digit", 0)):
        output.complain(Refusal("splits_invalid", sentence, hint="build it", problems=problems), as_json=False)
        lines = capsys.readouterr().err.splitlines()
        listed = [f"  {problem}" for problem in problems[skipped:]]
        assert lines == [f"error: {sentence}", *listed, "code: splits_invalid", "hint: build it"]


def test_a_custodians_keys_are_safe_and_its_document_is_complete(acclimate: Run, tmp_path: Path) -> None:
    folder, backup = tmp_path / "a", tmp_path / "stick" / "backup.txt"
    backup.parent.mkdir()
    ran = acclimate("custodian", "keygen", "--name", "custodian-a", "--keys", folder, "--make-backup", backup, "--json")
    assert ran.code == 0, ran.err
    document = ran.json
    assert document == json.loads((folder / "custodian.json").read_text())
    opened = keys.load(folder)
    assert document == {
        "name": "custodian-a", "age": opened.age_recipient, "ed25519": opened.public,
        "backup": keys.recipient_of(keys.load_age_identity(backup)),
    }  # fmt: skip
    for path in (*folder.iterdir(), backup):
        assert path.stat().st_mode & 0o077 == 0, path
    again = acclimate("custodian", "keygen", "--name", "custodian-a", "--keys", folder)
    # Typed twice it is the same custodian; nothing is made anew.
    assert again.code == 0, again.err
    assert keys.load(folder).public == opened.public
    assert json.loads((folder / "custodian.json").read_text()) == document


def test_a_custodian_is_told_what_comes_next(acclimate: Run, tmp_path: Path) -> None:
    ran = acclimate("custodian", "keygen", "--name", "custodian-a", "--keys", tmp_path / "a")
    assert "invitation" in ran.err
    assert "acclimate register --role custodian --name custodian-a --invitation CODE" in ran.err


def test_no_backup_is_made_for_a_folder_that_is_refused(acclimate: Run, tmp_path: Path) -> None:
    taken, shared, plain = tmp_path / "taken", tmp_path / "shared", tmp_path / "plain"
    keys.create(taken, age=False)
    shared.mkdir()
    (shared / "x").write_text("")
    shared.chmod(0o777)
    plain.write_text("")
    for folder in (taken, shared, plain):
        backup = tmp_path / "backup.txt"
        ran = acclimate("custodian", "keygen", "--name", "a", "--keys", folder, "--make-backup", backup)
        assert ran.code == 1, folder
        assert not backup.exists()
    assert not (taken / "custodian.json").exists()


def test_a_custodians_folder_registers_as_that_custodian_only(acclimate: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    assert acclimate("custodian", "keygen", "--name", "custodian-a", "--keys", folder).code == 0
    with scripted(SERVER) as (url, script):
        for name, role in (("custodian-b", "custodian"), ("custodian-a", "entrant")):
            ran = acclimate("register", "--server", url, "--name", name, "--role", role, "--keys", folder, "--json")
            assert ran.code == 1
            assert ran.json["error"]["code"] == "conflict"
            assert "custodian-a" in ran.err
    assert script.seen == []


def test_no_key_is_made_where_no_acclimate_server_answers(acclimate: Run, tmp_path: Path) -> None:
    for answer in ((404, {}, b"not here"), SERVER):
        with scripted(answer) as (url, _):
            assert acclimate("register", "--server", url, "--name", "ada", "--keys", tmp_path / "ada").code == 1
        assert not (tmp_path / "ada").exists()


def test_a_command_without_a_server_or_an_account_says_what_to_do(acclimate: Run, tmp_path: Path) -> None:
    ran = acclimate("status", "x")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert "hint: --server URL" in ran.err
    keys.create(tmp_path / "ada", age=False)
    ran = acclimate("enter", "x", "--keys", tmp_path / "ada")
    assert ran.code == 1
    assert "acclimate register" in ran.err


def test_json_says_a_refusal_on_stdout_too(acclimate: Run) -> None:
    ran = acclimate("status", "x", "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "config_invalid"
    assert ran.err.startswith("error: ")


def test_a_token_that_others_may_read_is_not_used(acclimate: Run, tmp_path: Path) -> None:
    keys.create(tmp_path / "ada", age=False)
    account = tmp_path / "ada" / "account.json"
    account.write_text(json.dumps({"server": "http://127.0.0.1:9", "id": "ada", "role": "entrant", "token": "acc_x"}))
    account.chmod(0o644)
    ran = acclimate("enter", "x", "--keys", tmp_path / "ada")
    assert ran.code == 1
    assert "chmod 600" in ran.err
    assert "acc_x" not in ran.err


@pytest.mark.parametrize("changes", [{"token": "acc_é"}, {"token": 5}, {"more": "x"}, {"id": "ada\n"}])
def test_a_broken_account_is_refused(acclimate: Run, tmp_path: Path, changes: dict) -> None:
    keys.create(tmp_path / "ada", age=False)
    account = tmp_path / "ada" / "account.json"
    sound = {"server": "http://127.0.0.1:9", "id": "ada", "role": "entrant", "token": "acc_x"}
    account.write_text(json.dumps({**sound, **changes}))
    account.chmod(0o600)
    ran = acclimate("enter", "x", "--keys", tmp_path / "ada")
    assert ran.code == 1
    assert "is not an account" in ran.err
    assert "hint: " in ran.err


def test_a_token_goes_to_no_other_server(acclimate: Run, tmp_path: Path) -> None:
    keys.create(tmp_path / "ada", age=False)
    account = tmp_path / "ada" / "account.json"
    account.write_text(json.dumps({"server": "http://127.0.0.1:9", "id": "ada", "role": "entrant", "token": "acc_x"}))
    account.chmod(0o600)
    with scripted((200, {}, b"[]")) as (url, script):
        assert acclimate("round", "list", "--server", url, "--keys", tmp_path / "ada").code == 0
    assert "Authorization" not in script.seen[0][2]


def receipt_of(tmp_path: Path, count: int = 5) -> tuple[Path, log.Signer]:
    signer = log.Signer("example.org/log", keys.create(tmp_path / "signer", age=False).ed25519)
    entries = [
        records.Record(
            "RoundOpened", "digits-1-0123456789ab", NOW + timedelta(seconds=i), {"seal": digests.of_bytes(bytes([i]))}
        ).encode()
        for i in range(count)
    ]
    hashes = [log.leaf_hash(entry) for entry in entries]
    note = log.sign_checkpoint(signer, count, log.root(hashes))
    receipt = log.Receipt(2, entries[2], tuple(log.inclusion_proof(hashes, 2, count)), note)
    path = tmp_path / "r.tlog-proof"
    path.write_text(receipt.text())
    return path, signer


def test_a_receipt_verifies_with_the_logs_key_only(acclimate: Run, tmp_path: Path) -> None:
    path, signer = receipt_of(tmp_path)
    ran = acclimate("receipt", "verify", path, "--log-key", signer.vkey, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["index"] == 2
    assert ran.json["record"]["type"] == "RoundOpened"
    assert {check["status"] for check in ran.json["checks"]} == {"ok"}
    (tmp_path / "log.key").write_text(signer.vkey + "\n")
    assert acclimate("receipt", "verify", path, "--log-key", tmp_path / "log.key").code == 0
    other = log.Signer("example.org/log", keys.create(tmp_path / "other", age=False).ed25519)
    assert acclimate("receipt", "verify", path, "--log-key", other.vkey).code == 1
    assert acclimate("receipt", "verify", path).code == 1
    assert acclimate("receipt", "verify", tmp_path / "none", "--log-key", signer.vkey).code == 1


def test_a_key_folder_that_keeps_the_logs_key_names_it(acclimate: Run, tmp_path: Path) -> None:
    path, signer = receipt_of(tmp_path)
    other = log.Signer("example.org/other", keys.create(tmp_path / "other", age=False).ed25519)
    folder = tmp_path / "me"
    folder.mkdir()
    verify = ("receipt", "verify", path, "--log-key")
    ran = acclimate(*verify, folder)
    assert ran.code == 1
    assert "keeps no log key" in ran.err
    (folder / "pins.json").write_text(json.dumps({"r-1": {"log": signer.vkey}, "r-2": {"log": signer.vkey}}))
    assert acclimate(*verify, folder).code == 0
    (folder / "log.vkey").write_text(other.vkey + "\n")
    # Of several it takes the one that fits.
    assert acclimate(*verify, folder).code == 0
    (folder / "pins.json").unlink()
    assert acclimate(*verify, folder).code == 1
    (folder / "log.vkey").write_text(signer.vkey + "\n")
    assert acclimate(*verify, folder).code == 0
    assert acclimate(*verify, folder / "log.vkey").code == 0


@pytest.mark.parametrize("name", ["missing", "./a+missing", "no/such.vkey"])
def test_a_log_key_that_looks_like_a_path_and_is_not_there_is_no_such_file(
    acclimate: Run, tmp_path: Path, name: str
) -> None:
    path, _ = receipt_of(tmp_path)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "MANIFEST").write_text("")
    for command in (("receipt", "verify", path), ("verify", bundle)):
        ran = acclimate(*command, "--log-key", name)
        assert ran.code == 1
        assert f"error: {name}: no such file\n" in ran.err


@pytest.mark.parametrize("kind", ["folder", "text", "zip"])
def test_what_is_no_bundle_is_one_refusal(acclimate: Run, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "folder":
        path.mkdir()
        (path / "README").write_text("x")
    elif kind == "text":
        path.write_text("x")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("thing/README", "x")
    ran = acclimate("verify", path, "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "bundle_invalid"
    assert "error: this is no bundle" in ran.err
    assert acclimate("verify", path).out == ""


def test_a_damaged_bundle_still_gets_the_whole_report(acclimate: Run, tmp_path: Path) -> None:
    (tmp_path / "entries.jsonl").write_text("")
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04 and no more")
    for path in (tmp_path, tmp_path / "cut.zip"):
        ran = acclimate("verify", path)
        assert ran.code == 1
        assert "FAILED" in ran.out


def test_a_model_to_try_with_is_trained_from_public_rows_alone(acclimate: Run, tmp_path: Path) -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import tiny

    folder = tmp_path / "public"
    tiny.competition(folder)
    for holdout in folder.rglob("holdout.parquet"):
        holdout.unlink()
    ran = acclimate("competition", "model", folder, "oak", "--out", tmp_path / "model")
    assert ran.code == 1 and "birch" in ran.err and not (tmp_path / "model").exists()
    ran = acclimate("competition", "model", folder, "alder", "--out", tmp_path / "model", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["parameters"] > 1000
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "model").iterdir()}
    assert (tmp_path / "model/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    # What is there is never replaced, and nothing is left beside it.
    ran = acclimate("competition", "model", folder, "alder", "--out", tmp_path / "model")
    assert ran.code == 1 and "exists already" in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "public"]


@pytest.mark.parametrize("command", [("invite", "--role", "organizer"), ("dispatch", "--runner", "local"), ("mlflow",)])
def test_only_the_api_makes_a_data_folder(acclimate: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    for package in ("sqlalchemy", "torch", "transformers", "mlflow"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    ran = acclimate(*command, "--data", tmp_path / "typo")
    assert ran.code == 1
    assert f"error: no data folder here: {tmp_path / 'typo'}\n" in ran.err
    assert "acclimate up" in ran.err
    assert not (tmp_path / "typo").exists()


def test_the_dispatchers_settings_are_options(acclimate: Run, tmp_path: Path) -> None:
    for package in ("sqlalchemy", "torch", "transformers", "mlflow"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    ran = acclimate("dispatch", "--data", tmp_path, "--runner", "abacus", "--slots", "-1")
    assert ran.code == 1
    assert ran.err.count("runner (argument): 'abacus' must be one of ray, local\n") == 1
    assert "  slots (argument): -1 must be" in ran.err


def test_a_changed_receipt_is_refused(acclimate: Run, tmp_path: Path) -> None:
    path, signer = receipt_of(tmp_path)
    text = path.read_text()
    entry = base64.b64encode(
        records.Record("RoundOpened", "digits-1-0123456789ab", NOW, {"seal": digests.of_bytes(b"x")}).encode()
    ).decode()
    lines = text.split("\n")
    for changed in (
        text.replace("index 2", "index 1"),
        "\n".join([lines[0], f"extra {entry}", *lines[2:]]),
        text.replace("\n5\n", "\n4\n"),
        text[:-2],
    ):
        assert changed != text
        path.write_text(changed)
        ran = acclimate("receipt", "verify", path, "--log-key", signer.vkey)
        assert ran.code == 1
        assert ran.err.startswith("error: ")


def test_a_missing_extra_is_a_refusal_with_the_pip_command(tmp_path: Path) -> None:
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('fastapi', 'sqlalchemy', 'mlflow', 'torch', 'ray'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    for command in ("api", "dispatch", "mlflow"):
        done = run_process(command, "--data", tmp_path / "data", PYTHONPATH=tmp_path)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "hint: in a clone of Acclimate: pip install '.[" in done.stderr


def run_process(*arguments: object, **environment: object) -> "subprocess.CompletedProcess[str]":
    given = {name: value for name, value in os.environ.items() if not name.startswith("ACCLIMATE_")}
    return subprocess.run(
        [sys.executable, "-m", "acclimate", *map(str, arguments)],
        capture_output=True, text=True, timeout=WITHIN, check=False,
        env={**given, **{name: str(value) for name, value in environment.items()}},
    )  # fmt: skip


def test_ctrl_c_ends_with_130_and_one_line() -> None:
    with scripted(BUSY) as (url, script):
        process = subprocess.Popen(
            [sys.executable, "-m", "acclimate", "status", "x", "--server", url, "--watch"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until = time.monotonic() + WITHIN
        while not script.seen and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WITHIN)
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted\n")


def test_an_auditors_second_secret_needs_no_more_words_than_the_pages_give(acclimate: Run, tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    ran = acclimate("audit", "keygen", "--keys", lab)
    assert ran.code == 2 and "--name NAME" in ran.err and not lab.exists()
    assert acclimate("audit", "keygen", "--again", "--keys", lab).code == 2
    first = acclimate("audit", "keygen", "--name", "lab", "--keys", lab, "--json")
    assert "acclimate register --role auditor --name lab" in done(first).err
    assert acclimate("audit", "keygen", "--keys", lab).code == 1
    # Once it is registered, nothing more is asked of it.
    account = {"id": "lab", "role": "auditor", "server": "http://127.0.0.1:9", "token": "t"}
    (lab / "account.json").write_text(json.dumps(account))
    (lab / "account.json").chmod(0o600)
    again = done(acclimate("audit", "keygen", "--again", "--keys", lab, "--json"))
    assert "auditor.json to the organizer" in again.err and "register" not in again.err
    assert again.json["name"] == "lab" and again.json["ed25519"] == first.json["ed25519"]
    assert again.json["draw"] != first.json["draw"]
    assert len(json.loads((lab / "draws.json").read_text())) == 2
    assert acclimate("audit", "keygen", "--again", "--name", "another", "--keys", lab).code == 1


@pytest.mark.parametrize(("value", "shown"), [(1800.0, "1800"), (12.34, "12"), (0.4519, "0.45"), (None, "-")])
def test_seconds_are_numbers_that_people_write(value: float | None, shown: str) -> None:
    from acclimate.cli.trials import _seconds

    assert _seconds(value) == shown
