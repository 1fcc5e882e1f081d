"""Rounds over real HTTP: the happy way through every route, and what each route refuses."""

import base64
import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter

import httpx
import live
import pyarrow as pa
import pytest
import tiny
from sqlalchemy import insert, select, update

from acclimate import custody, log
from acclimate.api import problems
from acclimate.service import identity, publish, quota, release, submit
from acclimate.store import quota_ledger, results, seals, stages, submissions
from acclimate_competitions import digests, metrics, rounds, tables
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Phase
from acclimate_competitions.records import format_time, parse, parse_time, sign


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def served(request, tmp_path):
    given = {"database": request.getfixturevalue("postgresql_url")} if request.param == "postgresql" else {}
    with live.serve(tmp_path, **given) as running:
        yield running


@pytest.fixture
def staged(served, tmp_path):
    """An open round, nobody in it yet."""
    return live.open_round(served, tmp_path)


@pytest.fixture
def ada(staged):
    return live.enter(staged, staged.live.actor("ada"))


def refused(answer, code, status=None):
    """The problem document of a refusal."""
    problem = answer.json()
    assert problem.get("code") == code, (answer.status_code, answer.text)
    assert answer.headers["Content-Type"] == problems.MEDIA_TYPE
    assert problem["request_id"] == answer.headers["X-Request-Id"]
    assert problem["status"] == answer.status_code
    if status is not None:
        assert answer.status_code == status
    return problem


# ---- the whole way -------------------------------------------------------------------------------------------------


def test_a_round_from_draft_to_published(served, tmp_path):
    staged = live.create(served, tmp_path)
    organizer, anyone = served.organizer(), served.anyone()
    assert anyone.get(staged.path).json()["next"].endswith(f"acclimate round seal {staged.round} FOLDER --keys DIR")
    live.seal(staged)
    status = anyone.get(staged.path).json()
    assert status["phase"] == "sealed"
    assert len(status["waiting_for"]) == 2 and "custodian-a" in status["waiting_for"][0]
    live.rehearse(staged)
    status = anyone.get(staged.path).json()
    assert (status["waiting_for"], status["next_at"]) == ([], staged.fields["opens"])
    assert served.tick() == []
    served.clock.set(staged.fields["opens"])
    assert served.tick() == ["RoundOpened"]
    entrants = [live.enter(staged, served.actor(name)) for name in ("ada", "bea")]
    baseline = register_baseline(staged)
    for seed, entrant in enumerate((*entrants, baseline), start=1):
        live.submit_model(staged, entrant, seed=seed)
    served.clock.set(staged.fields["closes"])
    assert served.tick() == ["RoundClosed"]
    prepare_all(staged)
    assert served.tick() == ["PreparationFinished"]
    documents = staged.share_documents(staged.seal, staged.envelopes)
    for index in (1, 3):
        answer = release_share(staged, index, documents[index])
        assert answer.status_code == 200, answer.text
    assert served.tick() == ["HoldoutOpened"]
    with served.store.snapshot() as tx:
        assert set(release.holdout_files(tx, staged.round)) == {"tint.parquet", "size.parquet"}
    refused(anyone.get(f"{staged.path}/ranking"), "phase_wrong", 409)
    evaluate_all(staged)
    assert served.tick() == ["EvaluationFinished"]
    hint = refused(anyone.get(f"{staged.path}/ranking"), "phase_wrong")["hint"]
    assert hint.endswith(f"acclimate round publish {staged.round} --keys DIR")
    document = organizer.get(f"{staged.path}/ranking").json()
    assert [row["entrant"] for row in document["baselines"]] == ["majority", "untrained"]
    assert {row["entrant"] for row in document["ranking"]} == {"ada", "bea"}
    publish_checked(staged, document)
    answer = anyone.get(f"{staged.path}/ranking")
    assert answer.content == digests.canonical(document)
    status = anyone.get(staged.path).json()
    assert [item["phase"] for item in status["phases"]] == [str(phase) for phase in Phase if phase != "voided"]
    assert (status["entries"], status["ranking"]) == (3, digests.of_bytes(answer.content))
    report = anyone.get(f"{staged.path}/report")
    assert report.status_code == 200 and "ada" in report.text
    bundle = anyone.get(f"{staged.path}/bundle")
    with zipfile.ZipFile(io.BytesIO(bundle.content)) as archive:
        assert archive.read("ranking.json") == answer.content
    assert anyone.get(f"{staged.path}/bundle").content == bundle.content
    assert all(path.is_file() for path in (served.settings.reports / staged.round).iterdir())
    check_the_log(staged)


def register_baseline(staged):
    """The organizer registers `untrained`, whose submissions a key of its own signs and the organizer's account sends."""
    organizer = staged.live.organizer()
    own = live.Actor("untrained", "organizer", live.Ed25519PrivateKey.generate(), organizer.http)
    request = organizer.sign(
        "EntrantRegistered", staged.round, entrant="untrained", ed25519=own.public, conflicts=["baseline"]
    )
    answer = organizer.post(f"{staged.path}/entrants", request)
    assert answer.status_code == 200, answer.text
    return own


def prepare_all(staged):
    """What the dispatcher does: one signed record for every preparation of the plan; one of them failed."""
    store = staged.live.store
    key = identity.load(staged.live.settings, staged.live.store).evaluator_key
    with store.transaction() as tx:
        state = tx.round(staged.round)
        for number, (submission, task, seed) in enumerate(state.preparation_plan()):
            fields = {
                "submission": submission,
                "task": task,
                "seed": seed,
                "recipe": state.defined["recipe"],
                "base": digests.of_json([submission]),
                "code": state.defined["code"],
                "hardware": "cpu",
            }
            done = {"prepared": digests.of_json([number]), "candidates": [], "selected": {"lr": 0.002, "epoch": 1}}
            failed = {"failed": {"reason": "out of memory", "log": digests.of_bytes(b"")}}
            tx.append(sign("ModelPrepared", staged.round, {**fields, **(done if number else failed)}, key=key))


def release_share(staged, index, document):
    custodian = staged.live.custodians()[index - 1]
    digest = custody.document_digest(document)
    record = custodian.sign("ShareReleased", staged.round, seal=staged.seal["seal"], index=index, document=digest)
    body = {"record": record, "document": base64.b64encode(document).decode()}
    return custodian.post(f"{staged.path}/shares", body)


def evaluate_all(staged):
    """What the dispatcher does: predictions, scores, results and signed records."""
    store, draw = staged.live.store, random.Random(3)
    key = identity.load(staged.live.settings, staged.live.store).evaluator_key
    with store.transaction() as tx:
        state = tx.round(staged.round)
        holdout = {
            task.name: tables.read(store.blobs.path(release.holdout_files(tx, staged.round)[f"{task.name}.parquet"]))
            for task in state.competition.tasks
        }
        rows = {row.accepted_index: row for row in tx.execute(select(submissions)).all()}
        models = state.model_digests()
        for submission, task, seed, protocol in state.evaluation_plan():
            row = rows[submission]
            table = predictions(row.entrant, task, seed, protocol, holdout[task], draw)
            scores = metrics.score_predictions(table, holdout[task], state.competition.task(task), cluster="cluster")
            found = {"predictions": keep(staged, table), "scores": keep(staged, scores)}
            stage = digests.of_json([submission, task, seed, protocol])
            stage_row = {"key": stage, "round": state.id, "kind": "evaluate", "submission": row.id, "task": task}
            tx.execute(insert(stages), {**stage_row, "seed": seed, "protocol": protocol, "state": "committed"})
            tx.execute(insert(results), {"stage": stage, "document": found, "at": format_time(tx.now())})
            fields = {
                "submission": submission,
                "task": task,
                "seed": seed,
                "protocol": protocol,
                "prepared": models[submission, task, seed, protocol],
                "predictions": found["predictions"],
                "count": table.num_rows,
            }
            tx.append(sign("ModelEvaluated", state.id, fields, key=key))


def predictions(entrant, task, seed, protocol, holdout, draw):
    count = holdout.num_rows
    lists = [[-draw.random() for _ in tiny.TASKS[task]] for _ in range(count)]
    columns = {"entrant": [entrant] * count, "protocol": [protocol] * count, "task": [task] * count}
    columns |= {"seed": pa.array([seed] * count, pa.int64()), "example": holdout.column("example")}
    columns |= {"loglikelihoods": lists, "text": pa.array([None] * count, pa.string())}
    return pa.table(columns).cast(tables.PREDICTIONS)


def keep(staged, table):
    path = staged.folder / "table.parquet"
    tables.write(table, path)
    return staged.live.store.blobs.put(path)


def publish_checked(staged, document):
    """Publish; a changed ranking, a changed digest and another's signature are refused before."""
    organizer = staged.live.organizer()

    def body(sent, **changes):
        fields = {"ranking": digests.of_json(sent), "policy": staged.fields["policy"], "reason": "", **changes}
        return {"record": organizer.sign("RankingPublished", staged.round, **fields), "ranking": sent}

    rows = document["ranking"]
    swapped = {**document, "ranking": [{**rows[0], "score": 0.99}, *rows[1:]]}
    refused(organizer.post(f"{staged.path}/ranking", body(swapped)), "guard_failed", 409)
    other = body(document, ranking=digests.of_json(swapped))
    refused(organizer.post(f"{staged.path}/ranking", other), "guard_failed")
    policy = body(document, policy="sha256:" + "0" * 64)
    refused(organizer.post(f"{staged.path}/ranking", policy), "guard_failed")
    assert publish.ranking(staged.live.store, staged.round).document() == document
    # Computed once for a last log entry: further requests get the very same.
    assert publish.ranking(staged.live.store, staged.round) is publish.ranking(staged.live.store, staged.round)
    first = organizer.post(f"{staged.path}/ranking", body(document))
    assert first.status_code == 200, first.text
    assert organizer.post(f"{staged.path}/ranking", body(document)).json() == first.json()
    refused(organizer.post(f"{staged.path}/ranking", body(document, reason="again")), "conflict")


def check_the_log(staged):
    """Records, entries, receipts and checkpoints tell the same story, and folding it gives the round."""
    anyone = staged.live.anyone()
    server = anyone.get("/v1/server").json()
    verifier = log.parse_vkey(server["log"])
    listed = anyone.get(f"{staged.path}/records").json()
    lines = anyone.get("/v1/log/entries", params={"start": 0, "end": 10_000}).content.splitlines()
    assert [digests.canonical(item["record"]) for item in listed] == [lines[item["index"]] for item in listed]
    numbered = [(item["index"], parse(lines[item["index"]])) for item in listed]
    competition = staged.live.store.competition(staged.fields["definition"])
    assert rounds.fold(numbered, competition).phase == "published"
    checkpoint = log.open_checkpoint(anyone.get("/v1/log/checkpoint").text, verifier).checkpoint
    assert checkpoint.root == digests.root_of_hashes([digests.leaf_hash(line) for line in lines])
    for index in (0, len(lines) - 1):
        receipt = log.Receipt.parse(anyone.get(f"/v1/log/proof/{index}").content)
        assert receipt.verify(verifier).encode() == lines[index]
    proof = anyone.get("/v1/log/consistency", params={"first": 2, "second": len(lines)}).json()["proof"]
    log.verify_consistency(
        [base64.b64decode(node) for node in proof],
        first=2,
        first_root=digests.root_of_hashes([digests.leaf_hash(line) for line in lines[:2]]),
        second=len(lines),
        second_root=checkpoint.root,
    )


# ---- defining, sealing, opening ------------------------------------------------------------------------------------


def test_a_round_is_begun_once_and_found_by_a_prefix(served, tmp_path):
    staged, request = live.defined(served, tmp_path)
    organizer, anyone = served.organizer(), served.anyone()
    first = organizer.post("/v1/rounds", request)
    again = organizer.post("/v1/rounds", request)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    name = first.json()["round"]
    assert [row["round"] for row in anyone.get("/v1/rounds").json()] == [name]
    assert anyone.get(f"/v1/rounds/{name[:14]}").json()["round"] == name
    for unknown in ("nowhere", name + "0", "%00", "m%25", "_"):
        refused(anyone.get(f"/v1/rounds/{unknown}"), "round_unknown", 404)
    other = organizer.sign(
        "RoundDefined", "", **{**staged.fields, "grace": 60, "closes_latest": staged.fields["closes"]}
    )
    refused(organizer.post("/v1/rounds", other), "round_exists", 409)
    _, second = live.defined(served, tmp_path, name="tiny-2")
    assert organizer.post("/v1/rounds", second).status_code == 201
    problem = refused(anyone.get("/v1/rounds/marbles"), "round_unknown", 404)
    assert name in problem["detail"] and second["round"] in problem["detail"]
    raw = (staged.folder / "competition.toml").read_bytes()
    assert anyone.get(f"/v1/rounds/{name}/definition").content == raw
    assert (
        anyone.get(f"/v1/rounds/{name}/files/tokenizer.json").content == (staged.folder / "tokenizer.json").read_bytes()
    )
    for file in ("splits/tint/holdout.parquet", "../competition.toml", "nothing"):
        refused(anyone.get(f"/v1/rounds/{name}/files/{file}"), "not_found", 404)


def test_what_a_round_definition_is_refused_for(served, tmp_path):
    staged, _ = live.defined(served, tmp_path)
    organizer = served.organizer()
    ghost = "sha256:" + "e" * 64
    files = staged.fields["files"]
    custodian = staged.fields["custodians"][0]

    def post(**changes):
        return organizer.post("/v1/rounds", organizer.sign("RoundDefined", "", **{**staged.fields, **changes}))

    holdout = staged.upload(staged.folder / "splits/tint/holdout.parquet")
    for changes, code, word in (
        ({"definition": ghost}, "blob_unknown", "blob"),
        ({"files": {**files, "tokenizer.json": ghost}}, "record_invalid", "tokenizer.json"),
        ({"files": {k: v for k, v in files.items() if "size" not in k}}, "record_invalid", "splits/size"),
        ({"files": {**files, "splits/tint/holdout.parquet": holdout}}, "record_invalid", "holdout"),
        ({"log": "elsewhere+00000000+AQ"}, "guard_failed", "log"),
        ({"code": ghost}, "guard_failed", "code"),
        ({"evaluators": [organizer.public]}, "guard_failed", "evaluators"),
        ({"quorum": 1}, "guard_failed", "quorum"),
        ({"recipe": ghost}, "guard_failed", "recipe"),
        ({"k": 3}, "guard_failed", "threshold"),
        ({"closes": staged.fields["opens"]}, "guard_failed", "dates"),
        (
            {"custodians": [{**custodian, "age": "age1nonsense"}, *staged.fields["custodians"][1:]]},
            "key_refused",
            "age",
        ),
        (
            {"opens": "2020-01-01T00:00:00.000000Z", "closes": "2020-01-02T00:00:00.000000Z"},
            "guard_failed",
            "would close",
        ),
    ):
        problem = refused(post(**changes), code)
        assert word in problem["detail"], problem
    with served.store.snapshot() as tx:
        assert tx.size() == 0


def test_a_definition_that_nobody_can_follow_is_refused_with_its_line(served, tmp_path):
    staged, _ = live.defined(served, tmp_path)
    toml = staged.folder / "competition.toml"
    toml.write_text(toml.read_text("utf-8").replace('"manual"', '"never"'), "utf-8")
    digest = staged.upload(toml)
    organizer = served.organizer()
    request = organizer.sign("RoundDefined", "", **{**staged.fields, "definition": digest})
    problem = refused(organizer.post("/v1/rounds", request), "definition_invalid", 422)
    assert any("line" in line and "publish" in line for line in problem["problems"])


def test_a_seal_must_be_what_the_bytes_say(served, tmp_path):
    staged = live.create(served, tmp_path)
    organizer = served.organizer()
    fields, envelopes = live.make_seal(staged)

    def post(given=envelopes, **changes):
        record = organizer.sign("HoldoutSealed", staged.round, **{**fields, **changes})
        return organizer.post(f"{staged.path}/seal", {"record": record, "envelopes": given})

    refused(post(ciphertext="sha256:" + "0" * 64), "blob_unknown", 404)
    refused(post(size=fields["size"] + 1), "seal_mismatch", 422)
    refused(post(block_root="sha256:" + "0" * 64), "seal_mismatch")
    refused(post(envelopes[:2]), "seal_mismatch")
    refused(post([envelopes[1], envelopes[0], envelopes[2]]), "seal_mismatch")
    refused(post([{**envelopes[0], "main": envelopes[1]["main"]}, *envelopes[1:]]), "seal_mismatch")
    refused(post(rows=0), "seal_mismatch")
    staged.seal, staged.envelopes = fields, envelopes
    refused(served.custodians()[0].post(f"{staged.path}/acknowledgements", live.acknowledgement(
        staged, served.custodians()[0])), "phase_wrong", 409)  # fmt: skip
    first = post()
    assert first.status_code == 200 and post().json() == first.json()
    other, other_envelopes = live.make_seal(staged)
    problem = refused(post(other_envelopes, **other), "conflict", 409)
    assert fields["seal"] in problem["detail"]


def test_a_round_opens_only_after_rehearsal_and_acknowledgements(served, tmp_path):
    staged = live.seal(live.create(served, tmp_path))
    served.clock.set(staged.fields["opens"], minutes=1)
    custodians = served.custodians()
    for custodian in custodians:
        assert served.tick() == []
        assert custodian.post(f"{staged.path}/acknowledgements", live.acknowledgement(staged, custodian)).is_success
    assert served.tick() == []
    body = {"index": 1, "document": base64.b64encode(b"{}").decode()}
    refused(custodians[0].post(f"{staged.path}/rehearsal/shares", body), "rehearsal_missing", 409)
    fields, envelopes = live.make_seal(staged, dummy=True)
    assert served.organizer().post(f"{staged.path}/rehearsal", {"fields": fields, "envelopes": envelopes}).is_success
    refused(custodians[0].post(f"{staged.path}/rehearsal/shares", body), "share_false", 422)
    documents = staged.share_documents(fields, envelopes)

    def share(custodian, index):
        given = {"index": index, "document": base64.b64encode(documents[index]).decode()}
        return custodian.post(f"{staged.path}/rehearsal/shares", given)

    refused(share(custodians[0], 2), "role_missing", 403)
    assert share(custodians[1], 2).json() == {
        "seal": fields["seal"], "received": 1, "needed": 2, "succeeded": False}  # fmt: skip
    assert served.tick() == []
    assert share(custodians[1], 2).json()["received"] == 1
    assert share(custodians[2], 3).json()["succeeded"] is True
    assert served.tick() == ["RoundOpened"]
    assert served.tick() == []
    problem = refused(
        served.organizer().post(f"{staged.path}/rehearsal", {"fields": fields, "envelopes": envelopes}), "phase_wrong"
    )
    assert "open" in problem["detail"]


def test_a_dummy_that_does_not_open_is_no_rehearsal(served, tmp_path):
    staged = live.seal(live.create(served, tmp_path))
    fields, envelopes = live.make_seal(staged, dummy=True)
    wrong = {**fields, "row_root": "sha256:" + "0" * 64}
    assert served.organizer().post(f"{staged.path}/rehearsal", {"fields": wrong, "envelopes": envelopes}).is_success
    documents = staged.share_documents(fields, envelopes)
    answers = []
    for index, custodian in enumerate(served.custodians(), start=1):
        body = {"index": index, "document": base64.b64encode(documents[index]).decode()}
        answers.append(custodian.post(f"{staged.path}/rehearsal/shares", body))
    assert answers[0].status_code == 200
    refused(answers[1], "seal_mismatch", 422)
    assert "rehearsal" in " ".join(served.anyone().get(staged.path).json()["waiting_for"])
    # A new dummy puts it right.
    live.rehearse(staged)
    assert served.anyone().get(staged.path).json()["rehearsal"]["succeeded"] is not None


def test_a_round_that_misses_its_own_closing_time_never_opens(served, tmp_path):
    staged = live.seal(live.create(served, tmp_path))
    served.clock.set(staged.fields["closes"])
    live.rehearse(staged)
    assert served.tick() == []
    assert "voids" in served.anyone().get(staged.path).json()["next"]
    voided = served.organizer().sign("RoundVoided", staged.round, reason="nobody acknowledged in time")
    assert served.organizer().post(f"{staged.path}/void", voided).status_code == 200
    assert served.phase(staged.round) == "voided"


# ---- deadlines -----------------------------------------------------------------------------------------------------


def test_the_deadline_is_half_open_on_every_entry_point(staged, ada):
    served = staged.live
    live.commit(staged, ada, seed=1)
    bea, organizer = served.actor("bea"), served.organizer()
    with served.store.snapshot() as tx:
        commitment = tx.round(staged.round).outstanding[0]
    late = live.submission(staged, ada, live.manifest(staged, "ada", live.model(staged, seed=2)))
    entering = {"entrant": "bea", "ed25519": bea.public, "conflicts": []}
    requests = {
        "entrants": (bea, bea.sign("EntrantRegistered", staged.round, **entering)),
        "submissions": (ada, late),
        "withdrawals": (ada, ada.sign("SubmissionWithdrawn", staged.round, entrant="ada", commitment=commitment)),
        # The last one: it moves the deadline.
        "extension": (
            organizer,
            organizer.sign("ClosingExtended", staged.round, closes=staged.fields["closes_latest"]),
        ),
    }
    for microseconds in (1, 0):
        served.clock.set(staged.fields["closes"], microseconds=microseconds)
        for what, (actor, body) in requests.items():
            problem = refused(actor.post(f"{staged.path}/{what}", body), "round_closed", 409)
            assert staged.fields["closes"] in problem["detail"]
            assert format_time(served.clock.now) in problem["detail"]
    # Nothing was logged since, so the clock may go back: a microsecond earlier all of it is taken.
    served.clock.set(staged.fields["closes"], microseconds=-1)
    for what, (actor, body) in requests.items():
        answer = actor.post(f"{staged.path}/{what}", body)
        assert answer.is_success, (what, answer.text)


def test_a_round_opens_and_closes_to_the_microsecond(served, tmp_path):
    staged = live.rehearse(live.seal(live.create(served, tmp_path)))
    for moment, transitions in (("opens", ["RoundOpened"]), ("closes", ["RoundClosed", "PreparationFinished"])):
        served.clock.set(staged.fields[moment], microseconds=-1)
        assert served.tick() == []
        served.clock.set(staged.fields[moment])
        assert served.tick() == transitions


@pytest.mark.parametrize(("microseconds", "taken"), [(-1, True), (0, False)])
def test_committed_bytes_may_come_within_the_grace_and_no_later(staged, ada, microseconds, taken):
    served = staged.live
    made, files = live.commit(staged, ada, seed=1)
    ghost, _ = live.commit(staged, ada, seed=2)
    served.clock.set(staged.fields["closes"])
    assert served.tick() == []
    status = served.anyone().get(staged.path).json()
    until = format_time(parse_time(staged.fields["closes"]).replace(second=0, minute=1))
    assert status["next_at"] == until
    assert status["next"] == f"no more submissions; waiting for the checks of 2 committed ones until {until}"
    served.clock.set(staged.fields["closes"], seconds=60, microseconds=microseconds)
    path = files["config.json"]
    answer = ada.put(f"/v1/submissions/{made['submission']}/files/{digests.of_file(path)}", path.read_bytes())
    if not taken:
        refused(answer, "round_closed", 409)
    else:
        live.send_files(ada, made, files)
        assert ada.post(f"/v1/submissions/{made['submission']}/complete").json()["state"] == "checking"
        assert submit.accept(served.store, made["submission"])["state"] == "accepted"
    served.clock.set(staged.fields["closes"], seconds=60)
    assert served.tick()[0] == "RoundClosed"
    assert ada.get(f"/v1/submissions/{made['submission']}").json()["state"] == ("accepted" if taken else "forfeited")
    assert ada.get(f"/v1/submissions/{ghost['submission']}").json()["state"] == "forfeited"
    closed = next(r["record"] for r in served.anyone().get(f"{staged.path}/records").json()
                  if r["record"]["type"] == "RoundClosed")  # fmt: skip
    assert (closed["count"], closed["forfeited"]["count"]) == ((1, 1) if taken else (0, 2))


def test_a_check_that_ends_after_the_close_forfeits_and_costs_nothing(staged, ada):
    served = staged.live
    made, files = live.commit(staged, ada, seed=1)
    live.send_files(ada, made, files)
    ada.post(f"/v1/submissions/{made['submission']}/complete")
    served.clock.set(staged.fields["closes"], seconds=61)
    # The dispatcher's answer comes before the tick that closes.
    assert submit.accept(served.store, made["submission"])["state"] == "forfeited"
    found = ada.get(f"/v1/submissions/{made['submission']}").json()
    assert "after the close" in found["reason"]
    assert found["quota"]["used"] == 0


def test_the_close_moves_later_only_and_not_beyond_the_latest(staged):
    served = staged.live

    def extend(closes):
        return served.organizer().post(
            f"{staged.path}/extension", served.organizer().sign("ClosingExtended", staged.round, closes=closes)
        )

    refused(extend(staged.fields["closes"]), "guard_failed", 409)
    refused(extend(staged.fields["release_by"]), "guard_failed")
    first = extend(staged.fields["closes_latest"])
    assert first.status_code == 200 and extend(staged.fields["closes_latest"]).json() == first.json()
    served.clock.set(staged.fields["closes"])
    assert served.tick() == []
    assert served.anyone().get(staged.path).json()["closes"] == staged.fields["closes_latest"]


# ---- submitting ----------------------------------------------------------------------------------------------------


def test_a_submission_repeated_is_the_same_and_changed_is_a_conflict(staged, ada):
    files = live.model(staged, seed=1)
    document = live.manifest(staged, "ada", files)
    body = live.submission(staged, ada, document)
    first = ada.post(f"{staged.path}/submissions", body)
    again = ada.post(f"{staged.path}/submissions", body)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert set(first.json()["missing"]) == {digests.of_file(path) for path in files.values()}
    # The commitment is the key: another body under it contradicts what is in the log (decision 0019).
    nonce = base64.b64encode(b"\x08" * 32).decode()
    for changed in (
        {"manifest": {**document, "title": "Another"}},
        {"manifest": {**document, "v": True}},
        {"nonce": nonce},
    ):
        problem = refused(ada.post(f"{staged.path}/submissions", {**body, **changed}), "conflict", 409)
        assert first.json()["submission"] in problem["detail"]
    live.send_files(ada, first.json(), files)
    done = ada.post(f"/v1/submissions/{first.json()['submission']}/complete").json()
    assert done == ada.post(f"/v1/submissions/{first.json()['submission']}/complete").json()
    assert ada.post(f"{staged.path}/submissions", body).json()["state"] == "checking"
    assert ada.get(f"/v1/submissions/{done['submission']}").json()["quota"]["used"] == 1
    # Late, but sent before: the first answer still stands.
    staged.live.clock.set(staged.fields["closes"], hours=1)
    assert ada.post(f"{staged.path}/submissions", body).status_code == 200


def test_a_copied_commitment_is_refused(staged, ada):
    bea = live.enter(staged, staged.live.actor("bea"))
    body = live.submission(staged, ada, live.manifest(staged, "ada", live.model(staged, seed=1)))
    assert ada.post(f"{staged.path}/submissions", body).status_code == 201
    commitment = body["committed"]["fields"]["commitment"]
    copied = {
        **body,
        "committed": bea.sign("SubmissionCommitted", staged.round, entrant="bea", commitment=commitment),
        "accepted": bea.sign("SubmissionAccepted", staged.round, entrant="bea", commitment=commitment),
    }
    refused(bea.post(f"{staged.path}/submissions", copied), "conflict", 409)


def test_a_commitment_that_its_manifest_does_not_give_is_no_submission(staged, ada):
    document = live.manifest(staged, "ada", live.model(staged, seed=1))
    body = {**live.submission(staged, ada, document), "manifest": {**document, "title": "Another"}}
    problem = refused(ada.post(f"{staged.path}/submissions", body), "manifest_invalid", 422)
    assert "committed was" in problem["detail"]
    # Nothing of it is there: the right manifest is a new submission.
    assert ada.post(f"{staged.path}/submissions", {**body, "manifest": document}).status_code == 201


def test_all_problems_of_a_manifest_are_told_at_once(staged, ada):
    files = live.model(staged, seed=1)
    document = live.manifest(
        staged,
        "ada",
        files,
        title="right\u202eleft",
        kind="lora-adapter",
        parameters=10**9,
        weights_after="sell",
        released="yesterday",
    )
    document["files"][1]["size"] = 10**9
    document["files"][2]["sha256"] = "sha256:" + "0" * 64
    problem = refused(
        ada.post(f"{staged.path}/submissions", live.submission(staged, ada, document)), "manifest_invalid"
    )
    for word in ("title", "kind", "parameters", "weights_after", "released", "at most 20000000", "competition fixes"):
        assert any(word in line for line in problem["problems"]), (word, problem["problems"])
    for document in (
        {},
        {**live.manifest(staged, "ada", files), "more": 1},
        live.manifest(staged, "ada", files, v=True),
        live.manifest(staged, "ada", files, round="elsewhere"),
        live.manifest(staged, "ada", files, files=[]),
        live.manifest(staged, "ada", files, files=[{"name": "config.json", "size": -1, "sha256": "x"}] * 3),
        live.manifest(staged, "ada", files, files="all"),
    ):
        commitment = digests.of_bytes(b"\x07" * 32 + digests.canonical(document))
        fields = {"entrant": "ada", "commitment": commitment}
        body = {
            "committed": ada.sign("SubmissionCommitted", staged.round, **fields),
            "accepted": ada.sign("SubmissionAccepted", staged.round, **fields),
            "nonce": base64.b64encode(b"\x07" * 32).decode(),
            "manifest": document,
        }
        assert refused(ada.post(f"{staged.path}/submissions", body), "manifest_invalid", 422)["problems"]
    with staged.live.store.snapshot() as tx:
        assert quota.used(tx, staged.round, "ada", zone="UTC", at=tx.now()) == (0, 0)


def test_the_acceptance_must_be_signed_and_say_the_same(staged, ada):
    bea = live.enter(staged, staged.live.actor("bea"))
    body = live.submission(staged, ada, live.manifest(staged, "ada", live.model(staged, seed=1)))
    fields = body["committed"]["fields"]
    for changes, code in (
        ({"accepted": {**body["accepted"], "sig": body["committed"]["sig"]}}, "signature_invalid"),
        ({"accepted": bea.sign("SubmissionAccepted", staged.round, **fields)}, "record_invalid"),
        (
            {"accepted": ada.sign("SubmissionAccepted", staged.round, **{**fields, "commitment": staged.seal["seal"]})},
            "record_invalid",
        ),
        ({"committed": {**body["committed"], "sig": body["accepted"]["sig"]}}, "signature_invalid"),
        ({"nonce": base64.b64encode(b"\x08" * 32).decode()}, "manifest_invalid"),
        ({"nonce": "short"}, "request_invalid"),
    ):
        refused(ada.post(f"{staged.path}/submissions", {**body, **changes}), code)
    with staged.live.store.snapshot() as tx:
        assert not tx.round(staged.round).submissions


def test_uploads_are_checked_before_during_and_after(staged, ada):
    made, files = live.commit(staged, ada, seed=1)
    base, path = f"/v1/submissions/{made['submission']}", files["model.safetensors"]
    data, digest = path.read_bytes(), digests.of_file(path)
    refused(ada.put(f"{base}/files/sha256:{'0' * 64}", data), "upload_mismatch", 422)
    refused(ada.put(f"{base}/files/{digest}", data + b"x"), "upload_mismatch")
    refused(ada.put(f"{base}/files/{digest}", data[:-1]), "upload_mismatch")
    refused(ada.put(f"{base}/files/{digest}", data[:-1] + b"\x00"), "upload_mismatch")
    chunked = ada.http.put(f"{base}/files/{digest}", content=iter([data]))
    assert "Content-Length" in refused(chunked, "request_invalid", 422)["hint"]
    refused(ada.post(f"{base}/complete"), "upload_mismatch")
    assert list(staged.live.store.blobs.root.glob("tmp/*")) == []
    assert set(ada.get(base).json()["missing"]) == {digests.of_file(p) for p in files.values()}
    for _ in range(2):
        live.send_files(ada, made, files)
    assert ada.get(base).json()["missing"] == []
    assert ada.post(f"{base}/complete").json()["state"] == "checking"
    refused(ada.put(f"{base}/files/{digest}", data), "phase_wrong", 409)


def test_a_digest_alone_never_stands_for_bytes_that_others_sent(staged, ada):
    made, files = live.commit(staged, ada, seed=1)
    live.send_files(ada, made, files)
    bea = live.enter(staged, staged.live.actor("bea"))
    body = live.submission(staged, bea, live.manifest(staged, "bea", files))
    answer = bea.post(f"{staged.path}/submissions", body).json()
    assert len(answer["missing"]) == 3
    refused(bea.post(f"/v1/submissions/{answer['submission']}/complete"), "upload_mismatch")


def test_a_broken_connection_leaves_no_bytes(staged, ada):
    made, files = live.commit(staged, ada, seed=1)
    path = files["model.safetensors"]
    host, port = staged.live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"PUT /v1/submissions/{made['submission']}/files/{digests.of_file(path)} HTTP/1.1\r\nHost: x\r\n"
        head += f"Authorization: Bearer {ada.token}\r\nContent-Length: {path.stat().st_size}\r\n\r\n"
        raw.sendall(head.encode() + path.read_bytes()[:100])
        wait_for(lambda: list(staged.live.store.blobs.root.glob("tmp/*")))
    wait_for(lambda: not list(staged.live.store.blobs.root.glob("tmp/*")))
    assert ada.get("/healthz").status_code == 200


def wait_for(condition, seconds=5.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def test_an_unreadable_model_is_refused_with_its_reasons_and_refunded(staged, ada):
    files = live.model(staged, seed=1)
    broken = staged.folder / "broken"
    broken.mkdir()
    for name, path in files.items():
        (broken / name).write_bytes(path.read_bytes())
    (broken / "model.safetensors").write_bytes(b"\x80\x04\x95pickle")
    (broken / "config.json").write_text('{"model_type": "bert"}', "utf-8")
    files = {path.name: path for path in sorted(broken.iterdir())}
    answer = ada.post(f"{staged.path}/submissions", live.submission(staged, ada, live.manifest(staged, "ada", files)))
    live.send_files(ada, answer.json(), files)
    done = ada.post(f"/v1/submissions/{answer.json()['submission']}/complete").json()
    assert done["state"] == "refused"
    assert "bert" in done["reason"] and "safetensors" in done["reason"]
    found = ada.get(f"/v1/submissions/{done['submission']}").json()
    # The round's total is given back, the day's try is not.
    assert (found["quota"]["used"], found["quota"]["used_today"]) == (0, 1)
    with staged.live.store.snapshot() as tx:
        assert [row["kind"] for row in quota.ledger(tx, staged.round, "ada")] == ["debit", "refused"]
    # The log says so too: the close waits for nobody, and nothing was forfeited.
    record = records_of(staged)["SubmissionRefused"]
    assert record["reason"] == done["reason"] and record["by"] in staged.fields["evaluators"]
    staged.live.clock.set(staged.fields["closes"])
    assert staged.live.tick()[0] == "RoundClosed"
    assert records_of(staged)["RoundClosed"]["forfeited"]["count"] == 0
    withdrawal = ada.sign("SubmissionWithdrawn", staged.round, entrant="ada", commitment=found["commitment"])
    refused(ada.post(f"{staged.path}/withdrawals", withdrawal), "round_closed", 409)


def records_of(staged):
    """The newest record of each type."""
    found = staged.live.anyone().get(f"{staged.path}/records").json()
    return {entry["record"]["type"]: entry["record"] for entry in found}


@pytest.mark.parametrize(
    ("reason", "kept"),
    [("", "the check gave no reason"), ("x" * 3000, "x" * 2000), ("bad \ud800 name", "bad ? name")],
)
def test_whatever_the_check_says_the_log_takes_it(staged, ada, reason, kept):
    served = staged.live
    made, _ = live.commit(staged, ada, seed=1)
    with served.store.transaction() as tx:
        tx.execute(update(submissions).values(state="checking"))
    submit.refuse(served.store, made["submission"], reason, identity=identity.load(served.settings, served.store))
    assert records_of(staged)["SubmissionRefused"]["reason"] == kept
    assert ada.get(f"/v1/submissions/{made['submission']}").json()["reason"] == kept


def test_a_check_that_refuses_too_late_is_told_to_the_entrant_alone(staged, ada):
    served = staged.live
    made, _ = live.commit(staged, ada, seed=1)
    with served.store.transaction() as tx:
        tx.execute(update(submissions).values(state="checking"))
    served.clock.set(staged.fields["closes"], seconds=60)
    submit.refuse(
        served.store, made["submission"], "it does not load", identity=identity.load(served.settings, served.store)
    )
    assert ada.get(f"/v1/submissions/{made['submission']}").json()["state"] == "refused"
    assert served.tick()[0] == "RoundClosed" and "SubmissionRefused" not in records_of(staged)
    assert records_of(staged)["RoundClosed"]["forfeited"]["count"] == 1


def test_the_last_accepted_submission_counts_and_a_withdrawn_one_does_not(staged, ada):
    served = staged.live
    first, second, third = (live.submit_model(staged, ada, seed=seed) for seed in (1, 2, 3))
    with served.store.snapshot() as tx:
        commitments = {row.id: row.commitment for row in tx.execute(select(submissions)).all()}
    withdrawal = ada.sign("SubmissionWithdrawn", staged.round, entrant="ada", commitment=commitments[third])
    answer = ada.post(f"{staged.path}/withdrawals", withdrawal)
    assert answer.status_code == 200 and ada.post(f"{staged.path}/withdrawals", withdrawal).json() == answer.json()
    unknown = ada.sign("SubmissionWithdrawn", staged.round, entrant="ada", commitment=staged.seal["seal"])
    refused(ada.post(f"{staged.path}/withdrawals", unknown), "submission_unknown", 404)
    assert ada.get(f"/v1/submissions/{third}").json()["state"] == "withdrawn"
    assert ada.get(f"/v1/submissions/{third}").json()["quota"]["used"] == 3
    served.clock.set(staged.fields["closes"])
    served.tick()
    with served.store.snapshot() as tx:
        (entry,) = tx.round(staged.round).entries
    assert entry.commitment == commitments[second]


# ---- quota ---------------------------------------------------------------------------------------------------------


def test_64_at_once_with_one_left_are_exactly_one_success(staged, ada):
    for seed in (1, 2, 3, 4):
        live.commit(staged, ada, seed=seed)
    document = live.manifest(staged, "ada", live.model(staged, seed=1))
    bodies = [live.submission(staged, ada, document, nonce=bytes([i]) * 32) for i in range(100, 164)]
    found, start = Counter(), threading.Barrier(64)

    def post(body):
        with httpx.Client(base_url=ada.http.base_url, headers=ada.http.headers, trust_env=False, timeout=60) as http:
            start.wait()
            answer = http.post(f"{staged.path}/submissions", json=body)
            found[answer.status_code, answer.json().get("code")] += 1

    threads = [threading.Thread(target=post, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(201, None): 1, (429, "quota_exceeded"): 63}
    with staged.live.store.snapshot() as tx:
        assert len(tx.round(staged.round).submissions) == 5
        assert len(tx.execute(select(quota_ledger)).all()) == 5


def test_the_quota_of_a_day_begins_anew_and_that_of_the_round_does_not(served, tmp_path, monkeypatch):
    text = tiny.DEFINITION.replace(
        '{ total = 5, per_day = 5, day = "UTC" }', '{ total = 3, per_day = 2, day = "Asia/Tokyo" }'
    )
    monkeypatch.setattr(tiny, "DEFINITION", text)
    latest = "2027-03-09T12:00:00.000000Z"
    staged = live.open_round(served, tmp_path, closes=latest, closes_latest=latest)
    ada = live.enter(staged, served.actor("ada"))

    def post(seed):
        document = live.manifest(staged, "ada", live.model(staged, seed=1))
        return ada.post(f"{staged.path}/submissions", live.submission(staged, ada, document, nonce=bytes([seed]) * 32))

    served.clock.set("2027-03-01T14:59:59.999999Z")
    assert [post(i).status_code for i in (1, 2)] == [201, 201]
    assert "tries of 2027-03-01" in refused(post(3), "quota_exceeded", 429)["detail"]
    served.clock.set("2027-03-01T15:00:00.000000Z")  # midnight in Tokyo
    assert post(3).status_code == 201
    assert "3 of 3" in refused(post(4), "quota_exceeded")["detail"]
    # Withdrawn while uploading: as if it had never been.
    with served.store.snapshot() as tx:
        commitment = tx.round(staged.round).outstanding[0]
    ada.post(
        f"{staged.path}/withdrawals",
        ada.sign("SubmissionWithdrawn", staged.round, entrant="ada", commitment=commitment),
    )
    assert post(4).status_code == 201


# ---- releasing, opening, voiding -----------------------------------------------------------------------------------


def test_a_share_released_early_is_refused_and_not_kept(staged, ada):
    served = staged.live
    documents = staged.share_documents(staged.seal, staged.envelopes)
    problem = refused(release_share(staged, 1, documents[1]), "phase_wrong", 409)
    assert "open" in problem["detail"] and "SubmissionCommitted" in problem["detail"]
    live.submit_model(staged, ada, seed=1)
    served.clock.set(staged.fields["closes"])
    assert served.tick() == ["RoundClosed"]
    refused(release_share(staged, 1, documents[1]), "phase_wrong", 409)
    with served.store.snapshot() as tx:
        assert release.released_documents(tx, staged.seal["seal"]) == []
    assert documents[1] not in b"".join(p.read_bytes() for p in served.settings.data.glob("acclimate.db*"))


def prepared_round(staged, ada):
    live.submit_model(staged, ada, seed=1)
    staged.live.clock.set(staged.fields["closes"])
    staged.live.tick()
    prepare_all(staged)
    staged.live.tick()
    assert staged.live.phase(staged.round) == "prepared"
    return staged.share_documents(staged.seal, staged.envelopes)


def test_a_false_share_is_refused_and_named(staged, ada):
    served = staged.live
    documents = prepared_round(staged, ada)
    custodian = served.custodians()[0]
    false = documents[1].replace(b'"share":"', b'"share":"A')
    refused(release_share(staged, 1, false), "share_false", 422)
    # The right digest signed, another document sent.
    record = custodian.sign("ShareReleased", staged.round, seal=staged.seal["seal"], index=1,
                            document=custody.document_digest(documents[1]))  # fmt: skip
    body = {"record": record, "document": base64.b64encode(false).decode()}
    refused(custodian.post(f"{staged.path}/shares", body), "share_false")
    with served.store.snapshot() as tx:
        assert not tx.round(staged.round).released
    first = release_share(staged, 1, documents[1])
    assert first.json()["released"] == 1
    assert release_share(staged, 1, documents[1]).json()["index"] == first.json()["index"]
    said = served.anyone().get(staged.path).json()
    assert said["next"].startswith("any 1 more of custodian-b, custodian-c must release their share, by ")
    assert said["waiting_for"] == ["the share of any 1 more of custodian-b, custodian-c"]


def test_a_lost_ciphertext_is_said_in_the_status_and_holds_nobody_else_up(staged, ada, tmp_path):
    served = staged.live
    documents = prepared_round(staged, ada)
    path = served.store.blobs.path(staged.seal["ciphertext"])
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    other = live.rehearse(live.seal(live.create(served, tmp_path, name="tiny-2", opens=staged.fields["closes"],
        closes=staged.fields["closes_latest"])))  # fmt: skip
    for index in (1, 2):
        release_share(staged, index, documents[index])
    assert served.tick() == ["RoundOpened"]
    status = served.anyone().get(staged.path).json()
    assert (status["phase"], status["problem"]["code"]) == ("released", "blob_corrupt")
    assert "uploaded the sealed holdout again" in status["next"]
    assert served.tick() == []
    assert served.phase(other.round) == "open"
    # The copy was ours to keep: with the bytes that were sealed it goes on.
    assert served.organizer().put(f"/v1/blobs/{staged.seal['ciphertext']}", whole).status_code == 200
    assert served.tick() == ["HoldoutOpened"]
    assert served.anyone().get(staged.path).json()["problem"] is None


def rewritten(folder, **columns):
    """The task tint's holdout with other columns; None takes one away."""
    path = folder / "splits/tint/holdout.parquet"
    found = {**tables.read(path).to_pydict(), **columns}
    tables.write(pa.table({name: values for name, values in found.items() if values is not None}), path)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda folder: (folder / "splits/tint").rename(folder / "splits/TINT"), "'TINT.parquet' belongs to no task"),
        (lambda folder: rewritten(folder, target=None), "column 'target' stands 0 times"),
        (lambda folder: rewritten(folder, cluster=None), "column 'cluster' stands 0 times"),
        (lambda folder: rewritten(folder, input=list(range(12))), "it must be string"),
        (lambda folder: rewritten(folder, target=["red"] * 11 + [None]), "1 nulls"),
        (
            lambda folder: rewritten(folder, target=["red"] * 11 + ["mauve"]),
            "the target of row 11 is not among the choices",
        ),
        (lambda folder: rewritten(folder, example=["twice"] * 12), "stands twice"),
    ],
)
def test_a_sealed_holdout_that_nobody_can_evaluate_stops_its_own_round_only(served, tmp_path, spoil, word):
    staged = live.create(served, tmp_path)
    spoil(staged.folder)
    live.rehearse(live.seal(staged))
    for moment, kinds in (("opens", ["RoundOpened"]), ("closes", ["RoundClosed", "PreparationFinished"])):
        served.clock.set(staged.fields[moment])
        assert served.tick() == kinds
    documents = staged.share_documents(staged.seal, staged.envelopes)
    for index in (1, 2):
        assert release_share(staged, index, documents[index]).status_code == 200
    assert served.tick() == []
    status = served.anyone().get(staged.path).json()
    assert (status["phase"], status["problem"]["code"]) == ("released", "seal_mismatch")
    assert word in status["problem"]["sentence"] and "void the round" in status["next"]
    with served.store.snapshot() as tx:
        assert release.holdout_files(tx, staged.round) == {}


def test_a_full_disk_at_the_opening_is_tried_again(staged, ada):
    served = staged.live
    documents = prepared_round(staged, ada)
    for index in (1, 2):
        release_share(staged, index, documents[index])
    work = served.settings.work
    for path in work.iterdir():
        path.rmdir()
    work.rmdir()
    work.write_text("in the way", "utf-8")  # stands for a disk that can't be written to
    with contextlib.suppress(FileExistsError):
        assert served.tick() == []
    work.unlink()
    assert served.tick() == ["HoldoutOpened"]


def test_voiding_needs_the_custodians_after_the_close(staged, ada):
    served = staged.live
    prepared_round(staged, ada)
    organizer = served.organizer()
    fields = {"reason": "the labels are wrong"}

    def approval(custodian):
        from acclimate_competitions import records

        return records.approve("RoundVoided", staged.round, fields, by=organizer.public, key=custodian.key)

    def void(*approvals):
        record = organizer.sign("RoundVoided", staged.round, **fields)
        record["fields"] = {**fields, "approvals": list(approvals)}
        return organizer.post(f"{staged.path}/void", record)

    a, b, _ = served.custodians()
    refused(void(), "guard_failed", 409)
    refused(void(approval(a), approval(a)), "guard_failed")
    refused(void(approval(a), approval(ada)), "guard_failed")
    refused(void({**approval(a), "sig": approval(b)["sig"]}), "signature_invalid")
    assert void(approval(a), approval(b)).status_code == 200
    assert served.phase(staged.round) == "voided"
    refused(
        organizer.post(f"{staged.path}/void", organizer.sign("RoundVoided", staged.round, reason="x")), "phase_wrong"
    )


def test_voiding_ends_what_waits_and_costs_the_entrant_nothing(staged, ada):
    served, organizer = staged.live, staged.live.organizer()
    uploading, _ = live.commit(staged, ada, seed=1)
    checking, files = live.commit(staged, ada, seed=2)
    live.send_files(ada, checking, files)
    assert ada.post(f"/v1/submissions/{checking['submission']}/complete").json()["state"] == "checking"
    accepted = live.submit_model(staged, ada, seed=3)
    row = {"round": staged.round, "kind": "check", "submission": checking["submission"], "attempts": 3}
    with served.store.transaction() as tx:
        for state in ("pending", "running", "blocked", "committed"):
            tx.execute(insert(stages), {**row, "key": digests.of_json(state), "state": state})
    record = organizer.sign("RoundVoided", staged.round, reason="the labels are wrong")
    first = organizer.post(f"{staged.path}/void", record)
    assert first.status_code == 200 and organizer.post(f"{staged.path}/void", record).json() == first.json()
    for made in (uploading, checking):
        found = ada.get(f"/v1/submissions/{made['submission']}").json()
        assert (found["state"], found["reason"]) == ("forfeited", "the round was voided")
    found = ada.get(f"/v1/submissions/{accepted}").json()
    assert (found["state"], found["quota"]["used"], found["quota"]["used_today"]) == ("accepted", 1, 1)
    assert served.anyone().get(staged.path).json()["stages"] == {"failed": 3, "committed": 1}
    # A check that ends now is no longer waited for, not even in a folder that an older version wrote.
    for _ in range(2):
        assert submit.accept(served.store, checking["submission"])["state"] == "forfeited"
        with served.store.transaction() as tx:
            mine = submissions.c.id == checking["submission"]
            tx.execute(update(submissions).where(mine).values(state="checking"))
    path = live.model(staged, seed=1)["config.json"]
    late = ada.put(f"/v1/submissions/{uploading['submission']}/files/{digests.of_file(path)}", path.read_bytes())
    refused(late, "round_closed", 409)


def test_custody_that_fails_is_said_and_lets_the_organizer_void_alone(staged, ada):
    served = staged.live
    prepared_round(staged, ada)
    served.clock.set(staged.fields["release_by"])
    status = served.anyone().get(staged.path).json()
    assert "custody failure" in status["problem"]["sentence"]
    record = served.organizer().sign("RoundVoided", staged.round, reason="two custodians are gone")
    assert served.organizer().post(f"{staged.path}/void", record).status_code == 200


# ---- bad requests and bad days -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "body"),
        (b"{not json", "body"),
        (b"[]", "body"),
        (b'{"type": "EntrantRegistered"}', "fields"),
        (b'{"type": "ClosingExtended", "round": "r", "fields": {}, "by": "k", "sig": "s"}', "type"),
        (b"\xff\xfe", "body"),
    ],
)
def test_bad_bodies_are_told_what_is_wrong(staged, ada, body, word):
    answer = ada.http.post(f"{staged.path}/entrants", content=body, headers={"Content-Type": "application/json"})
    problem = refused(answer, "request_invalid", 422)
    assert any(word in line for line in problem["problems"]), problem


def test_all_problems_of_a_body_are_told_and_nothing_extra_is_taken(staged, ada):
    request = ada.sign("EntrantRegistered", staged.round, entrant="ada", ed25519=ada.public, conflicts=[])
    request["fields"] |= {"entrant": 7, "conflicts": "none", "admin": True}
    request["at"] = "2027-03-01T00:00:00.000000Z"
    problem = refused(ada.post(f"{staged.path}/entrants", request), "request_invalid", 422)
    for word in ("fields.entrant", "fields.conflicts", "fields.admin", "at"):
        assert any(line.startswith(word) for line in problem["problems"]), (word, problem["problems"])


def test_a_body_beyond_the_limit_is_refused_unread(staged, ada):
    answer = ada.http.post(f"{staged.path}/entrants", content=b" " * (17 << 20))
    refused(answer, "request_invalid", 413)
    answer = ada.http.post(f"{staged.path}/entrants", content=(b" " * (1 << 20) for _ in range(17)))
    refused(answer, "request_invalid", 413)


def test_an_organizers_upload_has_its_limits_too(tmp_path):
    with live.serve(tmp_path, upload_limit=100) as served:
        organizer = served.organizer()
        data = b"x" * 101
        refused(organizer.put(f"/v1/blobs/{digests.of_bytes(data)}", data), "upload_mismatch")
        refused(organizer.put("/v1/blobs/nonsense", b"x"), "blob_unknown")
        assert organizer.put(f"/v1/blobs/{digests.of_bytes(b'x')}", b"x").json()["size"] == 1
        assert organizer.put(f"/v1/blobs/{digests.of_bytes(b'')}", b"").json()["size"] == 0


def test_unknown_addresses_methods_and_entries(served):
    anyone = served.anyone()
    refused(anyone.get("/v1/nothing"), "not_found", 404)
    refused(anyone.delete("/v1/rounds"), "not_found", 405)
    refused(anyone.get("/v1/log/proof/0"), "entry_unknown", 404)
    refused(anyone.get("/v1/log/proof/-1"), "request_invalid", 422)
    refused(anyone.get("/v1/log/proof/99999999999999999999"), "request_invalid")
    refused(anyone.get("/v1/log/entries", params={"start": 0, "end": 1}), "entry_unknown")
    refused(anyone.get("/v1/log/entries", params={"start": 1, "end": 1}), "request_invalid")
    refused(anyone.get("/v1/log/consistency", params={"first": 0, "second": 5}), "entry_unknown")
    for part in ("", "/records", "/stages", "/definition", "/ranking", "/bundle", "/report", "/files/x"):
        refused(anyone.get(f"/v1/rounds/nowhere{part}"), "round_unknown", 404)
    assert anyone.get("/readyz").json()["status"] == "ready"


def test_a_request_id_of_the_caller_is_kept_where_it_is_harmless(served):
    anyone = served.anyone()
    assert anyone.get("/healthz", headers={"X-Request-Id": "abc-12345"}).headers["X-Request-Id"] == "abc-12345"
    assert anyone.get("/healthz", headers={"X-Request-Id": "<script>"}).headers["X-Request-Id"] != "<script>"


def test_records_come_in_pages(staged, ada):
    anyone = staged.live.anyone()
    everything = anyone.get(f"{staged.path}/records").json()
    assert len(everything) > 4

    def page(**parameters):
        return anyone.get(f"{staged.path}/records", params=parameters)

    assert page(limit=1).json() == everything[:1]
    assert page(start=everything[2]["index"], limit=2).json() == everything[2:4]
    assert page(start=everything[2]["index"]).json() == everything[2:]
    assert page(start=10**6).json() == []
    for bad in ({"start": -1}, {"limit": 0}, {"limit": "all"}):
        refused(page(**bad), "request_invalid", 422)


def test_a_report_in_the_making_keeps_nobody_else_waiting(staged, ada):
    served = staged.live
    for index, document in list(prepared_round(staged, ada).items())[:2]:
        release_share(staged, index, document)
    served.tick()
    evaluate_all(staged)
    assert served.tick() == ["EvaluationFinished"]
    publish_checked(staged, served.organizer().get(f"{staged.path}/ranking").json())
    # A pipe where the draft is written: the maker waits in it until somebody reads.
    pipe = served.settings.reports / staged.round / ".draft-report.html.partial"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    answers, address = [], f"{staged.path}/report"

    def ask(timeout):
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(base_url=served.url, trust_env=False, timeout=timeout) as http,
        ):
            answers.append(http.get(address))

    makers = [threading.Thread(target=ask, args=(60,)) for _ in range(60)]
    for thread in makers:
        thread.start()
    try:
        wait_for(lambda: len(answers) == 59)
        assert served.anyone().get(staged.path, timeout=5).status_code == 200
        for answer in answers:
            refused(answer, "busy", 503)
            assert int(answer.headers["Retry-After"]) >= 1
        refused(served.anyone().get(f"{staged.path}/bundle", timeout=5), "busy", 503)
    finally:
        assert "ada" in pipe.read_text("utf-8")
        for thread in makers:
            thread.join()
    for left in pipe.parent.iterdir():
        left.unlink()
    assert "ada" in served.anyone().get(address).text


def test_rounds_are_folded_before_the_first_request(tmp_path):
    with live.serve(tmp_path) as first:
        made = live.create(first, tmp_path)
    with live.serve(tmp_path) as second:
        assert second.store.recall(made.round).phase == "draft"
    # A round whose definition is lost is no reason not to serve the others.
    first.store.blobs.path(made.fields["definition"]).unlink()
    with live.serve(tmp_path) as third:
        assert third.store.recall(made.round) is None
        assert third.anyone().get("/healthz").status_code == 200
        refused(third.anyone().get(made.path), "blob_unknown")


def test_a_busy_database_is_503_with_retry_after(served, monkeypatch):
    from acclimate import database

    monkeypatch.setattr(database, "WAIT_SECONDS", 0.05)
    someone = served.stranger("late")
    with served.store.transaction():
        answer = someone.post("/v1/accounts", someone.registration())
    refused(answer, "busy", 503)
    assert int(answer.headers["Retry-After"]) >= 1
    assert someone.post("/v1/accounts", someone.registration()).status_code == 201


def test_what_nobody_foresaw_tells_the_caller_nothing_but_the_request_id(served, caplog):
    staged_row = {"round": "r", "seal": "sha256:" + "1" * 64, "kind": "real", "header": {}, "envelopes": []}
    with served.store.transaction() as tx:
        rest = "" if served.store.engine.dialect.name == "sqlite" else " CASCADE"
        tx.connection.exec_driver_sql(f"DROP TABLE stages{rest}")
        with contextlib.suppress(Exception):
            tx.execute(insert(seals), {**staged_row, "number": 0, "received": ""})
    anyone = served.anyone()
    organizer = served.organizer()
    assert organizer.get("/v1/rounds").status_code == 200
    with served.store.transaction() as tx:
        tx.connection.exec_driver_sql("ALTER TABLE rounds RENAME TO gone")
    answer = anyone.get("/v1/rounds")
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (500, "internal_error")
    assert "gone" not in answer.text and "Traceback" not in answer.text and "sql" not in answer.text.lower()
    assert problem["request_id"] in problem["detail"]
    assert any(problem["request_id"] in record.getMessage() for record in caplog.records)
    assert served.anyone().get("/healthz").status_code == 200


def test_a_corrupt_blob_is_never_served_as_the_definition(served, tmp_path):
    staged = live.create(served, tmp_path)
    served.store._competitions.clear()
    path = served.store.blobs.path(staged.fields["definition"])
    path.chmod(0o644)
    path.write_bytes(b"other")
    served.store.folds._kept.clear()
    refused(served.anyone().get(f"{staged.path}/definition"), "blob_corrupt", 500)


def test_a_submission_that_waits_is_not_touched_by_a_second_answer_of_the_check(staged, ada):
    served = staged.live
    made, _ = live.commit(staged, ada, seed=1)
    signer = identity.load(served.settings, served.store)
    submit.refuse(served.store, made["submission"], "too early", identity=signer)
    assert submit.accept(served.store, made["submission"])["state"] == "uploading"
    with served.store.transaction() as tx:
        tx.execute(update(submissions).values(state="checking"))
    submit.refuse(served.store, made["submission"], "it does not load", identity=signer)
    assert submit.accept(served.store, made["submission"])["state"] == "refused"
    with pytest.raises(Refusal):
        submit.accept(served.store, "nothing")


def test_the_process_says_where_it_listens_and_ends_when_asked(tmp_path):
    code = (
        "import sys, pathlib; from acclimate import config; from acclimate.api import server;"
        "server.serve(config.load(pathlib.Path(sys.argv[1]), environ={}, given={'port': 0}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "data")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split(" on ")[1].split(" ")[0]
        wait_for(lambda: _answers(url), seconds=20)
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=20)
    assert rest == ""
    assert [json.loads(line)["event"] for line in errors.splitlines()] == ["started", "stopped"]
    assert process.returncode == 0
    assert (tmp_path / "data" / "VERSION").read_text() == "1\n"


def _answers(url):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    return False


def test_a_taken_port_is_a_refusal(served):
    from acclimate.api import server

    port = int(served.url.rpartition(":")[2])
    with pytest.raises(Refusal) as caught:
        server.listen("127.0.0.1", port)
    assert caught.value.code == "config_invalid"
    with pytest.raises(Refusal):
        server.listen("nowhere.invalid", 0)
