"""The sequencer: every entry gets a checkpoint and a receipt, whatever it was killed in; a log that was changed is never signed."""

import base64

import pytest
import rounds_made
from clocked_stores import clock, refused, request_, settings, signer, store
from sqlalchemy import delete, select, text, update
from waiting import until

from acclimate import log
from acclimate.sequencer import Sequencer
from acclimate.store import log_checkpoints, log_entries
from acclimate_competitions import digests, records

__all__ = ["clock", "request_", "settings", "signer", "store"]


def test_each_entry_has_a_receipt_and_the_log_only_grows(store, signer, request_):
    sequencer = Sequencer(store, signer)
    sequencer.start()
    empty = log.open_checkpoint(sequencer.checkpoint(), signer.verifier).checkpoint
    key = rounds_made.key("organizer")
    for index, name in enumerate(("a", "b", "c")):
        with store.transaction() as tx:
            tx.append(records.sign("RoundDefined", "", {**request_["fields"], "name": name}, key=key))
        record, signed = log.Receipt.parse(sequencer.receipt(index)).open(signer.verifier)
        assert (record["name"], signed.checkpoint.size) == (name, index + 1)
    last = signed.checkpoint
    proof = [base64.b64decode(line) for line in sequencer.consistency(1, 3)]
    with store.snapshot() as tx:
        first_root = digests.root_of_hashes([digests.leaf_hash(tx.entry(0))])
    log.verify_consistency(proof, first=1, first_root=first_root, second=3, second_root=last.root)
    assert empty.size == 0
    refused("entry_unknown", sequencer.receipt, 3)
    refused("entry_unknown", sequencer.consistency, 1, 4)
    sequencer.close()


def test_entries_left_without_a_checkpoint_by_a_crash_get_one_at_the_start(store, signer, request_):
    with store.transaction() as tx:
        tx.append(request_)
    sequencer = Sequencer(store, signer)
    sequencer.start()
    with store.snapshot() as tx:
        notes = tx.execute(select(log_checkpoints.c.note)).scalars().all()
    assert [log.open_checkpoint(note, signer.verifier).checkpoint.size for note in notes] == [1]
    sequencer.close()
    again = Sequencer(store, signer)
    again.start()
    assert again.checkpoint() == notes[0]
    again.close()


@pytest.mark.parametrize("change", ["other", "cut"])
def test_a_log_that_was_changed_is_never_signed(store, signer, request_, change):
    with store.transaction() as tx:
        tx.append(request_)
    first = Sequencer(store, signer)
    first.start()
    first.close()
    with store.transaction() as tx:
        table = " ON log_entries" if store.engine.dialect.name == "postgresql" else ""
        tx.execute(text(f"DROP TRIGGER log_entries_no_update{table}"))
        tx.execute(text(f"DROP TRIGGER log_entries_no_delete{table}"))
        tx.execute(delete(log_entries) if change == "cut" else update(log_entries).values(data=b"{}"))
    refused("log_inconsistent", Sequencer(store, signer).start)


def test_a_log_keeps_its_key_and_origin(store, settings, signer, request_):
    with store.transaction() as tx:
        tx.append(request_)
    first = Sequencer(store, signer)
    first.start()
    first.close()
    other = log.Signer("other.example.org/log", signer.key)
    assert "origin" in refused("log_inconsistent", Sequencer(store, other).start).hint


def test_the_sequencer_signs_by_itself(store, signer, request_):
    sequencer = Sequencer(store, signer)
    sequencer.start()
    with store.transaction() as tx:
        tx.append(request_)

    def signed():
        with store.snapshot() as tx:
            return tx.execute(select(log_checkpoints).where(log_checkpoints.c.size == 1)).first() is not None

    until(signed)
    sequencer.close()


def test_the_sequencer_goes_on_after_what_nobody_foresaw(store, signer, request_, caplog):
    sequencer = Sequencer(store, signer)
    sequencer.start()
    with store.transaction() as tx:
        tx.execute(text("ALTER TABLE log_entries RENAME TO gone"))
    until(lambda: "no checkpoint could be signed" in caplog.text)
    assert "no such table" in caplog.text or "does not exist" in caplog.text
    with store.transaction() as tx:
        tx.execute(text("ALTER TABLE gone RENAME TO log_entries"))
        tx.append(request_)

    def signed():
        with store.snapshot() as tx:
            return tx.execute(select(log_checkpoints).where(log_checkpoints.c.size == 1)).first() is not None

    until(signed)
    sequencer.close()
