"""A receipt against a key, witnesses, a bundle, a saved checkpoint and the live log: true ones pass, replayed, old and forked ones are named."""

import base64
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import live
import pytest
import rounds_made
from rounds_made import Made, cosigned, witness

from acclimate import log, notes
from acclimate.cli import main
from acclimate.client import receipts
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

NAMES = ("w1.example.org", "w2.example.org")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def checks(self) -> dict[str, tuple[str, str]]:
        return {check["name"]: (check["status"], check["detail"]) for check in json.loads(self.out)["checks"]}

    @property
    def error(self) -> dict[str, str]:
        assert self.code == 1, self
        found: dict[str, str] = json.loads(self.out)["error"]
        return found


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `acclimate receipt verify … --json` in this process."""
    for name in list(os.environ):
        if name.startswith("ACCLIMATE_"):
            monkeypatch.delenv(name)

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["acclimate", "receipt", "verify", *map(str, arguments), "--json"])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main.run()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Ran(end.value.code if isinstance(end.value.code, int) else 0, out, err)

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "QUORUM", 2)
        patch.setattr(rounds_made, "WITNESSES", NAMES)
        return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def bundle(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "QUORUM", 2)
        patch.setattr(rounds_made, "WITNESSES", NAMES)
        return made.write(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def file(made: Made, tmp_path: Path) -> Path:
    """ada's receipt."""
    return written(made.receipts[made.submissions[0]["index"]], tmp_path / "ada.tlog-proof")


def written(text: str, path: Path) -> Path:
    path.write_text(text, "utf-8")
    return path


def other_note(made: Made, receipt: Path, **by: tuple[str, ...]) -> str:
    """The receipt with the same checkpoint, cosigned by these witnesses alone."""
    found = log.Receipt.parse(receipt.read_bytes())
    parsed = notes.parse_note(found.checkpoint)
    bare = notes.Note(parsed.text, parsed.signatures[:1]).encode()
    return log.Receipt(found.index, found.entry, found.proof, cosigned(bare, at=made.now, **by)).text()


def a_fork(made: Made, size: int) -> str:
    return log.sign_checkpoint(made.signer, size, digests.leaf_hash(b"another history"))


# ---- keys ----------------------------------------------------------------------------------------------------------


def test_witnesses_are_said_one_by_one(verify: Callable[..., Ran], made: Made, file: Path) -> None:
    known = ("--log-key", made.signer.vkey)
    ran = verify(file, *known, "--witness", witness(NAMES[0]), "--witness", witness("w9.example.org"))
    lines = [check for check in json.loads(ran.out)["checks"] if check["name"] == "witness"]
    assert [line["status"] for line in lines] == ["ok", "NOT CHECKED"]
    assert lines[0]["detail"].startswith("w1.example.org saw this checkpoint 2027-03-01")
    assert "w9.example.org has not cosigned" in lines[1]["detail"]


def test_a_witnesss_line_that_does_not_verify_refuses_the_receipt(
    verify: Callable[..., Ran], made: Made, file: Path
) -> None:
    text = file.read_text("utf-8")
    line = text.splitlines()[-1]
    written(text.replace(line, line[:-8] + ("AAAA" if line[-8:-4] != "AAAA" else "BBBB") + line[-4:]), file)
    known = ("--log-key", made.signer.vkey, "--witness", witness(NAMES[1]))
    error = verify(file, *known).error
    assert error["code"] == "proof_invalid"
    assert f"the signature of {NAMES[1]}" in error["sentence"]
    # Whoever doesn't know that witness ignores its line.
    assert verify(file, "--log-key", made.signer.vkey).code == 0


def test_a_logs_key_is_no_witness(verify: Callable[..., Ran], made: Made, file: Path) -> None:
    assert verify(file, "--log-key", made.signer.vkey, "--witness", made.signer.vkey).error["code"] == "key_refused"


def test_one_thing_at_a_time_is_compared(verify: Callable[..., Ran], made: Made, file: Path, bundle: Path) -> None:
    assert verify(file, "--bundle", bundle, "--checkpoint", bundle / "checkpoint").code == 2


# ---- a bundle ------------------------------------------------------------------------------------------------------


def test_a_receipt_and_its_rounds_bundle(verify: Callable[..., Ran], made: Made, file: Path, bundle: Path) -> None:
    found = verify(file, "--bundle", bundle).checks
    assert {name: status for name, (status, _) in found.items() if status != "ok"} == {"whose log": "NOT CHECKED"}
    assert "2 of the round's witnesses saw this checkpoint by 2027-03-01" in found["quorum"][1]
    # A witness from elsewhere stands for the log's key from elsewhere.
    assert "whose log" not in verify(file, "--bundle", bundle, "--witness", witness(NAMES[0])).checks
    one = written(other_note(made, file, by=NAMES[:1]), file.with_name("one"))
    status, detail = verify(one, "--bundle", bundle).checks["quorum"]
    assert (status, detail.endswith(f"missing: {NAMES[1]}")) == ("NOT CHECKED", True)


def test_a_replayed_receipt_of_another_round_is_named(
    verify: Callable[..., Ran], made: Made, bundle: Path, tmp_path: Path
) -> None:
    """Entry 0 is the same organizer's round "elsewhere", in the same log."""
    other = written(made.receipt(0), tmp_path / "other.tlog-proof")
    elsewhere = records.parse(made.entries[0]).round
    status, detail = verify(other, "--bundle", bundle).checks["round"]
    assert status == "NOT CHECKED"
    assert elsewhere in detail and made.round in detail
    error = verify(other, "--bundle", bundle, "--round", made.round).error
    assert error["code"] == "proof_invalid"
    assert elsewhere in error["sentence"] and made.round in error["sentence"]
    assert verify(other, "--bundle", bundle, "--round", elsewhere).code == 0


def test_a_bundle_of_another_history_is_a_fork(
    verify: Callable[..., Ran], made: Made, file: Path, bundle: Path, tmp_path: Path
) -> None:
    """The same entry at the same place, and another entry before it."""
    lines = (bundle / "entries.jsonl").read_bytes().splitlines()
    document = json.loads(lines[3])
    lines[3] = digests.canonical(document | {"at": document["at"].replace(".000000Z", ".000001Z")})
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("keys.json", "definition.toml", "holdout.sealed", "MANIFEST"):
        (copy / name).write_bytes((bundle / name).read_bytes())
    (copy / "entries.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    error = verify(file, "--bundle", copy).error
    assert (error["code"], "keep both" in error["hint"]) == ("log_inconsistent", True)
    index = made.submissions[0]["index"]
    lines[index] = digests.canonical(json.loads(lines[index]) | {"entrant": "eve"})
    (copy / "entries.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    error = verify(file, "--bundle", copy).error
    assert (error["code"], f"entry {index}" in error["sentence"]) == ("proof_invalid", True)


def test_a_mirrors_folder_will_do_with_the_logs_key(
    verify: Callable[..., Ran], made: Made, file: Path, bundle: Path, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for name in ("entries.jsonl", "checkpoint"):
        (mirror / name).write_bytes((bundle / name).read_bytes())
    found = verify(file, "--bundle", mirror, "--log-key", made.signer.vkey).checks
    assert found["same history"][0] == found["bundle"][0] == "ok"
    assert "whose log" in verify(file, "--bundle", mirror).error["sentence"]


# ---- a saved checkpoint --------------------------------------------------------------------------------------------


def test_a_saved_checkpoint_of_the_same_size_tells_fork_from_truth(
    verify: Callable[..., Ran], made: Made, file: Path, tmp_path: Path
) -> None:
    size = log.Receipt.parse(file.read_bytes()).index + 1
    known = ("--log-key", made.signer.vkey, "--checkpoint")
    # As it was saved, and in another's receipt.
    for name, text in (("saved", made.notes[size]), ("theirs.tlog-proof", file.read_text("utf-8"))):
        assert verify(file, *known, written(text, tmp_path / name)).checks["same history"][0] == "ok"
    error = verify(file, *known, written(a_fork(made, size), tmp_path / "fork")).error
    assert error["code"] == "log_inconsistent"
    assert base64.b64encode(digests.leaf_hash(b"another history")).decode() in error["sentence"]
    assert "keep both checkpoints" in error["hint"]
    # Of another size: what it can't show is said.
    status, detail = verify(file, *known, written(made.notes[size + 1], tmp_path / "later")).checks["same history"]
    assert (status, f"of {size + 1} entries" in detail, "--log URL" in detail) == ("NOT CHECKED", True, True)


def test_a_checkpoint_of_another_log_is_refused(
    verify: Callable[..., Ran], made: Made, file: Path, tmp_path: Path
) -> None:
    thief = log.Signer(rounds_made.ORIGIN, rounds_made.key("a thief"))
    path = written(log.sign_checkpoint(thief, 9, digests.leaf_hash(b"x")), tmp_path / "saved")
    known = ("--log-key", made.signer.vkey, "--checkpoint")
    assert verify(file, *known, path).error["code"] == "proof_invalid"
    for text in ("", "no note\n", "c2sp.org/tlog-proof@v1\n"):
        assert verify(file, *known, written(text, path)).error["code"] == "proof_invalid"
    assert verify(file, *known, tmp_path / "none").error["code"] == "file_unreadable"


# ---- the log itself ------------------------------------------------------------------------------------------------


@contextmanager
def shown(made: Made, size: int, *, note: str = "") -> Iterator[str]:
    """A server of the log as it was at a size; `note`: another checkpoint than the true one."""
    hashes = [digests.leaf_hash(entry) for entry in made.entries]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the library's name
            asked = urlparse(self.path)
            answer: Any = None
            if asked.path == "/v1/server":
                answer = {"log": made.signer.vkey}
            elif asked.path == "/v1/log/rotations":
                answer = {"receipts": []}
            elif asked.path == "/v1/log/consistency":
                first, second = (int(parse_qs(asked.query)[name][0]) for name in ("first", "second"))
                proof = log.consistency_proof(hashes, first, second)
                answer = {"proof": [base64.b64encode(node).decode() for node in proof]}
            text = json.dumps(answer) if answer is not None else note or made.notes[size]
            self.send_response(200)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_log_that_went_back_is_named(verify: Callable[..., Ran], made: Made, file: Path) -> None:
    """An old checkpoint, as after a restore from a backup."""
    size = log.Receipt.parse(file.read_bytes()).index + 1
    with shown(made, size - 2) as url:
        error = verify(file, "--log", url, "--log-key", made.signer.vkey).error
    assert error["code"] == "log_inconsistent"
    assert f"has {size - 2} entries now, the receipt's checkpoint has {size}: it went back" in error["sentence"]


def test_a_log_that_goes_on_differently_is_a_fork(verify: Callable[..., Ran], made: Made, file: Path) -> None:
    size = log.Receipt.parse(file.read_bytes()).index + 1
    for later in (size, size + 3, len(made.entries)):
        with shown(made, later, note=a_fork(made, later)) as url:
            error = verify(file, "--log", url, "--log-key", made.signer.vkey).error
        assert error["code"] == "log_inconsistent", later
        assert "keep both checkpoints" in error["hint"]
        with shown(made, later) as url:
            assert verify(file, "--log", url, "--log-key", made.signer.vkey).checks["same history"][0] == "ok"


def test_a_server_of_another_log_is_refused(verify: Callable[..., Ran], made: Made, file: Path) -> None:
    other = log.Signer(rounds_made.ORIGIN, rounds_made.key("another log")).vkey
    with shown(made, len(made.entries)) as url:
        assert verify(file, "--log", url, "--log-key", other).error["code"] in ("log_inconsistent", "proof_invalid")


def test_a_log_that_cant_be_reached_is_told(verify: Callable[..., Ran], made: Made, file: Path) -> None:
    with shown(made, 1) as url:
        pass
    error = verify(file, "--log", url, "--log-key", made.signer.vkey).error
    assert (error["code"], url in error["sentence"]) == ("server_unreachable", True)


def test_a_true_receipt_of_a_true_server(verify: Callable[..., Ran], tmp_path: Path) -> None:
    with live.serve(tmp_path) as running:
        staged = live.create(running, tmp_path)
        anyone = running.anyone()
        file = written(anyone.get("/v1/log/proof/0").text, tmp_path / "first.tlog-proof")
        live.seal(staged)
        ran = verify(file, "--log", running.url, "--round", staged.round)
        assert {name: status for name, (status, _) in ran.checks.items()} == {
            "signature": "ok", "inclusion": "ok", "whose log": "NOT CHECKED", "same history": "ok",
        }  # fmt: skip
        vkey = anyone.get("/v1/server").json()["log"]
        assert "whose log" not in verify(file, "--log", running.url, "--log-key", vkey).checks


# ---- files ---------------------------------------------------------------------------------------------------------


def test_a_file_that_is_no_receipt_is_read_only_so_far(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as stream:
        stream.truncate(1 << 34)
    with pytest.raises(Refusal) as caught:
        receipts.read(path)
    assert caught.value.code == "file_unreadable"
    # Of many in a folder it says which one.
    assert str(path) in caught.value.sentence and "*.tlog-proof" in caught.value.hint


def test_the_clock_of_a_witness_may_say_anything(made: Made, file: Path) -> None:
    found = log.Receipt.parse(file.read_bytes())
    text = notes.parse_note(found.checkpoint).text
    line = notes.cosign(text, name=NAMES[0], key=rounds_made.key(NAMES[0]), time=2**62).line()
    bare = notes.Note(text, notes.parse_note(found.checkpoint).signatures[:1]).encode()
    far = log.Receipt(found.index, found.entry, found.proof, bare + line)
    known = [notes.parse_vkey(witness(NAMES[0]))]
    checks = receipts.alone(far, receipts.chain_of(made.signer.vkey, bundle=None, client=None), known)[2]
    assert checks[-1].detail.endswith("9999-12-31T23:59:59.000000Z")
