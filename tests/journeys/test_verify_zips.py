"""A ZIP has one content, whichever of its two tables of contents a reader goes by, and no byte that no check reads."""

import io
import shutil
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import made_bundles
import pytest
import rounds_made

from acclimate import bundle, verify
from acclimate.verify import zips

FORGED = b"PK\3\4" + struct.pack("<5H3L2H", 20, 0, 0, 0, 33, zlib.crc32(b"{}"), 2, 2, 12, 0) + b"ranking.json" + b"{}"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounds_made.make(tmp_path_factory.mktemp("round")).write(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def folder(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "bundle"))


def only(path: Path) -> str:
    """The one line of a report on a ZIP that is refused as a whole."""
    (check,) = verify.verify(path).checks
    assert (check.name, check.status) == ("manifest", "FAILED")
    return f"{check.where}: {check.meaning}"


def small() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("MANIFEST", "x")
        archive.writestr("ranking.json", "{}")
    return stream.getvalue()


def rewritten(folder: Path, to: Path, change: Callable[[zipfile.ZipInfo], object]) -> Path:
    with zipfile.ZipFile(to, "w") as archive:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            member = zipfile.ZipInfo(file.relative_to(folder).as_posix())
            if member.filename == "ranking.json":
                change(member)
            archive.writestr(member, file.read_bytes())
    return to


@pytest.mark.parametrize(
    "before",
    [small(), small()[: small().index(b"PK\1\2")], FORGED, b"\0" * 7, b"#!/bin/sh\n"],
    ids=["a ZIP", "its members", "a member", "zeros", "a program"],
)
def test_another_content_before_the_first_member_is_refused(before: bytes, folder: Path, tmp_path: Path) -> None:
    path = bundle.zip_(folder, tmp_path / "bundle.zip")
    path.write_bytes(before + path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # what goes by the directory sees the honest one
    assert "bundle.zip" in only(path)


def shifted(data: bytes, at: int, more: bytes) -> bytes:
    """A ZIP with bytes put in at a place, and its directory and end mended."""
    begins = struct.unpack("<L", data[-6:-2])[0]
    head, directory = data[:begins], bytearray(data[begins:])
    place = 0
    while directory[place : place + 4] == b"PK\1\2":
        (offset,) = struct.unpack_from("<L", directory, place + 42)
        struct.pack_into("<L", directory, place + 42, offset + (len(more) if offset >= at else 0))
        place += 46 + sum(struct.unpack_from("<3H", directory, place + 28))
    struct.pack_into("<L", directory, len(directory) - 6, begins + len(more))
    return head[:at] + more + head[at:] + bytes(directory)


@pytest.mark.parametrize("place", ["first", "between", "last"])
def test_a_member_that_no_directory_names_is_refused(place: str, folder: Path, tmp_path: Path) -> None:
    path = bundle.zip_(folder, tmp_path / "bundle.zip")
    with zipfile.ZipFile(path) as archive:
        at = {"first": 0, "between": archive.getinfo("ranking.json").header_offset, "last": archive.start_dir}[place]
    path.write_bytes(shifted(path.read_bytes(), at, FORGED))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None and archive.read("ranking.json") == (folder / "ranking.json").read_bytes()
    assert "no check reads what no member is" in only(path)


def test_members_in_another_order_than_the_directorys_are_refused(folder: Path, tmp_path: Path) -> None:
    path = bundle.zip_(folder, tmp_path / "bundle.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.filelist.reverse()
        archive._didModify = True  # type: ignore[attr-defined]
    assert "it begins at byte" in only(path)


CHANGES: dict[str, tuple[Callable[[zipfile.ZipInfo], object], str]] = {
    "comment": (lambda m: setattr(m, "comment", b"anything may stand here"), "a comment"),
    "extra": (lambda m: setattr(m, "extra", struct.pack("<HH", 0x6666, 4) + b"eve!"), "the extra field 0x6666"),
    "cut": (lambda m: setattr(m, "extra", b"eve"), "cut off"),
    "long": (lambda m: setattr(m, "extra", struct.pack("<HH", 0x5455, 40) + b"e" * 40), "the extra field 0x5455"),
    "name": (lambda m: setattr(m, "extra", struct.pack("<HHBL", 0x7075, 6, 1, 0) + b"x"), "the extra field 0x7075"),
    "packed": (lambda m: setattr(m, "compress_type", zipfile.ZIP_BZIP2), "neither stored nor deflated"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_member_says_and_no_check_reads_is_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    change, said = CHANGES[kind]
    assert said in only(rewritten(folder, tmp_path / "bundle.zip", change))


@pytest.mark.parametrize("at", [6, 8, 10, 14, 18, 22, 30])
def test_a_header_that_differs_from_the_directory_is_refused(at: int, folder: Path, tmp_path: Path) -> None:
    """Flags, method, time, checksum, both sizes, and the name."""
    path = bundle.zip_(folder, tmp_path / "bundle.zip")
    with zipfile.ZipFile(path) as archive:
        begins = archive.getinfo("shares.json").header_offset
    data = bytearray(path.read_bytes())
    data[begins + at] ^= 2
    path.write_bytes(data)
    assert "'shares.json': its header says something else" in only(path)


def test_bytes_behind_what_a_deflated_member_unpacks_to_are_found(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(p for p in folder.rglob("*") if p.is_file()):
            archive.write(file, file.relative_to(folder).as_posix())
        member = archive.getinfo("versions/1/ranking.json" if (folder / "versions").exists() else "submissions.jsonl")
    data, at = (tmp_path / "bundle.zip").read_bytes(), member.header_offset
    behind = at + 30 + len(member.filename) + member.compress_size
    longer = bytearray(shifted(data, behind, b"eve"))
    struct.pack_into("<L", longer, at + 18, member.compress_size + 3)
    entry = longer.rindex(b"PK\1\2", 0, longer.rindex(member.filename.encode()))
    struct.pack_into("<L", longer, entry + 20, member.compress_size + 3)
    (tmp_path / "bundle.zip").write_bytes(longer)
    first = verify.verify(tmp_path / "bundle.zip").checks[0]
    assert (first.status, first.where) == ("FAILED", member.filename) and "behind what it unpacks to" in first.meaning


@pytest.mark.parametrize("more", [-1, 0, 1, 100, 200])
@pytest.mark.parametrize("kind", ["zeros", "words"])
def test_a_deflated_member_of_which_the_last_bytes_were_read_before_they_are_written_is_whole(
    kind: str, more: int
) -> None:
    """All of it fits into the unpacker, which hands out a mebibyte at a time: what it has left is its own."""
    size = (1 << 20) + more
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", (bytes(size) if kind == "zeros" else b"hello world " * size)[:size])
    (member,) = archive.infolist()
    zips.require_no_rest(stream, member)
    member.compress_size -= 1
    with pytest.raises(zipfile.BadZipFile, match="cut off"):
        zips.require_no_rest(stream, member)


@pytest.mark.parametrize("kind", ["ours", "zip", "deflated", "large"])
def test_a_bundle_that_was_packed_again_passes(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "packed.zip"
    if kind == "zip":
        if shutil.which("zip") is None:
            pytest.skip("there is no zip on this machine")
        subprocess.run(["zip", "-q", "-r", str(path), folder.name], cwd=folder.parent, check=True)
        assert b"UT" in path.read_bytes()
    elif kind == "deflated":
        shutil.make_archive(str(path.with_suffix("")), "zip", folder)
    else:
        if kind == "large":
            # What is written of members beyond 2 GiB and of more than 65,535, without so many bytes.
            monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
            monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
        bundle.zip_(folder, path)
        assert (b"PK\6\6" in path.read_bytes()) == (kind == "large")
    assert [check for check in verify.verify(path).checks if check.status == "FAILED"] == []


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_an_empty_folder_is_told(form: str, folder: Path, tmp_path: Path) -> None:
    path = folder
    if form == "folder":
        (folder / "versions").mkdir()
    else:
        path = bundle.zip_(folder, tmp_path / "bundle.zip")
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("versions/", b"")
    (failed,) = verify.verify(path).failed
    assert (failed.name, failed.where) == ("nothing else", "versions/")


def test_a_folder_of_a_zip_has_no_bytes(folder: Path, tmp_path: Path) -> None:
    path = bundle.zip_(folder, tmp_path / "bundle.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("scores/", b"anything may stand here")
    assert "member 'scores/'" in only(path)


LINE = "— witness.example.org " + "A" * 99 + "=\n"


@pytest.mark.parametrize("where", ["checkpoint", "checkpoints", "receipts"])
def test_a_signature_of_a_key_that_nobody_named_is_named(where: str, folder: Path) -> None:
    path = folder / where if where == "checkpoint" else max((folder / where).iterdir())
    assert {c.name: c for c in verify.verify(folder).checks}["nothing else"].status == "ok"
    path.write_text(path.read_text("utf-8") + LINE, "utf-8")
    made_bundles.mend(folder)
    report = verify.verify(folder)
    found = {check.name: check for check in report.checks}["nothing else"]
    assert (found.status, report.exit_code) == ("NOT CHECKED", 0)
    assert f"witness.example.org (key 00000000) in {path.relative_to(folder).as_posix()}" in found.meaning
    assert "nothing stands" not in found.meaning


@pytest.mark.parametrize("genuine", [True, False])
@pytest.mark.parametrize("where", ["checkpoint", "receipts"])
def test_a_signature_of_a_witness_whose_key_the_auditor_gave_is_verified(
    where: str, folder: Path, *, genuine: bool
) -> None:
    path = folder / where if where == "checkpoint" else max((folder / where).iterdir())
    text = path.read_text("utf-8")
    head, blank, note = text.partition("\n\n") if where == "receipts" else ("", "", text)
    signed = rounds_made.cosigned(note, at=datetime(2027, 1, 1, tzinfo=UTC), by=("stranger.example.org",))
    if not genuine:
        signed = signed[:-8] + ("A" if signed[-8] != "A" else "B") + signed[-7:]
    path.write_text(head + blank + signed, "utf-8")
    made_bundles.mend(folder)
    for given, status in (
        ([], "NOT CHECKED"),
        ([rounds_made.witness("stranger.example.org")], "ok" if genuine else "FAILED"),
    ):
        found = {check.name: check for check in verify.verify(folder, witnesses=given).checks}["nothing else"]
        assert found.status == status, found
        assert "stranger.example.org" in found.meaning or status == "ok"
