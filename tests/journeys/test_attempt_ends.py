"""How tries of attempts come to an end that nobody commits: no room anywhere, another version's code, a round that was voided."""

from collections.abc import Iterator
from pathlib import Path

import live as staging
import pytest
from dispatching import rows, send, state_of, states, step_until, troubled
from live import Live
from sqlalchemy import select

from acclimate import assignments, event_history, retries, settling
from acclimate import stages as lifecycle
from acclimate.event_history import Event
from acclimate.schedule import PINNED
from acclimate.store import attempts, events
from acclimate_runners.runner import Status

FULL = Status("failed", reason="OSError: [Errno 28] No space left on device", code="no_space")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Live]:
    with staging.serve(tmp_path) as running:
        yield running


def history(server: Live) -> list[Event]:
    with server.store.snapshot() as tx:
        found = tx.execute(select(events).order_by(events.c.id)).all()
    return [Event(row.attempt, row.fence, row.epoch, row.event) for row in found]


def claimed(server: Live, round_: str) -> assignments.Held:
    """The round's only piece of work, claimed in epoch 1."""
    with server.store.snapshot() as tx:
        (assignment,) = assignments.outstanding(tx, tx.round(round_), holdout_inputs={})
    lifecycle.register(server.store, [assignment])
    with server.store.transaction() as tx:
        held = lifecycle.claim(tx, [assignment], epoch=1)[0]
    assert held is not None
    return held


def test_what_no_disk_can_hold_is_told_to_an_operator_and_not_tried_for_ever(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "PAUSE", 0.01)
    monkeypatch.setattr(retries, "LONG_BACKOFF", (0.01, 0.02))
    monkeypatch.setattr(retries, "TRIES_OF_DISKS", 4)
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    with troubled(server, [FULL] * 4) as running:
        step_until(running, lambda: states(server, "check") == {"blocked"})
        (row,) = rows(server, "check")
        # None of it counts against the entrant, or against what machines may fail.
        assert (row.code, row.attempts, row.fence) == ("no_space", 1, 4) and "make room" in row.reason
        assert state_of(server, submission)[0] == "checking"
        asked = server.organizer().post(f"{staged.path}/retries", {"stages": [row.key]})
        assert asked.status_code == 200, asked.text
        step_until(running, lambda: state_of(server, submission)[0] == "accepted")
    assert event_history.problems(history(server)) == []


def test_what_waits_for_a_version_is_let_go_by_that_version_alone(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    send(staged, "ada", seed=1)
    held = claimed(server, staged.round)
    right, wrong = "sha256:" + "a" * 64, "sha256:" + "b" * 64
    with server.store.transaction() as tx:
        lifecycle.block(tx, held, code="code_pinned", reason=f"{PINNED}{right}, this dispatcher runs {wrong}: start …")
    for code, state in ((wrong, "blocked"), (right, "pending")):
        with server.store.transaction() as tx:
            lifecycle.resume(tx, epoch=2, code=code, outlives=True)
        assert states(server, "check") == {state}
    assert event_history.problems(history(server)) == []


def test_a_lost_try_of_a_voided_round_is_nobodys(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    send(staged, "ada", seed=1)
    held = claimed(server, staged.round)
    with server.store.transaction() as tx:
        lifecycle.resume(tx, epoch=2, code="", outlives=True)
        assert lifecycle.adoptable(tx) == {held.assignment.attempt: held.fence}
    # As long as its stages wait it may be adopted.
    assert lifecycle.end_lost(server.store, epoch=2) == 0
    organizer = server.organizer()
    answer = organizer.post(
        f"{staged.path}/void", organizer.sign("RoundVoided", staged.round, reason="the labels are wrong")
    )
    assert answer.status_code == 200, answer.text
    assert lifecycle.end_lost(server.store, epoch=2) == 1 and lifecycle.end_lost(server.store, epoch=2) == 0
    with server.store.snapshot() as tx:
        assert lifecycle.adoptable(tx) == {}
        assert set(tx.execute(select(attempts.c.state)).scalars()) == {"cancelled"}
    assert event_history.problems(history(server)) == []
