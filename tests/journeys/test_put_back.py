"""A database that was put back, upgraded or exchanged under a process that runs: nothing stale is believed, nothing written in its way."""

import threading

import dispatching
import live
import pytest
from sqlalchemy import delete, text

from acclimate import store as stores
from acclimate.dispatch import Dispatcher
from acclimate.store import Store, log_entries
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
    "data_version": "UPDATE alembic_version SET version_num = '0003'",
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
