"""A database that was put back, upgraded or exchanged under a process that runs: nothing stale is believed, nothing written in its way."""

import contextlib
import sqlite3
import threading
from pathlib import Path

import dispatching
import live
import pytest
from sqlalchemy import delete, func, insert, select, text
from typer.testing import CliRunner

from acclimate import config
from acclimate import store as stores
from acclimate.checkpoints import Copies
from acclimate.cli.main import app
from acclimate.dispatch import Dispatcher
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate.store import Store, log_checkpoints, log_entries
from acclimate_competitions.errors import Refusal
from acclimate_runners.local import LocalRunner


@pytest.fixture
def server(tmp_path, database_url):
    with live.serve(tmp_path, database=database_url) as running:
        yield running


def cut(store, index):
    """The log without what came from `index` on, as a failover would leave it that loses its newest entries."""
    table = " ON log_entries" if store.engine.dialect.name == "postgresql" else ""
    with store.transaction() as tx:
        tx.execute(text(f"DROP TRIGGER log_entries_no_delete{table}"))
        tx.execute(delete(log_entries).where(log_entries.c.index >= index))


def voided(server, staged):
    with server.store.transaction() as tx:
        return tx.append(server.organizer().sign("RoundVoided", staged.round, reason="x"))[0]


@pytest.mark.parametrize("replaced", [True, False])
def test_what_was_kept_of_a_round_is_dropped_where_the_database_was_put_back(server, tmp_path, monkeypatch, replaced):
    staged = live.open_round(server, tmp_path)
    running = Store.open(dispatching.beside(server, tmp_path / "own"), clock=server.clock)
    index = voided(server, staged)
    with running.snapshot() as tx:
        assert tx.round(staged.round).phase == "voided"
    assert running.recall(staged.round).phase == "voided"
    other = Store.open(dispatching.beside(server, tmp_path / "other"), clock=server.clock)
    cut(other, index)
    if replaced:
        bea = server.actor("bea")
        fields = {"entrant": "bea", "ed25519": bea.public, "conflicts": []}
        with other.transaction() as tx:
            tx.append(bea.sign("EntrantRegistered", staged.round, **fields))
    # Without a query it is believed for a while only.
    monkeypatch.setattr(stores, "RECALL_SECONDS", 0.0)
    assert running.recall(staged.round) is None
    with running.snapshot() as tx:
        found = tx.round(staged.round)
    assert found.phase == "open" and list(found.entrants) == (["bea"] if replaced else [])
    monkeypatch.setattr(stores, "RECALL_SECONDS", 60.0)
    assert running.recall(staged.round) == found
    running.close()
    other.close()


def test_an_older_moment_does_not_make_newer_ones_forgotten(server, tmp_path):
    staged = live.open_round(server, tmp_path)
    store = Store.open(dispatching.beside(server, tmp_path / "own"), clock=server.clock)
    with store.snapshot() as before:
        assert before.size() > 0
        voided(server, staged)
        with store.snapshot() as after:
            assert after.round(staged.round).phase == "voided"
        assert before.round(staged.round).phase == "open"
    assert store.recall(staged.round).phase == "voided"
    store.close()


CHANGES = {
    "data_version": "UPDATE alembic_version SET version_num = '9999'",
    "other_installation": "UPDATE installation SET id = 'another'",
}


@pytest.mark.parametrize("code", CHANGES)
def test_a_dispatcher_ends_where_its_database_changed_under_it(server, tmp_path, code):
    settings = dispatching.beside(server, tmp_path / "own")
    store, plain = Store.open(settings, clock=server.clock), Store.open(settings, clock=server.clock)
    running = Dispatcher(store, store.blobs, settings, lambda: LocalRunner(settings.work, slots=1), lease_seconds=1.0)
    ended = []

    def run():
        try:
            running.run(threading.Event())
        except Refusal as refusal:
            ended.append(refusal.code)

    thread = threading.Thread(target=run)
    thread.start()
    dispatching.wait(lambda: running.leading)
    with plain.transaction() as tx:
        tx.execute(text(CHANGES[code]))
    # Whether it has noticed yet or not, what it writes is refused.
    with pytest.raises(Refusal) as refused, running._store.transaction():
        pass
    assert refused.value.code == code
    thread.join(60)
    assert ended == [code]
    store.close()
    plain.close()


@pytest.mark.parametrize("code", CHANGES)
def test_an_api_takes_nothing_into_a_database_that_changed_under_it(server, tmp_path, code):
    staged = live.open_round(server, tmp_path)
    ada = server.actor("ada")
    plain = Store.open(dispatching.beside(server, tmp_path / "own"), clock=server.clock)
    with plain.transaction() as tx:
        tx.execute(text(CHANGES[code]))
        size = tx.size()
    fields = {"entrant": "ada", "ed25519": ada.public, "conflicts": []}
    answer = ada.post(f"{staged.path}/entrants", ada.sign("EntrantRegistered", staged.round, **fields))
    assert answer.status_code == 500 and answer.json()["code"] == code, answer.text
    with plain.snapshot() as tx:
        assert tx.size() == size
    plain.close()


def _signing(settings):
    store = Store.open(settings)
    known = identity.begin(settings, store)
    copies = Copies(store.blobs, settings.data, known.signer.verifier)
    return store, Sequencer(store, known.signer, copies=copies)


def _grow(store, sequencer, *words):
    for word in words:
        with store.transaction() as tx:
            tx.execute(insert(log_entries), {"index": tx.size(), "round": "r", "type": "t", "data": word.encode()})
    sequencer.advance()


@pytest.mark.parametrize("gone", ["data", "blobs", "neither"])
def test_nothing_is_signed_over_an_older_backup_until_the_loss_is_accepted(tmp_path, gone):
    settings = config.load(tmp_path / "data", environ={})
    store, sequencer = _signing(settings)
    sequencer.start()
    _grow(store, sequencer, "a", "b")
    file = Path(settings.database.removeprefix("sqlite:///"))
    with contextlib.closing(sqlite3.connect(file)) as old:
        old.execute("VACUUM INTO ?", [str(tmp_path / "backup.db")])
    _grow(store, sequencer, "c", "d")
    sequencer.close()
    store.close()
    for path in file.parent.glob("acclimate.db*"):
        path.unlink()
    (tmp_path / "backup.db").rename(file)
    # Either copy is enough.
    if gone != "neither":
        (Path(settings.blobs if gone == "blobs" else settings.data) / "CHECKPOINT").unlink()
    # Found whether it is short, or as long again with other entries.
    for more in ((), ("other c", "other d", "e")):
        store, sequencer = _signing(settings)
        for word in more:
            with store.transaction() as tx:
                tx.execute(insert(log_entries), {"index": tx.size(), "round": "r", "type": "t", "data": word.encode()})
        with pytest.raises(Refusal) as refused:
            sequencer.start()
        assert refused.value.code == "log_inconsistent" and "4 entries" in str(refused.value)
        assert "accept-loss" in refused.value.hint
        with store.snapshot() as tx:
            assert tx.execute(select(func.max(log_checkpoints.c.size))).scalar() == 2
        store.close()
    given = ["db", "accept-loss", "--data", str(settings.data)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0 and "4 entries were signed" in done.stdout
    (kept,) = Path(settings.blobs).glob("CHECKPOINT-LOST-4-*")
    assert "\n4\n" in kept.read_text()
    assert "nothing is lost" in CliRunner().invoke(app, given).stdout
    store, sequencer = _signing(settings)
    sequencer.start()
    assert "\n5\n" in sequencer.checkpoint()
    sequencer.close()
    for folder in (settings.blobs, settings.data):
        assert "\n5\n" in (Path(folder) / "CHECKPOINT").read_text()
    store.close()


def test_a_copy_is_kept_in_a_bucket_and_read_from_there(tmp_path, s3_place):
    settings = config.load(tmp_path / "data", environ={}, given=s3_place.settings)
    store, sequencer = _signing(settings)
    sequencer.start()
    _grow(store, sequencer, "a")
    sequencer.close()
    assert b"\n1\n" in store.blobs.note("CHECKPOINT")
    (settings.data / "CHECKPOINT").unlink()
    cut(store, 0)
    with store.transaction() as tx:
        tx.execute(delete(log_checkpoints))
    with pytest.raises(Refusal, match="with the blobs"):
        _signing(settings)[1].start()
    store.close()
