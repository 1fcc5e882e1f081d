"""`acclimate stage give-up`: what fails for ever, whoever is to blame, ends as its entrant's outcome by its organizer's word; its round goes on."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import live as staging
import pytest
from commands import Ran, Run, acclimate, done, refused
from crashing import blocked, crashing
from dispatching import (
    dispatcher,
    folder_of,
    give_shares,
    history,
    rows,
    send,
    state_of,
    states,
    step_until,
)
from live import Live
from sqlalchemy import delete, insert, select, update

from acclimate import admission, event_history, granting, retries
from acclimate import stages as stage_life
from acclimate.assignments import Assignment, Held
from acclimate.service import publish, quota
from acclimate.store import Tx, attempts, stages, timestamp, wishes
from acclimate_competitions import records, tables
from acclimate_competitions.errors import Refusal
from acclimate_runners import failpoints
from acclimate_runners.runner import BlobAccess, Status

__all__ = ["acclimate"]
WHY = "its tokenizer crashes: Ünïcode 🙃"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(retries, "BACKOFF", 0.01)
    with staging.serve(tmp_path) as running:
        yield running


def test_a_check_that_is_given_up_refuses_its_submission_which_costs_nothing(
    server: Live, tmp_path: Path, acclimate: Run
) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    boss = folder_of(server.organizer(), server, tmp_path / "boss")
    with crashing(server, "check") as running:
        step_until(running, lambda: states(server, "check") == {"blocked"})
        (row,) = blocked(server)
        short = row.key.removeprefix("sha256:")[:12]
        told = done(acclimate("stage", "give-up", staged.round, short, "--reason", WHY, "--keys", boss, "--json")).json
        assert told == {"stages": [row.key]}
        # Asked twice is asked once.
        said = done(acclimate("stage", "give-up", staged.round, short, "--reason", WHY, "--keys", boss)).out
        assert "a version of acclimate older than this one" in said and "custodians" in said
        step_until(running, lambda: state_of(server, submission)[0] == "refused")
        assert states(server, "check") == {"failed"}
        # Its entrant is told, and has as many tries as before.
        assert (
            state_of(server, submission)[1]
            == f"given up by the round's organizer after 3 tries, the last with job_failed: {WHY}"
        )
        with server.store.snapshot() as tx:
            assert quota.used(tx, staged.round, "ada", zone="UTC", at=tx.now()) == (0, 0)
    assert event_history.problems(history(server)) == []
    assert [event.event for event in history(server)][6:9] == ["released", "claimed", "committed"]


@pytest.mark.parametrize("kind", ["prepare", "evaluate"])
def test_a_round_whose_work_is_given_up_comes_to_its_ranking(
    server: Live, tmp_path: Path, acclimate: Run, kind: str
) -> None:
    staged = staging.open_round(server, tmp_path)
    for seed, name in enumerate(("ada", "bea"), start=1):
        staging.submit_model(staged, staging.enter(staged, server.actor(name)), seed=seed)
    server.clock.set(staged.fields["closes"], seconds=61)
    boss = folder_of(server.organizer(), server, tmp_path / "boss")

    def give_up() -> str:
        (one, *others) = blocked(server)
        # What is blocked together ends together, whichever is named.
        shown = acclimate("stage", "give-up", staged.round, one.key, "--reason", WHY, "--keys", boss, "--json")
        assert done(shown).json["stages"] == sorted([one.key, *(other.key for other in others)])
        return one.submission

    with crashing(server, kind) as running:
        if kind == "prepare":
            step_until(running, lambda: bool(blocked(server)))
            submission = give_up()
        step_until(running, lambda: server.phase(staged.round) == "prepared")
        give_shares(staged)
        if kind == "evaluate":
            step_until(running, lambda: bool(blocked(server)))
            submission = give_up()
        step_until(running, lambda: server.phase(staged.round) == "evaluated")
    with server.store.snapshot() as tx:
        state = tx.round(staged.round)
    ranking = publish.ranking(server.store, staged.round)
    given_up = {row.key for row in rows(server, kind) if row.submission == submission}
    assert {row.reason for row in rows(server, kind) if row.key in given_up} == {
        f"given up by the round's organizer after 3 tries, the last with job_failed: {WHY}"
    }
    failed = [record["failed"] for record in state.prepared.values() if "failed" in record.fields]
    tried = [tables.read(server.store.blobs.path(record["predictions"])) for record in state.evaluated.values()]
    unscored = [table for table in tried if table.column("loglikelihoods").null_count]
    # What could not be prepared is not evaluated; what could not be evaluated has no predictions, and unknown is not zero.
    assert (len(failed), len(unscored)) == ((len(given_up), 0) if kind == "prepare" else (0, len(given_up)))
    assert all(WHY in one["reason"] for one in failed)
    # Who asks for the log of such a failure reads how each try ended.
    for one in failed:
        with server.store.blobs.local(one["log"]) as path:
            said = path.read_text("utf-8").splitlines()
        assert [line.split(" at ")[0] for line in said] == ["try 1", "try 2", "try 3"], said
        assert all(": job_failed: " in line and line.endswith("killed by SIGSEGV") for line in said), said
    assert all(table.column("loglikelihoods").null_count == 12 for table in unscored)
    # The log says so for good, of these and of no others.
    said = f"given up by the round's organizer after 3 tries, the last with job_failed: {WHY}"
    assert [record.fields["given_up"] for record in state.evaluated.values() if records.was_given_up(record)] == [
        said
    ] * len(unscored)
    assert [(one["given_up"], one["reason"]) for one in failed] == [(True, said)] * len(failed)
    assert len(unscored) < len(tried) and ranking.digest
    assert event_history.problems(history(server)) == []


def test_whoever_leads_next_brings_to_its_end_what_was_given_up(
    server: Live, tmp_path: Path, acclimate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    organizer = server.organizer()

    def ask(wish: str, **more: str) -> None:
        body = {"stages": [row.key for row in rows(server, "check")], **more}
        assert organizer.post(f"{staged.path}/{wish}", body).status_code == 200

    class Killed(BaseException):
        pass

    def reach(point: str) -> None:
        if point == "settled":
            raise Killed

    with pytest.raises(Killed), crashing(server, "check") as running:
        step_until(running, lambda: bool(blocked(server)))
        ask("given-up", reason=WHY)
        monkeypatch.setattr(failpoints, "reach", reach)
        step_until(running, lambda: False)
    monkeypatch.undo()
    with dispatcher(server) as again:
        step_until(again, lambda: not states(server, "check") & {"pending", "starting", "blocked"})
    assert state_of(server, submission) == (
        "refused",
        f"given up by the round's organizer after 3 tries, the last with job_failed: {WHY}",
    )
    assert event_history.problems(history(server)) == []


def test_what_was_granted_is_heard_of_although_the_answer_was_lost(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    grant = granting.grant

    def lost(*given: Any, **named: Any) -> list[Any]:
        if grant(*given, **named):
            raise Refusal("busy", "the answer was lost")
        return []

    with crashing(server, "check") as running:
        step_until(running, lambda: bool(blocked(server)))
        body = {"stages": [row.key for row in blocked(server)], "reason": WHY}
        assert server.organizer().post(f"{staged.path}/given-up", body).status_code == 200
        monkeypatch.setattr(granting, "grant", lost)
        with pytest.raises(Refusal, match="the answer was lost"):
            running.step()
        step_until(running, lambda: state_of(server, submission)[0] == "refused")
    # It was not tried a fourth time.
    assert [event.event for event in history(server)][6:] == ["released", "claimed", "committed"]


def test_what_was_tried_again_since_is_not_given_up(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    organizer = server.organizer()
    with crashing(server, "check") as running:
        step_until(running, lambda: bool(blocked(server)))
    (row,) = blocked(server)
    assert organizer.post(f"{staged.path}/retries", {"stages": [row.key]}).status_code == 200
    assert organizer.post(f"{staged.path}/given-up", {"stages": [row.key], "reason": WHY}).status_code == 200
    with dispatcher(server) as again:
        step_until(again, lambda: state_of(server, submission)[0] != "checking")
    # The first that was asked for is done; by then nothing is blocked, and a good model is not refused.
    assert state_of(server, submission)[0] == "accepted"
    with server.store.snapshot() as tx:
        assert all(wish.done for wish in tx.execute(select(wishes)).all())
    assert granting.grant(server.store, epoch=9) == []


def test_who_may_give_up_what(server: Live, tmp_path: Path, acclimate: Run) -> None:
    staged = staging.open_round(server, tmp_path)
    ada, _ = send(staged, "ada", seed=1)
    boss = folder_of(server.organizer(), server, tmp_path / "boss")
    entrant = folder_of(ada, server, tmp_path / "ada")

    def give_up(key: str, *, keys: Path = boss, reason: str = WHY) -> Ran:
        return acclimate("stage", "give-up", staged.round, key, "--reason", reason, "--keys", keys, "--json")

    with dispatcher(server) as running:
        running.step()
        (row,) = rows(server, "check")
        refused(give_up(row.key), "phase_wrong")
    with server.store.transaction() as tx:
        tx.execute(update(stages).values(state="blocked", code="job_failed"))
    refused(give_up(row.key, keys=entrant), "role_missing")
    # As the reason of a round that is voided, it is for everybody to read, for good.
    for reason in ("  ", "one\ntwo", "a\0b", "seen \u202ebackwards", "un\u200bseen", "u\u0308 in two parts", "\ue000"):
        body = {"stages": [row.key], "reason": reason}
        assert server.organizer().post(f"{staged.path}/given-up", body).json()["code"] == "name_invalid", reason
    refused(give_up(row.key, reason="x" * 1001), "request_invalid")
    refused(give_up("ffff"), "not_found")
    # "All" is never meant by naming none.
    assert acclimate("stage", "give-up", staged.round, "--reason", WHY, "--keys", boss).code == 2
    with server.store.transaction() as tx:
        tx.execute(update(stages).values(code="code_pinned"))
    assert "another version" in refused(give_up(row.key), "phase_wrong")
    with server.store.snapshot() as tx:
        assert not tx.execute(select(wishes)).all()


@pytest.mark.parametrize("code", sorted(retries.NEVER_GIVEN_UP))
def test_what_no_entrant_can_have_caused_is_not_given_up(
    code: str, server: Live, tmp_path: Path, acclimate: Run
) -> None:
    staged = staging.open_round(server, tmp_path)
    send(staged, "ada", seed=1)
    boss = folder_of(server.organizer(), server, tmp_path / "boss")
    with crashing(server, "check") as running:
        step_until(running, lambda: bool(blocked(server)))
    (row,) = blocked(server)
    # It may be that it was asked for before, and lost its file since.
    assert server.organizer().post(f"{staged.path}/given-up", {"stages": [row.key], "reason": WHY}).status_code == 200
    with server.store.transaction() as tx:
        tx.execute(update(stages).values(code=code))
    ran = acclimate("stage", "give-up", staged.round, row.key, "--reason", WHY, "--keys", boss, "--json")
    refused(ran, "phase_wrong")
    if code != "code_pinned":
        assert "acclimate stage retry" in ran.json["error"]["hint"]
        assert "`give-up`" not in done(acclimate("stage", "why", staged.round, row.key, "--keys", boss)).out
    assert granting.grant(server.store, epoch=9) == [] and states(server, "check") == {"blocked"}


def test_a_file_that_the_server_lost_is_put_back_and_its_entrant_refused_nothing(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    organizer = server.organizer()
    lost = Status("failed", reason="its model.safetensors is not there", code="blob_unknown")
    with crashing(server, "check", before=[lost, lost]) as running:
        step_until(running, lambda: bool(blocked(server)))
        (row,) = blocked(server)
        assert row.code == "blob_unknown"
        answer = organizer.post(f"{staged.path}/given-up", {"stages": [row.key], "reason": WHY})
        assert (answer.status_code, answer.json()["code"]) == (409, "phase_wrong")
        assert "put" in answer.json()["hint"] and "retry" in answer.json()["hint"]
    # By now the file is back.
    assert organizer.post(f"{staged.path}/retries", {"stages": [row.key]}).status_code == 200
    with dispatcher(server) as again:
        step_until(again, lambda: state_of(server, submission)[0] == "accepted")


def test_the_reason_counts_the_tries_that_failed_and_no_other(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    gone = Status("failed", reason="its machine was taken away", code="preempted")
    with crashing(server, "check", before=[gone, gone]) as running:
        step_until(running, lambda: bool(blocked(server)))
        (row,) = blocked(server)
        assert row.fence == 5
        body = {"stages": [row.key], "reason": WHY}
        assert server.organizer().post(f"{staged.path}/given-up", body).status_code == 200
        step_until(running, lambda: state_of(server, submission)[0] == "refused")
    assert (
        state_of(server, submission)[1]
        == f"given up by the round's organizer after 3 tries, the last with job_failed: {WHY}"
    )


def test_what_was_tried_again_in_between_failed_as_often_as_both_times_together(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    organizer = server.organizer()
    with crashing(server, "check") as running:
        step_until(running, lambda: bool(blocked(server)))
        body = {"stages": [row.key for row in blocked(server)]}
        assert organizer.post(f"{staged.path}/retries", body).status_code == 200
        step_until(running, lambda: not blocked(server))
        step_until(running, lambda: bool(blocked(server)))
        assert organizer.post(f"{staged.path}/given-up", body | {"reason": WHY}).status_code == 200
        step_until(running, lambda: state_of(server, submission)[0] == "refused")
    assert (
        state_of(server, submission)[1]
        == f"given up by the round's organizer after 6 tries, the last with job_failed: {WHY}"
    )


def test_what_an_older_release_blocked_without_a_try_is_tried_again_before_it_can_be_given_up(
    server: Live, tmp_path: Path, acclimate: Run
) -> None:
    staged = staging.open_round(server, tmp_path)
    send(staged, "ada", seed=1)
    boss = folder_of(server.organizer(), server, tmp_path / "boss")
    with dispatcher(server) as running:
        running.step()
    (row,) = rows(server, "check")
    with server.store.transaction() as tx:
        tx.execute(delete(attempts))
        tx.execute(update(stages).values(state="blocked", code="job_failed", attempt=None))
    ran = acclimate("stage", "give-up", staged.round, row.key, "--reason", WHY, "--keys", boss, "--json")
    assert "no try" in refused(ran, "phase_wrong") and "acclimate stage retry" in ran.json["error"]["hint"]
    # Nor is it begun again by a wish that stands there already.
    with server.store.transaction() as tx:
        wish = {"round": staged.round, "stage": row.key, "wish": "give_up", "account": "organizer", "reason": WHY}
        tx.execute(insert(wishes).values(**wish, at=timestamp(tx)))
    assert granting.grant(server.store, epoch=9) == [] and states(server, "check") == {"blocked"}
    done(acclimate("stage", "retry", staged.round, row.key, "--keys", boss))
    assert len(granting.grant(server.store, epoch=9)) == 1 and states(server, "check") == {"pending"}


def test_what_is_given_up_together_is_asked_for_and_ended_together(
    server: Live, tmp_path: Path, acclimate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staging.open_round(server, tmp_path)
    sent = [send(staged, name, seed=seed)[1] for seed, name in enumerate(("ada", "bea", "cal"), start=1)]
    boss = folder_of(server.organizer(), server, tmp_path / "boss")
    claim, groups, asked = stage_life.claim, list[int](), list[str]()
    send_ = httpx.Client.send

    def claiming(tx: Tx, wanted: Sequence[Assignment], *, epoch: int) -> list[Held | None]:
        groups.append(len(wanted))
        return claim(tx, wanted, epoch=epoch)

    def sending(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        return send_(client, request, **options)

    with crashing(server, "check", most=3) as running:
        step_until(running, lambda: len(blocked(server)) == 3)
        keys = [row.key for row in blocked(server)]
        monkeypatch.setattr(httpx.Client, "send", sending)
        given = [keys[0], keys[1].removeprefix("sha256:")[:20], keys[2].removeprefix("sha256:")[:20], keys[0]]
        told = done(acclimate("stage", "give-up", staged.round, *given, "--reason", WHY, "--keys", boss, "--json")).json
        assert told["stages"] == keys
        looked = [one for one in asked if "/stages" in one or one.startswith("POST")]
        assert looked == [f"GET {staged.path}/stages", f"POST {staged.path}/given-up"]
        monkeypatch.setattr(admission, "TOGETHER", 2)
        monkeypatch.setattr(stage_life, "claim", claiming)
        step_until(running, lambda: {state_of(server, one)[0] for one in sent} == {"refused"})
    assert groups == [2, 1]
    assert event_history.problems(history(server)) == []


def test_a_full_disk_holds_up_what_is_given_up_and_nothing_else(
    server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staging.open_round(server, tmp_path)
    _, doomed = send(staged, "ada", seed=1)
    put, full = type(server.store.blobs).put_bytes, Refusal("no_space", "the disk is full")

    def putting(blobs: BlobAccess, data: bytes) -> str:
        if data.startswith(b"try "):
            raise full
        return put(blobs, data)

    with crashing(server, "check") as running:
        step_until(running, lambda: bool(blocked(server)))
        body = {"stages": [row.key for row in blocked(server)], "reason": WHY}
        _, other = send(staged, "bea", seed=2)
        monkeypatch.setattr(type(server.store.blobs), "put_bytes", putting)
        assert server.organizer().post(f"{staged.path}/given-up", body).status_code == 200
        step_until(running, lambda: state_of(server, other)[0] == "accepted")
        assert state_of(server, doomed)[0] == "checking"
        monkeypatch.undo()
        step_until(running, lambda: state_of(server, doomed)[0] == "refused")
    assert event_history.problems(history(server)) == []
