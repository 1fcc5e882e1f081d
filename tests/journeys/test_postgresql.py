"""What databases hold and say: values, clock, and what of a PostgreSQL server is out of reach or refused."""

import threading
import time
from collections import Counter
from datetime import UTC, datetime

import httpx
import live
import psycopg
import pytest
from databases import add, on_postgresql, refused, settings, store
from sqlalchemy import delete, insert, select, text
from sqlalchemy.exc import ProgrammingError
from waiting import WITHIN, until

from acclimate import config, database, migrations
from acclimate.store import (
    Store,
    accounts,
    invitations,
    log_checkpoints,
    log_entries,
    outbox,
    timestamp,
)
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal

__all__ = ["on_postgresql", "settings", "store"]


def test_what_only_one_engine_would_store_is_refused_by_both(store):
    row = {"id": "a", "role": "r", "ed25519": "k", "token_hash": "t", "created": ""}
    refused("request_invalid", add, store, accounts, {**row, "id": "a\0b"})
    refused("request_invalid", add, store, accounts, [row, {**row, "id": "b", "ed25519": "\0"}])
    for value in (float("nan"), float("inf")):
        refused("request_invalid", add, store, outbox, {"round": "r", "stage": "s", "payload": {"x": [value]}})
    add(
        store,
        outbox,
        {
            "round": "r",
            "stage": "s",
            "payload": {"x": "a\0b \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")},
        },
    )
    with store.snapshot() as tx:
        assert tx.execute(select(outbox.c.payload)).scalar_one() == {"x": "a\0b 😀"}
        assert tx.execute(select(accounts)).first() is None


def test_a_text_that_is_too_long_for_its_column_is_refused(on_postgresql):
    store = Store.open(on_postgresql)
    refused("request_invalid", add, store, invitations, {"code_hash": "x" * 72, "role": "r"})
    store.close()


def test_integers_of_64_bits_and_the_order_of_texts_are_the_same(store):
    names = ["a", "B", "b", "Z", "_", "-", "é", "z", "😀", "\uffff", "a-b", "ab", "a b"]
    with store.transaction() as tx:
        tx.execute(insert(log_checkpoints), {"size": 2**62, "note": "", "at": ""})
        for name in names:
            tx.execute(insert(invitations), {"code_hash": name, "role": "r"})
    with store.snapshot() as tx:
        assert tx.execute(select(log_checkpoints.c.size)).scalar_one() == 2**62
        found = tx.execute(select(invitations.c.code_hash).order_by(invitations.c.code_hash)).scalars().all()
        between = select(invitations.c.code_hash).where(
            invitations.c.code_hash >= "a", invitations.c.code_hash < "a\U0010ffff"
        )
        assert set(tx.execute(between).scalars()) == {"a", "a-b", "ab", "a b"}
    assert found == sorted(names)


def test_the_clock_is_the_databases_in_microseconds_and_goes_on_within_a_transaction(store):
    before = datetime.now(UTC)
    with store.transaction() as tx:
        first = tx.now()
        time.sleep(0.002)
        second = tx.now()
        raw = tx.execute(text("SELECT acclimate_now()")).scalar_one()
    assert before <= first < second <= records.parse_time(raw) <= datetime.now(UTC)
    assert len(raw) == 27 and raw.endswith("Z") and records.format_time(records.parse_time(raw)) == raw
    # Whole milliseconds a hundred times over would be a clock that has no more.
    with store.snapshot() as tx:
        assert any(tx.now().microsecond % 1000 for _ in range(100))


def test_a_test_may_replace_postgresqls_clock(on_postgresql):
    store = Store.open(on_postgresql)
    with store.transaction() as tx:
        tx.execute(
            text(
                "CREATE OR REPLACE FUNCTION acclimate_now() RETURNS text LANGUAGE sql"
                " AS $$ SELECT '2027-03-01T12\\:00\\:00.000001Z' $$"
            )
        )
    with store.snapshot() as tx:
        assert timestamp(tx) == "2027-03-01T12:00:00.000001Z"
    store.close()


# ---- out of reach -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda server, url: url.replace(f":{server.port}/", ":1/"), "nothing listens"),
        (lambda server, url: url.replace("127.0.0.1", "nowhere.invalid"), "no such host"),
        (lambda server, url: url.replace(server.password, "wrong-password"), "user and password"),
        (lambda server, url: url.replace("postgres:", "nobody:"), "user and password"),
        (lambda server, url: url + "x", "CREATE DATABASE"),
        (lambda server, url: url + "?sslmode=require", "sslmode"),
    ],
    ids=["port", "host", "password", "user", "name", "certificate"],
)
def test_a_database_out_of_reach_is_refused_with_what_to_do(postgresql, postgresql_url, tmp_path, change, word):
    url = change(postgresql, postgresql_url)
    found = config.load(tmp_path / "d", environ={}, given={"database": url})
    refusal = refused("database_unreachable", Store.open, found)
    assert word in refusal.hint, refusal.hint
    assert (
        postgresql.password not in f"{refusal} {refusal.hint}" and "wrong-password" not in f"{refusal} {refusal.hint}"
    )
    assert "\n" not in str(refusal)


def test_a_url_that_can_not_be_used_is_refused_without_its_password(postgresql_url, tmp_path):
    for url in (postgresql_url + "?colour=red", "postgresql+psycopg://u:secret@127.0.0.1:port/x"):
        with pytest.raises(Refusal) as caught:
            Store.open(config.load(tmp_path / "d", environ={}, given={"database": url}))
        assert caught.value.code == "config_invalid"
        assert "secret" not in f"{caught.value} {caught.value.hint} {caught.value.problems}"


@pytest.mark.parametrize("name", ["database", "tracking"])
def test_a_second_at_in_a_url_is_refused_before_it_is_taken_for_a_host(tmp_path, name):
    url = "postgresql://u:secr@etpart@127.0.0.1:1/db"
    refusal = refused("config_invalid", config.load, tmp_path, environ={}, given={name: url})
    assert "%40" in str(refusal) and "etpart" not in f"{refusal} {refusal.hint} {refusal.problems}"
    good = config.load(tmp_path, environ={}, given={name: url.replace("r@e", "r%40e")})
    assert "%40etpart" in good.value(name)


def test_what_was_answered_is_on_the_disk_unless_the_url_says_otherwise(postgresql_url):
    for more, wanted in (("", "on"), ("?options=-c%20synchronous_commit%3Dlocal", "local")):
        engine = database.connect("postgresql+psycopg" + postgresql_url.removeprefix("postgresql") + more)
        with engine.connect() as connection:
            assert connection.execute(text("SHOW synchronous_commit")).scalar() == wanted
        engine.dispose()


def test_an_option_that_no_connection_has_is_refused_with_what_to_do(postgresql_url, tmp_path):
    found = config.load(tmp_path / "d", environ={}, given={"database": postgresql_url + "?colour=red"})
    assert "?" in refused("config_invalid", Store.open, found).hint


def test_a_server_that_is_stopped_is_503_and_that_comes_back_needs_no_restart(postgresql, postgresql_url, tmp_path):
    with live.serve(tmp_path, database=postgresql_url) as served:
        organizer = served.organizer()
        http = served.anyone()
        assert http.get("/v1/rounds").status_code == 200
        over, seen = threading.Event(), Counter()

        def ask():
            with httpx.Client(base_url=served.url, trust_env=False, timeout=WITHIN) as client:
                while not over.is_set():
                    answer = client.get("/v1/rounds")
                    seen[answer.status_code, answer.json()["code"] if answer.status_code >= 400 else None] += 1

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        stranger = served.stranger("late")
        registration = stranger.registration()
        postgresql.stop("immediate")
        try:
            answer = http.get("/v1/rounds")
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (503, "database_unreachable"), problem
            assert int(answer.headers["Retry-After"]) >= 1 and postgresql.password not in answer.text
            assert stranger.post("/v1/accounts", registration).json()["code"] == "database_unreachable"
        finally:
            postgresql.start()
        assert http.get("/v1/rounds").status_code == 200
        assert organizer.get("/v1/rounds").status_code == 200
        assert stranger.post("/v1/accounts", stranger.registration()).status_code == 201
        over.set()
        for thread in threads:
            thread.join()
    assert {key for key in seen if key[0] != 200} <= {(503, "database_unreachable")}, seen
    assert seen[200, None] and seen[503, "database_unreachable"]


def test_a_connection_lost_in_a_transaction_writes_nothing(on_postgresql, postgresql):
    store = Store.open(on_postgresql)
    with pytest.raises(Refusal) as caught, store.transaction() as tx:
        tx.execute(insert(log_entries), {"index": 0, "round": "r", "type": "t", "data": b""})
        postgresql.sql(f"SELECT pg_terminate_backend({tx.execute(text('SELECT pg_backend_pid()')).scalar_one()})")
        tx.now()
    assert caught.value.code == "database_unreachable"
    with store.snapshot() as tx:
        assert tx.size() == 0
    store.close()


def test_a_writer_that_another_holds_up_is_told_so(on_postgresql, postgresql_url, tmp_path):
    first = Store.open(on_postgresql)
    url = postgresql_url + "?options=-c%20lock_timeout%3D50ms"
    second = Store.open(config.load(tmp_path / "second", environ={}, given={"database": url}))
    with first.transaction() as tx:
        tx.execute(insert(log_entries), {"index": 0, "round": "r", "type": "t", "data": b""})
        assert "another process" in str(refused("busy", add, second, invitations, {"code_hash": "x", "role": "r"}))
        with second.snapshot() as reader:
            assert reader.size() == 0
    add(second, invitations, {"code_hash": "x", "role": "r"})
    # Reads can't write, even by mistake.
    with pytest.raises(Refusal) as caught, first.snapshot() as tx:
        tx.execute(delete(invitations))
    assert caught.value.code == "database_unreachable" and "read-only" in str(caught.value)
    first.close()
    second.close()


def test_a_login_that_may_not_write_is_refused(on_postgresql, postgresql, postgresql_url, tmp_path):
    Store.open(on_postgresql).close()
    name = postgresql_url.rpartition("/")[2]
    postgresql.sql(f"CREATE ROLE {name} LOGIN PASSWORD 'reader'")
    postgresql.sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}", database=name)
    url = postgresql.url(name, user=name, password="reader")
    store = Store.open(config.load(tmp_path / "reader", environ={}, given={"database": url}))
    assert "may not" in refused("database_unreachable", add, store, invitations, {"code_hash": "x", "role": "r"}).hint
    store.close()
    # Nor may it set a database up.
    empty = postgresql.fresh()
    url = postgresql.url(empty.rpartition("/")[2], user=name, password="reader")
    refused("database_unreachable", Store.open, config.load(tmp_path / "e", environ={}, given={"database": url}))
    postgresql.drop(empty)
    postgresql.sql(f"DROP OWNED BY {name}", database=name)
    postgresql.sql(f"DROP ROLE {name}")


def test_a_database_without_a_connection_left_is_busy(on_postgresql, postgresql):
    store = Store.open(on_postgresql)
    name = on_postgresql.database.rpartition("/")[2]
    postgresql.sql(f"ALTER DATABASE {name} CONNECTION LIMIT 0")
    postgresql.sql(f"CREATE ROLE {name}_r LOGIN PASSWORD 'reader'")
    with pytest.raises(psycopg.OperationalError) as caught:
        psycopg.connect(postgresql.url(name, user=f"{name}_r", password="reader"))
    engine = database.connect(postgresql.url(name, user=f"{name}_r", password="reader").replace(":", "+psycopg:", 1))
    assert "too many connections" in str(caught.value)
    refused("busy", migrations.ready, engine)
    engine.dispose()
    store.close()
    postgresql.sql(f"DROP ROLE {name}_r")


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("53100", "no_space"),
        ("58030", "no_space"),
        ("40001", "busy"),
        ("40P01", "busy"),
        ("53300", "busy"),
        ("57P03", "database_unreachable"),
        ("08006", "database_unreachable"),
        ("42501", "database_unreachable"),
    ],
)
def test_what_the_server_says_of_itself_is_a_refusal(on_postgresql, state, code):
    store = Store.open(on_postgresql)
    raised = f"DO $$ BEGIN RAISE EXCEPTION 'so it is' USING ERRCODE = '{state}'; END $$"
    with pytest.raises(Refusal) as caught, store.transaction() as tx:
        tx.execute(insert(invitations), {"code_hash": "x", "role": "r"})
        tx.execute(text(raised))
    assert caught.value.code == code
    with store.snapshot() as tx:
        assert tx.execute(select(invitations)).first() is None
    # What is a fault of ours stays one.
    with pytest.raises(ProgrammingError), store.transaction() as tx:
        tx.execute(text("SELECT nothing FROM nowhere"))
    store.close()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_statement_that_takes_too_long_and_a_writer_that_stands_still_are_ended(on_postgresql, rows):
    store = Store.open(on_postgresql)
    with pytest.raises(Refusal) as caught, store.snapshot() as tx:
        tx.execute(text("SET LOCAL statement_timeout = '50ms'"))
        tx.execute(text("SELECT pg_sleep(5)"))
    assert caught.value.code == "busy"
    # A process that was stopped while it wrote gives the writers' lock up; its own write is refused, whole.
    with pytest.raises(Refusal) as caught, store.transaction() as tx:
        tx.execute(text("SET LOCAL idle_in_transaction_session_timeout = '2s'"))
        # Many rows go as a pipeline.
        tx.execute(insert(invitations), [{"code_hash": f"x{row}", "role": "r"} for row in range(rows)])
        # Another is served as soon as its lock is gone.
        with store.engine.connect() as other:
            own = "database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            left = text(f"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND {own}")
            until(lambda: other.execute(left).scalar_one() == 0, within=60)
        tx.now()
    assert caught.value.code in ("busy", "database_unreachable")
    with store.snapshot() as tx:
        assert tx.execute(select(invitations)).first() is None
    store.close()
