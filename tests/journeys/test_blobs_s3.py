"""What only a store of blobs that is a server on a network can do wrong, of a real S3 server."""

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from buckets import BUCKET, Gate, Place, log_in
from chosen_ports import free_port
from stores import LARGE, MB, at, blobs, refused, s3, writer
from waiting import WITHIN

from acclimate_competitions import digests
from acclimate_runners import s3_keeping
from acclimate_runners.blobs import Blobs

__all__ = ["s3", "blobs"]


def test_the_layout_is_the_folders(s3_place: Place, s3: Blobs) -> None:
    digest = s3.put_bytes(b"abc")
    s3.mark("somebody")
    assert s3_place.keys() == sorted(["INSTALLATION", f"{digest[7:9]}/{digest[9:]}"])


@pytest.mark.parametrize("way", ["bytes", "stream", "keep"])
def test_what_is_stored_again_in_the_moment_of_its_removal_is_there_afterwards(
    s3: Blobs, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(s3_keeping, "KEPT_SECONDS", -2.0)
    digest, deleting, kept = s3.put_bytes(b"abc"), s3_keeping._delete, []
    ways = {
        "bytes": lambda: s3.put_bytes(b"abc"),
        "stream": lambda: s3.put_stream(io.BytesIO(b"abc"), digest=digest, size=3),
        "keep": lambda: kept.append(s3.keep(digest)),
    }
    storing = threading.Thread(target=ways[way])

    def late(*arguments: Any, **named: Any) -> None:
        # The remover has looked for the last time, and the blob's bytes come, which have the ETag of those it looked at.
        storing.start()
        storing.join(1.0)
        assert storing.is_alive()
        deleting(*arguments, **named)

    monkeypatch.setattr(s3_keeping, "_delete", late)
    assert s3.remove(digest, older_than=-2)
    storing.join(WITHIN)
    if way == "keep":
        assert kept == [False] and not s3.has(digest)
    else:
        assert s3.read(digest) == b"abc"


def test_a_remover_that_died_holds_nobody_for_long(s3_place: Place, s3: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_keeping, "KEPT_SECONDS", -2.0)
    monkeypatch.setattr(s3_keeping, "_REMOVAL_IS_OVER", 1.0)
    digest = s3.put_bytes(b"abc")
    mark = f"{s3_place.prefix}tmp/removing-{digest[7:]}"
    s3_place.server.client().put_object(Bucket=BUCKET, Key=mark, Body=b"")
    assert not s3.remove(digest, older_than=-2)
    assert s3.keep(digest) and s3.read(digest) == b"abc"
    assert s3.sweep(older_than=-2) == 1 and s3.remove(digest, older_than=-2)
    assert s3_place.keys() == []


def test_a_pickled_store_works_elsewhere_and_holds_no_secret(s3: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = s3.put_bytes(b"abc")
    data = pickle.dumps(s3)
    assert b"owner" not in data and os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in data
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).read(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, digest], input=data, capture_output=True, timeout=WITHIN)
    assert done.stdout == b"b'abc'\n", done.stderr
    assert pickle.loads(data) == s3


def test_a_forked_child_makes_connections_of_its_own(s3: Blobs) -> None:
    digest = s3.put_bytes(b"abc")
    code = (
        "import os, pickle, sys\nblobs = pickle.loads(sys.stdin.buffer.read())\nassert blobs.has(sys.argv[1])\n"
        "child = os.fork()\nif not child: os._exit(0 if blobs.read(sys.argv[1]) == b'abc' else 1)\n"
        "print(os.waitpid(child, 0)[1], blobs.read(sys.argv[1]))"
    )
    # Python 3.12 warns of forks beside threads, which is what this test is about.
    command = [sys.executable, "-W", "ignore", "-c", code, digest]
    done = subprocess.run(command, input=pickle.dumps(s3), capture_output=True, timeout=WITHIN)
    assert done.stdout == b"0 b'abc'\n", done.stderr


def test_a_writer_that_is_killed_leaves_nothing_to_see(s3_place: Place, s3: Blobs, tmp_path: Path) -> None:
    gate = Gate(s3_place.server)
    source = tmp_path / "source"
    source.write_bytes(LARGE * 4)
    killed = writer(s3_place.blobs, gate.endpoint, tmp_path / "killed", source)
    assert killed.stdin is not None
    killed.stdin.write("go\n")
    killed.stdin.flush()
    while not s3_place.server.uploads(s3_place.prefix):
        assert killed.poll() is None
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    gate.close()
    assert s3_place.keys() == [] and not s3.has(digests.of_file(source))
    assert s3.sweep() == 0 and len(s3_place.server.uploads(s3_place.prefix)) == 1
    assert s3.sweep(older_than=-1) == 1 and s3_place.server.uploads(s3_place.prefix) == []
    assert s3.put(source) == digests.of_file(source)


def test_a_flipped_bit_is_set_aside_and_the_bytes_can_be_stored_again(
    s3_place: Place,
    s3: Blobs,
    tmp_path: Path,
) -> None:
    digest = s3.put_bytes(b"right")
    key = f"{s3_place.prefix}{digest[7:9]}/{digest[9:]}"

    def local() -> None:
        with s3.local(digest):
            pass

    for number, attempt in enumerate((lambda: s3.read(digest), lambda: s3.get(digest, tmp_path / "copy"), local)):
        s3_place.server.client().put_object(Bucket=BUCKET, Key=key, Body=b"wrong")
        found = refused("blob_corrupt", attempt)
        assert digest in found.sentence and not s3.has(digest) and not (tmp_path / "copy").exists()
        aside = [name for name in s3_place.keys() if name.startswith(f"quarantine/{digest[7:]}")]
        assert len(aside) == number + 1
        assert s3.put_bytes(b"right") == digest and s3.read(digest) == b"right"
    # Torn, as by a server that lost its end.
    s3_place.server.client().put_object(Bucket=BUCKET, Key=key, Body=b"rig")
    assert s3.put_bytes(b"right") == digest and s3.read(digest) == b"right"


def test_who_may_only_read_still_refuses_what_is_corrupt(
    s3_place: Place,
    s3: Blobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = s3.put_bytes(b"right")
    key = f"{s3_place.prefix}{digest[7:9]}/{digest[9:]}"
    s3_place.server.client().put_object(Bucket=BUCKET, Key=key, Body=b"wrong")
    log_in(monkeypatch, "reader")
    told = refused("blob_corrupt", lambda: s3.read(digest)).sentence
    assert "could not be set aside" in told and "AccessDenied" in told


def test_what_fails_in_passing_is_asked_again(s3_place: Place, tmp_path: Path) -> None:
    gate = Gate(s3_place.server)
    blobs = at(s3_place, tmp_path, endpoint=gate.endpoint)
    source = tmp_path / "source"
    source.write_bytes(LARGE)
    gate.refuse = 3
    digest = blobs.put(source)
    assert gate.refuse == 0
    # Answers that end in the middle of their bytes.
    gate.cut = 2
    blobs.get(digest, tmp_path / "copy")
    assert gate.cut == 0 and (tmp_path / "copy").read_bytes() == LARGE
    gate.refuse = 2
    assert blobs.size(digest) == len(LARGE)
    gate.refuse = 10_000
    found = refused("blobs_unreachable", lambda: blobs.size(digest))
    assert "503" in found.sentence
    gate.close()


@pytest.mark.slow
def test_a_server_that_is_away_is_told_and_works_again_when_it_is_back(s3_place: Place, s3: Blobs) -> None:
    digest = s3.put_bytes(b"abc")
    incoming = s3.incoming(digest=digests.of_bytes(LARGE), size=len(LARGE))
    incoming.write(LARGE[: 10 * MB])
    s3_place.server.stop()
    try:
        for call in (s3.probe, lambda: s3.read(digest), lambda: s3.put_bytes(b"new")):
            found = refused("blobs_unreachable", call)
            assert "no answer" in found.sentence and s3_place.server.endpoint in found.sentence
        incoming.abort()
    finally:
        s3_place.server.start()
    s3.probe()
    assert s3.read(digest) == b"abc" and s3.read(s3.put_bytes(b"new")) == b"new"
    assert s3.sweep(older_than=-1) == 1


def test_a_probe_says_what_is_wrong(s3_place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(**changes: str) -> str:
        found = refused("blobs_unreachable", at(s3_place, tmp_path, **changes).probe)
        assert found.hint and "secret" not in found.sentence + found.hint
        return found.sentence

    assert "the bucket missing does not exist" in told(place="s3://missing/a")
    assert "no answer" in told(endpoint=f"http://127.0.0.1:{free_port()}")
    # The same server's pages: HTTP, but not S3.
    assert "no S3 server" in told(endpoint=f"http://127.0.0.1:{s3_place.server.ports[2]}")
    assert "no trusted connection" in told(endpoint=s3_place.server.endpoint.replace("http", "https"))
    log_in(monkeypatch, "reader")
    assert "nothing may be written with this login, it may only read" in told()
    log_in(monkeypatch, "owner", "another-secret")
    assert "the login is refused (SignatureDoesNotMatch)" in told()
    log_in(monkeypatch, "nobody", "another-secret")
    assert "the login is refused (InvalidAccessKeyId)" in told()
    log_in(monkeypatch, "")
    assert "no credentials" in told()


def test_a_clock_that_is_wrong_is_told(s3_place: Place, s3: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = datetime.now(UTC) + timedelta(hours=2)
    with monkeypatch.context() as patched:
        patched.setattr("botocore.auth.get_current_datetime", lambda *_, **__: wrong.replace(tzinfo=None))
        assert "clock" in refused("blobs_unreachable", s3.probe).sentence
    s3.probe()


MEASURE = """
import sys
from pathlib import Path
from acclimate_runners.blobs import blobs_at
blobs, folder = blobs_at(sys.argv[1], endpoint=sys.argv[2], scratch=Path(sys.argv[3])), Path(sys.argv[3])
digest = blobs.put(Path(sys.argv[4]))
blobs.get(digest, folder / "copy")
with blobs.open(digest) as stream:
    while stream.read(1 << 20):
        pass
print(int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]))
"""


@pytest.mark.slow
def test_400_mb_take_little_more_memory_than_40(s3_place: Place, tmp_path: Path) -> None:
    peaks = []
    for size in (40, 400):
        source = tmp_path / "source"
        with source.open("wb") as stream:
            for number in range(size):
                stream.write(number.to_bytes(4, "big") * (MB // 4))
        command = [sys.executable, "-c", MEASURE, s3_place.blobs, s3_place.server.endpoint, str(tmp_path), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    # KiB: a few parts in flight, however many there are.
    assert peaks[1] - peaks[0] < 100 << 10


def test_a_download_is_of_one_object(s3_place: Place, s3: Blobs) -> None:
    digest = s3.put_bytes(LARGE)
    stream, _ = s3.sized(digest)
    with stream:
        stream.read(MB)
        key = f"{s3_place.prefix}{digest[7:9]}/{digest[9:]}"
        s3_place.server.client().put_object(Bucket=BUCKET, Key=key, Body=LARGE[::-1])
        assert "meanwhile" in refused("blobs_unreachable", stream.read).sentence


def test_a_bucket_that_is_gone_is_no_missing_blob(s3_place: Place, tmp_path: Path) -> None:
    blobs, digest = at(s3_place, tmp_path, place="s3://gone/a"), digests.of_bytes(b"abc")
    for call in (blobs.has, blobs.size, blobs.read, blobs.sized):
        found = refused("blobs_unreachable", lambda call=call: call(digest))  # type: ignore[misc]
        assert "the bucket gone does not exist" in found.sentence


def test_a_probe_that_meets_one_503_is_no_matter(s3_place: Place, tmp_path: Path) -> None:
    gate = Gate(s3_place.server)
    blobs = at(s3_place, tmp_path, endpoint=gate.endpoint)
    lists = blobs._lists  # type: ignore[attr-defined]
    gate.refuse = 2
    assert lists() and gate.refuse == 0
    gate.refuse = 10_000
    found = refused("blobs_unreachable", lists)
    gate.close()
    assert "503" in found.sentence and "ListBucket" not in found.sentence + found.hint


def test_leftovers_on_this_machine_are_swept_apart(s3: Blobs) -> None:
    old = s3.scratch / "old"
    old.write_bytes(b"holdout")
    os.utime(old, (0, 0))
    (s3.scratch / "young").write_bytes(b"")
    assert s3.sweep() == 0 and s3.sweep_local() == 1
    assert [path.name for path in s3.scratch.iterdir()] == ["young"]
