"""`acclimate backup` and `acclimate restore`: on both engines, verified, over nothing, and honest about what an older one lacks."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import wait
from pathlib import Path

import kept
import pytest
from sqlalchemy import insert, select, text
from waiting import WITHIN

from acclimate import backups, config, installation, log, migrations, restoring
from acclimate.checkpoints import Copies
from acclimate.finishing import Finisher
from acclimate.service import identity
from acclimate.store import Store, attempts, events, log_entries, outbox, results, stages, submissions, uploads
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_runners.blobs import FolderBlobs

AT = "2027-03-01T12:00:00.000000Z"


def quiet(*_):
    pass


@pytest.fixture
def whole(tmp_path, database_url):
    found = kept.installation(tmp_path, database=database_url)
    yield found
    found.store.close()


def back_up(found, to, **wanted):
    row = installation.check(found.store, found.settings)
    return backups.write(found.store, found.settings, row, to, wanted=backups.Wanted(**wanted), progress=quiet)


def target(found, folder, **given):
    return config.load(folder, environ={}, given={"origin": found.settings.origin, **given})


def restore(backup, settings):
    return restoring.restore(backup, settings, progress=quiet)


def refused(code, call, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        call(*arguments, **named)
    assert caught.value.code == code, caught.value
    assert caught.value.hint
    return str(caught.value)


def contents(settings):
    """Table -> digest, and the blobs' digests."""
    store = Store.open(settings)
    try:
        with store.snapshot() as tx:
            found = {}
            metadata = backups.table_files.tables(tx.connection)
            for table in metadata.sorted_tables:
                tally = backups.table_files.Tally()
                for line in backups.table_files.lines(tx.connection, table, columns=sorted(table.c.keys())):
                    tally.add(line)
                found[table.name] = tally.result()
        blobs = {}
        for each in store.blobs.listing():
            store.blobs.check(each.digest)
            blobs[each.digest] = each.size
        return found, blobs
    finally:
        store.close()


def more(found):
    """Rows of every odd kind: text of all scripts, floats, counted keys, bytes."""
    with found.store.transaction() as tx:
        row = {
            "round": "r",
            "stage": digests.of_bytes(b"s"),
            "payload": {"ü": [0.1, 1e-300, 2**53 + 1, None, '\U0001f600 \\ " \n\u2028']},
        }
        tx.execute(insert(outbox), row)
        event = {"at": AT, "round": "r", "kind": "prepare", "submission": "s", "attempt": "a", "fence": 1, "epoch": 1}
        tx.execute(insert(events), [{**event, "event": "claimed"}, {**event, "event": "running", "reason": "日本語"}])
        tx.execute(insert(log_entries), {"index": tx.size(), "round": "", "type": "t", "data": bytes(range(256))})


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
    assert done["gap"] == restoring.Gap(0, [], [])
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
    assert migrations.problems(store.engine, config_metadata()) == []
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
                wait(finisher._under_way.values(), timeout=20)
        finally:
            finisher.close()
            store.close()
        return found

    assert told(whole.settings) == [whole.made.round] and told(whole.settings) == []
    back_up(whole, tmp_path / "backup")
    settings = target(whole, tmp_path / "new")
    restore(tmp_path / "backup", settings)
    assert told(settings) == [whole.made.round] and told(settings) == []
    whole.store.close()


def config_metadata():
    from acclimate.store import metadata

    return metadata


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


def test_files_are_for_their_owner_alone_and_keys_only_where_asked_for(whole, tmp_path):
    backup = tmp_path / "backup"
    os.umask(0o022)
    assert back_up(whole, backup)["keys"] is None and not (backup / "keys").exists()
    (whole.settings.keys / "retired").mkdir()
    (whole.settings.keys / "retired" / "old.pem").write_bytes(b"old")
    made = back_up(whole, backup, keys=True)
    assert set(made["keys"]) == {"log.pem", "evaluator.pem", "INSTALLATION", "retired/old.pem"}
    # What was asked for once stays in the backup.
    assert back_up(whole, backup)["keys"] == made["keys"]
    for path in [backup, *backup.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, (path, oct(mode))
    restore(backup, target(whole, tmp_path / "new"))
    for name in made["keys"]:
        path = tmp_path / "new" / "keys" / name
        assert path.read_bytes() == (whole.settings.keys / name).read_bytes()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert sorted(path.name for path in (tmp_path / "new").iterdir() if path.suffix not in (".lock", ".db")) == [
        "VERSION", "blobs", "keys",
    ]  # fmt: skip


def test_the_next_backup_copies_only_what_is_new_and_mends(whole, tmp_path):
    backup = tmp_path / "backup"
    back_up(whole, backup)
    assert back_up(whole, backup)["copied"] == 0
    new = whole.store.blobs.put_bytes(b"new")
    assert back_up(whole, backup)["copied"] == 1
    assert len(list(backup.glob("tables-*"))) == 1
    kept_there = backup / "blobs" / new[7:9] / new[9:]
    kept_there.chmod(0o600)
    kept_there.write_bytes(b"NEW")
    assert back_up(whole, backup)["copied"] == 0
    assert back_up(whole, backup, recheck=True)["copied"] == 1 and kept_there.read_bytes() == b"new"


def test_whatever_a_round_came_to_is_told_where_the_store_lost_it(tmp_path):
    whole = kept.installation(tmp_path)
    blobs, prepared = whole.store.blobs, whole.store.blobs.put_bytes(b"a prepared model")
    with whole.store.transaction() as tx:
        submission = tx.execute(submissions.select()).first()
        row = {"key": "sha256:1", "round": submission.round, "kind": "prepare", "submission": submission.id}
        tx.execute(insert(stages), {**row, "state": "committed"})
        failed = {**row, "key": "sha256:2", "state": "failed"}
        tx.execute(insert(stages), failed)
        tx.execute(insert(results), {"stage": "sha256:1", "document": {"prepared": prepared}, "at": AT})
        tx.execute(insert(results), {"stage": "sha256:2", "document": {"failed": {"reason": "diverged"}}, "at": AT})
        recorded = [json.loads(data) for data in tx.entries(0, tx.size())]
        scores = tx.execute(select(results.c.document).where(results.c.stage != "sha256:1")).scalars().all()
    named = {prepared, next(document["scores"] for document in scores if "scores" in document)}
    for kind, field in (
        ("HoldoutSealed", "ciphertext"),
        ("ModelEvaluated", "predictions"),
        ("RankingPublished", "ranking"),
    ):
        named.add(next(record[field] for record in recorded if record["type"] == kind))
    assert back_up(whole, tmp_path / "whole")["lost"] == []
    for digest in named:
        blobs.path(digest).unlink()
    assert back_up(whole, tmp_path / "other")["lost"] == sorted(named) and len(named) == 5
    whole.store.close()


def test_a_blob_that_the_store_lost_is_told_and_stays_in_the_backup(whole, tmp_path):
    backup = tmp_path / "backup"
    digest = whole.store.blobs.put_bytes(b"weights")
    with whole.store.transaction() as tx:
        submission = tx.execute(submissions.select()).first().id
        tx.execute(insert(uploads), {"submission": submission, "digest": digest, "size": 7, "at": AT})
    back_up(whole, backup)
    path = whole.store.blobs.path(digest)
    path.chmod(0o600)
    path.write_bytes(b"WEIGHTS")
    assert back_up(whole, backup)["lost"] == []
    whole.store.blobs.path(digest).unlink()
    assert back_up(whole, backup)["lost"] == []
    assert back_up(whole, tmp_path / "other")["lost"] == [digest]
    settings = target(whole, tmp_path / "new")
    restore(backup, settings)
    assert (Path(settings.blobs) / digest[7:9] / digest[9:]).read_bytes() == b"weights"


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
        assert migrations.problems(store.engine, config_metadata()) == []
        with store.snapshot() as tx:
            assert len(tx.execute(select(stages)).all()) == manifest["tables"]["stages"]["rows"]
        store.close()


def test_a_backup_while_people_write_is_of_one_moment(whole, tmp_path):
    stop, failed = threading.Event(), []

    def write():
        number = 0
        with_store = Store.open(whole.settings)
        while not stop.is_set():
            number += 1
            try:
                digest = with_store.blobs.put_bytes(f"upload {number}".encode())
                with with_store.transaction() as tx:
                    row = {"index": tx.size(), "round": "r", "type": "t", "data": b'{"x":"%s"}' % digest.encode()}
                    tx.execute(insert(log_entries), row)
                    tx.execute(insert(outbox), {"round": "r", "payload": {"number": number, "blob": digest}})
            except Exception as error:
                failed.append(error)
                return
        with_store.close()

    writing = threading.Thread(target=write)
    writing.start()
    try:
        made = [back_up(whole, tmp_path / "backup") for _ in range(4)][-1]
    finally:
        stop.set()
        writing.join()
    assert failed == []
    path = tmp_path / "backup" / made["tables"]["outbox"]["file"]
    payloads = [json.loads(line)[3] for line in path.read_text().splitlines()[1:]]
    assert len(payloads) == made["log"]["size"] - len(whole.made.entries) > 0
    settings = target(whole, tmp_path / "new")
    restore(tmp_path / "backup", settings)
    store = Store.open(settings)
    assert all(store.blobs.read(each["blob"]) for each in payloads)
    store.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from acclimate import backups, config, installation, restoring, table_files, migrations
from acclimate.store import Store
from acclimate_runners.blobs import FolderBlobs
what, at, backup, origin, place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
count = 0
def progress(*_):
    global count
    count += 1
    if count == at:
        os.kill(os.getpid(), signal.SIGKILL)
settings = config.load(place, environ={}, given={"origin": origin})
if what == "backup":
    store = Store.open(settings)
    row = installation.check(store, settings)
    backups.write(store, settings, row, backup, wanted=backups.Wanted(keys=True), progress=progress)
else:
    restoring.restore(backup, settings, progress=progress)
print(count)
"""


def killed(what, at, backup, origin, place):
    command = [sys.executable, "-c", KILLED, what, str(at), str(backup), origin, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode == 0


def test_killed_anywhere_it_goes_on(tmp_path):
    whole = kept.installation(tmp_path)
    whole.store.close()
    before = contents(whole.settings)
    backup, new, origin = tmp_path / "backup", tmp_path / "new", whole.settings.origin
    ended, at = False, 1
    while not ended:
        ended = killed("backup", at, backup, origin, whole.settings.data)
        if (backup / "BACKUP.json").exists():
            assert ended and backups.damage(backup, backups.read(backup), blobs=True, progress=quiet) == []
        at = at * 2 + 1
    ended, at = False, 2
    while not ended:
        ended = killed("restore", at, backup, origin, new)
        if (new / "RESTORING").exists():
            # What was broken off is of no use to anybody else.
            with pytest.raises(Refusal):
                store = Store.open(target(whole, new))
                try:
                    identity.begin(target(whole, new), store)
                finally:
                    store.close()
            for path in new.glob("acclimate.db*"):
                path.unlink()
        at = at * 2 + 1
    assert contents(target(whole, new)) == before
    assert not (new / "RESTORING").exists() and at > 15


def test_an_older_backup_beside_living_blobs_tells_what_it_lacks(tmp_path, database_url, s3_place, acclimate):
    """Row 14: the database is lost, the blobs are not; what they know is told, and no outcome is made again."""
    whole = kept.installation(tmp_path, database=database_url, **s3_place.settings)
    copies = Copies(whole.store.blobs, whole.settings.data, log.parse_vkey(whole.made.signer.vkey))
    size = len(whole.made.entries)
    with whole.store.snapshot() as tx:
        submission = tx.execute(submissions.select()).first().id
    known, unknown, committed = (f"{digit}" * 64 for digit in "abc")
    keys = [digests.of_bytes(name.encode()) for name in ("one", "two", "three")]
    with whole.store.transaction() as tx:
        stage = {"round": whole.made.round, "kind": "prepare", "submission": submission, "state": "running"}
        tx.execute(insert(stages), [{"key": key, **stage} for key in keys])
        row = {
            "fence": 1,
            "round": whole.made.round,
            "submission": submission,
            "kind": "prepare",
            "epoch": 1,
            "claimed": AT,
        }
        tx.execute(insert(attempts), {"attempt": f"sha256:{known}", "stages": keys[:2], "state": "running", **row})
        tx.execute(
            insert(attempts),
            {"attempt": f"sha256:{committed}", "stages": keys[2:], "state": "committed", "ended": AT, **row},
        )
        tx.execute(insert(results), {"stage": keys[2], "document": {}, "at": AT})
    made = back_up(whole, tmp_path / "backup", blobs=False, keys=True)
    assert made["blobs"] is None
    # After the backup: entries are signed, outcomes come to lie with the blobs.
    more(whole)
    tree = whole.made.tree
    with whole.store.snapshot() as tx:
        tree.append(log.leaf_hash(tx.entry(size)))
    copies.keep(log.sign_checkpoint(whole.made.signer, size + 1, tree.root()))
    job = whole.store.blobs.put_bytes(json.dumps({"kind": "evaluate", "stages": [1, 2, 3]}).encode())
    for name in (known, unknown, committed):
        whole.store.blobs.put_note(f"attempts/{name}/1/manifest.json", json.dumps({"job": job, "outcome": {}}).encode())
    whole.store.blobs.put_note(f"attempts/{unknown}/2/checkpoint.json", b"{}")
    whole.store.close()
    settings = tmp_path / "settings.toml"
    blobs = "".join(f'{name} = "{value}"\n' for name, value in s3_place.settings.items())
    settings.write_text(f'origin = "{whole.settings.origin}"\n{blobs}')
    given = ["--data", tmp_path / "new", "--config", settings]
    done = acclimate("restore", tmp_path / "backup", *given, "--json")
    assert done.code == 0, done.err
    gap = done.json["gap"]
    assert gap["entries"] == 1 and f"{size + 1} entries were signed" in gap["lost"][0]
    assert sorted((each["attempt"][7:8], each["stages"]) for each in gap["adopted"]) == [("a", 2), ("b", 3)]
    check = acclimate("db", "check", *given)
    assert check.code == 1 and "entries were signed" in check.out and "2 attempts (5 stages)" in check.out
    assert acclimate("db", "accept-loss", *given).code == 0
    check = acclimate("db", "check", *given)
    assert check.code == 0 and "nothing is wrong" in check.out and "2 attempts (5 stages)" in check.out


def test_the_commands_say_what_they_did(tmp_path, acclimate):
    whole = kept.installation(tmp_path)
    settings = tmp_path / "settings.toml"
    settings.write_text(f'origin = "{whole.settings.origin}"\n')
    given = ["--data", whole.settings.data, "--config", settings]
    made = acclimate("backup", tmp_path / "backup", *given, "--keys")
    assert made.code == 0 and "keys: in the backup" in made.out and f"installation {kept.ID}" in made.out
    assert acclimate("backup", tmp_path / "backup", *given, "--json").json["copied"] == 0
    digest = digests.of_file(next((whole.made.folder / "opened").rglob("*.parquet")))
    whole.store.blobs.path(digest).unlink()
    lost = acclimate("backup", tmp_path / "other", *given)
    assert lost.code == 1 and digest in lost.out
    new = ["--data", tmp_path / "new", "--config", settings]
    done = acclimate("restore", tmp_path / "backup", *new)
    assert done.code == 0 and "copied to" in done.out
    refusal = acclimate("restore", tmp_path / "backup", *new)
    assert refusal.code == 1 and "not empty" in refusal.err
    shutil.rmtree(tmp_path / "backup" / "blobs")
    refusal = acclimate("restore", tmp_path / "backup", "--data", tmp_path / "third", "--config", settings)
    assert refusal.code == 1 and "missing" in refusal.err and not (tmp_path / "third").exists()
    assert acclimate("restore", tmp_path / "nothing", *new).code == 1
    whole.store.close()
