"""A witness's memory: it lasts, does not go back, is its owner's alone, and keeps the evidence of forks."""

import sqlite3

import pytest
from one_witness import VERIFIER, clock, is_conflict, path, seen, small, state, witness, witness_of
from witnessed import MADE

from acclimate import log, notes, witness_client
from acclimate.witness_state import MOST_REFUSED, Refused, Seen, State
from acclimate_competitions.errors import Refusal

__all__ = ["clock", "path", "small", "state", "witness"]


# ---- the memory --------------------------------------------------------------------------------------------------------


def test_what_was_seen_is_there_after_a_restart(path, small, clock):
    for old, size in ((0, 3), (3, 8)):
        state = State.open(path, VERIFIER.text())
        if size > 3:
            small.grow(5)
        assert witness_of(state, clock, small.vkey).add_checkpoint(small.request(old, size)).status == 200
        state.close()
    state = State.open(path, VERIFIER.text())
    assert is_conflict(witness_of(state, clock, small.vkey).add_checkpoint(small.request(0)), 8)
    state.close()


def test_the_file_itself_does_not_go_back(witness, path, small):
    witness.add_checkpoint(small.request(0))
    with sqlite3.connect(path, isolation_level=None) as sql:
        for change in ("size = 2", "root = zeroblob(32)", "time = time - 1", "origin = 'else'"):
            with pytest.raises(sqlite3.IntegrityError, match="does not go back"):
                sql.execute(f"UPDATE seen SET {change}")
        with pytest.raises(sqlite3.IntegrityError, match="does not forget"):
            sql.execute("DELETE FROM seen")
    sql.close()


def test_the_memory_is_written_through_to_the_disk(state):
    with state._using() as sql:
        assert sql.execute("PRAGMA synchronous").fetchone() == (3,)
        assert sql.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_the_file_is_its_owners_alone_and_an_existing_one_stays(path, state, witness, small):
    assert path.stat().st_mode & 0o777 == 0o600
    witness.add_checkpoint(small.request(0))
    State.create(path, "another", made=0)
    assert seen(state, small)[0] == 3 and state.vkey() == VERIFIER.text()
    assert [found.name for found in path.parent.iterdir()] == ["witness.db"]


def test_a_memory_that_is_lost_foreign_or_damaged_is_refused(path, tmp_path, small):
    mine = VERIFIER.text()

    def refused(where, code, match, vkey=mine):
        with pytest.raises(Refusal, match=match) as caught:
            State.open(where, vkey)
        assert caught.value.code == code and caught.value.hint

    other = notes.Verifier("other", notes.COSIGNATURE, VERIFIER.public).text()
    refused(tmp_path / "gone.db", "file_unreadable", "does not know what it has cosigned")
    assert not (tmp_path / "gone.db").exists()
    refused(path, "key_refused", "is the memory of", other)
    (tmp_path / "text.db").write_text("no database at all, but long enough to be looked at\n" * 100, "utf-8")
    refused(tmp_path / "text.db", "data_version", "damaged, or no memory")
    sqlite3.connect(tmp_path / "else.db").execute("CREATE TABLE witness (vkey TEXT)").connection.close()
    refused(tmp_path / "else.db", "data_version", "expected 0x41435749")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(path, "data_version", "damaged")
    path.write_bytes(whole)
    with sqlite3.connect(path) as sql:
        sql.execute("PRAGMA user_version = 2")
    sql.close()
    refused(path, "data_version", "version 2")


# ---- evidence ----------------------------------------------------------------------------------------------------------


def test_a_fork_is_kept_with_both_signed_checkpoints(witness, state, small):
    witness.add_checkpoint(small.request(0))
    fork = small.fork(2, 3)
    for _ in range(3):
        assert witness.add_checkpoint(witness_client.request(fork.checkpoint(), old=3, proof=[])).status == 422
    (kept,) = state.refused(small.signer.origin)
    assert kept.fork and kept.size == 3
    one, two = (log.open_checkpoint(note, small.signer.verifier).checkpoint for note in (kept.note, kept.seen))
    assert (one.size, two.size) == (3, 3) and one.root != two.root


def test_what_could_not_be_proved_becomes_a_fork_once_another_root_of_its_size_is_seen(witness, state, small):
    witness.add_checkpoint(small.request(0))
    witness.add_checkpoint(witness_client.request(small.fork(2, 7).checkpoint(), old=3, proof=small.grow(4).proof(3)))
    (kept,) = state.refused(small.signer.origin)
    assert not kept.fork
    assert witness.add_checkpoint(small.request(3)).status == 200
    (kept,) = state.refused(small.signer.origin)
    assert kept.fork and log.open_checkpoint(kept.seen, small.signer.verifier).checkpoint.size == 7


def test_refused_checkpoints_have_an_end_that_leaves_room_for_a_fork(state):
    def refused(size, *, fork):
        return Refused("log", size, bytes(32), fork, MADE, "note", "seen")

    assert all(state.keep_refused(refused(size, fork=False)) for size in range(MOST_REFUSED))
    # One more takes the place of the oldest; one that proves a fork has a place of its own.
    assert state.keep_refused(refused(MOST_REFUSED, fork=False)) and not state.keep_refused(refused(7, fork=False))
    assert {one.size for one in state.refused("log")} == set(range(1, MOST_REFUSED + 1))
    assert state.keep_refused(refused(MOST_REFUSED, fork=True))
    assert state.keep_refused(refused(5, fork=True)) and not state.keep_refused(refused(5, fork=False))
    assert [one.fork for one in state.refused("log")].count(True) == 2
    # Forks have an end, too: there is nothing more to prove.
    assert all(state.keep_refused(refused(1000 + size, fork=True)) for size in range(MOST_REFUSED - 2))
    assert not state.keep_refused(refused(5000, fork=True)) and len(state.refused("log")) <= 2 * MOST_REFUSED


def bring(witness, made, *sizes):
    """A stranger brings a log's checkpoints with a false proof."""
    for size in sizes:
        note = made.checkpoint(size)
        assert witness.add_checkpoint(witness_client.request(note, old=3, proof=[bytes(32)])).status == 422


def test_strangers_can_not_fill_the_places_for_evidence(witness, state, small):
    """Any number of honest checkpoints with a false proof; then a fork is shown, before the witness is as far."""
    witness.add_checkpoint(small.request(0))
    whole = small.grow(400)
    bring(witness, whole, *range(4, 4 + MOST_REFUSED + 20))
    assert len(state.refused(small.signer.origin)) == MOST_REFUSED
    forged = small.fork(2, 200)
    assert witness.add_checkpoint(witness_client.request(forged.checkpoint(), old=3, proof=[bytes(32)])).status == 422
    bring(witness, whole, *range(210, 210 + MOST_REFUSED - 1))
    # What the log did sign as its own says nothing against it once it is seen.
    for size in (150, 200):
        old = state.seen(small.signer.origin).size
        assert witness.add_checkpoint(whole.request(old, size)).status == 200
    (fork,) = [one for one in state.refused(small.signer.origin) if one.fork]
    one, two = (log.open_checkpoint(note, small.signer.verifier).checkpoint for note in (fork.note, fork.seen))
    assert (one.size, two.size) == (200, 200) and one.root != two.root


def test_two_refused_checkpoints_of_one_size_and_two_roots_prove_a_fork(witness, state, small):
    witness.add_checkpoint(small.request(0))
    whole = small.grow(300)
    forged = small.fork(2, 200)
    witness.add_checkpoint(witness_client.request(forged.checkpoint(), old=3, proof=[bytes(32)]))
    assert not any(one.fork for one in state.refused(small.signer.origin))
    bring(witness, whole, 200)
    for one in state.refused(small.signer.origin):
        notes = [log.open_checkpoint(note, small.signer.verifier).checkpoint for note in (one.note, one.seen)]
        assert one.fork and {note.size for note in notes} == {200} and notes[0].root != notes[1].root


def test_a_checkpoint_that_is_cosigned_after_all_is_no_longer_among_the_refused(witness, state, small):
    witness.add_checkpoint(small.request(0))
    whole = small.grow(10)
    bring(witness, whole, 5, 8)
    assert witness.add_checkpoint(whole.request(3, 8)).status == 200
    assert [one.size for one in state.refused(small.signer.origin)] == [5]


# ---- bytes -------------------------------------------------------------------------------------------------------------


def test_seen_is_put_only_over_what_was_there(state):
    first = Seen("log", 3, bytes(32), MADE, "note")
    assert state.advance(first, over=None) and not state.advance(first, over=None)
    second = Seen("log", 5, bytes(32), MADE + 1, "note")
    assert not state.advance(second, over=Seen("log", 4, bytes(32), MADE, "note"))
    assert not state.advance(second, over=Seen("log", 3, bytes(31) + b"x", MADE, "note"))
    assert state.advance(second, over=first) and state.seen("log") == second
