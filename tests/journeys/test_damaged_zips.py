"""A byte of a ZIP is not as it was: every check is still made, and those that read the damaged file say so."""

import zipfile
from pathlib import Path

import pytest
import rounds_made

from acclimate import verify

METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounds_made.make(tmp_path_factory.mktemp("round")).write(tmp_path_factory.mktemp("bundle"))


def zipped(folder: Path, to: Path, method: int) -> Path:
    with zipfile.ZipFile(to, "w", method) as archive:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            archive.write(file, file.relative_to(folder).as_posix())
    return to


def flipped(path: Path, name: str) -> None:
    """Flip a bit in the middle of a member's bytes, as they lie in the ZIP."""
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(name)
        start = member.header_offset + 30 + len(member.filename.encode())
    data = bytearray(path.read_bytes())
    data[start + member.compress_size // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("method", METHODS, ids=["stored", "deflated"])
def test_a_flipped_bit_of_any_member_leaves_every_other_check(method: int, written: Path, tmp_path: Path) -> None:
    honest = {check.name: check.status for check in verify.verify(written).checks}
    names = sorted(p.relative_to(written).as_posix() for p in written.rglob("*") if p.stat().st_size and p.is_file())
    kinds = {name.split("/")[0]: name for name in names}
    for name in kinds.values():
        path = zipped(written, tmp_path / "bundle.zip", method)
        flipped(path, name)
        report = verify.verify(path)
        found = {check.name: check for check in report.checks}
        # Whether the round has an auditor's report, say, can't be told without its records.
        assert set(honest) <= set(found), name
        assert all(found[more].status == "NOT CHECKED" for more in set(found) - set(honest)), name
        assert found["manifest"].status == "FAILED" and name in found["manifest"].where, found["manifest"]
        assert report.exit_code == 1
        for check in found.values():
            assert check.status != "ok" or honest.get(check.name) == "ok"
            # What stands on no damaged file is as it was; what fails, fails for the damaged one.
            assert check.status != "FAILED" or "damaged" in check.meaning, (name, check)
    holdout = next(name for name in names if name.startswith("holdout/"))
    path = zipped(written, tmp_path / "bundle.zip", method)
    flipped(path, holdout)
    found = {check.name: check.status for check in verify.verify(path).checks}
    assert found["holdout"] == "FAILED"
    assert {found[name] for name in ("entries", "records", "rules", "ciphertext", "shares", "opening")} == {"ok"}


def test_a_zip_whose_directory_is_damaged_is_one_line(written: Path, tmp_path: Path) -> None:
    path = zipped(written, tmp_path / "bundle.zip", zipfile.ZIP_STORED)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"PK\x01\x02", b"PK\x01\x03", 1))
    (check,) = verify.verify(path).checks
    assert (check.status, check.where) == ("FAILED", path.name) and "the ZIP is damaged" in check.meaning
