"""What clients and auditors make of a log that was handed over: they follow it from the key that they keep, and from no other."""

import json
from dataclasses import replace

import handing_over
import live
import made_bundles
import pytest
import rounds_made
import tiny
from databases import refused, run, settings, store
from stored import fill
from witnessed_rounds import write_folder

from acclimate import bundle, config, hand_overs, keys, log, verify
from acclimate.client import Client, definitions, entrant, evidence
from acclimate.client.folder import lacks_quorum, save_receipt
from acclimate.client.history import Online, read_history
from acclimate.client.key_chain import chain_to
from acclimate.service import hand_over, submit
from acclimate.store import Store
from acclimate_competitions import digests, records
from acclimate_competitions.phases import Phase

__all__ = ["settings", "store"]
REASON = handing_over.REASON


def vkey(settings):
    return log.Signer(settings.origin, keys.load_signing_key(settings.keys / "log.pem")).vkey


# ---- clients -------------------------------------------------------------------------------------------------------


@pytest.fixture
def handed_over(tmp_path):
    """A server whose log's key was handed over, with the key of before."""
    with live.serve(tmp_path) as server:
        handing_over.grow(server.settings, server.store, tmp_path / "made", "one")
        server.anyone().get("/v1/log/checkpoint")
        old = vkey(server.settings)
        code, out, errors = run(
            "register", "--server", server.url, "--name", "ada", "--keys", tmp_path / "ada", "--json"
        )
        assert code == 0 and json.loads(out)["log"] == old, errors
        hand_over.hand_over(server.store, server.settings, reason=REASON)
    with live.serve(tmp_path) as server:
        server.clock.forward(minutes=1)
        yield server, old


def test_a_client_follows_the_key_that_it_keeps(handed_over, tmp_path):
    server, old = handed_over
    new = vkey(server.settings)
    with Client(server.url) as client:
        found = chain_to(client, old)
        assert (found.first.text(), found.last.text()) == (old, new)
        assert chain_to(client, new).hand_overs == () and chain_to(client, None) == found
        stranger = log.Signer(server.settings.origin, rounds_made.key("x")).vkey
        assert new in refused("log_inconsistent", chain_to, client, stranger).sentence
    code, out, _ = run("log", "keys", "--server", server.url, "--log-key", tmp_path / "ada")
    assert code == 0 and out.splitlines()[0] == old and new in out and REASON in out
    (account,) = [json.loads((tmp_path / "ada" / "account.json").read_text())]
    (tmp_path / "ada" / "account.json").write_text(json.dumps({**account, "server": server.url}))
    words = ("register", "--server", server.url, "--name", "ada", "--keys", tmp_path / "ada")
    code, out, errors = run(*words, "--renew")
    assert code == 0 and new in out, errors
    assert "handed over" in errors and (tmp_path / "ada" / "log.vkey").read_text() == f"{new}\n"
    assert run(*words)[0] == 0


def test_a_server_with_another_key_and_no_hand_over_is_refused(tmp_path):
    with live.serve(tmp_path / "a") as server:
        run("register", "--server", server.url, "--name", "ada", "--keys", tmp_path / "ada")
        kept = (tmp_path / "ada" / "log.vkey").read_text()
        stranger = log.Signer(server.settings.origin, rounds_made.key("x")).vkey
        (tmp_path / "ada" / "log.vkey").write_text(stranger)
        words = ("register", "--server", server.url, "--name", "ada", "--keys", tmp_path / "ada", "--renew")
        code, _, errors = run(*words)
        assert code == 1 and stranger in errors and kept.strip() in errors
        assert (tmp_path / "ada" / "log.vkey").read_text() == stranger


# ---- auditors ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    """A round of after a hand-over; its log begins with the hand-over."""
    with pytest.MonkeyPatch.context() as patch:
        splits = rounds_made.make_splits

        def begun(made):
            splits(made)
            handing_over.hand_over(made, "second key")

        patch.setattr(rounds_made, "make_splits", begun)
        return rounds_made.make(tmp_path_factory.mktemp("round"))


OLD = log.Signer(rounds_made.ORIGIN, rounds_made.key("log")).vkey


def statuses(report):
    return {check.name: check for check in report.checks}


def failed(report):
    return {check.name for check in report.checks if check.status == "FAILED"}


def test_the_bundle_of_a_newer_round_is_followed_from_the_old_key(later, tmp_path):
    path = later.write(tmp_path / "bundle")
    for key in (OLD, later.signer.vkey):
        report = verify.verify(path, log_key=key)
        assert failed(report) == set(), report.checks
        assert statuses(report)["whose log"].status == "ok"
    said = statuses(verify.verify(path, log_key=OLD))["whose log"]
    assert "handed over at log entry 0" in f"{said.meaning} {said.where}" and REASON in f"{said.meaning} {said.where}"
    stranger = log.Signer(rounds_made.ORIGIN, rounds_made.key("x")).vkey
    assert failed(verify.verify(path, log_key=stranger)) == {"whose log"}


def test_the_server_writes_that_bundle(later, tmp_path):
    full = Store.open(config.load(tmp_path / "server" / "data", environ={}))
    fill(full, later)
    path = bundle.write(full, full.blobs, later.round, tmp_path / "written")
    full.close()
    assert (path / "checkpoints" / "1").read_text() == later.notes[1]
    report = verify.verify(path, log_key=OLD)
    assert failed(report) == set() and statuses(report)["whose log"].status == "ok"


def test_a_hand_over_while_the_round_is_under_way_is_named(tmp_path, monkeypatch):
    submit = rounds_made.submit_all

    def handed(made):
        submit(made)
        handing_over.hand_over(made, "second key")

    monkeypatch.setattr(rounds_made, "submit_all", handed)
    made = rounds_made.make(tmp_path / "round")
    made.signer = log.Signer(rounds_made.ORIGIN, rounds_made.key("log"))  # keys.json says what RoundDefined says
    report = verify.verify(made.write(tmp_path / "bundle"), log_key=OLD)
    assert failed(report) == {"rules"}
    assert "under way" in statuses(report)["rules"].meaning and "log entry" in statuses(report)["rules"].where


def changed(later, tmp_path, *, entry=None, note=None):
    """The bundle with another record as entry 0 and all after it signed anew by who has the new key."""
    path = later.write(tmp_path / "bundle")
    entries = [entry or later.entries[0], *later.entries[1:]]
    (path / "entries.jsonl").write_bytes(b"".join(line + b"\n" for line in entries))
    tree = log.Tree(map(log.leaf_hash, entries))
    for file in [path / "checkpoint", *(path / "checkpoints").iterdir()]:
        size = log.parse_checkpoint(log.parse_note(file.read_text()).text).size
        file.write_text(log.sign_checkpoint(later.signer, size, tree.root(size)))
    if note is not None:
        (path / "checkpoints" / "1").write_text(note(tree))
    made_bundles.mend(path)
    return path


def test_a_forged_hand_over_fails(later, tmp_path):
    record = records.parse(later.entries[0])
    thief = rounds_made.key("thief")
    request = hand_overs.request(log.Signer(rounds_made.ORIGIN, thief), later.signer, reason="mine")
    fields = {**request["fields"], "old": OLD}
    entry = records.Record(record.type, "", record.at, fields, request["by"], request["sig"]).encode()
    report = verify.verify(changed(later, tmp_path, entry=entry), log_key=OLD)
    assert statuses(report)["checkpoint"].status == "FAILED" and statuses(report)["whose log"].status != "ok"
    assert "log entry 0" in statuses(report)["checkpoint"].meaning


def test_a_hand_over_that_the_old_key_never_saw_in_its_log_fails(later, tmp_path):
    path = changed(later, tmp_path)
    report = verify.verify(path, log_key=OLD)
    assert {"whose log", "earlier checkpoints"} <= failed(report)
    assert OLD.split("+")[0] in statuses(report)["whose log"].meaning
    (path / "checkpoints" / "1").unlink()
    made_bundles.mend(path)
    report = verify.verify(path, log_key=OLD)
    assert {"whose log", "earlier checkpoints"} <= failed(report)
    assert statuses(report)["whose log"].where == "checkpoints/1"


def test_the_old_key_signs_nothing_after_the_hand_over(later, tmp_path):
    path = later.write(tmp_path / "bundle")
    old = log.Signer(rounds_made.ORIGIN, rounds_made.key("log"))
    size = len(later.entries)
    tree = log.Tree(map(log.leaf_hash, later.entries))
    (path / "checkpoint").write_text(log.sign_checkpoint(old, size, tree.root()))
    made_bundles.mend(path)
    assert "checkpoint" in failed(verify.verify(path, log_key=OLD))


def test_a_round_of_before_the_hand_over_verifies_by_its_own_key_also_where_it_is_revised_after(tmp_path):
    made = rounds_made.make(tmp_path / "round")
    old = made.signer
    assert failed(verify.verify(made.write(tmp_path / "before"), log_key=OLD)) == set()
    handing_over.hand_over(made, "second key")
    new = made.signer
    fields = {
        "ranking": digests.of_json(made.ranking),
        "policy": made.competition.ranking.digest,
        "reason": "the same, once more",
    }
    made.signed("RankingRevised", fields, by="organizer", keep=True)
    made.signer = old  # keys.json says what RoundDefined says
    path = made.write(tmp_path / "after")
    (path / "versions" / "1").mkdir(parents=True)
    (path / "versions" / "1" / "ranking.json").write_bytes(digests.canonical(made.ranking))
    made_bundles.mend(path)
    for key in (OLD, new.vkey):
        report = verify.verify(path, log_key=key)
        assert failed(report) == set(), [check for check in report.checks if check.status == "FAILED"]
        assert statuses(report)["whose log"].status == "ok"


def test_the_round_s_people_read_its_log_after_a_hand_over_and_release_nothing_over_one(tmp_path):
    with live.serve(tmp_path) as server:
        staged = live.open_round(server, tmp_path)
        ada = live.enter(staged, server.actor("ada"))
        index = int(server.anyone().get("/v1/log/checkpoint").text.splitlines()[1]) - 1
        with Client(server.url) as client:
            defined = client.records(staged.round)[0][1]
            assert read_history(Online(client), defined).chain.hand_overs == ()
        server.organizer().post(f"{staged.path}/void", server.organizer().sign("RoundVoided", staged.round, reason="x"))
        hand_over.hand_over(server.store, server.settings, reason=REASON)
    with live.serve(tmp_path, clock=server.clock) as server, Client(server.url) as client:
        history = read_history(Online(client), defined)
        assert [hand_over.old.text() for hand_over in history.chain.hand_overs] == [defined["log"]]
        # The receipt of a round of before, as somebody fetches it again.
        with server.store.snapshot() as tx:
            record = records.parse(tx.entry(index))
        request = {name: getattr(record, name) for name in ("type", "round", "fields", "by", "sig")}
        path = save_receipt(client, tmp_path / "receipt", index=index, vkey=defined["log"], request=request)
        log.Receipt.parse(path.read_text()).open(log.parse_vkey(vkey(server.settings)))
        assert ada.name == record["entrant"]
        # While the round was under way it would be no honest operator's.
        state = server.store.recall(staged.round)
        assert state is not None
        refusal = refused("rotation_invalid", evidence._require_one_key, history, replace(state, phase=Phase.PREPARED))
        assert "don't release" in refusal.hint
        evidence._require_one_key(history, state)


def test_an_entrant_s_receipts_are_looked_after_as_before_once_the_log_was_handed_over(tmp_path):
    with live.serve(tmp_path) as server:
        staged = live.open_round(server, tmp_path)
        write_folder(server.actor("ada"), tmp_path / "ada", url=server.url)
        own = keys.load(tmp_path / "ada")
        tiny.model(tmp_path / "model", seed=1)
        with Client(server.url, token=server.actor("ada").token) as client:
            entrant.enter_round(client, own, staged.round)
            about = {"title": "A model", "weights_after": "publish"}
            sent = entrant.submit(client, own, staged.round, tmp_path / "model", wait=False, **about)
            submit.accept(server.store, sent.submission)
        server.organizer().post(f"{staged.path}/void", server.organizer().sign("RoundVoided", staged.round, reason="x"))
        hand_over.hand_over(server.store, server.settings, reason=REASON)
        token = server.actor("ada").token
    with live.serve(tmp_path) as server, Client(server.url, token=token) as client:
        (kept,) = (own.folder / "submissions").iterdir()
        kept.write_text(json.dumps({**json.loads(kept.read_text()), "server": server.url}))
        path = own.folder / "receipts" / f"{sent.short}.tlog-proof"
        # Fetched for the first time after the hand-over, it is by the successor.
        (mine,) = entrant.submission_status(client, own)
        log.Receipt.parse(path.read_text()).open(log.parse_vkey(vkey(server.settings)))
        before = path.read_bytes()
        assert entrant.submission_status(client, own) == [mine] and path.read_bytes() == before
        # Where the round asks for witnesses, it is one without their cosignatures, and no fault of the receipt.
        defined, _ = definitions.definition_of(client, staged.round)
        asked = {**defined.fields, "witnesses": [rounds_made.witness("w1.example.org")], "quorum": 1}
        assert lacks_quorum(client, path, replace(defined, fields=asked))
        assert not lacks_quorum(client, path, defined)
