"""A whole round in which a preparation and an evaluation are given up, to its bundle, audit, report, mirror and MLflow."""

import html
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import live as staging
import pytest
from commands import Run, acclimate, done
from crashing import blocked, crashing
from dispatching import folder_of, give_shares, send, state_of, step_until
from labs import Lab, audited, closed_round, lab_of, line, publish_evaluated
from live import Live

from acclimate import keys, mirror, mirroring, publisher, retries, verify
from acclimate.bundle_rerun import EntrantRerun
from acclimate.client import Client, auditor, custodian, pins
from acclimate.client.evidence import Check
from acclimate.client.history import definition_digest
from acclimate.service import identity, publish
from acclimate_competitions import digests, records
from acclimate_competitions.phases import Phase

__all__ = ["acclimate"]
WHY = "its tokenizer crashes on every machine"
SAID = f"given up by the round's organizer after 3 tries, the last with job_failed: {WHY}"
NOT_MADE = "given up by the organizer, not made again"
PEOPLE = {"ada": 1, "bea": 2, "cal": 3}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with staging.serve(tmp_path_factory.mktemp("server")) as served:
        yield served


@contextmanager
def draft(live: Live, where: Path) -> Iterator[tuple[Lab, dict[str, str]]]:
    """A second operator with an account, and what RoundDefined says of it, while every preparation of a round is drawn for it."""
    client, own = lab_of(live, where / "keys")
    with pytest.MonkeyPatch.context() as patch, client:
        audited(patch, audits=100)
        patch.setattr(retries, "BACKOFF", 0.01)
        named = json.loads((own.folder / "auditor.json").read_text())
        yield Lab(None, client, own), named  # type: ignore[arg-type]


def test_drawn_preparations_that_were_given_up_are_logged_and_not_made_again(tmp_path: Path, acclimate: Run) -> None:
    with staging.serve(tmp_path / "server") as live:
        with draft(live, tmp_path) as (lab, named):
            lab.staged = closed_round(live, tmp_path, auditor=named)
            signer, state = identity.load(live.settings, live.store).evaluator_key, lab.state
            failed = {"reason": SAID, "log": digests.of_bytes(b""), "given_up": True}
            with live.store.transaction() as tx:
                for submission, task, seed in state.preparations:
                    fields = {"submission": submission, "task": task, "seed": seed, "failed": failed, "hardware": "cpu"}
                    fields |= {"base": digests.of_bytes(b"a model"), "recipe": state.defined["recipe"]}
                    fields |= {"code": state.defined["code"]}
                    tx.append(records.sign("ModelPrepared", state.id, fields, key=signer))
            assert live.tick() == ["PreparationFinished"]
            ran = done(acclimate("audit", "run", state.id, "--keys", lab.keys.folder))
            count = len(state.preparations)
            assert ran.out.count("not made again  ") == count and "made again and agrees" not in ran.out
            assert f"{count} drawn preparations given up by the organizer, not made again" in ran.out
            assert {tuple(r[name] for name in ("prepared", "agrees", "tolerance", "hardware", "reason"))
                    for r in lab.state.audited.values()} == {(None, True, 0, "none", NOT_MADE)}  # fmt: skip
            assert lab.run() == [] and not lab.work.exists()
            shown = live.anyone().get(lab.staged.path).json()["auditor"]
            assert (shown["audited"], shown["agree"], shown["given_up"]) == (count, 0, count)
            shown = done(acclimate("status", state.id, "--server", live.url)).out
            assert f"0 of {count} re-runs agree, {count} given up by the organizer" in shown
            checks = {check.name: check for check in inspected(lab, tmp_path)}
            assert checks["share"].status == "ok"
            assert (checks["audits"].status, checks["audits"].detail) == (
                "NOT CHECKED",
                f"0 of {count} drawn preparations were made again; {count} were given up by the organizer, as the evaluator says, and not made again",
            )
            give_shares(lab.staged)
            assert lab.state.phase is Phase.RELEASED


def inspected(lab: Lab, where: Path) -> list[Check]:
    """What the first custodian's own machine says before it releases its share."""
    staged, live = lab.staged, lab.staged.live
    own = keys.load(folder_of(live.custodians()[0], live, where / "custodian"))
    with Client(live.url) as client:
        source = custodian.Online(client)
        defined, _ = source.definition(staged.round)
        pin = pins.Pin(
            round=staged.round,
            defined=definition_digest(defined),
            log=defined["log"],
            organizer=defined["organizer"]["ed25519"],
            checkpoint=source.checkpoint(defined),
            seal=staged.seal["seal"],
            index=1,
            commitment=staged.seal["shares"][0]["commitment"],
        )
        pins.keep(own, pin, envelope=staged.envelopes[0])
        return custodian.inspect(source, own, staged.round, now=live.clock.now)


@dataclass
class Played:
    """The round, published.

    Attributes:
        lab: its second operator.
        told: what its re-runs came to.
        before: what a custodian's own machine said before the release.
        unprepared, unevaluated, whole: whose preparations, whose evaluations were given up, and whose nothing.
        bundle: its bundle.
    """

    lab: Lab
    told: list[dict]
    before: list[Check]
    unprepared: str
    unevaluated: str
    whole: str
    bundle: Path


def give_up(lab: Lab) -> str:
    """Give up what is blocked; whose it is."""
    live, rows = lab.staged.live, blocked(lab.staged.live)
    body = {"stages": [rows[0].key], "reason": WHY}
    answer = live.organizer().post(f"{lab.staged.path}/given-up", body)
    assert answer.json()["stages"] == sorted(row.key for row in rows), answer.text
    listed = live.organizer().get(f"{lab.staged.path}/stages").json()
    (entrant,) = {stage["entrant"] for stage in listed if stage["state"] == "blocked"}
    return str(entrant)


@pytest.fixture(scope="module")
def played(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    where = tmp_path_factory.mktemp("round")
    with draft(live, where) as (lab, named):
        staged = lab.staged = staging.open_round(live, where, auditor=named)
        sent = [send(staged, name, seed=seed)[1] for name, seed in PEOPLE.items()]
        with crashing(live, "prepare") as working:
            step_until(working, lambda: all(state_of(live, one)[0] == "accepted" for one in sent))
            live.clock.set(staged.fields["closes"], seconds=1)
            step_until(working, lambda: bool(blocked(live)))
            unprepared = give_up(lab)
            step_until(working, lambda: lab.state.phase is Phase.PREPARED)
        told, before = lab.run(), inspected(lab, where)
        give_shares(staged)
        with crashing(live, "evaluate", spared=unprepared) as working:
            step_until(working, lambda: bool(blocked(live)))
            unevaluated = give_up(lab)
            step_until(working, lambda: lab.state.phase is Phase.EVALUATED)
        (whole,) = PEOPLE.keys() - {unprepared, unevaluated}
        bundle = publish_evaluated(lab, where)
        yield Played(lab, told, before, unprepared, unevaluated, whole, bundle)


@pytest.mark.slow
def test_the_release_goes_on_and_the_audit_says_what_no_re_run_shows(played: Played, acclimate: Run) -> None:
    by_name = {
        name: {(job["agrees"], job["reason"]) for job in played.told if job["entrant"] == name} for name in PEOPLE
    }
    same = {(True, "the same bytes")}
    assert by_name == {played.unprepared: {(True, NOT_MADE)}, played.unevaluated: same, played.whole: same}
    (seen_before,) = [check for check in played.before if check.name == "audits"]
    assert seen_before.status == "NOT CHECKED" and seen_before.detail == (
        "12 of 18 drawn preparations were made again, and agree; 6 were given up by the organizer, as the evaluator says, and not made again"
    )
    key = played.lab.staged.fields["log"]
    report = verify.verify(played.bundle, log_key=key)
    assert report.failed == ()
    check = line(report, "honest preparation")
    assert check.status == "NOT CHECKED" and check.meaning.startswith("6 of 18 drawn preparations (")
    assert "and others) were given up by the round's organizer, as the evaluator says" in check.meaning
    assert check.meaning.endswith("the other 12 were made again by lab: 12 with equal bytes")
    said, _, evaluated = line(report, "prepared").where.partition(
        "; 8 evaluations were given up by the organizer, as the evaluator says: "
    )
    assert "6 of them were given up by the organizer, as the evaluator says" in said
    assert evaluated.count(played.unevaluated) == 8
    assert line(report, "predictions").where == "18 evaluations; 8 given up, which have no prediction"
    (played.bundle.parent / "log.vkey").write_text(key)
    seen = done(acclimate("verify", played.bundle, "--log-key", played.bundle.parent / "log.vkey", "--json")).json
    assert seen["ok"] and {c["name"]: c["status"] for c in seen["checks"]}["honest preparation"] == "NOT CHECKED"
    rows = json.loads((played.bundle / "prepared.json").read_bytes())
    assert {row["entrant"]: row["failed"]["reason"] for row in rows if "failed" in row} == {played.unprepared: SAID}


@pytest.mark.slow
def test_an_entry_made_again_tells_what_was_given_up(played: Played) -> None:
    def again(name: str) -> verify.Check:
        models = played.lab.staged.folder / f"model-{PEOPLE[name]}"
        return line(verify.verify(played.bundle, rerun=EntrantRerun(name, models)), "re-run")

    lost = " and 5 others: given up by the round's organizer, as the evaluator says, and not made again here; "
    check = again(played.unprepared)
    assert check.status == "NOT CHECKED" and f"preparation of {played.unprepared}, " in check.meaning
    assert check.meaning.endswith(f"{lost}{played.unprepared}: 0 preparations and 2 evaluations: 2 equal"), check
    check = again(played.unevaluated)
    assert check.status == "NOT CHECKED" and f"evaluation of {played.unevaluated}, " in check.meaning
    assert check.meaning.endswith(f"; {played.unevaluated}: 6 preparations and 0 evaluations: 6 equal"), check
    check = again(played.whole)
    assert (check.status, check.where) == ("ok", f"{played.whole}: 6 preparations and 8 evaluations: 14 equal")


@pytest.mark.slow
def test_report_mirror_and_mlflow_have_the_reason(played: Played, live: Live, tmp_path: Path, acclimate: Run) -> None:
    pytest.importorskip("mlflow")
    said = (f"{played.unprepared}: 6 preparations {SAID}", f"{played.unevaluated}: 8 evaluations {SAID}")
    # 1. The round's own report, and whoever makes one of the bundle.
    publish.report(live.store, played.lab.staged.round, tmp_path / "report.html")
    own = html.unescape((tmp_path / "report.html").read_text("utf-8"))
    done(acclimate("report", played.bundle, "--out", tmp_path / "other.html"))
    other = html.unescape((tmp_path / "other.html").read_text("utf-8"))
    assert all(sentence in own and sentence in other for sentence in said)
    # 2. A mirror, which folds nothing and keeps everything.
    with mirror.opened(tmp_path / "mirror", played.lab.staged.fields["log"]) as kept, Client(live.url) as client:
        mirror.follow(client, kept)
    entries = [records.parse(one) for one in (tmp_path / "mirror" / "entries.jsonl").read_bytes().splitlines()]
    assert sum(records.was_given_up(one) for one in entries) == 6 + 8
    # 3. MLflow, and that it agrees with the record.
    publisher.finish(live.store, live.settings, played.lab.staged.round)
    quiet = lambda done, total, what: None  # noqa: E731
    assert mirroring.check(live.store, live.settings, [], progress=quiet)["same"]
    query = "SELECT count(*) FROM tags WHERE key = 'acclimate.reason' AND value = ?"
    with closing(sqlite3.connect(live.settings.data / "mlflow.db")) as database:
        assert database.execute(query, (SAID,)).fetchone() == (6 + 8,)
    words = ("--tracking-uri", f"sqlite:///{live.settings.data / 'mlflow.db'}", "--competition", "marbles")
    done(acclimate("report", *words, "--out", tmp_path / "tracked.html"))
    tracked = html.unescape((tmp_path / "tracked.html").read_text("utf-8"))
    assert all(sentence in tracked for sentence in said)
    # 4. The list of stages.
    listed = live.anyone().get(f"{played.lab.staged.path}/stages").json()
    assert sum(stage["state"] == "failed" and stage["reason"] == SAID for stage in listed) == 6 + 8


@pytest.mark.slow
def test_the_auditor_reports_on_such_a_round(played: Played) -> None:
    lab = played.lab
    counts = auditor.report(lab.client, lab.keys, lab.staged.round, played.bundle)["checks"]
    assert counts["failed"] == 0 and counts["not_checked"] >= 1
