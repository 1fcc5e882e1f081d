"""A server whose log is cosigned by real witnesses: to the quorum, past witnesses that are down, late, or see another log."""

import threading
import time

import httpx
import live
import pytest
import rounds_made
from apis import Api, api
from databases import refused, settings, store
from partners import NAMES, Partner, log_key, server, three, trickling
from sqlalchemy import select
from strange_servers import answering
from typer.testing import CliRunner
from waiting import until

from acclimate import config, cosignatures, doctor_witnesses, log, notes, witness_client, witness_http
from acclimate.cli.main import app
from acclimate.cosignature_collector import LEASE, CosignatureCollector
from acclimate.quorum import Quorum
from acclimate.sequencer import Sequencer
from acclimate.service import identity
from acclimate.store import Store, leases, log_checkpoints
from acclimate.store import cosignatures as table
from acclimate.witness_client import parse_endpoints
from acclimate_competitions import records

__all__ = ["settings", "store", "three"]


def opened(text: str, vkey: str, made: list[Partner]) -> log.SignedCheckpoint:
    return log.open_checkpoint(text, notes.parse_vkey(vkey), [partner.verifier for partner in made])


def cosigned(client, **params: str):
    return client.get("/v1/log/checkpoint", params={"cosigned": "true", **params})


# ---- over HTTP -----------------------------------------------------------------------------------------------------


def test_checkpoints_and_receipts_carry_the_quorums_cosignatures(three, tmp_path):
    with server(tmp_path, three, quorum=2, metrics="on") as running:
        key, anyone = log_key(running.settings, running.store), running.anyone()
        about = anyone.get("/v1/server").json()
        assert (about["witnesses"], about["quorum"]) == ([one.verifier.text() for one in three], 2)
        # Before the first: the code, and who lacks.
        answer = cosigned(anyone)
        assert answer.status_code == 503 and answer.json()["code"] == "quorum_missing"
        assert all(name in answer.json()["detail"] for name in NAMES) and answer.json()["hint"]
        for partner in three[:2]:
            partner.start(key)
        staged = live.create(running, tmp_path)
        assert (staged.fields["witnesses"], staged.fields["quorum"]) == (about["witnesses"], 2)
        until(lambda: cosigned(anyone).status_code == 200)
        receipt = log.Receipt.parse(anyone.get("/v1/log/proof/0").text)
        record, signed = receipt.open(notes.parse_vkey(key), [one.verifier for one in three])
        assert record.type == "RoundDefined"
        assert set(signed.cosigned) == {one.verifier.text() for one in three[:2]}
        assert all(abs(seconds - time.time()) < 3600 for seconds in signed.cosigned.values())
        # The third comes later; the newest checkpoint then has its line, too.
        three[2].start(key)
        until(lambda: len(opened(anyone.get("/v1/log/checkpoint").text, key, three).cosigned) == 3)
        live.seal(staged)
        size = opened(anyone.get("/v1/log/checkpoint").text, key, three).checkpoint.size
        assert size == 2
        found = log.Receipt.parse(anyone.get("/v1/log/proof/1").text)
        _, signed = found.open(notes.parse_vkey(key), [one.verifier for one in three])
        assert signed.checkpoint.size == 2 and len(signed.cosigned) >= 2
        until(lambda: anyone.get("/readyz").json()["checks"]["witnesses"] == "ok")
        numbers = until(lambda: (text := anyone.get("/metrics").text) and "uncosigned_entries 0" in text and text)
        assert "acclimate_log_uncosigned_age_seconds 0.0" in numbers
        assert 'acclimate_witness_entries{witness="w1.example.org"}' in numbers
        by_round = cosigned(anyone, round=staged.round)
        assert opened(by_round.text, key, three).checkpoint.size == 2
        assert cosigned(anyone, round="nothing").json()["code"] == "round_unknown"


def test_with_its_witnesses_down_the_round_goes_on_and_everybody_is_told(three, tmp_path, monkeypatch):
    monkeypatch.setattr("acclimate.health.COSIGNED_WITHIN", 0.0)
    with server(tmp_path, three, quorum=2, metrics="on") as running:
        key, anyone = log_key(running.settings, running.store), running.anyone()
        three[0].start(key)
        staged = live.open_round(running, tmp_path)
        assert running.phase(staged.round) == "open"
        # One of three has signed; no quorum has, and receipts come without.
        receipt = log.Receipt.parse(anyone.get("/v1/log/proof/0").text)
        record, signed = receipt.open(notes.parse_vkey(key), [one.verifier for one in three])
        assert record.type == "RoundDefined" and len(signed.cosigned) < 2
        assert cosigned(anyone).json()["code"] == "quorum_missing"
        running.clock.forward(minutes=5)
        answer = until(lambda: (got := anyone.get("/readyz")) and "witness_unreachable" in got.text and got)
        assert answer.status_code == 200 and answer.json()["status"] == "ready"
        told = answer.json()["checks"]["witnesses"]
        assert f"{NAMES[1]}: witness_unreachable: does not answer" in told and "127.0.0.1" not in told
        found = anyone.get(staged.path).json()
        assert found["cosigned"] == {
            "quorum": 2, "witnesses": 3, "size": 0, "missing": found["log"]["last"] + 1, "late": list(NAMES[1:]),
        }  # fmt: skip
        text = CliRunner().invoke(app, ["status", staged.round, "--server", running.url]).stdout
        assert f"2 of 3 must have cosigned the round's last {found['log']['last'] + 1} records" in text
        assert f"{NAMES[1]}, {NAMES[2]} not yet" in text and NAMES[0] not in text
        entries = int(anyone.get("/v1/log/checkpoint").text.splitlines()[1])
        numbers = until(
            lambda: (text := anyone.get("/metrics").text) and f"uncosigned_entries {entries}" in text and text
        )
        assert "acclimate_ready 1.0" in numbers
        # They come back, and what was missed is made good without anybody's doing.
        three[1].start(key)
        until(lambda: cosigned(anyone).status_code == 200)
        receipt = log.Receipt.parse(anyone.get("/v1/log/proof/0").text)
        assert len(receipt.open(notes.parse_vkey(key), [one.verifier for one in three])[1].cosigned) == 2
        until(lambda: anyone.get(staged.path).json()["cosigned"]["missing"] == 0)
        text = CliRunner().invoke(app, ["status", staged.round, "--server", running.url]).stdout
        # Enough of them have; who hasn't is named all the same.
        assert f"2 of 3 have cosigned all records of the round; {NAMES[2]} not yet" in text
        findings = {finding.name: finding for finding in doctor_witnesses.witnesses(running.settings)}
        assert {name: finding.state for name, finding in findings.items()} == {
            f"witness {NAMES[0]}": "ok", f"witness {NAMES[1]}": "ok", f"witness {NAMES[2]}": "warning",
        }  # fmt: skip
        assert f"has cosigned {entries} of {entries} entries" in findings[f"witness {NAMES[0]}"].found


def test_who_waits_for_a_receipt_takes_no_place_from_others(three, tmp_path):
    with server(tmp_path, three, quorum=3) as running:
        staged = live.create(running, tmp_path)
        # Nobody cosigns: all of these wait, more than there are threads, and others are served meanwhile.
        answers, anyone = [], running.anyone()

        def ask() -> None:
            answer = httpx.get(f"{running.url}/v1/log/proof/0", trust_env=False, timeout=60)
            answers.append(answer.status_code)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(60)]
        for thread in threads:
            thread.start()
        served = 0
        while any(thread.is_alive() for thread in threads):
            assert anyone.get(staged.path).status_code == 200
            served += 1
        assert answers == [200] * 60 and served > 1


def test_a_round_for_other_witnesses_is_refused(three, tmp_path):
    with server(tmp_path, three[:1], quorum=1) as running:
        staged = live.create(running, tmp_path)
        fields = {**staged.fields, "name": "other", "witnesses": [], "quorum": 0}
        body = running.organizer().sign("RoundDefined", "", **fields)
        answer = running.organizer().post("/v1/rounds", body)
        assert answer.json()["code"] == "guard_failed"
        assert {problem.split(" ")[0] for problem in answer.json()["problems"]} == {"witnesses", "quorum"}
        assert three[0].verifier.text() in str(answer.json()["problems"])


def test_what_was_cosigned_is_shown_after_the_settings_name_nobody_any_more(three, tmp_path):
    with server(tmp_path, three[:1], quorum=1) as running:
        key = log_key(running.settings, running.store)
        three[0].start(key)
        staged = live.create(running, tmp_path)
        until(lambda: cosigned(running.anyone()).status_code == 200)
    with live.serve(tmp_path) as running:
        anyone = running.anyone()
        receipt = log.Receipt.parse(anyone.get("/v1/log/proof/0").text)
        assert len(receipt.open(notes.parse_vkey(key), [three[0].verifier])[1].cosigned) == 1
        assert len(opened(cosigned(anyone, round=staged.round).text, key, three).cosigned) == 1
        # By the settings, the newest of all will do.
        assert cosigned(anyone).status_code == 200


@pytest.mark.slow
def test_when_the_process_that_asks_is_killed_another_asks(three, tmp_path):
    """Two API processes over one installation; whichever collects is killed with SIGKILL, and the log goes on being cosigned."""
    shared = config.load(tmp_path / "shared", environ={})
    opened_store = Store.open(shared)
    known = identity.begin(shared, opened_store)
    for partner in three:
        partner.start(known.vkey)
    request = rounds_made.request(opened_store.blobs, tmp_path / "made")
    environment = {
        "ACCLIMATE_DATABASE": shared.database,
        "ACCLIMATE_BLOBS": shared.blobs,
        "ACCLIMATE_SERVER_KEYS": str(shared.keys),
        "ACCLIMATE_WITNESSES": ";".join(partner.text for partner in three),
        "ACCLIMATE_QUORUM": "3",
    }

    def grow(name: str) -> None:
        fields = {**request["fields"], "name": name}
        with opened_store.transaction() as tx:
            tx.append(records.sign("RoundDefined", "", fields, key=rounds_made.key("organizer")))

    def size_at(one: Api) -> int:
        answer = one.get("/v1/log/checkpoint?cosigned=true")
        return opened(answer.text, known.vkey, three).checkpoint.size if answer.status_code == 200 else 0

    with api(tmp_path / "one", **environment) as one, api(tmp_path / "two", **environment) as two:
        grow("a")
        until(lambda: size_at(one) == size_at(two) == 1)
        with opened_store.snapshot() as tx:
            assert tx.execute(select(leases.c.holder).where(leases.c.name == LEASE)).scalar_one().startswith("api-")
        one.process.kill()
        one.process.wait()
        grow("b")
        until(lambda: size_at(two) == 2)
        two.process.kill()
        two.process.wait()
    grow("c")
    with api(tmp_path / "one", **environment) as one:
        until(lambda: size_at(one) == 3)
    opened_store.close()


# ---- below HTTP: on each database -----------------------------------------------------------------------------------


@pytest.fixture
def logged(settings, store, tmp_path):
    """A log that grows by `add()`, its sequencer, and its key."""
    request = rounds_made.request(store.blobs, tmp_path / "made")
    known = identity.begin(settings, store)
    sequencer = Sequencer(store, known.signer)
    count = iter(range(10**6))

    def add(number: int = 1) -> int:
        for _ in range(number):
            fields = {**request["fields"], "name": f"r{next(count)}"}
            with store.transaction() as tx:
                tx.append(records.sign("RoundDefined", "", fields, key=rounds_made.key("organizer")))
        return sequencer.advance()

    yield add, sequencer, known.vkey
    sequencer.close()


def asks(store: Store, sequencer: Sequencer, made: list[Partner], *, quorum: int) -> CosignatureCollector:
    return CosignatureCollector(store, sequencer, parse_endpoints([one.text for one in made]), quorum=quorum)


def lines_of(store: Store, size: int) -> int:
    with store.snapshot() as tx:
        return len(tx.execute(select(table.c.witness).where(table.c.size == size)).all())


def test_two_processes_collect_to_one_quorum_and_keep_each_line_once(settings, store, logged, three, tmp_path):
    add, sequencer, key = logged
    given = {"database": settings.database, "blobs": settings.blobs, "server_keys": str(settings.keys)}
    beside = Store.open(config.load(tmp_path / "beside", environ={}, given=given))
    second = Sequencer(beside, identity.load(settings, store).signer)
    for partner in three:
        partner.start(key)
    both = [asks(store, sequencer, three, quorum=3), asks(beside, second, three, quorum=3)]
    for one in both:
        one.start()
    try:
        for _ in range(5):
            size = add(3)
            second.advance()
            until(lambda size=size: all(one.reached >= size for one in both))
        until(lambda: lines_of(store, size) == 3)
        assert (
            len({one.size(log.parse_checkpoint(notes.parse_note(sequencer.checkpoint()).text).origin) for one in three})
            == 1
        )
    finally:
        for one in both:
            one.close()
        beside.close()


def test_what_one_process_began_another_ends_when_it_is_gone(store, logged, three):
    add, sequencer, key = logged
    size = add()
    for partner in three:
        partner.start(key)
    first, second = (asks(store, sequencer, three, quorum=3) for _ in range(2))
    first.step()
    assert first.reached == size and lines_of(store, size) == 3
    size = add()
    # The first has the lease, and the other asks nobody.
    second.step()
    assert lines_of(store, size) == 0
    first.close()
    second.step()
    assert second.reached == size and lines_of(store, size) == 3
    second.close()


def test_a_witness_that_hangs_keeps_no_quorum_waiting(store, logged, three, tmp_path):
    add, sequencer, key = logged
    for partner in three[:2]:
        partner.start(key)
    # It takes the connection and says nothing.
    with witness_http.listen("127.0.0.1", three[2].port):
        collector = asks(store, sequencer, three, quorum=2)
        for _ in range(3):
            size = add()
            collector.step()
            assert collector.reached == size
            # It is still being asked.
            hanging = collector.witnesses[2].asked
            assert hanging is not None and not hanging.done()
        collector.close()


def test_one_that_never_ends_its_answer_and_another_that_was_down_end_nothing(store, logged, three):
    add, sequencer, key = logged
    three[0].start(key)
    with trickling(three[2].port):
        collector = asks(store, sequencer, three, quorum=2)
        collector.start()
        try:
            size = add()
            until(lambda: collector.witnesses[0].size == size and collector.witnesses[1].problem)
            assert collector.reached == 0
            # It is back, and is asked again while the third still is at its first answer.
            three[1].start(key)
            until(lambda: collector.reached == size)
            asked = collector.witnesses[2].asked
            assert asked is not None and collector.witnesses[2].size == 0
        finally:
            collector.close()


def test_a_checkpoint_that_comes_to_no_quorum_gives_way_to_the_next(store, logged, three, monkeypatch):
    monkeypatch.setattr("acclimate.cosignature_collector.ROUND_SECONDS", 1.0)
    add, sequencer, key = logged
    for partner in three[:2]:
        partner.start(key)
    with trickling(three[2].port):
        collector = asks(store, sequencer, three, quorum=3)
        collector.start()
        try:
            for _ in range(3):
                size = add(2)
                until(lambda size=size: lines_of(store, size) == 2)
            asked = collector.witnesses[2].asked
            assert asked is not None and not asked.done() and collector.reached == 0
        finally:
            collector.close()


def test_a_witness_is_asked_anew_from_what_it_has(store, logged, three):
    add, sequencer, key = logged
    three[0].start(key)
    first = asks(store, sequencer, three[:1], quorum=1)
    add(5)
    first.step()
    first.close()
    # Cosignatures are lost, as in a database that was put back; the witness knows what it has signed.
    with store.transaction() as tx:
        tx.execute(table.delete())
    size = add(3)
    again = asks(store, sequencer, three[:1], quorum=1)
    again.step()
    assert again.reached == size
    again.close()


def test_each_reason_for_which_a_witness_does_not_cosign_is_logged_once(store, logged, three, caplog):
    add, sequencer, _ = logged
    collector = asks(store, sequencer, three[:1], quorum=1)
    (witness,) = collector.witnesses

    def told(expected: str, times: int = 3) -> None:
        caplog.clear()
        for _ in range(times):
            # The size that is asked for is in some answers, and makes no other reason.
            size, note = add(), sequencer.checkpoint()
            collector._ask(witness, size, note)
        (row,) = caplog.records
        assert expected in row.getMessage() and NAMES[0] in row.getMessage()
        assert witness.problem.startswith("witness_unreachable: ")

    told("refused")
    key = three[0].verifier.text()
    for body, status, expected in ((b"junk", 200, "no valid cosignature"), (b"busy", 503, "503"), (b"", 302, "302")):
        with answering(body, status=status) as url:
            witness.endpoint = parse_endpoints([f"{url} {key}"])[0]
            told(expected)
    collector.close()


def test_a_witness_that_saw_another_history_disagrees_and_is_told_of(store, logged, three, caplog):
    add, sequencer, key = logged
    add(4)
    three[0].start(key)
    # Somebody with the log's key has shown this witness another log.
    other = log.Tree(log.leaf_hash(b"%d" % number) for number in range(3))
    signer = sequencer._signer
    forged = log.sign_checkpoint(signer, 3, other.root())
    with httpx.Client() as client:
        witness_client.ask(parse_endpoints([three[0].text])[0], forged, old=0, proof_of=lambda _: [], client=client)
    collector = asks(store, sequencer, three[:1], quorum=1)
    collector.step()
    assert collector.witnesses[0].problem.startswith("witness_disagrees: ") and collector.reached == 0
    assert any(row.levelname == "ERROR" and NAMES[0] in row.getMessage() for row in caplog.records)
    assert lines_of(store, 4) == 0
    # Signing goes on.
    assert add() == 5
    collector.close()


def test_a_witness_with_a_wrong_clock_gives_nothing_that_is_kept(store, logged, three):
    add, sequencer, key = logged
    size = add()
    three[0].start(key, clock=lambda: time.time() + 86_400)
    collector = asks(store, sequencer, three[:1], quorum=1)
    collector.step()
    assert collector.witnesses[0].problem and lines_of(store, size) == 0
    collector.close()


def cosign(store: Store, partner: Partner, size: int) -> None:
    """A line as a witness would have given it."""
    with store.transaction() as tx:
        note = tx.execute(select(log_checkpoints.c.note).where(log_checkpoints.c.size == size)).scalar_one()
        text = notes.parse_note(note).text
        name, key = partner.identity.verifier.name, partner.identity.keys.ed25519
        line = notes.cosign(text, name=name, key=key, time=int(time.time()))
        assert cosignatures.keep(tx, size, partner.verifier, line)
        assert not cosignatures.keep(tx, size, partner.verifier, line)


def test_which_checkpoint_came_first_to_its_quorum_never_changes(store, logged, three):
    add, _, key = logged
    for size in range(1, 7):
        assert add() == size
    quorum = Quorum(tuple(one.verifier for one in three), 2)
    for partner, size in ((0, 2), (1, 3), (0, 4), (1, 4), (2, 2), (0, 6), (2, 6)):
        cosign(store, three[partner], size)
    with store.snapshot() as tx:
        found = cosignatures.Reached(tx, quorum, first=0, last=6)
        # 4 came to its quorum before 2 did, which therefore never was the first to hold anything.
        assert [found.covering(index) for index in range(7)] == [4, 4, 4, 4, 6, 6, None]
        before = {size: found.lines(size) for size in (2, 4, 6)}
        assert before[2] == "" and len(before[4].splitlines()) == 2
        newest = opened(cosignatures.checkpoint(tx, quorum), key, three)
        assert newest.checkpoint.size == 6 and len(newest.cosigned) == 2
        assert cosignatures.Reached(tx, Quorum(quorum.witnesses, 3), first=0, last=6).covering(0) is None
    # More lines later, under earlier checkpoints and the same ones: nothing that was chosen moves.
    for partner, size in ((2, 3), (2, 4), (1, 6), (0, 1), (1, 1), (0, 5), (1, 5)):
        cosign(store, three[partner], size)
    with store.snapshot() as tx:
        later = cosignatures.Reached(tx, quorum, first=0, last=6)
        assert [later.covering(index) for index in range(7)] == [4, 4, 4, 4, 6, 6, None]
        assert {size: later.lines(size) for size in (2, 4, 6)} == before
        assert len(opened(cosignatures.checkpoint(tx, quorum), key, three).cosigned) == 3
        # Asked of a part only, it is the same.
        for last in range(6):
            part = cosignatures.Reached(tx, quorum, first=0, last=last)
            assert [part.covering(index) for index in range(last + 1)] == [4, 4, 4, 4, 6, 6][: last + 1]
        strangers = Quorum((three[0].verifier,), 1)
        assert cosignatures.newest(tx, strangers) == 6
        refused("quorum_missing", cosignatures.checkpoint, tx, Quorum(quorum.witnesses[:1], 2))
