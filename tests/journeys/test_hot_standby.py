"""A PostgreSQL that takes no writes, a hot standby or a database closed by its own setting: refused as what it is, and gone on with afterwards."""

import contextlib

import dispatching
import engines
import live
import pytest
from commands import Run
from sqlalchemy import insert, text
from waiting import until

from acclimate import config, writability
from acclimate.store import Store, invitations
from acclimate_competitions.errors import Refusal


def write(store: Store, word: str) -> None:
    with store.transaction() as tx:
        tx.execute(insert(invitations), {"code_hash": word, "role": "entrant"})


def read(store: Store) -> None:
    with store.snapshot() as tx:
        assert tx.size() == 0


def refusal(store: Store) -> Refusal:
    """What a transaction that writes is refused with, each time the same, on a fresh connection and on one that has read."""
    found = []
    for _ in range(3):
        read(store)
        with pytest.raises(Refusal) as caught:
            write(store, "refused")
        assert caught.value.code == "database_unreachable"
        found.append(caught.value)
    assert len({each.sentence for each in found}) == 1
    return found[0]


def test_a_database_that_is_read_only_by_its_own_setting_is_not_written(tmp_path, postgresql, postgresql_url):
    name = postgresql_url.rpartition("/")[2]
    Store.open(config.load(tmp_path, environ={}, given={"database": postgresql_url})).close()
    postgresql.sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    store = Store.open(config.load(tmp_path, environ={}, given={"database": postgresql_url}))
    assert "read-only" in refusal(store).sentence
    with pytest.raises(Refusal, match="the database is read-only"):
        writability.look(store.engine)
    postgresql.sql(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    postgresql.sql(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}' AND pid <> pg_backend_pid()"
    )
    write(store, "taken")
    writability.look(store.engine)
    store.close()


def test_a_hot_standby_is_refused_as_one_and_written_once_it_is_promoted(
    tmp_path, postgresql: engines.Server, postgresql_url: str, acclimate: Run
):
    name = postgresql_url.rpartition("/")[2]
    with live.serve(tmp_path, database=postgresql_url):
        pass
    with postgresql.standby() as standby:
        url = standby.url(name)
        with live.serve(tmp_path, database=url) as server:
            # 1. What reads is answered, on as many connections as there are.
            assert server.anyone().get("/v1/rounds").status_code == 200
            assert "standby" in refusal(server.store).hint
            answer = until(lambda: (got := server.anyone().get("/readyz")).status_code == 503 and got)
            assert answer.json()["checks"]["writes"] == "database_unreachable", answer.text
            # 2. No dispatcher leads there.
            with pytest.raises(Refusal) as caught, dispatching.dispatcher(server):
                pass
            assert caught.value.code == "database_unreachable" and "standby" in caught.value.hint
            told = acclimate("doctor", "--data", server.settings.data, "--database", url)
            assert "the database is a standby: nothing can be written" in told.out
            # 3. It becomes the primary, under all of them.
            standby.promote()
            write(server.store, "taken")
            until(lambda: server.anyone().get("/readyz").status_code == 200)
            with dispatching.dispatcher(server) as running:
                assert running.leading


def test_of_several_servers_the_one_that_takes_writes_is_found(
    tmp_path, postgresql: engines.Server, postgresql_url: str
):
    """By libpq's own options in the setting `database`, also after the primary is gone and another took its place."""
    name = postgresql_url.rpartition("/")[2]
    Store.open(config.load(tmp_path, environ={}, given={"database": postgresql_url})).close()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(postgresql.standby())
        first.promote()
        second = stack.enter_context(first.standby())
        hosts = f"host=127.0.0.1:{second.port}&host=127.0.0.1:{first.port}"
        url = f"postgresql://postgres:{postgresql.password}@/{name}?{hosts}&target_session_attrs=read-write"
        store = Store.open(config.load(tmp_path, environ={}, given={"database": url}))
        write(store, "first")
        until(lambda: second.sql(f"SELECT 1 FROM {invitations.name}", database=name))
        first.stop()
        with pytest.raises(Refusal) as caught:
            write(store, "between")
        assert caught.value.code == "database_unreachable"
        second.promote()
        write(store, "second")
        with store.snapshot() as tx:
            assert set(tx.execute(text(f"SELECT code_hash FROM {invitations.name}")).scalars()) == {"first", "second"}
        store.close()
