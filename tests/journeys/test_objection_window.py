"""The objection window by the witnesses' clocks: a failed preparation that is logged late and dated back gives nobody the time to object."""

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import made_bundles
import pytest
import rounds_made
from recosigning import NAMES, recosign
from rounds_made import Made, cosigned
from stored import fill

from acclimate import bundle, config, log, notes, verify
from acclimate.store import Store
from acclimate.verify.report import Check
from acclimate_competitions import records

WINDOW = timedelta(days=7)
TEXT = rounds_made.DEFINITION.replace('objection_window = "0s"', 'objection_window = "7d"')


@pytest.fixture(scope="module")
def playing() -> Any:
    """Rounds with witnesses and a window of a week, which an honest server waits for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "DEFINITION", TEXT)
        patch.setattr(rounds_made, "QUORUM", 2)
        patch.setattr(rounds_made, "WITNESSES", NAMES)
        plain = Made.scheduled

        def scheduled(made: Made, kind: str, fields: dict[str, Any], **options: Any) -> int:
            if kind == "PreparationFinished":
                made.kept.add(len(made.entries))
                options["after"] = WINDOW + timedelta(seconds=1)
            return plain(made, kind, fields, **options)

        patch.setattr(Made, "scheduled", scheduled)
        yield


@pytest.fixture(scope="module")
def made(playing: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def whole(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("bundle"))


def time_of(path: Path, made: Made) -> Check:
    made_bundles.mend(path)
    report = verify.verify(path, log_key=made.signer.vkey, levels=["log"])
    assert {check.name for check in report.failed} <= {"time"}
    return next(check for check in report.checks if check.name == "time")


def last(made: Made, kind: str) -> int:
    return max(index for index, entry in enumerate(made.entries) if records.parse(entry).type == kind)


def seen_late(made: Made, path: Path, *, between: timedelta | None) -> Path:
    """The last preparation was logged an instant before PreparationFinished, and dated back by the window.

    Args:
        made: the round.
        path: its bundle, changed.
        between: how long before PreparationFinished witnesses saw the log without it; None: they did not look.
    """
    prepared, finished = last(made, "ModelPrepared"), records.parse(made.entries[last(made, "PreparationFinished")]).at

    def again(size: int, note: str) -> str:
        at = records.parse(made.entries[size - 1]).at
        if prepared < size and at < finished:
            return cosigned(note, at=finished, by=NAMES)
        return cosigned(note, at=at, by=NAMES)

    recosign(path, again)
    if between is not None:
        root = log.root([log.leaf_hash(entry) for entry in made.entries[:prepared]])
        note = log.sign_checkpoint(made.signer, prepared, root)
        (path / "checkpoints" / str(prepared)).write_text(cosigned(note, at=finished - between, by=NAMES), "utf-8")
    return path


def test_a_preparation_that_was_seen_a_window_before_its_end_is_in_time(
    made: Made, whole: Path, tmp_path: Path
) -> None:
    found = time_of(Path(shutil.copytree(whole, tmp_path / "bundle")), made)
    assert (found.status, found.where) == ("ok", "4 records, each cosigned by 2 witnesses")


def test_a_failure_logged_late_and_dated_back_is_named(made: Made, whole: Path, tmp_path: Path) -> None:
    path = seen_late(made, Path(shutil.copytree(whole, tmp_path / "bundle")), between=timedelta(hours=1))
    found = time_of(path, made)
    assert (
        found.status == "FAILED" and f"log entry {last(made, 'ModelPrepared')}, the last ModelPrepared" in found.where
    )
    assert "without it" in found.meaning


def test_where_no_witness_looked_meanwhile_the_window_is_not_checked(made: Made, whole: Path, tmp_path: Path) -> None:
    path = seen_late(made, Path(shutil.copytree(whole, tmp_path / "bundle")), between=None)
    found = time_of(path, made)
    assert found.status == "NOT CHECKED" and "the last ModelPrepared before the objection window" in found.meaning
    # Nor in a bundle of before, which has no checkpoint of it.
    older = Path(shutil.copytree(whole, tmp_path / "older"))
    (older / "checkpoints" / str(last(made, "ModelPrepared") + 1)).unlink()
    assert time_of(older, made).status == "NOT CHECKED"


def test_the_servers_bundle_has_the_checkpoint_at_which_the_window_could_begin(made: Made, tmp_path: Path) -> None:
    stored = Store.open(config.load(tmp_path / "data", environ={}))
    fill(stored, made)
    written = bundle.write(stored, stored.blobs, made.round, tmp_path / "bundle")
    stored.close()
    size = last(made, "ModelPrepared") + 1
    note = (written / "checkpoints" / str(size)).read_text("utf-8")
    assert log.parse_checkpoint(notes.parse_note(note).text).size == size
