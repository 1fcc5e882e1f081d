"""Files whose values are right and that say more than them: nothing that a reader shows, or leaves rows out by, passes."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import footers
import made_bundles
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rounds_made

from acclimate import verify
from acclimate.verify.report import Report
from acclimate_competitions import bounds, tables


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def honest(made: rounds_made.Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("bundle"))


def by_status(report: Report, status: str) -> dict[str, str]:
    return {check.name: check.where for check in report.checks if check.status == status}


def pack(folder: Path, to: Path) -> Path:
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())
    return to


@pytest.fixture
def bundle(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "bundle"))


def statistics(path: Path) -> None:
    pq.write_table(pq.read_table(path), path, compression="zstd")


def metadata(path: Path) -> None:
    table = pq.read_table(path).replace_schema_metadata({"comment": "anything may stand here"})
    tables.write(table, path)


def footers_metadata(path: Path) -> None:
    """Beside the schema's, where Arrow's schema does not show it."""
    body, footer = footers.load(path)
    pair = [[1, footers.BINARY, b"comment"], [2, footers.BINARY, b"anything may stand here"]]
    footers.get(footer, 5)[2][1].append(pair)
    footers.save(path, body, footer)


def created_by(path: Path) -> None:
    body, footer = footers.load(path)
    footers.get(footer, 6)[2] = b"ada cheated"
    footers.save(path, body, footer)


def doubled(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def gap(path: Path) -> None:
    body, footer = footers.load(path)
    footers.save(path, body + b"anything may stand here", footer)


def beginning(path: Path) -> None:
    path.write_bytes(b"X" + path.read_bytes()[1:])


FORGED = [statistics, metadata, footers_metadata, created_by, doubled, gap, beginning]


@pytest.mark.parametrize("forge", FORGED)
@pytest.mark.parametrize("folder", ["scores", "holdout"])
def test_right_values_with_something_beside_them_fail(
    forge: Callable[[Path], None], folder: str, made: rounds_made.Made, bundle: Path
) -> None:
    path = sorted((bundle / folder).glob("*.parquet"))[0]
    before = path.read_bytes()
    values = pq.read_table(path).to_pydict()
    forge(path)
    assert path.read_bytes() != before and pq.read_table(path).to_pydict() == values
    made_bundles.mend(bundle)
    failed = by_status(verify.verify(bundle, log_key=made.signer.vkey), "FAILED")
    assert f"{folder}/{path.name}" in failed[folder]


def test_scores_as_another_version_of_the_library_writes_them_pass(made: rounds_made.Made, bundle: Path) -> None:
    """Other pages, codec and version: other bytes, and nothing beside the rows."""
    for number, path in enumerate(sorted((bundle / "scores").glob("*.parquet"))):
        body, footer = footers.load(path)
        before = path.read_bytes()
        table = pq.read_table(path)
        options = [{"compression": "gzip"}, {"data_page_version": "2.0"}, {"use_dictionary": False}][number % 3]
        pq.write_table(table, path, write_statistics=False, data_page_size=64, **options)
        body, footer = footers.load(path)
        footers.get(footer, 6)[2] = b"parquet-cpp-arrow version 99.0.0-SNAPSHOT"
        footers.save(path, body, footer)
        assert path.read_bytes() != before
    made_bundles.mend(bundle)
    assert by_status(verify.verify(bundle, log_key=made.signer.vkey), "FAILED") == {}


def test_a_table_of_no_rows_has_nothing_beside_them(tmp_path: Path) -> None:
    tables.write(tables.SCORES.empty_table(), tmp_path / "none.parquet")
    assert bounds.beside(tmp_path / "none.parquet", tmp_path / "none.parquet") == ""
    tables.write(pa.table({"x": ["a"] * 5}), tmp_path / "some.parquet")
    assert bounds.beside(tmp_path / "some.parquet", tmp_path / "some.parquet") == ""


@pytest.mark.parametrize("junk", [b"\0", b"anything may stand here", b"PK\5\6" + bytes(18)])
def test_bytes_behind_the_end_of_a_zip_fail(junk: bytes, made: rounds_made.Made, honest: Path, tmp_path: Path) -> None:
    path = pack(honest, tmp_path / "bundle.zip")
    assert verify.verify(path, log_key=made.signer.vkey).exit_code == 0
    path.write_bytes(path.read_bytes() + junk)
    assert verify.verify(path, log_key=made.signer.vkey).exit_code == 1


def test_a_zip_with_a_comment_fails(made: rounds_made.Made, honest: Path, tmp_path: Path) -> None:
    path = pack(honest, tmp_path / "bundle.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"anything may stand here"
    report = verify.verify(path, log_key=made.signer.vkey)
    assert "comment" in report.failed[0].meaning
