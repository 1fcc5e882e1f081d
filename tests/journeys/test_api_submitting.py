"""Submissions over real HTTP: repeated, copied, broken, unreadable; and the quota that they are counted against."""

import base64
import json
import socket
import threading
from collections import Counter

import httpx
import live
import pytest
import tiny
from by_hand import ada, refused, served, staged
from safetensors.numpy import load_file, save_file
from sqlalchemy import select, update
from waiting import until

from acclimate.service import identity, quota, submit
from acclimate.store import quota_ledger, submissions
from acclimate_competitions import digests
from acclimate_competitions.errors import Refusal

__all__ = ["ada", "served", "staged"]


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
        kind="hf-sequence-classifier",
        parameters=10**9,
        weights_after="sell",
        released="yesterday",
    )
    for never in ("9999-99-99", "٢٠٢٦-٠١-٠١", "0000-01-01"):
        body = live.submission(staged, ada, live.manifest(staged, "ada", files, released=never))
        problem = refused(ada.post(f"{staged.path}/submissions", body), "manifest_invalid")
        assert problem["problems"] == ["released must be a date that exists, such as 2027-03-01"]
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
        until(lambda: list(staged.live.store.blobs.root.glob("tmp/*")))
    until(lambda: not list(staged.live.store.blobs.root.glob("tmp/*")))
    assert ada.get("/healthz").status_code == 200


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


def test_a_model_in_shards_is_committed_sent_and_read_with_all_of_its_files(staged, ada):
    whole = live.model(staged, seed=1)
    parts = staged.folder / "parts"
    parts.mkdir()
    tensors = load_file(whole["model.safetensors"])
    halves = {f"model-{n + 1:05}-of-00002.safetensors": sorted(tensors)[n::2] for n in range(2)}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, parts / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in halves.items() for name in names}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    for name in ("config.json", "tokenizer.json"):
        (parts / name).write_bytes(whole[name].read_bytes())
    files = {path.name: path for path in sorted(parts.iterdir())}
    lacking = {name: path for name, path in files.items() if name != "model-00002-of-00002.safetensors"}
    for wrong in (lacking, {**files, "model.safetensors": whole["model.safetensors"]}, {**files, "code.py": parts}):
        listed = {name: path if path.is_file() else files["config.json"] for name, path in wrong.items()}
        body = live.submission(staged, ada, live.manifest(staged, "ada", listed))
        refused(ada.post(f"{staged.path}/submissions", body), "manifest_invalid")
    body = live.submission(staged, ada, live.manifest(staged, "ada", files))
    made = ada.post(f"{staged.path}/submissions", body).json()
    assert len(made["missing"]) == 5
    live.send_files(ada, made, files)
    assert ada.post(f"/v1/submissions/{made['submission']}/complete").json()["state"] == "checking"


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


def test_a_try_counts_on_the_day_that_its_record_is_dated(served, tmp_path, monkeypatch):
    """Else an auditor, who has the record alone, would count more of a day than were allowed."""
    text = tiny.DEFINITION.replace('{ total = 5, per_day = 5, day = "UTC" }', '{ total = 5, per_day = 1, day = "UTC" }')
    monkeypatch.setattr(tiny, "DEFINITION", text)
    latest = "2027-03-09T12:00:00.000000Z"
    staged = live.open_round(served, tmp_path, closes=latest, closes_latest=latest)
    ada = live.enter(staged, served.actor("ada"))

    def submitted(seed):
        document = live.manifest(staged, "ada", live.model(staged, seed=1))
        body = live.submission(staged, ada, document, nonce=bytes([seed]) * 32)
        return ada.post(f"{staged.path}/submissions", body).status_code

    served.clock.set("2027-03-01T23:59:59.998000Z")
    assert [submitted(1), submitted(2)] == [201, 429]
    debit = quota.debit

    def after_midnight(*given, **named):
        served.clock.set("2027-03-02T00:00:00.000100Z")
        return debit(*given, **named)

    monkeypatch.setattr(quota, "debit", after_midnight)
    assert submitted(2) == 429
    monkeypatch.setattr(quota, "debit", debit)
    assert submitted(2) == 201
