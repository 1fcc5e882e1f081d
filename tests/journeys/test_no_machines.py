"""A server whose dispatcher has no machine, or that has no dispatcher: everybody who waits is told, while the close can still be moved."""

from pathlib import Path
from typing import Any

import live as staging
from dispatching import Actor, dispatcher, send, state_of, step_until
from live import Live
from waiting import until

from acclimate.dispatch import Dispatcher
from acclimate_competitions.errors import Refusal
from acclimate_runners.runner import Runner


def told(server: Live, round_: str, who: Actor) -> tuple[str, str]:
    """The problem of a round, and what the one check waits for."""
    (stage,) = who.get(f"{round_}/stages").json() or [{"reason": ""}]
    problem = who.get(round_).json()["problem"] or {"code": "infeasible", "sentence": ""}
    assert problem["code"] == "infeasible"
    return problem["sentence"], stage["reason"]


def test_everybody_is_told_that_no_check_is_begun_and_what_that_leads_to(tmp_path: Path) -> None:
    def none() -> Runner:
        raise Refusal("runner_failed", "Ray did not start at 10.1.2.3:6379")

    with staging.serve(tmp_path) as server:
        staged = staging.open_round(server, tmp_path)
        assert server.organizer().get(staged.path).json()["problem"] is None
        ada, submission = send(staged, "ada", seed=1)

        def ready() -> Any:
            answer = server.anyone().get("/readyz")
            assert answer.status_code == 200
            return answer.json()["checks"]["machines"]

        # 1. No dispatcher has ever been there.
        sentence, _ = told(server, staged.path, ada)
        assert "no dispatcher is at work" in sentence and "is forfeited" in sentence
        assert "no dispatcher" in ada.get(f"/v1/submissions/{submission}").json()["reason"] and until(
            lambda: "no dispatcher" in ready()
        )
        # 2. One leads, and has no machine: where it failed only the organizer reads.
        with Dispatcher(server.store, server.store.blobs, server.settings, none) as alone:
            step_until(alone, lambda: "no machines" in "".join(told(server, staged.path, ada)))
            whole, why = told(server, staged.path, server.organizer())
            assert "Ray did not start" in whole and "is forfeited" in whole and "Ray did not start" in why
            sentence, why = told(server, staged.path, ada)
            assert "10.1.2.3" not in sentence + why and "no machines" in why
            assert "no machines" in ada.get(f"/v1/submissions/{submission}").json()["reason"]
        # 3. Once there is one nothing is said any more.
        with dispatcher(server) as running:
            step_until(running, lambda: state_of(server, submission)[0] == "accepted")
        assert ada.get(f"/v1/submissions/{submission}").json()["reason"] == ""
        assert server.anyone().get(staged.path).json()["problem"] is None and until(lambda: ready() == "ok")
