"""A whole round on real processes and models whose holdout stays private, from the auditor's keys to the report that a stranger reads."""

import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import sites
from players import Players

from acclimate import demo_servers
from acclimate_competitions import definition, digests
from acclimate_competitions.phases import Phase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def acclimate(*words: object, fails: bool = False) -> Any:
    command = demo_servers.command(*map(str, words), "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return json.loads(done.stdout)


def keep_private(players: Players) -> None:
    toml = players.built / "competition.toml"
    text = toml.read_text("utf-8").replace('holdout_after = "public"', 'holdout_after = "private"\nauditor = "lab"')
    toml.write_text(text, "utf-8")
    players.competition = definition.load(toml)


def test_a_private_holdout_from_keys_to_report(tmp_path: Path) -> None:
    lab, public, whole, later = (tmp_path / name for name in ("lab", "public.zip", "whole.zip", "later.zip"))
    with sites.up(tmp_path) as site, site.players() as players:
        keep_private(players)
        acclimate("audit", "keygen", "--name", "lab", "--keys", lab)
        registration = ("--role", "auditor", "--invitation", site.invite("auditor"))
        acclimate("register", "--server", site.urls[0], "--name", "lab", "--keys", lab, *registration)
        players.gather()
        players.create(auditor=json.loads((lab / "auditor.json").read_text("utf-8")))
        players.seal()
        players.acknowledge()
        players.wait(Phase.OPEN)
        players.submit()
        # 1. The organizer publishes what its own machine computed from the whole bundle.
        players.finish()
        players.bundle()
        fetch = ("round", "bundle", players.id, "--server", site.urls[0], "--out")
        acclimate(*fetch, public)
        # 2. The whole one is the auditor's and the organizer's; the public one can't be reported on.
        ada = players.where / "ada"
        refusal = acclimate("round", "bundle", players.id, "--out", whole, "--whole", "--keys", ada, fails=True)
        assert refusal["error"]["code"] == "holdout_private" and not whole.exists()
        acclimate("round", "bundle", players.id, "--out", whole, "--whole", "--keys", lab)
        refusal = acclimate("audit", "report", players.id, "--bundle", public, "--keys", lab, fails=True)
        assert refusal["error"]["code"] == "bundle_invalid"
        assert acclimate("status", players.id, "--keys", lab)["waiting_for"] == ["the report of lab"]
        report = acclimate("audit", "report", players.id, "--bundle", whole, "--keys", lab)
        assert report["checks"]["failed"] == 0
        with zipfile.ZipFile(whole) as archive:
            assert report["bundle"] == digests.of_bytes(archive.read("MANIFEST"))
        # 3. A stranger's later bundle: real rows, the signed ranking, the report; the rest by name.
        acclimate(*fetch, later)
    seen = acclimate("verify", later, "--log-key", lab)
    lines = {check["name"]: check for check in seen["checks"]}
    assert seen["ok"]
    assert {lines[name]["status"] for name in ("opened rows", "published", "auditor's report", "rules")} == {"ok"}
    assert lines["opened rows"]["where"] == "24 of 24 rows"
    assert report["bundle"] in lines["auditor's report"]["where"]
    assert {lines[name]["status"] for name in ("shares", "holdout", "scores", "ranking")} == {"NOT CHECKED"}
    assert acclimate("verify", whole, "--log-key", lab)["ok"]
