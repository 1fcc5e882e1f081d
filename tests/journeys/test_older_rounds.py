"""Rounds that were made before a share named its round and the id bound all of RoundDefined (decision 0013) still open and verify; newer ones don't pass for them."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import rounds_made
import stored
from rounds_made import Made

from acclimate import config, custody, verify
from acclimate.service import release
from acclimate.store import Store
from acclimate_competitions import records


def play(where: Path, *, older: bool, deal: Callable[[custody.Share], custody.Share] | None = None) -> Made:
    """A whole round; `deal` is what a dealer with a program of its own makes of each share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "OLDER", older)
        patch.setattr(rounds_made, "DEAL", deal)
        return rounds_made.make(where)


def report(made: Made, where: Path) -> dict[str, tuple[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "OLDER", "id_digits" not in defined(made).fields)
        made.write(where)
    return {check.name: (check.status, f"{check.where}: {check.meaning}") for check in verify.verify(where).checks}


def defined(made: Made) -> records.Record:
    return next(record for record in map(records.parse, made.entries) if record.round == made.round)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return play(tmp_path_factory.mktemp("older"), older=True)


def test_a_bundle_of_an_older_round_verifies(older: Made, tmp_path: Path) -> None:
    assert len(older.round.rpartition("-")[2]) == 12
    assert b'"v":1}' in older.documents[1]
    found = report(older, tmp_path / "bundle")
    newer = play(tmp_path / "newer", older=False)
    assert len(newer.round.rpartition("-")[2]) == 32
    assert b'"round":"' + newer.round.encode() in newer.documents[1]
    expected = report(newer, tmp_path / "bundle of today")
    assert {name: status for name, (status, _) in found.items()} == {
        name: status for name, (status, _) in expected.items()
    }
    assert "FAILED" not in {status for status, _ in found.values()}
    assert found["opening"][0] == "ok"


def test_a_server_opens_an_older_round(older: Made, tmp_path: Path) -> None:
    settings = config.load(tmp_path / "data", environ={})
    opens = next(i for i, entry in enumerate(older.entries) if b'"type":"HoldoutOpened"' in entry)
    with contextlib.closing(Store.open(settings, clock=lambda: older.now)) as store:
        stored.fill(store, older, entries=opens)
        assert release.open_holdout(store, settings, older.round)
        with store.snapshot() as tx:
            assert tx.round(older.round).phase == "opened"
            assert sorted(release.holdout_files(tx, older.round)) == ["size.parquet", "tint.parquet"]


@pytest.mark.parametrize(
    ("older", "round_id", "words"),
    [
        (False, None, "version 1, which names no round"),
        (False, "marbles-2027-0", "the round marbles-2027-0 for marbles-2027-1"),
        (True, "marbles-2027-0", "the round marbles-2027-0 for marbles-2027-1"),
    ],
    ids=["no round, today", "another round", "another round, then"],
)
def test_an_audit_names_shares_that_were_not_dealt_for_the_round(
    older: bool, round_id: str | None, words: str, tmp_path: Path
) -> None:
    made = play(tmp_path / "made", older=older, deal=lambda share: replace(share, round=round_id))
    status, where = report(made, tmp_path / "bundle")["key"]
    assert status == "FAILED" and words in where
