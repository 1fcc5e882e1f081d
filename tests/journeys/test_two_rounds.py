"""Two rounds of a competition on a real server with real preparation: standing entries, an anchor, a revision, and what a stranger and an analyst see."""

import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
import tiny
from players import PATIENCE, WINDOW, Players, invitations

import acclimate
from acclimate import config, demo_servers, verify
from acclimate.client import custodian, entrant, next_rounds, organizer, revising, standing
from acclimate.client.entrant import Sending
from acclimate_competitions import definition, digests, tables
from acclimate_competitions.phases import Phase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def anchored(players: Players, where: Path) -> str:
    """The built competition with an anchor: the digest of its model."""
    tiny.model(where / "models" / "untrained", seed=77)
    model = digests.of_json({p.name: digests.of_file(p) for p in (where / "models" / "untrained").iterdir()})
    toml = players.built / "competition.toml"
    text = toml.read_text("utf-8").replace('baselines = ["majority"]', 'baselines = ["majority", "untrained"]')
    text += f'\n[[anchors]]\nname = "untrained"\nmodel = "{model}"\n\n[[anchors]]\nname = "majority"\n'
    toml.write_text(text, "utf-8")
    players.competition = definition.load(players.built)
    return model


def with_new_holdout(players: Players, to: Path) -> Path:
    """The same splits with a holdout of marbles that were in none of them."""
    shutil.copytree(players.built / "splits", to / "splits")
    shutil.copy(players.built / "tokenizer.json", to / "tokenizer.json")
    known = {text for path in (to / "splits").rglob("*.parquet") for text in tables.read(path)["input"].to_pylist()}
    draw, new = Random(11), iter(range(10**6))
    for task, answers in tiny.TASKS.items():
        rows: dict[str, list[str]] = {"example": [], "input": [], "target": [], "cluster": []}
        while len(rows["input"]) < 12:
            marble = [draw.randrange(8) for _ in range(3)]
            text = " ".join(f"m{m}" for m in marble) + f" m{next(new) % 8}"
            if text in known:
                continue
            known.add(text)
            number = len(rows["input"])
            rows["example"].append(f"second-{task}-{number}")
            rows["input"].append(text)
            rows["target"].append(answers[sum(marble) % len(answers)])
            rows["cluster"].append(f"second-{number // 2}")
        tables.write(pa.table(rows), to / "splits" / task / "holdout.parquet")
    return to


def played(players: Players) -> None:
    """From an open round that everybody has sent a model to, to its published ranking."""
    players.wait(Phase.CLOSED)
    players.finish()


def tracked(players: Players, round_id: str) -> None:
    until = time.monotonic() + PATIENCE
    while not players.boss.round(round_id)["tracked"]:
        assert time.monotonic() < until
        time.sleep(0.2)


def test_two_rounds_are_tied_by_standing_entries_and_an_anchor(tmp_path: Path) -> None:
    data = tmp_path / "server"
    with (
        demo_servers.Servers(data, runner="local") as servers,
        Players(tmp_path, [servers.url], invitations(data), servers.check) as players,
    ):
        model = anchored(players, tmp_path)
        players.gather()
        players.create(window=4 * WINDOW)
        players.seal()
        players.acknowledge()
        players.wait(Phase.OPEN)
        folders = {"untrained": tmp_path / "models" / "untrained"}
        (row,) = standing.enter_anchors(
            players.boss, players.boss_keys, players.id, models=folders, sending=Sending(None)
        )
        assert (row["model"], row["from"], row["state"]) == (model, None, "accepted")
        players.submit()
        played(players)
        first, first_ranking = players.id, players.boss.ranking(players.id)
        tracked(players, first)

        # The second round: a new holdout, all else as it was. Ada and bela stand; dora comes with another model.
        folder = with_new_holdout(players, tmp_path / "second")
        found = next_rounds.look(players.boss, players.boss_keys, "marbles", folder, name="second")
        assert [d.key for d in found.differences] == [] and [seen.by for seen in found.seen] == ["kept digests"]
        now = datetime.now(UTC)
        dates = {"opens": now, "closes": now + 4 * WINDOW * players.pace, "closes_latest": now + timedelta(hours=2)}
        players.id = next_rounds.next_round(players.boss, players.boss_keys, found, folder, name="second", dates=dates)
        organizer.seal_round(players.boss, players.boss_keys, players.id, folder)
        players.acknowledge()
        players.wait(Phase.OPEN)
        shutil.rmtree(tmp_path / "models" / "untrained")
        (row,) = standing.enter_anchors(players.boss, players.boss_keys, players.id, models={}, sending=Sending(None))
        assert (row["from"], row["state"]) == (first, "accepted")
        for name in ("ada", "bela"):
            theirs, own = players.people[name]
            entrant.enter_round(theirs, own, players.id)
            mine = standing.submit_standing(theirs, own, players.id, first, sending=Sending(None))
            assert mine.state == "accepted"
        theirs, own = players.people["dora"]
        entrant.enter_round(theirs, own, players.id)
        tiny.model(tmp_path / "models" / "dora-2", seed=40)
        other = entrant.submit(
            theirs, own, players.id, tmp_path / "models" / "dora-2", title="Dora's new one", weights_after="publish"
        )
        assert other.state == "accepted"
        played(players)
        second = players.id
        tracked(players, second)

        # A stranger: the same models by the log, the anchor that of the definition.
        bundle = players.boss.bundle(second, tmp_path / "second.zip")
        key = custodian.pinned(players.custodians[0][1], second).log
        checks = {check.name: check for check in verify.verify(bundle, log_key=key).checks}
        assert [check for check in checks.values() if check.status == "FAILED"] == []
        assert checks["standing"].where == "3 standing entries; 1 of 1 anchors with a model"

        # An analyst, from MLflow alone.
        uri = config.load(data).tracking
        rounds = acclimate.load_rounds(uri, "marbles")
        models = rounds.entries.pivot_table(index="entrant", columns="round", values="model", aggfunc="first")
        same = models["tiny"] == models["second"]
        assert dict(same[models.notna().all(axis=1)]) == {"ada": True, "bela": True, "dora": False, "untrained": True}
        assert set(rounds.drift()["anchor"]) == {"untrained", "majority"}
        agreement = acclimate.stability(items=rounds, common=True)
        assert agreement["entrants"] == 2

        # An objection to the first round is upheld: a new version, and both stay.
        names = tables.read(players.built / "splits" / "size" / "holdout.parquet")["example"].to_pylist()
        correction = {"void": {"size": names[:3]}}
        revised = revising.revise(
            players.boss, players.boss_keys, first, correction, reason="three marbles were unreadable"
        )
        assert revised.index is not None
        assert players.boss.ranking(first, version=1) == first_ranking
        assert digests.of_json(players.boss.ranking(first)) == revised.digest
        again = players.boss.bundle(first, tmp_path / "first.zip")
        checks = {check.name: check for check in verify.verify(again, log_key=key).checks}
        assert [check for check in checks.values() if check.status == "FAILED"] == []
        assert checks["versions"].where.startswith("2 versions; in force is version 2")
        until = time.monotonic() + PATIENCE
        while (tags := acclimate.load_rounds(uri, "marbles", ["tiny"]).tracked["tiny"].tags)[
            "acclimate.version"
        ] != "2":
            servers.check()
            assert time.monotonic() < until
            time.sleep(1)
        assert tags["acclimate.ranking_digest"] == revised.digest
        shown = acclimate.load_rounds(uri, "marbles", ["tiny"]).ranking.set_index("entrant")["score"]
        for row in revised.ranking["ranking"]:
            assert shown[row["entrant"]] == pytest.approx(row["score"])
