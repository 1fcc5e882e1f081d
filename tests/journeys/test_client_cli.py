"""The client and the command line as people use them: over real HTTP, with what goes wrong on the way."""

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import Ran

from acclimate import keys, log
from acclimate.cli import moments, output, status
from acclimate.client import Client
from acclimate.client.connection import CHUNK
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

# ---- the command line in this process ------------------------------------------------------------------------------


# ---- a server that misbehaves --------------------------------------------------------------------------------------


class Script(BaseHTTPRequestHandler):
    """Answers from a list of (status, headers, body), and remembers what came."""

    answers: list[tuple[int, dict[str, str], bytes]]
    seen: list[tuple[str, str, dict[str, str], int]]
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        got = 0
        while got < length:
            piece = self.rfile.read(min(CHUNK, length - got))
            if not piece:
                break
            got += len(piece)
        self.seen.append((self.command, self.path, dict(self.headers), got))
        status_code, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status_code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = answer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
        pass


@contextmanager
def scripted(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[tuple[str, type[Script]]]:
    handler = type("Handler", (Script,), {"answers": list(answers), "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


BUSY = (503, {"Content-Type": "application/problem+json"}, as_json({"status": 503, "code": "busy", "detail": "taken"}))
SERVER = (200, {}, as_json({"version": "1", "now": "2027-03-01T00:00:00.000000Z"}))


def test_a_busy_server_is_asked_again() -> None:
    with scripted(BUSY, BUSY, SERVER) as (url, script), Client(url) as client:
        assert client.server()["version"] == "1"
    assert len(script.seen) == 3


def test_patience_ends_with_the_servers_own_refusal() -> None:
    with scripted(BUSY) as (url, script), Client(url, patience=0.5) as client:
        with pytest.raises(Refusal) as caught:
            client.server()
    assert (caught.value.code, caught.value.sentence) == ("busy", "taken")
    assert len(script.seen) >= 2


def test_a_refusal_arrives_as_it_was_sent() -> None:
    body = {
        "type": "urn:x", "title": "t", "status": 422, "detail": "two things", "code": "manifest_invalid", "hint": "mend",
        "problems": ["a", "b"], "request_id": "r",
    }  # fmt: skip
    with scripted((422, {}, as_json(body))) as (url, script), Client(url) as client:
        with pytest.raises(Refusal) as caught:
            client.round("x")
    refusal = caught.value
    assert (refusal.code, refusal.sentence, refusal.hint) == ("manifest_invalid", "two things", "mend")
    assert refusal.problems == ("a", "b")
    assert len(script.seen) == 1


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((502, {}, b"<html>bad gateway"), "server_unreachable"),
        ((404, {}, b"not here"), "not_found"),
        ((409, {}, as_json({"code": "of_a_newer_server", "detail": "new"})), "conflict"),
        ((200, {}, b"<html>welcome to my blog"), "server_unreachable"),
        ((200, {}, b"[1]"), "server_unreachable"),
    ],
)
def test_an_answer_that_is_not_ours_is_a_refusal(answer: tuple[int, dict[str, str], bytes], code: str) -> None:
    with scripted(answer) as (url, _), Client(url) as client:
        with pytest.raises(Refusal) as caught:
            client.server()
    assert caught.value.code == code
    assert caught.value.sentence


def test_nobody_there_is_server_unreachable_with_a_hint() -> None:
    with Client("http://127.0.0.1:9", patience=0.3) as client:
        with pytest.raises(Refusal) as caught:
            client.server()
    assert caught.value.code == "server_unreachable"
    assert "http://127.0.0.1:9" in caught.value.sentence
    assert caught.value.hint


@pytest.mark.parametrize("url", ["rounds.example.org", "ftp://x", "", "http://", "http://[::1"])
def test_an_address_that_is_none_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(Refusal) as caught:
        Client(url)
    assert caught.value.code == "config_invalid"


def test_a_large_upload_is_streamed_and_repeated_whole(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "sealed"
    with path.open("wb") as stream:
        stream.truncate(48 * CHUNK)
    told: list[int] = []
    with scripted(BUSY, (200, {}, b"{}")) as (url, script), Client(url, token="acc_x") as client:
        tracemalloc.start()
        try:
            digest = client.put_blob(path, progress=lambda done, total: told.append(done * 100 // total))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert digest == digests.of_file(path)
    assert [(method, got) for method, _, _, got in script.seen] == [("PUT", 48 * CHUNK)] * 2
    headers = script.seen[1][2]
    assert headers["Content-Length"] == str(48 * CHUNK)
    assert headers["Authorization"] == "Bearer acc_x"
    assert told[-1] == 100
    assert peak < 16 * CHUNK


def test_a_download_that_fails_leaves_no_file(tmp_path: Path) -> None:
    cut = (200, {"Content-Length": "1000", "Connection": "close"}, b"short")
    with scripted(cut) as (url, _), Client(url, patience=0.3) as client:
        with pytest.raises(Refusal) as caught:
            client.bundle("r", tmp_path / "bundle.zip")
    assert caught.value.code == "server_unreachable"
    assert list(tmp_path.iterdir()) == []


# ---- words and dates -----------------------------------------------------------------------------------------------

NOW = datetime(2027, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("now", timedelta(0)),
        ("+30s", timedelta(seconds=30)),
        ("+2h", timedelta(hours=2)),
        ("+1d12h", timedelta(hours=36)),
        ("+90m", timedelta(minutes=90)),
        ("2027-03-01T12:00:00Z", timedelta(0)),
        ("2027-03-01T14:00:00+01:00", timedelta(hours=1)),
        ("2027-03-01t12:00:00.5z", timedelta(seconds=0.5)),
        ("2027-03-01 12:01Z", timedelta(minutes=1)),
    ],
)
def test_dates_are_read(text: str, after: timedelta) -> None:
    assert moments.parse(text, now=NOW) == NOW + after


@pytest.mark.parametrize(
    "text",
    [
        "2027-03-01",
        "2027-03-01T12:00:00",
        "2027-02-30T00:00:00Z",
        "+",
        "+2w",
        "-2h",
        "2 h",
        "tomorrow",
        "",
        "+999999d" * 2,
    ],
)
def test_dates_that_could_mean_several_moments_or_none_are_refused(text: str) -> None:
    with pytest.raises(Refusal) as caught:
        moments.parse(text, now=NOW)
    assert caught.value.code == "time_invalid"


def test_a_naive_date_is_refused_with_suggestions_that_are_accepted() -> None:
    with pytest.raises(Refusal) as caught:
        moments.parse("2027-03-01T12:00:00", now=NOW)
    suggestions = [word.rstrip(";,") for word in caught.value.hint.split() if word.startswith("2027")]
    assert len(suggestions) == 2
    assert moments.parse(suggestions[0], now=NOW) == NOW
    moments.parse(suggestions[1], now=NOW)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "now"), (1, "in 1 s"), (-1, "1 s ago"), (3_660, "in 1 h 1 min"), (86_400, "in 1 d"), (-90_061, "1 d 1 h ago"),
        (59.6, "in 1 min"), (3_601, "in 1 h"),
    ],
)  # fmt: skip
def test_distances_for_people(seconds: float, text: str) -> None:
    assert moments.distance(timedelta(seconds=seconds)) == text


def test_a_table_lines_up() -> None:
    assert output.table(("rank", "entrant"), [(1, "ada"), (12, "b")], right=("rank",)) == [
        "rank  entrant",
        "   1  ada",
        "  12  b",
    ]


def test_the_present_phase_stands_in_brackets() -> None:
    assert "sealed→[open]→closed" in status.phase_line("open")
    assert "[voided]" in status.phase_line("voided")


HOSTILE = "a\x1b]0;owned\x07\x9b2J\x7f\r\u202eb\nhint: run this\ud800"
"""What a server may write to steer a terminal: title, screen, line, direction, a hint of its own, half a character."""


def tame(text: str) -> bool:
    return all(c.isprintable() for c in text.replace("\n", ""))


def test_what_a_server_writes_does_not_steer_the_terminal(acclimate: Callable[..., Ran]) -> None:
    state = {
        "round": HOSTILE, "title": HOSTILE, "phase": "voided", "next": HOSTILE, "data_is_public": False, "entrants": 0,
        "submissions": 0, "now": "2027-03-01T12:00:00.000000Z", "closes": "2027-03-01T12:00:00.000000Z",
        "waiting_for": [HOSTILE], "custodians": [{"name": HOSTILE, "acknowledged": True, "released": False}],
        "threshold": 1,
    }  # fmt: skip
    problem = {"code": "conflict", "detail": HOSTILE, "hint": HOSTILE, "problems": [HOSTILE]}
    json_headers = {"Content-Type": "application/json"}
    answers: dict[tuple[str, ...], list[tuple[int, dict[str, str], bytes]]] = {
        ("status", "x"): [(200, json_headers, as_json(state)), (200, json_headers, b"[]")],
        ("status", "x", "--watch"): [(200, json_headers, as_json(state)), (200, json_headers, b"[]")],
        ("round", "list"): [(200, json_headers, as_json([state]))],
        ("ranking", "x"): [(409, json_headers, as_json(problem))],
    }
    for command, given in answers.items():
        for more in ((), ("--json",)):
            with scripted(*given) as (url, _):
                ran = acclimate(*command, "--server", url, *more)
            assert tame(ran.out) and tame(ran.err), (command, more)
            assert "owned" in ran.out + ran.err
            assert "\nhint: run this" not in ran.out + ran.err
            if more:
                # Nothing is lost for a program.
                value = ran.json[0] if isinstance(ran.json, list) else ran.json
                said = value["error"]["sentence"] if "error" in value else value["next"]
                assert said == HOSTILE


# ---- without a server ----------------------------------------------------------------------------------------------


def test_a_custodians_keys_are_safe_and_its_document_is_complete(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
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


def test_a_custodian_is_told_what_comes_next(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    ran = acclimate("custodian", "keygen", "--name", "custodian-a", "--keys", tmp_path / "a")
    assert "invitation" in ran.err
    assert "acclimate register --role custodian --name custodian-a --invitation CODE" in ran.err


def test_no_backup_is_made_for_a_folder_that_is_refused(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
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


def test_a_custodians_folder_registers_as_that_custodian_only(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    folder = tmp_path / "a"
    assert acclimate("custodian", "keygen", "--name", "custodian-a", "--keys", folder).code == 0
    with scripted(SERVER) as (url, script):
        for name, role in (("custodian-b", "custodian"), ("custodian-a", "entrant")):
            ran = acclimate("register", "--server", url, "--name", name, "--role", role, "--keys", folder, "--json")
            assert ran.code == 1
            assert ran.json["error"]["code"] == "conflict"
            assert "custodian-a" in ran.err
    assert script.seen == []


def test_no_key_is_made_where_no_acclimate_server_answers(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    for answer in ((404, {}, b"not here"), SERVER):
        with scripted(answer) as (url, _):
            assert acclimate("register", "--server", url, "--name", "ada", "--keys", tmp_path / "ada").code == 1
        assert not (tmp_path / "ada").exists()


def test_a_command_without_a_server_or_an_account_says_what_to_do(
    acclimate: Callable[..., Ran], tmp_path: Path
) -> None:
    ran = acclimate("status", "x")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert "hint: --server URL" in ran.err
    keys.create(tmp_path / "ada", age=False)
    ran = acclimate("enter", "x", "--keys", tmp_path / "ada")
    assert ran.code == 1
    assert "acclimate register" in ran.err


def test_json_says_a_refusal_on_stdout_too(acclimate: Callable[..., Ran]) -> None:
    ran = acclimate("status", "x", "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "config_invalid"
    assert ran.err.startswith("error: ")


def test_a_token_that_others_may_read_is_not_used(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    keys.create(tmp_path / "ada", age=False)
    account = tmp_path / "ada" / "account.json"
    account.write_text(json.dumps({"server": "http://127.0.0.1:9", "id": "ada", "role": "entrant", "token": "acc_x"}))
    account.chmod(0o644)
    ran = acclimate("enter", "x", "--keys", tmp_path / "ada")
    assert ran.code == 1
    assert "chmod 600" in ran.err
    assert "acc_x" not in ran.err


@pytest.mark.parametrize("changes", [{"token": "acc_é"}, {"token": 5}, {"more": "x"}, {"id": "ada\n"}])
def test_a_broken_account_is_refused(acclimate: Callable[..., Ran], tmp_path: Path, changes: dict) -> None:
    keys.create(tmp_path / "ada", age=False)
    account = tmp_path / "ada" / "account.json"
    sound = {"server": "http://127.0.0.1:9", "id": "ada", "role": "entrant", "token": "acc_x"}
    account.write_text(json.dumps({**sound, **changes}))
    account.chmod(0o600)
    ran = acclimate("enter", "x", "--keys", tmp_path / "ada")
    assert ran.code == 1
    assert "is not an account" in ran.err
    assert "hint: " in ran.err


def test_a_token_goes_to_no_other_server(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
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


def test_a_receipt_verifies_with_the_logs_key_only(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
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


def test_a_key_folder_that_keeps_the_logs_key_names_it(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
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
    acclimate: Callable[..., Ran], tmp_path: Path, name: str
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
def test_what_is_no_bundle_is_one_refusal(acclimate: Callable[..., Ran], tmp_path: Path, kind: str) -> None:
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


def test_a_damaged_bundle_still_gets_the_whole_report(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "entries.jsonl").write_text("")
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04 and no more")
    for path in (tmp_path, tmp_path / "cut.zip"):
        ran = acclimate("verify", path)
        assert ran.code == 1
        assert "FAILED" in ran.out


def test_a_model_to_try_with_is_trained_from_public_rows_alone(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
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
def test_only_the_api_makes_a_data_folder(
    acclimate: Callable[..., Ran], tmp_path: Path, command: tuple[str, ...]
) -> None:
    for package in ("sqlalchemy", "torch", "transformers", "mlflow"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    ran = acclimate(*command, "--data", tmp_path / "typo")
    assert ran.code == 1
    assert f"error: no data folder here: {tmp_path / 'typo'}\n" in ran.err
    assert "acclimate up" in ran.err
    assert not (tmp_path / "typo").exists()


def test_the_dispatchers_settings_are_options(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    for package in ("sqlalchemy", "torch", "transformers", "mlflow"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    ran = acclimate("dispatch", "--data", tmp_path, "--runner", "abacus", "--slots", "-1")
    assert ran.code == 1
    assert "  runner (argument): 'abacus' must be one of ray, local\n" in ran.err
    assert "  slots (argument): -1 must be" in ran.err


def test_a_changed_receipt_is_refused(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
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
        capture_output=True, text=True, timeout=60, check=False,
        env={**given, **{name: str(value) for name, value in environment.items()}},
    )  # fmt: skip


def test_ctrl_c_ends_with_130_and_one_line() -> None:
    with scripted(BUSY) as (url, script):
        process = subprocess.Popen(
            [sys.executable, "-m", "acclimate", "status", "x", "--server", url, "--watch"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        until = time.monotonic() + 30
        while not script.seen and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (out, err) == ("", "interrupted\n")
