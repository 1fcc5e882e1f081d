"""The bundle that the server writes is the one that the auditor reads, and the same bytes each time."""

import shutil
import zipfile
from pathlib import Path

import pytest
import rounds_made
from stored import fill

from acclimate import bundle, config, verify
from acclimate.store import Store
from acclimate_competitions import definition, digests, records
from acclimate_competitions.errors import Refusal


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def full(made: rounds_made.Made, tmp_path_factory: pytest.TempPathFactory) -> Store:
    opened = Store.open(config.load(tmp_path_factory.mktemp("server") / "data", environ={}))
    fill(opened, made)
    yield opened
    opened.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_written_bundle_verifies(full: Store, made: rounds_made.Made, tmp_path: Path) -> None:
    path = bundle.write(full, full.blobs, made.round, tmp_path / "bundle")
    report = verify.verify(path, log_key=made.signer.vkey)
    assert [check for check in report.checks if check.status == "FAILED"] == []
    assert {check.name for check in report.checks if check.status == "NOT CHECKED"} == {
        "split view",
        "time",
        "honest preparation",
        "re-run",
    }
    assert [item.name for item in tmp_path.iterdir()] == ["bundle"]


def test_it_is_the_bundle_that_the_protocol_describes(full: Store, made: rounds_made.Made, tmp_path: Path) -> None:
    """Byte for byte what another hand wrote after the protocol's table, but for receipts by a later checkpoint."""
    written = contents(bundle.write(full, full.blobs, made.round, tmp_path / "bundle"))
    by_hand = contents(made.write(tmp_path / "by-hand"))
    assert set(written) == set(by_hand)
    different = {name for name in written if written[name] != by_hand[name]}
    assert {name.split("/")[0] for name in different} == {"receipts", "MANIFEST"}


def test_written_twice_it_is_the_same_bytes_also_after_the_log_went_on(
    full: Store, made: rounds_made.Made, tmp_path: Path
) -> None:
    first = contents(bundle.write(full, full.blobs, made.round, tmp_path / "bundle"))
    zipped = bundle.zip_(tmp_path / "bundle", tmp_path / "first.zip").read_bytes()
    full.clocks = None  # the made round is dated ahead
    with full.transaction() as tx:
        other = dict(rounds_made.defined_fields(made), name="later", closes="2027-03-31T00:00:00.000001Z")
        tx.append(records.sign("RoundDefined", "", other, key=rounds_made.key("organizer")))
    again = bundle.write(full, full.blobs, made.round, tmp_path / "bundle")
    assert contents(again) == first
    assert bundle.zip_(again, tmp_path / "second.zip").read_bytes() == zipped
    assert verify.verify(tmp_path / "second.zip").exit_code == 0
    with zipfile.ZipFile(tmp_path / "second.zip") as archive:
        assert archive.namelist() == sorted(first)


def test_a_round_that_is_not_evaluated_has_no_bundle(made: rounds_made.Made, tmp_path: Path) -> None:
    opened = Store.open(config.load(tmp_path / "data", environ={}))
    fill(opened, made, entries=30)
    with pytest.raises(Refusal) as refused:
        bundle.write(opened, opened.blobs, made.round, tmp_path / "bundle")
    opened.close()
    assert refused.value.code == "phase_wrong"
    assert not (tmp_path / "bundle").exists()


def test_nothing_half_written_is_left_where_a_blob_is_missing(made: rounds_made.Made, tmp_path: Path) -> None:
    opened = Store.open(config.load(tmp_path / "data", environ={}))
    fill(opened, made)
    shutil.copytree(made.folder / "predictions", tmp_path / "kept")
    opened.blobs.path(digests.of_file(tmp_path / "kept" / "bea" / "direct-size-none.parquet")).unlink()
    with pytest.raises(Refusal) as refused:
        bundle.write(opened, opened.blobs, made.round, tmp_path / "out" / "bundle")
    opened.close()
    assert refused.value.code == "blob_unknown"
    assert list((tmp_path / "out").iterdir()) == []


def test_the_made_definition_is_a_valid_one() -> None:
    assert definition.parse(rounds_made.DEFINITION.encode()).ranking.baselines == ("majority", "untrained")


class Watched:
    """A store's blobs, which look whether a snapshot of the database is held whenever one is fetched."""

    def __init__(self, full: Store) -> None:
        self._full, self.held = full, list[int]()

    def get(self, digest: str, to: Path) -> None:
        self.held.append(self._full.engine.pool.checkedout())
        self._full.blobs.get(digest, to)


def test_no_snapshot_is_held_while_blobs_are_fetched(full: Store, made: rounds_made.Made, tmp_path: Path) -> None:
    watched = Watched(full)
    bundle.write(full, watched, made.round, tmp_path / "bundle")
    assert watched.held and set(watched.held) == {0}
