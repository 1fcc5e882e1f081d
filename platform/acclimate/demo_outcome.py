"""What the demo shows in the end: the bundle, a stranger's verdict on it, the stability report, and one document."""

import json
import time
import zipfile
from pathlib import Path
from typing import Any

from acclimate import demo_servers
from acclimate.client.connection import Client
from acclimate_competitions import digests, stability
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round
from acclimate_competitions.records import format_time

TRACKED_WITHIN = 120.0


def fetch_bundle(client: Client, state: Round, folder: Path) -> Path:
    """The round's bundle as a folder, downloaded as anybody may."""
    archive = client.bundle(state.id, folder / f"{state.id}.zip")
    bundle = folder / "bundle"
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(bundle)
    return bundle


def audit(bundle: Path, *, log_key: str) -> tuple[int, str]:
    """Exit code and last line of `acclimate verify`, run as a stranger would who got the log's key from a custodian."""
    found = demo_servers.answered("verify", str(bundle), "--log-key", log_key, ends=(0, 1))
    checks = found["checks"]
    count = {status: sum(check["status"] == status for check in checks) for status in ("ok", "FAILED", "NOT CHECKED")}
    return int(count["FAILED"] > 0), ", ".join(f"{number} {status}" for status, number in count.items())


def wait_for_tracking(client: Client, state: Round) -> None:
    """Wait until MLflow has the round.

    Raises:
        Refusal: job_failed after TRACKED_WITHIN seconds.
    """
    deadline = time.monotonic() + TRACKED_WITHIN
    while not client.round(state.id)["tracked"]:
        if time.monotonic() > deadline:
            raise Refusal(
                "job_failed",
                f"MLflow has not got the round within {TRACKED_WITHIN:.0f} s",
                hint="see server/logs/dispatch.log",
            )
        time.sleep(0.3)


def describe(state: Round, bundle: Path, *, report: Path, tracking: str, crammed: tuple[str, str]) -> dict[str, Any]:
    """The demo's document.

    Args:
        state: the published round.
        bundle: its bundle.
        report: its report.
        tracking: MLflow's tracking URI.
        crammed: who crammed, and which task.
    """
    from acclimate import verify

    ranking = json.loads((bundle / "ranking.json").read_text("utf-8"))
    tasks, policy = state.competition.tasks, state.competition.ranking
    entrants = [entry.entrant for entry in state.entries]
    table = verify.recompute_scores(bundle)
    steady = stability.of_round(
        table, tasks=tasks, policy=policy, entrants=entrants, unranked=state.unranked
    ).document()
    name, task = crammed
    crammer = next(row for row in ranking["tasks"][task] if row["entrant"] == name)
    columns = ("entrant", "rank", "rank_low", "rank_high", "score", "se", "direct_rank", "direct_score", "seeds")
    return {
        "round": state.id,
        "competition": state.competition.slug,
        "round_name": state.defined["name"],
        "ranking": [{key: row[key] for key in columns} for row in ranking["ranking"]],
        "baselines": ranking["baselines"],
        "bundle": str(bundle),
        "report": str(report),
        "tracking_uri": tracking,
        "phases": [{"phase": str(phase), "at": format_time(at)} for phase, at in state.phases],
        "agreement": steady["agreement"],
        "crammer": {
            "entrant": name,
            "task": task,
            "direct_rank": crammer["direct_rank"],
            "prepared_rank": crammer["rank"],
        },
        "ranking_digest": digests.of_json(ranking),
    }
