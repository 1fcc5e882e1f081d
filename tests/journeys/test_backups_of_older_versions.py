"""A backup of each schema that there ever was, restored by this version: it is brought up to date, on both engines, or refused with what to do."""

import json
import shutil

import kept
import pytest
from backed_up import back_up, contents, refused, restore, target
from sqlalchemy import MetaData, insert, select

from acclimate import backups, database, migrations
from acclimate.store import Store, leases, metadata
from acclimate_competitions import digests

OLDER = migrations.REVISIONS[1:-1]
"""The first one had no installations, and no version made backups of it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    found = kept.installation(folder)
    with found.store.transaction() as tx:
        # A dispatcher leads while the backup is made, as ever.
        tx.execute(
            insert(leases), {"name": "dispatch", "holder": "h", "epoch": 7, "expires": "2999-01-01T00:00:00.000000Z"}
        )
    back_up(found, folder / "backup", keys=True)
    found.store.close()
    return found, folder / "backup"


@pytest.fixture
def copied(tmp_path):
    return lambda made: shutil.copytree(made, tmp_path / "backup")


def schema_of(revision, folder):
    """Table -> its columns, as that version had them."""
    engine = database.connect(f"sqlite:///{folder / f'{revision}.db'}")
    migrations.fill(engine, revision, lambda tx: None)
    found = MetaData()
    found.reflect(engine)
    engine.dispose()
    return {table.name: set(table.columns.keys()) for table in found.sorted_tables if table.name != "alembic_version"}


def as_of(revision, backup, folder):
    """The same backup as that version would have made it: without the tables and columns that came since."""
    schema = schema_of(revision, folder)
    manifest = backups.read(backup)
    manifest.pop("digest")
    tables = {name: told for name, told in manifest["tables"].items() if name in schema}
    assert set(tables) == set(schema)
    for name, told in tables.items():
        path = backup / told["file"]
        head, *rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        chosen = [number for number, column in enumerate(head["columns"]) if column in schema[name]]
        head["columns"] = [head["columns"][number] for number in chosen]
        lines = [head, *([row[number] for number in chosen] for row in rows)]
        path.write_bytes(b"".join(backups.table_files._line(line) for line in lines))
        tables[name] = {**told, "digest": digests.of_file(path)}
    changed = {**manifest, "schema": revision, "tables": tables}
    (backup / "BACKUP.json").write_text(json.dumps({**changed, "digest": digests.of_json(changed)}))


@pytest.mark.parametrize("revision", OLDER)
def test_a_backup_of_each_older_schema_is_brought_up_to_date(revision, whole, tmp_path, copied, postgresql_url):
    found, made = whole
    backup = copied(made)
    as_of(revision, backup, tmp_path)
    for number, given in enumerate(({}, {"database": postgresql_url})):
        settings = target(found, tmp_path / f"new-{number}", **given)
        done = restore(backup, settings)
        assert [step[:4] for step in done["upgraded"]] == [one for one in migrations.REVISIONS if one > revision]
        store = Store.open(settings)
        assert migrations.problems(store.engine, metadata) == []
        with store.snapshot() as tx:
            lease = tx.execute(select(leases)).one()
            assert lease.epoch == 7 and lease.expires == done["made"]
        store.close()
        tables = contents(settings)[0]
        for name, told in backups.read(backup)["tables"].items():
            assert tables[name].rows == (0 if name == "outbox" else told["rows"])
        refused("backup_invalid", restore, backup, settings)


def test_a_backup_of_the_schema_before_installations_is_refused_before_anything_is_made(whole, tmp_path, copied):
    found, made = whole
    backup, settings = copied(made), target(found, tmp_path / "new")
    as_of("0001", backup, tmp_path)
    assert "0001" in refused("backup_invalid", restore, backup, settings)
    assert not settings.data.exists()
