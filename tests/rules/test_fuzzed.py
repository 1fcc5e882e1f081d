"""What the fuzzer broke once, each as a test of its own."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pyrage
import pytest
import rounds_made

from acclimate import custody, log, verify
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal


def test_a_verifier_key_in_bytes_that_are_not_utf_8_is_refused() -> None:
    name = b"witness.example/\xff1".decode("utf-8", "surrogateescape")
    with pytest.raises(Refusal) as refused:
        log.parse_vkey(f"{name}+468d99bb+BHm1Vi6P5lT5QHixEuipi6eQH4U65pW+1+DjkQutBJZk")
    assert refused.value.code == "key_refused"


def test_such_a_key_on_the_command_line_is_a_refusal_and_no_traceback(tmp_path: Path) -> None:
    command = [
        os.fsencode(sys.executable),
        b"-m",
        b"acclimate",
        b"verify",
        os.fsencode(tmp_path),
        b"--log-key",
        b"a\xff+0+A",
    ]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"error:" in done.stderr and b"Traceback" not in done.stderr


def test_a_zip_whose_member_has_no_name_is_a_bad_bundle(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("x"), b"")
        archive.infolist()[0].filename = ""
    with zipfile.ZipFile(tmp_path / "bundle.zip") as archive:
        assert archive.namelist() == [""]
    (failed,) = verify.verify(tmp_path / "bundle.zip").checks
    assert (failed.status, failed.where) == ("FAILED", "bundle.zip, member ''")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("organizer", {}),
        ("organizer", {"ed25519": None}),
        ("organizer", {"ed25519": rounds_made.public("organizer"), "more": ""}),
        ("organizer", {"ed25519": rounds_made.public("organizer"), "name": 7}),
        ("custodians", [{"name": "a", "age": [], "ed25519": rounds_made.public("a"), "backup": None}]),
        ("custodians", [{"name": "a", "age": "b", "ed25519": rounds_made.public("a"), "backup": {}}]),
        ("files", {"splits/tint/preparation.parquet": 7}),
    ],
)
def test_a_round_defined_with_parts_of_another_form_is_refused_as_a_record(
    tmp_path: Path, field: str, value: object
) -> None:
    made = rounds_made.Made(tmp_path, log.Signer(rounds_made.ORIGIN, rounds_made.key("log")), None)
    fields = {**rounds_made.defined_fields(made), field: value}
    with pytest.raises(Refusal) as refused:
        records.sign("RoundDefined", "", fields, key=rounds_made.key("organizer"))
    assert (refused.value.code, refused.value.sentence.partition(" is ")[0]) == (
        "record_invalid",
        f"RoundDefined: {field}",
    )


def test_an_envelope_without_an_age_file_is_refused() -> None:
    seal, document = "sha256:" + "5e" * 32, b"{}"
    envelope = {"index": 1, "to": "ada", "main": None, "backup": None}
    share = {"index": 1, "to": "ada", "commitment": digests.of_bytes(document), "envelope": digests.of_json(envelope)}
    with pytest.raises(Refusal, match="neither main nor backup") as refused:
        custody.open_envelope(
            envelope, str(pyrage.x25519.Identity.generate()), share=share, of=custody.Split("r", seal, 2, 3)
        )
    assert refused.value.code == "share_unreadable"


def test_a_share_of_another_form_in_a_seal_is_refused_as_a_record(tmp_path: Path) -> None:
    made = rounds_made.make(tmp_path)
    entry = next(records.parse(e) for e in made.entries if b'"type":"HoldoutSealed"' in e)
    for name, value in (("index", "1"), ("to", 1), ("commitment", "x"), ("envelope", None)):
        shares = [{**share, name: value} for share in entry["shares"]]
        with pytest.raises(Refusal) as refused:
            records.check_fields("HoldoutSealed", {**entry.fields, "shares": shares}, signed=True)
        assert refused.value.code == "record_invalid"


def test_a_nonce_that_is_not_even_ascii_is_said_to_be_no_nonce(tmp_path: Path) -> None:
    made = rounds_made.make(tmp_path / "round")
    made.submissions[1]["nonce"] = "\u00e9" * 44
    report = verify.verify(made.write(tmp_path / "bundle"), log_key=made.signer.vkey)
    (failed,) = report.failed
    assert (failed.name, failed.where) == ("submissions", "submissions.jsonl, line 2")
    assert "the nonce must be the base64 of 32 bytes" in failed.meaning
