"""One flipped bit, one cut, one swap anywhere in a published bundle: noticed, and named by the file it is in.

MANIFEST is mended each time, as a forger would, so that the checks behind it must notice. What they may overlook is only how a
Parquet file of scores or of the opened holdout stores its table: every value in it is compared, and only MANIFEST holds its bytes.
"""

import io
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rounds_made
from edits import Bytes, edited, written

from acclimate import log, verify
from acclimate.verify.report import Report
from acclimate_competitions import digests, records

STORED_ONLY = ("scores/", "holdout/")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture
def published(made: rounds_made.Made, tmp_path: Path) -> "Published":
    return Published(made.write(tmp_path / "bundle"), made.signer.vkey)


class Published:
    """A bundle, one file of which is changed at a time."""

    def __init__(self, folder: Path, log_key: str) -> None:
        self.folder, self.log_key = folder, log_key
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        self.files = {name: (folder / name).read_bytes() for name in sorted(names)}

    def audited(self, changes: dict[str, bytes]) -> Report:
        """The audit of the bundle with some files changed and MANIFEST mended (unless it is among them)."""
        after = {**self.files, **changes}
        lines = (f"{digests.of_bytes(data)[7:]}  {name}\n" for name, data in after.items() if name != "MANIFEST")
        written = {"MANIFEST": "".join(lines).encode(), **changes}
        for name, data in written.items():
            (self.folder / name).write_bytes(data)
        report = verify.verify(self.folder, log_key=self.log_key)
        for name in written:
            (self.folder / name).write_bytes(self.files[name])
        return report

    def must_name(self, name: str, data: bytes, what: str) -> None:
        """The change of a file is named by a check that says the file, or is none of a table's values."""
        report = self.audited({name: data})
        places = [check.where for check in report.failed]
        assert not [check.meaning for check in report.failed if check.meaning.startswith("malformed: ")], what
        if not places:
            assert name.startswith(STORED_ONLY), what
            assert table(data).equals(table(self.files[name])), what
            return
        if name == "MANIFEST":  # the first file that it no longer lists as it is
            assert report.failed[0].name == "manifest", what
            return
        said = "log entry" if name == "entries.jsonl" else name
        assert any(name in place or said in place for place in places), f"{what}: {places}"


def table(data: bytes) -> pa.Table:
    return pq.read_table(io.BytesIO(data))


def flipped(data: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    return bytes(changed)


def test_the_bundle_passes_unchanged(published: Published) -> None:
    assert published.audited({}).exit_code == 0
    assert len(published.files) > 60


def test_a_flipped_bit_in_any_file_is_named(published: Published) -> None:
    draw = random.Random(11)
    for name, data in published.files.items():
        place, bit = draw.randrange(len(data)), draw.randrange(8)
        published.must_name(name, flipped(data, place, bit), f"{name}, byte {place}, bit {bit}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_flipped_bit_at_any_byte_of_a_small_file_and_many_of_a_large_one_is_named(published: Published) -> None:
    draw, kinds = random.Random(12), set[str]()
    for name, data in published.files.items():
        # All bytes of the first small file of each kind, 200 of a large one, and of the others some.
        kind = name.partition("/")[0]
        step = 1 if len(data) < 1000 and kind not in kinds else 1 + len(data) // (200 if kind not in kinds else 20)
        kinds.add(kind)
        for place in range(draw.randrange(step), len(data), step):
            bit = draw.randrange(8)
            published.must_name(name, flipped(data, place, bit), f"{name}, byte {place}, bit {bit}")


# ---- cuts ----------------------------------------------------------------------------------------------------------


def boundaries(name: str, data: bytes) -> list[int]:
    """Where a file may be cut so that what is left looks whole: nothing, each line, each chunk, each part of Parquet."""
    if data.startswith(b"PAR1"):
        metadata = pq.read_metadata(io.BytesIO(data))
        columns = [
            metadata.row_group(g).column(c) for g in range(metadata.num_row_groups) for c in range(metadata.num_columns)
        ]
        starts = {column.data_page_offset for column in columns} | {
            column.dictionary_page_offset or 4 for column in columns
        }
        return sorted({0, 4, *starts, len(data) - 8, len(data) - 4, len(data) - 1})
    if name == "holdout.sealed":
        return [0, 24, 56, 56 + 1024, len(data) - 16, len(data) - 1]
    ends = {0, *(place + 1 for place, byte in enumerate(data) if byte == 0x0A)}
    return sorted({*ends, *(end - 1 for end in ends if end), len(data) // 2, len(data) - 1} - {len(data)})


def cuts(published: Published) -> Iterator[tuple[str, int]]:
    for name, data in published.files.items():
        yield from ((name, end) for end in boundaries(name, data))


def test_a_file_that_is_cut_at_a_boundary_is_named(published: Published) -> None:
    for name, end in random.Random(13).sample(list(cuts(published)), 30):
        published.must_name(name, published.files[name][:end], f"{name}, cut after {end} bytes")


@pytest.mark.slow
def test_a_file_that_is_cut_at_any_boundary_is_named(published: Published) -> None:
    for name, end in cuts(published):
        published.must_name(name, published.files[name][:end], f"{name}, cut after {end} bytes")


# ---- swaps ---------------------------------------------------------------------------------------------------------


def test_two_files_swapped_within_a_folder_are_named(published: Published) -> None:
    """A receipt, checkpoint, prediction, score, split or task of another place than its own."""
    folders = itertools.groupby((name for name in published.files if "/" in name), lambda name: name.rpartition("/")[0])
    for _, group in folders:
        names = list(group)
        for first, second in zip(names, names[1:], strict=False):
            if published.files[first] == published.files[second]:
                continue
            report = published.audited({first: published.files[second], second: published.files[first]})
            places = [check.where for check in report.failed]
            assert any(first in place or second in place for place in places), f"{first} and {second}: {places}"


@pytest.mark.parametrize("name", ["entries.jsonl", "submissions.jsonl", "MANIFEST"])
def test_two_lines_swapped_are_named(published: Published, name: str) -> None:
    lines = published.files[name].splitlines(keepends=True)
    draw = random.Random(name)
    for _ in range(4):
        first, second = sorted(draw.sample(range(len(lines)), 2))
        swapped = [*lines]
        swapped[first], swapped[second] = lines[second], lines[first]
        published.must_name(name, b"".join(swapped), f"{name}, lines {first} and {second}")


@pytest.mark.parametrize("name", ["prepared.json", "ranking.json", "shares.json", "keys.json"])
def test_two_rows_swapped_are_named(published: Published, name: str) -> None:
    value = digests.parse_canonical(published.files[name])
    lists = (
        [part for part in (value, *value.values()) if isinstance(part, list)] if isinstance(value, dict) else [value]
    )
    for rows in [rows for rows in lists if len(rows) > 1]:
        for first, second in itertools.combinations(range(min(len(rows), 3)), 2):
            rows[first], rows[second] = rows[second], rows[first]
            if digests.canonical(value) != published.files[name]:
                published.must_name(name, digests.canonical(value), f"{name}, rows {first} and {second}")
            rows[first], rows[second] = rows[second], rows[first]


def test_two_rows_swapped_in_a_table_are_named(published: Published) -> None:
    draw = random.Random(14)
    for name in draw.sample([name for name in published.files if name.endswith(".parquet")], 12):
        rows = table(published.files[name])
        first, second = draw.sample(range(rows.num_rows), 2)
        order = list(range(rows.num_rows))
        order[first], order[second] = second, first
        sink = io.BytesIO()
        pq.write_table(rows.take(order), sink)
        if not rows.take(order).equals(rows):
            published.must_name(name, sink.getvalue(), f"{name}, rows {first} and {second}")


# ---- other data ----------------------------------------------------------------------------------------------------

JSON_FILES = ("keys.json", "shares.json", "prepared.json", "ranking.json", "submissions.jsonl", "entries.jsonl")


def edit(published: Published, made: rounds_made.Made, draw: random.Random) -> None:
    """Edit the data of one file, of one line where it has lines; over edited entries the log signs its checkpoint anew."""
    name = draw.choice(JSON_FILES)
    lines = published.files[name].split(b"\n")
    number = draw.randrange(len(lines) - 1) if len(lines) > 1 else 0
    after = written(edited(json.loads(lines[number]), Bytes(draw.randbytes(60))))
    if after is None or after == lines[number]:
        return
    what = f"{name}, line {number + 1}: {after[:500]!r}"
    lines[number] = after
    changes = {name: b"\n".join(lines)}
    if name == "entries.jsonl":
        root = log.root([digests.leaf_hash(line) for line in lines[:-1]])
        changes["checkpoint"] = log.sign_checkpoint(made.signer, len(lines) - 1, root).encode()
    report = published.audited(changes)
    assert report.failed, what
    for check in report.failed:
        assert not check.meaning.startswith("malformed: ") and not check.where.startswith("check "), f"{what}: {check}"


def test_other_data_in_any_json_is_named_and_ends_no_check_unexpectedly(
    published: Published, made: rounds_made.Made
) -> None:
    draw = random.Random(16)
    for _ in range(30):
        edit(published, made, draw)


@pytest.mark.slow
def test_much_other_data_in_any_json_is_named_and_ends_no_check_unexpectedly(
    published: Published, made: rounds_made.Made
) -> None:
    draw = random.Random(17)
    for _ in range(2500):
        edit(published, made, draw)


# ---- replays -------------------------------------------------------------------------------------------------------


def test_receipts_and_checkpoints_of_another_round_or_log_are_named(
    published: Published, made: rounds_made.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same log's key and the same entry indices, but another history: both are signed, and only one can be true."""
    monkeypatch.setattr(rounds_made, "CODE", digests.of_bytes(b"another wheel"))
    fork = rounds_made.make(tmp_path / "fork")
    assert fork.signer.vkey == made.signer.vkey and fork.round != made.round
    for index, text in fork.receipts.items():
        assert log.Receipt.parse(text).open(made.signer.verifier)[1].checkpoint.size == index + 1
        name = f"receipts/{index}.tlog-proof"
        failed = {check.name: check for check in published.audited({name: text.encode()}).failed}
        assert set(failed) == {"receipts"} and failed["receipts"].where == name
        assert "proves another entry" in failed["receipts"].meaning
    for size in sorted(made.kept & fork.kept)[:6]:
        name = f"checkpoints/{size}"
        failed = {check.name: check.where for check in published.audited({name: fork.notes[size].encode()}).failed}
        assert failed == {"earlier checkpoints": name}
    failed = {c.name: c.where for c in published.audited({"checkpoint": fork.notes[len(fork.entries)].encode()}).failed}
    assert "entries" in failed


def test_every_older_checkpoint_in_place_of_the_last_is_named(published: Published, made: rounds_made.Made) -> None:
    for size, note in random.Random(15).sample(sorted(made.notes.items())[:-1], 12):
        failed = {check.name: check for check in published.audited({"checkpoint": note.encode()}).failed}
        assert f"the checkpoint counts {size}" in failed["entries"].meaning


def test_a_receipt_by_an_older_checkpoint_of_the_same_log_is_as_good(
    published: Published, made: rounds_made.Made
) -> None:
    """An old checkpoint is no lie: what it covers stays covered."""
    index = max(made.receipts)
    hashes = [digests.leaf_hash(entry) for entry in made.entries]
    for size in (index + 1, index + 5, len(made.entries)):
        proof = tuple(log.inclusion_proof(hashes, index, size))
        text = log.Receipt(index, made.entries[index], proof, made.notes[size]).text()
        assert published.audited({f"receipts/{index}.tlog-proof": text.encode()}).exit_code == 0
    assert records.parse(made.entries[index]).type == "SubmissionAccepted"
