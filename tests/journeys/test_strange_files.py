"""Files that a stranger sent or a user named by mistake: fifos, files without end, JSON without bottom, ZIPs that blow up. One refusal each."""

import gzip
import json
import os
import resource
import signal
import socket
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import live
import pytest
import rounds_made
from rounds_made import Made
from strange_servers import answering

from acclimate import files, keys, mirror, notes
from acclimate.cli import main
from acclimate.client import Client, connection, folder, requests
from acclimate_competitions import digests, reading
from acclimate_competitions.errors import CODES, Refusal

DEEP = "[" * 100_000 + "]" * 100_000
ROUND = "digits-2027-1-" + "0" * 32


@contextmanager
def no_waiting() -> Iterator[None]:
    """Ends a command that waits for a fifo's other end."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs a command in this process; its refusal."""
    for name in list(os.environ):
        if name.startswith("ACCLIMATE_"):
            monkeypatch.delenv(name)

    def run(*arguments: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["acclimate", *map(str, arguments), "--json"])
        capfd.readouterr()
        with no_waiting(), pytest.raises(SystemExit) as end:
            main.run()
        out, err = capfd.readouterr()
        assert end.value.code == 1 and "Traceback" not in err, (out, err)
        error: dict[str, Any] = json.loads(out)["error"]
        assert error["hint"], error
        return error

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture
def at(made: Made, tmp_path: Path) -> dict[str, Path]:
    """What commands can be given, good and bad."""
    paths = {name: tmp_path / name for name in ("bundle", "receipt", "fifo", "sparse", "deep", "keys")}
    made.write(paths["bundle"])
    paths["ciphertext"] = paths["bundle"] / "holdout.sealed"
    paths["receipt"].write_text(made.receipts[made.submissions[0]["index"]])
    os.mkfifo(paths["fifo"])
    with paths["sparse"].open("wb") as stream:
        stream.truncate(1 << 34)
    paths["sparse"].chmod(0o600)
    paths["deep"].write_text(DEEP)
    keys.create(paths["keys"], age=True)
    account = {"server": "http://127.0.0.1:9", "id": "x", "role": "custodian", "token": "t", "log": made.signer.vkey}
    known = {field: account.get(field, "x") for field in folder.Account.__dataclass_fields__}
    files.write_json(paths["keys"] / "account.json", known)
    return paths


COMMANDS = {
    "receipt": ("receipt", "verify", "{bad}", "--log-key", "{key}"),
    "checkpoint": ("receipt", "verify", "{receipt}", "--log-key", "{key}", "--checkpoint", "{bad}"),
    "receipt's bundle": ("receipt", "verify", "{receipt}", "--log-key", "{key}", "--bundle", "{bad}"),
    "log key": ("receipt", "verify", "{receipt}", "--log-key", "{bad}"),
    "witness key": ("receipt", "verify", "{receipt}", "--log-key", "{key}", "--witness", "{bad}"),
    "mirror's key": ("log", "mirror", "--server", "http://127.0.0.1:9", "--out", "{keys}", "--log-key", "{bad}"),
    "ciphertext": ("seal", "inspect", "{bad}"),
    "seal's record": ("seal", "inspect", "{ciphertext}", "--record", "{bad}"),
    "seal's bundle": ("seal", "inspect", "{ciphertext}", "--bundle", "{bad}"),
    "good copy": ("seal", "inspect", "{bundle}", "--copy", "{bad}"),
    "bundle": ("verify", "{bad}"),
    "answer": ("custodian", "send", "{bad}", "--keys", "{keys}"),
    "request": ("custodian", "release", "--request", "{bad}", "--keys", "{keys}"),
    "identity": ("custodian", "ack", ROUND, "--keys", "{keys}", "--identity", "{bad}"),
    "approval": ("custodian", "void", ROUND, "--reason", "x", "--keys", "{keys}", "--approval", "{bad}"),
    "custodian": ("round", "create", "{bundle}", "--keys", "{keys}", "--custodian", "{bad}"),
    "competition": ("plan", "{bad}"),
    "settings": ("config", "--config", "{bad}"),
}


def filled(made: Made, at: dict[str, Path], what: str, bad: str) -> list[str]:
    named = {name: str(path) for name, path in at.items()}
    return [part.format(**named, bad=at[bad], key=made.signer.vkey) for part in COMMANDS[what]]


@pytest.mark.parametrize("what", COMMANDS)
def test_a_fifo_keeps_nobody_waiting(
    refused: Callable[..., dict[str, Any]], made: Made, at: dict[str, Path], what: str
) -> None:
    error = refused(*filled(made, at, what, "fifo"))
    said = json.dumps(error)
    assert "no regular file" in said and "fifo" in said, error


@pytest.mark.parametrize("what", ["receipt", "checkpoint", "log key", "witness key", "mirror's key", "answer", "approval", "identity"])  # fmt: skip
def test_a_file_without_end_is_not_read_to_its_end(
    refused: Callable[..., dict[str, Any]], made: Made, at: dict[str, Path], what: str
) -> None:
    error = refused(*filled(made, at, what, "sparse"))
    assert error["code"] in ("file_unreadable", "key_refused") and "too long" in error["sentence"]
    assert str(at["sparse"]) in error["sentence"]


@pytest.mark.parametrize(
    "what", ["answer", "approval", "seal's record", "custodian", "receipt", "checkpoint", "log key"]
)
def test_json_that_is_nested_without_end_is_one_refusal(
    refused: Callable[..., dict[str, Any]], made: Made, at: dict[str, Path], what: str
) -> None:
    error = refused(*filled(made, at, what, "deep"))
    assert str(at["deep"]) in error["sentence"] or what == "log key", error


def test_sockets_devices_and_folders_are_named(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        for strange, kind in ((path, "a socket"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
            with pytest.raises(Refusal) as caught:
                reading.read(strange, 10)
            assert caught.value.sentence == f"{strange} is no regular file, but {kind}"
            assert caught.value.hint
    for name in ("nothing", "nul\0"):
        with pytest.raises(Refusal) as caught:
            reading.read(tmp_path / name, 10)
        assert caught.value.code == "file_unreadable"


def test_a_file_of_just_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    assert reading.read(path, 10) == b"x" * 10
    with pytest.raises(Refusal) as caught:
        reading.read(path, 9)
    assert "more than 9 bytes" in caught.value.sentence
    path.write_bytes(b"\xff")
    with pytest.raises(Refusal) as caught:
        reading.text(path, 10)
    assert "is not UTF-8 text: byte 0" in caught.value.sentence


# ---- mailed requests and answers -----------------------------------------------------------------------------------


def members(**about: Any) -> dict[str, bytes]:
    value = {"v": 1, "type": requests.REQUEST, "round": ROUND, **about}
    members = {"definition.toml": b"", "checkpoint": b"", "entries.jsonl": b""}
    return {"request.json": digests.canonical(value), **members}


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"v": 2}, "version 2"),
        ({"v": True}, "version True"),
        ({"v": "1"}, "version '1'"),
        ({"more": 1}, "does not say"),
        ({"type": "X"}, "does not say"),
        ({"round": 1}, "no round's id"),
        ({"round": "digits"}, "no round's id"),
        ({"round": "../../v1/x?y#"}, "no round's id"),
    ],
)
def test_a_request_of_another_version_or_form_is_refused(tmp_path: Path, about: dict[str, Any], said: str) -> None:
    path = tmp_path / "request.zip"
    path.write_bytes(requests.pack(members()))
    assert requests.read(path).round == ROUND
    path.write_bytes(requests.pack(members(**about)))
    with pytest.raises(Refusal) as caught:
        requests.read(path)
    assert caught.value.code == "file_unreadable" and said in caught.value.sentence and caught.value.hint


def test_a_small_request_that_unpacks_to_a_gigabyte_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("request.json", "w") as member:
        for _ in range(1 << 8):
            member.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(Refusal) as caught:
        requests.read(path)
    assert "would unpack to more than" in caught.value.sentence


@pytest.mark.parametrize(
    "about",
    [{"v": True}, {"v": 2}, {"round": "../../v1/x?y#"}, {"round": "."}, {"round": ".."}, {"round": 7}, {"more": 1}],
)
def test_an_answer_of_another_version_or_with_a_path_for_a_round_is_refused(tmp_path: Path, about: Any) -> None:
    path = tmp_path / "answer.json"
    record = {"fields": {"index": 1}}
    value = {"v": 1, "type": requests.ANSWER, "round": ROUND, "record": record, "document": ""}
    path.write_text(json.dumps(value))
    assert requests.read_answer(path).round == ROUND
    path.write_text(json.dumps(value | about))
    with pytest.raises(Refusal) as caught:
        requests.read_answer(path)
    assert "is no answer" in caught.value.sentence


def test_a_key_folder_with_files_that_are_no_files_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ed25519.pem")
    with no_waiting(), pytest.raises(Refusal) as caught:
        keys.load(tmp_path)
    assert "is no regular file, but a fifo" in caught.value.sentence
    assert notes.LARGEST_NOTE > reading.LONGEST_KEY


# ---- a server's answers --------------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Client, Path], object]] = {
    "checkpoint": lambda client, path: client.checkpoint(),
    "receipt": lambda client, path: client.proof(0),
    "entries": lambda client, path: list(client.entries(start=0, end=1)),
    "records": lambda client, path: client.records(ROUND),
    "round": lambda client, path: client.round(ROUND),
    "hand_overs": lambda client, path: client.hand_overs(),
}


@pytest.mark.parametrize("what", [*CALLS, "blob"])
def test_an_answer_without_end_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    monkeypatch.setattr(connection, "LARGEST_ANSWER", 1 << 21)
    monkeypatch.setattr(Client._ask, "__kwdefaults__", {"most": 1 << 21})
    monkeypatch.setattr(Client._bytes, "__kwdefaults__", {"params": None, "most": 1 << 21})
    call = CALLS.get(what, lambda client, path: client.put_blob(path))
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with answering(b"x" * 65536, endless=True) as url, Client(url, patience=0) as client, no_waiting():
        with pytest.raises(Refusal) as caught:
            call(client, path)
    assert caught.value.code == "server_unreachable" and url in caught.value.sentence and caught.value.hint
    assert "with more than" in caught.value.sentence


def test_an_error_without_end_is_left_too(tmp_path: Path) -> None:
    with answering(b"x" * 65536, status=500, endless=True) as url, Client(url, patience=0) as client, no_waiting():
        with pytest.raises(Refusal) as caught:
            client.bundle(ROUND, tmp_path / "bundle.zip")
    assert "with more than" in caught.value.sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe", DEEP.encode(), b'[{"index":[]}]', b"{}", b"[1]", b'[{"index":1,"record":"[]"}]'])  # fmt: skip
def test_an_answer_of_something_else_is_one_refusal_that_names_the_server(
    tmp_path: Path, what: str, body: bytes
) -> None:
    with answering(body) as url, Client(url, patience=0) as client:
        try:
            CALLS[what](client, tmp_path)
        except Refusal as refusal:
            assert url in refusal.sentence, refusal
            assert refusal.hint
        else:
            # Bytes that only a later check can judge.
            assert what in ("entries", "receipt"), what


def test_an_answer_that_says_it_is_packed_and_is_not_is_one_refusal() -> None:
    with answering(b"no gzip", headers={"Content-Encoding": "gzip"}) as url, Client(url, patience=0) as client:
        for call in CALLS.values():
            with pytest.raises(Refusal) as caught:
                call(client, Path())
            assert url in caught.value.sentence
    # An honest one is unpacked once.
    body = gzip.compress(b"{}")
    with answering(body, headers={"Content-Encoding": "gzip"}) as url, Client(url, patience=0) as client:
        assert client.pool() == {}


@pytest.mark.parametrize("round_id", ["..", ".", "../../v1/x?y#", f"{ROUND}/rehearsal"])
def test_what_is_no_rounds_id_gets_into_no_address(round_id: str) -> None:
    with Client("http://127.0.0.1:9", patience=0) as client:
        for call in (client.round, client.records, client.envelopes, lambda name: client.post(name, "void", {})):
            with pytest.raises(Refusal) as caught:
                call(round_id)
            assert caught.value.code == "round_unknown" and "is no round's id" in caught.value.sentence


def test_a_download_that_does_not_fit_says_so(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with answering(b"x" * 100_000) as url, Client(url, patience=0) as client:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(Refusal) as caught:
                client.bundle(ROUND, tmp_path / "bundle.zip")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.code == "no_space" and caught.value.hint
    assert f"no space to write {tmp_path / 'bundle.zip'}" in caught.value.sentence
    assert list(tmp_path.iterdir()) == []


def test_a_request_with_envelopes_is_not_written_over_by_one_without(tmp_path: Path) -> None:
    path = tmp_path / "request"
    path.write_bytes(requests.pack(members()))
    requests._require_none_with_envelopes(path, ROUND)
    requests._require_none_with_envelopes(tmp_path / "new", ROUND)
    path.write_bytes(requests.pack({**members(), "envelopes.json": b"[]"}))
    requests._require_none_with_envelopes(path, ROUND.replace("0", "1"))
    with pytest.raises(Refusal) as caught:
        requests._require_none_with_envelopes(path, ROUND)
    assert caught.value.code == "conflict" and str(path) in caught.value.sentence


def test_a_body_that_is_nested_without_end_is_refused_by_the_server_and_it_goes_on(tmp_path: Path) -> None:
    with live.serve(tmp_path) as server:
        for path in ("/v1/accounts", "/v1/rounds"):
            headers = {"Content-Type": "application/json"}
            answer = server.anyone().post(path, content=DEEP.encode(), headers=headers)
            assert 400 <= answer.status_code < 500, answer.text
            assert answer.json()["code"] in CODES and answer.json()["code"] != "internal_error"
        assert server.anyone().get("/readyz").status_code == 200


def test_a_mirrors_broken_checkpoint_is_named(
    refused: Callable[..., dict[str, Any]], made: Made, tmp_path: Path
) -> None:
    folder_, note = tmp_path / "mirror", made.notes[len(made.entries)]
    folder_.mkdir()
    (folder_ / "log.vkey").write_text(made.signer.vkey + "\n")
    (folder_ / "entries.jsonl").write_bytes(b"".join(entry + b"\n" for entry in made.entries))
    (folder_ / "checkpoint").write_text(note)
    assert mirror.check(folder_).checkpoint.size == len(made.entries)
    (folder_ / "checkpoint").write_text(note[:-1])
    error = refused("log", "check", folder_)
    assert str(folder_ / "checkpoint") in error["sentence"] and "mirror the log again" in error["hint"]
