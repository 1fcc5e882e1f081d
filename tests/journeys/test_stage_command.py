"""`acclimate stage` and the routes beneath it: what people see of a round's work, and how an organizer has blocked work tried again."""

from collections.abc import Iterator
from pathlib import Path

import live as staging
import pytest
from commands import Run, acclimate, done, refused
from dispatching import dispatcher, folder_of, history, rows, send, state_of, states, step_until, troubled
from live import Live

from acclimate import event_history, retries
from acclimate_runners.runner import Status

__all__ = ["acclimate"]
OURS = Status("failed", reason="exited with status 1: KeyError: 'tint'", code="job_failed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with staging.serve(tmp_path) as running:
        yield running


def test_blocked_work_is_explained_and_tried_again_by_its_organizer_alone(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acclimate: Run
) -> None:
    monkeypatch.setattr(retries, "BACKOFF", 0.01)
    staged = staging.open_round(server, tmp_path)
    ada, submission = send(staged, "ada", seed=1)
    with troubled(server, [OURS] * 3) as running:
        step_until(running, lambda: states(server, "check") == {"blocked"})
    (row,) = rows(server, "check")
    # 1. Everybody sees that there is something; until the close only its entrant that it is its own, and the organizer what kind it is.
    boss = folder_of(server.organizer(), server, tmp_path / "boss")
    entrant = folder_of(ada, server, tmp_path / "ada")
    anyone = done(acclimate("stage", "list", staged.round, "--server", server.url, "--json")).json
    assert [(s["key"], s["state"], s["entrant"], s["reason"]) for s in anyone] == [(row.key, "blocked", None, "")]
    (own,) = done(acclimate("stage", "list", staged.round, "--keys", entrant, "--json")).json
    assert own["entrant"] == "ada" and "KeyError" not in own["reason"]
    (whole,) = done(acclimate("stage", "list", staged.round, "--keys", boss, "--json")).json
    assert (whole["reason"], whole["code"], whole["attempts"], whole["tries"]) == ("", "job_failed", 3, 3)
    lines = done(acclimate("stage", "list", staged.round, "--keys", boss)).out.splitlines()
    assert lines[0].split()[:4] == ["key", "entrant", "stage", "state"] and "3 of 3" in lines[1]
    shown = done(acclimate("status", staged.round, "--keys", boss)).out
    assert "1 blocked" in shown and lines[1] in shown
    # 2. Its history, by the beginning of its key.
    short = row.key.removeprefix("sha256:")[:12]
    told = done(acclimate("stage", "why", staged.round, short, "--keys", boss, "--json")).json
    assert [event["event"] for event in told["history"]] == ["claimed", "again"] * 2 + ["claimed", "blocked"]
    assert [event["fence"] for event in told["history"]] == [1, 1, 2, 2, 3, 3]
    shown = done(acclimate("stage", "why", staged.round, short, "--keys", boss)).out
    assert "try 3  blocked: job_failed" in shown and "acclimate stage retry" in shown
    assert "KeyError" not in done(acclimate("stage", "why", staged.round, short, "--server", server.url)).out
    # 3. Nobody else has it tried again, and nothing that isn't blocked is.
    refused(acclimate("stage", "retry", staged.round, "--keys", entrant, "--json"), "role_missing")
    refused(acclimate("stage", "why", staged.round, "ffff", "--keys", boss, "--json"), "not_found")
    assert acclimate("stage", "retry", staged.round, "--keys", boss, "--json").json == {"stages": [row.key]}
    # Asked twice is asked once.
    assert acclimate("stage", "retry", staged.round, short, "--keys", boss, "--json").json == {"stages": [row.key]}
    with dispatcher(server) as again:
        step_until(again, lambda: state_of(server, submission)[0] == "accepted")
    (row,) = rows(server, "check")
    assert (row.state, row.attempts, row.fence) == ("committed", 1, 4)
    refused(acclimate("stage", "retry", staged.round, "--keys", boss, "--json"), "phase_wrong")
    refused(acclimate("stage", "retry", staged.round, short, "--keys", boss, "--json"), "phase_wrong")
    assert event_history.problems(history(server)) == []
    assert [event.event for event in history(server)][6:] in (
        ["released", "claimed", "running", "committed"],
        ["released", "claimed", "committed"],
    )
    done_now = done(acclimate("stage", "list", staged.round, "--keys", boss)).out
    assert "nothing is left to do; done: 1, which --all shows" in done_now


def test_what_waits_has_a_place_and_what_ran_a_pace(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    for number in range(1, 6):
        send(staged, f"e{number}", seed=1)
    organizer = server.organizer()

    def listed() -> list[dict]:
        return organizer.get(f"{staged.path}/stages").json()

    with dispatcher(server) as running:
        step_until(running, lambda: len(listed()) == 5)
        waiting = [stage for stage in listed() if stage["state"] == "pending"]
        # Two slots: three wait, in the order in which they came.
        assert [stage["place"] for stage in waiting] == [1, 2, 3]
        assert all(stage["expected"] is None for stage in listed())
        step_until(running, lambda: "committed" in states(server, "check"))
        left = [stage for stage in listed() if stage["state"] == "pending"]
        # By the database's clock, which stands still here: an attempt took no time.
        assert all(stage["expected"] is not None for stage in left)
        step_until(running, lambda: states(server, "check") == {"committed"})
    assert all(stage["place"] is None and stage["attempts"] == 1 for stage in listed())
    assert event_history.problems(history(server)) == []
