"""`acclimate seal inspect`: what anybody can tell of a ciphertext without the key, and what is refused, with the place."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rounds_made

from acclimate import inspection
from acclimate.blocks import BLOCK
from acclimate_competitions import digests


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    original = rounds_made.make_splits

    def make_splits(made: rounds_made.Made) -> None:
        """Inputs so long that the ciphertext has several blocks."""
        original(made)
        for task in rounds_made.TASKS:
            table = made.holdout[task]
            inputs = [made.random.randbytes(100_000).hex() for _ in range(table.num_rows)]
            made.holdout[task] = table.set_column(table.column_names.index("input"), "input", [inputs])
            rounds_made.tables.write(made.holdout[task], made.folder / "holdout" / f"{task}.parquet")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "make_splits", make_splits)
        return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def bundle(made: rounds_made.Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("published") / "bundle")


def inspect(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "acclimate", "seal", "inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def document(*arguments: object) -> dict:
    done = inspect(*arguments, "--json")
    value = json.loads(done.stdout)
    failed = [finding for finding in value["findings"] if finding["status"] == "FAILED"]
    assert done.returncode == (1 if failed else 0)
    return value | {"failed": {finding["name"]: finding["detail"] for finding in failed}}


def refused(*arguments: object) -> dict:
    done = inspect(*arguments, "--json")
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["hint"]
    return error


def test_the_ciphertext_of_a_bundle_is_the_one_that_its_log_commits_to(made: rounds_made.Made, bundle: Path) -> None:
    found = document(bundle / "holdout.sealed", "--bundle", bundle)
    assert found["failed"] == {}
    assert found["record"]["round"] == made.round
    assert (found["digest"], found["block_root"]) == (made.seal["ciphertext"], made.seal["block_root"])
    assert [finding["status"] for finding in found["findings"]] == ["ok"] * 5
    text = inspect(bundle / "holdout.sealed", "--bundle", bundle).stdout
    assert made.seal["seal"] in text
    assert f"{made.seal['rows']} rows" in text
    assert all(share["to"] in text for share in made.seal["shares"])


def test_how_far_it_is_with_a_large_one_is_told(made: rounds_made.Made, bundle: Path) -> None:
    told: list[tuple[int, int]] = []
    inspection.inspect(bundle / "holdout.sealed", [], progress=lambda done, total: told.append((done, total)))
    size = made.seal["size"]
    assert len(told) == -(-size // BLOCK) > 1 and told[-1] == (size, size) and told == sorted(told)
    assert "that holds it" in refused(bundle / "nothing")["hint"]


def test_a_bundle_is_compared_with_its_own_log(bundle: Path, tmp_path: Path) -> None:
    assert document(bundle)["failed"] == {}
    packed = shutil.make_archive(str(tmp_path / "bundle"), "zip", bundle.parent, bundle.name)
    assert document(packed)["failed"] == {}
    (tmp_path / "cut.zip").write_bytes(Path(packed).read_bytes()[:-1000])
    assert refused(tmp_path / "cut.zip")["code"] == "seal_mismatch"
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty")["code"] == "bundle_invalid"


def test_the_record_may_come_from_a_file_or_from_nowhere(made: rounds_made.Made, bundle: Path, tmp_path: Path) -> None:
    ciphertext = bundle / "holdout.sealed"
    entry = next(entry for entry in made.entries if b'"HoldoutSealed"' in entry)
    record, kept = tmp_path / "record.json", tmp_path / "sealed.json"
    record.write_text(json.dumps(json.loads(entry), indent=2), "utf-8")
    kept.write_text(json.dumps({"real": {"fields": made.seal, "envelopes": []}}), "utf-8")
    assert document(ciphertext, "--record", record)["failed"] == {}
    assert document(ciphertext, "--record", kept)["failed"] == {}
    alone = document(ciphertext)
    assert (alone["record"], [f["status"] for f in alone["findings"]]) == (None, ["NOT CHECKED"])
    other = json.loads(entry)
    other["fields" if "fields" in other else "rows"] = made.seal["rows"] + 1
    record.write_text(json.dumps(other), "utf-8")
    assert list(document(ciphertext, "--record", record)["failed"]) == ["signature"]


def test_a_changed_bit_is_found_and_by_a_good_copy_its_block_is_named(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copy(bundle / "holdout.sealed", copy)
    raw = bytearray(copy.read_bytes())
    assert len(raw) > 2 * BLOCK + 17
    raw[2 * BLOCK + 17] ^= 4
    copy.write_bytes(raw)
    assert set(document(copy, "--bundle", bundle)["failed"]) == {"digest", "block root"}
    found = document(copy, "--bundle", bundle, "--copy", bundle / "holdout.sealed")["failed"]
    assert found["blocks"].endswith(f"differ: 2; the first begins at byte {2 * BLOCK}")
    error = refused(bundle / "holdout.sealed", "--bundle", bundle, "--copy", copy)
    assert error["code"] == "seal_mismatch" and "tells nothing of the blocks" in error["sentence"]


def test_what_is_cut_off_or_has_grown_says_where_it_ends(bundle: Path, tmp_path: Path) -> None:
    whole, copy = (bundle / "holdout.sealed").read_bytes(), tmp_path / "copy"
    copy.write_bytes(whole[: 56 + 16_400 * 100 + 16 + 512])  # at a boundary, so that it has a possible size
    assert "it ends in block 1 of" in document(copy, "--bundle", bundle)["failed"]["size"]
    copy.write_bytes(whole + bytes(16_400))
    assert "16400 bytes follow its end" in document(copy, "--bundle", bundle)["failed"]["size"]


@pytest.mark.parametrize("size", [0, 55, 56, 71, 1000, 56 + 16_400 + 15, 100_001])
def test_what_has_no_seals_size_is_no_seal(bundle: Path, tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(size))
    error = refused(tmp_path / "file", "--bundle", bundle)
    assert error["code"] == "seal_mismatch"
    assert f"has {size} bytes; recorded: {(bundle / 'holdout.sealed').stat().st_size}" in error["sentence"]


def test_a_seal_of_another_version_says_so(made: rounds_made.Made, bundle: Path, tmp_path: Path) -> None:
    later = {"real": {"fields": made.seal | {"format": "acclimate/seal/v2"}, "envelopes": []}}
    (tmp_path / "sealed.json").write_text(json.dumps(later), "utf-8")
    found = document(bundle / "holdout.sealed", "--record", tmp_path / "sealed.json")["failed"]
    assert found == {"format": "this version knows acclimate/seal/v1, the record says acclimate/seal/v2"}


def test_other_rounds_missing_files_and_other_files_are_refused(bundle: Path, tmp_path: Path) -> None:
    sealed = bundle / "holdout.sealed"
    assert refused(sealed, "other-round", "--bundle", bundle)["code"] == "round_unknown"
    assert refused(tmp_path / "none")["code"] == "file_unreadable"
    assert refused(sealed, "--record", tmp_path / "none")["code"] == "file_unreadable"
    for text in ("[]", "{", '{"type":"RoundOpened"}', '{"real":1}', '{"real":{"fields":{}}}'):
        (tmp_path / "record").write_text(text, "utf-8")
        assert refused(sealed, "--record", tmp_path / "record")["code"] == "record_invalid"
    assert digests.of_file(sealed) in inspect(sealed).stdout
