"""A result that somebody names a file for takes the place of an earlier result, and of nothing else."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Ran
from strange_servers import answering

from acclimate import files, keys
from acclimate_competitions.errors import Refusal

ROUND = "digits-2027-1-" + "0" * 32
COMMANDS = {"bundle": b"PK\x03\x04 a bundle", "report": b"<!doctype html><p>", "request": b""}


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize("there", ["key", "age key", "text", "link", "link to nothing", "fifo", "folder"])
def test_nothing_else_is_written_over(what: str, there: str, acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    made = keys.create(tmp_path / "keys", age=True)
    out = tmp_path / "out"
    match there:
        case "key":
            out = made.folder / "ed25519.pem"
        case "age key":
            out = made.folder / "age.txt"
        case "text":
            out.write_text("notes")
        case "link":
            out.symlink_to(made.folder / "ed25519.pem")
        case "link to nothing":
            out.symlink_to(tmp_path / "nothing")
        case "fifo":
            os.mkfifo(out)
        case "folder":
            out.mkdir()
    before = (out.lstat().st_ino, out.lstat().st_mode, out.read_bytes() if there in ("key", "age key", "text") else b"")
    with answering(COMMANDS[what]) as url:
        ran = acclimate("round", what, ROUND, "--out", out, "--server", url, "--json")
    assert ran.code == 1 and ran.json["error"]["code"] == "conflict", ran.err
    assert str(out) in ran.json["error"]["sentence"] and ran.json["error"]["hint"]
    after = (out.lstat().st_ino, out.lstat().st_mode, out.read_bytes() if there in ("key", "age key", "text") else b"")
    assert after == before and keys.load(made.folder).public == made.public


@pytest.mark.parametrize("what", ["bundle", "report"])
@pytest.mark.parametrize("there", ["nothing", "empty", "earlier"])
def test_an_earlier_result_is(what: str, there: str, acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    out = tmp_path / "out"
    if there != "nothing":
        out.write_bytes(b"" if there == "empty" else COMMANDS[what] + b" of before")
    with answering(COMMANDS[what]) as url:
        ran = acclimate("round", what, ROUND, "--out", out, "--server", url, "--json")
    assert ran.code == 0, ran.err
    assert out.read_bytes() == COMMANDS[what]


def test_a_zip_that_is_no_request_is_not_written_over_by_one(acclimate: Callable[..., Ran], tmp_path: Path) -> None:
    out = tmp_path / "bundle.zip"
    out.write_bytes(COMMANDS["bundle"])
    with answering(b"") as url:
        ran = acclimate("round", "request", ROUND, "--out", out, "--server", url, "--json")
    assert ran.json["error"]["code"] == "conflict" and "is no request" in ran.json["error"]["sentence"]
    assert out.read_bytes() == COMMANDS["bundle"]


def test_a_name_in_a_folder_that_is_not_there_is_free(tmp_path: Path) -> None:
    files.require_replaceable(tmp_path / "none" / "x", b"pk")
    (tmp_path / "file").write_bytes(b"PK")
    files.require_replaceable(tmp_path / "file", b"pk")
    with pytest.raises(Refusal):
        files.require_replaceable(tmp_path / "file", b"<!")
