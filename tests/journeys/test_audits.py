"""A second operator over a real server and real preparations: an honest evaluator's work agrees, a dishonest one's is named and stops the round."""

import dataclasses
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import live as staging
import pytest
import stories
import tiny
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dispatching import dispatcher, give_shares, send, state_of, step_until
from labs import (
    ELSEWHERE,
    ORIGINAL,
    PEOPLE,
    TOLERANCE,
    Lab,
    audited,
    closed_round,
    lab_of,
    line,
    log_preparations,
    moved,
    publish_round,
    refuses,
)
from live import Live
from typer.testing import CliRunner

from acclimate import keys, log, rerun, round_jobs, verify
from acclimate.bundle_rerun import EntrantRerun
from acclimate.cli.main import app
from acclimate.client import auditor, folder, reruns
from acclimate.client.connection import Client
from acclimate.service import identity
from acclimate.verify import audits
from acclimate.verify.audit import Audit
from acclimate.verify.files import Bundle
from acclimate.verify.report import Failed, NotChecked
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase
from acclimate_runners import computing


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with staging.serve(tmp_path_factory.mktemp("server")) as served:
        yield served


@pytest.fixture(scope="module")
def lab(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A prepared round of two entrants, two of whose preparations an honest evaluator's second operator is to make again."""
    where = tmp_path_factory.mktemp("lab")
    client, own = lab_of(live, where / "keys")
    with pytest.MonkeyPatch.context() as patch, client:
        audited(patch, audits=2)
        staged = staging.open_round(live, where, auditor=json.loads((own.folder / "auditor.json").read_text()))
        found = Lab(staged, client, own)
        refuses("phase_wrong", auditor.draw, client, own, staged.round)
        sent = [send(staged, name, seed=seed)[1] for name, seed in PEOPLE.items()]
        with dispatcher(live) as working:
            step_until(working, lambda: all(state_of(live, s)[0] == "accepted" for s in sent))
            live.clock.set(staged.fields["closes"], seconds=1)
            step_until(working, lambda: found.state.phase is Phase.PREPARED)
        yield found


@pytest.fixture(scope="module")
def honest(lab: Lab) -> Lab:
    """The same round after its re-runs, one of which was interrupted."""
    first = reruns.run(lab.client, lab.keys, lab.staged.round)
    next(first)
    first.close()
    assert len(lab.state.audited) == 1
    lab.run()
    return lab


def test_before_the_draw_nobody_gets_a_file_and_no_share_is_taken(lab: Lab) -> None:
    status = lab.staged.live.anyone().get(lab.staged.path).json()
    assert status["auditor"] == {
        "name": "lab",
        "due": 2,
        "drawn": False,
        "audited": 0,
        "agree": 0,
        "given_up": 0,
        "reports": 0,
    }
    assert status["waiting_for"] == ["the re-runs of lab"] and "acclimate audit run" in status["next"]
    assert status["problem"] is None
    shown = CliRunner().invoke(app, ["status", lab.staged.round, "--server", lab.staged.live.url])
    assert "lab, 2 to be drawn" in shown.stdout
    refuses("phase_wrong", lab.client.audits, lab.staged.round)
    base = next(iter(lab.state.bases.values()))
    refuses("phase_wrong", lab.client.audit_file, lab.staged.round, base, lab.keys.folder / "file")
    with pytest.raises(AssertionError, match="has not drawn the 2"):
        give_shares(lab.staged)
    assert lab.state.released == {}


def test_an_honest_evaluators_work_agrees_byte_for_byte(honest: Lab) -> None:
    state = honest.state
    assert len(state.drawn or ()) == 2 and set(state.audited) == set(state.drawn or ())
    for key, record in state.audited.items():
        assert record["agrees"] and record["prepared"] == state.prepared[key]["prepared"]
        assert (record["tolerance"], record["reason"]) == (0, "the same bytes")
    assert honest.run() == []


def test_weights_are_forgotten_once_every_outcome_is_in_the_log(honest: Lab) -> None:
    assert not honest.work.exists()
    left = {path.name for path in honest.keys.folder.rglob("*") if path.is_file()}
    assert not any(name.endswith((".safetensors", ".parquet")) for name in left)


def test_only_the_rounds_auditor_gets_files_and_only_of_what_was_drawn(honest: Lab) -> None:
    state, live = honest.state, honest.staged.live
    files = {f for job in honest.client.audits(honest.staged.round) for f in job["files"].values()}
    address = f"{honest.staged.path}/audits/files/"
    some = next(iter(files))
    for name, role in (("organizer", "organizer"), ("ada", "entrant"), ("other-lab", "auditor")):
        assert live.actor(name, role).get(address + some).json()["code"] == "role_missing"
        assert live.actor(name, role).get(f"{honest.staged.path}/audits").json()["code"] == "role_missing"
    assert live.anyone().get(address + some).json()["code"] == "token_invalid"
    assert digests.of_file(honest.client.audit_file(state.id, some, honest.keys.folder / "got")) == some
    # With the auditor's token alone nobody gets them; the client signs each request.
    account = folder.load_account(honest.keys.folder)
    with account.connect() as thief:
        refuses("signature_invalid", thief.audits, state.id)
        refuses("signature_invalid", thief.audit_file, state.id, some, honest.keys.folder / "no")
    with Client(account.server, token=account.token, key=Ed25519PrivateKey.generate) as thief:
        refuses("signature_invalid", thief.audit_file, state.id, some, honest.keys.folder / "no")
    drawn = {state.prepared[key]["prepared"] for key in state.drawn or ()}
    others = {record["prepared"] for record in state.prepared.values()} - drawn - files
    assert others
    refuses("not_found", honest.client.audit_file, state.id, min(others), honest.keys.folder / "no")
    refuses("not_found", honest.client.audit_file, state.id, state.seal["ciphertext"], honest.keys.folder / "no")


def test_preparations_name_their_libraries_and_who_made_the_processor(honest: Lab) -> None:
    for record in honest.state.prepared.values():
        assert record["libraries"]["torch"] == metadata.version("torch") and "python" in record["libraries"]
        assert record["hardware"] == computing.hardware()


def test_a_stranger_neither_draws_nor_audits(honest: Lab) -> None:
    other = honest.staged.live.actor("other-lab", "auditor")
    request = other.sign("AuditDrawn", honest.state.id, secret="A" * 43 + "=")
    assert other.post(f"{honest.staged.path}/draw", request).json()["code"] == "role_missing"
    record = next(iter(honest.state.audited.values()))
    request = other.sign("PreparationAudited", honest.state.id, **record.fields)
    assert other.post(f"{honest.staged.path}/audits", request).json()["code"] == "role_missing"
    refuses(
        "role_missing",
        auditor.evidence,
        honest.client,
        keys.create(honest.keys.folder / "x", age=False),
        honest.state.id,
    )


def test_a_draw_serves_one_round(honest: Lab, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        audited(patch, audits=2)
        _, request = staging.defined(
            honest.staged.live, tmp_path, name="again", auditor=honest.staged.fields["auditor"],
            opens=records.format_time(honest.staged.live.clock.now),
            closes="2027-06-01T00:00:00.000000Z", closes_latest="2027-06-01T00:00:00.000000Z",
            release_by="2027-07-01T00:00:00.000000Z",
        )  # fmt: skip
    answer = honest.staged.live.organizer().post("/v1/rounds", request).json()
    assert answer["code"] == "conflict" and honest.staged.round in answer["detail"]


def test_a_log_that_does_not_extend_what_was_seen_gets_no_secret(honest: Lab) -> None:
    path = honest.keys.folder / "checkpoints" / f"{honest.state.id}.txt"
    kept = path.read_text("utf-8")
    server = honest.staged.live
    with server.store.snapshot() as tx:
        size = tx.size()
    forged = log.sign_checkpoint(identity.load(server.settings, server.store).signer, size - 1, b"\x07" * 32)
    path.write_text(forged, "utf-8")
    try:
        assert (
            "does not extend"
            in refuses("log_inconsistent", auditor.evidence, honest.client, honest.keys, honest.state.id).sentence
        )
    finally:
        path.write_text(kept, "utf-8")


# ---- the rest of the honest round, and what its bundle shows ----------------------------------------------------------


@pytest.fixture(scope="module")
def written(honest: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published round's bundle."""
    return publish_round(honest, tmp_path_factory.mktemp("bundle"))


def test_the_bundle_shows_who_made_what_again(honest: Lab, written: Path) -> None:
    report = verify.verify(written, log_key=honest.staged.fields["log"])
    assert report.failed == ()
    check = line(report, "honest preparation")
    assert (
        check.status == "ok" and check.where == "2 of 12 preparations drawn and made again by lab: 2 with equal bytes"
    )
    assert line(report, "re-run").status == "NOT CHECKED"


def test_an_entrants_files_give_the_same_again(honest: Lab, written: Path, tmp_path: Path) -> None:
    models = honest.staged.folder / "model-1"
    told: list[tuple[int, int, str]] = []
    report = verify.verify(
        written,
        rerun=EntrantRerun("ada", models),
        progress=lambda done, total, what: told.append((done, total, what)),
    )
    # Told is each check in turn, also of what this round has nothing of and the report no line.
    reported = [check.name for check in report.checks]
    assert [what for _, _, what in told if what in reported] == reported
    assert {done / total for done, total, _ in told} == {number / len(told) for number in range(len(told))}
    check = line(report, "re-run")
    assert check.status == "ok", check
    assert check.where == "ada: 6 preparations and 8 evaluations: 14 equal"
    # Without verified predictions only the preparations are held against the log.
    only = line(verify.verify(written, levels=["rerun"], rerun=EntrantRerun("ada", models)), "re-run")
    assert only.status == "ok" and "6 equal" in only.where and "were not made again" in only.where


def test_what_can_not_be_made_again_is_not_checked(written: Path, tmp_path: Path) -> None:
    def said(name: str, models: Path) -> str:
        check = line(verify.verify(written, levels=["rerun"], rerun=EntrantRerun(name, models)), "re-run")
        assert check.status == "NOT CHECKED"
        return check.meaning

    assert "'cal' has no entry" in said("cal", tmp_path)
    assert "has no config.json" in said("ada", tmp_path)
    other = tiny.model(tmp_path / "other", seed=9)
    assert f"{other['model.safetensors']} is sha256:" in said("ada", tmp_path / "other")


def test_the_auditor_reports_on_the_whole_bundle(honest: Lab, written: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    for path in written.rglob("*"):
        if path.is_file():
            to = tmp_path / "damaged" / path.relative_to(written)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(path.read_bytes())
    scores = next((tmp_path / "damaged" / "scores").rglob("*.parquet"))
    scores.write_bytes(scores.read_bytes()[:-1])
    refusal = refuses(
        "bundle_invalid", auditor.report, honest.client, honest.keys, honest.state.id, tmp_path / "damaged"
    )
    assert any(scores.name in problem for problem in refusal.problems)
    assert honest.state.reports == ()
    done = auditor.report(honest.client, honest.keys, honest.state.id, written)
    assert done["checks"]["failed"] == 0
    (record,) = honest.state.reports
    assert (
        record["bundle"] == digests.of_file(written / "MANIFEST") and record["ranking"] == honest.state.rankings[-1][0]
    )


# ---- a dishonest evaluator ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cheated(honest: Lab, written: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The same models in another round, all of whose preparations are made again; its evaluator logged what it liked.

    - of ada, tint, seed 11: other weights, said to be from the same class of hardware with another torch;
    - of ada, size: the honest weights with a little noise, said to be from other hardware;
    - of bea, tint: weights that were trained on something else, said to be from other hardware;
    - the others as they are.
    """
    live, where = honest.staged.live, tmp_path_factory.mktemp("cheated")
    made = auditor.keygen(honest.keys, name="lab", again=True)
    with pytest.MonkeyPatch.context() as patch:
        audited(patch, audits=100)
        staged = closed_round(live, where, name="cheated", auditor=made)
    found = Lab(staged, honest.client, honest.keys)

    def lie(entrant: str, task: str, seed: int, fields: dict[str, Any]) -> dict[str, Any]:
        if (entrant, task, seed) == ("ada", "tint", 11):
            return {"prepared": moved(found, fields["prepared"], where, by=1e-4)}
        if (entrant, task) == ("ada", "size"):
            return {"prepared": moved(found, fields["prepared"], where, by=1e-6), "hardware": ELSEWHERE}
        if (entrant, task) == ("bea", "tint"):
            return {"prepared": moved(found, fields["prepared"], where, by=1.0), "hardware": ELSEWHERE}
        return {}

    log_preparations(found, honest, lie)
    return found


def test_what_the_evaluator_made_up_is_named_and_only_a_voiding_leads_on(cheated: Lab) -> None:
    done = cheated.run()
    assert len(done) == 12
    wrong = {(job["entrant"], job["task"], job["seed"]): job["reason"] for job in done if not job["agrees"]}
    assert set(wrong) == {("ada", "tint", 11), *(("bea", "tint", seed) for seed in (11, 12, 13))}
    assert "other bytes on the same hardware class" in wrong["ada", "tint", 11]
    assert f"tolerance {TOLERANCE:g}" in wrong["bea", "tint", 12] and "validation nll" in wrong["bea", "tint", 12]
    names = {entry.submission: entry.entrant for entry in cheated.state.entries}
    for (submission, task, _), record in cheated.state.audited.items():
        if (names[submission], task) == ("ada", "size"):
            assert record["agrees"] and record["tolerance"] == TOLERANCE
    with pytest.raises(AssertionError, match="does not agree"):
        give_shares(cheated.staged)
    status = cheated.staged.live.anyone().get(cheated.staged.path).json()
    assert status["problem"]["code"] == "guard_failed" and "does not agree" in status["problem"]["sentence"]
    assert "void the round" in status["next"]
    found = CliRunner().invoke(app, ["audit", "run", cheated.staged.round, "--keys", str(cheated.keys.folder)])
    assert found.exit_code == 1 and "DOES NOT AGREE" in found.stdout


# ---- a dishonest evaluator whom nobody audits ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unlike(honest: Lab, written: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The same models in another round, all of whose preparations are made again; ada's for tint failed, it says, on other hardware."""
    live, where = honest.staged.live, tmp_path_factory.mktemp("unlike")
    made = auditor.keygen(honest.keys, name="lab", again=True)
    with pytest.MonkeyPatch.context() as patch:
        audited(patch, audits=100)
        staged = closed_round(live, where, name="unlike", auditor=made)
    found = Lab(staged, honest.client, honest.keys)

    def lie(entrant: str, task: str, seed: int, fields: dict[str, Any]) -> dict[str, Any]:
        if (entrant, task) != ("ada", "tint"):
            return {}
        for name in ("prepared", "candidates", "selected", "diverged"):
            fields.pop(name, None)
        return {"failed": {"reason": "a full disk", "log": stories.digest("log")}, "hardware": ELSEWHERE}

    log_preparations(found, honest, lie)
    return found


def test_what_a_machine_can_not_decide_keeps_nothing_else_waiting_and_is_made_anew(unlike: Lab) -> None:
    command = ["audit", "run", unlike.staged.round, "--keys", str(unlike.keys.folder), "--json"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 3, ran.output
    told = json.loads(ran.stdout)
    planned = {(key[1], key[2]) for key in unlike.state.preparations}
    open_jobs = {("ada", "tint", seed) for task, seed in planned if task == "tint"}
    assert {(job["entrant"], job["task"], job["seed"]) for job in told["undecided"]} == open_jobs
    for job in told["undecided"]:
        assert "a full disk" in job["reason"] and ELSEWHERE in job["reason"] and ELSEWHERE in job["hint"]
    # Everything else is in the log, and agrees; of the open ones nothing is.
    assert len(unlike.state.audited) == len(unlike.state.preparations) - len(open_jobs)
    assert all(record["agrees"] for record in unlike.state.audited.values())
    assert {(job["entrant"], job["task"], job["seed"]) for job in told["jobs"] if job["agrees"] is None} == open_jobs
    assert f"{len(open_jobs)} of the" in told["missing"]
    # The models are kept for the next run, which makes the open ones anew, and nothing else.
    assert unlike.work.is_dir() and not (unlike.work / "attempts").exists()
    said: list[str] = []
    again = list(reruns.run(unlike.client, unlike.keys, unlike.staged.round, say=said.append))
    assert {(job["entrant"], job["task"], job["seed"]) for job in again} == open_jobs
    assert all(job["agrees"] is None and job["index"] is None for job in again)
    assert [line for line in said if line.startswith("preparing again")] and not any("bea" in line for line in said)
    assert not any(line.startswith("downloading") for line in said)
    text = CliRunner().invoke(app, command[:-1])
    assert text.exit_code == 3 and text.stdout.count("UNDECIDED") >= len(open_jobs) and "hint: " in text.stdout


@pytest.fixture(scope="module")
def favoured(honest: Lab, written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of such a round without audits: the evaluator logged other models, and they were evaluated and scored as they are.

    - of ada, tint, seed 11: other weights, said to be from the same class of hardware;
    - of bea, size: the honest weights with a little noise, said to be from other hardware.
    """
    live, where = honest.staged.live, tmp_path_factory.mktemp("favoured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "DEFINITION", ORIGINAL.replace("audits = 0", f"audits = 0\naudit_tolerance = {TOLERANCE}"))
        staged = closed_round(live, where, name="favoured")
    lab = Lab(staged, honest.client, honest.keys)

    def lie(entrant: str, task: str, seed: int, fields: dict[str, Any]) -> dict[str, Any]:
        if (entrant, task, seed) == ("ada", "tint", 11):
            other = fields["libraries"] | {"torch": "2.0.0"}
            return {"prepared": moved(lab, fields["prepared"], where, by=1.0), "libraries": other}
        if (entrant, task) == ("bea", "size"):
            return {"prepared": moved(lab, fields["prepared"], where, by=1e-6), "hardware": ELSEWHERE}
        return {}

    log_preparations(lab, honest, lie)
    return publish_round(lab, where)


def test_an_entrants_work_made_again_names_what_was_made_up(favoured: Path, honest: Lab) -> None:
    report = verify.verify(favoured, rerun=EntrantRerun("ada", honest.staged.folder / "model-1"))
    (check,) = report.failed
    assert check.name == "re-run" and check.where == "predictions/ada/prepared-tint-11.parquet"
    assert "nll of the holdout" in check.meaning
    assert line(report, "honest preparation").status == "NOT CHECKED"


def test_other_hardware_agrees_within_the_declared_tolerance(favoured: Path, honest: Lab) -> None:
    check = line(verify.verify(favoured, rerun=EntrantRerun("bea", honest.staged.folder / "model-2")), "re-run")
    assert check.status == "ok", check
    said, _, apart = check.where.partition(", at most ")
    assert said == "bea: 6 preparations and 8 evaluations: 8 equal, 6 within the tolerance"
    assert 0 < float(apart.partition(" ")[0]) <= TOLERANCE and apart.endswith(f"as the evaluator names {ELSEWHERE}")


# ---- what the line says of each story ---------------------------------------------------------------------------------


def said_of(story: stories.Story, written: Path) -> str:
    audit = Audit(Bundle(written), None, (), written)
    audit.competition, audit.round = story.state.competition, story.state
    return audits.honest(audit)


def test_honest_preparation_is_ok_open_or_failed_by_the_log(written: Path) -> None:
    rules = stories.competition(audits='audits = 2\nauditor = "lab"\naudit_tolerance = 0.01')
    with pytest.raises(NotChecked, match="audits = 0"):
        said_of(stories.until(Phase.PREPARED), written)
    story = stories.until(Phase.PREPARED, rules)
    with pytest.raises(NotChecked, match="has not drawn the 2"):
        said_of(story, written)
    one, other = story.draw().state.drawn or ()
    story.audit(one, prepared=stories.digest("near"), hardware="another class", tolerance=0.01)
    with pytest.raises(NotChecked, match="1 of 2 drawn"):
        said_of(story, written)
    agreeing = dataclasses.replace(story)
    assert said_of(agreeing.audit(other), written).endswith(
        "1 with equal bytes, 1 by a validation nll within 0.01 only, the evaluator naming other hardware than the auditor's:"
        " cpu (of 12 in 12 preparations)"
    )
    story.audit(other, agrees=False, reason="other bytes")
    with pytest.raises(Failed, match="it does not agree: other bytes") as failed:
        said_of(story, written)
    assert failed.value.where.startswith("PreparationAudited of ")


@pytest.mark.parametrize(
    ("named", "counted"), [("cpu/x86_64/avx2", True), ("cpux", False), ("a class of its own", False)]
)
def test_hardware_that_the_definition_does_not_declare_excuses_no_other_bytes(
    named: str, counted: bool, written: Path
) -> None:
    """The evaluator's label decides whether equal bytes are asked for."""
    rules = stories.competition(audits='audits = 2\nauditor = "lab"\naudit_tolerance = 0.01')
    story = stories.until(Phase.CLOSED, rules)
    for key in story.state.preparation_plan():
        story.prepare(key, hardware=named)
    story.finish("PreparationFinished").draw()
    one, other = story.state.drawn or ()
    story.audit(one, prepared=stories.digest("near"), hardware="cpu", tolerance=0.01).audit(other, hardware=named)
    if counted:
        assert f": {named} (of 12 in 12 preparations)" in said_of(story, written)
    else:
        with pytest.raises(NotChecked, match=f"the first ran on {named!r}; the definition declares 'cpu'"):
            said_of(story, written)


# ---- comparing, without a machine -----------------------------------------------------------------------------------


def test_other_code_makes_nothing_again(written: Path) -> None:
    story = stories.begin()
    assert stories.digest("code") in refuses("code_other", rerun.require_same_code, story.state).sentence


def test_a_machine_that_contradicts_itself_says_nothing(honest: Lab, tmp_path: Path) -> None:
    key, shop = next(iter(honest.state.audited)), rerun.RerunFolder(tmp_path)
    built = honest.staged.folder
    name = next(entry.entrant for entry in honest.state.entries if entry.submission == key[0])
    model = rerun.ModelFiles({n: shop.blobs.put(p) for n, p in staging.model(honest.staged, seed=PEOPLE[name]).items()})
    for file in round_jobs.public_files(honest.state, [key[1]], model):
        shop.blobs.put(built / file)
    made = rerun.prepare(shop, honest.state, model, [key[1:]])[key[1:]]
    rerun.confirm(shop, honest.state, model, key[1:], again=made)
    other = dataclasses.replace(made, prepared=stories.digest("a flipped bit"))
    assert (
        "twice" in refuses("rerun_undecided", rerun.confirm, shop, honest.state, model, key[1:], again=other).sentence
    )


def test_a_re_run_needs_the_entrants_files(written: Path, tmp_path: Path) -> None:
    half = CliRunner().invoke(app, ["verify", str(written), "--rerun", "ada"])
    assert half.exit_code == 2 and "belong together" in half.output
    none = CliRunner().invoke(app, ["verify", str(written), "--rerun", "ada", "--models", str(tmp_path / "none")])
    assert isinstance(none.exception, Refusal) and none.exception.code == "file_unreadable"
    typo = CliRunner().invoke(app, ["verify", str(written), "--rerun", "adda", "--models", str(tmp_path)])
    assert isinstance(typo.exception, Refusal) and typo.exception.code == "entrant_unknown", typo.output
    assert "'adda'" in typo.exception.sentence and "ada" in typo.exception.hint.replace(",", "").split()
    part = CliRunner().invoke(app, ["verify", str(written), "--log", "--json"])
    assert {check["name"] for check in json.loads(part.stdout)["checks"]}.isdisjoint({"scores", "opening", "re-run"})
