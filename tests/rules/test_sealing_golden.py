"""A seal that an older version made opens to the same bytes, texts and roots: formats never change under their name."""

import base64
import json
from pathlib import Path

import pytest

from acclimate import archive, rows, sealing
from acclimate_competitions import digests

GOLDEN = json.loads((Path(__file__).parents[1] / "vectors" / "seal-v1.json").read_text("ascii"))
"""Made by the version of 2026-11-30: {round, secret, row_key, fields of HoldoutSealed, plaintext, texts, ciphertext}."""


@pytest.fixture
def opened(tmp_path):
    (tmp_path / "sealed").write_bytes(base64.b64decode(GOLDEN["ciphertext"]))
    secret = bytes.fromhex(GOLDEN["secret"])
    found = sealing.open_(
        tmp_path / "sealed", secret, tmp_path / "out", round_id=GOLDEN["round"], fields=GOLDEN["fields"]
    )
    return found, {name: tmp_path / "out" / name for name in found.files}


def test_an_old_seal_opens_to_what_was_sealed(opened):
    found, files = opened
    assert found.row_key == bytes.fromhex(GOLDEN["row_key"])
    assert found.fields == {
        "key": digests.of_bytes(bytes.fromhex(GOLDEN["secret"])),
        "plaintext": GOLDEN["plaintext"],
        "row_root": GOLDEN["fields"]["row_root"],
    }
    assert sorted(files)[:2] == ["a.parquet", "b.parquet"]
    assert all(name.startswith("blobs/") for name in sorted(files)[2:])


def test_its_rows_have_the_same_texts_and_its_archive_the_same_bytes(opened):
    found, files = opened
    texts = [text.decode() for name in ("a.parquet", "b.parquet") for text in rows.texts(files[name])]
    assert texts == GOLDEN["texts"]
    assert digests.of_bytes(b"".join(archive.write(files, found.row_key))) == GOLDEN["plaintext"]
    assert archive.size_of({name: path.stat().st_size for name, path in files.items()}) == sum(
        map(len, archive.write(files, found.row_key))
    )
