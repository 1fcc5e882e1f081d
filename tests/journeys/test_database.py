"""The database of an installation, SQLite or PostgreSQL: how it is made, brought up, compared, and what it is refused for."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import engines
import httpx
import live
import psycopg
import pytest
import rounds_made
from alembic import command
from sqlalchemy import create_engine, delete, insert, inspect, select, text
from sqlalchemy.exc import ProgrammingError
from typer.testing import CliRunner

from acclimate import config, database, installation, keys, log, migrations
from acclimate.cli.main import app
from acclimate.lease import Lease
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate.store import (
    Store,
    accounts,
    invitations,
    log_checkpoints,
    log_entries,
    metadata,
    outbox,
    rounds,
    timestamp,
)
from acclimate.store import installation as installation_rows
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal

HERE = Path(__file__).parent


@pytest.fixture
def settings(tmp_path, database_url):
    return config.load(tmp_path / "data", environ={}, given={"database": database_url})


@pytest.fixture
def store(settings):
    opened = Store.open(settings)
    yield opened
    opened.close()


@pytest.fixture
def on_postgresql(tmp_path, postgresql_url):
    return config.load(tmp_path / "data", environ={}, given={"database": postgresql_url})


def refused(code, call, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        call(*arguments, **named)
    assert caught.value.code == code, caught.value
    assert caught.value.hint or code in ("request_invalid", "busy"), caught.value
    return caught.value


def acclimate(*arguments):
    """The command line, not waited for."""
    return subprocess.Popen(
        [sys.executable, "-m", "acclimate", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments):
    """The command line, in this process: exit code, stdout, stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    refusal = result.exception
    if isinstance(refusal, Refusal):
        return 1, result.stdout, f"{result.stderr}{refusal.sentence}\n{refusal.hint}"
    assert refusal is None or isinstance(refusal, SystemExit), refusal
    return result.exit_code, result.stdout, result.stderr


# ---- the schema ----------------------------------------------------------------------------------------------------


def described(engine):
    """What the database itself says of its tables."""
    found = inspect(engine)
    tables = {}
    for name in sorted(set(found.get_table_names()) - {"alembic_version"}):
        columns = {
            column["name"]: (str(column["type"]), column["nullable"], str(column["default"]).replace("::regclass", ""))
            for column in found.get_columns(name)
        }
        foreign = {
            (tuple(key["constrained_columns"]), key["referred_table"], tuple(key["referred_columns"]))
            for key in found.get_foreign_keys(name)
        }
        unique = {tuple(item["column_names"]) for item in found.get_unique_constraints(name)}
        indexes = {(item["name"], tuple(item["column_names"])) for item in found.get_indexes(name)}
        tables[name] = (columns, found.get_pk_constraint(name)["constrained_columns"], foreign, unique, indexes)
    return tables


@pytest.mark.parametrize("engine", engines.ENGINES)
def test_the_migrations_make_what_the_models_say(engine, request, tmp_path):
    if engine == "sqlite":
        first, second = (f"sqlite:///{tmp_path / name}" for name in ("a.db", "b.db"))
    else:
        server = request.getfixturevalue("postgresql")
        first, second = (server.fresh().replace("postgresql:", "postgresql+psycopg:") for _ in range(2))
    migrated, modelled = database.connect(first), create_engine(second)
    migrations.ready(migrated)
    metadata.create_all(modelled)
    assert described(migrated) == described(modelled)
    assert set(described(migrated)) == set(metadata.tables)
    assert migrations.problems(migrated, metadata) == []
    migrated.dispose()
    modelled.dispose()


def test_the_revisions_are_the_folders():
    from alembic.script import ScriptDirectory

    found = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert found.get_heads() == [migrations.HEAD]
    assert sorted(script.revision for script in found.walk_revisions()) == list(migrations.REVISIONS)


def to_first_revision(engine):
    with database.writing(engine) as connection:
        command.upgrade(migrations._settings(connection), "0001")


def test_the_first_revision_is_the_schema_of_the_release_before(tmp_path):
    engine = database.connect(f"sqlite:///{tmp_path / 'new.db'}")
    to_first_revision(engine)
    engine.dispose()
    old = sqlite3.connect(tmp_path / "old.db")
    old.executescript((HERE / "schema-1.sql").read_text("utf-8"))
    new = sqlite3.connect(tmp_path / "new.db")
    query = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE '%alembic%' ORDER BY name"
    assert new.execute(query).fetchall() == old.execute(query).fetchall()
    assert new.execute("PRAGMA user_version").fetchone() == old.execute("PRAGMA user_version").fetchone() == (1,)
    old.close()
    new.close()


@pytest.fixture
def old_folder(tmp_path):
    """A data folder of the release before, with a log that it has signed."""
    data = tmp_path / "old"
    data.mkdir()
    (data / "VERSION").write_text("1\n")
    settings = config.load(data, environ={})
    settings.keys.mkdir()
    signer = log.Signer(settings.origin, keys.create_signing_key(settings.keys / "log.pem"))
    keys.create_signing_key(settings.keys / "evaluator.pem")
    made = sqlite3.connect(data / "acclimate.db")
    made.executescript((HERE / "schema-1.sql").read_text("utf-8"))
    entry = b'{"an":"entry"}'
    tree = log.Tree([log.leaf_hash(entry)])
    made.execute("INSERT INTO log_entries VALUES (0, 'r', 't', ?)", (entry,))
    made.execute("INSERT INTO log_checkpoints VALUES (1, ?, '')", (log.sign_checkpoint(signer, 1, tree.root()),))
    made.commit()
    made.close()
    return settings


def test_an_older_database_is_refused_and_upgraded_once_whoever_tries(old_folder, tmp_path):
    hint = refused("data_version", Store.open, old_folder).hint
    assert "acclimate db upgrade" in hint and "back it up" in hint
    assert run("db", "check", "--data", old_folder.data)[0] == 1
    both = [acclimate("db", "upgrade", "--json", "--data", old_folder.data) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    first, second = (json.loads(out) for out, _ in answers)
    assert first["installation"] == second["installation"] and first["schema"] == "0002"
    steps = first["steps"] + second["steps"]
    assert sum(step.startswith("0002") for step in steps) == sum("row" in step for step in steps) == 1
    assert not any(step.startswith(("0001", "trigger")) for step in steps)
    code, out, _ = run("db", "upgrade", "--data", old_folder.data)
    assert code == 0 and "nothing to do" in out
    assert run("db", "check", "--data", old_folder.data)[:2] == (0, "schema 0002: nothing is wrong\n")
    # It goes on with its keys and its log.
    store = Store.open(old_folder)
    known = identity.begin(old_folder, store)
    sequencer = Sequencer(store, known.signer)
    sequencer.start()
    assert log.open_checkpoint(sequencer.checkpoint(), known.signer.verifier).checkpoint.size == 1
    sequencer.close()
    store.close()


def test_an_older_database_is_upgraded_with_its_own_keys_only(old_folder, tmp_path):
    good = (old_folder.keys / "log.pem").read_bytes()
    (old_folder.keys / "log.pem").unlink()
    assert "there is no" in run("db", "upgrade", "--data", old_folder.data)[2]
    keys.create_signing_key(old_folder.keys / "log.pem")
    code, _, errors = run("db", "upgrade", "--data", old_folder.data)
    assert code == 1 and "was not signed by" in errors
    (old_folder.keys / "log.pem").write_bytes(good)
    code, out, _ = run("db", "upgrade", "--data", old_folder.data)
    assert code == 0 and "installation's row" in out


def test_blobs_are_marked_by_an_upgrade_only_if_they_are_the_databases(settings, store, tmp_path):
    request = rounds_made.request(store.blobs, tmp_path / "made")
    identity.begin(settings, store)
    with store.transaction() as tx:
        tx.execute(insert(accounts), {"id": "a", "role": "r", "ed25519": "k", "token_hash": "t", "created": ""})
        tx.append(request)
        row = {"id": "r", "competition": "c", "name": "n", "owner": "a", "created": timestamp(tx)}
        tx.execute(insert(rounds), {**row, "definition": request["fields"]["definition"]})
    (Path(settings.blobs) / "INSTALLATION").unlink()
    assert "db upgrade" in refused("other_installation", identity.begin, settings, store).hint
    elsewhere = config.load(
        settings.data, environ={}, given={"database": settings.database, "blobs": str(tmp_path / "b")}
    )
    other = Store.open(elsewhere)
    assert "lack 1 of 1" in str(refused("other_installation", installation.adopt, other, elsewhere))
    assert installation.adopt(store, settings) == [f"the blobs at {settings.blobs}: marked as this installation's"]
    assert installation.adopt(store, settings) == []
    identity.begin(settings, store)
    other.close()


def test_postgresql_at_the_first_revision_is_upgraded_in_place(on_postgresql):
    engine = database.connect(on_postgresql.database)
    to_first_revision(engine)
    refused("data_version", Store.open, on_postgresql)
    assert migrations.upgrade(engine) == ["0002: Installation, leases and pools"]
    assert migrations.upgrade(engine) == migrations.problems(engine, metadata) == []
    Store.open(on_postgresql).close()
    engine.dispose()


def test_nothing_is_upgraded_under_a_part_that_runs(old_folder):
    for part in ("api", "dispatcher", "up"):
        with config.lock(old_folder, part):
            code, _, errors = run("db", "upgrade", "--data", old_folder.data)
            assert code == 1 and f"process {os.getpid()} runs the {part}" in errors
    found = database.connect(old_folder.database)
    assert any("0001" in problem for problem in migrations.problems(found, metadata))
    found.dispose()
    assert run("db", "upgrade", "--data", old_folder.data)[0] == 0


def test_nothing_is_upgraded_under_a_leader_on_another_machine(settings, store):
    leading = Lease(store, holder="elsewhere-1")
    assert leading.take()
    # What this version left is no older one: nothing to do, under a leader as well.
    assert migrations.upgrade(store.engine) == []
    with store.transaction() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    refusal = refused("busy", migrations.upgrade, store.engine)
    assert "elsewhere-1" in str(refusal) and "lease ends" in refusal.hint
    with store.snapshot() as tx:
        assert tx.execute(text("SELECT version_num FROM alembic_version")).scalar() == "0001"


def test_a_sqlite_url_with_options_names_its_file(settings, store, tmp_path):
    identity.begin(settings, store)
    if settings.database.startswith("sqlite"):
        url = settings.database + "?timeout=5"
        assert run("db", "check", "--data", settings.data, "--database", url)[0] == 0
        assert run("db", "upgrade", "--data", settings.data, "--database", url)[0] == 0


@pytest.mark.parametrize("found", ["0003", "f00ba2"])
def test_a_newer_database_is_refused(settings, store, found):
    with store.transaction() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = :found"), {"found": found})
    assert found in str(refused("data_version", Store.open, settings))
    assert "newer" in str(refused("data_version", migrations.upgrade, store.engine))
    assert "newer" in migrations.problems(store.engine, metadata)[0]


def test_a_database_of_something_else_is_refused_and_left_alone(settings):
    engine = database.connect(settings.database)
    settings.data.mkdir()
    (settings.data / "VERSION").write_text("1\n")
    with database.writing(engine) as connection:
        connection.execute(text("CREATE TABLE experiments (id INTEGER)"))
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
    assert "experiments" in str(refused("data_version", Store.open, settings))
    refused("data_version", migrations.upgrade, engine)
    assert set(inspect(engine).get_table_names()) == {"experiments", "alembic_version"}
    engine.dispose()


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "a.db").write_bytes(b"not a database, but long enough to be looked at as one" * 20)
    url = f"sqlite:///{tmp_path / 'a.db'}"
    refused("data_version", Store.open, config.load(tmp_path / "d", environ={}, given={"database": url}))


def test_a_database_of_another_encoding_is_refused(postgresql, tmp_path):
    url = postgresql.fresh(options="ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    found = config.load(tmp_path / "d", environ={}, given={"database": url})
    assert "SQL_ASCII" in str(refused("config_invalid", Store.open, found))


BEGIN = """
import json, sys
from pathlib import Path
from acclimate import config
from acclimate.service import identity
from acclimate.store import Store
settings = config.load(Path(sys.argv[1]), environ={}, given=json.loads(sys.argv[2]))
sys.stdin.read(1)
store = Store.open(settings)
print(identity.begin(settings, store).installation.id)
"""


def test_processes_that_find_a_database_empty_make_one_installation(settings, tmp_path):
    shared = {"database": settings.database, "blobs": settings.blobs, "server_keys": str(settings.keys)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN, str(tmp_path / f"data-{number}"), json.dumps(shared)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    answers = [process.communicate("\n", timeout=60) for process in started]
    assert {process.returncode for process in started} == {0}, answers
    assert len({out for out, _ in answers}) == 1
    store = Store.open(settings)
    assert migrations.problems(store.engine, metadata) == []
    assert installation.check(store, settings).id == answers[0][0].strip() == store.blobs.marker()
    store.close()


def test_a_check_tells_what_is_wrong(settings, store):
    identity.begin(settings, store)
    sqlite = store.engine.dialect.name == "sqlite"
    on = "" if sqlite else " ON log_entries"
    with store.transaction() as tx:
        tx.execute(text(f"DROP TRIGGER log_entries_in_order{on}"))
        tx.execute(text("ALTER TABLE pools ADD COLUMN colour TEXT"))
        tx.execute(text("DROP INDEX ix_stages_round"))
        tx.execute(insert(log_entries), {"index": 1, "round": "r", "type": "t", "data": b""})
        tx.execute(insert(log_checkpoints), {"size": 9, "note": "", "at": ""})
        if not sqlite:
            tx.execute(text("ALTER TABLE results DISABLE TRIGGER results_no_truncate"))
            tx.execute(text('ALTER TABLE rounds ALTER COLUMN name TYPE VARCHAR(64) COLLATE "default"'))
    found = "\n".join(migrations.problems(store.engine, metadata))
    wanted = ["log_entries_in_order", "colour", "ix_stages_round", "a gap", "it was cut"]
    wanted += [] if sqlite else ["results_no_truncate", "rounds.name is not compared by code points"]
    assert all(word in found for word in wanted), found
    code, out, _ = run("db", "check", "--json", "--data", settings.data, "--database", settings.database)
    assert code == 1 and len(json.loads(out)["problems"]) == len(found.splitlines())
    steps = migrations.upgrade(store.engine)
    assert steps and all("trigger" in step for step in steps)
    assert "trigger" not in "\n".join(migrations.problems(store.engine, metadata))


def test_a_check_of_nothing_makes_nothing(tmp_path):
    for verb in ("check", "upgrade"):
        code, _, errors = run("db", verb, "--data", tmp_path / "nowhere")
        assert code == 1 and "no database here" in errors
    assert not (tmp_path / "nowhere").exists()


def test_an_empty_database_is_set_up_by_the_upgrade(on_postgresql):
    url = on_postgresql.database
    code, out, _ = run("db", "check", "--data", on_postgresql.data, "--database", url)
    assert code == 1 and "schema none" in out
    code, out, _ = run("db", "upgrade", "--data", on_postgresql.data, "--database", url)
    assert code == 0 and "0001" in out and "installation" in out
    assert run("db", "check", "--data", on_postgresql.data, "--database", url)[0] == 0
    # A process that has one of the keys only, as each in a cluster.
    (on_postgresql.keys / "evaluator.pem").unlink()
    store = Store.open(on_postgresql)
    assert identity.begin(on_postgresql, store).evaluator
    assert "evaluator.pem" in str(refused("other_installation", identity.load, on_postgresql, store, evaluator=True))
    store.close()


# ---- installations -------------------------------------------------------------------------------------------------


def another(tmp_path, name="another"):
    """The settings of another installation."""
    found = config.load(tmp_path / name, environ={})
    store = Store.open(found)
    identity.begin(found, store)
    store.close()
    return found


def test_what_is_not_of_one_installation_is_refused(settings, store, tmp_path):
    refused("other_installation", identity.load, settings, store)
    mine, other = identity.begin(settings, store), another(tmp_path)

    def changed(**given):
        return config.load(settings.data, environ={}, given={"database": settings.database, **given})

    renamed = refused("other_installation", identity.load, changed(origin="x.example.org/log"), store)
    assert mine.origin in str(renamed) and "x.example.org/log" in str(renamed)
    # Its blobs.
    mixed = changed(blobs=other.blobs)
    opened = Store.open(mixed)
    for refusing in (identity.begin, identity.load):
        refusal = refused("other_installation", refusing, mixed, opened)
        assert mine.installation.id in str(refusal) and "database" in refusal.hint
    opened.close()
    # Its keys.
    for call, name in (({}, "log.pem"), ({"evaluator": True}, "evaluator.pem")):
        refusing = identity.load if call else identity.begin
        assert name in str(refused("other_installation", refusing, changed(server_keys=str(other.keys)), store, **call))
    # No keys: none are made.
    refused("other_installation", identity.begin, changed(server_keys=str(tmp_path / "none")), store)
    assert not (tmp_path / "none").exists()
    (settings.keys / "log.pem").rename(tmp_path / "log.pem")
    assert "backup" in refused("other_installation", identity.begin, settings, store).hint
    assert not (settings.keys / "log.pem").exists()
    (tmp_path / "log.pem").rename(settings.keys / "log.pem")
    assert identity.begin(settings, store).installation == identity.load(settings, store).installation


def test_an_empty_database_takes_nobody_elses_blobs_or_keys(settings, store, tmp_path):
    other = another(tmp_path)
    given = {"database": settings.database}
    for mixed in ({"blobs": other.blobs}, {"server_keys": str(other.keys)}):
        found = config.load(settings.data, environ={}, given={**given, **mixed})
        opened = Store.open(found)
        assert "empty" in str(refused("other_installation", identity.begin, found, opened))
        opened.close()
    with store.snapshot() as tx:
        assert tx.execute(select(installation_rows)).first() is None
    identity.begin(settings, store)


def test_a_start_that_was_killed_is_finished_by_the_next(settings, store):
    # After a key, and after the row.
    settings.keys.mkdir(parents=True)
    (settings.keys / "BEGUN").write_text("")
    keys.create_signing_key(settings.keys / "log.pem")
    key = (settings.keys / "log.pem").read_bytes()
    mine = identity.begin(settings, store)
    assert (settings.keys / "log.pem").read_bytes() == key and not (settings.keys / "BEGUN").exists()
    (Path(settings.blobs) / "INSTALLATION").unlink()
    assert identity.begin(settings, store).installation == mine.installation
    assert store.blobs.marker() == mine.installation.id


def test_keys_of_nobody_knows_whom_begin_no_second_log_unless_told(settings, store, tmp_path):
    mine = identity.begin(settings, store)
    (settings.keys / "INSTALLATION").unlink()  # as where keys are mounted read-only
    lost = config.load(tmp_path / "lost", environ={}, given={"server_keys": str(settings.keys)})
    opened = Store.open(lost)
    for refusing in (identity.begin, lambda settings, store: installation.adopt(store, settings)):
        refusal = refused("other_installation", refusing, lost, opened)
        assert "log.pem" in str(refusal) and "--begin" in refusal.hint and "backup" in refusal.hint
    with opened.snapshot() as tx:
        assert tx.execute(select(installation_rows)).first() is None
    assert opened.blobs.marker() is None
    opened.close()
    # Told so, it does, with the keys that are there; and without being told, it goes on.
    given = ("db", "upgrade", "--json", "--data", lost.data, "--config", tmp_path / "one.toml")
    (tmp_path / "one.toml").write_text(f"server_keys = {json.dumps(str(settings.keys))}\n")
    assert run(*given)[0] == 1
    assert run(*given, "--begin")[0] == 0 and json.loads(run(*given)[1])["steps"] == []
    opened = Store.open(lost)
    assert identity.begin(lost, opened).vkey == mine.vkey
    opened.close()


def test_keys_made_beforehand_begin_a_new_data_folder(tmp_path):
    made = config.load(tmp_path / "new", environ={})
    made.keys.mkdir(parents=True)
    key = keys.create_signing_key(made.keys / "log.pem")
    code, out, _ = run("db", "upgrade", "--begin", "--data", made.data)
    assert code == 0 and "installation's row" in out
    opened = Store.open(made)
    assert identity.begin(made, opened).vkey == log.Signer(made.origin, key).vkey
    opened.close()


def test_no_key_folder_is_marked_before_its_keys_were_compared(settings, store, tmp_path):
    mine, other = identity.begin(settings, store), another(tmp_path)
    (other.keys / "INSTALLATION").unlink()
    (Path(settings.blobs) / "INSTALLATION").unlink()
    mixed = config.load(
        settings.data, environ={}, given={"database": settings.database, "server_keys": str(other.keys)}
    )
    for refusing in (identity.begin, lambda settings, store: installation.adopt(store, settings)):
        assert mine.vkey in str(refused("other_installation", refusing, mixed, store))
        assert not (other.keys / "INSTALLATION").exists() and store.blobs.marker() is None


def test_an_older_database_is_upgraded_with_the_evaluator_that_its_rounds_name(settings, store, tmp_path):
    known = identity.begin(settings, store)
    request = rounds_made.request(store.blobs, tmp_path / "made")
    fields = {**request["fields"], "log": known.vkey, "evaluators": [known.evaluator]}
    with store.transaction() as tx:
        tx.append(records.sign("RoundDefined", "", fields, key=rounds_made.key("organizer")))
    Sequencer(store, known.signer).advance()
    with store.transaction() as tx:
        tx.execute(delete(installation_rows))
    for marker in (Path(settings.blobs), settings.keys):
        (marker / "INSTALLATION").unlink()
    (settings.keys / "evaluator.pem").rename(tmp_path / "evaluator.pem")
    keys.create_signing_key(settings.keys / "evaluator.pem")
    assert known.evaluator in str(refused("other_installation", installation.adopt, store, settings))
    (tmp_path / "evaluator.pem").replace(settings.keys / "evaluator.pem")
    installation.adopt(store, settings)
    assert identity.load(settings, store, evaluator=True).evaluator == known.evaluator


def test_entries_without_an_installation_are_never_adopted_by_a_start(settings, store):
    with store.transaction() as tx:
        tx.execute(insert(log_entries), {"index": 0, "round": "r", "type": "t", "data": b"{}"})
    assert "upgrade" in refused("other_installation", identity.begin, settings, store).hint


# ---- values and clock ----------------------------------------------------------------------------------------------


def test_what_only_one_engine_would_store_is_refused_by_both(store):
    row = {"id": "a", "role": "r", "ed25519": "k", "token_hash": "t", "created": ""}
    refused("request_invalid", _insert, store, accounts, {**row, "id": "a\0b"})
    refused("request_invalid", _insert, store, accounts, [row, {**row, "id": "b", "ed25519": "\0"}])
    for value in (float("nan"), float("inf")):
        refused("request_invalid", _insert, store, outbox, {"round": "r", "stage": "s", "payload": {"x": [value]}})
    _insert(
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


def _insert(store, table, row):
    with store.transaction() as tx:
        tx.execute(insert(table), row)


def test_a_text_that_is_too_long_for_its_column_is_refused(on_postgresql):
    store = Store.open(on_postgresql)
    refused("request_invalid", _insert, store, invitations, {"code_hash": "x" * 72, "role": "r"})
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


# ---- out of reach --------------------------------------------------------------------------------------------------


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


def test_a_server_that_is_stopped_is_503_and_that_comes_back_needs_no_restart(postgresql, postgresql_url, tmp_path):
    with live.serve(tmp_path, database=postgresql_url) as served:
        organizer = served.organizer()
        http = served.anyone()
        assert http.get("/v1/rounds").status_code == 200
        over, seen = threading.Event(), Counter()

        def ask():
            with httpx.Client(base_url=served.url, trust_env=False, timeout=30) as client:
                while not over.is_set():
                    answer = client.get("/v1/rounds")
                    seen[answer.status_code, answer.json()["code"] if answer.status_code >= 400 else None] += 1

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        postgresql.stop("immediate")
        try:
            answer = http.get("/v1/rounds")
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (503, "database_unreachable"), problem
            assert int(answer.headers["Retry-After"]) >= 1 and postgresql.password not in answer.text
            stranger = served.stranger("late")
            assert stranger.post("/v1/accounts", stranger.registration()).json()["code"] == "database_unreachable"
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
        assert "another process" in str(refused("busy", _insert, second, invitations, {"code_hash": "x", "role": "r"}))
        with second.snapshot() as reader:
            assert reader.size() == 0
    _insert(second, invitations, {"code_hash": "x", "role": "r"})
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
    assert (
        "may not" in refused("database_unreachable", _insert, store, invitations, {"code_hash": "x", "role": "r"}).hint
    )
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


def test_a_statement_that_takes_too_long_and_a_writer_that_stands_still_are_ended(
    on_postgresql, postgresql_url, tmp_path
):
    url = postgresql_url + "?options=-c%20statement_timeout%3D50ms"
    store = Store.open(on_postgresql)
    hurried = Store.open(config.load(tmp_path / "hurried", environ={}, given={"database": url}))
    with pytest.raises(Refusal) as caught, hurried.snapshot() as tx:
        tx.execute(text("SELECT pg_sleep(5)"))
    assert caught.value.code == "busy"
    # A process that was stopped while it wrote gives the writers' lock up; its own write is refused, whole.
    with pytest.raises(Refusal) as caught, store.transaction() as tx:
        tx.execute(insert(invitations), {"code_hash": "x", "role": "r"})
        tx.execute(text("SET LOCAL idle_in_transaction_session_timeout = '50ms'"))
        time.sleep(0.5)
        tx.now()
    assert caught.value.code in ("busy", "database_unreachable")
    with store.snapshot() as tx:
        assert tx.execute(select(invitations)).first() is None
    hurried.close()
    store.close()


# ---- several processes ---------------------------------------------------------------------------------------------

APPEND = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import rounds_made
from acclimate import config, log
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate.store import Store
from acclimate_competitions import records
given = json.loads(sys.argv[3])
settings = config.load(Path(sys.argv[2]), environ={}, given=given["settings"])
store = Store.open(settings)
known = identity.begin(settings, store)
sequencer = Sequencer(store, known.signer)
sequencer.start()
key, receipts = rounds_made.key("organizer"), []
print("ready", flush=True)
sys.stdin.readline()
for number in range(given["count"]):
    fields = {**given["fields"], "name": f"{given['name']}{number}"}
    with store.transaction() as tx:
        index, record = tx.append(records.sign("RoundDefined", "", fields, key=key))
    if number % 20 == 0:
        found, signed = log.Receipt.parse(sequencer.receipt(index)).open(known.signer.verifier)
        assert found == record and signed.checkpoint.size > index
sequencer.close()
store.close()
"""


def test_two_processes_append_and_sign_one_log(settings, store, tmp_path):
    request = rounds_made.request(store.blobs, tmp_path / "made")
    known = identity.begin(settings, store)
    shared = {"database": settings.database, "blobs": settings.blobs, "server_keys": str(settings.keys)}
    count = 200
    given = {"settings": shared, "fields": request["fields"], "count": count}
    started = []
    for name in ("a", "b"):
        arguments = [str(HERE), str(tmp_path / f"data-{name}"), json.dumps({**given, "name": name})]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, "-c", APPEND, *arguments], text=True, **pipes))
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=120) for process in started]
    assert {process.returncode for process in started} == {0}, answers
    with store.snapshot() as tx:
        entries = tx.entries(0, 10**6)
        assert tx.execute(select(log_entries.c.index).order_by(log_entries.c.index)).scalars().all() == list(
            range(2 * count)
        )
        notes = tx.execute(select(log_checkpoints.c.note)).scalars().all()
    parsed = [records.parse(entry) for entry in entries]
    assert {record["name"] for record in parsed} == {f"{name}{n}" for name in "ab" for n in range(count)}
    assert [record.at for record in parsed] == sorted(record.at for record in parsed)
    # They took turns, and every checkpoint is one of the one tree.
    turns = "".join(record["name"][0] for record in parsed)
    # SQLite's lock is not fair: on a busy machine one may be done before the other's turn comes.
    assert store.engine.dialect.name == "sqlite" or ("ab" in turns and "ba" in turns)
    tree = log.Tree(log.leaf_hash(entry) for entry in entries)
    for note in notes:
        signed = log.open_checkpoint(note, known.signer.verifier).checkpoint
        assert tree.root(signed.size) == signed.root
    sequencer = Sequencer(store, known.signer)
    sequencer.start()
    assert log.open_checkpoint(sequencer.checkpoint(), known.signer.verifier).checkpoint.root == tree.root()
    sequencer.close()


@pytest.fixture
def two(settings, store, tmp_path):
    """Two stores of two engines over one database, each with its sequencer."""
    given = {"database": settings.database, "blobs": settings.blobs, "server_keys": str(settings.keys)}
    beside = Store.open(config.load(tmp_path / "beside", environ={}, given=given))
    signer = identity.begin(settings, store).signer
    yield store, beside, signer
    beside.close()


def test_either_sequencer_gives_receipts_and_both_show_one_log(two, tmp_path):
    store, beside, signer = two
    request = rounds_made.request(store.blobs, tmp_path / "made")
    first, second = Sequencer(store, signer), Sequencer(beside, signer)
    first.start()
    second.start()
    for number in range(10):
        fields = {**request["fields"], "name": f"r{number}"}
        with (store, beside)[number % 2].transaction() as tx:
            index, record = tx.append(records.sign("RoundDefined", "", fields, key=rounds_made.key("organizer")))
        texts = [sequencer.receipt(index) for sequencer in (second, first)]
        for found in texts:
            assert log.Receipt.parse(found).open(signer.verifier)[0] == record
        assert first.checkpoint() == second.checkpoint()
        assert first.consistency(1, index + 1) == second.consistency(1, index + 1)
        for reader in (store, beside):
            with reader.snapshot() as tx:
                assert tx.round(record.round).phase == "draft" and tx.last(record.round) == index
    first.close()
    second.close()
    with store.snapshot() as tx:
        sizes = tx.execute(select(log_checkpoints.c.size)).scalars().all()
    assert len(sizes) == len(set(sizes)) and max(sizes) == 10


def test_a_sequencer_signs_nothing_beside_another_log(two):
    store, beside, signer = two
    _insert(store, log_entries, {"index": 0, "round": "r", "type": "t", "data": b"{}"})
    mine = Sequencer(store, signer)
    assert mine.advance() == 1
    # Somebody signs another tree with the same key: a split view.
    note = log.sign_checkpoint(signer, 2, b"\x07" * 32)
    _insert(beside, log_entries, {"index": 1, "round": "r", "type": "t", "data": b"{}"})
    _insert(beside, log_checkpoints, {"size": 2, "note": note, "at": ""})
    refused("log_inconsistent", mine.advance)
    refused("log_inconsistent", Sequencer(beside, signer).advance)
    _insert(store, log_entries, {"index": 2, "round": "r", "type": "t", "data": b"{}"})
    refused("log_inconsistent", mine.advance)
    with store.snapshot() as tx:
        assert sorted(tx.execute(select(log_checkpoints.c.size)).scalars()) == [1, 2]


def test_a_database_put_back_to_an_earlier_state_is_noticed_by_a_running_sequencer(two):
    store, beside, signer = two
    mine = Sequencer(store, signer)
    for index in range(3):
        _insert(store, log_entries, {"index": index, "round": "r", "type": "t", "data": b"{}"})
        assert mine.advance() == index + 1
    table = " ON log_entries" if store.engine.dialect.name == "postgresql" else ""
    with beside.transaction() as tx:
        tx.execute(text(f"DROP TRIGGER log_entries_no_delete{table}"))
        tx.execute(delete(log_entries).where(log_entries.c.index > 0))
        tx.execute(delete(log_checkpoints).where(log_checkpoints.c.size > 1))
        for index in (1, 2, 3):
            tx.execute(insert(log_entries), {"index": index, "round": "r", "type": "other", "data": b"[]"})
    assert "restored" in refused("log_inconsistent", mine.advance).hint
    with store.snapshot() as tx:
        assert tx.execute(select(log_checkpoints.c.size)).scalars().all() == [1]


def test_a_snapshot_does_not_see_what_this_process_folded_later(two, tmp_path):
    store, _, _ = two
    request = rounds_made.request(store.blobs, tmp_path / "made")
    with store.transaction() as tx:
        _, record = tx.append(request)
    with store.snapshot() as early:
        assert early.size() == 1
        with store.transaction() as tx:
            voided = records.sign("RoundVoided", record.round, {"reason": "x"}, key=rounds_made.key("organizer"))
            tx.append(voided)
        assert early.round(record.round).phase == "draft" and early.last(record.round) == 0
    with store.snapshot() as late:
        assert late.round(record.round).phase == "voided"
    assert store.recall(record.round).phase == "voided"


@pytest.fixture
def two_apis(settings, tmp_path):
    """Two API processes' applications beside each other, each with its data folder, over one installation."""
    shared = {"database": settings.database, "blobs": settings.blobs, "server_keys": str(settings.keys)}
    clock = live.Clock()
    with (
        live.serve(tmp_path / "one", clock=clock, **shared) as one,
        live.serve(tmp_path / "two", clock=clock, **shared) as two,
    ):
        yield one, two


def test_two_apis_serve_one_round_and_keep_one_quota(two_apis, tmp_path):
    one, two = two_apis
    staged = live.open_round(one, tmp_path)
    ada = live.enter(staged, one.actor("ada"))
    # What the one wrote the other serves at once, receipt and all.
    size = int(one.anyone().get("/v1/log/checkpoint").text.splitlines()[1])
    there = two.anyone()
    assert there.get(staged.path).json()["phase"] == "open"
    signer = identity.load(two.settings, two.store).signer
    record, _ = log.Receipt.parse(there.get(f"/v1/log/proof/{size - 1}").text).open(signer.verifier)
    assert record.type == "EntrantRegistered"
    assert there.get("/v1/log/checkpoint").text == one.anyone().get("/v1/log/checkpoint").text
    # 64 at once with one left, half of them at either.
    for seed in range(1, 5):
        live.commit(staged, ada, seed=seed)
    document = live.manifest(staged, "ada", live.model(staged, seed=9))
    bodies = [live.submission(staged, ada, document, nonce=bytes([number]) * 32) for number in range(100, 164)]
    found, start = Counter(), threading.Barrier(64)

    def post(number):
        url = (one, two)[number % 2].url
        headers = {"Authorization": f"Bearer {ada.token}"}
        with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60) as client:
            start.wait()
            answer = client.post(f"{staged.path}/submissions", json=bodies[number])
            found[answer.status_code, answer.json().get("code")] += 1

    threads = [threading.Thread(target=post, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(201, None): 1, (429, "quota_exceeded"): 63}
