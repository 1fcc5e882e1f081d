"""Custodians of a round with real witnesses, on a real server: acknowledge, lose a computer, release online and by mail; then the auditor."""

import base64
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import live
import pytest
from cosigners_made import Partner, log_key, partners, server
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from live import CUSTODIANS, Actor, Live, Staged

from acclimate import keys, verify
from acclimate.cli import main
from acclimate.client import Client, custodian, folder, organizer, pins, requests
from acclimate.keys import Keys
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time

NAMES = ("w1.example.org", "w2.example.org", "w3.example.org")
HOUR = timedelta(hours=1)


class RealClock(live.Clock):
    """The machine's clock, as the witnesses have it."""

    def __call__(self) -> datetime:
        return datetime.now(UTC)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


@dataclass
class Stage:
    """A server with three witnesses, of which a round needs two, and a round on it."""

    running: Live
    witnesses: list[Partner]
    staged: Staged
    where: Path

    def start(self, *which: int) -> None:
        for number in which:
            self.witnesses[number].start(log_key(self.running.settings, self.running.store))

    def stop(self, *which: int) -> None:
        for number in which:
            self.witnesses[number].stop()

    def person(self, name: str) -> tuple[Client, Keys]:
        """A connection and a key folder of an actor."""
        actor = self.running.actors[name]
        path = self.where / "people" / name
        if not path.exists():
            write_folder(actor, path, url=self.running.url)
        return self.running.stack.enter_context(folder.load_account(path).connect()), keys.load(path)

    def cosigned(self) -> None:
        """Wait until a quorum has cosigned the log as it is."""
        anyone = self.running.anyone()

        def there() -> bool:
            size = int(anyone.get("/v1/log/checkpoint").text.split("\n")[1])
            answer = anyone.get("/v1/log/checkpoint", params={"cosigned": "true", "round": self.staged.round})
            return answer.status_code == 200 and int(answer.text.split("\n")[1]) == size

        until(there)

    def refuses(self, code: str, call: Callable[[], object]) -> Refusal:
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.code == code, caught.value
        return caught.value


def write_folder(actor: Actor, path: Path, *, url: str) -> None:
    path.mkdir(mode=0o700, parents=True)
    pem = actor.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    folder.write(path / "ed25519.pem", pem)
    folder.write(path / "age.txt", f"{actor.identity}\n".encode())
    account = {"server": url, "id": actor.name, "role": actor.role, "token": actor.token}
    folder.write_json(path / "account.json", account)


@contextlib.contextmanager
def on_stage(where: Path, clock: live.Clock, *, opens: datetime, closes: datetime) -> Iterator[Stage]:
    """A sealed round whose rehearsal is handed in; the second custodian has a backup on a stick."""
    made = partners(where / "witnesses", *NAMES)
    with made as witnesses, server(where, witnesses, quorum=2, clock=clock) as running:
        stick = where / "stick.txt"
        spare = keys.create(where / "spare", age=True)
        shutil.move(where / "spare" / "age.txt", stick)
        people = [
            {
                "name": c.name,
                "age": str(c.identity.to_public()),
                "ed25519": c.public,
                "backup": spare.age_recipient if c.name == CUSTODIANS[1] else None,
            }
            for c in running.custodians()
        ]
        dates = {
            "opens": opens,
            "closes": closes,
            "closes_latest": closes + 48 * HOUR,
            "release_by": closes + 99 * HOUR,
        }
        texts = {name: format_time(moment) for name, moment in dates.items()}
        staged = live.create(running, where, custodians=people, **texts)
        found = Stage(running, witnesses, staged, where)
        found.start(0, 1, 2)
        live.seal(staged)
        fields, envelopes = live.make_seal(staged, dummy=True)
        answer = running.organizer().post(f"{staged.path}/rehearsal", {"fields": fields, "envelopes": envelopes})
        assert answer.status_code == 200, answer.text
        yield found


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A round of yesterday by the database's clock; witnesses and custodians live today."""
    clock = live.Clock()
    clock.now = datetime.now(UTC).replace(microsecond=0) - 24 * HOUR
    with on_stage(tmp_path, clock, opens=clock.now + HOUR, closes=clock.now + 2 * HOUR) as found:
        yield found


def acknowledged(stage: Stage) -> None:
    stage.cosigned()
    for name in CUSTODIANS:
        client, own = stage.person(name)
        custodian.acknowledge(client, own, stage.staged.round)


def closed(stage: Stage) -> None:
    """Open, and closed; nobody entered, so everything is prepared."""
    clock, staged = stage.running.clock, stage.staged
    clock.set(staged.fields["opens"])
    assert stage.running.tick() == ["RoundOpened"]
    clock.set(staged.fields["closes"], seconds=1)
    assert stage.running.tick() == ["RoundClosed", "PreparationFinished"]


@pytest.fixture
def acclimate(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    for name in list(os.environ):
        if name.startswith("ACCLIMATE_"):
            monkeypatch.delenv(name)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["acclimate", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main.run()
        out, err = capfd.readouterr()
        return end.value.code if isinstance(end.value.code, int) else 0, out, err

    return run


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
    with on_stage(tmp_path, RealClock(), opens=now, closes=now + timedelta(seconds=30)) as stage:
        round_id, running = stage.staged.round, stage.running
        acknowledged(stage)
        assert running.tick() == ["RoundOpened"]
        boss, own = stage.person("organizer")
        organizer.extend(boss, own, round_id, closes=now + timedelta(seconds=32))
        stage.cosigned()
        until(lambda: datetime.now(UTC) > now + timedelta(seconds=33))
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
    # Whom the round does not name vouches for nothing.
    strange = Partner(tmp_path / "strange", "stranger.example.org").verifier.text()
    found = {check.name: check for check in verify.verify(bundle, witnesses=[strange]).checks}
    assert (found["split view"].status, strange in found["split view"].meaning) == ("FAILED", True)


def test_without_its_witnesses_nothing_is_acknowledged_and_nothing_released(stage: Stage) -> None:
    round_id, clock = stage.staged.round, stage.running.clock
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
    assert [c.status for c in custodian.inspect(custodian.Online(client), own, round_id, now=datetime.now(UTC))][
        -1
    ] == "NOT YET"
    # One witness comes back: still not enough. With the second it goes on.
    stage.start(0)
    until(lambda: stage.witnesses[0].size("acclimate.localhost/log") == int(client.checkpoint().split("\n")[1]))
    stage.refuses("too_early", lambda: custodian.release(client, own, round_id, now=datetime.now(UTC)))
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
        assert f"the witnesses' clocks said {now:%Y-%m-%dT%H:}" in refusal.sentence or now.minute > 57
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
    assert (code, out.count("\n")) == (0, 10), out + err
    code, out, err = acclimate("custodian", "release", "--request", bare, "--keys", offline, "--out", answer)
    assert code == 0, err
    assert "it is not sent yet" in out
    assert f"acclimate custodian send {answer}" in err
    assert answer.stat().st_mode & 0o077 == 0
    # Nothing is overwritten, and a request is of one round.
    assert acclimate("custodian", "release", "--request", bare, "--keys", offline, "--out", answer)[0] == 1
    code, _, err = acclimate("custodian", "inspect", "another", "--request", bare, "--keys", offline)
    assert (code, f"is about {round_id}, asked for was another" in err) == (1, True)
    assert acclimate("custodian", "inspect", "--keys", offline)[0] == 2

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
