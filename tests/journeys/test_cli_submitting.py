"""Submissions at the command line, over real HTTP: checked before they are sent, killed on the way, waited for, too late."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

from cli_world import FILLER, World, build_model, cheating, in_json, kinds, new_round, person, world
from commands import Run, done, refused
from waiting import WITHIN

from acclimate import client as actors
from acclimate.service import identity
from acclimate.service import submit as submitting

__all__ = ["world"]


def test_a_submission_is_checked_before_it_is_sent(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "dora")
    done(acclimate("enter", round_id, "--keys", me, "--conflict", "works with the organizer"))
    empty = build_model(tmp_path / "empty")
    (empty / "model.safetensors").write_bytes(b"")
    pickled = build_model(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    garbled = build_model(tmp_path / "garbled")
    (garbled / "model.safetensors").write_bytes(b"\x80\x04 a pickle by another name")
    for model in (empty, pickled, garbled, tmp_path):
        ran = acclimate("submit", model, "--round", round_id, "--keys", me, "--json")
        refused(ran, "model_invalid")
        assert "model.safetensors" in ran.err
    refused(acclimate("submit", tmp_path / "none", "--round", round_id, "--keys", me, "--json"), "file_unreadable")
    model = build_model(tmp_path / "fine")
    options = ("--round", round_id, "--keys", me, "--json")
    refused(acclimate("submit", model, *options, "--weights-after", "sell"), "manifest_invalid")
    for words in (
        ("--title", "e\u0301"), ("--title", "a\u202eb"), ("--title", "two\nlines"), ("--title", "x" * 300),
        ("--family", "a\u202eb"), ("--base", "\u0007"), ("--released", "yesterday"),
        ("--released", "9999-99-99"), ("--released", "2026-02-30"), ("--released", "٢٠٢٦-٠١-٠١"),
    ):  # fmt: skip
        ran = acclimate("submit", model, *options, *words)
        refused(ran, "manifest_invalid")
        assert ran.json["error"]["problems"] and f"{words[0][2:]} " in ran.err and words[0] in ran.err
    assert "SubmissionCommitted" not in kinds(world, round_id)
    assert not (me / "submissions").exists()
    stranger = person(acclimate, world, "eve")
    ran = acclimate("submit", model, "--round", round_id, "--keys", stranger, "--json")
    refused(ran, "entrant_unknown")
    assert "acclimate enter" in ran.err
    assert not (stranger / "submissions").exists()
    # Other parties' keys submit nothing, and what to take instead is said.
    for name, role in (("organizer", "organizer"), ("custodian-a", "custodian")):
        ran = acclimate("submit", model, "--round", round_id, "--keys", person(acclimate, world, name, role), "--json")
        assert f"registered as {role}" in refused(ran, "role_missing")
        assert "acclimate register" in ran.err


def test_who_enters_too_early_or_too_late_is_told_when(acclimate: Run, world: World) -> None:
    me, command = person(acclimate, world, "gil"), "enter"
    for phase in ("draft", "sealed"):
        round_id = new_round(acclimate, world, until=phase)
        ran = acclimate(command, round_id, "--keys", me, "--json")
        assert "is not open yet" in refused(ran, "phase_wrong")
        assert f"acclimate status {round_id} --until open" in ran.err
    round_id = new_round(acclimate, world)
    assert world.tick(round_id, hours=1) == ["RoundClosed", "PreparationFinished"]
    ran = acclimate(command, round_id, "--keys", me, "--json")
    assert "takes entrants only while it is open" in refused(ran, "round_closed")
    assert f"acclimate round list --server {world.url}\n" in ran.err and "EntrantRegistered" not in kinds(
        world, round_id
    )


def test_who_enters_as_the_round_opens_is_told_to_do_it_again(acclimate: Run, world: World, tmp_path: Path) -> None:
    """The server refused; once the client asks for the round's phase, it is open."""
    round_id = new_round(acclimate, world, until="sealed")
    opened = {f"/rounds/{round_id}$": in_json(phase="open")}
    with cheating(world, opened) as server:
        me = server.folder(person(acclimate, world, "gil"), tmp_path / "gil")
        ran = acclimate("enter", round_id, "--keys", me, "--json")
    assert "opened just now" in refused(ran, "phase_wrong") and "the same command again" in ran.err


def test_submissions_are_listed_by_their_log_entries(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "hal")
    done(acclimate("enter", round_id, "--keys", me))
    sent = []
    for seed in (21, 22, 23):
        model = build_model(tmp_path / str(seed), seed=seed)
        sent.append(done(acclimate("submit", model, "--round", round_id, "--keys", me, "--no-wait", "--json")).json)
        world.accept_checked()
    # What the server says anew is written into a submission's file, which makes it the youngest.
    first = next((me / "submissions").glob(f"{round_id}-*{sent[0]['commitment'][7:15]}*"))
    os.utime(first, ns=(time.time_ns(), time.time_ns()))
    listed = done(acclimate("submission", "status", "--keys", me, "--json")).json
    assert [item["commitment"] for item in listed] == [item["commitment"] for item in sent]


def test_an_upload_that_was_killed_goes_on_as_the_same_submission(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "fay")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", filler=FILLER)
    command = ("submit", model, "--round", round_id, "--title", "Tiny", "--weights-after", "publish", "--keys", me)
    world.proxy.stall_after = FILLER // 2
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "acclimate", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert world.proxy.stalled.wait(WITHIN)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=WITHIN)
    finally:
        world.proxy.stall_after = None
    kept = [json.loads(path.read_text()) for path in (me / "submissions").iterdir()]
    assert [item["state"] for item in kept] == ["uploading"]
    assert (me / "receipts" / f"{round_id}-{kept[0]['commitment'][7:15]}.committed.tlog-proof").exists()

    # The same command again: it goes on, and waits for the check.
    ran = done(acclimate(*command, "--no-wait", "--json"))
    assert "going on with submission" in ran.err
    value = ran.json
    assert (value["commitment"], value["state"]) == (kept[0]["commitment"], "checking")
    assert "nonce" not in value
    assert kinds(world, round_id).count("SubmissionCommitted") == 1
    world.accept_checked()
    value = done(acclimate(*command, "--json")).json
    assert value["state"] == "accepted"
    receipt = Path(value["receipt"])
    assert receipt.name == f"{round_id}-{value['commitment'][7:15]}.tlog-proof"

    # The receipt stands on its own.
    with actors.Client(world.url) as client:
        vkey = client.server()["log"]
    shown = done(acclimate("receipt", "verify", receipt, "--log-key", vkey, "--json")).json
    assert shown["index"] == value["accepted"]
    assert shown["record"]["type"] == "SubmissionAccepted"
    assert shown["record"]["commitment"] == value["commitment"]

    # Once accepted, the same command changes nothing.
    assert done(acclimate(*command, "--json")).json == value
    listed = done(acclimate("submission", "status", "--keys", me, "--json")).json
    assert [item["state"] for item in listed] == ["accepted"]
    shown = done(acclimate("submission", "status", "--keys", me)).out
    assert shown.splitlines()[1].split()[0] == listed[0]["name"] != listed[0]["submission"]
    assert kinds(world, round_id).count("SubmissionCommitted") == 1


def test_of_two_submissions_at_once_of_one_model_there_is_one(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "fred")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", seed=8, filler=FILLER // 8)
    command = ("submit", model, "--round", round_id, "--no-wait", "--keys", me)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "acclimate", *map(str, command)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in running:
        _, err = process.communicate(timeout=WITHIN)
        assert process.returncode == 0, err
    (kept,) = (json.loads(path.read_text()) for path in (me / "submissions").glob("*.json"))
    assert kept["state"] == "checking"
    assert kinds(world, round_id).count("SubmissionCommitted") == 1


def test_who_sends_the_files_after_another_did_is_told_and_goes_on(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "finn")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", seed=9)
    command = ("submit", model, "--round", round_id, "--no-wait")
    done(acclimate(*command, "--keys", me))
    # As the answer was before the other one's files came.
    missing = [done(acclimate(*command, "--keys", me, "--json")).json["manifest"]["files"][0]["sha256"]]
    with cheating(world, {"/submissions$": in_json(state="uploading", missing=missing)}) as cheat:
        ran = acclimate(*command, "--keys", cheat.folder(me, tmp_path / "late"), "--json")
    assert done(ran).json["state"] == "checking" and "another command has sent the files" in ran.err


def test_waiting_ends_when_the_server_has_decided(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "gwen")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", seed=1)
    stop = threading.Event()

    def dispatcher() -> None:
        while not stop.wait(0.05):
            world.accept_checked()

    thread = threading.Thread(target=dispatcher)
    thread.start()
    try:
        ran = done(acclimate("submit", model, "--round", round_id, "--keys", me))
    finally:
        stop.set()
        thread.join()
    assert ran.out.startswith("accepted: ")
    short = ran.out.split()[1].rstrip(",")
    done(acclimate("submission", "withdraw", short, "--keys", me))
    assert kinds(world, round_id)[-1] == "SubmissionWithdrawn"
    # Withdrawn is withdrawn: nothing is submitted, which is no success; anew needs to be said.
    ran = acclimate("submit", model, "--round", round_id, "--keys", me)
    assert ran.code == 1 and ran.out.startswith("withdrawn: ")
    assert "nothing was sent now" in ran.err and "--again" in ran.err
    value = done(acclimate("submit", model, "--round", round_id, "--keys", me, "--again", "--no-wait", "--json")).json
    assert value["state"] == "checking"
    assert value["commitment"][7:15] not in short


def test_nothing_is_uploaded_without_a_logged_commitment_nor_accepted_without_a_receipt(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "ines")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", seed=5)
    wrong = [None, "7", True]
    with cheating(world, {"/submissions$": lambda content: in_json(index=wrong.pop())(content)}) as cheat:
        mine = cheat.folder(me, tmp_path / "committed")
        while wrong:
            ran = acclimate("submit", model, "--round", round_id, "--keys", mine, "--json")
            assert "answers, but not as an Acclimate server" in refused(ran, "server_unreachable")
        assert set(cheat.written) == {f"/v1/rounds/{round_id}/submissions"}
    # The same with the acceptance, which the commitment's receipt does not stand in for.
    with cheating(world, {"^/v1/submissions/[^/]*$": in_json(state="accepted", accepted_index=None)}) as cheat:
        mine = cheat.folder(mine, tmp_path / "accepted")
        for command in (("submit", model, "--round", round_id), ("submission", "status")):
            ran = acclimate(*command, "--keys", mine, "--json")
            if command[0] == "submit":
                assert "is accepted, and names no log entry" in refused(ran, "proof_invalid")
        assert any(path.endswith("/complete") for path in cheat.written)


def test_the_organizer_submits_for_a_baseline(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = world.root / "people" / "organizer"
    done(acclimate("enter", round_id, "--baseline", "untrained", "--keys", me))
    model = build_model(tmp_path / "untrained", seed=2)
    options = ("--round", round_id, "--baseline", "untrained", "--no-wait", "--keys", me, "--json")
    value = done(acclimate("submit", model, *options)).json
    assert (value["entrant"], value["state"]) == ("untrained", "checking")
    world.accept_checked()
    assert done(acclimate("submit", model, *options)).json["state"] == "accepted"


def test_nothing_is_taken_after_the_close(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "hal")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", seed=3)
    world.now += timedelta(hours=1)
    ran = acclimate("submit", model, "--round", round_id, "--keys", me, "--json")
    sentence = refused(ran, "round_closed")
    assert "closed" in sentence
    assert "received" in sentence
    # Nothing of it is in the log, nor will be: it is not shown as if it were still to be sent.
    assert done(acclimate("submission", "status", "--round", round_id, "--keys", me, "--json")).json == []


def test_what_a_void_round_does_not_take_is_not_still_to_be_sent(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "kim")
    options = ("--round", round_id, "--keys", me, "--json")
    done(acclimate("enter", round_id, "--keys", me))
    sent, late = (build_model(tmp_path / name, seed=seed) for name, seed in (("sent", 7), ("late", 8)))
    name = done(acclimate("submit", sent, *options, "--no-wait")).json["name"]
    # As a command leaves it that was killed before it heard the answer.
    kept = me / "submissions" / f"{name}.json"
    lost = {"state": "unsent", "submission": "", "committed": None}
    kept.write_text(json.dumps(json.loads(kept.read_text()) | lost))
    done(acclimate("round", "void", round_id, "--reason", "a test", "--keys", world.root / "people" / "organizer"))
    refused(acclimate("submit", late, *options), "phase_wrong")
    # What was logged is answered as it stands, so that its file is not lost with the other's.
    ran = acclimate("submit", sent, *options, "--no-wait")
    (mine,) = done(acclimate("submission", "status", *options)).json
    assert (mine["name"], mine["state"]) == (name, "forfeited"), ran.err
    assert [path.name for path in (me / "submissions").glob("*.json")] == [kept.name]


def test_what_can_be_withdrawn_no_more_or_was_never_sent_is_said(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "jill")
    done(acclimate("enter", round_id, "--keys", me))
    model = build_model(tmp_path / "model", seed=4)
    options = ("--round", round_id, "--keys", me, "--no-wait", "--json")
    sent = done(acclimate("submit", model, *options)).json
    # As a command leaves it that was killed before it sent anything.
    kept = me / "submissions" / f"{sent['name']}.json"
    other = "sha256:" + "5" * 64
    unsent = {
        **json.loads(kept.read_text()),
        "commitment": other,
        "state": "unsent",
        "submission": "",
        "committed": None,
    }
    (me / "submissions" / f"{round_id}-55555555.json").write_text(json.dumps(unsent))
    ran = acclimate("submission", "withdraw", "5555", "--keys", me, "--json")
    refused(ran, "submission_unknown")
    assert "nothing to withdraw" in ran.err
    bad = done(acclimate("submit", build_model(tmp_path / "bad", seed=6), *options)).json
    own = identity.load(world.settings, world.store)
    submitting.refuse(world.store, bad["submission"], "its tokenizer does not load", identity=own)
    ran = acclimate("submission", "withdraw", bad["name"], "--keys", me, "--json")
    assert bad["name"] in refused(ran, "conflict") and "counts for nothing already" in ran.err
    world.tick(round_id, hours=1)
    ran = acclimate("submission", "withdraw", sent["name"], "--keys", me, "--json")
    assert sent["name"] in refused(ran, "round_closed") and "hint: " in ran.err


def test_hints_about_rounds_are_commands_that_can_be_copied(acclimate: Run, world: World) -> None:
    """Also for whoever has set no server: what the server says names its address."""
    round_id = new_round(acclimate, world)
    me = person(acclimate, world, "ivy")
    ran = acclimate("status", "no-such-round", "--keys", me, "--json")
    refused(ran, "round_unknown")
    assert f"acclimate round list --server {world.url}`" in ran.err
    assert done(acclimate("round", "list", "--server", world.url, "--json")).json
    # Who waits for a ranking is told how to; the round's organizer, what is to be done.
    ran = acclimate("ranking", round_id, "--keys", me, "--json")
    refused(ran, "phase_wrong")
    assert f"acclimate status {round_id} --until published --server {world.url}" in ran.err
    ran = acclimate("ranking", round_id, "--keys", person(acclimate, world, "organizer"), "--json")
    refused(ran, "phase_wrong")
    assert "custodians release first" in ran.err
