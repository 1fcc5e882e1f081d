"""An installation: database, blobs and keys that belong together, and what does not."""

import json
import subprocess
import sys
from pathlib import Path

import rounds_made
from databases import another, refused, run, settings, store
from sqlalchemy import delete, insert, select
from waiting import WITHIN

from acclimate import config, installation, keys, log, migrations
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate.store import (
    Store,
    log_entries,
    metadata,
)
from acclimate.store import installation as installation_rows
from acclimate_competitions import records

__all__ = ["settings", "store"]

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
    answers = [process.communicate("\n", timeout=WITHIN) for process in started]
    assert {process.returncode for process in started} == {0}, answers
    assert len({out for out, _ in answers}) == 1
    store = Store.open(settings)
    assert migrations.problems(store.engine, metadata) == []
    assert installation.check(store, settings).id == answers[0][0].strip() == store.blobs.marker()
    store.close()


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
