import io
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import FolderBlobs


def stored(blobs: FolderBlobs) -> list[Path]:
    return [p for p in blobs.root.rglob("*") if p.is_file()]


def test_a_file_comes_back_as_it_was_and_twice_is_once(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    source = tmp_path / "weights"
    source.write_bytes(b"abc" * 1_000_000)
    digest = blobs.put(source)
    assert digest == digests.of_file(source)
    assert blobs.put(source) == digest == blobs.put_bytes(source.read_bytes())
    assert [p.relative_to(blobs.root).as_posix() for p in stored(blobs)] == [f"{digest[7:9]}/{digest[9:]}"]
    assert blobs.has(digest) and blobs.size(digest) == 3_000_000
    blobs.get(digest, tmp_path / "inputs" / "copy")
    assert (tmp_path / "inputs" / "copy").read_bytes() == source.read_bytes() == blobs.read(digest)
    with blobs.open(digest) as stream:
        assert stream.read(3) == b"abc"
    assert pickle.loads(pickle.dumps(blobs)) == blobs


@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=200), cut=st.integers(-3, 3))
def test_a_stream_is_stored_only_if_it_is_what_was_declared(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int
) -> None:
    blobs = FolderBlobs(tmp_path_factory.mktemp("blobs"))
    digest, declared = digests.of_bytes(data), len(data) + cut
    if cut == 0:
        assert blobs.put_stream(io.BytesIO(data), digest=digest, size=declared) == (digest, len(data))
        return
    with pytest.raises(Refusal) as refused:
        blobs.put_stream(io.BytesIO(data), digest=digest, size=declared)
    assert refused.value.code == "upload_mismatch" and str(declared) in refused.value.sentence
    with pytest.raises(Refusal, match="was declared"):
        blobs.put_stream(io.BytesIO(data + b"!"), digest=digest)
    assert stored(blobs) == []


def test_a_flipped_bit_is_set_aside_and_the_bytes_can_be_stored_again(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    digest = blobs.put_bytes(b"right")
    for attempt in (lambda: blobs.get(digest, tmp_path / "copy"), lambda: blobs.read(digest)):
        blobs.path(digest).chmod(0o644)
        blobs.path(digest).write_bytes(b"wrong")
        with pytest.raises(Refusal) as refused:
            attempt()
        assert refused.value.code == "blob_corrupt" and digest in refused.value.sentence
        assert not (tmp_path / "copy").exists() and not blobs.has(digest)
        assert [p.read_bytes() for p in (blobs.root / "quarantine").iterdir()][-1] == b"wrong"
        assert blobs.put_bytes(b"right") == digest and blobs.read(digest) == b"right"


def test_a_torn_blob_is_mended_by_storing_it_again(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    digest = blobs.put_bytes(b"whole")
    blobs.path(digest).chmod(0o644)
    blobs.path(digest).write_bytes(b"who")
    assert blobs.put_bytes(b"whole") == digest
    assert blobs.read(digest) == b"whole"


@pytest.mark.parametrize(
    "digest", ["", "sha256:" + "A" * 64, "sha256:../../" + "a" * 58, "a" * 64, "sha256:" + "0" * 64]
)
def test_unknown_blobs_are_refused(tmp_path: Path, digest: str) -> None:
    blobs = FolderBlobs(tmp_path)
    for call in (blobs.open, blobs.size, blobs.read, lambda d: blobs.get(d, tmp_path / "copy")):
        with pytest.raises(Refusal) as refused:
            call(digest)
        assert refused.value.code == "blob_unknown"
    with pytest.raises(Refusal) as refused:
        blobs.put(tmp_path / "nothing")
    assert refused.value.code == "file_unreadable"


def test_many_writers_of_one_blob_leave_one_blob(tmp_path: Path) -> None:
    blobs, data, found = FolderBlobs(tmp_path), b"x" * 300_000, []
    threads = [threading.Thread(target=lambda: found.append(blobs.put_stream(io.BytesIO(data)))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {(digests.of_bytes(data), len(data))} and len(found) == 16
    assert len(stored(blobs)) == 1


def test_an_upload_in_pieces_that_stops_leaves_nothing(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    with blobs.incoming(size=10) as incoming:
        incoming.write(b"12345")
    assert stored(blobs) == []
    with blobs.incoming(size=10) as incoming, pytest.raises(Refusal, match="than the 10 declared"):
        incoming.write(b"x" * 11)
    assert stored(blobs) == []


def test_what_a_crashed_writer_left_is_swept_and_what_is_in_use_stays(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    with blobs.incoming() as incoming:
        incoming.write(b"12345")
        assert blobs.sweep(older_than=60) == 0 and len(stored(blobs)) == 1
        assert blobs.sweep(older_than=-1) == 1
    assert stored(blobs) == []


FULL = """
import resource, sys
from pathlib import Path
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import FolderBlobs
blobs, source = FolderBlobs(Path(sys.argv[1])), Path(sys.argv[2])
kept = blobs.put_bytes(b"kept")
if sys.argv[3] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for call in (lambda: blobs.put(source), lambda: FolderBlobs(source.parent / "other").get(sys.argv[4], blobs.root / "copy")):
    try:
        call()
        print("stored")
    except Refusal as refusal:
        print(refusal.code)
print(blobs.read(kept) == b"kept", len([p for p in blobs.root.rglob("*") if p.is_file()]))
"""


@pytest.mark.parametrize("how", ["limit", "disk"])
def test_a_full_disk_is_a_refusal_and_nothing_is_lost(tmp_path: Path, how: str) -> None:
    source = tmp_path / "big"
    source.write_bytes(bytes(2_000_000))
    digest = FolderBlobs(tmp_path / "other").put(source)
    root = tmp_path / "blobs"
    root.mkdir()
    command = [sys.executable, "-c", FULL, str(root), str(source), how, digest]
    if how == "disk":
        mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
        mounted = f'mount -t tmpfs -o size=1m none "{root}" && exec "$@"'
        try:
            subprocess.run([*mount, mounted, "sh", "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("this machine lets nobody mount a small disk")
        command = [*mount, mounted, "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["no_space", "no_space", "True", "1"], done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_only_their_owner_may_read_blobs_wherever_they_lie(tmp_path: Path) -> None:
    code = "import os, sys; os.umask(0o022)\n" + PRIVATE
    root = tmp_path / "shared"
    root.mkdir(mode=0o755)
    subprocess.run([sys.executable, "-c", code, str(root)], check=True, timeout=60)
    modes = {path.relative_to(root).parts[0]: path.stat().st_mode & 0o777 for path in root.iterdir()}
    assert set(modes) > {"tmp", "quarantine"} and set(modes.values()) == {0o700}
    blobs = [path for path in root.glob("[0-9a-f][0-9a-f]/*")]
    assert blobs and {path.stat().st_mode & 0o777 for path in blobs} == {0o400}


PRIVATE = """
from pathlib import Path
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import FolderBlobs
blobs = FolderBlobs(Path(sys.argv[1]))
kept, lost = blobs.put_bytes(b"kept"), blobs.put_bytes(b"lost")
blobs.path(lost).unlink()
blobs.path(lost).write_bytes(b"wrong")
try:
    blobs.read(lost)
except Refusal:
    pass
"""

PROBES = """
import resource, signal, sys
from pathlib import Path
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import FolderBlobs
blobs = FolderBlobs(Path(sys.argv[1]))
blobs.probe()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for _ in range(3):
    try:
        blobs.probe()
    except Refusal as refusal:
        print(refusal.code)
print(len(list(blobs.scratch.iterdir())))
"""


def test_a_probe_of_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROBES, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["no_space"] * 3 + ["0"], done.stderr


def test_a_removal_that_was_killed_half_way_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    digest, again = blobs.put_bytes(b"needed"), blobs.put_bytes(b"stored again meanwhile")

    class Killed(Exception):
        pass

    def killed(path: Path, missing_ok: bool = False) -> None:
        raise Killed

    for each in (digest, again):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(Path, "unlink", killed)
            blobs.remove(each, older_than=-1)
        assert not blobs.has(each)
    blobs.put_bytes(b"stored again meanwhile")
    assert blobs.sweep(older_than=60) == 0 and not blobs.has(digest)
    assert blobs.sweep(older_than=-1) == 2
    assert blobs.read(digest) == b"needed" and blobs.read(again) == b"stored again meanwhile"
    assert list(blobs.scratch.iterdir()) == []


def test_what_is_kept_in_the_instant_of_its_removal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    digest = blobs.put_bytes(b"about to be named")
    os.utime(blobs.path(digest), (0, 0))
    rename = Path.rename

    def slow(path: Path, target: Path) -> Path:
        assert blobs.keep(digest)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", slow)
    assert not blobs.remove(digest, older_than=60) and blobs.read(digest) == b"about to be named"
    assert list(blobs.scratch.iterdir()) == []


def test_a_leap_of_this_machines_clock_makes_no_blob_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")
    young, old = blobs.put_bytes(b"stored a moment ago"), blobs.put_bytes(b"stored long ago")
    os.utime(blobs.path(old), (0, 0))
    # The folder is a file server's, whose clock is right.
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86_400)
    ages = {each.digest: each.age for each in blobs.listing()}
    assert ages[young] < 60 and ages[old] > 86_400
    assert not blobs.remove(young, older_than=7 * 86_400) and blobs.remove(old, older_than=7 * 86_400)
    assert [each.digest for each in blobs.listing()] == [young] and list(blobs.scratch.iterdir()) == []
