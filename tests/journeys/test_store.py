"""The store: what a transaction promises, whatever happens to it; on SQLite and on PostgreSQL."""

import os
import sqlite3
import threading
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
import rounds_made
from clocked_stores import clock, embedded, refused, request_, settings, store
from live import START
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError

from acclimate.clocks import Clocks
from acclimate.service import identity
from acclimate.store import Store, log_checkpoints, log_entries, results, rounds, stages, submissions, unsigned
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal

__all__ = ["clock", "embedded", "request_", "settings", "store"]


def test_a_transaction_that_fails_leaves_nothing(store, request_):
    with pytest.raises(RuntimeError), store.transaction() as tx:
        tx.append(request_)
        raise RuntimeError
    with store.snapshot() as tx:
        assert tx.size() == 0
        refused("round_unknown", tx.round, request_["round"])


CHANGES = {
    "sqlite": [
        "UPDATE log_entries SET data = x'00'",
        "DELETE FROM log_entries",
        "INSERT OR REPLACE INTO log_entries VALUES (0, 'r', 't', x'00')",
        "REPLACE INTO log_entries VALUES (0, 'r', 't', x'00')",
        "INSERT INTO log_entries VALUES (0, 'r', 't', x'00') ON CONFLICT DO UPDATE SET data = x'00'",
        "INSERT INTO log_entries VALUES (7, 'r', 't', x'00')",
        "INSERT INTO log_entries VALUES (-1, 'r', 't', x'00')",
        'UPDATE OR REPLACE log_entries SET "index" = 1',
        "UPDATE results SET at = ''",
        "DELETE FROM results",
        "INSERT OR REPLACE INTO results VALUES ('key', '{}', '')",
    ],
    "postgresql": [
        "UPDATE log_entries SET data = '\\x00'",
        'UPDATE log_entries SET "index" = 1',
        "DELETE FROM log_entries",
        "TRUNCATE log_entries",
        "TRUNCATE log_entries, results RESTART IDENTITY CASCADE",
        "INSERT INTO log_entries VALUES (0, 'r', 't', '\\x00') ON CONFLICT (\"index\") DO UPDATE SET data = '\\x00'",
        "INSERT INTO log_entries VALUES (7, 'r', 't', '\\x00')",
        "INSERT INTO log_entries VALUES (-1, 'r', 't', '\\x00')",
        "UPDATE results SET at = ''",
        "DELETE FROM results",
        "TRUNCATE results",
        "TRUNCATE stages CASCADE",
        "INSERT INTO results VALUES ('key', '{}', '') ON CONFLICT (stage) DO UPDATE SET at = ''",
    ],
}


def test_log_and_results_are_insert_only_on_any_connection(store, request_, settings):
    _stage_with_result(store)
    with store.transaction() as tx:
        tx.append(request_)
        before = tx.entry(0)
    for statement in CHANGES[store.engine.dialect.name]:
        with pytest.raises(IntegrityError, match="insert-only"), store.transaction() as tx:
            tx.execute(text(statement.replace(":", "\\:")))
        # Without our pragmas, our lock, our rules.
        with pytest.raises((sqlite3.IntegrityError, psycopg.IntegrityError), match="insert-only"):
            _foreign(settings, statement)
    with store.snapshot() as tx:
        assert (tx.size(), tx.entry(0)) == (1, before)
        assert tx.execute(select(results.c.document)).scalar_one() == {"first": True}


def _foreign(settings, statement):
    if settings.database.startswith("sqlite"):
        connection = sqlite3.connect(settings.data / "acclimate.db")
    else:
        connection = psycopg.connect(settings.database.replace("+psycopg", ""))
    try:
        connection.execute(statement)
    finally:
        connection.close()


def test_nothing_is_logged_by_a_clock_that_can_not_be_right(settings, tmp_path):
    """One wrong reading would close every open round, and no later record could say an earlier time."""
    with closing(Store.open(settings)) as store:
        request = rounds_made.request(store.blobs, tmp_path / "made")
        identity.begin(settings, store)
        # To this machine the database's clock is 400 days ahead.
        store.clocks = Clocks(machine=lambda: time.time() - 400 * 86_400)
        for one in (store, store.fenced(lambda tx: None)):
            with pytest.raises(Refusal, match="so far apart") as caught, one.transaction() as tx:
                tx.append(request)
            assert caught.value.code == "busy"
        with store.snapshot() as tx:
            assert tx.size() == 0
        store.clocks = Clocks()
        with store.transaction() as tx:
            assert tx.append(request)[0] == 0


@pytest.mark.parametrize("hours", [25, 72])
def test_nothing_is_logged_by_a_clock_that_is_far_behind_the_log(settings, tmp_path, clock, hours):
    """What comes late would get the newest record's time, and be in time."""
    clock.now = datetime.now(UTC) + timedelta(hours=hours)
    with closing(Store.open(settings, clock=clock)) as ahead:
        request = rounds_made.request(ahead.blobs, tmp_path / "made")
        identity.begin(settings, ahead)
        with ahead.transaction() as tx:
            tx.append(request)
    void = records.sign("RoundVoided", request["round"], {"reason": "a mistake"}, key=rounds_made.key("organizer"))
    with closing(Store.open(settings)) as store:
        with pytest.raises(Refusal, match="caught up") as caught, store.transaction() as tx:
            tx.append(void)
        assert caught.value.code == "busy"
        with store.snapshot() as tx:
            assert tx.size() == 1
    # An operator says so.
    with closing(Store.open(replace(settings, clock_behind=10**6))) as store, store.transaction() as tx:
        assert tx.append(void)[1].at == clock.now


def _stage_with_result(store):
    at = records.format_time(START)
    account = {"id": "a", "role": "entrant", "ed25519": "k", "token_hash": "t", "created": at}
    round_ = {"id": "r", "competition": "c", "name": "n", "owner": "a", "definition": "d", "created": at}
    submission = {"id": "s", "round": "r", "entrant": "a", "owner": "a", "commitment": "c", "nonce": "n"}
    submission |= {"manifest": {}, "acceptance": {}, "state": "accepted", "committed_index": 0, "created": at}
    stage = {"key": "key", "round": "r", "kind": "evaluate", "submission": "s", "state": "committed"}
    with store.transaction() as tx:
        tx.execute(
            text(
                "INSERT INTO accounts (id, role, ed25519, token_hash, created) VALUES (:id, :role, :ed25519, :token_hash, :created)"
            ),
            account,
        )
        for table, row in ((rounds, round_), (submissions, submission), (stages, stage)):
            tx.execute(insert(table), row)
        tx.execute(insert(results), {"stage": "key", "document": {"first": True}, "at": at})


def test_foreign_keys_hold(store):
    with pytest.raises(IntegrityError), store.transaction() as tx:
        tx.execute(insert(results), {"stage": "none", "document": {}, "at": ""})


def test_times_follow_the_log_even_where_the_clock_is_set_back(store, clock, request_):
    with store.transaction() as tx:
        tx.append(request_)
    clock.forward(days=-2)
    fields = {"reason": "a mistake"}
    request = records.sign("RoundVoided", request_["round"], fields, key=rounds_made.key("organizer"))
    with store.transaction() as tx:
        _, record = tx.append(request)
    assert record.at == START


def test_microseconds_are_kept(store, clock, request_):
    clock.forward(microseconds=123_457)
    with store.transaction() as tx:
        _, record = tx.append(request_)
    assert record.document()["at"] == "2027-03-01T12:00:00.123457Z"


def test_a_second_store_sees_what_the_first_appended(store, settings, clock, request_):
    other = Store.open(settings, clock=clock)
    with store.transaction() as tx:
        tx.append(request_)
    with other.transaction() as tx:
        assert tx.round(request_["round"]).phase == "draft"
        tx.append(records.sign("RoundVoided", request_["round"], {"reason": "x"}, key=rounds_made.key("organizer")))
    with store.snapshot() as tx:
        assert tx.round(request_["round"]).phase == "voided"
        assert tx.last(request_["round"]) == 1
    other.close()


def test_the_same_record_again_is_the_first_one(store, request_, clock):
    with store.transaction() as tx:
        first = tx.append_once(request_)
        again = tx.append_once(request_)
    clock.forward(hours=1)
    with store.transaction() as tx:
        later = tx.append_once(request_)
        refused("round_exists", tx.append, request_)
    assert first[2] and not again[2] and not later[2]
    assert first[:2] == again[:2] == later[:2]


def test_records_of_another_round_or_form_are_refused(store, request_):
    with store.transaction() as tx:
        tx.append(request_)
        refused("round_unknown", tx.append, unsigned("RoundOpened", "nowhere", {"seal": "sha256:" + "0" * 64}))
        refused("record_invalid", tx.append, unsigned("RoundOpened", request_["round"], {}))
        refused("record_invalid", tx.append, {"type": "RoundOpened"})
        refused("record_invalid", tx.append, {**request_, "round": "marbles-2027-1-000000000000"})
        assert tx.size() == 1


def test_a_full_disk_is_a_refusal_and_loses_nothing(embedded):
    store = Store.open(embedded)
    with store.transaction() as tx:
        tx.execute(insert(log_entries), {"index": 0, "round": "r", "type": "t", "data": b""})
        pages = tx.execute(text("PRAGMA page_count")).scalar_one()
        tx.connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Refusal) as caught, store.transaction() as tx:
        tx.connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        for size in range(100):
            tx.execute(insert(log_checkpoints), {"size": size, "note": "x" * 4096, "at": ""})
    assert caught.value.code == "no_space"
    with store.snapshot() as tx:
        assert tx.size() == 1
        assert tx.execute(select(log_checkpoints)).first() is None
    store.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_database_is_a_refusal(embedded):
    store = Store.open(embedded)
    (embedded.data / "acclimate.db").chmod(0o444)
    with pytest.raises(Refusal) as caught, store.transaction() as tx:
        tx.execute(insert(log_checkpoints), {"size": 1, "note": "", "at": ""})
    assert caught.value.code == "no_space"


def test_a_database_that_another_process_holds_is_busy(embedded):
    store = Store.open(embedded)
    holder = sqlite3.connect(embedded.data / "acclimate.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(Refusal) as caught, store.snapshot() as tx:
        tx.connection.exec_driver_sql("PRAGMA busy_timeout = 10")
        tx.execute(insert(log_checkpoints), {"size": 1, "note": "", "at": ""})
    assert caught.value.code == "busy"
    holder.close()


def test_many_threads_append_without_gaps(store, request_, clock):
    key = rounds_made.key("organizer")
    names = [f"r{i}" for i in range(24)]

    def begin(name):
        fields = {**request_["fields"], "name": name}
        with store.transaction() as tx:
            tx.append(records.sign("RoundDefined", "", fields, key=key))

    threads = [threading.Thread(target=begin, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.snapshot() as tx:
        assert sorted(tx.execute(select(log_entries.c.index)).scalars()) == list(range(24))
        assert {records.parse(entry)["name"] for entry in tx.entries(0, 24)} == set(names)


def test_a_clock_that_jumps_back_does_not_reopen_a_closed_round(store, clock, request_):
    # The close is decided by max(now, the last entry's time): once logged, later records can't be earlier.
    clock.forward(days=40)
    with store.transaction() as tx:
        tx.append(request_)
    clock.forward(days=-40)
    fields = {**request_["fields"], "name": "later"}
    with store.transaction() as tx:
        _, record = tx.append(records.sign("RoundDefined", "", fields, key=rounds_made.key("organizer")))
    assert record.at == START + timedelta(days=40)
