"""`acclimate backup` and `acclimate restore` as they are typed: what they say, and that they are honest about what an older one lacks."""

import json
import shutil
from datetime import UTC, datetime, timedelta

import kept
import pytest
import rounds_made
from backed_up import AT, back_up, more
from sqlalchemy import insert

from acclimate import log
from acclimate.checkpoints import Copies
from acclimate.store import attempts, log_entries, results, stages, submissions
from acclimate_competitions import digests
from acclimate_competitions.records import Record


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
    assert done.code == 1, done.err
    gap = done.json["gap"]
    assert gap["entries"] == 1 and f"{size + 1} entries were signed" in gap["lost"][0]
    assert sorted((each["attempt"][7:8], each["stages"]) for each in gap["adopted"]) == [("a", 2), ("b", 3)]
    check = acclimate("db", "check", *given)
    assert check.code == 1 and "entries were signed" in check.out and "2 attempts (5 stages)" in check.out
    assert acclimate("db", "accept-loss", *given).code == 0
    check = acclimate("db", "check", *given)
    assert check.code == 0 and "lost:" not in check.out and "2 attempts (5 stages)" in check.out


def test_a_restore_into_new_blobs_says_what_nobody_here_can_know_and_who_could(tmp_path, acclimate):
    whole = kept.installation(tmp_path)
    settings = tmp_path / "settings.toml"
    settings.write_text(f'origin = "{whole.settings.origin}"\n')
    Copies(whole.store.blobs, whole.settings.data, log.parse_vkey(whole.made.signer.vkey)).keep(
        log.sign_checkpoint(whole.made.signer, len(whole.made.entries), whole.made.tree.root())
    )
    made = back_up(whole, tmp_path / "backup", keys=True)
    new = ["--data", tmp_path / "new", "--config", settings]
    done = acclimate("restore", tmp_path / "backup", *new)
    size = made["log"]["size"]
    for ran in (done, acclimate("db", "check", *new)):
        assert ran.code == 0, ran.err
        assert (
            f"not known: whether entries were signed after this backup, which is of {made['made']} and has {size}."
            in ran.out
        )
        assert all(
            f"`acclimate {way}" in ran.out
            for way in ("doctor`", "log check DIR`", "receipt verify`", "db accept-loss`")
        )
        assert "nothing is wrong" not in ran.out and "lost:" not in ran.out
    accepted = acclimate("db", "accept-loss", *new)
    assert accepted.code == 0 and "accepted: what was signed after the backup, if anything was" in accepted.out
    check = acclimate("db", "check", *new)
    assert check.code == 0 and "not known" not in check.out
    assert acclimate("db", "accept-loss", *new).out == "nothing is lost\n"
    whole.store.close()


def test_blobs_that_come_after_the_restore_are_asked_once_they_are_there(tmp_path, acclimate):
    whole = kept.installation(tmp_path)
    settings = tmp_path / "settings.toml"
    settings.write_text(f'origin = "{whole.settings.origin}"\n')
    back_up(whole, tmp_path / "rows", blobs=False, keys=True)
    signer, tree, size = whole.made.signer, whole.made.tree, len(whole.made.entries)
    Copies(whole.store.blobs, whole.settings.data, log.parse_vkey(signer.vkey)).keep(
        log.sign_checkpoint(signer, size, tree.root())
    )
    new = ["--data", tmp_path / "new", "--config", settings]
    ran = acclimate("restore", tmp_path / "rows", *new)
    assert ran.code == 0 and "not known: " in ran.out
    shutil.copytree(whole.store.blobs.root, tmp_path / "new" / "blobs", dirs_exist_ok=True)
    check = acclimate("db", "check", *new)
    assert check.code == 0 and "not known" not in check.out
    whole.store.close()


@pytest.mark.parametrize("ahead", [True, False])
def test_a_newest_record_ahead_of_the_clock_is_told_where_an_operator_looks(ahead, tmp_path, acclimate):
    """As after a clock was set back: the server would answer whatever it is to log with busy."""
    settings = tmp_path / "settings.toml"
    settings.write_text(f'origin = "{rounds_made.ORIGIN}"\nclock_behind = {3600 if ahead else 10**9}\n')
    whole = kept.installation(tmp_path)
    record = Record("RoundOpened", "r", datetime.now(UTC) + timedelta(days=1), {"seal": digests.of_bytes(b"")})
    with whole.store.transaction() as tx:
        row = {"index": tx.size(), "round": "r", "type": record.type, "data": record.encode()}
        tx.execute(insert(log_entries), row)
    back_up(whole, tmp_path / "backup", keys=True)
    whole.store.close()
    new = ["--data", tmp_path / "new", "--config", settings]
    for ran in (acclimate("restore", tmp_path / "backup", *new), acclimate("db", "check", *new)):
        assert ran.code == 0, ran.err
        assert ("warning: the database's clock says " in ran.out) is ahead
        assert ("the log's newest record " in ran.out) is ahead and ("`clock_behind`" in ran.out) is ahead
    found = {one["name"]: one for one in acclimate("doctor", *new, "--json").json["findings"]}
    assert ("log" in found) is ahead
    if ahead:
        assert found["log"]["state"] == "warning" and "newest record" in found["log"]["found"]


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


def test_a_restore_that_lacks_entries_or_blobs_ends_with_1_and_says_what_to_do(tmp_path, acclimate):
    whole = kept.installation(tmp_path)
    settings = tmp_path / "settings.toml"
    settings.write_text(f'origin = "{whole.settings.origin}"\n')
    assert acclimate("backup", tmp_path / "whole", "--data", whole.settings.data, "--config", settings).code == 0
    # Signed after the backup, and known to the blobs alone.
    more(whole)
    tree, size = whole.made.tree, len(whole.made.entries)
    with whole.store.snapshot() as tx:
        tree.append(log.leaf_hash(tx.entry(size)))
    copies = Copies(whole.store.blobs, whole.settings.data, log.parse_vkey(whole.made.signer.vkey))
    copies.keep(log.sign_checkpoint(whole.made.signer, size + 1, tree.root()))
    new = ["--data", tmp_path / "new", "--config", settings, "--blobs", whole.settings.blobs]
    ran = acclimate("restore", tmp_path / "whole", *new)
    assert (
        ran.code == 1 and f"lost: {size + 1} entries were signed" in ran.out and "acclimate db accept-loss" in ran.out
    )
    # Blobs that the database names, and that are neither in the backup nor at their place.
    digest = digests.of_file(next((whole.made.folder / "opened").rglob("*.parquet")))
    whole.store.blobs.path(digest).unlink()
    assert acclimate("backup", tmp_path / "torn", "--data", whole.settings.data, "--config", settings).code == 1
    third = ["--data", tmp_path / "third", "--config", settings]
    ran = acclimate("restore", tmp_path / "torn", *third)
    assert ran.code == 1 and f"problem: blob {digest} is named, and not at {tmp_path / 'third' / 'blobs'}" in ran.out
    assert "look for" in ran.out
    ran = acclimate("restore", tmp_path / "torn", "--data", tmp_path / "fourth", "--config", settings, "--json")
    assert ran.code == 1 and ran.json["missing"] == [digest] and ran.json["gap"]["lost"] == []
    # Where the blobs come by other means, nobody can say yet.
    rows = ["--data", whole.settings.data, "--config", settings, "--no-blobs"]
    assert acclimate("backup", tmp_path / "rows", *rows).code == 0
    ran = acclimate("restore", tmp_path / "rows", "--data", tmp_path / "fifth", "--config", settings, "--json")
    assert ran.code == 0 and ran.json["missing"] is None
    whole.store.close()
