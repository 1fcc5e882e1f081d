"""Shares at the command line, over real HTTP: a custodian's own machine decides, whatever the server says."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from cli_world import (
    CUSTODIANS,
    World,
    always,
    cheating,
    in_json,
    kinds,
    new_round,
    person,
    world,
)
from commands import Run, done, refused

from acclimate import client as actors
from acclimate import custody, keys, log, sealing
from acclimate.client.definitions import definition_of
from acclimate.service import identity
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

__all__ = ["world"]


def test_shares_are_released_only_when_the_custodians_own_machine_agrees(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world)
    a, b, c = (world.root / "people" / name for name in CUSTODIANS)
    # Too early, by the log.
    ran = acclimate("custodian", "release", round_id, "--keys", a, "--json")
    assert "RoundClosed" in refused(ran, "too_early")
    assert "ok           consistency" in ran.err
    inspected = acclimate("custodian", "inspect", round_id, "--keys", a, "--json")
    assert inspected.code == 1
    last = inspected.json["checks"][-1]
    assert (last["name"], last["status"]) == ("RoundClosed", "NOT YET")
    assert world.tick(round_id, hours=1) == ["RoundClosed", "PreparationFinished"]
    inspected = done(acclimate("custodian", "inspect", round_id, "--keys", a, "--json"))
    names = [check["name"] for check in inspected.json["checks"]]
    assert names == [
        "round", "log", "consistency", "records", "witnesses", "RoundClosed", "PreparationFinished", "phase", "clock",
        "dates", "share",
    ]  # fmt: skip
    # Another history than the pinned one: signed by the same log key, over other entries; and a longer one.
    pins = b / "pins.json"
    true = pins.read_text()
    signer = identity.load(world.settings, world.store).signer
    before = log.open_checkpoint(json.loads(true)[round_id]["checkpoint"], log.parse_vkey(signer.vkey)).checkpoint
    fork = log.sign_checkpoint(signer, before.size, digests.leaf_hash(b"another history"))
    for note in (fork, log.sign_checkpoint(signer, before.size + 1000, before.root)):
        changed = json.loads(true)
        changed[round_id]["checkpoint"] = note
        pins.write_text(json.dumps(changed))
        ran = acclimate("custodian", "release", round_id, "--keys", b, "--json")
        assert "does not extend the pinned checkpoint" in refused(ran, "log_inconsistent")
        # One that is longer than the log is told before the log is read.
        assert ("ok           log" in ran.err) == (note is fork)
        inspected = acclimate("custodian", "inspect", round_id, "--keys", b, "--json")
        assert [(c["name"], c["status"]) for c in inspected.json["checks"]][-1] == ("consistency", "FAILED")
    # Another organizer, another log than the pinned ones.
    for name in ("organizer", "log"):
        changed = json.loads(true)
        changed[round_id][name] = log.Signer("other", keys.create(tmp_path / name, age=False).ed25519).vkey
        pins.write_text(json.dumps(changed))
        ran = acclimate("custodian", "release", round_id, "--keys", b, "--json")
        assert "another log or organizer" in refused(ran, "log_inconsistent")
    pins.write_text(true)
    assert "ShareReleased" not in kinds(world, round_id)

    released = done(acclimate("custodian", "release", round_id, "--keys", a, "--json"))
    assert released.json["share"] == 1
    assert {check["status"] for check in released.json["checks"]} == {"ok", "NOT CHECKED"}
    # Again: the same release.
    assert (
        done(acclimate("custodian", "release", round_id, "--keys", a, "--json")).json["entry"] == released.json["entry"]
    )
    # Who looks again reads that nothing is left to do.
    inspected = acclimate("custodian", "inspect", round_id, "--keys", a, "--json")
    last = inspected.json["checks"][-1]
    assert inspected.code == 1 and (last["name"], last["status"]) == ("release", "NOT NEEDED")
    assert "share 1 is released" in last["detail"]
    done(acclimate("custodian", "release", round_id, "--keys", b))
    ran = acclimate("custodian", "release", round_id, "--keys", c, "--json")
    assert "yours is not needed" in refused(ran, "phase_wrong")
    assert "HoldoutOpened" in world.tick(round_id, seconds=1)


def test_a_custodian_is_no_decryption_oracle(acclimate: Run, world: World, tmp_path: Path) -> None:
    """A stolen server shows a real seal as the rehearsal, of this round or of another; it gets no share in clear."""
    other, round_id = (new_round(acclimate, world, until="sealed") for _ in range(2))
    a = world.root / "people" / CUSTODIANS[0]
    with actors.load_account(a).connect() as client:
        real, elsewhere = (client.envelopes(name)["real"] for name in (round_id, other))
    for number, shown in enumerate((real, elsewhere)):
        with cheating(world, {"/envelopes$": in_json(rehearsal=shown)}) as cheat:
            ran = acclimate("custodian", "ack", round_id, "--keys", cheat.folder(a, tmp_path / f"{number}"), "--json")
            assert "is a Share, and only a RehearsalShare will do" in refused(ran, "share_false")
            assert "tell the other custodians" in ran.err
            assert cheat.written == []
    assert "ShareAcknowledged" not in kinds(world, round_id)

    # A true server does not take one either, nor keep it: here of a dummy that an organizer made as if it were real.
    me = world.root / "people" / "organizer"
    with actors.load_account(me).connect() as client:
        defined, _ = definition_of(client, round_id)
        people = [sealing.Recipient(c["name"], c["age"], c["backup"]) for c in defined["custodians"]]
        files = sealing.rehearsal_files(tmp_path)
        made = sealing.seal(files, tmp_path / "sealed", round_id=round_id, recipients=people, k=2)
        client.put_blob(tmp_path / "sealed")
        client.rehearse(round_id, made.fields, envelopes=made.envelopes)
    refused(acclimate("custodian", "ack", round_id, "--keys", a, "--json"), "share_false")
    own = keys.load(a).age_identity
    assert own is not None
    share = made.fields["shares"][0]
    of = custody.Split(round_id, made.fields["seal"], 2, 3)
    document = custody.open_envelope(made.envelopes[0], own, share=share, of=of)
    with actors.load_account(a).connect() as client, pytest.raises(Refusal) as caught:
        client.rehearsal_share(round_id, index=1, document=base64.b64encode(document).decode())
    assert caught.value.code == "share_false"
    assert document not in b"".join(path.read_bytes() for path in world.data.glob("acclimate.db*"))


def test_a_share_is_released_for_its_own_round_only(acclimate: Run, world: World, tmp_path: Path) -> None:
    """Whoever has a round's envelopes shows its seal in a round that closes sooner: nobody acknowledges it, nothing is kept."""
    me = keys.load(person(acclimate, world, "organizer", "organizer"))
    folders = [world.root / "people" / name for name in CUSTODIANS]
    victim = new_round(acclimate, world)
    hidden, shown, other = (new_round(acclimate, world, until="draft") for _ in range(3))
    with actors.load_account(me.folder).connect() as client:
        envelopes = client.envelopes(victim)["real"]
        logged = next(record for _, record in client.records(victim) if record.type == "HoldoutSealed").fields
        defined, _ = definition_of(client, hidden)
        people = [sealing.Recipient(c["name"], c["age"], c["backup"]) for c in defined["custodians"]]
        # A seal of a round that this log does not tell of: of another server, say.
        away = sealing.seal(
            sealing.rehearsal_files(tmp_path), tmp_path / "away", round_id=hidden, recipients=people, k=2
        )
        for name in (shown, other):
            (tmp_path / name).mkdir()
            dummy = sealing.seal(
                sealing.rehearsal_files(tmp_path / name), tmp_path / name / "dummy", round_id=name, recipients=people,
                k=2, rehearsal=True,
            )  # fmt: skip
            client.put_blob(tmp_path / name / "dummy")
            client.rehearse(name, dummy.fields, envelopes=dummy.envelopes)
    # An honest server takes a seal's id once; this one was stolen, with the organizer's key.
    for name, fields in ((shown, logged), (other, away.fields)):
        with world.store.transaction() as tx:
            tx.append_once(records.sign("HoldoutSealed", name, fields, key=me.ed25519))
    sealed = {
        shown: {**envelopes},
        other: {"seal": away.fields["seal"], "fields": away.fields, "envelopes": away.envelopes},
    }
    for name, code, words in (
        (shown, "seal_mismatch", f"which is the seal of {victim}"),
        (other, "share_false", f"the round {hidden} for {other}"),
    ):
        for number, folder in enumerate(folders):
            index = number + 1
            with actors.load_account(folder).connect() as client:
                own = [e for e in sealed[name]["envelopes"] if e["index"] == index]
            with cheating(world, {"/envelopes$": in_json(real={**sealed[name], "envelopes": own})}) as cheat:
                mine = cheat.folder(folder, tmp_path / f"{name}-{number}")
                if name == shown and number == 0:
                    # Also where nothing is left of the first acknowledgement.
                    (mine / "pins.json").unlink()
                ran = acclimate("custodian", "ack", name, "--keys", mine, "--json")
                assert words in refused(ran, code)
                assert cheat.written == []
    assert kinds(world, shown) == kinds(world, other) == ["RoundDefined", "HoldoutSealed"]


def test_a_custodian_acknowledges_in_the_log_that_it_registered_with_and_under_an_id_that_binds(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    round_id = new_round(acclimate, world, until="sealed")
    folder = world.root / "people" / CUSTODIANS[0]
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    (elsewhere / "pins.json").unlink(missing_ok=True)
    (elsewhere / "log.vkey").write_text(
        log.Signer("log.example.org", keys.create(tmp_path / "k", age=False).ed25519).vkey
    )
    ran = acclimate("custodian", "ack", round_id, "--keys", elsewhere, "--json")
    assert "keeps log.example.org+" in refused(ran, "log_inconsistent")
    # A round with a short id, from a server that took it.
    me = keys.load(world.root / "people" / "organizer")
    with actors.Client(world.url) as client:
        (_, defined), *_ = client.records(round_id)
    fields = {name: value for name, value in defined.fields.items() if name != "id_digits"}
    request = records.sign("RoundDefined", "", fields, key=me.ed25519)
    short = records.Record("RoundDefined", request["round"], defined.at, fields, request["by"], request["sig"])
    changes = {
        f"/rounds/{short.round}$": in_json(round=short.round),
        r"/records(\?|$)": always([{"index": 0, "record": short.document()}]),
    }
    with cheating(world, changes, alias=(short.round, round_id)) as cheat:
        mine = cheat.folder(folder, tmp_path / "mine")
        ran = acclimate("custodian", "ack", short.round, "--keys", mine, "--json")
        assert "has 12 digits" in refused(ran, "record_invalid")
        assert cheat.written == []
    # A true server does not take it.
    with actors.load_account(me.folder).connect() as client, pytest.raises(Refusal, match="has no id_digits") as caught:
        client.define(request)
    assert caught.value.code == "record_invalid"
    assert kinds(world, round_id) == ["RoundDefined", "HoldoutSealed"]


def test_a_custodian_sees_what_it_acknowledges_and_refuses_recipients_that_are_not_its_own(
    acclimate: Run, world: World, tmp_path: Path
) -> None:
    me = person(acclimate, world, "organizer", "organizer")
    people = [person(acclimate, world, name, "custodian") for name in CUSTODIANS]
    foreign = keys.create(tmp_path / "foreign", age=True).age_recipient
    own = json.loads((people[0] / "custodian.json").read_text())
    for field_, code in (("backup", "key_refused"), ("age", "key_refused"), ("", "")):
        path = tmp_path / "given.json"
        path.write_text(json.dumps(own | ({field_: foreign} if field_ else {})))
        given = [part for document in (path, *people[1:]) for part in ("--custodian", document)]
        world.count += 1
        dates = ("--opens", "+0s", "--closes", "+1h", "--name", f"r{world.count}")
        round_id = done(acclimate("round", "create", world.competition, *given, *dates, "--keys", me)).out.strip()
        done(acclimate("round", "seal", round_id, world.competition, "--keys", me))
        ran = acclimate("custodian", "ack", round_id, "--keys", people[0], "--json")
        if code:
            assert foreign in refused(ran, code)
            assert kinds(world, round_id) == ["RoundDefined", "HoldoutSealed"]
        else:
            done(ran)
            for shown in (round_id, "closes 2", "any 2 of 3", *(keys.load(folder).age_recipient for folder in people)):
                assert shown in ran.err
    # Without its document a custodian still knows its own recipient.
    bare = tmp_path / "bare"
    shutil.copytree(people[0], bare)
    (bare / "custodian.json").unlink()
    done(acclimate("custodian", "ack", round_id, "--keys", bare, "--json"))
    (bare / "age.txt").write_bytes((tmp_path / "foreign" / "age.txt").read_bytes())
    refused(acclimate("custodian", "ack", round_id, "--keys", bare, "--json"), "key_refused")


def test_a_closed_round_is_voided_with_its_custodians_only(acclimate: Run, world: World, tmp_path: Path) -> None:
    round_id = new_round(acclimate, world)
    world.tick(round_id, hours=1)
    me = world.root / "people" / "organizer"
    void = ("round", "void", round_id, "--reason", "the holdout leaked", "--keys", me, "--json")
    refused(acclimate(*void), "guard_failed")
    approvals: list[object] = []
    for name in CUSTODIANS[:2]:
        folder = world.root / "people" / name
        path = tmp_path / f"{name}.json"
        path.write_text(
            done(
                acclimate("custodian", "approve-void", round_id, "--reason", "the holdout leaked", "--keys", folder)
            ).out
        )
        approvals += ["--approval", path]
    other = ("round", "void", round_id, "--reason", "I lost", "--keys", me, "--json")
    refused(acclimate(*other, *approvals), "signature_invalid")
    # A custodian approves the voiding of a round that it has pinned, and of no other that a server names.
    pinned, loose = world.root / "people" / CUSTODIANS[0], new_round(acclimate, world, until="sealed")
    approve = ("custodian", "approve-void", "--reason", "the holdout leaked", "--keys")
    ran = acclimate(*approve, pinned, loose)
    assert (ran.code, ran.out) == (1, "")
    assert "pins no round" in ran.err
    with cheating(world, {"/rounds/[^/]*$": in_json(round=loose)}) as cheat:
        ran = acclimate(*approve, cheat.folder(pinned, tmp_path / "cheated"), round_id[:-12])
    assert (ran.code, ran.out) == (1, "")
    assert "the server answers with" in ran.err
    assert round_id in done(acclimate(*approve, pinned, round_id[:-12])).err
    done(acclimate(*void, *approvals))
    ran = acclimate("custodian", "release", round_id, "--keys", world.root / "people" / CUSTODIANS[0], "--json")
    assert "voided" in refused(ran, "phase_wrong")


def test_a_server_whose_clock_runs_ahead_gets_no_share(acclimate: Run, world: World) -> None:
    """The last test of this file: it leaves the database's clock in the future."""
    round_id = new_round(acclimate, world, closes="+40h")
    assert world.tick(round_id, hours=40) == ["RoundClosed", "PreparationFinished"]
    # The server's log has it all; the custodian's machine knows that it is hours too early.
    ran = acclimate("custodian", "release", round_id, "--keys", world.root / "people" / CUSTODIANS[0], "--json")
    assert "this machine's clock says" in refused(ran, "too_early")
    assert kinds(world, round_id)[-1] == "PreparationFinished"
