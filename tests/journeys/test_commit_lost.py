"""The connection to PostgreSQL lost at COMMIT, before the database had it and after: whatever is done again, it is there once."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import dispatching
import live as staging
import pytest
from chaos import Play
from cut_connections import Network
from engines import Server
from live import Live
from sqlalchemy import select
from waiting import until

from acclimate import config, event_history, retries
from acclimate.dispatch import Dispatcher
from acclimate.event_history import Event
from acclimate.store import Store, attempts, events, quota_ledger, submissions
from acclimate_competitions import records
from acclimate_competitions.errors import Refusal
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import Status

When = Literal["before", "after"]
WRITES = {
    "SubmissionAccepted": "a check's outcome",
    "INTO results": "a check's end",
    "RoundClosed": "a transition",
    "ModelPrepared": "preparations",
    "HoldoutOpened": "an opening",
    "ModelEvaluated": "evaluations",
}


@pytest.fixture
def network(postgresql: Server) -> Iterator[Network]:
    made = Network(postgresql.port)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_of_what_a_dispatcher_commits(tmp_path: Path, postgresql_url: str, network: Network, when: When) -> None:
    with Play.begun(tmp_path, entrants=2, database=postgresql_url) as play:
        given = {"database": network.through(play.live.settings.database)}
        settings = dispatching.beside(play.live, tmp_path / "own", **given)
        store = Store.open(settings, clock=play.live.clock)
        factory = lambda: LocalRunner(settings.work, slots=1)  # noqa: E731
        left, codes = list(WRITES), list[str]()
        with Dispatcher(store, store.blobs, settings, factory) as running:

            def stepped() -> bool:
                if network.broken and left:
                    network.break_at(left.pop(0), when=when)
                try:
                    running.step()
                except Refusal as refusal:
                    codes.append(refusal.code)
                return play.phase == "evaluated"

            play.until(stepped)
            assert running.leading
        store.close()
        assert network.cut == len(WRITES) and set(codes) == {"database_unreachable"}
        assert play.wrong() == []
        assert [row.attempts for row in dispatching.rows(play.live, "prepare")] == [1] * 6


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("code", "event"),
    [("hung", "again"), ("runner_failed", "again"), ("no_space", "given_back"), ("blob_corrupt", "blocked")],
)
def test_of_a_try_that_failed(
    tmp_path: Path,
    postgresql_url: str,
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    event: str,
    when: When,
) -> None:
    """It counts once: what may be tried twice is tried a second time."""
    monkeypatch.setattr(retries, "BACKOFF", 0.01)
    monkeypatch.setattr(retries, "LONG_BACKOFF", (0.01, 0.02))
    monkeypatch.setattr(retries, "TRIES_OF_MACHINES", 2)
    monkeypatch.setattr(retries, "TRIES_OF_DISKS", 2)
    ended = Status("failed", reason="so it ended", code=code)
    with staging.serve(
        tmp_path, database=config.load(tmp_path, environ={}, given={"database": postgresql_url}).database
    ) as live:
        dispatching.send(staging.open_round(live, tmp_path), "ada", seed=1)
        settings = dispatching.beside(live, tmp_path / "own", database=network.through(live.settings.database))
        store, codes, told = Store.open(settings, clock=live.clock), list[str](), list[str]()
        factory = lambda: dispatching.Troubled(LocalRunner(settings.work, slots=1), [ended])  # noqa: E731
        network.break_at("so it ended", when=when)

        def stepped() -> bool:
            try:
                running.step()
            except Refusal as refusal:
                codes.append(refusal.code)
            with live.store.snapshot() as tx:
                told[:] = tx.execute(
                    select(events.c.event).where(events.c.event != "running").order_by(events.c.id)
                ).scalars()
            return len(told) >= (2 if event == "blocked" else 3)

        with Dispatcher(store, store.blobs, settings, factory) as running:
            until(stepped)
            # A step later it would be written a second time.
            stepped()
        store.close()
        with live.store.snapshot() as tx:
            rows = tx.execute(select(events).order_by(events.c.id)).all()
            ends = tx.execute(select(attempts.c.state, attempts.c.code).where(attempts.c.fence == 1)).all()
    assert network.cut == 1 and codes == ["database_unreachable"]
    assert told[:3] == ["claimed", event, *(["claimed"] if event != "blocked" else [])]
    assert told.count(event) == 1 and [tuple(row) for row in ends] == [
        ("given_back" if code == "no_space" else "failed", code)
    ]
    assert event_history.problems(Event(row.attempt, row.fence, row.epoch, row.event) for row in rows) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_of_a_submission(tmp_path: Path, postgresql_url: str, network: Network, when: When) -> None:
    url = config.load(tmp_path / "data", environ={}, given={"database": postgresql_url}).database
    with staging.serve(tmp_path, database=network.through(url)) as live:
        staged = staging.open_round(live, tmp_path)
        entrant = staging.enter(staged, live.actor("ada"))
        document = staging.manifest(staged, "ada", staging.model(staged, seed=1))
        body = staging.submission(staged, entrant, document)
        network.break_at("SubmissionCommitted", when=when)
        lost = entrant.post(f"{staged.path}/submissions", body)
        assert network.broken and (lost.status_code, lost.json()["code"]) == (503, "database_unreachable"), lost.text
        assert "Retry-After" in lost.headers
        # Sent again, as a client does, it is the same submission; and a third time.
        first, second = (entrant.post(f"{staged.path}/submissions", body) for _ in range(2))
        assert first.status_code == (201 if when == "before" else 200), first.text
        assert second.status_code == 200
        same = [{name: answer.json()[name] for name in ("submission", "index")} for answer in (first, second)]
        assert same[0] == same[1]
        assert written(live, staged.round) == (1, 1, 1)
        # One entry of the log has it, and the receipt is that entry's.
        receipt = entrant.get(f"/v1/log/proof/{same[0]['index']}")
        extra = next(line for line in receipt.text.splitlines() if line.startswith("extra "))
        assert records.parse(base64.b64decode(extra[6:])).fields == body["committed"]["fields"]


def written(live: Live, round_: str) -> tuple[int, int, int]:
    """Records, rows and debits of submissions."""
    with live.store.snapshot() as tx:
        logged = [record for _, record in tx.records(round_) if record.type == "SubmissionCommitted"]
        rows: list[Any] = tx.execute(select(submissions)).all()
        debits = tx.execute(select(quota_ledger)).all()
    return len(logged), len(rows), len(debits)
