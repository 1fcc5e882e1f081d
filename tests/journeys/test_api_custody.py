"""Shares, the opening and voiding over real HTTP: too early, false, lost, or on a full disk."""

import base64
import contextlib

import live
import pyarrow as pa
import pytest
from by_hand import ada, prepared_round, refused, release_share, served, staged
from sqlalchemy import insert, update

from acclimate import custody
from acclimate.service import release, submit
from acclimate.store import stages, submissions
from acclimate_competitions import digests, tables

__all__ = ["ada", "served", "staged"]


def test_a_share_released_early_is_refused_and_not_kept(staged, ada):
    served = staged.live
    documents = staged.share_documents(staged.seal, staged.envelopes)
    problem = refused(release_share(staged, 1, documents[1]), "phase_wrong", 409)
    assert "open" in problem["detail"] and "a submission" in problem["detail"]
    live.submit_model(staged, ada, seed=1)
    served.clock.set(staged.fields["closes"])
    assert served.tick() == ["RoundClosed"]
    refused(release_share(staged, 1, documents[1]), "phase_wrong", 409)
    with served.store.snapshot() as tx:
        assert release.released_documents(tx, staged.seal["seal"]) == []
    assert documents[1] not in b"".join(p.read_bytes() for p in served.settings.data.glob("acclimate.db*"))


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
            "targets that are not among the choices, first in row 11",
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
    assert served.anyone().get(staged.path).json()["stages"] == {"cancelled": 3, "committed": 1}
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
