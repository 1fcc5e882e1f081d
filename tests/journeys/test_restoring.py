"""`acclimate restore`: the same installation on either engine, from folder and bucket, verified, and over nothing."""

import json
import os
import shutil
from concurrent.futures import wait
from pathlib import Path

import kept
import pytest
from backed_up import AT, back_up, contents, more, refused, restore, target
from sqlalchemy import insert, select, text
from waiting import WITHIN

from acclimate import backups, config, migrations
from acclimate.finishing import Finisher
from acclimate.service import identity
from acclimate.store import Store, events, metadata, outbox, stages
from acclimate_competitions import digests
from acclimate_runners.blobs import FolderBlobs


@pytest.fixture
def whole(tmp_path, database_url):
    found = kept.installation(tmp_path, database=database_url)
    yield found
    found.store.close()


def test_a_restored_installation_is_the_same_on_either_engine(whole, tmp_path, postgresql_url):
    more(whole)
    made = back_up(whole, tmp_path / "backup", keys=True)
    assert made["lost"] == [] and made["copied"] == made["blobs"]["count"] > 10
    before = contents(whole.settings)
    assert {name: row["rows"] for name, row in made["tables"].items()} == {n: t.rows for n, t in before[0].items()}
    other = {"sqlite": postgresql_url, "postgresql": f"sqlite:///{tmp_path / 'new' / 'acclimate.db'}"}
    settings = target(whole, tmp_path / "new", database=other[made["engine"]])
    done = restore(tmp_path / "backup", settings)
    assert done["restored"] == made["copied"] and done["upgraded"] == []
    assert (done["gap"].entries, done["gap"].lost, done["gap"].adopted) == (0, [], [])
    after = contents(settings)
    # What MLflow was told is told to it again.
    assert after[0].pop("outbox").rows == 0 and before[0].pop("outbox").rows == 1
    assert after == before
    store = Store.open(settings)
    again = back_up(kept.Kept(settings, store, whole.made), tmp_path / "again")
    first, second = ({n: t["digest"] for n, t in each["tables"].items() if n != "outbox"} for each in (made, again))
    assert first == second
    # It goes on: keys, log, counted keys, insert-only tables, and the schema is as this version leaves it.
    assert identity.begin(settings, store).signer.vkey == whole.made.signer.vkey
    assert migrations.problems(store.engine, metadata) == []
    with store.transaction() as tx:
        tx.execute(insert(outbox), {"round": "r", "payload": {}})
        row = {"at": AT, "round": "r", "kind": "p", "submission": "s", "attempt": "a", "fence": 1, "epoch": 1}
        tx.execute(insert(events), {**row, "event": "ended"})
        assert tx.execute(select(events.c.id).order_by(events.c.id.desc())).scalars().first() == 3
    with pytest.raises(Exception, match="insert-only"), store.transaction() as tx:
        tx.execute(text("DELETE FROM events"))
    store.close()


def test_mlflow_is_told_again_after_a_restore(tmp_path):
    whole = kept.installation(tmp_path)

    def told(settings):
        """The rounds that a dispatcher finishes on this database."""
        store, found = Store.open(settings), []
        finisher = Finisher(store, lambda name, _: found.append(name), still_leading=lambda: None)
        try:
            for _ in range(5):
                finisher.step()
                wait(finisher._under_way.values(), timeout=WITHIN)
        finally:
            finisher.close(patience=60.0)
            store.close()
        return found

    assert told(whole.settings) == [whole.made.round] and told(whole.settings) == []
    back_up(whole, tmp_path / "backup")
    settings = target(whole, tmp_path / "new")
    restore(tmp_path / "backup", settings)
    assert told(settings) == [whole.made.round] and told(settings) == []
    whole.store.close()


@pytest.mark.parametrize("begin", ["folder", "s3"])
def test_blobs_come_from_a_bucket_and_go_into_one(tmp_path, s3_place, begin):
    places = {"folder": {}, "s3": s3_place.settings}
    whole = kept.installation(tmp_path, **places[begin])
    whole.store.blobs.put_bytes(os.urandom(12_000_000))
    whole.store.blobs.put_note("attempts/0a/1/manifest.json", b"{}")
    before = contents(whole.settings)[1]
    back_up(whole, tmp_path / "backup")
    settings = target(whole, tmp_path / "new", **places["s3" if begin == "folder" else "folder"])
    restore(tmp_path / "backup", settings)
    assert contents(settings)[1] == before
    store = Store.open(settings)
    assert store.blobs.marker() == kept.ID and store.blobs.note("attempts/0a/1/manifest.json") == b"{}"
    store.close()
    whole.store.close()


def test_what_is_damaged_is_named_and_nothing_is_restored(whole, tmp_path):
    backup = tmp_path / "backup"
    made = back_up(whole, backup, keys=True)
    digest = max(dict(backups.listed(backup, backups.read(backup))))
    blob = f"blobs/{digest[7:9]}/{digest[9:]}"
    cases = {
        made["tables"]["submissions"]["file"]: "table submissions",
        made["tables"]["log_entries"]["file"]: "table log_entries",
        made["blobs"]["file"]: "list of blobs",
        "keys/log.pem": "key log.pem",
        blob: "damaged",
        "BACKUP.json": "changed since",
    }
    for number, (name, words) in enumerate(cases.items()):
        for how in ("flipped", "torn", "gone"):
            path = backup / name
            data = path.read_bytes()
            path.chmod(0o600)
            at = len(data) // 2
            if how == "flipped":
                path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            elif how == "torn":
                path.write_bytes(data[:at])
            else:
                path.unlink()
            settings = target(whole, tmp_path / f"new-{number}-{how}")
            told = refused("backup_invalid", restore, backup, settings)
            assert name.rpartition("/")[2] in told and (how != "flipped" or words in told), told
            file = settings.data / "acclimate.db"
            assert not file.exists() or file.stat().st_size == 0
            path.write_bytes(data)
    restore(backup, target(whole, tmp_path / "new"))
    # A whole file that was put in another's place, with its digest: the database itself is compared.
    manifest = backups.read(backup)
    row = manifest["tables"]["log_entries"]
    lines = (backup / row["file"]).read_bytes().splitlines(keepends=True)
    (backup / row["file"]).write_bytes(b"".join(lines[:-1]))
    row["digest"] = digests.of_file(backup / row["file"])
    del manifest["digest"]
    (backup / "BACKUP.json").write_text(json.dumps({**manifest, "digest": digests.of_json(manifest)}))
    assert "root" in refused("backup_invalid", restore, backup, target(whole, tmp_path / "other"))


def test_a_backup_that_was_forged_writes_nowhere_else(tmp_path):
    whole = kept.installation(tmp_path)
    backup = tmp_path / "backup"
    back_up(whole, backup, keys=True)
    whole.store.close()
    good = backups.read(backup)
    del good["digest"]
    (tmp_path / "evil").write_bytes(b"evil")
    evil = digests.of_bytes(b"evil")
    forged = [
        {"keys": {"../../evil": evil}},
        {"keys": {str(tmp_path / "evil"): evil}},
        {"keys": {"a/../../../evil": evil}},
        {"keys": [1]},
        {"blobs": {**good["blobs"], "file": "../evil"}},
        {"tables": {**good["tables"], "rounds": {**good["tables"]["rounds"], "file": "/etc/passwd"}}},
        {"tables": {"rounds": {}}},
        {"tables": []},
        {"log": None},
        {"installation": {"id": "x"}},
        {"schema": 5},
    ]
    for change in forged:
        changed = {**good, **change}
        (backup / "BACKUP.json").write_text(json.dumps({**changed, "digest": digests.of_json(changed)}))
        refused("backup_invalid", restore, backup, target(whole, tmp_path / "new"))
        assert not (tmp_path / "new").exists()
    for text_ in ("", "[]", "7", "{}", '{"digest": 1}', "\0", "{"):
        (backup / "BACKUP.json").write_text(text_)
        refused("backup_invalid", restore, backup, target(whole, tmp_path / "new"))
    # A table that is none.
    path = backup / good["tables"]["rounds"]["file"]
    for data in (
        b"{",
        b"[]\n",
        b'{"table":"rounds","columns":["id"]}\n',
        path.read_bytes() + b"[1]\n",
        path.read_bytes() * 2,
    ):
        path.write_bytes(data)
        changed = {
            **good,
            "tables": {**good["tables"], "rounds": {**good["tables"]["rounds"], "digest": digests.of_bytes(data)}},
        }
        (backup / "BACKUP.json").write_text(json.dumps({**changed, "digest": digests.of_json(changed)}))
        settings = target(whole, tmp_path / "new")
        assert "rounds" in refused("backup_invalid", restore, backup, settings)
        shutil.rmtree(settings.data)


def test_nothing_is_restored_over_anything(whole, tmp_path, postgresql_url):
    backup = tmp_path / "backup"
    back_up(whole, backup)
    assert "not empty" in refused("backup_invalid", restore, backup, whole.settings)
    # The very database that was backed up.
    settings = target(whole, tmp_path / "new", database=whole.settings.database)
    for _ in range(2):
        assert "not empty" in refused("backup_invalid", restore, backup, settings)
    other = target(whole, tmp_path / "elsewhere")
    somebody = FolderBlobs(Path(other.blobs))
    somebody.put_bytes(b"somebody's")
    settings = target(whole, tmp_path / "new", blobs=other.blobs)
    assert "nobody knows" in refused("backup_invalid", restore, backup, settings)
    somebody.mark("another")
    refused("other_installation", restore, backup, settings)
    refused("other_installation", restore, backup, config.load(tmp_path / "new", environ={}))
    assert not (tmp_path / "new").exists()
    # Nor does a backup write into what is none, or is another's.
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "holiday.jpg").touch()
    refused("backup_invalid", back_up, whole, tmp_path / "full")
    with whole.store.transaction() as tx:
        tx.execute(text("UPDATE installation SET id = 'another'"))
    (Path(whole.settings.blobs) / "INSTALLATION").write_text("another")
    refused("other_installation", back_up, whole, backup)


def test_a_newer_schema_is_refused_and_an_older_one_upgraded(whole, tmp_path, monkeypatch, postgresql_url):
    backup = tmp_path / "backup"
    more(whole)
    back_up(whole, backup)
    manifest = backups.read(backup)
    del manifest["digest"]

    def write(changed):
        (backup / "BACKUP.json").write_text(json.dumps({**changed, "digest": digests.of_json(changed)}))

    write({**manifest, "schema": "9999"})
    assert "9999" in refused("data_version", restore, backup, target(whole, tmp_path / "new"))
    write({**manifest, "format": 2})
    assert "format 2" in refused("backup_invalid", restore, backup, target(whole, tmp_path / "new"))
    # As the version before had it: without the tables and columns that came since.
    tables = dict(manifest["tables"])
    for name in ("attempts", "events", "wishes"):
        del tables[name]
    path = backup / tables["stages"]["file"]
    head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    gone = {"fence", "code", "not_before", "place", "expected"}
    chosen = [number for number, name in enumerate(head["columns"]) if name not in gone]
    head["columns"] = [head["columns"][number] for number in chosen]
    lines = [head, *([row[number] for number in chosen] for row in rows)]
    path.write_bytes(b"".join(backups.table_files._line(line) for line in lines))
    tables["stages"] = {**tables["stages"], "digest": digests.of_file(path)}
    write({**manifest, "schema": "0004", "tables": tables})
    for number, given in enumerate(({}, {"database": postgresql_url})):
        if number and manifest["engine"] == "postgresql":
            continue
        settings = target(whole, tmp_path / f"old-{number}", **given)
        done = restore(backup, settings)
        assert any("0005" in step for step in done["upgraded"])
        store = Store.open(settings)
        assert migrations.problems(store.engine, metadata) == []
        with store.snapshot() as tx:
            assert len(tx.execute(select(stages)).all()) == manifest["tables"]["stages"]["rows"]
        store.close()
