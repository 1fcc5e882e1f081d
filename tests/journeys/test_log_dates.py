"""No record's date is before its predecessor's: custodian, auditor and audit each find it out for themselves, whichever record it is."""

import base64
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import rounds_made
import shown_logs
from rounds_made import START, Made

from acclimate import log, verify
from acclimate.client import Client, auditor, custodian, pins
from acclimate_competitions import digests, records
from acclimate_competitions.errors import Refusal

INDEX = 2
NOW = START + timedelta(days=32)
MOVED = timedelta(days=40)
"""More than there is between any two records of the round."""
SECRET = b"the auditor's secret: 32 bytes.."
NAMED = rounds_made.DEFINITION.replace("audits = 0", 'audits = 0\nauditor = "lab"')
DRAWN = rounds_made.DEFINITION.replace("audits = 0", 'audits = 1\nauditor = "lab"\naudit_tolerance = 0.0')
LAB = {"name": "lab", "ed25519": rounds_made.public("lab"), "draw": digests.of_bytes(SECRET)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A prepared round with witnesses that names an auditor."""
    return shown_logs.prepared(tmp_path_factory.mktemp("round"), definition=NAMED, auditor=LAB)


def release(made: Made, where: Path, *, definition: str, entries: list[bytes], now: datetime = NOW) -> None:
    """Custodian b releases by a log of these entries, signed and cosigned now."""
    own = shown_logs.key_folder(where, "custodian-b", age=made.identities["custodian-b"])
    pins.keep(own, shown_logs.pin(made, INDEX), envelope=made.envelopes[INDEX - 1])
    note = shown_logs.signed(made, entries, at=now, by=shown_logs.WITNESSES if made_quorum(made) else ())
    source = shown_logs.mailed(made, where, definition=definition, entries=entries, note=note)
    custodian.answer(source, own, made.round, now=now)


def made_quorum(made: Made) -> int:
    return int(records.parse(shown_logs.defined_in(made))["quorum"])


def audit(made: Made, where: Path, *, entries: list[bytes]) -> None:
    """The round's auditor looks at it."""
    own = shown_logs.key_folder(where, "lab")
    shown = shown_logs.Shown(made, NAMED, entries, shown_logs.signed(made, entries, at=NOW))
    with shown_logs.serving(shown) as url, Client(url, patience=0) as client:
        auditor.evidence(client, own, made.round)


def audited(made: Made, where: Path, *, entries: list[bytes]) -> list[str]:
    """The checks that FAILED in a bundle of these entries, all of it signed and cosigned again."""
    again = replace(made, entries=entries, tree=log.Tree(), notes={}, receipts={})
    for entry in entries:
        again.tree.append(digests.leaf_hash(entry))
        size = len(again.tree)
        plain = log.sign_checkpoint(made.signer, size, again.tree.root())
        again.notes[size] = rounds_made.cosigned(plain, at=records.parse(entry).at, by=shown_logs.WITNESSES)
    for index in made.receipts:
        again.receipts[index] = again.receipt(index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "DEFINITION", NAMED)
        plain_fields = rounds_made.defined_fields
        quorum = {"quorum": 2, "witnesses": [rounds_made.witness(name) for name in shown_logs.WITNESSES]}
        patch.setattr(rounds_made, "defined_fields", lambda made: plain_fields(made) | {"auditor": LAB} | quorum)
        report = verify.verify(again.write(where), log_key=made.signer.vkey, levels=["log"])
    return [check.name for check in report.failed]


def test_whichever_date_is_moved_custodian_auditor_and_audit_refuse(made: Made, tmp_path: Path) -> None:
    release(made, tmp_path / "honest", definition=NAMED, entries=made.entries)
    audit(made, tmp_path / "auditor", entries=made.entries)
    assert "records" not in audited(made, tmp_path / "bundle", entries=made.entries)
    last = len(made.entries) - 1
    for index, entry in enumerate(made.entries):
        for days in (MOVED, -MOVED):
            if index == 0 and days < MOVED:
                continue  # before the first there is none
            moved = shown_logs.dated(entry, records.parse(entry).at + days)
            entries = [*made.entries[:index], moved, *made.entries[index + 1 :]]
            where = tmp_path / f"{index}{days.days:+}"
            for call in (
                lambda: release(made, where / "custodian", definition=NAMED, entries=entries),  # noqa: B023
                lambda: audit(made, where / "lab", entries=entries),  # noqa: B023
            ):
                with pytest.raises(Refusal) as caught:
                    call()
                assert caught.value.code in ("log_inconsistent", "too_early"), (index, days, caught.value)
                assert caught.value.hint
            # The last one moved ahead is nobody's predecessor: that its witnesses saw it before is another check's.
            if index in (1, last // 2, last) and not (index == last and days > timedelta(0)):
                assert "records" in audited(made, where / "bundle", entries=entries)


@pytest.mark.parametrize("quorum", [2, 0])
def test_a_record_dated_ahead_does_not_hide_behind_a_later_one(quorum: int, tmp_path: Path) -> None:
    """The window for objections is dated a week ahead to its end; a colluding custodian's release comes after, dated now."""
    made = shown_logs.prepared(tmp_path / "round", quorum=quorum)
    last = records.parse(made.entries[-1])
    now = last.at + timedelta(minutes=1)
    ahead = [*made.entries[:-1], shown_logs.dated(made.entries[-1], last.at + timedelta(days=7))]
    with pytest.raises(Refusal) as caught:
        release(made, tmp_path / "alone", definition=rounds_made.DEFINITION, entries=ahead, now=now)
    assert caught.value.code == "too_early"
    fields = {"seal": made.seal["seal"], "index": 1, "document": made.seal["shares"][0]["commitment"]}
    request = records.sign("ShareReleased", made.round, fields, key=rounds_made.key("custodian-a"))
    later = records.Record("ShareReleased", made.round, now, request["fields"], request["by"], request["sig"])
    with pytest.raises(Refusal) as caught:
        entries = [*ahead, later.encode()]
        release(made, tmp_path / "behind", definition=rounds_made.DEFINITION, entries=entries, now=now)
    assert caught.value.code == "log_inconsistent"
    assert f"log entry {len(ahead)}, ShareReleased, is dated" in caught.value.sentence
    assert f"before log entry {len(ahead) - 1}, PreparationFinished" in caught.value.sentence
    # Of another round, too: no honest log has it.
    elsewhere = replace(records.parse(made.entries[0]), at=now)
    with pytest.raises(Refusal) as caught:
        entries = [*ahead, elsewhere.encode()]
        release(made, tmp_path / "other", definition=rounds_made.DEFINITION, entries=entries, now=now)
    assert caught.value.code == "log_inconsistent" and "RoundDefined, is dated" in caught.value.sentence


def test_an_auditors_draw_hides_no_record_dated_ahead(tmp_path: Path) -> None:
    """An honest auditor draws, and its record, dated now, stands behind the one dated ahead."""
    made = shown_logs.prepared(tmp_path / "round", definition=DRAWN, auditor=LAB)
    last = records.parse(made.entries[-1])
    ahead = [*made.entries[:-1], shown_logs.dated(made.entries[-1], last.at + timedelta(days=7))]
    own = shown_logs.key_folder(tmp_path / "lab", "lab")
    secret = base64.b64encode(SECRET).decode()
    (own.folder / auditor.DRAWS_FILE).write_text(f'{{"{LAB["draw"]}": "{secret}"}}')
    shown = shown_logs.Shown(made, DRAWN, ahead, shown_logs.signed(made, ahead, at=last.at))
    with shown_logs.serving(shown) as url, Client(url, patience=0) as client, pytest.raises(Refusal) as caught:
        auditor.draw(client, own, made.round)
    assert caught.value.code == "log_inconsistent" and "the witnesses saw it by" in caught.value.sentence
    assert shown.posted == []
    request = records.sign("AuditDrawn", made.round, {"secret": secret}, key=rounds_made.key("lab"))
    drawn = records.Record("AuditDrawn", made.round, last.at, request["fields"], request["by"], request["sig"])
    with pytest.raises(Refusal) as caught:
        release(made, tmp_path / "custodian", definition=DRAWN, entries=[*ahead, drawn.encode()], now=last.at)
    assert caught.value.code == "log_inconsistent" and "AuditDrawn, is dated" in caught.value.sentence
