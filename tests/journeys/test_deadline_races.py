"""Submissions, an extension and the tick that closes, all at once: the database's clock decides, and nobody is told otherwise than the log."""

import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import live as staging
import pytest
import tiny
from live import START, Actor, Clock, Live, Staged
from waiting import WITHIN

from acclimate.service import clockwork, submit
from acclimate_competitions import definition, records, rounds
from acclimate_competitions.phases import Round
from acclimate_competitions.records import format_time, parse_time

POSTERS, TICKERS = 6, 2
CLOSES = START + timedelta(days=1)


class Running(Clock):
    """A clock that stands where it was set, until it is let go and goes on by itself."""

    def __init__(self) -> None:
        self._set, self._at = START, float("inf")

    @property
    def now(self) -> datetime:  # type: ignore[override]
        return self._set + timedelta(seconds=max(0.0, time.monotonic() - self._at))

    @now.setter
    def now(self, moment: datetime) -> None:
        self._set, self._at = moment, float("inf")

    def go(self) -> None:
        """Whoever says so first lets it go."""
        self._at = min(self._at, time.monotonic())


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    text = tiny.DEFINITION.replace("total = 5, per_day = 5", "total = 1000, per_day = 1000")
    monkeypatch.setattr(tiny, "DEFINITION", text.replace('grace = "0s"', 'grace = "1s"'))
    given = {"database": request.getfixturevalue("postgresql_url")} if request.param == "postgresql" else {}
    with staging.serve(tmp_path, clock=Running(), **given) as running:
        yield running


def prepared(server: Live, folder: Path) -> tuple[Staged, list[Actor]]:
    """An open round with its entrants."""
    staged = staging.open_round(server, folder, grace=1)
    return staged, [staging.enter(staged, server.actor(f"entrant-{number}")) for number in range(POSTERS)]


def until(clock: Clock, moment: datetime) -> None:
    while clock() < moment:
        time.sleep(0.0005)


class Race:
    """Threads that begin together; what went wrong in one of them is raised at the end."""

    def __init__(self) -> None:
        self.over, self.errors, self._threads = threading.Event(), list[BaseException](), list[threading.Thread]()

    def add(self, act, *arguments: object) -> None:
        def run() -> None:
            try:
                act(*arguments)
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run))

    def run(self, server: Live, staged: Staged) -> None:
        """Run all, and tick until the round is closed."""

        def tick() -> None:
            while not self.over.is_set():
                clockwork.tick(server.store, server.settings)

        tickers = [threading.Thread(target=tick) for _ in range(TICKERS)]
        for thread in (*self._threads, *tickers):
            thread.start()
        for thread in self._threads:
            thread.join()
        end = time.monotonic() + WITHIN
        while server.phase(staged.round) == "open":
            assert time.monotonic() < end and not self.errors
            time.sleep(0.02)
        self.over.set()
        for thread in tickers:
            thread.join()
        assert self.errors == []


def told(staged: Staged) -> tuple[list[tuple[int, records.Record]], Round]:
    """The round's records, and what a stranger makes of them."""
    with staged.live.store.snapshot() as tx:
        log = tx.records(staged.round)
    return log, rounds.fold(log, definition.load(staged.folder))


def test_submissions_that_race_the_close_are_before_it_or_refused(served: Live, tmp_path: Path) -> None:
    staged, entrants = prepared(served, tmp_path)
    clock = served.clock
    assert isinstance(clock, Running)
    manifests = {e.name: staging.manifest(staged, e.name, staging.model(staged, seed=1)) for e in entrants}
    answers: dict[str, httpx.Response] = {}
    latest = CLOSES + timedelta(seconds=0.5)

    def post(entrant: Actor, place: int) -> None:
        for number in range(1000):
            nonce = bytes([place]) * 16 + number.to_bytes(16, "big")
            body = staging.submission(staged, entrant, manifests[entrant.name], nonce=nonce)
            answer = entrant.post(f"{staged.path}/submissions", body)
            answers[body["committed"]["fields"]["commitment"]] = answer
            # However slow this machine is, one is in time.
            clock.go()
            if not answer.is_success and served.clock() >= latest:
                return

    def extend() -> None:
        until(served.clock, CLOSES - timedelta(milliseconds=15))
        organizer = served.organizer()
        record = organizer.sign("ClosingExtended", staged.round, closes=format_time(latest))
        answers["extension"] = organizer.post(f"{staged.path}/extension", record)

    race = Race()
    for place, entrant in enumerate(entrants):
        race.add(post, entrant, place)
    race.add(extend)
    served.clock.set(format_time(CLOSES), seconds=-0.3)
    race.run(served, staged)
    # 1. What was answered with success is in the log, and nothing else is; every other answer says that it was too late.
    log, state = told(staged)
    extension = answers.pop("extension")
    logged = {record["commitment"]: record for _, record in log if record.type == "SubmissionCommitted"}
    assert {key for key, answer in answers.items() if answer.is_success} == set(logged) and logged
    late = [answer for key, answer in answers.items() if key not in logged] + [extension] * (not extension.is_success)
    assert late and all((a.status_code, a.json()["code"]) == (409, "round_closed") for a in late)
    # 2. The close in force is the one that the extension made, if it came in time.
    extended = [record for _, record in log if record.type == "ClosingExtended"]
    assert len(extended) == extension.is_success and all(record.at < CLOSES for record in extended)
    closes = latest if extended else CLOSES
    assert all(record.at < closes for record in logged.values())
    # 3. The round is closed once, after all of them; a second was left for the committed ones, who sent nothing.
    (closed,) = [(index, record) for index, record in log if record.type == "RoundClosed"]
    assert all(index < closed[0] for index, record in log if record.type in ("SubmissionCommitted", "ClosingExtended"))
    assert closed[1].at >= closes + timedelta(seconds=1) and closed[1]["forfeited"]["count"] == len(logged)
    assert state.closes == closes


def test_checks_that_race_the_end_of_the_grace_are_accepted_before_it_or_forfeited(
    served: Live, tmp_path: Path
) -> None:
    staged, entrants = prepared(served, tmp_path)
    made = {}
    for place, entrant in enumerate(entrants):
        for number in range(4):
            files = staging.model(staged, seed=1)
            document = staging.manifest(staged, entrant.name, files)
            body = staging.submission(staged, entrant, document, nonce=bytes([place, number]) * 16)
            sent = entrant.post(f"{staged.path}/submissions", body).json()
            staging.send_files(entrant, {**sent, "missing": []}, files)
            assert entrant.post(f"/v1/submissions/{sent['submission']}/complete").json()["state"] == "checking"
            made[sent["submission"]] = (entrant, number)
    ends = CLOSES + timedelta(seconds=1)
    states: dict[str, str] = {}
    clock = served.clock
    assert isinstance(clock, Running)
    all_have_one = threading.Barrier(POSTERS, action=clock.go)

    def check(mine: list[str]) -> None:
        # From before the end to after it, so that some make it and some don't; of each entrant one does, however slow this machine is.
        for number, submission in enumerate(mine):
            if number:
                until(clock, ends + timedelta(milliseconds=[-6, 0, 40][number - 1]))
            states[submission] = submit.accept(served.store, submission)["state"]
            if number == 0:
                all_have_one.wait(WITHIN)

    race = Race()
    for entrant in entrants:
        race.add(check, [s for s, (owner, _) in made.items() if owner is entrant])
    served.clock.set(format_time(ends), seconds=-0.3)
    race.run(served, staged)
    log, state = told(staged)
    accepted = {index: record for index, record in log if record.type == "SubmissionAccepted"}
    (closed,) = [(index, record) for index, record in log if record.type == "RoundClosed"]
    assert set(states.values()) == {"accepted", "forfeited"} and len(states) == len(made)
    assert len(accepted) == list(states.values()).count("accepted") >= POSTERS
    assert all(index < closed[0] and record.at < ends for index, record in accepted.items())
    assert closed[1]["forfeited"]["count"] == list(states.values()).count("forfeited")
    assert closed[1]["count"] == len(state.entries) == POSTERS and parse_time(format_time(closed[1].at)) >= ends
    # Nobody reads anything else afterwards.
    for submission, (entrant, _) in made.items():
        assert entrant.get(f"/v1/submissions/{submission}").json()["state"] == states[submission]
