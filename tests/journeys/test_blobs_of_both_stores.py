"""What every store of blobs promises, of the folder and of a real S3 server."""

import io
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from buckets import BUCKET, Place
from stores import LARGE, MB, at, blobs, refused, s3, writer
from waiting import WITHIN, until

from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import Blobs, blobs_at

__all__ = ["s3", "blobs"]


@pytest.mark.parametrize("data", [b"", b"abc", LARGE], ids=["empty", "small", "large"])
def test_bytes_come_back_as_they_were(blobs: Blobs, tmp_path: Path, data: bytes) -> None:
    source = tmp_path / "source"
    source.write_bytes(data)
    digest = digests.of_bytes(data)
    assert not blobs.has(digest)
    assert blobs.put(source) == digest == blobs.put_bytes(data) == blobs.put(source)
    assert blobs.has(digest) and blobs.size(digest) == len(data)
    blobs.get(digest, tmp_path / "inputs" / "copy")
    assert (tmp_path / "inputs" / "copy").read_bytes() == data == blobs.read(digest)
    with blobs.open(digest) as stream:
        assert stream.read(3) == data[:3] and stream.read() == data[3:] and stream.read(1) == b""
    with blobs.local(digest) as path:
        assert path.read_bytes() == data
    with blobs.local(digest, first=10) as path:
        assert path.stat().st_size == len(data) and path.read_bytes()[:10] == data[:10]
    assert list(blobs.scratch.iterdir()) == []


@pytest.mark.parametrize("data", [b"abc", LARGE], ids=["small", "large"])
def test_what_differs_from_what_was_declared_is_refused_and_not_stored(blobs: Blobs, data: bytes) -> None:
    digest, other = digests.of_bytes(data), digests.of_bytes(b"other")
    declared: list[dict[str, object]] = [
        {"digest": digest, "size": len(data) - 1},
        {"digest": digest, "size": len(data) + 1},
        {"digest": other, "size": len(data)},
        {"digest": other},
        {"size": len(data) - 1},
        {"size": len(data) + 1},
    ]
    for wrong in declared:
        refused("upload_mismatch", lambda wrong=wrong: blobs.put_stream(io.BytesIO(data), **wrong))  # type: ignore[misc]
        assert not blobs.has(digest) and not blobs.has(other)
    for right in ({"digest": digest, "size": len(data)}, {"digest": digest}, {"size": len(data)}, {}):
        assert blobs.put_stream(io.BytesIO(data), **right) == (digest, len(data))
    assert list(blobs.scratch.iterdir()) == [] and blobs.sweep(older_than=-1) == 0


def test_a_blob_that_stops_coming_leaves_nothing(blobs: Blobs) -> None:
    for declared in ({"digest": digests.of_bytes(LARGE), "size": len(LARGE)}, {}):
        with blobs.incoming(**declared) as incoming:
            incoming.write(LARGE[: 15 * MB])
        assert not blobs.has(digests.of_bytes(LARGE)) and blobs.sweep(older_than=-1) == 0


@pytest.mark.parametrize("digest", ["", "sha256:../../" + "a" * 58, "a" * 64, "sha256:" + "0" * 64])
def test_unknown_blobs_are_refused(blobs: Blobs, tmp_path: Path, digest: str) -> None:
    for call in (blobs.open, blobs.size, blobs.read, lambda d: blobs.get(d, tmp_path / "copy")):
        refused("blob_unknown", lambda call=call: call(digest))  # type: ignore[misc]

    def opened(**how: int) -> None:
        with blobs.local(digest, **how):
            pass

    refused("blob_unknown", opened)
    refused("blob_unknown", lambda: opened(first=3))
    refused("file_unreadable", lambda: blobs.put(tmp_path / "nothing"))
    assert not (tmp_path / "copy").exists()


def test_many_writers_of_one_blob_leave_one_blob(blobs: Blobs) -> None:
    data, found = LARGE[: 9 * MB], []
    digest = digests.of_bytes(data)
    declared = {"digest": digest, "size": len(data)}
    threads = [
        threading.Thread(target=lambda: found.append(blobs.put_stream(io.BytesIO(data), **declared))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(digest, len(data))] * 4 and blobs.read(digest) == data


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_two_processes_store_the_same_blob(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    endpoint, place = "", str(tmp_path / "blobs")
    if kind == "s3":
        found: Place = request.getfixturevalue("s3_place")
        endpoint, place = found.server.endpoint, found.blobs
    blobs = blobs_at(place, endpoint=endpoint, scratch=tmp_path / "scratch")
    source = tmp_path / "source"
    source.write_bytes(LARGE)
    digest = digests.of_bytes(LARGE)
    assert not blobs.has(digest)
    writers = [writer(place, endpoint, tmp_path / f"scratch-{number}", source) for number in range(2)]
    for each in writers:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in writers:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    assert [each.communicate(timeout=WITHIN)[0].strip() for each in writers] == [digest, digest]
    # Asked for before, found missing: what another process has stored since is seen at once.
    assert blobs.has(digest) and blobs.read(digest) == LARGE


def test_a_store_is_marked_once(blobs: Blobs) -> None:
    assert blobs.marker() is None
    blobs.mark("the first")
    blobs.mark("the second")
    assert blobs.marker() == "the first"


def test_a_store_that_works_passes_its_probe_and_keeps_nothing_of_it(blobs: Blobs) -> None:
    blobs.probe()
    assert blobs.sweep(older_than=-1) == 0
    free = blobs.free()
    assert free is None or free > 0


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    found = refused("blobs_unreachable", blobs_at(str(tmp_path / "file" / "blobs"), scratch=tmp_path).probe)
    assert "Not a directory" in found.sentence


def test_without_s3fs_a_bucket_is_refused_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("s3", "bucket"):
        monkeypatch.delitem(sys.modules, f"acclimate_runners.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    found = refused("extra_missing", lambda: blobs_at("s3://blobs", scratch=tmp_path))
    assert "s3fs" in found.sentence and "pip install" in found.hint


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_what_was_stored_again_meanwhile_is_not_set_aside(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs: Blobs = blobs_at(str(tmp_path / "blobs"), scratch=tmp_path)
    digest = digests.of_bytes(b"right")
    file = tmp_path / "blobs" / digest[7:9] / digest[9:]
    place: Place | None = request.getfixturevalue("s3_place") if kind == "s3" else None
    if place is not None:
        blobs = at(place, tmp_path)
    client = place.server.client() if place is not None else None
    key = f"{place.prefix}{digest[7:9]}/{digest[9:]}" if place is not None else ""
    blobs.put_bytes(b"right")

    def store(data: bytes) -> None:
        if client is not None:
            client.put_object(Bucket=BUCKET, Key=key, Body=data)
        else:
            file.unlink()
            file.write_bytes(data)

    store(b"wrong")
    of_bytes, looks = digests.of_bytes, 2 if kind == "s3" else 1

    def last_look(data: bytes) -> str:
        nonlocal looks
        looks -= data == b"wrong"
        if data == b"wrong" and not looks:
            # The reader has looked for the last time; before it sets anything aside, the bytes come again.
            store(b"right")
        return of_bytes(data)

    monkeypatch.setattr(digests, "of_bytes", last_look)
    assert blobs.read(digest) == b"right" and looks == 0
    blobs.check(digest)
    assert blobs.has(digest)


def test_a_blob_is_checked_without_a_copy(blobs: Blobs) -> None:
    digest = blobs.put_bytes(LARGE)
    blobs.check(digest)
    stream, size = blobs.sized(digest)
    with stream:
        assert size == len(LARGE) and stream.read() == LARGE
    refused("blob_unknown", lambda: blobs.check(digests.of_bytes(b"nothing")))


def test_notes_are_replaced_listed_and_dropped(blobs: Blobs) -> None:
    first, second, large = "attempts/0a/1/manifest.json", "attempts/0a/2/manifest.json", b"x" * (3 * MB)
    assert blobs.note(first) is None and blobs.notes("attempts/") == []
    blobs.drop_note(first)
    blobs.put_note(first, b"one")
    blobs.put_note(second, large)
    blobs.put_note("attempts/0ab/1/manifest.json", b"")
    blobs.put_note("CHECKPOINT", b"other")
    assert blobs.note(first) == b"one" and blobs.note(second) == large
    blobs.put_note(first, b"another")
    assert blobs.note(first) == b"another"
    assert blobs.notes("attempts/0a/") == [first, second] and len(blobs.notes("attempts/")) == 3
    assert blobs.note("attempts/0a") is None and blobs.note(first + "/more") is None
    blobs.drop_note(first)
    blobs.drop_note(first)
    assert blobs.note(first) is None and blobs.notes("attempts/0a/") == [second]
    assert list(blobs.listing()) == [] and list(blobs.scratch.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "../a", "a/../b", ".a", "ab/cd", "tmp/a", "quarantine/a", "a b"]
)
def test_a_note_lies_where_only_notes_lie(blobs: Blobs, name: str) -> None:
    for call in (blobs.note, blobs.drop_note, lambda n: blobs.put_note(n, b""), lambda n: blobs.notes(n + "/")):
        with pytest.raises(ValueError, match="no name of a note"):
            call(name)


def test_all_blobs_are_listed_and_nothing_else(blobs: Blobs) -> None:
    stored = {blobs.put_bytes(data): len(data) for data in (b"", b"abc", LARGE)}
    blobs.mark("somebody")
    blobs.put_note("attempts/0a/1/manifest.json", b"{}")
    with blobs.incoming(digest=digests.of_bytes(LARGE + b"!"), size=len(LARGE) + 1) as incoming:
        incoming.write(LARGE)
        found = list(blobs.listing())
    assert {each.digest: each.size for each in found} == stored
    assert all(-2 < each.age < 60 for each in found)


def test_what_is_old_can_be_removed_and_what_is_young_cannot(blobs: Blobs) -> None:
    digest, other = blobs.put_bytes(b"abc"), blobs.put_bytes(b"other")
    assert not blobs.remove(digest, older_than=60) and blobs.read(digest) == b"abc"
    assert blobs.remove(digest, older_than=-2) and not blobs.has(digest) and not blobs.keep(digest)
    assert not blobs.remove(digest, older_than=-2)
    assert blobs.keep(other) and blobs.read(other) == b"other"
    assert blobs.put_bytes(b"abc") == digest and blobs.read(digest) == b"abc"
    assert list(blobs.scratch.iterdir()) == []


@pytest.mark.slow
def test_what_is_kept_or_stored_again_is_young(blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acclimate_runners.s3_keeping.KEPT_SECONDS", 0.5)
    digest, file = blobs.put_bytes(b"abc"), tmp_path / "file"
    file.write_bytes(b"abc")

    def stays(again: Callable[[], object]) -> bool:
        """Whether it may not go just after this; on a machine so slow it may have grown old between the two, and is there for another try."""
        time.sleep(3.2)
        began = time.monotonic()
        assert again()
        if not blobs.remove(digest, older_than=2.5):
            return True
        assert time.monotonic() - began > 1.0
        return not blobs.put_bytes(b"abc")

    for again in (lambda: blobs.keep(digest), lambda: blobs.put(file), lambda: blobs.put_bytes(b"abc")):
        until(lambda again=again: stays(again))  # type: ignore[misc]
        blobs.check(digest)
    time.sleep(3.2)
    assert blobs.read(digest) and blobs.remove(digest, older_than=2.5)


def test_whoever_stores_what_is_being_removed_has_it_afterwards(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    # A bucket's ages are whole seconds: what was stored is safe for at least a second less than this.
    older_than = 2.5
    monkeypatch.setattr("acclimate_runners.s3_keeping.KEPT_SECONDS", 0.0)
    # Each is stored again near the moment at which it may go: some just before, some meanwhile, some afterwards.
    rests = {number.to_bytes(4, "big"): older_than - 0.5 + number / 40 * 2 for number in range(40)}
    stored = {}
    for each in rests:
        blobs.put_bytes(each)
        stored[each] = time.monotonic()
    stop, removed = threading.Event(), 0

    def remove() -> None:
        nonlocal removed
        while not stop.is_set():
            for each in list(blobs.listing()):
                removed += blobs.remove(each.digest, older_than=older_than)

    removing = threading.Thread(target=remove)
    removing.start()
    checked = 0
    try:
        for each, rest in rests.items():
            time.sleep(max(0.0, stored[each] + rest - time.monotonic()))
            started = time.monotonic()
            try:
                assert blobs.read(blobs.put_bytes(each)) == each
                checked += 1
            except Refusal:
                # On a machine so slow it may have grown old between the two.
                if time.monotonic() - started < older_than - 1:
                    raise
    finally:
        stop.set()
        removing.join()
    assert removed and checked
