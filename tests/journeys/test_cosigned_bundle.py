"""The bundle of a round that has witnesses: it shows checkpoints that the quorum cosigned, and stays what it is whatever they sign later."""

import itertools
from datetime import timedelta
from pathlib import Path

import pytest
import rounds_made
from sqlalchemy import delete, insert, update
from stored import fill

from acclimate import bundle, config, log, notes, verify
from acclimate.store import Store, cosignatures, log_checkpoints
from acclimate_competitions.records import format_time

NAMES = ("w1.example.org", "w2.example.org", "w3.example.org")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> rounds_made.Made:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "WITNESSES", NAMES)
        patch.setattr(rounds_made, "QUORUM", 2)
        return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def full(made: rounds_made.Made, tmp_path_factory: pytest.TempPathFactory) -> Store:
    opened = Store.open(config.load(tmp_path_factory.mktemp("server") / "data", environ={}))
    fill(opened, made)
    with opened.transaction() as tx:
        for size, note in made.notes.items():
            tx.execute(update(log_checkpoints).where(log_checkpoints.c.size == size).values(note=plain(note)))
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def nothing_cosigned(full: Store):
    yield
    with full.transaction() as tx:
        tx.execute(delete(cosignatures))


def plain(note: str) -> str:
    parsed = notes.parse_note(note)
    return notes.Note(parsed.text, parsed.signatures[:1]).encode()


came = itertools.count(1)


def cosign(store: Store, made: rounds_made.Made, sizes, *names: str) -> None:
    """Store the lines of these witnesses under these checkpoints; each comes later than all before."""
    with store.transaction() as tx:
        for size in sizes:
            for signature in notes.parse_note(made.notes[size]).signatures[1:]:
                if signature.name in names:
                    row = {"size": size, "witness": rounds_made.witness(signature.name), "line": signature.line()}
                    at = format_time(made.now + timedelta(seconds=next(came)))
                    row |= {"time": int.from_bytes(signature.data[:8], "big"), "at": at}
                    tx.execute(insert(cosignatures), row)


def written(store: Store, made: rounds_made.Made, folder: Path) -> dict[str, bytes]:
    path = bundle.write(store, store.blobs, made.round, folder)
    return {found.relative_to(path).as_posix(): found.read_bytes() for found in path.rglob("*") if found.is_file()}


def statuses(folder: Path, made: rounds_made.Made) -> dict[str, str]:
    report = verify.verify(folder, log_key=made.signer.vkey)
    assert [check for check in report.checks if check.status == "FAILED"] == []
    return {check.name: check.status for check in report.checks}


def test_time_and_one_history_are_shown_where_the_quorum_cosigned(full, made, tmp_path):
    everything = sorted(made.notes)
    cosign(full, made, everything, *NAMES[:2])
    first = written(full, made, tmp_path / "bundle")
    found = statuses(tmp_path / "bundle", made)
    assert (found["split view"], found["time"]) == ("ok", "ok")
    for name in [name for name in first if name.startswith(("checkpoint", "receipts/"))]:
        text = first[name].decode()
        note = log.Receipt.parse(text).checkpoint if name.startswith("receipts/") else text
        witnesses = [notes.parse_vkey(rounds_made.witness(one)) for one in NAMES]
        signed = log.open_checkpoint(note, made.signer.verifier, witnesses)
        assert {key.partition("+")[0] for key in signed.cosigned} == set(NAMES[:2]), name
    # The third comes late, everywhere: not a byte is another.
    cosign(full, made, everything, NAMES[2])
    assert written(full, made, tmp_path / "again") == first


def test_a_batch_of_entries_is_shown_by_the_one_checkpoint_that_was_cosigned(full, made, tmp_path):
    last = max(made.notes)
    with full.snapshot() as tx:
        assert not bundle.is_cosigned(tx, tx.round(made.round))
    cosign(full, made, (5, 9, last), *NAMES[:2])
    # An earlier one that came to its quorum later is none that anything can rest on.
    cosign(full, made, (7,), *NAMES[:2])
    found = written(full, made, tmp_path / "bundle")
    assert {int(name.split("/")[1]) for name in found if name.startswith("checkpoints/")} == {5, 9, last}
    assert statuses(tmp_path / "bundle", made)["split view"] == "ok"
    with full.snapshot() as tx:
        assert bundle.is_cosigned(tx, tx.round(made.round))


def test_with_the_witnesses_down_the_bundle_is_made_and_the_auditor_says_what_is_missing(
    full, made, tmp_path, monkeypatch
):
    monkeypatch.setattr(bundle, "WAIT_SECONDS", 0.0)
    early = [size for size in made.notes if size <= 8]
    cosign(full, made, early, *NAMES[:2])
    cosign(full, made, [max(made.notes)], NAMES[0])
    found = written(full, made, tmp_path / "bundle")
    assert len(notes.parse_note(found["checkpoint"]).signatures) == 1
    assert len(notes.parse_note(found["checkpoints/2"]).signatures) == 3
    report = statuses(tmp_path / "bundle", made)
    assert (report["split view"], report["time"]) == ("NOT CHECKED", "NOT CHECKED")
