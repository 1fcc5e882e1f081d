"""`acclimate backup`: on both engines, of one moment, for its owner alone, and honest about what is lost."""

import json
import os
import stat
import threading
from pathlib import Path

import kept
import pytest
from backed_up import AT, back_up, restore, target
from sqlalchemy import insert, select

from acclimate.store import Store, log_entries, outbox, results, stages, submissions, uploads
from acclimate_competitions.errors import Refusal


@pytest.fixture
def whole(tmp_path, database_url):
    found = kept.installation(tmp_path, database=database_url)
    yield found
    found.store.close()


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
        "RESTORED", "VERSION", "blobs", "keys",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "lacking"),
    [("DROP TABLE wishes", "wishes"), ("ALTER TABLE rounds DROP COLUMN created", "rounds.created")],
)
def test_what_the_database_lacks_is_left_out_of_no_backup_silently(whole, tmp_path, statement, lacking):
    backup = tmp_path / "backup"
    before = back_up(whole, backup)["digest"]
    with whole.store.transaction() as tx:
        tx.connection.exec_driver_sql(statement)
    with pytest.raises(Refusal, match=f"lacks {lacking}, which schema") as caught:
        back_up(whole, backup)
    assert caught.value.code == "data_version" and json.loads((backup / "BACKUP.json").read_text())["digest"] == before
    assert len(list(backup.glob("tables-*"))) == 1


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
