"""The people of a whole round on tiny models, as separate clients with keys of their own, one method a phase.

They know addresses and invitations, nothing of the inside: whatever serves them may be killed, started again or moved between two calls.
"""

import json
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny

from acclimate import demo_servers, keys
from acclimate.client import connection, custodian, entrant, folder, organizer
from acclimate_competitions import definition, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round

ENTRANTS = {"ada": 1, "bela": 2, "celik-team": 3, "dora": 4}
WINDOW = timedelta(seconds=15)
"""How long a round is open on a machine with nothing else to do."""
GATHERED = 6.0
"""Seconds in which such a machine has gathered everybody. One that takes longer has its rounds open longer by as many times."""
PATIENCE = 300.0

Invite = Callable[[str], str]
"""Role -> the code of an invitation."""


@dataclass
class Players:
    """Everybody who takes part.

    Attributes:
        where: folder for keys, models and what is downloaded.
        urls: the API's addresses; who has an account takes them in turn.
        invite: makes invitations.
        alive: raises where a server has ended that should not have.
        compute: lines to put into the definition's [compute].
    """

    where: Path
    urls: list[str]
    invite: Invite
    alive: Callable[[], None] = lambda: None
    compute: str = ""
    connections: ExitStack = field(default_factory=ExitStack)
    id: str = ""
    pace: float = 1.0
    refused: dict[str, Refusal] = field(default_factory=dict)
    submitted: dict[str, entrant.Submission] = field(default_factory=dict)

    def __enter__(self) -> "Players":
        built = self.where / "competition"
        tiny.competition(built)
        toml = built / "competition.toml"
        # All commit before the close; the checks may take their time on a slow machine.
        text = toml.read_text("utf-8").replace('grace = "0s"', 'grace = "10m"')
        toml.write_text(text.replace("[compute]\n", f"[compute]\n{self.compute}"), "utf-8")
        self.built, self.competition = built, definition.load(toml)
        return self

    def __exit__(self, *_: object) -> None:
        self.connections.close()

    def gather(self) -> "Players":
        """Everybody registers; it is seen how fast this machine is."""
        began = time.monotonic()
        self.boss, self.boss_keys = self._actor("organizer", "organizer")
        self.custodians = [self._actor(f"custodian-{letter}", "custodian") for letter in "abc"]
        self.people = {name: self._actor(name, "entrant") for name in ENTRANTS}
        for name, seed in ENTRANTS.items():
            tiny.model(self.where / "models" / name, seed=seed)
        self.pace = max(1.0, (time.monotonic() - began) / GATHERED)
        return self

    def create(self, *, window: timedelta = WINDOW, **given: Any) -> None:
        now = datetime.now(UTC)
        self.id = organizer.create_round(
            self.boss,
            self.boss_keys,
            self.built,
            custodians=[
                {"name": f"custodian-{letter}", "age": own.age_recipient, "ed25519": own.public, "backup": None}
                for letter, (_, own) in zip("abc", self.custodians, strict=True)
            ],
            opens=now,
            closes=now + window * self.pace,
            closes_latest=now + timedelta(hours=2),
            release_by=now + timedelta(days=1),
            **given,
        )

    def seal(self) -> None:
        organizer.seal_round(self.boss, self.boss_keys, self.id, self.built)

    def acknowledge(self) -> None:
        for client, own in self.custodians:
            custodian.acknowledge(client, own, self.id)

    def extend(self, **by: float) -> None:
        closes = self._state().closes + timedelta(**by)
        organizer.extend(self.boss, self.boss_keys, self.id, closes=closes)

    def submit(self) -> None:
        """All entrants at once; where little time is left, the organizer has seen that this machine is slow."""
        needs = WINDOW * 0.5 * self.pace
        left = self._state().closes - datetime.now(UTC)
        if left < needs:
            self.extend(seconds=(2 * needs - left).total_seconds())

        def enter_and_submit(name: str) -> entrant.Submission:
            theirs, own = self.people[name]
            entrant.enter_round(theirs, own, self.id)
            about = {"title": f"Model of {name} 🦊", "weights_after": "publish"}
            return entrant.submit(theirs, own, self.id, self.where / "models" / name, **about)

        with ThreadPoolExecutor(len(self.people)) as pool:
            found = list(pool.map(enter_and_submit, self.people))
        self.submitted = dict(zip(self.people, found, strict=True))
        assert [s.state for s in found] == ["accepted"] * len(self.people)

    def release(self) -> None:
        """The second custodian is missing: two of three are enough."""
        for client, own in (self.custodians[0], self.custodians[2]):
            custodian.release(client, own, self.id, now=datetime.now(UTC))

    def publish(self) -> None:
        organizer.publish(self.boss, self.boss_keys, self.id)

    def bundle(self) -> Path:
        """What a stranger downloads, once MLflow has the results, too."""
        with connection.Client(self.urls[0]) as anybody:
            until = time.monotonic() + PATIENCE
            while not anybody.round(self.id)["tracked"]:
                self.alive()
                assert time.monotonic() < until
                time.sleep(0.2)
            return anybody.bundle(self.id, self.where / "bundle.zip")

    def play(self) -> str:
        """The whole round; the digest of its ranking."""
        self.send()
        return self.finish()

    def send(self, *, window: timedelta = WINDOW) -> None:
        """From nothing to a round that everybody has sent a model to, and that is closed."""
        self.gather()
        self.create(window=window)
        self.seal()
        self.acknowledge()
        self.wait(Phase.OPEN)
        self.submit()
        self.wait(Phase.CLOSED)

    def finish(self) -> str:
        """From a closed round to the published ranking; its digest."""
        self.wait(Phase.PREPARED)
        self.release()
        self.wait(Phase.EVALUATED)
        self.publish()
        return self.ranking()

    def state(self) -> Round:
        self.alive()
        return self._state()

    def _state(self) -> Round:
        return rounds.fold(self.boss.records(self.id), self.competition)

    def ranking(self) -> str:
        """Digest of the published ranking."""
        return self.state().rankings[-1][0]

    def wait(self, phase: Phase) -> None:
        until = time.monotonic() + PATIENCE
        while self.state().phase != phase:
            found = self.boss.stages(self.id)
            assert [s for s in found if s["state"] == "blocked"] == []
            assert time.monotonic() < until, (self.state().phase, [s for s in found if s["state"] != "committed"])
            time.sleep(0.2)

    def refuses(self, name: str, call: Callable[[], Any]) -> None:
        with pytest.raises(Refusal) as caught:
            call()
        self.refused[name] = caught.value

    def _actor(self, name: str, role: str) -> tuple[connection.Client, keys.Keys]:
        own = keys.create(self.where / name, age=role == "custodian")
        code = None if role == "entrant" else self.invite(role)
        url = self.urls[len(list(self.where.glob("*/account.json"))) % len(self.urls)]
        with connection.Client(url) as visitor:
            account = folder.register_account(visitor, own, name=name, role=role, invitation=code)
        # A server that a test starts again takes its time to be there on a slow machine.
        client = connection.Client(account.server, token=account.token, key=lambda: own.ed25519, patience=PATIENCE)
        return self.connections.enter_context(client), own


def invitations(data: Path) -> Callable[[str], str]:
    """Makes invitations as the operator of a data folder does, by role."""

    def invite(role: str) -> str:
        command = demo_servers.command("invite", "--data", str(data), "--role", role, "--json")
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["invitation"]

    return invite
