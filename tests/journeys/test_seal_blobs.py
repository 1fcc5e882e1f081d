"""Files that the holdout's rows name (images, structures) are sealed, opened, published and verified with them."""

import contextlib
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import made_bundles
import pyarrow as pa
import pytest
import rounds_made
import tiny
from players import Players, invitations
from stored import fill

from acclimate import bundle, config, demo_servers, verify
from acclimate.service import release
from acclimate.store import Store
from acclimate_competitions import definition, digests, splits, tables
from acclimate_competitions.errors import Refusal


def with_pictures(path: Path, blobs: Path) -> pa.Table:
    """Give a holdout's table a column that names a picture for each row but the first; the pictures go to `blobs`."""
    table = tables.read(path)
    blobs.mkdir(exist_ok=True)
    named: list[dict[str, object] | None] = [None]
    for row in range(1, table.num_rows):
        data = f"picture {row // 2} of {path.name}".encode()  # two rows share one
        digest = digests.of_bytes(data)
        (blobs / digest.removeprefix("sha256:")).write_bytes(data)
        named.append({"sha256": digest, "size": len(data)})
    kind = pa.struct([("sha256", pa.string()), ("size", pa.int64())])
    table = table.append_column("picture", pa.array(named, kind))
    tables.write(table, path)
    return table


# ---- a competition's folder ----------------------------------------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path) -> Path:
    folder = tmp_path / "competition"
    tiny.competition(folder)
    for task in tiny.TASKS:
        with_pictures(folder / "splits" / task / "holdout.parquet", folder / "blobs")
    return folder


def problems(folder: Path) -> tuple[str, ...]:
    with pytest.raises(Refusal) as caught:
        splits.check(folder, definition.load(folder / "competition.toml"))
    assert caught.value.code == "splits_invalid"
    return caught.value.problems


def test_what_rows_name_is_sealed_and_never_public(built: Path) -> None:
    assert splits.check(built, definition.load(built / "competition.toml"))
    pictures = {f"blobs/{path.name}": path for path in (built / "blobs").iterdir()}
    sealed = splits.holdout_files(built)
    assert len(pictures) > 2
    assert {name: path for name, path in sealed.items() if name in pictures} == pictures
    assert not set(splits.public_files(built).values()) & set(sealed.values())


def test_a_missing_a_changed_and_a_stray_picture_are_named(built: Path) -> None:
    first, second, *_ = sorted((built / "blobs").iterdir())
    first.unlink()
    second.write_bytes(b"another")
    (built / "blobs" / "stray").write_bytes(b"")
    found = problems(built)
    assert len(found) == 3
    assert found[0].startswith(f"blobs/{first.name}: ") or found[1].startswith(f"blobs/{first.name}: ")
    assert any(first.name in line and "the file is missing" in line for line in found)
    assert any(second.name in line and "is sha256:" in line and "of 7 bytes" in line for line in found)
    assert found[-1] == "blobs/stray: no row of a holdout names it"


def test_only_a_holdout_names_pictures(built: Path) -> None:
    task = next(iter(tiny.TASKS))
    with_pictures(built / "splits" / task / "validation.parquet", built / "blobs")
    assert any(line.startswith(f"{task}/validation.parquet: column 'picture'") for line in problems(built))


# ---- store, bundle, auditor ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    original = rounds_made.make_splits

    def make_splits(made: rounds_made.Made) -> None:
        original(made)
        for task in rounds_made.TASKS:
            root = made.folder / "holdout"
            made.holdout[task] = with_pictures(root / f"{task}.parquet", root / "blobs")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "make_splits", make_splits)
        return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def published(made: rounds_made.Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("published") / "bundle")


def test_a_bundle_with_pictures_verifies(published: Path, made: rounds_made.Made) -> None:
    assert list((published / "holdout" / "blobs").iterdir())
    report = verify.verify(published, log_key=made.signer.vkey)
    assert [check for check in report.checks if check.status == "FAILED"] == []


@pytest.mark.parametrize("act", ["change", "add", "remove"])
def test_a_picture_other_than_sealed_is_named(
    published: Path, made: rounds_made.Made, tmp_path: Path, act: str
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(published, folder)
    path = sorted((folder / "holdout" / "blobs").iterdir())[0]
    if act == "change":
        path.write_bytes(b"another picture")
    elif act == "add":
        path = path.with_name("0" * 64)
        path.write_bytes(b"a picture that nobody sealed")
    else:
        path.unlink()
    made_bundles.mend(folder)
    report = verify.verify(folder, log_key=made.signer.vkey)
    failed = next(check for check in report.checks if check.status == "FAILED")
    assert (failed.name, failed.where) == ("holdout", f"holdout/blobs/{path.name}")


def test_the_server_takes_an_opened_holdout_with_pictures_and_publishes_them(
    made: rounds_made.Made, tmp_path: Path
) -> None:
    with contextlib.closing(Store.open(config.load(tmp_path / "data", environ={}))) as store:
        fill(store, made)
        opened = made.folder / "opened"
        files = {p.relative_to(opened).as_posix(): p for p in opened.rglob("*") if p.is_file()}
        with store.snapshot() as tx:
            state = tx.round(made.round)
        release._check_usable(store, state, files)
        with pytest.raises(Refusal, match=r"'picture\.png' belongs to no task"):
            release._check_usable(store, state, files | {"picture.png": next(iter(files.values()))})
        written = bundle.write(store, store.blobs, made.round, tmp_path / "bundle")
    report = verify.verify(written, log_key=made.signer.vkey)
    assert [check for check in report.checks if check.status == "FAILED"] == []
    assert {f"blobs/{path.name}" for path in (written / "holdout" / "blobs").iterdir()} == {
        name for name in files if name.startswith("blobs/")
    }


# ---- a whole round -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_whole_round_with_pictures_over_real_processes(tmp_path: Path) -> None:
    data = tmp_path / "server"
    with demo_servers.Servers(data, runner="local") as servers:
        with Players(tmp_path, [servers.url], invitations(data), servers.check) as players:
            for task in tiny.TASKS:
                with_pictures(players.built / "splits" / task / "holdout.parquet", players.built / "blobs")
            players.play()
            found = players.bundle()
            sealed = tmp_path / "holdout.sealed"
            with zipfile.ZipFile(found) as names:
                sealed.write_bytes(names.read(next(n for n in names.namelist() if n.endswith("holdout.sealed"))))
            command = demo_servers.command(
                "seal", "inspect", str(sealed), players.id, "--server", servers.url, "--json"
            )
            inspected = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert inspected["record"]["round"] == players.id
    assert {finding["status"] for finding in inspected["findings"]} == {"ok"}
    assert verify.verify(found).failed == ()
    with zipfile.ZipFile(found) as names:
        pictures = {name.rpartition("/")[2] for name in names.namelist() if "/holdout/blobs/" in f"/{name}"}
    assert pictures == {path.name for path in (players.built / "blobs").iterdir()}
