"""What the children of failed tries said: kept with the blobs, for the round's organizer alone from the close on, in no bundle, and not for ever."""

import dataclasses
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import live as staging
import pytest
from commands import Run, acclimate, done, refused
from crashing import blocked
from dispatching import Troubled, dispatcher, folder_of, give_shares, rows, send, state_of, states, step_until, troubled
from live import Live, Staged

from acclimate import outputs, retries
from acclimate.dispatch import Dispatcher
from acclimate_runners import isolation
from acclimate_runners.blobs import FolderBlobs
from acclimate_runners.jobs import EvaluateJob, Job
from acclimate_runners.local import LocalRunner
from acclimate_runners.runner import BlobAccess, Demand, Handle, Status

__all__ = ["acclimate"]
OURS = Status("failed", reason="exited with status 1: KeyError: 'tint'", code="job_failed")
QUOTED = "a row of the holdout"
WORDS = f"{QUOTED} \x1b[31m Ünïcode"


class Spoiled(Troubled):
    """A runner whose children of a kind of job meet what they can't do, with the words of it on their lips."""

    def __init__(self, runner: LocalRunner, kind: str) -> None:
        super().__init__(runner, [])
        self._kind = kind

    def start(self, name: str, job: Job, blobs: BlobAccess, *, demand: Demand) -> Handle:
        if job.kind == self._kind:
            job = spoiled(job)
        return super().start(name, job, blobs, demand=demand)


def spoiled(job: Job) -> Job:
    if isinstance(job, EvaluateJob):
        return dataclasses.replace(job, stages=((WORDS, None, "direct"),))
    return dataclasses.replace(job, device=WORDS)


def spoiling(live: Live, kind: str) -> Dispatcher:
    runner = lambda: Spoiled(LocalRunner(live.settings.work, slots=1), kind)  # noqa: E731
    return Dispatcher(live.store, live.store.blobs, live.settings, runner)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(retries, "BACKOFF", 0.01)
    with staging.serve(tmp_path) as running:
        yield running


def path_of(staged: Staged, key: str) -> str:
    return f"{staged.path}/stages/{key}/outputs"


def noted(live: Live, attempt: str, fence: int, document: str) -> None:
    """Put another note in the place of a try's."""
    live.store.blobs.put_note(f"attempts/{attempt[7:]}/{fence}/said.json", document.encode())


def test_what_failed_tries_said_is_read_by_the_rounds_organizer_with_its_key_once_the_round_has_closed(
    server: Live, tmp_path: Path, acclimate: Run
) -> None:
    staged = staging.open_round(server, tmp_path)
    ada, _ = send(staged, "ada", seed=1)
    with spoiling(server, "check") as running:
        step_until(running, lambda: states(server, "check") == {"blocked"})
    (row,) = rows(server, "check")
    path, organizer = path_of(staged, row.key), server.organizer()
    # 1. Until the close nobody, as it may tell of the model.
    early = organizer.secret(path)
    assert (early.status_code, early.json()["code"]) == (409, "phase_wrong") and WORDS not in early.text
    server.clock.set(staged.fields["closes"], seconds=61)
    server.tick()
    # 2. From then on its organizer: no other account, and none by its token alone.
    others = [ada, server.custodians()[0], server.actor("second", "organizer"), server.actor("analyst", "analyst")]
    for other in (*others, server.actor("an-auditor", "auditor")):
        answer = other.secret(path)
        assert (answer.status_code, answer.json()["code"]) == (403, "role_missing"), other.name
    assert server.anyone().get(path).status_code == 401
    for headers in ({}, organizer.proof(f"{path}?x=1"), organizer.proof(path, key=others[2].key)):
        answer = organizer.get(path, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "signature_invalid") and WORDS not in answer.text
    found = organizer.secret(path)
    assert found.status_code == 200 and found.headers["Cache-Control"] == "no-store"
    told = found.json()
    assert [(one["fence"], one["code"], one["left_out"], one["problem"]) for one in told] == [
        (fence, "job_failed", 0, "") for fence in (1, 2, 3)
    ]
    assert all(one["text"].startswith("Traceback") and WORDS in one["text"] for one in told)
    # 3. At the command line, with nothing in it that a terminal takes for an order; a key of which nobody has a beginning is none.
    boss, short = folder_of(organizer, server, tmp_path / "boss"), row.key[7:19]
    shown = done(acclimate("stage", "output", staged.round, short, "--keys", boss)).out
    assert "what try 3 said, which ended with job_failed:" in shown and "  | Traceback" in shown and "\x1b" not in shown
    assert done(acclimate("stage", "output", staged.round, short, "--keys", boss, "--json")).json == told
    assert "acclimate stage output" in done(acclimate("stage", "why", staged.round, short, "--keys", boss)).out
    refused(acclimate("stage", "output", staged.round, "ffff", "--keys", boss, "--json"), "not_found")
    mine = folder_of(ada, server, tmp_path / "ada")
    refused(acclimate("stage", "output", staged.round, short, "--keys", mine, "--json"), "role_missing")


def test_what_is_shown_is_bounded_and_what_is_lost_says_so(server: Live, tmp_path: Path, acclimate: Run) -> None:
    staged = staging.open_round(server, tmp_path)
    send(staged, "ada", seed=1)
    with troubled(server, [OURS] * 3) as running:
        step_until(running, lambda: states(server, "check") == {"blocked"})
    server.clock.set(staged.fields["closes"], seconds=61)
    server.tick()
    (row,), blobs = rows(server, "check"), server.store.blobs
    path, organizer = path_of(staged, row.key), server.organizer()
    boss = folder_of(organizer, server, tmp_path / "boss")
    shown = done(acclimate("stage", "output", staged.round, row.key, "--keys", boss)).out
    assert shown.startswith("no failed try at it said anything that is still kept")
    attempt = row.attempt
    line = "é" * 49 + "\n"
    noted(server, attempt, 1, json.dumps({"log": blobs.put_bytes(line.encode() * 1000)}))
    noted(server, attempt, 2, json.dumps({"log": blobs.put_bytes(b"x" * (outputs.LONGEST + 1))}))
    noted(server, attempt, 3, json.dumps({"log": "sha256:" + "5" * 64}))
    noted(server, attempt, 4, json.dumps({"log": blobs.put_bytes(b"of no try that the database knows")}))
    long, other, lost = organizer.secret(path).json()
    kept = outputs.SHOWN // len(line.encode()) * len(line.encode())
    assert (long["text"], long["left_out"]) == (line * (kept // len(line.encode())), 1000 * len(line.encode()) - kept)
    assert (other["text"], lost["text"]) == (None, None)
    assert other["problem"].endswith("which is no output") and lost["problem"]
    shown = done(acclimate("stage", "output", staged.round, row.key, "--keys", boss)).out
    assert f"({long['left_out']} bytes before this are left out)" in shown and f"(lost: {lost['problem']})" in shown
    for torn in ("", "{", "[]", '{"log": 7}', '{"log": "/etc/passwd"}', '{"outcome": {}}'):
        noted(server, attempt, 1, torn)
        assert [one["fence"] for one in organizer.secret(path).json()] == [2, 3], torn
    # No child says more than can be shown of it: what is longer is no output.
    assert isolation.LOG_BYTES + isolation._TAIL + 100 < outputs.LONGEST


def test_only_the_newest_tries_are_told_and_what_came_to_an_outcome_is_nobodys(tmp_path: Path) -> None:
    blobs, count = FolderBlobs(tmp_path), outputs.MOST + 3
    said = [blobs.put_bytes(f"{number}\n".encode()) for number in range(count + 1)]
    made = [SimpleNamespace(attempt="sha256:ab", fence=n, ended="2027", code="hung") for n in range(count)]
    for number in range(count):
        blobs.put_note(f"attempts/ab/{number}/said.json", json.dumps({"log": said[number]}).encode())
    for number, status in ((7, "refused"), (9, "done")):
        outcome = {"log": said[-1], "outcome": {"status": status}}
        blobs.put_note(f"attempts/ab/{number}/manifest.json", json.dumps(outcome).encode())
    goes_on = SimpleNamespace(attempt="sha256:ab", fence=count - 1, ended=None, code="")
    told = {one["fence"]: one["text"] for one in outputs.of_tries(blobs, [*made[:-1], goes_on])}
    # Of the newest that came to nothing; the one that goes on and the one that came to something are none.
    assert list(told) == [number for number in range(1, count - 1) if number != 9]
    assert len(told) == outputs.MOST and told.pop(7) == f"{count}\n"
    assert all(text == f"{fence}\n" for fence, text in told.items())


@pytest.mark.parametrize("code", ["out_of_memory", "limit_exceeded"])
def test_a_refusal_that_everybody_reads_has_no_word_of_the_child(server: Live, tmp_path: Path, code: str) -> None:
    """Its last line stands in the try's reason, behind the sentence of its runner."""
    own = "needed more memory than the 0.25 GiB allowed"
    staged = staging.open_round(server, tmp_path)
    _, submission = send(staged, "ada", seed=1)
    with troubled(server, [Status("failed", reason=f"{own}: {QUOTED}: 7", code=code)] * 12) as running:
        step_until(running, lambda: state_of(server, submission)[0] == "refused")
    (row,) = rows(server, "check")
    reason = state_of(server, submission)[1]
    assert reason.startswith(f"{own}, at each of 3 tries") and row.reason == reason
    with server.store.snapshot() as tx:
        logged = b"".join(tx.entries(0, tx.size()))
    assert reason.encode() in logged and QUOTED.encode() not in logged


def test_what_was_said_of_the_holdout_is_in_no_bundle_and_no_public_answer(server: Live, tmp_path: Path) -> None:
    staged = staging.open_round(server, tmp_path)
    staging.submit_model(staged, staging.enter(staged, server.actor("ada")), seed=1)
    server.clock.set(staged.fields["closes"], seconds=61)
    with dispatcher(server) as running:
        step_until(running, lambda: server.phase(staged.round) == "prepared")
    give_shares(staged)
    with spoiling(server, "evaluate") as running:
        step_until(running, lambda: bool(blocked(server)))
    (key, *_) = {row.key for row in blocked(server)}
    organizer = server.organizer()
    assert QUOTED in organizer.secret(path_of(staged, key)).json()[0]["text"]
    anyone = server.anyone()
    for public in (staged.path, f"{staged.path}/stages", f"{staged.path}/stages/{key}", f"{staged.path}/records"):
        assert QUOTED not in anyone.get(public).text, public
    assert organizer.post(f"{staged.path}/retries", {"stages": []}).status_code == 200
    with dispatcher(server) as running:
        step_until(running, lambda: server.phase(staged.round) == "evaluated")
    answer = organizer.secret(f"{staged.path}/bundle")
    assert answer.status_code == 200
    with zipfile.ZipFile(io.BytesIO(answer.content)) as packed:
        members = {name: packed.read(name) for name in packed.namelist()}
    logs = {json.loads(server.store.blobs.note(name))["log"] for name in server.store.blobs.notes("attempts/")}
    said = [server.store.blobs.read(digest) for digest in logs if server.store.blobs.size(digest)]
    assert any(QUOTED.encode() in one for one in said) and len(members) > 10
    for name, data in members.items():
        assert QUOTED.encode() not in data and not any(one in data for one in said), name
