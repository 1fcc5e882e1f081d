"""A whole round, every actor with keys of its own, over real HTTP, real processes, real preparation; once locally, once on Ray.

Organizer, three custodians of whom one is missing, four entrants, an analyst, and a stranger who verifies.
"""

import json
import subprocess
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
import tiny
from players import ENTRANTS, Players, invitations
from waiting import WITHIN

from acclimate import backups, config, demo_servers, garbage, installation, log, restoring, tracking
from acclimate.client import Client, custodian, entrant
from acclimate.store import Store
from acclimate_competitions import definition
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase, Round

pytestmark = pytest.mark.timeout(600)


@dataclass
class Played:
    """What is left when a round was played."""

    folder: Path
    settings: config.Settings
    state: Round
    bundle: Path
    receipts: list[Path]
    log_key: str
    refused: dict[str, Refusal] = field(default_factory=dict)


def play(where: Path, runner: str) -> Played:
    data = where / "server"
    with demo_servers.Servers(data, runner=runner) as servers:
        with Players(where, [servers.url], invitations(data), servers.check) as players:
            players.gather()
            players.create()
            players.seal()
            players.acknowledge()
            players.wait(Phase.OPEN)
            client, own = players.custodians[0]
            players.refuses("early release", lambda: custodian.release(client, own, players.id, now=datetime.now(UTC)))
            players.extend(seconds=1)
            players.submit()
            players.wait(Phase.CLOSED)
            tiny.model(where / "late", seed=9)
            theirs, own_of_ada = players.people["ada"]
            late = {"title": "late", "weights_after": "publish"}
            players.refuses("late", lambda: entrant.submit(theirs, own_of_ada, players.id, where / "late", **late))
            players.wait(Phase.PREPARED)
            players.refuses("early bundle", lambda: theirs.bundle(players.id, where / "early.zip"))
            players.release()
            players.wait(Phase.EVALUATED)
            players.publish()
            bundle, state = players.bundle(), players.state()
            receipts = [
                own.folder / "receipts" / players.submitted[n].receipt for n, (_, own) in players.people.items()
            ]
            key = custodian.pinned(own, players.id).log
    return Played(where, config.load(where / "server"), state, bundle, receipts, key, players.refused)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    yield play(tmp_path_factory.mktemp("local"), "local")


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    yield play(tmp_path_factory.mktemp("ray"), "ray")


def test_the_round_is_published_with_every_entrant_in_it(local: Played) -> None:
    assert local.state.phase == Phase.PUBLISHED
    assert [entry.entrant for entry in local.state.entries] == sorted(ENTRANTS)
    assert len(local.state.released) == 2


def test_who_comes_late_or_early_is_told_so(local: Played) -> None:
    assert {name: refusal.code for name, refusal in local.refused.items()} == {
        "early release": "too_early",
        "late": "round_closed",
        "early bundle": "phase_wrong",
    }


def test_every_receipt_verifies_against_the_log_key_that_custodians_pinned(local: Played) -> None:
    for path in local.receipts:
        record = log.Receipt.parse(path.read_bytes().decode()).verify(log.parse_vkey(local.log_key))
        assert record is not None


def test_a_stranger_verifies_the_bundle(local: Played) -> None:
    command = demo_servers.command("verify", str(local.bundle), "--log-key", local.log_key, "--json")
    done = subprocess.run(command, capture_output=True, check=False)
    checks = json.loads(done.stdout)["checks"]
    assert [check for check in checks if check["status"] == "FAILED"] == []
    assert done.returncode == 0


def test_an_analyst_gets_the_ranking_from_mlflow_alone(local: Played) -> None:
    from acclimate import verify

    table = tracking.ranking(local.settings.tracking, local.state.competition.slug, local.state.defined["name"])
    ranked = table[~table["baseline"]]
    rows = verify.recompute_ranking(local.bundle).document()["ranking"]
    assert list(ranked["entrant"]) == [row["entrant"] for row in rows]
    assert list(ranked["rank"]) == [row["rank"] for row in rows]
    assert list(ranked["score"]) == pytest.approx([row["score"] for row in rows])


@pytest.mark.slow
def test_ray_gives_the_same_bytes_and_the_same_ranking(local: Played, on_ray: Played) -> None:
    def prepared(played: Played) -> dict[tuple[str, str, int], str]:
        names = {entry.submission: entry.entrant for entry in played.state.entries}
        return {(names[s], task, seed): r["prepared"] for (s, task, seed), r in played.state.prepared.items()}

    assert prepared(on_ray) == prepared(local)
    assert on_ray.state.rankings[-1][0] == local.state.rankings[-1][0]
    assert definition.load(local.folder / "competition").digest == on_ray.state.competition.digest


@pytest.mark.slow
def test_restored_on_postgresql_and_swept_it_is_the_same_round(
    local: Played, tmp_path: Path, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quiet(*_: object) -> None:
        pass

    def tally(name: str) -> list[str]:
        with zipfile.ZipFile(name) as bundle:
            return sorted(f"{item.filename} {item.CRC}" for item in bundle.infolist())

    store = Store.open(local.settings)
    found = installation.check(store, local.settings)
    wanted = backups.Wanted(keys=True)
    made = backups.write(store, local.settings, found, tmp_path / "backup", wanted=wanted, progress=quiet)
    store.close()
    assert made["lost"] == []
    monkeypatch.setenv("ACCLIMATE_DATABASE", postgresql_url)
    settings = config.load(tmp_path / "new")
    gap = restoring.restore(tmp_path / "backup", settings, progress=quiet)["gap"]
    assert (gap.entries, gap.lost, gap.adopted) == (0, [], []) and made["made"] in gap.unknown
    store = Store.open(settings)
    spare, verifier = store.blobs.put_bytes(b"nobody's"), log.parse_vkey(local.log_key)
    swept = garbage.collect(store, settings, verifier, older_than=-2.0, dry=False, progress=quiet)
    assert swept.removed >= 1 and not store.blobs.has(spare)
    for each in store.blobs.listing():
        store.blobs.check(each.digest)
    store.close()
    with demo_servers.Servers(tmp_path / "new", runner="local") as servers, Client(servers.url) as client:
        again = client.bundle(local.state.id, tmp_path / "again.zip")
        assert tally(str(again)) == tally(str(local.bundle))
        until = time.monotonic() + WITHIN
        while not client.round(local.state.id)["tracked"]:
            servers.check()
            assert time.monotonic() < until
            time.sleep(0.2)
    before, after = (
        tracking.ranking(each.tracking, local.state.competition.slug, local.state.defined["name"])
        for each in (local.settings, settings)
    )
    assert (
        before["score"].tolist() == after["score"].tolist() and before["entrant"].tolist() == after["entrant"].tolist()
    )
