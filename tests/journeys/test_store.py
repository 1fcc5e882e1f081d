"""Settings, the store and the sequencer: what a data folder promises, whatever happens to it; on SQLite and on PostgreSQL."""

import base64
import os
import resource
import sqlite3
import stat
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import engines
import psycopg
import pyarrow as pa
import pytest
import rounds_made
from live import START, Clock
from sqlalchemy import delete, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from acclimate import config, database, log
from acclimate.clocks import Clocks
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate.store import Store, log_checkpoints, log_entries, results, rounds, stages, submissions, unsigned
from acclimate_competitions import digests, records, tables
from acclimate_competitions.errors import Refusal


@pytest.fixture
def embedded(tmp_path):
    """The settings of a data folder with its own SQLite database."""
    return config.load(tmp_path / "data", environ={})


@pytest.fixture(params=engines.ENGINES)
def settings(request, tmp_path):
    """The settings of a data folder, with a database of each engine."""
    given = {"database": request.getfixturevalue("postgresql_url")} if request.param == "postgresql" else {}
    return config.load(tmp_path / "data", environ={}, given=given)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(settings, clock):
    opened = Store.open(settings, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def signer(settings, store):
    return identity.begin(settings, store).signer


@pytest.fixture
def request_(store, tmp_path):
    """A signed RoundDefined, its definition in the blobs."""
    return rounds_made.request(store.blobs, tmp_path / "made")


def refused(code, call, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        call(*arguments, **named)
    assert caught.value.code == code, caught.value
    return caught.value


# ---- settings ------------------------------------------------------------------------------------------------------


def test_every_setting_says_where_it_came_from(tmp_path):
    file = tmp_path / "acclimate.toml"
    file.write_text('port = 9000\nrunner = "local"\nhost = "0.0.0.0"\n', "utf-8")
    environ = {"ACCLIMATE_CONFIG": str(file), "ACCLIMATE_PORT": "9001", "ACCLIMATE_TOKEN": "acc_x", "HOME": "/"}
    found = config.load(tmp_path / "d", environ=environ, given={"host": "::1", "slots": None})
    assert (found.port, found.runner, found.host, found.slots) == (9001, "local", "::1", 0)
    assert found.database == f"sqlite:///{tmp_path / 'd' / 'acclimate.db'}"
    assert {name: found.origins[name].split()[0] for name in ("port", "runner", "host", "slots")} == {
        "port": "environment",
        "runner": "file",
        "host": "argument",
        "slots": "default",
    }


def test_all_problems_of_the_settings_are_told_at_once(tmp_path):
    file = tmp_path / "acclimate.toml"
    file.write_text('colour = "red"\nslots = -1\n', "utf-8")
    environ = {"ACCLIMATE_PORTT": "1", "ACCLIMATE_PORT": "eighty", "ACCLIMATE_ORIGIN": "two words"}
    refusal = refused("config_invalid", config.load, tmp_path, file=file, environ=environ)
    assert len(refusal.problems) == 5
    for word in ("ACCLIMATE_PORTT", "colour", "slots", "'eighty'", "'two words'"):
        assert any(word in problem for problem in refusal.problems), word


def test_the_environment_may_name_the_data_folder(tmp_path):
    assert config.load(environ={"ACCLIMATE_DATA": str(tmp_path / "x")}).data == tmp_path / "x"


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite:///:memory:", "sqlite://", "acclimate.db"])
def test_a_database_this_version_does_not_speak_is_refused(tmp_path, url):
    refused("config_invalid", config.load, tmp_path, environ={"ACCLIMATE_DATABASE": url})
    if url.startswith(("mysql", "sqlite:///")):
        refused("config_invalid", database.connect, url)


@pytest.mark.parametrize("other", [b"0\n", b"\xff\x00", b""])
def test_a_folder_of_another_version_is_refused_and_left_alone(embedded, other):
    Store.open(embedded).close()
    (embedded.data / "VERSION").write_bytes(other)
    refused("data_version", Store.open, embedded)
    assert (embedded.data / "VERSION").read_bytes() == other


def test_a_database_without_a_version_file_is_refused(embedded):
    embedded.data.mkdir()
    (embedded.data / "acclimate.db").touch()
    refused("data_version", Store.open, embedded)


def test_a_database_of_another_schema_is_refused(embedded):
    Store.open(embedded).close()
    with sqlite3.connect(embedded.data / "acclimate.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    refused("data_version", Store.open, embedded)


def test_a_data_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    refused("config_invalid", Store.open, config.load(tmp_path / "file", environ={}))


def test_server_keys_are_made_once_and_only_their_owner_reads_them(embedded):
    opened = Store.open(embedded)
    first, second = identity.begin(embedded, opened), identity.begin(embedded, opened)
    assert (first.vkey, first.evaluator) == (second.vkey, second.evaluator)
    for name in ("log.pem", "evaluator.pem"):
        assert stat.S_IMODE((embedded.keys / name).stat().st_mode) == 0o600
    (embedded.keys / "log.pem").chmod(0o644)
    refused("key_refused", identity.begin, embedded, opened)
    opened.close()


@pytest.mark.parametrize("apart", [False, True])
def test_only_the_owner_reads_what_a_server_keeps(tmp_path, apart):
    given = {"blobs": str(tmp_path / "elsewhere/blobs"), "database": f"sqlite:///{tmp_path}/a.db"} if apart else {}
    found = config.load(tmp_path / "new/data", environ={}, given=given)
    before = os.umask(0o022)
    try:
        opened = Store.open(found)
        opened.blobs.put_bytes(b"weights")
        with opened.transaction() as tx:
            tx.execute(insert(log_checkpoints), {"size": 1, "note": "", "at": ""})
        file = Path(found.database.removeprefix("sqlite:///"))
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in file.parent.glob(f"{file.name}*")}
        opened.close()
    finally:
        os.umask(before)
    assert len(modes) == 3 and set(modes.values()) == {0o600}
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (found.data, Path(found.blobs))] == [0o700, 0o700]


def test_a_folder_that_exists_keeps_its_mode(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    Store.open(config.load(shared, environ={})).close()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o750


def test_a_table_for_which_there_is_no_room_is_a_refusal(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    table = pa.table({"example": [str(n) for n in range(10_000)]})
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        refused("no_space", tables.write, table, tmp_path / "table.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tables.write(table, tmp_path / "table.parquet")


# ---- transactions and triggers -------------------------------------------------------------------------------------


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


# ---- the sequencer -------------------------------------------------------------------------------------------------


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
    deadline = threading.Event()
    for _ in range(100):
        with store.snapshot() as tx:
            if tx.execute(select(log_checkpoints).where(log_checkpoints.c.size == 1)).first() is not None:
                break
        deadline.wait(0.05)
    else:
        pytest.fail("no checkpoint within 5 s")
    sequencer.close()


def test_the_sequencer_goes_on_after_what_nobody_foresaw(store, signer, request_, caplog):
    sequencer = Sequencer(store, signer)
    sequencer.start()
    with store.transaction() as tx:
        tx.execute(text("ALTER TABLE log_entries RENAME TO gone"))
    wait_until(lambda: "no checkpoint could be signed" in caplog.text)
    assert "no such table" in caplog.text or "does not exist" in caplog.text
    with store.transaction() as tx:
        tx.execute(text("ALTER TABLE gone RENAME TO log_entries"))
        tx.append(request_)

    def signed():
        with store.snapshot() as tx:
            return tx.execute(select(log_checkpoints).where(log_checkpoints.c.size == 1)).first() is not None

    wait_until(signed)
    sequencer.close()


def wait_until(condition):
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


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


def test_every_setting_is_documented_with_its_default():
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text("utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert set(rows) == {"data", *config.SETTINGS}
    for name, setting in config.SETTINGS.items():
        default = setting.default(Path("DATA"))
        shown = "(empty)" if default in ("", None, ()) else f"`{default}`"
        assert f"| {shown} |" in rows[name] and setting.meaning.split(":")[0] in rows[name].replace("`", ""), name
