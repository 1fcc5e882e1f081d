"""A round with real witnesses on a real server, sealed, its rehearsal handed in; and its people's key folders."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import live
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from live import CUSTODIANS, Actor, Live, Staged
from partners import Partner, log_key, partners, server
from waiting import until

from acclimate import files, keys
from acclimate.client import Client, custodian, folder
from acclimate.keys import Keys
from acclimate_competitions.errors import Refusal
from acclimate_competitions.records import format_time

NAMES = ("w1.example.org", "w2.example.org", "w3.example.org")
HOUR = timedelta(hours=1)


class RealClock(live.Clock):
    """The machine's clock, as the witnesses have it."""

    def __call__(self) -> datetime:
        return datetime.now(UTC)


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
        return self.running.stack.enter_context(folder.load_account(path).connect(path)), keys.load(path)

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
    files.write(path / "ed25519.pem", pem)
    files.write(path / "age.txt", f"{actor.identity}\n".encode())
    account = {"server": url, "id": actor.name, "role": actor.role, "token": actor.token}
    files.write_json(path / "account.json", account)


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


@contextlib.contextmanager
def yesterdays(where: Path) -> Iterator[Stage]:
    """A round of yesterday by the database's clock; witnesses and custodians live today."""
    clock = live.Clock()
    clock.now = datetime.now(UTC).replace(microsecond=0) - 24 * HOUR
    with on_stage(where, clock, opens=clock.now + HOUR, closes=clock.now + 2 * HOUR) as found:
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
