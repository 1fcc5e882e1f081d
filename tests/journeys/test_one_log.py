"""Several processes over one database: one log, one signature, one quota."""

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import httpx
import live
import pytest
import rounds_made
from databases import add, refused, settings, store
from sqlalchemy import delete, insert, select, text
from waiting import WITHIN

from acclimate import config, log
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate.store import (
    Store,
    log_checkpoints,
    log_entries,
)
from acclimate_competitions import records

__all__ = ["settings", "store"]

HERE = Path(__file__).parent


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
    answers = [process.communicate(timeout=WITHIN) for process in started]
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
    add(store, log_entries, {"index": 0, "round": "r", "type": "t", "data": b"{}"})
    mine = Sequencer(store, signer)
    assert mine.advance() == 1
    # Somebody signs another tree with the same key: a split view.
    note = log.sign_checkpoint(signer, 2, b"\x07" * 32)
    add(beside, log_entries, {"index": 1, "round": "r", "type": "t", "data": b"{}"})
    add(beside, log_checkpoints, {"size": 2, "note": note, "at": ""})
    refused("log_inconsistent", mine.advance)
    refused("log_inconsistent", Sequencer(beside, signer).advance)
    add(store, log_entries, {"index": 2, "round": "r", "type": "t", "data": b"{}"})
    refused("log_inconsistent", mine.advance)
    with store.snapshot() as tx:
        assert sorted(tx.execute(select(log_checkpoints.c.size)).scalars()) == [1, 2]


def test_a_database_put_back_to_an_earlier_state_is_noticed_by_a_running_sequencer(two):
    store, beside, signer = two
    mine = Sequencer(store, signer)
    for index in range(3):
        add(store, log_entries, {"index": index, "round": "r", "type": "t", "data": b"{}"})
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
