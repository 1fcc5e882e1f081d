"""Custodians of a round with real witnesses, on a real server: acknowledge, lose a computer, release online and by mail; then the auditor."""

import base64
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import live
import pytest
from live import CUSTODIANS
from partners import Partner
from witnessed_rounds import HOUR, RealClock, Stage, acknowledged, closed, on_stage, until, yesterdays

from acclimate import keys, verify
from acclimate.client import custodian, organizer, pins, requests
from acclimate_competitions.records import format_time, parse_time


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with yesterdays(tmp_path) as found:
        yield found


def test_a_lost_computer_and_a_lost_custodian_are_survived(stage: Stage) -> None:
    """The first custodian releases online, the second's computer is lost, the third can't be reached any more."""
    round_id = stage.staged.round
    said: list[str] = []
    stage.cosigned()
    client, own = stage.person(CUSTODIANS[0])
    custodian.acknowledge(client, own, round_id, say=said.append)
    assert "witnesses: 2 of w1.example.org, w2.example.org, w3.example.org must see the log before you release" in said
    acknowledged(stage)
    closed(stage)
    stage.cosigned()
    now = datetime.now(UTC)
    seen: list[custodian.Check] = []
    assert custodian.release(client, own, round_id, now=now, show=seen.append).share == 1
    assert {check.status for check in seen} == {"ok"}
    # One share alone opens nothing.
    assert stage.running.tick() == []
    assert stage.running.phase(round_id) == "prepared"

    # A new computer, a copy of the folder that lacks the age identity, and the stick.
    client, old = stage.person(CUSTODIANS[1])
    new = stage.where / "new computer"
    shutil.copytree(old.folder, new)
    (new / "age.txt").unlink()
    bare = keys.load(new)
    refusal = stage.refuses("file_unreadable", lambda: custodian.release(client, bare, round_id, now=now))
    assert "age.txt does not exist" in refusal.sentence
    restored = replace(bare, age_identity=keys.load_age_identity(stage.where / "stick.txt"))
    assert custodian.release(client, restored, round_id, now=now).share == 2
    # The third never came back.
    assert "HoldoutOpened" in stage.running.tick()


@pytest.mark.slow
def test_the_auditor_of_a_round_with_witnesses_finds_no_gap_in_history_and_time(tmp_path: Path) -> None:
    """In real time: the witnesses must see the extension before the close, and the close before the release."""
    now = datetime.now(UTC)
    with on_stage(tmp_path, RealClock(), opens=now, closes=now + timedelta(seconds=90)) as stage:
        round_id, running = stage.staged.round, stage.running
        acknowledged(stage)
        assert running.tick() == ["RoundOpened"]
        boss, own = stage.person("organizer")
        organizer.extend(boss, own, round_id, closes=now + timedelta(seconds=92))
        stage.cosigned()
        until(lambda: datetime.now(UTC) > now + timedelta(seconds=93))
        assert running.tick() == ["RoundClosed", "PreparationFinished"]
        stage.cosigned()
        for name in CUSTODIANS[:2]:
            client, keys_of = stage.person(name)
            custodian.release(client, keys_of, round_id, now=datetime.now(UTC))
        while running.tick():
            pass
        organizer.publish(boss, own, round_id)
        stage.cosigned()
        bundle = boss.bundle(round_id, tmp_path / "bundle.zip")
    known = [partner.verifier.text() for partner in stage.witnesses]
    report = {check.name: check for check in verify.verify(bundle, witnesses=known[:1]).checks}
    assert [check.name for check in report.values() if check.status == "FAILED"] == []
    for name in ("split view", "time"):
        assert report[name].status == "ok", report[name]
    assert report["time"].where == "1 records, each cosigned by 2 witnesses"
    # One of them is enough to know whose log it is: at least two of three have cosigned.
    both = {check.name: check for check in verify.verify(bundle, witnesses=known).checks}
    assert both["whose log"].status == "ok"
    # Whom the round does not name vouches for nothing, and is no evidence against it.
    strange = Partner(tmp_path / "strange", "stranger.example.org").verifier.text()
    found = {check.name: check for check in verify.verify(bundle, witnesses=[strange]).checks}
    assert (found["split view"].status, found["whose witnesses"].status) == ("ok", "NOT CHECKED")


def test_without_its_witnesses_nothing_is_acknowledged_and_nothing_released(stage: Stage) -> None:
    round_id, clock = stage.staged.round, stage.running.clock
    names = [witness.verifier.name for witness in stage.witnesses]
    stage.cosigned()
    stage.stop(0, 1, 2)
    # What they cosigned before they went is enough to acknowledge on.
    for name in CUSTODIANS:
        client, own = stage.person(name)
        custodian.acknowledge(client, own, round_id)
    clock.set(stage.staged.fields["opens"])
    stage.running.tick()
    clock.set(stage.staged.fields["closes"], seconds=1)
    assert stage.running.tick() == ["RoundClosed", "PreparationFinished"]
    # The server has closed and prepared the round; no quorum has seen it.
    client, own = stage.person(CUSTODIANS[0])
    refusal = stage.refuses("too_early", lambda: custodian.release(client, own, round_id, now=datetime.now(UTC)))
    assert "no RoundClosed" in refusal.sentence
    # It is said why the server's page says otherwise, and who is missing.
    sizes = [text.split("\n")[1] for text in (client.checkpoint(cosigned=True, round_id=round_id), client.checkpoint())]
    assert sizes[0] != sizes[1] and f"{sizes[0]} of the {sizes[1]} log entries" in refusal.sentence
    assert all(name in refusal.sentence.rpartition("not yet the newest")[2] for name in names)
    assert "operator" in refusal.hint
    assert [c.status for c in custodian.inspect(custodian.Online(client), own, round_id, now=datetime.now(UTC))][
        -1
    ] == "NOT YET"
    # One witness comes back: still not enough. With the second it goes on.
    stage.start(0)
    # Not when the witness has signed, but when the server shows it.
    until(lambda: f"— {names[0]} " in client.checkpoint())
    refusal = stage.refuses("too_early", lambda: custodian.release(client, own, round_id, now=datetime.now(UTC)))
    missing = refusal.sentence.rpartition("not yet the newest")[2]
    assert names[0] not in missing and names[1] in missing and names[2] in missing
    stage.start(2)
    stage.cosigned()
    assert custodian.release(client, own, round_id, now=datetime.now(UTC)).share == 1


def test_a_server_whose_clock_runs_ahead_is_held_by_the_witnesses_clocks(tmp_path: Path) -> None:
    """The custodian's own clock is wrong, too: only the witnesses are left."""
    clock = live.Clock()
    clock.now = now = datetime.now(UTC).replace(microsecond=0)
    with on_stage(tmp_path, clock, opens=now + HOUR, closes=now + 24 * HOUR) as stage:
        acknowledged(stage)
        closed(stage)
        stage.cosigned()
        client, own = stage.person(CUSTODIANS[0])
        wrong = now + 25 * HOUR
        refusal = stage.refuses("too_early", lambda: custodian.release(client, own, stage.staged.round, now=wrong))
        (said,) = re.findall(r"the witnesses' clocks said (\S+Z)", refusal.sentence)
        assert now <= parse_time(said) <= datetime.now(UTC)
        assert f"this machine's clock says {format_time(wrong)}" in refusal.sentence


def test_a_release_by_mail_needs_no_network_where_the_keys_are(
    stage: Stage, acclimate: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_id, where = stage.staged.round, stage.where
    acknowledged(stage)
    boss, boss_keys = stage.person("organizer")
    # Before everything is prepared there is nothing to ask for.
    stage.refuses("too_early", lambda: requests.make(boss, round_id, where / "early"))
    assert not (where / "early").exists()
    closed(stage)
    stage.cosigned()
    monkeypatch.setattr("acclimate.cli.custodian.clock", lambda: datetime.now(UTC))
    request, bare = where / "r.request", where / "anyone's.request"
    code, out, err = acclimate("round", "request", round_id, "--out", request, "--keys", boss_keys.folder)
    assert code == 0, err
    assert "log entries" in out
    code, _, err = acclimate("round", "request", round_id, "--out", bare, "--server", stage.running.url)
    assert (code, "without envelopes" in err) == (0, True)

    # The machine with the keys has no network: the server that it knows can't be reached.
    _, own = stage.person(CUSTODIANS[2])
    offline, online = where / "offline", where / "online"
    shutil.copytree(own.folder, offline)
    account = json.loads((offline / "account.json").read_text())
    (offline / "account.json").write_text(json.dumps(account | {"server": "http://127.0.0.1:9"}))
    answer = where / "answer.json"
    code, out, err = acclimate("custodian", "inspect", "--request", bare, "--keys", offline)
    assert (code, out.count("\n")) == (0, 11), out + err
    code, out, err = acclimate("custodian", "release", "--request", bare, "--keys", offline, "--out", answer)
    assert code == 0, err
    assert "it is not sent yet" in out
    assert f"acclimate custodian send {answer}" in err
    assert answer.stat().st_mode & 0o077 == 0
    # Typed twice it is the same answer. Nothing else is overwritten, and a request is of one round.
    before = answer.read_bytes()
    again = acclimate("custodian", "release", "--request", bare, "--keys", offline, "--out", answer)
    assert again[:2] == (0, out) and answer.read_bytes() == before
    other = where / "other.json"
    value = json.loads(before)
    other.write_text(json.dumps(value | {"record": value["record"] | {"by": "ed25519:another"}}))
    for path, said in ((other, "the release of share 3"), (bare, "exists already")):
        kept = path.read_bytes()
        code, _, err = acclimate("custodian", "release", "--request", bare, "--keys", offline, "--out", path)
        assert (code, said in err, "name another file" in err, path.read_bytes()) == (1, True, True, kept), err
    code, _, err = acclimate("custodian", "inspect", "another", "--request", bare, "--keys", offline)
    assert (code, f"is about {round_id}, asked for was another" in err) == (1, True)
    assert acclimate("custodian", "inspect", "--keys", offline)[0] == 2

    # Without --out it is said how else, where the server can't be reached, and where no account says which it is.
    for gone in (False, True):
        if gone:
            (offline / "account.json").unlink()
        code, out, err = acclimate("custodian", "release", "--request", bare, "--keys", offline)
        assert (code, "add --out ANSWER" in err, "released share" in out) == (1, True, False), err
    assert "ok  " not in err  # nothing was checked for nothing

    # The machine with the network has no keys.
    online.mkdir(mode=0o700)
    shutil.copy2(own.folder / "account.json", online)
    code, out, err = acclimate("custodian", "send", answer, "--keys", online)
    assert (code, f"released share 3 of {round_id}" in out) == (0, True), err
    assert acclimate("custodian", "send", answer, "--keys", online)[1] == out
    # Another custodian's account can't send it.
    made = requests.read_answer(answer)
    other, _ = stage.person(CUSTODIANS[0])
    stage.refuses("signature_invalid", lambda: custodian.send(other, made))
    # Online with the file, of which the share comes from the kept envelope: the second share opens the round.
    _, first = stage.person(CUSTODIANS[0])
    assert pins.kept_envelope(first, round_id) is not None
    stage.cosigned()
    code, out, err = acclimate("custodian", "release", "--request", request, "--keys", first.folder)
    assert (code, "released share 1" in out) == (0, True), err
    assert "HoldoutOpened" in stage.running.tick()


def test_a_false_share_is_refused_by_the_server_and_named(stage: Stage) -> None:
    acknowledged(stage)
    closed(stage)
    stage.cosigned()
    client, own = stage.person(CUSTODIANS[0])
    made, _ = custodian.answer(custodian.Online(client), own, stage.staged.round, now=datetime.now(UTC))
    document = json.loads(made.document)
    document["share"] = base64.b64encode(bytes(32)).decode()
    false = replace(made, document=json.dumps(document, separators=(",", ":"), sort_keys=True).encode())
    refusal = stage.refuses("share_false", lambda: custodian.send(client, false))
    assert "the document has sha256:" in refusal.sentence
    assert custodian.send(client, made).share == 1
