"""Sealing under hardship: a disk that fills, input that changes, an end at any moment; and its memory, whatever the size."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyrage
import pytest

from acclimate import custody, sealing
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

ROUND = "digits-spring-0123456789abcdef0123456789abcdef"
PERSON = pyrage.x25519.Identity.generate()
RECIPIENTS = [sealing.Recipient("ada", str(PERSON.to_public()))]
MIB = 1 << 20


def holdout(folder: Path, data: bytes = b"pixels") -> dict[str, Path]:
    """A table of one row that names one blob."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = digests.of_bytes(data)
    (folder / "blob").write_bytes(data)
    named = [{"sha256": digest, "size": len(data)}]
    pq.write_table(pa.table({"example": ["one"], "picture": named}), folder / "rows")
    return {"rows.parquet": folder / "rows", "blobs/" + digest.removeprefix("sha256:"): folder / "blob"}


def seal(files: dict[str, Path], out: Path, **changes) -> sealing.Sealed:
    return sealing.seal(files, out, round_id=ROUND, recipients=RECIPIENTS, k=1, **changes)


def opens(sealed: sealing.Sealed, ciphertext: Path, out: Path) -> sealing.Opened:
    share = sealed.fields["shares"][0]
    of = custody.Split(ROUND, sealed.fields["seal"], 1, len(RECIPIENTS))
    document = custody.open_envelope(sealed.envelopes[0], str(PERSON), share=share, of=of)
    secret = custody.recover([custody.parse_document(document)])
    return sealing.open_(ciphertext, secret, out, round_id=ROUND, fields=sealed.fields)


def refused(act, folder: Path, *, match: str) -> Refusal:
    """The refusal, which leaves the folder as it was."""
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(Refusal, match=match) as caught:
        act()
    assert sorted(path.name for path in folder.iterdir()) == before
    assert caught.value.hint
    return caught.value


# ---- disk and input ------------------------------------------------------------------------------------------------


def test_what_would_fill_the_disk_is_refused_before_it_begins(tmp_path):
    files = holdout(tmp_path / "in")
    free = shutil.disk_usage(tmp_path).free
    with (tmp_path / "in" / "blob").open("r+b") as stream:
        stream.truncate(free + (1 << 30))  # a hole: it takes no space here, and would in a ciphertext
    (tmp_path / "out").mkdir()
    refusal = refused(lambda: seal(files, tmp_path / "out" / "sealed"), tmp_path / "out", match="are free; nothing")
    assert refusal.code == "no_space"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    files = holdout(tmp_path / "in")
    with pytest.raises(Refusal) as caught:
        seal(files, tmp_path / "none" / "sealed")
    assert caught.value.code == "file_unreadable"
    assert str(tmp_path / "none") in caught.value.sentence


@pytest.mark.parametrize("name", ["rows", "blob"])
def test_input_that_changes_while_it_is_sealed_is_refused(tmp_path, name):
    files = holdout(tmp_path / "in", bytes(3 * MIB))
    (tmp_path / "out").mkdir()
    path = tmp_path / "in" / name
    calls = []

    def random(count: int) -> bytes:
        if not calls:  # after the files were looked at
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 1 if name == "blob" else 0
            path.write_bytes(raw)
            os.utime(path, ns=(0, 10**9))
        calls.append(count)
        return os.urandom(count)

    match = "its row says" if name == "blob" else "changed while it was sealed"
    refused(lambda: seal(files, tmp_path / "out" / "sealed", random=random), tmp_path / "out", match=match)


def test_a_blob_that_changed_without_a_trace_is_refused_by_its_bytes(tmp_path):
    files = holdout(tmp_path / "in", bytes(3 * MIB))
    (tmp_path / "out").mkdir()
    path = tmp_path / "in" / "blob"
    with path.open("r+b") as stream:
        stream.seek(2 * MIB)
        stream.write(b"\x01")
    wrong = refused(lambda: seal(files, tmp_path / "out" / "sealed"), tmp_path / "out", match="its row says")
    assert digests.of_file(path) in wrong.sentence
    assert digests.of_bytes(bytes(3 * MIB)) in wrong.sentence


def test_several_blobs_of_all_sizes_are_each_checked_by_their_own_bytes(tmp_path):
    """Pieces are hashed aside while the next ones are read into the same few buffers."""
    contents = [os.urandom(size) for size in (0, 1, MIB - 1, MIB, MIB + 1, 9 * MIB + 5, 3, 20 * MIB)]
    named = [{"sha256": digests.of_bytes(data), "size": len(data)} for data in contents]
    pq.write_table(pa.table({"example": list("abcdefgh"), "picture": named}), tmp_path / "rows")
    files = {"rows.parquet": tmp_path / "rows", "zz.parquet": tmp_path / "rows"}
    for number, data in enumerate(contents):
        (tmp_path / str(number)).write_bytes(data)
        files["blobs/" + digests.of_bytes(data).removeprefix("sha256:")] = tmp_path / str(number)
    sealed = seal(files, tmp_path / "sealed")
    found = opens(sealed, tmp_path / "sealed", tmp_path / "out")
    assert found.files == {name: digests.of_file(path) for name, path in sorted(files.items())}
    assert sealing.check_ciphertext(tmp_path / "sealed", sealed.fields).size == sealing._HEADER + sealing._encrypted(
        sum(512 + -(-path.stat().st_size // 512) * 512 for path in files.values()) + 512 * 4
    )


# ---- an end at any moment ------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from pathlib import Path
from acclimate import sealing
folder = Path(sys.argv[1])
files = {name: Path(path) for name, path in json.loads(sys.argv[2]).items()}
recipients = [sealing.Recipient("ada", sys.argv[3])]
print("ready", flush=True)
sealed = sealing.seal(files, folder / "sealed", round_id="r", recipients=recipients, k=1)
print("sealed", flush=True)
"""


def run(folder: Path, files: dict[str, Path]) -> "subprocess.Popen[str]":
    given = json.dumps({name: str(path) for name, path in files.items()})
    command = [sys.executable, "-c", PROGRAM, str(folder), given, RECIPIENTS[0].age]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_an_end_at_any_moment_leaves_nothing_that_is_taken_for_whole(tmp_path, ending):
    data = os.urandom(24 * MIB)
    files, out = holdout(tmp_path / "in", data), tmp_path / "out"
    size = sealing._HEADER + sealing._encrypted(
        512 * 6 + len(data) + -(-files["rows.parquet"].stat().st_size // 512) * 512
    )
    for share in (0.0, 0.3, 0.95, 1.0):  # of the ciphertext written when the end comes
        out.mkdir()
        with run(out, files) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            while process.poll() is None and not (out / "sealed").exists():
                drafts = list(out.glob(".*.draft"))
                try:
                    if drafts and drafts[0].stat().st_size >= share * size:
                        break
                except FileNotFoundError:  # it has its name now
                    continue
                time.sleep(0.0005)
            process.send_signal(ending)
            process.communicate()
        left = sorted(path.name for path in out.iterdir())
        if "sealed" in left:  # only whole
            assert (out / "sealed").stat().st_size == size
            assert process.returncode == 0 or left == ["sealed"]
        elif ending == signal.SIGINT:
            assert left == []
        # The next one is made beside what is left, and opens.
        opens(seal(files, out / "sealed"), out / "sealed", tmp_path / "opened")
        shutil.rmtree(out)
        shutil.rmtree(tmp_path / "opened")


# ---- memory --------------------------------------------------------------------------------------------------------

MEMORY = """
import json, sys
from pathlib import Path
from acclimate import sealing
def peak():
    return int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]) // 1024
def seal(files):
    given = {name: Path(path) for name, path in files.items()}
    sealing.seal(given, Path(sys.argv[1]), round_id="r", recipients=[sealing.Recipient("ada", sys.argv[2])], k=1)
seal(json.loads(sys.argv[3]))
before = peak()
seal(json.loads(sys.argv[4]))
print(peak() - before)
"""


def growth(tmp_path: Path, files: dict[str, Path]) -> int:
    """MiB of memory that sealing takes beyond what sealing next to nothing takes."""
    small = holdout(tmp_path / "small")
    given = [json.dumps({name: str(path) for name, path in f.items()}) for f in (small, files)]
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "sealed"), RECIPIENTS[0].age, *given]
    try:
        return int(subprocess.run(command, capture_output=True, check=True).stdout)
    finally:
        (tmp_path / "sealed").unlink(missing_ok=True)


def sparse(folder: Path, size: int) -> dict[str, Path]:
    files = holdout(folder)
    path = folder / "blob"
    with path.open("r+b") as stream:
        stream.truncate(size)
    named = [{"sha256": digests.of_file(path), "size": size}]
    pq.write_table(pa.table({"example": ["one"], "picture": named}), folder / "rows")
    return {"rows.parquet": files["rows.parquet"], "blobs/" + named[0]["sha256"].removeprefix("sha256:"): path}


def long_rows(path: Path, mebibytes: int) -> dict[str, Path]:
    """Rows of 4 KiB in one row group, as pyarrow writes them by itself."""
    with pq.ParquetWriter(path, pa.schema([("example", pa.string()), ("input", pa.string())])) as writer:
        rows = [os.urandom(2048).hex() for _ in range(mebibytes * 256)]
        writer.write_table(pa.table({"example": list(map(str, range(len(rows)))), "input": rows}))
    return {"rows.parquet": path}


@pytest.mark.slow
def test_memory_stays_the_same_for_100_mebibytes(tmp_path):
    assert growth(tmp_path, sparse(tmp_path / "in", 100 * MIB)) <= 64


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_stays_the_same_for_4_gibibytes(tmp_path):
    assert growth(tmp_path, sparse(tmp_path / "in", 4096 * MIB)) <= 64


@pytest.mark.slow
def test_memory_stays_the_same_for_long_rows(tmp_path):
    assert growth(tmp_path, long_rows(tmp_path / "long", 256)) <= 64
