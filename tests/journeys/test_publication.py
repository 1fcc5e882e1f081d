"""Rounds that publish their ranking themselves: computed here and by a second process, and by whom else it is refused."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import dispatching
import live as staging
import pytest
import rounds_made
import tiny
from by_hand import evaluate_all, prepare_all, refused, register_baseline, release_share
from dispatching import give_shares, send, state_of, step_until, wait
from live import Live, Staged
from sqlalchemy import select

from acclimate import publication, recomputing, verify
from acclimate.service import identity, publish
from acclimate.store import openings
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase
from acclimate_competitions.records import format_time, sign

AUTO, WITHIN = 'publish = "auto"', 'publish = "manual"\npublish_within = "1h"'


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch, publishing: str, **given: str):
    monkeypatch.setattr(tiny, "DEFINITION", tiny.DEFINITION.replace('publish = "manual"', publishing))
    return staging.serve(folder, **given)


def play(server: Live, staged: Staged, *, until: str) -> None:
    """A real dispatcher with real children takes an open round to a phase."""
    submitted = [send(staged, name, seed=seed)[1] for name, seed in {"ada": 1, "bea": 2}.items()]
    with dispatching.dispatcher(server) as running:
        step_until(running, lambda: {state_of(server, s)[0] for s in submitted} == {"accepted"})
        server.clock.set(staged.fields["closes"], seconds=61)
        step_until(running, lambda: server.phase(staged.round) == "prepared")
        give_shares(staged)
        step_until(running, lambda: server.phase(staged.round) == until)


def records(staged: Staged) -> list[dict]:
    return [entry["record"] for entry in staged.live.anyone().get(f"{staged.path}/records").json()]


def audited(staged: Staged, folder: Path) -> verify.Report:
    """What a stranger finds in the round's bundle."""
    file = folder / "bundle.zip"
    file.write_bytes(staged.live.anyone().get(f"{staged.path}/bundle").content)
    return verify.verify(file, log_key=staged.fields["log"])


def check(report: verify.Report, name: str) -> verify.Check:
    return next(check for check in report.checks if check.name == name)


def publication_by(staged: Staged, actor: str, **changes: str) -> dict:
    """RankingPublished of the ranking as it is, and the body to send."""
    document = publish.ranking(staged.live.store, staged.round).document()
    fields = {"ranking": digests.of_json(document), "policy": staged.fields["policy"], "reason": "", **changes}
    own = identity.load(staged.live.settings, staged.live.store).evaluator_key
    key = staged.live.organizer().key if actor == "organizer" else own
    return {"record": sign("RankingPublished", staged.round, fields, key=key), "ranking": document}


def test_a_round_publishes_itself_and_a_stranger_verifies_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(tmp_path, monkeypatch, AUTO) as server:
        staged = staging.open_round(server, tmp_path)
        play(server, staged, until="published")
        last = records(staged)[-1]
        assert (last["type"], last["by"], last["reason"]) == ("RankingPublished", staged.fields["evaluators"][0], "")
        status = server.anyone().get(staged.path).json()
        assert (status["next"], status["problem"]) == ("nothing: the ranking is published", None)
        shown = server.anyone().get(f"{staged.path}/ranking")
        assert last["ranking"] == status["ranking"] == digests.of_bytes(shown.content)
        assert {row["entrant"] for row in shown.json()["ranking"]} == {"ada", "bea"}
        report = audited(staged, tmp_path)
        assert not report.failed and check(report, "ranking").status == "ok"
        assert check(report, "published").status == "ok"
        assert check(report, "published").where == "version 1, by the round itself: an evaluator signed it"
        # Nothing of the second process is left, and its organizer may still put it right in a further version.
        assert list(server.settings.work.glob("publishing-*")) == []
        body = publication_by(staged, "organizer", reason="too late")
        refused(server.organizer().post(f"{staged.path}/ranking", body), "conflict", 409)


def test_a_round_that_nobody_entered_publishes_itself_by_the_clock_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path, monkeypatch, AUTO) as server:
        staged = staging.open_round(server, tmp_path)
        server.clock.set(staged.fields["closes"])
        assert server.tick() == ["RoundClosed", "PreparationFinished"]
        give_shares(staged)
        assert server.tick() == ["HoldoutOpened", "EvaluationFinished", "RankingPublished"]
        assert not audited(staged, tmp_path).failed


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An evaluated round, really played, whose organizer has an hour to publish it."""
    with serve(tmp_path, monkeypatch, WITHIN) as server:
        staged = staging.open_round(server, tmp_path)
        play(server, staged, until="evaluated")
        yield staged


PUBLISHER = """
import sys, threading
from datetime import datetime
from pathlib import Path
from acclimate import config
from acclimate.dispatch import Dispatcher
from acclimate.store import Store
from acclimate_runners.local import LocalRunner
settings = config.load(Path(sys.argv[1]), environ={})
moment = datetime.fromisoformat(sys.argv[2])
store = Store.open(settings, clock=lambda: moment)
Dispatcher(store, store.blobs, settings, lambda: LocalRunner(settings.work, slots=2)).run(threading.Event())
"""


def second_processes(server: Live) -> list[int]:
    found, mark = [], str(server.settings.work)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
            if "acclimate.recomputing" in line and mark in line and "\tZ" not in (folder / "status").read_text():
                found.append(int(folder.name))
    return found


def test_an_organizer_who_does_not_publish_is_not_waited_for(waiting: Staged, tmp_path: Path) -> None:
    server, organizer = waiting.live, waiting.live.organizer()
    status = server.anyone().get(waiting.path).json()
    evaluated = next(r["at"] for r in records(waiting) if r["type"] == "EvaluationFinished")
    moment = format_time(server.clock.now.replace(hour=server.clock.now.hour + 1))
    assert evaluated == format_time(server.clock.now)
    assert (status["next_at"], status["waiting_for"]) == (moment, ["the published ranking"])
    assert status["next"].endswith(f"round publish {waiting.round} --keys DIR; it publishes itself at {moment}")
    # 1. Until then it is the organizer's, whatever the server does.
    size = len(records(waiting))
    for early in ({"microseconds": 0}, {"hours": 1, "microseconds": -1}):
        server.clock.set(evaluated, **early)
        assert server.tick() == []
        with (
            pytest.raises(Refusal, match="its organizer's to publish until") as caught,
            server.store.transaction() as tx,
        ):
            tx.append(publication_by(waiting, "evaluator")["record"])
        assert caught.value.code == "too_early"
    # 2. Neither publishes another ranking than the scores give.
    false = publication_by(waiting, "organizer")
    false["ranking"]["ranking"][0]["score"] = 0.99
    false["record"] = publication_by(waiting, "organizer", ranking=digests.of_json(false["ranking"]))["record"]
    assert (
        "the server computed"
        in refused(organizer.post(f"{waiting.path}/ranking", false), "guard_failed", 409)["detail"]
    )
    assert len(records(waiting)) == size
    # 3. A dispatcher that is killed while the second process computes has published nothing, and takes it along.
    server.clock.set(evaluated, hours=1)
    own = publish.ranking(server.store, waiting.round).digest
    arguments = [str(server.settings.data), server.clock.now.isoformat()]
    with subprocess.Popen([sys.executable, "-c", PUBLISHER, *arguments], stderr=subprocess.DEVNULL) as process:
        try:
            # By then it is tied to its parent: what it opened lies in a folder of its own.
            wait(
                lambda: list(server.settings.work.glob("publishing-*/acclimate-verify-*")) or process.poll() is not None
            )
            for pid in second_processes(server):
                os.kill(pid, signal.SIGSTOP)
        finally:
            process.send_signal(signal.SIGKILL)
    wait(lambda: second_processes(server) == [])
    assert len(records(waiting)) == size and server.phase(waiting.round) == "evaluated"
    assert len(list(server.settings.work.glob("publishing-*"))) == 1
    status = server.anyone().get(waiting.path).json()
    assert status["next"] == "the ranking publishes itself as soon as a second process has computed the same"
    # 4. The next one publishes, once, what was computed before.
    with dispatching.dispatcher(server) as running:
        assert list(server.settings.work.glob("publishing-*")) == []
        step_until(running, lambda: server.phase(waiting.round) == "published")
    assert [r["ranking"] for r in records(waiting) if r["type"] == "RankingPublished"] == [own]
    assert not audited(waiting, tmp_path).failed


def test_the_organizer_comes_first_and_the_round_does_not_publish_twice(waiting: Staged, tmp_path: Path) -> None:
    server = waiting.live
    server.clock.forward(hours=1)
    assert server.organizer().post(f"{waiting.path}/ranking", publication_by(waiting, "organizer")).status_code == 200
    assert not publication.publish_itself(server.store, server.settings, waiting.round)
    assert [r["type"] for r in records(waiting)].count("RankingPublished") == 1
    assert check(audited(waiting, tmp_path), "published").where == "version 1, signed by the organizer"


def test_what_an_audit_does_not_find_right_does_not_publish_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Models that nobody made: the evaluator's records have none of the recipe's candidates, and an auditor would see it.
    with serve(tmp_path, monkeypatch, AUTO) as server:
        staged = staging.open_round(server, tmp_path)
        entrants = [staging.enter(staged, server.actor(name)) for name in ("ada", "bea")]
        for seed, entrant in enumerate((*entrants, register_baseline(staged)), start=1):
            staging.submit_model(staged, entrant, seed=seed)
        server.clock.set(staged.fields["closes"])
        server.tick()
        prepare_all(staged)
        assert server.tick() == ["PreparationFinished"]
        documents = staged.share_documents(staged.seal, staged.envelopes)
        for index in (1, 3):
            release_share(staged, index, documents[index])
        assert server.tick() == ["HoldoutOpened"]
        evaluate_all(staged)
        assert server.tick() == ["EvaluationFinished"]
        assert server.phase(staged.round) == "evaluated"
        status = server.anyone().get(staged.path).json()
        assert status["problem"]["code"] == "guard_failed"
        assert "the ranking is not published: the server computed sha256:" in status["problem"]["sentence"]
        assert "a second process none; prepared, " in status["problem"]["sentence"]
        assert status["next"].endswith(f"acclimate round publish {staged.round} --keys DIR")
        hint = refused(server.anyone().get(f"{staged.path}/ranking"), "phase_wrong")["hint"]
        assert "publishes itself" in hint
        with pytest.raises(Refusal, match="a second process none"):
            publication.publish_itself(server.store, server.settings, staged.round)
        with server.store.snapshot() as tx:
            assert tx.execute(select(openings.c.files).where(openings.c.round == staged.round)).scalar_one()
            assert tx.round(staged.round).phase is Phase.EVALUATED


def test_a_second_process_that_does_not_answer_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="the second process that computes the ranking") as caught:
        recomputing.ranking(tmp_path / "none/bundle", log_key="no key")
    assert caught.value.code == "runner_failed"
    # It can begin, and says what it lacks.
    with pytest.raises(Refusal, match="the second process that computes the ranking: ") as caught:
        recomputing.ranking(tmp_path / "bundle", log_key="no key")
    assert caught.value.code == "key_refused"


# ---- what an auditor finds, without any server ---------------------------------------------------------------------


def told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, publishing: str, *, by: str, **changes: object
) -> verify.Report:
    """The audit of a round of these words, whose ranking this key signs."""
    text = rounds_made.DEFINITION.replace('publish = "manual"', publishing)
    monkeypatch.setattr(rounds_made, "DEFINITION", text)
    made = rounds_made.make(folder, publish=False)
    fields = {"ranking": digests.of_json(made.ranking), "policy": made.competition.ranking.digest, "reason": ""}
    made.signed("RankingPublished", {**fields, **changes}, by=by, keep=True)
    return verify.verify(made.write(folder / "bundle"), log_key=made.signer.vkey)


@pytest.mark.parametrize(("publishing", "by"), [(AUTO, "evaluator"), (AUTO, "organizer"), (WITHIN, "organizer")])
def test_an_auditor_takes_either_signature_where_the_definition_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publishing: str, by: str
) -> None:
    report = told(tmp_path, monkeypatch, publishing, by=by)
    assert not report.failed and check(report, "published").status == "ok"
    assert ("an evaluator signed it" in check(report, "published").where) == (by == "evaluator")


@pytest.mark.parametrize(
    ("publishing", "changes", "name", "why"),
    [
        ('publish = "manual"', {}, "rules", "a key that may not sign it in this round"),
        (WITHIN, {}, "rules", "the ranking is its organizer's to publish until"),
        (AUTO, {"reason": "the better one"}, "rules", "gives no reason"),
        (AUTO, {"ranking": digests.of_bytes(b"another")}, "published", "it names sha256:"),
    ],
)
def test_an_auditor_names_a_ranking_that_the_server_published_falsely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publishing: str, changes: dict, name: str, why: str
) -> None:
    report = told(tmp_path, monkeypatch, publishing, by="evaluator", **changes)
    assert report.failed[0].name == name and why in report.failed[0].meaning


@pytest.mark.slow
def test_a_private_holdout_publishes_itself_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f'{AUTO}\nauditor = "lab"'
    monkeypatch.setattr(tiny, "DEFINITION", tiny.DEFINITION.replace('"public"', '"private"'))
    with serve(tmp_path, monkeypatch, words) as server:
        lab = server.actor("lab", "auditor")
        auditor = {"name": "lab", "ed25519": lab.public, "draw": digests.of_bytes(b"")}
        staged = staging.open_round(server, tmp_path, auditor=auditor)
        play(server, staged, until="published")
        assert server.anyone().get(staged.path).json()["waiting_for"] == ["the report of lab"]
        report = audited(staged, tmp_path)
        # The public bundle shows who signed; what it can't show, the second process has seen in the whole one.
        assert not report.failed and check(report, "published").status == "ok"
        assert check(report, "ranking").status == "NOT CHECKED"
