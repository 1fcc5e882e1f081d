"""A whole round with a second operator, by commands alone: its machine is killed at work and goes on, and a stranger sees what it found."""

import json
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sites
from dispatching import holding
from players import Players
from waiting import WITHIN

from acclimate import demo_servers
from acclimate.client import custodian
from acclimate_competitions import definition
from acclimate_competitions.phases import Phase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AUDITS = 5


def acclimate(*words: object, fails: bool = False) -> Any:
    command = demo_servers.command(*map(str, words), "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stderr[-3000:]
    return json.loads(done.stdout)


def ask_for_audits(players: Players) -> None:
    toml = players.built / "competition.toml"
    asked = f'audits = {AUDITS}\nauditor = "lab"\naudit_tolerance = 0.05'
    toml.write_text(toml.read_text("utf-8").replace("audits = 0", asked), "utf-8")
    players.competition = definition.load(toml)


def killed_at_work(players: Players, lab: Path) -> None:
    """Start the audit's run and kill it while a child of it prepares."""
    command = demo_servers.command("audit", "run", players.id, "--keys", str(lab))
    with (
        holding(str(lab / "audits")) as held,
        subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process,
    ):
        until = time.monotonic() + WITHIN
        while not held:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        until = time.monotonic() + WITHIN
        # No child outlives it.
        while any(alive(pid) for pid in held):
            assert time.monotonic() < until
            time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_second_operator_audits_a_round_from_keys_to_report(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    with sites.up(tmp_path, "--runner", "local") as site, site.players() as players:
        ask_for_audits(players)
        # 1. Keys and a draw that nobody else knows; the organizer gets its digest.
        acclimate("audit", "keygen", "--name", "lab", "--keys", lab)
        registration = ("--role", "auditor", "--invitation", site.invite("auditor"))
        acclimate("register", "--server", site.urls[0], "--name", "lab", "--keys", lab, *registration)
        players.gather()
        players.create(auditor=json.loads((lab / "auditor.json").read_text("utf-8")))
        players.seal()
        players.acknowledge()
        players.wait(Phase.OPEN)
        players.submit()
        assert (
            "draw comes once it is prepared"
            in acclimate("audit", "draw", players.id, "--keys", lab, fails=True)["error"]["sentence"]
        )
        players.wait(Phase.PREPARED)
        # 2. Nobody releases before; the run is killed at work, and goes on.
        client, own = players.custodians[0]
        players.refuses("early", lambda: custodian.release(client, own, players.id, now=datetime.now(UTC)))
        assert "has not drawn" in players.refused["early"].sentence
        killed_at_work(players, lab)
        assert acclimate("audit", "status", players.id, "--keys", lab)["drawn"]
        state = acclimate("audit", "run", players.id, "--keys", lab)
        assert state["missing"] == "" and len(state["jobs"]) == AUDITS
        assert {(job["agrees"], job["reason"]) for job in state["jobs"]} == {(True, "the same bytes")}
        assert not list((lab / "audits").rglob("*.safetensors")) and not any((lab / "audits").iterdir())
        # 3. The round goes on; the auditor reports.
        players.finish()
        bundle = players.bundle()
        report = acclimate("audit", "report", players.id, "--bundle", bundle, "--keys", lab)
        assert report["checks"]["failed"] == 0
        final = tmp_path / "final.zip"
        acclimate("round", "bundle", players.id, "--out", final, "--server", site.urls[0])
        # 4. A stranger sees both, and makes an entrant's work again from the files it published.
        again = ("--rerun", "ada", "--models", players.where / "models" / "ada")
        seen = acclimate("verify", final, "--log-key", lab, *again)
        lines = {check["name"]: check for check in seen["checks"]}
        assert f"{AUDITS} of 24 preparations drawn and made again by lab" in lines["honest preparation"]["where"]
        assert lines["re-run"]["status"] == "ok" and lines["auditor's report"]["status"] == "ok"
        assert seen["ok"]
