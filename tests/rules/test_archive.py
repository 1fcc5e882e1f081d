"""The holdout's archive: one form only, and no member that leads elsewhere."""

import io
import secrets
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate import archive
from acclimate_competitions.errors import Refusal


def members(tmp_path, names):
    files = {}
    for i, name in enumerate(names):
        files[name] = tmp_path / f"source-{i}"
        files[name].write_bytes(secrets.token_bytes(i * 400))
    return files


def test_the_archive_is_what_tar_writes_and_reads(tmp_path):
    files = members(tmp_path, ["b.parquet", "a.parquet", "blobs/" + "0" * 64, "B.parquet2"])
    data = b"".join(archive.write(files, bytes(range(32))))
    expected = io.BytesIO()
    with tarfile.open(fileobj=expected, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in [("row_key", bytes(range(32))), *((n, files[n].read_bytes()) for n in sorted(files))]:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert data == expected.getvalue()[: len(data)]
    assert not any(expected.getvalue()[len(data) :])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["row_key", *sorted(files)]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 2000), st.lists(st.sampled_from(["a", "b/c", "b/d", "z.parquet", "Q-_.9"]), unique=True))
def test_an_archive_is_extracted_from_pieces_of_any_size(tmp_path_factory, step, names):
    folder = tmp_path_factory.mktemp("archive")
    files = members(folder, names)
    data = b"".join(archive.write(files, bytes(32)))
    row_key, found = archive.extract((data[i : i + step] for i in range(0, len(data), step)), folder / "out")
    assert (row_key, found) == (bytes(32), sorted(names))
    assert all((folder / "out" / name).read_bytes() == path.read_bytes() for name, path in files.items())


def tar_with(*infos, first=True):
    """What tarfile writes for members (name, attributes), up to two zero blocks."""
    data, length = io.BytesIO(), 0
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, changes in [("row_key", {"size": 32})] * first + list(infos):
            info = tarfile.TarInfo(name)
            for key, value in changes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(b"d" * info.size))
            length += 512 + -(-info.size // 512) * 512
    return data.getvalue()[:length] + bytes(1024)


HOSTILE = {
    "traversal": tar_with(("../x", {})),
    "inner traversal": tar_with(("a/../../x", {})),
    "absolute": tar_with(("/tmp/x", {})),
    "dot": tar_with(("./x", {})),
    "blank": tar_with(("a b", {})),
    "backslash": tar_with(("a\\b", {})),
    "symlink": tar_with(("x", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})),
    "hard link": tar_with(("x", {"type": tarfile.LNKTYPE, "linkname": "row_key"})),
    "device": tar_with(("x", {"type": tarfile.CHRTYPE})),
    "folder": tar_with(("x", {"type": tarfile.DIRTYPE})),
    "mode": tar_with(("x", {"mode": 0o4755})),
    "owner": tar_with(("x", {"uname": "root"})),
    "time": tar_with(("x", {"mtime": 1})),
    "twice": tar_with(("x", {}), ("x", {})),
    "order": tar_with(("y", {}), ("x", {})),
    "case": tar_with(("X", {}), ("x", {})),
    "file and folder": tar_with(("x", {}), ("x/y", {})),
    "folder and file by case": tar_with(("X/y", {}), ("x", {})),
    "second key": tar_with(("row_key", {"size": 32})),
    "no key": tar_with(("x", {}), first=False),
    "nothing": b"",
    "no end": tar_with(("x", {}))[:-1024],
    "half an end": tar_with(("x", {}))[:-512],
    "more after the end": tar_with(("x", {})) + b"\0",
    "cut": tar_with(("x", {"size": 600}))[: 1024 + 512 + 100],
}


def test_the_plain_archive_of_these_cases_is_accepted(tmp_path):
    assert archive.extract([tar_with(("x", {}), ("y", {"size": 600}))], tmp_path)[1] == ["x", "y"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_writes_nothing_outside(tmp_path, name):
    inside = tmp_path / "deep" / "inside"
    inside.mkdir(parents=True)
    with pytest.raises(Refusal) as caught:
        archive.extract([HOSTILE[name]], inside)
    assert caught.value.code == "seal_mismatch"
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["inside"]


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 10**9))
def test_a_flipped_bit_in_an_archive_changes_a_member_or_is_refused(tmp_path_factory, place):
    folder = tmp_path_factory.mktemp("archive")
    good = tar_with(("x", {"size": 100}), ("y", {"size": 600}))
    raw = bytearray(good)
    bit = place % (len(raw) * 8)
    raw[bit // 8] ^= 1 << bit % 8
    try:
        row_key, names = archive.extract([bytes(raw)], folder / "out")
    except Refusal as refusal:
        assert refusal.code == "seal_mismatch"
    else:  # whatever is accepted is written again as the same bytes
        assert b"".join(archive.write({name: folder / "out" / name for name in names}, row_key)) == raw
