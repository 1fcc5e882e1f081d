"""A database that was put back, upgraded or exchanged under a process that runs: nothing stale is believed, nothing written in its way."""

import dispatching
import engines
import httpx
import live
import pytest
import rounds_made
from sqlalchemy import delete, text

from acclimate import config, installation, store as stores
from acclimate.service import identity
from acclimate.store import Store, log_entries
from acclimate_competitions.errors import Refusal

database_url, postgresql, postgresql_url = engines.database_url, engines.postgresql, engines.postgresql_url


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
