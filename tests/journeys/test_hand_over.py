"""The log is handed over to a new key by the operator's command, wherever that is killed."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import handing_over
import live
import pytest
import rounds_made
from databases import refused, run, settings, store
from sqlalchemy import func, select
from waiting import WITHIN

from acclimate import config, facts, hand_overs, keys, log, log_key
from acclimate.checkpoints import HANDED_OVER as COPY
from acclimate.finishing import Finisher
from acclimate.service import hand_over, identity
from acclimate.store import Store, installation, log_checkpoints
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

__all__ = ["settings", "store"]
HERE = Path(__file__).parent
REASON = handing_over.REASON


def vkey(settings):
    return log.Signer(settings.origin, keys.load_signing_key(settings.keys / "log.pem")).vkey


def notes(store):
    with store.snapshot() as tx:
        return dict(tx.execute(select(log_checkpoints.c.size, log_checkpoints.c.note)).all())


# ---- the command ---------------------------------------------------------------------------------------------------


def test_a_hand_over_hands_the_log_over_and_both_keys_vouch_for_it(settings, store, tmp_path):
    handing_over.grow(settings, store, tmp_path / "made", "before")
    handing_over.sign(settings, store)
    old = vkey(settings)
    done = hand_over.hand_over(store, settings, reason=REASON)
    new = vkey(settings)
    assert new != old and (done.hand_over.old.text(), done.hand_over.new.text(), done.hand_over.index) == (old, new, 2)
    with store.snapshot() as tx:
        assert tx.execute(select(installation.c.log)).scalar_one() == new
        entries = tx.entries(0, 10)
        (logged,) = tx.records("")
    assert hand_overs.check(logged[1], index=2) == done.hand_over and not done.resumed
    chain = hand_overs.chain(entries, log.parse_vkey(old))
    for size, note in notes(store).items():
        chain.open(note)
        assert (new in log.open_note(note, chain.keys).signed) == (size > 2)
    # What follows is the new key's, also for rounds of before, and after one more hand-over.
    handing_over.grow(settings, store, tmp_path / "made", "after")
    log.open_checkpoint(handing_over.sign(settings, store), log.parse_vkey(new))
    hand_over.hand_over(store, settings, reason="once more", again=True)
    with store.snapshot() as tx:
        entries = tx.entries(0, 10)
    assert [key.text() for key in hand_overs.chain(entries, log.parse_vkey(old)).keys] == [old, new, vkey(settings)]
    kept = sorted(path.name for path in (settings.keys / "retired").iterdir())
    assert kept == sorted(f"log-{log.parse_vkey(key).key_id.hex()}.pem" for key in (old, new))
    assert {path.stat().st_mode & 0o777 for path in settings.keys.glob("**/log*.pem")} == {0o600}


def test_the_command_says_what_it_did(tmp_path):
    settings = config.load(tmp_path / "data", environ={})
    store = Store.open(settings)
    identity.begin(settings, store)
    old = vkey(settings)
    code, out, _ = run("log", "rotate", "--data", settings.data, "--reason", REASON, "--json")
    value = json.loads(out)
    assert code == 0 and value == {"index": 0, "old": old, "new": vkey(settings), "reason": REASON, "resumed": False}
    # Who was not sure that it had ended, and types it again, makes no second one.
    code, _, errors = run("log", "rotate", "--data", settings.data, "--reason", REASON)
    assert code == 1 and value["new"] in errors and "log entry 0" in errors and "--again" in errors
    assert vkey(settings) == value["new"]
    code, out, _ = run("log", "rotate", "--data", settings.data, "--reason", "again", "--again")
    assert code == 0 and value["new"] in out and vkey(settings) in out and "register --renew" in out
    store.close()


def test_after_it_the_server_is_ready_and_its_record_is_taken_for_no_round(tmp_path):
    settings = config.load(tmp_path / "data", environ={})
    store = Store.open(settings)
    (name,) = handing_over.grow(settings, store, tmp_path / "made", "before")
    run("log", "rotate", "--data", settings.data, "--reason", REASON)
    with store.snapshot() as tx, pytest.raises(Refusal) as caught:
        tx.round("")
    assert caught.value.code == "round_unknown"
    assert facts.read(store).rounds == {"voided": 1}
    finisher = Finisher(store, lambda *_: None, still_leading=lambda: None)
    finisher.step()
    assert finisher._unread == {} and name
    store.close()
    with live.serve(tmp_path) as running:
        answer = running.anyone().get("/readyz")
        assert (answer.status_code, answer.json()["checks"]["log"]) == (200, "ok"), answer.text


def test_it_is_refused_while_a_round_is_under_way_or_a_part_runs_or_no_reason_is_given(settings, store, tmp_path):
    (name,) = handing_over.grow(settings, store, tmp_path / "made", "open", void=False)
    handing_over.sign(settings, store)
    before = vkey(settings)
    assert f"{name} is draft" in refused("phase_wrong", hand_over.hand_over, store, settings, reason=REASON).sentence
    handing_over.end(store, name)
    refusal = pytest.raises(Refusal, hand_over.hand_over, store, settings, reason=" ").value
    assert refusal.code == "record_invalid" and "reason" in refusal.sentence
    with config.lock(settings, "api"):
        code, _, errors = run(
            "log", "rotate", "--data", settings.data, "--database", settings.database, "--reason", "x"
        )
    assert code == 1 and "in use" in errors
    for odd in ("\u202eevil", "bell\x07", "\x1b[31m"):
        refusal = refused("name_invalid", hand_over.hand_over, store, settings, reason=odd, again=True)
        assert "the reason holds the character" in refusal.sentence
    assert vkey(settings) == before and not (settings.keys / log_key.NEXT).exists()
    with store.snapshot() as tx:
        assert tx.records("") == []
    hand_over.hand_over(store, settings, reason=REASON)


def test_a_round_that_never_opened_holds_up_no_hand_over_once_its_close_has_passed(settings, tmp_path):
    """Its organizer may be gone for good, and a stolen key must not stay in force for that."""
    now = [rounds_made.START]
    store = Store.open(settings, clock=lambda: now[0])
    (name,) = handing_over.grow(settings, store, tmp_path / "made", "left", void=False)
    handing_over.sign(settings, store)
    with store.snapshot() as tx:
        closes = tx.round(name).closes
    now[0] = closes - timedelta(microseconds=1)
    refusal = refused("phase_wrong", hand_over.hand_over, store, settings, reason=REASON)
    assert f"{name} is draft" in refusal.sentence and "acclimate custodian void" in refusal.hint
    now[0] = closes
    before = vkey(settings)
    hand_over.hand_over(store, settings, reason=REASON)
    assert vkey(settings) != before
    # It can still be voided, for the record.
    handing_over.end(store, name)
    store.close()


@pytest.mark.slow
def test_however_many_rounds_somebody_has_defined_a_stolen_key_is_changed(settings, store, tmp_path):
    names = handing_over.grow(settings, store, tmp_path / "made", *(f"n-{i}" for i in range(60)), void=False)
    handing_over.sign(settings, store)
    before = vkey(settings)
    refusal = refused("phase_wrong", hand_over.hand_over, store, settings, reason=REASON)
    assert "--abandon unopened" in refusal.hint
    # One by one they fit, too.
    some = hand_over.hand_over(store, settings, reason="stolen", abandon=names)
    assert all(name in some.hand_over.reason for name in names) and vkey(settings) != before
    more = handing_over.grow(settings, store, tmp_path / "more", *(f"long-{i:027d}" for i in range(400)), void=False)
    done = hand_over.hand_over(store, settings, reason="stolen", abandon=[hand_over.UNOPENED], again=True)
    every = sorted([*names, *more])
    named = [name for name in every if name in done.hand_over.reason]
    assert named == every[: len(named)] and 300 < len(named) < len(every)
    assert f"and {len(every) - len(named)} more; all {len(every)}: {digests.of_json(every)})" in done.hand_over.reason
    with store.snapshot() as tx:
        assert len(tx.entry(done.hand_over.index)) < records.MAX_BYTES


def test_after_a_theft_a_round_under_way_is_given_up_with_the_key_and_the_record_names_it(settings, store, tmp_path):
    ended, stolen, other = handing_over.grow(settings, store, tmp_path / "made", "ended", "stolen", "other", void=False)
    handing_over.end(store, ended)
    handing_over.sign(settings, store)
    before = vkey(settings)
    refusal = refused("phase_wrong", hand_over.hand_over, store, settings, reason=REASON, abandon=[stolen])
    assert f"{other} is draft" in refusal.sentence and stolen not in refusal.sentence
    refusal = refused(
        "phase_wrong", hand_over.hand_over, store, settings, reason=REASON, abandon=[stolen, other, ended]
    )
    assert f"{ended} is voided" in refusal.sentence
    refused("round_unknown", hand_over.hand_over, store, settings, reason=REASON, abandon=["nothing"])
    refusal = pytest.raises(Refusal, hand_over.hand_over, store, settings, reason=" ", abandon=[stolen, other]).value
    assert refusal.code == "record_invalid" and "reason" in refusal.sentence
    assert vkey(settings) == before
    done = hand_over.hand_over(store, settings, reason="stolen", abandon=[other, stolen])
    assert done.hand_over.reason == f"stolen (abandoned: {', '.join(sorted((stolen, other)))})"
    # The round can still be voided.
    handing_over.end(store, stolen)


def test_nothing_of_a_log_that_was_changed_is_handed_over(settings, store, tmp_path):
    handing_over.grow(settings, store, tmp_path / "made", "one")
    handing_over.sign(settings, store)
    forged = log.sign_checkpoint(identity.load(settings, store).signer, 2, b"\x07" * 32)
    with store.transaction() as tx:
        tx.execute(log_checkpoints.update().where(log_checkpoints.c.size == 2).values(note=forged))
    refused("log_inconsistent", hand_over.hand_over, store, settings, reason=REASON)


def test_a_record_of_this_kind_comes_from_the_command_alone(settings, store, tmp_path):
    handing_over.grow(settings, store, tmp_path / "made", "one")
    hand_over.hand_over(store, settings, reason=REASON)
    signer = identity.load(settings, store).signer
    request = hand_overs.request(signer, log.Signer(settings.origin, rounds_made.key("thief")), reason="mine")
    for call in ("append", "append_once"):
        with pytest.raises(Refusal) as caught, store.transaction() as tx:
            getattr(tx, call)(request)
        assert caught.value.code == "record_invalid"


def test_an_api_that_runs_beside_signs_nothing_more(tmp_path, caplog):
    with live.serve(tmp_path) as server:
        before = server.anyone().get("/v1/log/checkpoint").text
        stranger = server.actor("ada")
        hand_over.hand_over(server.store, server.settings, reason=REASON)
        answer = server.stranger("bea").post("/v1/accounts", server.stranger("bea").registration())
        assert answer.status_code == 500 and answer.json()["code"] == "other_installation"
        (line,) = (one for one in caplog.records if answer.json()["request_id"] in one.getMessage())
        assert "start it again" in line.__dict__["facts"]["hint"] and stranger.name == "ada" and before
        server.store.close()
    with live.serve(tmp_path) as server:
        note = server.anyone().get("/v1/log/checkpoint").text
        log.open_checkpoint(note, log.parse_vkey(vkey(server.settings)))


# ---- killed, put back ----------------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from acclimate import config
from acclimate.service import hand_over
from acclimate.store import Store
import handing_over
data, most = Path(sys.argv[2]), int(sys.argv[3])
# What changes a file: each is a moment in which the process may be killed, before it happens.
EVENTS = {"os.link", "os.rename", "os.remove", "os.mkdir", "os.chmod"}

def handed_over(number):
    left, settings = [number], config.load(data, environ={})
    def hook(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in EVENTS or writes) and str(arguments[0]).startswith(str(data)):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    store = Store.open(settings)
    committed = store.transaction
    def transaction():
        import contextlib
        @contextlib.contextmanager
        def around():
            with committed() as tx:
                yield tx
            hook("os.link", (str(data),))  # after each commit, too
        return around()
    store.transaction = transaction
    sys.addaudithook(hook)
    hand_over.hand_over(store, settings, reason=handing_over.REASON, again=True)

for number in range(most):
    child = os.fork()
    if child == 0:
        handed_over(number)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        print("done", os.waitstatus_to_exitcode(status), flush=True)
        break
    print("killed", flush=True)
    if sys.stdin.readline() != "go on\\n":
        break
"""


def in_both_places(settings, store):
    """Whether the copy that the old key reads too is of the newest hand-over, with the blobs and in the data folder."""
    with store.snapshot() as tx:
        note = hand_over.logged(tx)[-1][1].encode()
    return store.blobs.note(COPY) == note == (settings.data / COPY).read_bytes()


@pytest.mark.parametrize("by", ["the command", "the API"])
def test_what_was_killed_before_its_copies_is_finished_and_a_database_put_back_is_noticed(tmp_path, by):
    """The copy by both keys is the only one that the old key reads: without it the old key would sign a second history."""
    settings = config.load(tmp_path / "data", environ={})
    store = Store.open(settings)
    handing_over.grow(settings, store, tmp_path / "made", "one")
    handing_over.sign(settings, store)
    store.close()
    file = Path(settings.database.removeprefix("sqlite:///"))
    backup = file.read_bytes()
    store = Store.open(settings)
    hand_over.hand_over(store, settings, reason=REASON)
    # As it was killed: the key's files are in place, and no copy was written.
    copies = list(settings.data.rglob(COPY))
    assert len(copies) == 2
    for path in copies:
        path.unlink()
    if by == "the command":
        assert hand_over.hand_over(store, settings, reason="not this one").resumed
        assert (
            "less than a day ago" in refused("conflict", hand_over.hand_over, store, settings, reason=REASON).sentence
        )
    else:
        handing_over.sign(settings, store)
    assert in_both_places(settings, store)
    # From here on the copy of the newest checkpoint is by the new key alone.
    handing_over.grow(settings, store, tmp_path / "made", "two")
    handing_over.sign(settings, store)
    store.close()
    for path in file.parent.glob(f"{file.name}*"):
        path.unlink()
    file.write_bytes(backup)
    store = Store.open(settings)
    (settings.keys / "log.pem").unlink()
    (retired,) = (settings.keys / "retired").iterdir()
    retired.rename(settings.keys / "log.pem")
    assert "were signed" in refused("log_inconsistent", handing_over.sign, settings, store).sentence
    store.close()


def test_killed_at_any_moment_it_is_not_begun_or_finished_by_who_comes_next(tmp_path):
    settings = config.load(tmp_path / "data", environ={})
    store = Store.open(settings)
    handing_over.grow(settings, store, tmp_path / "made", "one")
    handing_over.sign(settings, store)
    arguments = [sys.executable, "-W", "ignore", "-c", KILLED, str(HERE), str(settings.data), "60"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    moments, logged, first = 0, 0, vkey(settings)
    resumed, finished = 0, 0
    with subprocess.Popen(arguments, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, **pipes) as killer:
        assert killer.stdin is not None and killer.stdout is not None
        while killer.stdout.readline() == "killed\n":
            moments += 1
            with store.snapshot() as tx:
                found = tx.records("")
                named = tx.execute(select(installation.c.log)).scalar_one()
            assert len(found) in (logged, logged + 1)
            # The database's key is there, as log.pem or as its successor.
            held = [path for path in settings.keys.glob("log*.pem")]
            assert named in {log.Signer(settings.origin, keys.load_signing_key(path)).vkey for path in held}
            done = len(found) > logged
            logged = len(found)
            if done and moments % 2:
                # The command, called again as it was, finishes; where nothing was left to do, it says so.
                try:
                    assert hand_over.hand_over(store, settings, reason="not this one").resumed
                    resumed += 1
                except Refusal as refusal:
                    assert refusal.code == "conflict" and "that one is done" in refusal.hint
                assert in_both_places(settings, store)
            # The API starts, finishes it in the command's place, and signs by the key that the database names.
            finished += done and vkey(settings) != named
            handing_over.grow(settings, store, tmp_path / "made", f"n{moments}")
            log.open_checkpoint(handing_over.sign(settings, store), log.parse_vkey(named))
            assert vkey(settings) == named and (not found or in_both_places(settings, store))
            killer.stdin.write("go on\n")
            killer.stdin.flush()
        killer.stdin.close()
        assert killer.wait(WITHIN) == 0
    with store.snapshot() as tx:
        entries = tx.entries(0, 10_000)
        assert {record["reason"] for _, record in tx.records("")} == {REASON}
    chain = hand_overs.chain(entries, log.parse_vkey(first))
    assert logged >= 3 and moments > logged + 2 and resumed and finished and chain.last.text() == vkey(settings)
    for note in notes(store).values():
        chain.open(note)
    assert list(settings.keys.glob("log*.pem")) == [settings.keys / "log.pem"]
    store.close()


def test_a_database_put_back_to_before_the_hand_over_is_noticed(tmp_path):
    settings = config.load(tmp_path / "data", environ={})
    store = Store.open(settings)
    handing_over.grow(settings, store, tmp_path / "made", "one")
    handing_over.sign(settings, store)
    store.close()
    file = Path(settings.database.removeprefix("sqlite:///"))
    backup = file.read_bytes()
    store = Store.open(settings)
    old = vkey(settings)
    hand_over.hand_over(store, settings, reason=REASON)
    handing_over.grow(settings, store, tmp_path / "made", "two")
    handing_over.sign(settings, store)  # the copy of the checkpoint is by the new key alone from here on
    store.close()
    for path in file.parent.glob(f"{file.name}*"):
        path.unlink()
    file.write_bytes(backup)
    store = Store.open(settings)
    # The key is the later one's; and with the old one put back, the log is too short.
    refused("other_installation", identity.begin, settings, store)
    (settings.keys / "log.pem").unlink()
    (retired,) = (settings.keys / "retired").iterdir()
    retired.rename(settings.keys / "log.pem")
    assert vkey(settings) == old
    assert "were signed" in refused("log_inconsistent", handing_over.sign, settings, store).sentence
    # Either of its copies is enough: the later one is by a key that this database doesn't know.
    (settings.data / "CHECKPOINT-ROTATED").unlink()
    assert "3 entries" in refused("log_inconsistent", handing_over.sign, settings, store).sentence
    store.close()
    code, out, _ = run("db", "accept-loss", "--data", settings.data)
    assert code == 0 and "3 entries were signed" in out
    store = Store.open(settings)
    with store.snapshot() as tx:
        assert tx.execute(select(func.max(log_checkpoints.c.size))).scalar() == 2
    handing_over.sign(settings, store)
    store.close()
