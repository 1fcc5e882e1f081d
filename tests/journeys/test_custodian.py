"""A custodian's release from one mailed file: what its own machine demands, and each false, missing or early piece of evidence refused by name.

Online the same functions check what a server sends (test_cli_custody.py, test_custodian_live.py).
"""

import base64
import json
import shutil
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import rounds_made
from mailing import (
    AUDITED,
    CLOSES,
    EVERY_AUDITED,
    INDEX,
    NAME,
    NAMES,
    NOW,
    Mail,
    defined_in,
    key_folder,
    mail,
    make,
    packed,
)
from rounds_made import Made, cosigned

from acclimate import custody, keys, log
from acclimate.client import custodian, history, requests
from acclimate.client.requests import Mailed
from acclimate_competitions import definition, digests, records, rounds
from acclimate_competitions.errors import Refusal
from acclimate_competitions.phases import Round


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("round"))


@pytest.fixture
def given(made: Made, tmp_path: Path) -> Mail:
    return mail(made, tmp_path)


# ---- what goes well ------------------------------------------------------------------------------------------------


def test_a_release_is_made_from_one_mailed_file_without_a_server(given: Mail, tmp_path: Path) -> None:
    mailed = requests.read(packed(given.mailed, tmp_path / "digits.request"))
    assert replace(mailed, path=given.mailed.path) == given.mailed
    answer, checks = custodian.answer(mailed, given.keys, given.made.round[:20], now=NOW)
    assert answer.document == given.made.documents[INDEX]
    assert {check.status for check in checks} == {"ok"}
    said = {check.name: check.detail for check in checks}
    assert all(name in said["witnesses"] for name in NAMES)
    assert "so were the witnesses'" in said["clock"]
    assert [check.name for check in checks] == [
        c.name for c in custodian.inspect(mailed, given.keys, answer.round, now=NOW)
    ]
    # The answer: nobody else reads it, and it is the same when read again.
    path = tmp_path / "answer.json"
    answer.write(path)
    assert path.stat().st_mode & 0o077 == 0
    assert requests.read_answer(path) == answer
    covered = records.statement("ShareReleased", answer.round, answer.record["fields"], by=given.keys.public)
    records.check_signature(given.keys.public, answer.record["sig"], covered, what="the release")


def test_a_request_without_envelopes_is_answered_with_the_one_that_was_kept(given: Mail) -> None:
    bare = given.change(envelopes=None)
    assert bare.release()[0].document == given.made.documents[INDEX]
    shutil.rmtree(given.keys.folder / "envelopes")
    bare.refuses("share_missing", f"share {INDEX}", "round request")


@pytest.mark.parametrize("what", ["flipped", "another's", "of another seal", "not there"])
def test_what_is_sent_in_the_place_of_the_envelope_that_was_kept_holds_up_nobody(
    what: str, given: Mail, tmp_path: Path
) -> None:
    first, mine, third = given.mailed.envelopes or []
    main = mine["main"]
    sent = {
        "flipped": [first, {**mine, "main": ("B" if main[0] == "A" else "A") + main[1:]}, third],
        "another's": [first, {**third, "index": INDEX}, third],
        "of another seal": make(tmp_path / "again").envelopes if what == "of another seal" else [],
        "not there": [first, third],
    }[what]
    bad = given.change(envelopes=sent)
    assert bad.release()[0].document == given.made.documents[INDEX]
    # And the other way round: what is sent is good where the one that was kept is damaged, or gone.
    kept = given.keys.folder / "envelopes" / f"{given.made.round}.json"
    for damaged in (b"{}", b"[", b"[]", digests.canonical(third)):
        kept.write_bytes(damaged)
        assert given.release()[0].document == given.made.documents[INDEX]
    bad.refuses("share_false")


def test_a_round_without_witnesses_says_not_checked(tmp_path: Path) -> None:
    given = mail(make(tmp_path / "round", quorum=0), tmp_path)
    answer, checks = given.release()
    assert answer.document == given.made.documents[INDEX]
    assert {check.name for check in checks if check.status == "NOT CHECKED"} == {"witnesses"}


# ---- too early -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["RoundClosed", "PreparationFinished"])
def test_before_its_record_is_in_the_log_nothing_is_released(kind: str, given: Mail) -> None:
    size = next(i for i, data in enumerate(given.made.entries) if f'"{kind}"'.encode() in data)
    early = given.until(size)
    early.refuses("too_early", f"no {kind}")
    assert (early.last().name, early.last().status) == (kind, "NOT YET")


@pytest.mark.parametrize("hours", [-24, -1])
def test_witnesses_who_saw_it_before_the_close_say_so(hours: int, given: Mail) -> None:
    """A server whose clock runs ahead has closed the round; the witnesses' clocks tell."""
    early = given.cosigned(at=CLOSES + timedelta(hours=hours))
    early.refuses(
        "too_early", "the round closes 2027-03-31", "the witnesses' clocks said 2027-03-30", "this machine's clock"
    )
    assert (early.last().name, early.last().status) == ("clock", "FAILED")


def test_one_witness_whose_clock_is_a_day_ahead_opens_nothing(given: Mail) -> None:
    note = given.cosigned(at=CLOSES - timedelta(hours=1), by=NAMES[1:]).mailed.note
    given.change(note=cosigned(note, at=CLOSES + timedelta(hours=23), by=NAMES[:1])).refuses(
        "too_early", "witnesses' clocks"
    )


def test_this_machines_clock_a_day_behind_is_named_beside_the_witnesses(given: Mail) -> None:
    wrong = replace(given, now=CLOSES - timedelta(days=1))
    wrong.refuses(
        "too_early", "this machine's clock says 2027-03-30", "witnesses' clocks said", "check this machine's clock"
    )


SECRET = b"the auditor's secret: 32 bytes.."


def audited_round(where: Path, definition: str) -> Made:
    """A round with a second operator, as far as PreparationFinished."""
    lab = {"name": "lab", "ed25519": rounds_made.public("lab"), "draw": digests.of_bytes(SECRET)}
    return make(where, definition=definition, auditor=lab)


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return audited_round(tmp_path_factory.mktemp("audited"), AUDITED)


def with_record(given: Mail, kind: str, fields: dict[str, Any]) -> Mail:
    """The log with one more record, of the second operator's."""
    made, lines = given.made, given.mailed.lines
    request = records.sign(kind, made.round, fields, key=rounds_made.key("lab"))
    at = made.now + timedelta(seconds=len(lines))
    record = records.Record(kind, made.round, at, fields, request["by"], request["sig"])
    return given.with_entries([*lines, record.encode()])


def with_draw(given: Mail) -> Mail:
    return with_record(given, "AuditDrawn", {"secret": base64.b64encode(SECRET).decode()})


def state_of(given: Mail) -> Round:
    numbered = [(index, records.parse(line)) for index, line in enumerate(given.mailed.lines)]
    own = [(index, record) for index, record in numbered if record.round == given.made.round]
    return rounds.fold(own, definition.parse(given.mailed.raw))


def test_drawn_reruns_come_before_the_release(audited: Made, tmp_path: Path) -> None:
    given = mail(audited, tmp_path)
    given.refuses("too_early", "the auditor has not drawn the 1 preparations")
    assert (given.last().name, given.last().status) == ("audits", "NOT YET")
    drawn = with_draw(given)
    drawn.refuses("too_early", "1 of the 1 drawn re-runs have no outcome yet")
    state = state_of(drawn)
    (key,) = state.drawn or ()
    outcome = dict(zip(("submission", "task", "seed"), key, strict=True))
    outcome |= {"tolerance": 0.0, "hardware": "cpu/x86_64"}
    agrees = {**outcome, "prepared": state.prepared[key]["prepared"], "agrees": True, "reason": "equal bytes"}
    differs = {**outcome, "prepared": digests.of_bytes(b"another"), "agrees": False, "reason": "other weights"}
    bad = with_record(drawn, "PreparationAudited", differs)
    bad.refuses("guard_failed", "does not agree", "don't release")
    assert (bad.last().name, bad.last().status) == ("audits", "FAILED")
    _, checks = with_record(drawn, "PreparationAudited", agrees).release()
    (check,) = [check for check in checks if check.name == "audits"]
    assert (check.status, check.detail) == ("ok", "1 drawn preparation was made again, and agrees")


def test_a_drawn_preparation_that_was_given_up_is_not_told_as_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds_made, "FAILURE", rounds_made.FAILURE | {"given_up": True})
    given = with_draw(mail(audited_round(tmp_path / "round", EVERY_AUDITED), tmp_path))
    state = state_of(given)
    for key in state.drawn or ():
        prepared = state.prepared[key].fields.get("prepared")
        outcome = dict(zip(("submission", "task", "seed"), key, strict=True))
        outcome |= {"tolerance": 0.0, "hardware": "cpu/x86_64", "prepared": prepared}
        given = with_record(given, "PreparationAudited", {**outcome, "agrees": True, "reason": "by the rules"})
    # It keeps no share, and the custodian, whose act depends on it, is told what nobody made again.
    _, checks = given.release()
    (check,) = [check for check in checks if check.name == "audits"]
    assert check.status == "NOT CHECKED"
    assert check.detail == (
        "17 of 18 drawn preparations were made again, and agree; 1 was given up by the organizer, as the evaluator says, and not made again"
    )


# ---- what contradicts ----------------------------------------------------------------------------------------------


def test_fewer_witnesses_than_the_quorum_are_named(given: Mail) -> None:
    lone = given.cosigned(at=NOW, by=NAMES[:1])
    lone.refuses("quorum_missing", "1 of 3 witnesses cosigned", "asks for 2", "missing: w2.example.org, w3.example.org")
    assert (lone.last().name, lone.last().status) == ("witnesses", "NOT YET")
    # Once more by the same one is no second witness.
    given.change(note=cosigned(lone.mailed.note, at=NOW, by=NAMES[:1])).refuses("quorum_missing", "1 of 3 witnesses")


def test_a_witness_that_disagrees_is_named(given: Mail) -> None:
    """A line under the witness's name that it never wrote, or wrote for another history."""
    other = log.sign_checkpoint(given.made.signer, len(given.mailed.lines), digests.leaf_hash(b"another history"))
    line = cosigned(other, at=NOW, by=NAMES[2:]).splitlines(keepends=True)[-1]
    note = given.cosigned(at=NOW, by=NAMES[:2]).mailed.note + line
    given.change(note=note).refuses("proof_invalid", f"the signature of {NAMES[2]}")
    assert given.change(note=note).last().name == "witnesses"


def test_another_history_than_the_pinned_one_is_refused(given: Mail) -> None:
    lines = list(given.mailed.lines)
    document = json.loads(lines[0])
    lines[0] = digests.canonical(document | {"at": document["at"].replace(".000000Z", ".000001Z")})
    given.with_entries(lines).refuses("log_inconsistent", "does not extend the pinned checkpoint", "pins.json")


def test_an_old_checkpoint_is_refused(given: Mail) -> None:
    """Shorter than what was pinned: the server went back, or the mail is an old one."""
    given.until(2).refuses("log_inconsistent", "the log of 2 entries does not extend the pinned checkpoint of 3")


@pytest.mark.parametrize("what", ["changed", "missing", "more", "swapped"])
def test_entries_that_are_not_the_checkpoints_are_refused(what: str, given: Mail) -> None:
    lines = list(given.mailed.lines)
    if what == "changed":
        lines[-1] = lines[-1].replace(b".000000Z", b".000001Z", 1)
    elif what == "swapped":
        lines[-1], lines[-2] = lines[-2], lines[-1]
    else:
        lines = lines[:-1] if what == "missing" else [*lines, lines[-1]]
    found = given.change(lines=lines)
    if what == "more":  # beyond what is signed nothing is read
        found.release()
    else:
        found.refuses("log_inconsistent", "do not hash to the root")


def test_another_logs_signature_is_refused(given: Mail) -> None:
    other = log.Signer(rounds_made.ORIGIN, rounds_made.key("a thief"))
    root = log.root([digests.leaf_hash(line) for line in given.mailed.lines])
    note = log.sign_checkpoint(other, len(given.mailed.lines), root)
    given.change(note=cosigned(note, at=NOW, by=NAMES)).refuses(
        "proof_invalid", "no known key signed", given.made.signer.vkey
    )


@pytest.mark.parametrize("pinned", ["the log's", "the shown"])
def test_another_round_defined_of_the_same_id_is_refused(pinned: str, given: Mail) -> None:
    """Whoever finds two contents of one id signs the one without witnesses for whom it shall deceive; here ids are one by decree."""
    own = defined_in(given.made)
    record = records.parse(own)
    fields = {**record.fields, "witnesses": [], "quorum": 0}
    sig = records.sign("RoundDefined", "", fields, key=rounds_made.key("organizer"))["sig"]
    shown = replace(record, fields=fields, sig=sig)
    assert shown.round == record.round

    @dataclass(frozen=True)
    class Lying(Mailed):
        def definition(self, round_id: str) -> Any:
            return shown, super().definition(round_id)[1]

    mailed = Lying(**vars(given.mailed))
    bare = replace(given, mailed=replace(mailed, note=given.cosigned(at=NOW, by=()).mailed.note))
    if pinned == "the shown":
        path = given.keys.folder / "pins.json"
        stored = json.loads(path.read_text())
        stored[given.made.round]["defined"] = digests.of_bytes(shown.encode())
        path.write_text(json.dumps(stored))
        bare.refuses("log_inconsistent", "that was shown is", digests.of_bytes(own), "sign nothing")
        with pytest.raises(Refusal) as caught:
            history.read_history(bare.mailed, shown)
        assert caught.value.code == "log_inconsistent"
    else:
        bare.refuses("log_inconsistent", "pinned is", digests.of_bytes(own))


def test_whoever_copies_a_seal_into_another_round_holds_up_nothing(given: Mail) -> None:
    """The share is for its own round; a copy in the log, where it stays, must not keep the round from opening."""
    other = records.parse(given.mailed.lines[0])
    assert other.round != given.made.round
    fields = next(r for r in map(records.parse, given.made.entries) if r.type == "HoldoutSealed").fields
    request = records.sign("HoldoutSealed", other.round, fields, key=rounds_made.key("organizer"))
    record = records.Record("HoldoutSealed", other.round, given.made.now, fields, request["by"], request["sig"])
    given.with_entries([*given.mailed.lines, record.encode()]).release()


@pytest.mark.parametrize("minutes", [-6, -11])
def test_a_record_dated_ahead_of_the_witnesses_is_refused(minutes: int, given: Mail) -> None:
    """The window for objections was skipped: its end is dated when it should have come, and the quorum saw it before."""
    last = records.parse(given.mailed.lines[-1])
    early = given.cosigned(at=last.at + timedelta(minutes=minutes))
    early.refuses("log_inconsistent", f"log entry {len(given.mailed.lines) - 1}, {last.type}, is dated", "saw it by")
    assert (early.last().name, early.last().status) == ("dates", "FAILED")
    given.cosigned(at=last.at - timedelta(minutes=4)).release()
    # One witness of three whose clock is a day behind is no quorum.
    note = given.cosigned(at=NOW, by=NAMES[1:]).mailed.note
    given.change(note=cosigned(note, at=last.at - timedelta(hours=23), by=NAMES[:1])).release()


def test_a_record_dated_ahead_of_this_machines_clock_is_refused(tmp_path: Path) -> None:
    """Without witnesses as well: at the close the server dates the end of the window for objections a week ahead."""
    given = mail(make(tmp_path / "round", quorum=0), tmp_path)
    last = records.parse(given.mailed.lines[-1])
    assert replace(given, now=last.at - timedelta(minutes=9)).release()
    wrong = replace(given, now=last.at - timedelta(minutes=11))
    wrong.refuses(
        "too_early", "PreparationFinished, is dated", "this machine's clock says", "check this machine's clock"
    )
    assert (wrong.last().name, wrong.last().status) == ("dates", "FAILED")


def test_a_pin_of_an_older_version_says_what_to_do(given: Mail) -> None:
    path = given.keys.folder / "pins.json"
    stored = json.loads(path.read_text())
    del stored[given.made.round]["defined"]
    path.write_text(json.dumps(stored))
    given.refuses("phase_wrong", "older version", "finish this round with that version")


def test_another_definition_is_refused(given: Mail) -> None:
    given.change(raw=given.mailed.raw + b"\n").refuses("log_inconsistent", "not the one that RoundDefined names")


def test_a_voided_round_gets_no_share(given: Mail) -> None:
    made = given.made
    fields: dict[str, Any] = {"reason": "the holdout leaked"}
    approvals = [
        records.approve(
            "RoundVoided", made.round, fields, by=rounds_made.public("organizer"), key=rounds_made.key(name)
        )
        for name in ("custodian-a", "custodian-c")
    ]
    request = records.sign(
        "RoundVoided", made.round, {**fields, "approvals": approvals}, key=rounds_made.key("organizer")
    )
    at = made.now + timedelta(seconds=1)
    record = records.Record("RoundVoided", made.round, at, request["fields"], request["by"], request["sig"])
    given.with_entries([*given.mailed.lines, record.encode()]).refuses("phase_wrong", "was voided")


def test_where_others_were_faster_the_share_is_not_needed(given: Mail) -> None:
    lines = list(given.mailed.lines)
    for index, name in ((1, "custodian-a"), (3, "custodian-c")):
        fields = {"seal": given.made.seal["seal"], "index": index}
        fields |= {"document": custody.document_digest(given.made.documents[index])}
        request = records.sign("ShareReleased", given.made.round, fields, key=rounds_made.key(name))
        at = given.made.now + timedelta(seconds=index)
        lines.append(
            records.Record("ShareReleased", given.made.round, at, fields, request["by"], request["sig"]).encode()
        )
    opened = given.with_entries(lines)
    opened.refuses("phase_wrong", "yours is not needed")
    assert (opened.last().name, opened.last().status) == ("phase", "NOT NEEDED")


# ---- the wrong key, the wrong share --------------------------------------------------------------------------------


def test_another_custodians_keys_release_nothing(given: Mail, tmp_path: Path) -> None:
    path = tmp_path / "others"
    path.mkdir(mode=0o700)
    other = key_folder(given.made, path, "custodian-a")
    shutil.copy(given.keys.folder / "pins.json", path)
    replace(given, keys=other).refuses("share_false", f"share {INDEX}")


def test_an_envelope_that_does_not_open_is_told_with_what_to_do(given: Mail) -> None:
    other = replace(given.keys, age_identity=given.made.identities["custodian-a"])
    replace(given, keys=other).refuses("share_unreadable", "does not open with the identity", "backup")


def test_another_share_or_another_rounds_is_refused(given: Mail, tmp_path: Path) -> None:
    first, second, third = given.mailed.envelopes or []
    shutil.rmtree(given.keys.folder / "envelopes")
    given.change(envelopes=[first, third]).refuses("share_false", f"0 envelopes for share {INDEX}")
    swapped = {**first, "index": INDEX}
    given.change(envelopes=[first, swapped, third]).refuses("share_false", "not the one that the seal's record names")
    share = custody.parse_document(given.made.documents[INDEX])
    for false in (
        replace(share, share=bytes(len(share.share))),
        replace(share, seal=digests.of_bytes(b"another seal")),
        replace(share, round="another-round"),
        replace(share, round=None),
        replace(share, k=1),
        replace(share, share=b"x"),
    ):
        recipient = keys.recipient_of(given.made.identities[NAME])
        forged = custody.envelope(false.encode(), index=INDEX, to=NAME, main=recipient, backup=None)
        given.change(envelopes=[first, forged, third]).refuses("share_false", NAME)
    # The round's own second envelope, but of a round made again: another seal.
    again = make(tmp_path / "again")
    given.change(envelopes=again.envelopes).refuses("share_false", "not the one that the seal's record names")


def test_a_round_that_was_never_acknowledged_is_unknown(given: Mail) -> None:
    (given.keys.folder / "pins.json").unlink()
    given.refuses("round_unknown", "pins no round", "custodian ack")
