"""Requests and answers that are none, the age command, and a server that does not answer."""

import base64
import io
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rounds_made
from mailing import (
    INDEX,
    NAME,
    NOW,
    Mail,
    mail,
    make,
    packed,
)
from rounds_made import Made

from acclimate import custody, keys, log
from acclimate.client import Client, custodian, history, requests
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("round"))


@pytest.fixture
def given(made: Made, tmp_path: Path) -> Mail:
    return mail(made, tmp_path)


# ---- files that are none -------------------------------------------------------------------------------------------


def zipped(**members: bytes) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return whole.getvalue()


class Growing:
    """A source whose log grows between two looks; it counts what is read of it."""

    def __init__(self, mail: Mail, *sizes: int) -> None:
        self.mail, self.sizes, self.read = mail, list(sizes), list[int]()

    def definition(self, round_id: str) -> Any:
        return self.mail.mailed.definition(round_id)

    def chain(self, known: log.Verifier) -> Any:
        return self.mail.mailed.chain(known)

    def checkpoint(self, defined: records.Record) -> str:
        return self.mail.until(self.sizes.pop(0)).mailed.note

    def entries(self, size: int) -> Any:
        self.read.append(size)
        return iter(self.mail.made.entries[:size])

    def newest(self) -> None:
        return None

    def envelope(self, round_id: str, index: int) -> None:
        return None


def test_the_log_is_read_again_only_where_it_has_grown(given: Mail) -> None:
    whole = len(given.made.entries)
    source = Growing(given, whole - 1, whole - 1, whole - 1, whole)
    defined, _ = source.definition(given.made.round)
    found = history.read_history(source, defined, holding="PreparationFinished")
    assert source.read == [whole - 1, whole] and source.sizes == []
    # A request is written from what was hashed.
    assert found.entries == given.made.entries


def test_a_log_whose_entry_is_no_record_is_refused_by_the_entrys_number(given: Mail) -> None:
    for odd in (b"", b"<html>", b"[" * 60_000):
        lines = [*given.mailed.lines[:-1], odd]
        with pytest.raises(Refusal) as caught:
            history.read_history(given.with_entries(lines).mailed, given.mailed.definition(given.made.round)[0])
        assert f"log entry {len(lines) - 1}, as it was shown" in caught.value.sentence and caught.value.hint


def test_what_was_just_logged_is_waited_for(given: Mail, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = len(given.made.entries)
    source = Growing(given, whole - 1, whole - 1, whole)
    defined, _ = source.definition(given.made.round)
    assert len(history.read_history(source, defined, size=whole).entries) == whole
    assert source.sizes == []
    monkeypatch.setattr(history, "CHECKPOINT_PATIENCE", 0)
    source = Growing(given, whole - 1, whole - 1)
    with pytest.raises(Refusal) as caught:
        history.read_history(source, defined, size=whole)
    assert caught.value.code == "phase_wrong"
    assert f"has {whole - 1} entries, and not log entry {whole - 1} yet" in caught.value.sentence


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"not a ZIP",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: zipped(MANIFEST=b""),
        lambda data: zipped(**{"request.json": b'{"type":"ReleaseRequest","v":1}'}),
        lambda data: zipped(**{"request.json": b'{"round":"x","type":"ReleaseRequest","v":1}'}),
        lambda data: data.replace(b"request.json", b"reqqest.json"),
    ],
)
def test_what_is_no_request_is_one_refusal(change: Callable[[bytes], bytes], given: Mail, tmp_path: Path) -> None:
    path = packed(given.mailed, tmp_path / "mailed")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(Refusal) as caught:
        requests.read(path)
    assert caught.value.code == "file_unreadable"
    assert "no request for a release" in caught.value.sentence
    assert "round request" in caught.value.hint


def test_what_is_no_answer_is_one_refusal(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    for text in (
        "",
        "{}",
        "[]",
        '{"v":1}',
        '{"v":1,"type":"ReleaseAnswer","round":"r","record":{},"document":"!"}',
    ):
        path.write_text(text)
        with pytest.raises(Refusal) as caught:
            requests.read_answer(path)
        assert caught.value.code == "file_unreadable" and f"{path} is no answer" in caught.value.sentence
        assert "release --request" in caught.value.hint


# ---- the age command -----------------------------------------------------------------------------------------------

age = pytest.mark.skipif(not shutil.which("age"), reason="the age command is not installed")


@age
def test_the_age_command_opens_our_envelopes_and_we_open_its(given: Mail, tmp_path: Path) -> None:
    envelope = (given.mailed.envelopes or [])[INDEX - 1]
    (tmp_path / "share.age").write_bytes(base64.b64decode(envelope["main"]))
    identity = given.keys.folder / "age.txt"
    opened = subprocess.run(["age", "-d", "-i", identity, tmp_path / "share.age"], capture_output=True, check=True)
    assert opened.stdout == given.made.documents[INDEX]
    line = ["age", "-r", given.keys.age_recipient, "-o", tmp_path / "theirs.age"]
    subprocess.run(line, input=opened.stdout, check=True)
    assert given.keys.age_identity is not None
    assert custody.unwrap((tmp_path / "theirs.age").read_bytes(), given.keys.age_identity) == opened.stdout


@age
def test_a_key_that_age_keygen_made_opens_a_share(given: Mail, tmp_path: Path) -> None:
    subprocess.run(["age-keygen", "-o", tmp_path / "backup.txt"], check=True, capture_output=True)
    identity = keys.load_age_identity(tmp_path / "backup.txt")
    document = given.made.documents[INDEX]
    envelope = custody.envelope(
        document, index=INDEX, to=NAME, main=given.keys.age_recipient, backup=keys.recipient_of(identity)
    )
    share = given.made.seal["shares"][INDEX - 1] | {"envelope": custody.envelope_digest(envelope)}
    assert custody.open_envelope(envelope, identity, share=share, of=rounds_made.split_of(given.made)) == document
    (tmp_path / "share.age").write_bytes(base64.b64decode(envelope["backup"]))
    opened = subprocess.run(
        ["age", "-d", "-i", tmp_path / "backup.txt", tmp_path / "share.age"], capture_output=True, check=True
    )
    assert opened.stdout == document


def test_a_server_that_does_not_answer_is_told_and_nothing_is_lost(given: Mail) -> None:
    with Client("http://127.0.0.1:9", patience=0.2) as client:
        source = custodian.Online(client)
        for call in (custodian.answer, custodian.inspect):
            with pytest.raises(Refusal) as caught:
                call(source, given.keys, given.made.round, now=NOW)
            assert caught.value.code == "server_unreachable"
            assert caught.value.hint
    # By mail it goes on.
    assert given.release()[0].document == given.made.documents[INDEX]
