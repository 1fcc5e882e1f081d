"""Each row of docs/threat-model.md as a cheat that somebody attempts: by real clients on a real server, or on the files of a bundle."""

import base64
import json
import random
import re
from datetime import timedelta
from pathlib import Path

import live
import made_bundles
import pyarrow as pa
import pytest
import rounds_made
from by_hand import prepare_all, refused, release_share

from acclimate import custody, log, sealing, verify
from acclimate_competitions import digests, records, rounds, tables
from acclimate_competitions.errors import Refusal

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture
def staged(tmp_path):
    """An open round on a real server."""
    with live.serve(tmp_path) as running:
        yield live.open_round(running, tmp_path)


@pytest.fixture
def ada(staged):
    return live.enter(staged, staged.live.actor("ada"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture
def bundle(made, tmp_path):
    return made.write(tmp_path / "bundle")


def named(bundle: Path, check: str) -> verify.Check:
    """The first thing that an audit finds wrong is this check, and it says where."""
    made_bundles.mend(bundle)
    failed = verify.verify(bundle).failed
    assert failed, "nothing FAILED"
    assert failed[0].name == check, failed
    assert failed[0].where and failed[0].meaning
    return failed[0]


def closed(staged, *entrants):
    for seed, entrant in enumerate(entrants, start=1):
        live.submit_model(staged, entrant, seed=seed)
    staged.live.clock.set(staged.fields["closes"])
    assert staged.live.tick() == ["RoundClosed"]
    return staged


def prepared(staged, *entrants):
    closed(staged, *entrants)
    prepare_all(staged)
    assert staged.live.tick() == ["PreparationFinished"]
    return staged.share_documents(staged.seal, staged.envelopes)


# ---- the page ------------------------------------------------------------------------------------------------------


def test_every_cheat_here_is_on_the_page():
    page = (REPOSITORY / "docs" / "threat-model.md").read_text("utf-8")
    cited = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(cited) > 30
    here = set(re.findall(r"^def (test_(?:an?|too)_\w+)", Path(__file__).read_text("utf-8"), re.MULTILINE))
    assert here == {name for file, name in cited if file == "test_threats.py"}
    rows = page.split("| --- | --- | --- | --- |\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) >= 19 and all("::test_" in row for row in rows)


# ---- organizers ----------------------------------------------------------------------------------------------------


def test_an_organizer_swaps_the_holdout(staged, ada, made, bundle):
    # While the round runs: a second seal is refused, whatever the phase.
    other, envelopes = live.make_seal(staged)
    record = staged.live.organizer().sign("HoldoutSealed", staged.round, **other)
    answer = staged.live.organizer().post(f"{staged.path}/seal", {"record": record, "envelopes": envelopes})
    refused(answer, "conflict")
    # Afterwards: other bytes under the name of the sealed ones, and other rows under the name of the opened ones.
    whole = (bundle / "holdout.sealed").read_bytes()
    (bundle / "holdout.sealed").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert named(bundle, "ciphertext").where.startswith("holdout.sealed")
    (bundle / "holdout.sealed").write_bytes(whole)
    path = bundle / "holdout" / "tint.parquet"
    table = tables.read(path)
    kinder = table.set_column(2, "target", pa.array(["red", *table.column("target").to_pylist()[1:]]))
    if kinder.equals(table):
        kinder = table.set_column(2, "target", pa.array(["blue", *table.column("target").to_pylist()[1:]]))
    tables.write(kinder, path)
    assert "row 0" in named(bundle, "holdout").where


def test_an_organizer_trains_a_favourite_on_the_holdout(made, bundle):
    # A model "prepared" after the opening: the log's order gives it away.
    lines = (bundle / "entries.jsonl").read_bytes().splitlines()
    state = made.fold()
    record = next(iter(state.prepared.values()))
    fields = {**record.fields, "prepared": digests.of_bytes(b"trained on the holdout")}
    request = records.sign("ModelPrepared", made.round, fields, key=rounds_made.key("evaluator"))
    forged = records.Record("ModelPrepared", made.round, made.now, request["fields"], request["by"], request["sig"])
    with pytest.raises(Refusal) as caught:
        rounds.fold([*[(i, r) for i, r in _own(made, lines)], (len(lines), forged)], made.competition)
    assert caught.value.code == "phase_wrong" and f"log entry {len(lines)}" in caught.value.sentence
    # Trained before, in secret, the log can't tell: the report says that nobody looked.
    report = {check.name: check for check in verify.verify(bundle).checks}
    assert report["honest preparation"].status == "NOT CHECKED"
    assert "evaluator's word" in report["honest preparation"].meaning


def _own(made, lines):
    numbered = [(index, records.parse(line)) for index, line in enumerate(lines)]
    return [(index, record) for index, record in numbered if record.round == made.round]


def test_an_organizer_drops_an_entry(staged, ada, made, bundle):
    # The server counts entries itself; a RoundClosed that drops one folds nowhere.
    state = made.fold()
    index = next(i for i, e in enumerate(made.entries) if records.parse(e).type == "RoundClosed")
    before = rounds.fold(_own(made, made.entries[:index]), made.competition)
    fewer = before.frozen_entries()[1:]
    fields = {"count": len(fewer), "entries_root": rounds.entries_root(fewer), "forfeited": before.forfeited()}
    dropped = records.Record("RoundClosed", made.round, state.closed.at, fields)
    with pytest.raises(Refusal, match="counts 2 entries, the log has 3"):
        rounds.apply(before, dropped, index=index)
    # Dropped from the log altogether, and all signed anew by the log's key: the entrant's receipt is of another log.
    gone = next(row for row in made.submissions if row["entrant"] == "bea")
    receipt = log.Receipt.parse(made.receipts[gone["index"]])
    rest = [entry for i, entry in enumerate(made.entries) if i not in (gone["index"], gone["committed"])]
    tree = log.Tree(map(digests.leaf_hash, rest))
    signed = receipt.open(made.signer.verifier)[1].checkpoint
    with pytest.raises(Refusal) as caught:
        log.verify_consistency(
            tree.consistency_proof(signed.size),
            first=signed.size,
            first_root=signed.root,
            second=len(tree),
            second_root=tree.root(),
        )
    assert caught.value.code == "log_inconsistent"


# ---- servers -------------------------------------------------------------------------------------------------------


def test_a_server_backdates_a_submission(made, bundle):
    # A late submission gets an early time: it then stands behind records that are later, and the audit names it.
    lines = (bundle / "entries.jsonl").read_bytes().splitlines()
    index = made.submissions[-1]["index"]
    record = records.parse(lines[index])
    early = records.Record(
        record.type, record.round, record.at - timedelta(days=1), record.fields, record.by, record.sig
    )
    lines[index] = early.encode()
    (bundle / "entries.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    found = named(bundle, "entries")
    rest = {check.name: check for check in verify.verify(bundle).failed}
    assert f"log entry {index}" in rest["records"].where and "the entry before" in rest["records"].meaning
    assert "log entr" in found.where


def test_a_server_shows_two_histories(made, tmp_path):
    # To one it shows the log as it is, to another one with an entry changed; both signed by the log's own key.
    forked = list(made.entries)
    record = records.parse(forked[-1])
    forked[-1] = records.Record(
        record.type, record.round, record.at, {**record.fields, "reason": "other"}, record.by, record.sig
    ).encode()
    trees = [log.Tree(map(digests.leaf_hash, entries)) for entries in (made.entries, forked)]
    size = len(forked)
    notes = [log.sign_checkpoint(made.signer, size, tree.root()) for tree in trees]
    first, second = (log.open_checkpoint(note, made.signer.verifier).checkpoint for note in notes)
    with pytest.raises(Refusal) as caught:
        log.verify_consistency([], first=size, first_root=first.root, second=size, second_root=second.root)
    assert caught.value.code == "log_inconsistent" and "keep both" in caught.value.hint
    # Whoever holds the one checkpoint and the other's bundle sees it at once.
    bundle = made.write(tmp_path / "bundle")
    (bundle / "checkpoints" / str(size)).write_text(notes[1], "utf-8")
    assert named(bundle, "earlier checkpoints").where == f"checkpoints/{size}"


# ---- custodians and dealers ----------------------------------------------------------------------------------------


def test_too_few_custodians_open_early(made, tmp_path):
    shares = [custody.parse_document(made.documents[1])]
    with pytest.raises(Refusal) as caught:
        custody.recover(shares)
    assert caught.value.code == "share_missing" and "1 of the 2" in caught.value.sentence
    # A made-up second share gives a secret, and it opens nothing.
    guess = custody.Share(made.round, shares[0].seal, 2, 2, 3, random.Random(1).randbytes(32))
    with pytest.raises(Refusal) as caught:
        sealing.open_(
            made.folder / "holdout.sealed",
            custody.recover([*shares, guess]),
            tmp_path / "out",
            round_id=made.round,
            fields=made.seal,
        )
    assert caught.value.code == "seal_mismatch" and not (tmp_path / "out").exists()


def test_a_custodian_disappears(staged, ada):
    documents = prepared(staged, ada)
    for index in (1, 3):
        assert release_share(staged, index, documents[index]).status_code == 200
    assert staged.live.tick() == ["HoldoutOpened"]
    assert staged.live.phase(staged.round) == "opened"


def test_a_dealer_deals_inconsistent_shares(made):
    honest = [custody.parse_document(made.documents[index]) for index in (1, 2, 3)]
    wrong = custody.Share(made.round, honest[1].seal, 2, 2, 3, bytes(32)).encode()
    commitments = [share["commitment"] for share in made.seal["shares"]]
    commitments[1] = custody.document_digest(wrong)
    with pytest.raises(Refusal) as caught:
        custody.consistent([made.documents[1], made.documents[3]], commitments, of=rounds_made.split_of(made))
    assert caught.value.code == "seal_mismatch"
    assert "imply other shares for 2 than were committed to" in caught.value.sentence


# ---- entrants ------------------------------------------------------------------------------------------------------


def test_an_entrant_copies_replays_and_denies(staged, ada, tmp_path):
    bob = live.enter(staged, staged.live.actor("bob"))
    files = live.model(staged, seed=1)
    body = live.submission(staged, ada, live.manifest(staged, "ada", files))
    assert ada.post(f"{staged.path}/submissions", body).status_code == 201
    # Copied: ada's commitment under bob's name opens to a manifest that says ada.
    commitment = body["committed"]["fields"]["commitment"]
    copied = {
        name: bob.sign(body[name]["type"], staged.round, entrant="bob", commitment=commitment)
        for name in ("committed", "accepted")
    }
    answer = bob.post(f"{staged.path}/submissions", {**body, **copied})
    assert answer.status_code >= 400 and answer.json()["code"] in ("manifest_invalid", "conflict")
    # Replayed: the same signed request in another round.
    other = live.create(staged.live, tmp_path, name="tiny-2")
    answer = ada.post(f"{other.path}/submissions", body)
    assert answer.status_code >= 400 and answer.json()["code"] != "internal_error"
    # Denied: the record carries a signature that only ada's key makes.
    with staged.live.store.snapshot() as tx:
        logged = [record for _, record in tx.records(staged.round) if record.type == "SubmissionCommitted"]
    assert [record.by for record in logged] == [ada.public]
    records.verify(logged[0])
    with pytest.raises(Refusal):
        records.verify(
            records.Record(logged[0].type, logged[0].round, logged[0].at, logged[0].fields, bob.public, logged[0].sig)
        )


# ---- evaluators and operators --------------------------------------------------------------------------------------


def test_an_evaluator_logs_false_numbers(made, bundle):
    name = "predictions/ada/direct-tint-none.parquet"
    whole = (bundle / name).read_bytes()
    table = tables.read(bundle / name)
    better = [[0.0, -9.0, -9.0] for _ in range(table.num_rows)]
    tables.write(table.set_column(5, "loglikelihoods", pa.array(better, pa.list_(pa.float64()))), bundle / name)
    assert named(bundle, "predictions").where == name
    (bundle / name).write_bytes(whole)
    path = bundle / "scores" / "ada.parquet"
    table = tables.read(path)
    ones = [1.0] * table.num_rows
    tables.write(table.set_column(7, "score", pa.array(ones, pa.float64())), path)
    assert named(bundle, "scores").where.startswith("scores/ada.parquet")
    tables.write(table, path)
    ranking = json.loads((bundle / "ranking.json").read_bytes())
    ranking["ranking"][0], ranking["ranking"][1] = ranking["ranking"][1], ranking["ranking"][0]
    (bundle / "ranking.json").write_bytes(digests.canonical(ranking))
    assert named(bundle, "ranking").where.startswith("ranking.json")


def test_a_platform_fails_a_rival(made, bundle):
    # It may say so; but then reason and log digest stand in the log before any share is released, and the report names it.
    state = made.fold()
    failed = [(key, record) for key, record in state.prepared.items() if "failed" in record.fields]
    (_, task, seed), record = failed[0]
    assert set(record["failed"]) == {"reason", "log"} and digests.is_digest(record["failed"]["log"])
    order = [records.parse(entry).type for entry in made.entries]
    assert order.index("PreparationFinished") < order.index("ShareReleased")
    report = {check.name: check for check in verify.verify(bundle).checks}
    assert f"bea, {task}, seed {seed}" in report["prepared"].where
    # Silence is no outcome: without its record the preparation is never finished.
    index = order.index("PreparationFinished")
    before = rounds.fold(_own(made, made.entries[: index - 1]), made.competition)
    with pytest.raises(Refusal, match="1 preparations have no outcome yet"):
        rounds.apply(before, records.parse(made.entries[index]), index=index)


def test_a_stolen_custodians_token_releases_nothing(staged, ada):
    documents = prepared(staged, ada)
    thief = staged.live.stranger("custodian-a", "custodian")
    thief.http.headers["Authorization"] = f"Bearer {staged.live.custodians()[0].token}"
    # The envelope it gets is ciphertext to it.
    envelope = thief.get(f"{staged.path}/envelopes").json()["real"]["envelopes"][0]
    with pytest.raises(Refusal) as caught:
        of = custody.Split(staged.round, staged.seal["seal"], 2, 3)
        custody.open_envelope(envelope, str(thief.identity), share=staged.seal["shares"][0], of=of)
    assert caught.value.code == "share_unreadable"
    # Even with the document, as from a stolen disk, its own signature does not do.
    fields = {"seal": staged.seal["seal"], "index": 1, "document": custody.document_digest(documents[1])}
    body = {
        "record": thief.sign("ShareReleased", staged.round, **fields),
        "document": base64.b64encode(documents[1]).decode(),
    }
    refused(thief.post(f"{staged.path}/shares", body), "signature_invalid", 403)
    with staged.live.store.snapshot() as tx:
        assert not tx.round(staged.round).released
