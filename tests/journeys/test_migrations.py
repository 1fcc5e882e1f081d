"""The schema of a database, SQLite or PostgreSQL: how it is made, compared, brought up, and what is refused."""

import json
import os
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import engines
import pytest
import rounds_made
from alembic import command
from databases import acclimate, on_postgresql, refused, run, settings, store
from sqlalchemy import create_engine, insert, inspect, select, text
from waiting import WITHIN

from acclimate import config, database, granting, installation, keys, log, migrations
from acclimate.lease import Lease
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate.store import (
    Store,
    accounts,
    log_checkpoints,
    log_entries,
    metadata,
    rounds,
    stages,
    submissions,
    timestamp,
    wishes,
)
from acclimate_competitions import digests, records

__all__ = ["on_postgresql", "settings", "store"]

HERE = Path(__file__).parent


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
    at = datetime(2026, 5, 1, tzinfo=UTC)
    entry = records.Record("RoundOpened", "r", at, {"seal": digests.of_bytes(b"seal")}).encode()
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
    answers = [process.communicate(timeout=WITHIN) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    first, second = (json.loads(out) for out, _ in answers)
    assert first["installation"] == second["installation"] and first["schema"] == migrations.HEAD
    steps = first["steps"] + second["steps"]
    assert sum(step.startswith("0002") for step in steps) == sum("row" in step for step in steps) == 1
    assert not any(step.startswith(("0001", "trigger")) for step in steps)
    code, out, _ = run("db", "upgrade", "--data", old_folder.data)
    assert code == 0 and "nothing to do" in out
    assert run("db", "check", "--data", old_folder.data)[:2] == (0, f"schema {migrations.HEAD}: nothing is wrong\n")
    # It goes on with its keys and its log.
    store = Store.open(old_folder)
    known = identity.begin(old_folder, store)
    sequencer = Sequencer(store, known.signer)
    sequencer.start()
    assert log.open_checkpoint(sequencer.checkpoint(), known.signer.verifier).checkpoint.size == 1
    sequencer.close()
    store.close()


def test_no_round_is_left_behind_by_an_upgrade(tmp_path):
    """A round is finished by the code that it was defined with, which does not read a newer schema."""
    engine = database.connect(f"sqlite:///{tmp_path / 'old.db'}")
    to_first_revision(engine)
    made = rounds_made.make(tmp_path / "made")
    with engine.begin() as connection:
        for index, data in enumerate(made.entries):
            record = records.parse(data)
            if record.type == "RankingPublished":
                break
            row = {"index": index, "round": record.round, "type": record.type, "data": data}
            connection.execute(insert(log_entries), row)
    own = next(record["code"] for record in map(records.parse, made.entries) if record.type == "RoundDefined")
    assert migrations.unfinished(engine, own) == []
    # Another round of the same log is a draft.
    other, *more = migrations.unfinished(engine, "sha256:" + "0" * 64)
    assert more == [made.round] and "elsewhere" in other
    with engine.begin() as connection:
        for later, data in enumerate(made.entries[index:], start=index):
            record = records.parse(data)
            row = {"index": later, "round": record.round, "type": record.type, "data": data}
            connection.execute(insert(log_entries), row)
    assert migrations.unfinished(engine, "sha256:" + "0" * 64) == [other]
    engine.dispose()


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
    assert migrations.upgrade(engine) == [
        "0002: Installation, leases and pools",
        "0003: Cosignatures of witnesses",
        "0004: Challenges of registrations",
        "0005: Attempts, their fences and their history",
        "0006: Stages are found by their attempt",
        "0007: An organizer gives up blocked work, with a reason",
    ]
    assert migrations.upgrade(engine) == migrations.problems(engine, metadata) == []
    Store.open(on_postgresql).close()
    engine.dispose()


def test_what_an_organizer_asked_for_before_an_upgrade_is_done_after_it(settings):
    """Wishes of revision 0006, which had no reasons."""
    engine = database.connect(settings.database)
    with database.writing(engine) as connection:
        command.upgrade(migrations._settings(connection), "0006")
        at = {"created": "2027-01-01T00:00:00.000000Z"}
        connection.execute(insert(accounts), {"id": "a", "role": "r", "ed25519": "k", "token_hash": "t", **at})
        row = {"id": "r", "competition": "c", "name": "n", "owner": "a", "definition": "d", **at}
        connection.execute(insert(rounds), row)
        row = {
            "id": "s",
            "round": "r",
            "entrant": "a",
            "owner": "a",
            "commitment": "c",
            "nonce": "",
            "manifest": {},
            **at,
        }
        connection.execute(insert(submissions), {**row, "acceptance": {}, "state": "checking", "committed_index": 1})
        for key in ("one", "other", "done"):
            row = {"key": key, "round": "r", "kind": "check", "submission": "s", "state": "blocked", "attempt": key}
            connection.execute(insert(stages), row)
            wish = {"round": "r", "stage": key, "wish": "retry", "account": "a", "at": at["created"]}
            connection.execute(insert(wishes), {**wish, "done": at["created"] if key == "done" else None})
    before = described(engine)["wishes"][0]
    assert "reason" not in before
    assert migrations.upgrade(engine) == ["0007: An organizer gives up blocked work, with a reason"]
    assert described(engine)["wishes"][0].keys() - before.keys() == {"reason"}
    assert migrations.problems(engine, metadata) == []
    engine.dispose()
    store = Store.open(settings)
    with store.snapshot() as tx:
        kept = tx.execute(select(wishes.c.stage, wishes.c.reason, wishes.c.done.is_(None)).order_by(wishes.c.id)).all()
    assert [tuple(row) for row in kept] == [("one", None, True), ("other", None, True), ("done", None, False)]
    assert [wish.stage for wish in granting.grant(store, epoch=1)] == ["one", "other"]
    with store.snapshot() as tx:
        states = {row.key: row.state for row in tx.execute(select(stages.c.key, stages.c.state))}
        # They are tried again; none of them is given up.
        assert granting.given_up(tx) == {}
    assert states == {"one": "pending", "other": "pending", "done": "blocked"}
    store.close()


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


def test_a_newer_database_is_refused(settings, store):
    with store.transaction() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert "9999" in str(refused("data_version", Store.open, settings))
    assert "newer" in str(refused("data_version", migrations.upgrade, store.engine))
    assert "newer" in migrations.problems(store.engine, metadata)[0]


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM alembic_version", "says nothing of its schema"),
        ("UPDATE alembic_version SET version_num = ''", "says '' of its schema"),
        ("UPDATE alembic_version SET version_num = 'f00ba2'", "says 'f00ba2' of its schema"),
        ("INSERT INTO alembic_version VALUES ('0003')", f"says '0003', '{migrations.HEAD}' of its schema"),
        ("INSERT INTO alembic_version VALUES ('9999')", f"says '{migrations.HEAD}', '9999' of its schema"),
    ],
)
def test_a_database_that_names_no_one_schema_is_refused_as_what_it_is(settings, store, statement, said):
    known = identity.begin(settings, store).installation.id
    with store.transaction() as tx:
        tx.execute(text(statement))
    for call, given in ((Store.open, settings), (migrations.upgrade, store.engine)):
        found = str(refused("data_version", call, given))
        assert said in found and "newer" not in found
    assert said in migrations.problems(store.engine, metadata)[0]
    with store.transaction() as tx:
        refused("data_version", installation.stands, tx, known)


def test_a_database_of_two_installations_is_refused(settings, store):
    known = identity.begin(settings, store).installation.id
    with store.transaction() as tx:
        tx.execute(text("INSERT INTO installation SELECT 'other', log, evaluator, created FROM installation"))
    refused("other_installation", installation.check, store, settings)
    with store.transaction() as tx:
        refused("other_installation", installation.stands, tx, known)


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


def test_a_guard_that_was_altered_is_told_and_put_back(settings, store):
    identity.begin(settings, store)
    with store.transaction() as tx:
        if store.engine.dialect.name == "sqlite":
            tx.execute(text("DROP TRIGGER log_entries_no_update"))
            tx.execute(text("CREATE TRIGGER log_entries_no_update BEFORE UPDATE ON log_entries BEGIN SELECT 1; END"))
            wanted = {"trigger log_entries_no_update"}
        else:
            tx.execute(
                text(
                    "CREATE OR REPLACE FUNCTION acclimate_insert_only() RETURNS trigger LANGUAGE plpgsql AS "
                    "'BEGIN RETURN COALESCE(NEW, OLD); END'"
                )
            )
            tx.execute(text("DROP TRIGGER results_no_update ON results"))
            tx.execute(
                text(
                    "CREATE TRIGGER results_no_update BEFORE UPDATE ON accounts "
                    "FOR EACH ROW EXECUTE FUNCTION acclimate_insert_only()"
                )
            )
            wanted = {"function acclimate_insert_only", "trigger results_no_update"}
    found = migrations.problems(store.engine, metadata)
    assert {problem.partition(" is ")[0] for problem in found} == wanted
    assert {step.partition(" was ")[0] for step in migrations.upgrade(store.engine)} == wanted
    assert migrations.problems(store.engine, metadata) == []


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
