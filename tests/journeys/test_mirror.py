"""A mirror follows a log from elsewhere: it keeps all of it, goes on where it was killed, and is shown one history or none."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import handing_over
import live
import pytest
import rounds_made
from chosen_ports import free_port
from databases import refused, run
from sqlalchemy import delete, text
from waiting import WITHIN

from acclimate import config, locks, log, mirror
from acclimate.client import Client
from acclimate.service import hand_over
from acclimate.store import Store, log_checkpoints, log_entries

HERE = Path(__file__).parent


@pytest.fixture
def server(tmp_path):
    with live.serve(tmp_path) as running:
        yield running


def vkey(server):
    return str(server.anyone().get("/v1/server").json()["log"])


def grow(server, tmp_path, *names):
    handing_over.grow(server.settings, server.store, tmp_path / "made", *names)


def followed(server, folder, key=None):
    with mirror.opened(folder, key) as kept, Client(server.url) as client:
        return mirror.follow(client, kept)


def entries(server):
    with server.store.snapshot() as tx:
        return tx.entries(0, 10_000)


def lines(folder):
    return (folder / "entries.jsonl").read_bytes().splitlines()


# ---- following -----------------------------------------------------------------------------------------------------


def test_a_mirror_keeps_all_of_a_log_and_fetches_what_is_new(server, tmp_path):
    out = tmp_path / "mirror"
    found = followed(server, out, vkey(server))
    assert (found.checkpoint.size, found.new) == (0, 0)
    grow(server, tmp_path, "one", "two")
    assert followed(server, out).new == 4
    grow(server, tmp_path, "three")
    found = followed(server, out)
    assert (found.checkpoint.size, found.new) == (6, 2) and lines(out) == entries(server)
    assert followed(server, out).new == 0
    signed = log.open_checkpoint((out / "checkpoint").read_text(), log.parse_vkey(vkey(server))).checkpoint
    assert signed == found.checkpoint and signed.root == log.root(list(map(log.leaf_hash, lines(out))))
    assert mirror.check(out) == mirror.Followed(found.chain, found.checkpoint, 0)
    # A receipt leads to the mirror's checkpoint or an earlier one, whichever the server gave.
    text_ = server.anyone().get("/v1/log/proof/2").text
    record, proved = log.Receipt.parse(text_).open(log.parse_vkey(vkey(server)))
    assert lines(out)[2] == record.encode() and proved.checkpoint.root == signed.root


def test_the_command_follows_and_checks(server, tmp_path):
    grow(server, tmp_path, "one")
    out, key = tmp_path / "mirror", tmp_path / "log.vkey"
    key.write_text(f"{vkey(server)}\n")
    code, _, errors = run("log", "mirror", "--server", server.url, "--out", out)
    assert code == 1 and "begun with the log's key" in errors
    code, said, _ = run("log", "mirror", "--server", server.url, "--log-key", key, "--out", out)
    assert code == 0 and "2 entries, 2 of them new" in said
    code, said, _ = run("log", "mirror", "--server", server.url, "--out", out, "--json")
    assert code == 0 and json.loads(said)["size"] == 2 and json.loads(said)["new"] == 0
    code, said, _ = run("log", "check", out, "--log-key", key, "--json")
    assert code == 0 and json.loads(said)["keys"][0]["key"] == vkey(server)
    stranger = log.Signer("acclimate.example.org/log", rounds_made.key("x")).vkey
    for words in (("mirror", "--server", server.url, "--out", out), ("check", out)):
        code, _, errors = run("log", *words, "--log-key", stranger)
        assert code == 1 and stranger in errors and vkey(server) in errors


def test_a_mirror_is_one_process_s_at_a_time(server, tmp_path):
    followed(server, tmp_path / "mirror", vkey(server))
    held = locks.take(tmp_path / "mirror" / ".lock")
    assert held is not None
    with held, pytest.raises(Exception, match="another process follows"):
        followed(server, tmp_path / "mirror")


def test_a_log_of_another_key_is_not_mirrored(server, tmp_path):
    stranger = log.Signer(server.settings.origin, rounds_made.key("x")).vkey
    grow(server, tmp_path, "one")
    assert stranger in refused_("proof_invalid", followed, server, tmp_path / "mirror", stranger).sentence
    assert not (tmp_path / "mirror" / "checkpoint").exists()


def test_a_wrong_key_spoils_no_folder(server, tmp_path):
    """It is kept once it has signed something, and not before."""
    out, stranger = tmp_path / "mirror", log.Signer(server.settings.origin, rounds_made.key("x")).vkey
    refusal = refused_("key_refused", followed, server, out, rounds_made.witness("w1.example.org"))
    assert "kind 0x04" in refusal.sentence and "log.vkey" in refusal.hint
    grow(server, tmp_path, "one")
    refused_("proof_invalid", followed, server, out, stranger)
    dead = f"http://127.0.0.1:{free_port()}"
    assert run("log", "mirror", "--server", dead, "--log-key", stranger, "--out", out)[0] == 1
    assert not (out / "log.vkey").exists()
    error = refused_("file_unreadable", mirror.check, out)
    assert "no mirror" in error.sentence and "log mirror" in error.hint
    refused_("config_invalid", followed, server, out)
    assert followed(server, out, vkey(server)).new == 2
    assert (out / "log.vkey").read_text().strip() == vkey(server)
    refused_("conflict", followed, server, out, stranger)
    # Killed between the two files: the key is there, the checkpoint not yet; another key may take its place.
    (out / "checkpoint").unlink()
    assert "checkpoint" in refused_("file_unreadable", mirror.check, out).sentence
    (out / "log.vkey").write_text(f"{stranger}\n")
    assert followed(server, out, vkey(server)).checkpoint.size == 2
    (out / "checkpoint").unlink()
    assert followed(server, out).checkpoint.size == 2 and mirror.check(out).chain.first.text() == vkey(server)


def refused_(code, call, *arguments):
    with pytest.raises(Exception) as caught:
        call(*arguments)
    assert getattr(caught.value, "code", "") == code, caught.value
    return caught.value


# ---- killed, changed on disk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [b"", b"half a li", b"another entry\nand one more\n", b"x\n" * 50])
def test_what_a_killed_call_left_is_used_where_it_is_right_and_dropped_where_not(server, tmp_path, left):
    out = tmp_path / "mirror"
    grow(server, tmp_path, "one")
    followed(server, out, vkey(server))
    grow(server, tmp_path, "two", "three")
    with (out / "entries.jsonl").open("ab") as stream:
        stream.write(left or b"".join(entry + b"\n" for entry in entries(server)[2:5]))
    assert mirror.check(out).checkpoint.size == 2
    found = followed(server, out)
    assert found.new == 4 and lines(out) == entries(server)
    assert mirror.check(out).checkpoint == found.checkpoint


FOLLOW = """
import os, signal, sys
from pathlib import Path
from acclimate import mirror
from acclimate.client import Client
url, out, key = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
# What changes a file: each is a moment in which the process may be killed, before it happens.
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.truncate"}

def follow(left):
    def hook(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in EVENTS or writes) and str(arguments[0]).startswith(str(out)):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    with mirror.opened(out, key) as kept, Client(url) as client:
        mirror.follow(client, kept)

for moment in range(40):
    child = os.fork()
    if child == 0:
        follow([moment])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    checked = mirror.check(out).checkpoint.size if (out / "checkpoint").exists() else None
    print(os.waitstatus_to_exitcode(status), checked)
    if not os.WIFSIGNALED(status):
        break
"""


def test_killed_at_any_moment_it_goes_on(server, tmp_path):
    out, key = tmp_path / "mirror", vkey(server)
    grow(server, tmp_path, "one")
    words = [sys.executable, "-c", FOLLOW, server.url, str(out), key]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN, check=False)
    *killed, last = [line.split() for line in done.stdout.splitlines()]
    assert last == ["0", "2"] and len(killed) >= 4, done
    assert {code for code, _ in killed} == {str(-signal.SIGKILL)} and {size for _, size in killed} <= {"None", "2"}
    assert lines(out) == entries(server)
    # And while entries come in.
    grow(server, tmp_path, *(f"n{number}" for number in range(400)))
    words = [sys.executable, "-m", "acclimate", "log", "mirror", "--server", server.url, "--out", str(out)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until = time.monotonic() + WITHIN
    before = (out / "entries.jsonl").stat().st_size
    while process.poll() is None and (out / "entries.jsonl").stat().st_size == before and time.monotonic() < until:
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert mirror.check(out).checkpoint.size in (2, 802)
    assert followed(server, out).checkpoint.size == 802 and lines(out) == entries(server)


def test_a_mirror_that_was_changed_is_noticed(server, tmp_path):
    out = tmp_path / "mirror"
    grow(server, tmp_path, "one", "two")
    followed(server, out, vkey(server))
    whole = (out / "entries.jsonl").read_bytes()
    for changed in (whole.replace(b"a test", b"a pest", 1), whole[: whole.rindex(b"{")], whole[1:], b""):
        (out / "entries.jsonl").write_bytes(changed)
        for call in (mirror.check, lambda folder: followed(server, folder)):
            assert refused_("log_inconsistent", call, out).hint
        (out / "entries.jsonl").write_bytes(whole)
    note = (out / "checkpoint").read_text()
    (out / "checkpoint").write_text(note.replace("\n4\n", "\n3\n"))
    refused_("proof_invalid", mirror.check, out)


# ---- forks ---------------------------------------------------------------------------------------------------------


def cut(store, size):
    with store.transaction() as tx:
        tx.execute(text("DROP TRIGGER IF EXISTS log_entries_no_delete"))
        tx.execute(delete(log_entries).where(log_entries.c.index >= size))
        tx.execute(delete(log_checkpoints).where(log_checkpoints.c.size > size))


@pytest.mark.parametrize("more", [("other",), ("other", "third"), ("other", "third", "fourth")])
def test_a_second_history_is_refused_and_both_checkpoints_are_kept(tmp_path, more):
    out = tmp_path / "mirror"
    with live.serve(tmp_path) as server:
        grow(server, tmp_path, "one", "two")
        key = vkey(server)
        first = followed(server, out, key).checkpoint
        kept = {name: (out / name).read_bytes() for name in ("entries.jsonl", "checkpoint")}
    # Whoever runs the log cuts it, hides that, and goes on otherwise, under the same key.
    store = Store.open(server.settings)
    cut(store, 2)
    store.close()
    for copy in (Path(server.settings.blobs) / "CHECKPOINT", server.settings.data / "CHECKPOINT"):
        copy.unlink()
    with live.serve(tmp_path) as server:
        grow(server, tmp_path, *more)
        error = refused_("log_inconsistent", followed, server, out)
        assert "both checkpoints are kept" in error.sentence
        verifier = log.parse_vkey(key)
        notes = [path.read_text() for path in (out / "forks").iterdir()]
        signed = [log.open_checkpoint(note, verifier).checkpoint for note in notes]
        assert len(signed) == 2 and first in signed and len({one.root for one in signed}) == 2
        assert all(str(path) in error.sentence for path in (out / "forks").iterdir())
        # What the mirror holds is as it was, and it stays so.
        assert {name: (out / name).read_bytes() for name in kept} == kept
        refused_("log_inconsistent", followed, server, out)
        assert len(list((out / "forks").iterdir())) == 2


def test_an_old_checkpoint_put_back_is_refused(tmp_path):
    out = tmp_path / "mirror"
    with live.serve(tmp_path) as server:
        grow(server, tmp_path, "one", "two")
        followed(server, out, vkey(server))
    store = Store.open(server.settings)
    cut(store, 2)
    store.close()
    for copy in (Path(server.settings.blobs) / "CHECKPOINT", server.settings.data / "CHECKPOINT"):
        copy.unlink()
    with live.serve(tmp_path) as server:
        error = refused_("log_inconsistent", followed, server, out)
        assert "2 entries" in error.sentence and "of 4 before" in error.sentence and "put back" in error.sentence


def test_entries_that_the_checkpoint_does_not_sign_are_not_kept(server, tmp_path):
    out = tmp_path / "mirror"
    grow(server, tmp_path, "one")
    followed(server, out, vkey(server))
    grow(server, tmp_path, "two")
    before = (out / "entries.jsonl").read_bytes()
    note = server.anyone().get("/v1/log/checkpoint").text
    with server.store.transaction() as tx:
        tx.execute(text("DROP TRIGGER log_entries_no_update"))
        tx.execute(log_entries.update().where(log_entries.c.index == 3).values(data=b"{}"))
    error = refused_("proof_invalid", followed, server, out)
    assert "entries 2 to 3" in error.sentence and note
    assert (out / "entries.jsonl").read_bytes() == before


# ---- hand-over -----------------------------------------------------------------------------------------------------


def test_a_mirror_follows_a_hand_over_of_the_key(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    with live.serve(tmp_path) as server:
        grow(server, tmp_path, "one")
        old = vkey(server)
        followed(server, before, old)
        hand_over.hand_over(server.store, server.settings, reason="a new machine")
    with live.serve(tmp_path) as server:
        grow(server, tmp_path, "two")
        new = vkey(server)
        for out, key in ((before, None), (after, new), (tmp_path / "old", old)):
            found = followed(server, out, key)
            assert [one.text() for one in found.chain.keys] == [old, new] and found.checkpoint.size == 5
            assert mirror.check(out) == mirror.Followed(found.chain, found.checkpoint, 0)
            assert (out / "checkpoints" / "3").exists()
        assert mirror.check(before, old).chain == mirror.check(before, new).chain
    # The checkpoint by both keys is what the old key's owner has.
    (before / "checkpoints" / "3").unlink()
    refused_("file_unreadable", mirror.check, before)


def test_the_server_gives_hand_overs_as_receipts(tmp_path):
    with live.serve(tmp_path) as server:
        assert server.anyone().get("/v1/log/rotations").json() == {"receipts": []}
        old = vkey(server)
        hand_over.hand_over(server.store, server.settings, reason="a new machine")
    with live.serve(tmp_path) as server:
        grow(server, tmp_path, "one")
        (receipt,) = server.anyone().get("/v1/log/rotations").json()["receipts"]
        record, signed = log.Receipt.parse(receipt).open(log.parse_vkey(old))
        assert record["new"] == vkey(server) and signed.checkpoint.size == 1


# ---- tiles ---------------------------------------------------------------------------------------------------------


def test_tiles_hold_the_tree_and_the_entries(server, tmp_path):
    grow(server, tmp_path, *(f"n{number}" for number in range(150)))
    anyone, all_ = server.anyone(), entries(server)
    assert len(all_) == 300
    anyone.get("/v1/log/checkpoint")
    tree = log.Tree(map(log.leaf_hash, all_))

    def tile(path):
        answer = anyone.get(f"/v1/log/tile/{path}")
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers["content-type"] == "application/octet-stream"
        assert "immutable" in answer.headers["cache-control"]
        return answer.content

    full, part = tile("0/000"), tile("0/001.p/44")
    assert [full[i : i + 32] for i in range(0, len(full), 32)] == list(map(log.leaf_hash, all_[:256]))
    assert [part[i : i + 32] for i in range(0, len(part), 32)] == list(map(log.leaf_hash, all_[256:]))
    assert tile("0/001.p/7") == part[: 7 * 32]
    assert tile("1/000.p/1") == tree.root(256)
    found, data = [], tile("entries/000") + tile("entries/001.p/44")
    while data:
        (size,) = struct.unpack(">H", data[:2])
        found.append(data[2 : 2 + size])
        data = data[2 + size :]
    assert found == all_


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("0/001", 404), ("0/001.p/45", 404), ("1/000", 404), ("63/000.p/1", 404), ("entries/001", 404), ("0/x999/x999/x999/x999/x999/999", 404),
        ("0/1", 422), ("0/0000", 422), ("00/000", 422), ("64/000", 422), ("0/000.p/0", 422), ("0/000.p/256", 422), ("0/000.p/999", 422),
        ("0/000.p/01", 422), ("0/x000/000", 422), ("-1/000", 422), ("entries", 422), ("8/0/000", 422), ("0/000/", 422), ("0/x", 422),
    ],
)  # fmt: skip
def test_a_tile_that_is_not_there_or_none_is_refused(server, tmp_path, path, status):
    grow(server, tmp_path, "one")
    answer = server.anyone().get(f"/v1/log/tile/{path}")
    assert (answer.status_code, answer.json()["code"]) == (
        status,
        "entry_unknown" if status == 404 else "request_invalid",
    )


# ---- repair at the start -------------------------------------------------------------------------------------------

CRASH = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import handing_over
from acclimate import config
from acclimate.store import Store
settings = config.load(Path(sys.argv[2]), environ={})
store = Store.open(settings)
handing_over.grow(settings, store, Path(sys.argv[3]), "one")
handing_over.sign(settings, store)
handing_over.grow(settings, store, Path(sys.argv[3]), "two")
print("stored", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def crashed(tmp_path):
    """The settings of an installation whose process was killed between two entries' commit and their checkpoint."""
    words = [sys.executable, "-c", CRASH, str(HERE), str(tmp_path / "data"), str(tmp_path / "made")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "stored\n"), done.stderr
    return config.load(tmp_path / "data", environ={})


def sizes(store):
    with store.snapshot() as tx:
        return sorted(tx.execute(log_checkpoints.select()).scalars())


def test_a_crash_between_store_and_checkpoint_is_repaired_at_the_start(tmp_path):
    settings = crashed(tmp_path)
    store = Store.open(settings)
    assert max(sizes(store)) == 2
    with store.snapshot() as tx:
        assert tx.size() == 4
    store.close()
    with live.serve(tmp_path) as server:
        receipt = log.Receipt.parse(server.anyone().get("/v1/log/proof/3").text)
        record, signed = receipt.open(log.parse_vkey(vkey(server)))
        assert record.type == "RoundVoided" and signed.checkpoint.size == 4
        assert followed(server, tmp_path / "mirror", vkey(server)).new == 4
        assert max(sizes(server.store)) == 4


def test_an_older_checkpoint_put_back_into_the_database_is_signed_over_again_as_it_was(tmp_path):
    settings = crashed(tmp_path)
    store = Store.open(settings)
    whole = handing_over.sign(settings, store)
    with store.transaction() as tx:
        tx.execute(delete(log_checkpoints).where(log_checkpoints.c.size > 2))
    assert handing_over.sign(settings, store) == whole
    # But entries that were signed and are gone stop the start.
    with store.transaction() as tx:
        tx.execute(text("DROP TRIGGER log_entries_no_delete"))
        tx.execute(delete(log_entries).where(log_entries.c.index == 3))
    refused("log_inconsistent", handing_over.sign, settings, store)
    with store.transaction() as tx:
        tx.execute(delete(log_checkpoints).where(log_checkpoints.c.size > 2))
    # Also where the checkpoints in the database were cut with them: a copy lies beside it.
    refused("log_inconsistent", handing_over.sign, settings, store)
    store.close()
