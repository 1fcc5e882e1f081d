"""`acclimate blobs gc`: what nobody names goes, what anybody names stays, whoever writes meanwhile."""

import io
import json
import os
import threading
import time

import kept
import pytest
from databases import refused, run
from sqlalchemy import delete, insert, select, text, update

from acclimate import garbage, log, outputs
from acclimate.checkpoints import Copies
from acclimate.store import attempts, log_checkpoints, log_entries, rounds, submissions, uploads
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

OLD = "2020-01-01T00:00:00.000000Z"


@pytest.fixture(params=["folder", "s3"])
def whole(request, tmp_path, database_url):
    given = request.getfixturevalue("s3_place").settings if request.param == "s3" else {}
    found = kept.installation(tmp_path, database=database_url, **given)
    yield found
    found.store.close()


def collect(found, *, older_than=-2.0, dry=False):
    verifier = log.parse_vkey(found.made.signer.vkey)
    return garbage.collect(
        found.store, found.settings, verifier, older_than=older_than, dry=dry, progress=lambda *_: None
    )


def note(found, text, *, attempt="0a1b", fence=1, file="manifest.json"):
    name = f"attempts/{attempt}/{fence}/{file}"
    found.store.blobs.put_note(name, text.encode())
    return name


def attempt(found, state, *, fence=1, ended=OLD, name="0a1b"):
    with found.store.transaction() as tx:
        row = {"round": found.made.round, "submission": tx.execute(submissions.select()).first().id, "kind": "prepare"}
        row |= {"stages": [], "state": state, "epoch": 1, "claimed": OLD, "ended": ended}
        tx.execute(insert(attempts), {"attempt": f"sha256:{name}", "fence": fence, **row})


def test_what_is_named_stays_and_the_rest_goes(whole):
    blobs = whole.store.blobs
    before = {each.digest for each in blobs.listing()}
    spare = [blobs.put_bytes(f"nobody's {number}".encode()) for number in range(5)]
    # Named by a document that is itself named; by one that nobody names; by a note; by a log record alone.
    inner = blobs.put_bytes(b"inner")
    outer = blobs.put_bytes(json.dumps({"files": {"a": inner}}).encode())
    lone = blobs.put_bytes(b"lone")
    orphan = blobs.put_bytes(json.dumps({"files": {"a": lone}}).encode())
    output = blobs.put_bytes(b"output")
    outcome = note(whole, json.dumps({"outcome": {"files": {"a": output}}, "job": outer}))
    logged = blobs.put_bytes(b"logged")
    with whole.store.transaction() as tx:
        row = {"index": tx.size(), "round": "r", "type": "t", "data": f'{{"x":"{logged}"}}'.encode()}
        tx.execute(insert(log_entries), row)
    gone = {*spare, lone, orphan}
    needed = before & named(whole)
    told = collect(whole, dry=True)
    assert {each.digest for each in blobs.listing()} == before | {*gone, inner, outer, output, logged}
    found = collect(whole)
    assert found == told and found.removed >= len(gone) and found.freed > 0
    left = {each.digest for each in blobs.listing()}
    assert not left & gone and left >= needed | {inner, outer, output, logged}
    assert found.stored - found.removed == found.needed == len(left) and found.young == 0
    for digest in left:
        blobs.check(digest)
    assert blobs.note(outcome) is not None and blobs.marker() == kept.ID
    assert collect(whole).removed == 0


def named(found):
    with found.store.snapshot() as tx:
        return set(garbage.named_in(tx))


def test_every_digest_of_the_log_and_of_the_tables_is_a_root(whole):
    with whole.store.snapshot() as tx:
        in_log = b"".join(tx.entries(0, tx.size())).decode()
        documents = tx.execute(text("SELECT CAST(document AS TEXT) FROM results")).scalars().all()
        manifests = tx.execute(text("SELECT CAST(manifest AS TEXT) FROM submissions")).scalars().all()
        definitions = tx.execute(rounds.select()).all()
    found = named(whole)
    assert {digest.decode() for digest in garbage._DIGEST.findall(in_log.encode())} <= found
    for each in (*documents, *manifests):
        wanted = {digest.decode() for digest in garbage._DIGEST.findall(each.encode())}
        assert wanted and wanted <= found
    assert {row.definition for row in definitions} <= found
    collect(whole)
    # A whole bundle can still be made of what is left.
    blobs = whole.store.blobs
    assert all(blobs.has(row.definition) for row in definitions)
    assert all(blobs.has(digests.of_file(path)) for path in (whole.made.folder / "opened").rglob("*.parquet"))


def test_what_is_young_stays(whole):
    digest = whole.store.blobs.put_bytes(b"just stored")
    found = collect(whole, older_than=3600.0)
    assert found.removed == 0 and found.young >= 1 and whole.store.blobs.has(digest)


@pytest.mark.parametrize(
    ("rows", "stays"),
    [
        ([], True),
        ([("running", 1, None)], True),
        ([("given_back", 1, OLD)], True),
        ([("given_back", 1, OLD), ("running", 2, None)], True),
        ([("given_back", 1, OLD), ("committed", 2, OLD)], False),
        ([("committed", 1, "2999-01-01T00:00:00.000000Z")], True),
        ([("lost", 1, None), ("committed", 2, OLD)], False),
        ([("failed", 1, OLD)], False),
        ([("failed", 1, OLD), ("running", 2, None)], True),
    ],
)
def test_notes_of_attempts_stay_until_these_are_over(tmp_path, rows, stays):
    whole = kept.installation(tmp_path)
    digest = whole.store.blobs.put_bytes(b"weights")
    name = note(whole, json.dumps({"files": {"weights": digest}}))
    for state, fence, ended in rows:
        attempt(whole, state, fence=fence, ended=ended)
    os.utime(whole.store.blobs.path(digest), (0, 0))
    found = collect(whole, older_than=3600.0, dry=True)
    assert found.notes == (not stays) and whole.store.blobs.note(name) is not None
    collect(whole, older_than=3600.0)
    assert (whole.store.blobs.note(name) is not None) == stays == whole.store.blobs.has(digest)
    whole.store.close()


def test_what_a_failed_try_said_goes_with_its_attempt(whole):
    blobs, said = whole.store.blobs, b"Traceback\n"
    digest = blobs.put_bytes(said)
    name = note(whole, json.dumps({"log": digest}), file="said.json")
    attempt(whole, "failed", fence=1)
    attempt(whole, "running", fence=2, ended=None)
    collect(whole)
    (told,) = told_of(whole)
    assert (told["fence"], told["text"]) == (1, said.decode()) and blobs.has(digest)
    with whole.store.transaction() as tx:
        tx.execute(update(attempts).where(attempts.c.fence == 2).values(state="committed", ended=OLD))
    collect(whole)
    assert (blobs.note(name), blobs.has(digest), told_of(whole)) == (None, False, [])


def told_of(found):
    with found.store.snapshot() as tx:
        rows = tx.execute(select(attempts).where(attempts.c.attempt == "sha256:0a1b").order_by(attempts.c.fence)).all()
    return outputs.of_tries(found.store.blobs, rows)


def test_an_upload_at_the_same_time_is_not_lost(tmp_path, database_url):
    """The attack: files that lie there since long, and that nobody named, are sent again while garbage is collected."""
    whole = kept.installation(tmp_path, database=database_url)
    blobs, stop, failed = whole.store.blobs, threading.Event(), []
    data = [f"an old upload {number}".encode() for number in range(120)]
    with whole.store.snapshot() as tx:
        submission = tx.execute(submissions.select()).first().id

    def age():
        for each in data:
            digest = digests.of_bytes(each)
            if blobs.has(digest):
                os.utime(blobs.path(digest), (0, 0))

    def run_collections():
        while not stop.is_set():
            try:
                collect(whole, older_than=3600.0)
            except Exception as error:
                failed.append(error)
                return

    for each in data:
        blobs.put_bytes(each)
    age()
    collecting = threading.Thread(target=run_collections)
    collecting.start()
    try:
        for each in data:
            digest, _ = blobs.put_stream(io.BytesIO(each)) if len(each) % 2 else (blobs.put_bytes(each), 0)
            # As the service does: the bytes first, then the row that names them.
            time.sleep(0.002)
            with whole.store.transaction() as tx:
                tx.execute(insert(uploads), {"submission": submission, "digest": digest, "size": 1, "at": OLD})
    finally:
        stop.set()
        collecting.join()
    assert failed == []
    age()
    collect(whole, older_than=3600.0)
    for each in data:
        assert blobs.read(digests.of_bytes(each)) == each
    whole.store.close()


def test_a_database_from_an_older_backup_collects_nothing(tmp_path, database_url):
    whole = kept.installation(tmp_path, database=database_url)
    copies = Copies(whole.store.blobs, whole.settings.data, log.parse_vkey(whole.made.signer.vkey))
    copies.keep(whole.made.notes[len(whole.made.entries)])
    cut = len(whole.made.entries) - 1
    table = " ON log_entries" if whole.store.engine.dialect.name == "postgresql" else ""
    with whole.store.transaction() as tx:
        tx.execute(text(f"DROP TRIGGER log_entries_no_delete{table}"))
        tx.execute(delete(log_entries).where(log_entries.c.index >= cut))
        tx.execute(delete(log_checkpoints).where(log_checkpoints.c.size > cut))
    before = list(whole.store.blobs.listing())
    refused("log_inconsistent", collect, whole)
    assert len(list(whole.store.blobs.listing())) == len(before)
    whole.store.close()


def test_the_command_counts_first_and_removes_then(tmp_path, acclimate):
    whole = kept.installation(tmp_path)
    digest = whole.store.blobs.put_bytes(b"nobody's")
    os.utime(whole.store.blobs.path(digest), (0, 0))
    given = ["--data", whole.settings.data]
    environment = tmp_path / "settings.toml"
    environment.write_text(f'origin = "{whole.settings.origin}"\n')
    given += ["--config", environment]
    for wrong in ("0h", "7", "90s", "-1d"):
        assert acclimate("blobs", "gc", *given, "--older-than", wrong).code == 2
    dry = acclimate("blobs", "gc", *given, "--dry-run", "--json").json
    assert dry["removed"] == 1 and dry["dry_run"] and dry["freed"] == 8 and whole.store.blobs.has(digest)
    found = acclimate("blobs", "gc", *given, "--older-than", "1h")
    assert found.code == 0 and "removed: 1 blob, 8 bytes" in found.out
    assert not whole.store.blobs.has(digest)
    # Blobs of nobody in particular are not touched.
    (tmp_path / "data" / "blobs" / "INSTALLATION").unlink()
    code, _, told = run("blobs", "gc", *given)
    assert code == 1 and "of none" in told
    whole.store.close()
    with pytest.raises(Refusal):
        whole.store.blobs.read(digest)
