"""What witnesses show of a bundle: with their cosignatures ok, without NOT CHECKED, with false ones FAILED, and never anything else."""

import shutil
from datetime import datetime, timedelta
from pathlib import Path

import made_bundles
import pytest
import rounds_made
from recosigning import CLOSES, NAMES, plain, recosign, then
from rounds_made import Made, cosigned, witness

from acclimate import log, verify
from acclimate.verify.report import Check
from acclimate_competitions import digests
from acclimate_competitions.records import format_time


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A round that asks for two of three witnesses, whose checkpoints nobody has cosigned yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "QUORUM", 2)
        patch.setattr(rounds_made, "WITNESSES", NAMES)
        return rounds_made.make(tmp_path_factory.mktemp("round"))


@pytest.fixture(scope="module")
def whole(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds_made, "QUORUM", 2)
        patch.setattr(rounds_made, "WITNESSES", NAMES)
        return made.write(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def bundle(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "bundle"))


def checks(path: Path, made: Made, **given: object) -> dict[str, Check]:
    made_bundles.mend(path)
    report = verify.verify(path, **{"log_key": made.signer.vkey, "levels": ["log"], **given})  # type: ignore[arg-type]
    return {check.name: check for check in report.checks}


def commitment(made: Made, entrant: str) -> int:
    """The log index of the commitment that counts."""
    return max(row["committed"] for row in made.submissions if row["entrant"] == entrant)


# ---- one history ---------------------------------------------------------------------------------------------------


def test_a_quorum_of_witnesses_leaves_no_gap_in_the_log(bundle: Path, made: Made) -> None:
    found = checks(bundle, made, witnesses=[witness(NAMES[0])])
    assert {name: check.status for name, check in found.items() if check.status != "ok"} == {}
    assert all(name in found["split view"].where for name in NAMES)
    assert found["receipts"].where == "4 receipts, 4 cosigned by the quorum"
    assert found["time"].where == "3 records, each cosigned by 2 witnesses"


def test_without_cosignatures_neither_history_nor_time_is_checked(bundle: Path, made: Made) -> None:
    recosign(bundle, lambda _, note: note)
    found = checks(bundle, made)
    assert {name for name, check in found.items() if check.status != "ok"} == {"split view", "whose witnesses", "time"}
    assert found["split view"].status == found["time"].status == "NOT CHECKED"
    assert "0 of 3 witnesses, the round asks for 2" in found["split view"].meaning
    assert f"log entry {commitment(made, 'bea')}, the commitment of bea" in found["time"].meaning


def test_one_witness_of_two_is_no_quorum_and_the_missing_are_named(bundle: Path, made: Made) -> None:
    recosign(bundle, lambda _, note: cosigned(note, at=made.now, by=NAMES[:1]))
    found = checks(bundle, made)
    assert found["split view"].status == "NOT CHECKED"
    assert (
        "1 of 3 witnesses, the round asks for 2 (not of w2.example.org, w3.example.org)" in found["split view"].meaning
    )


def test_a_witness_counts_once_whatever_it_calls_itself(bundle: Path, made: Made) -> None:
    recosign(bundle, lambda _, note: cosigned(note, at=made.now, by=(NAMES[0], NAMES[0])))
    assert checks(bundle, made)["split view"].status == "NOT CHECKED"


def test_cosignatures_that_end_before_the_rounds_last_record_are_not_enough(bundle: Path, made: Made) -> None:
    (bundle / "checkpoint").write_text(plain((bundle / "checkpoint").read_text()), "utf-8")
    size = len(made.entries)
    (bundle / "checkpoints" / str(size)).write_text(plain(made.notes[size]), "utf-8")
    found = checks(bundle, made)["split view"]
    assert found.status == "NOT CHECKED"
    assert f"the round's last record is entry {size - 1}" in found.meaning


@pytest.mark.parametrize("name", ["checkpoint", "checkpoints", "receipts"])
def test_a_cosignature_that_does_not_verify_is_named(name: str, bundle: Path, made: Made) -> None:
    path = bundle / name if name == "checkpoint" else max((bundle / name).iterdir())
    text = path.read_text("utf-8")
    line = text.splitlines()[-1]
    assert NAMES[2] in line
    swapped = line[:-6] + ("A" if line[-6] != "A" else "B") + line[-5:]
    path.write_text(text.replace(line, swapped), "utf-8")
    found = checks(bundle, made)["split view"]
    assert (found.status, found.where) == ("FAILED", path.relative_to(bundle).as_posix())
    assert f"the signature of {NAMES[2]}" in found.meaning


def test_a_cosigned_checkpoint_of_another_history_is_a_fork(bundle: Path, made: Made) -> None:
    """The log's operator showed the witnesses something else than what stands in the bundle."""
    (path, *_) = sorted((bundle / "checkpoints").iterdir())
    fork = log.sign_checkpoint(made.signer, int(path.name), digests.leaf_hash(b"another history"))
    path.write_text(cosigned(fork, at=made.now, by=NAMES), "utf-8")
    found = checks(bundle, made)
    assert found["split view"].status == found["earlier checkpoints"].status == "FAILED"
    assert found["split view"].where == f"checkpoints/{path.name}"
    assert "another history" in found["split view"].meaning


# ---- keys from elsewhere -------------------------------------------------------------------------------------------


def test_a_witness_that_the_auditor_knows_says_whose_log_it_is(bundle: Path, made: Made) -> None:
    found = checks(bundle, made, log_key=None, witnesses=[witness(NAMES[1])])
    assert found["whose log"].status == found["split view"].status == "ok"
    assert NAMES[1] in found["whose log"].where
    recosign(bundle, lambda _, note: note)
    silent = checks(bundle, made, log_key=None, witnesses=[witness(NAMES[1])])["whose log"]
    assert (silent.status, "no witness whose key you gave has cosigned" in silent.meaning) == ("NOT CHECKED", True)


@pytest.mark.parametrize("covered", ["its beginning", "all but the last record"])
def test_a_witness_of_the_honest_logs_beginning_does_not_vouch_for_what_a_forger_goes_on_with(
    covered: str, bundle: Path, made: Made
) -> None:
    """A cosignature names no log's key: a stranger signs the same beginning with a key of their own, and adds a round."""
    last = 1 if covered == "its beginning" else len(made.entries) - 1
    recosign(bundle, lambda size, note: cosigned(note, at=made.now, by=NAMES if size <= last else ()))
    if covered == "its beginning":
        (bundle / "checkpoints" / "1").write_text(made.notes[1], "utf-8")
    found = checks(bundle, made, log_key=None, witnesses=[witness(NAMES[0])])
    assert {found[name].status for name in ("whose log", "whose witnesses", "split view")} == {"NOT CHECKED"}
    assert "has cosigned the round's last record" in found["whose log"].meaning


def test_a_witness_that_the_round_does_not_name_is_no_evidence_against_it(bundle: Path, made: Made) -> None:
    stranger = witness("stranger.example.org")
    found = checks(bundle, made, witnesses=[stranger])
    assert [check.name for check in found.values() if check.status != "ok"] == ["whose witnesses"]
    assert found["whose witnesses"].status == "NOT CHECKED"
    assert all(witness(name) in found["whose witnesses"].meaning for name in NAMES)
    # Beside enough that the round names it changes nothing, and is named.
    beside = checks(bundle, made, witnesses=[stranger, *map(witness, NAMES[:2])])["whose witnesses"]
    assert (beside.status, f"not of {stranger}" in beside.where) == ("ok", True)
    # What it has cosigned, it vouches for: whose log it is.
    recosign(bundle, lambda _, note: cosigned(note, at=made.now, by=("stranger.example.org", *NAMES)))
    assert checks(bundle, made, log_key=None, witnesses=[stranger])["whose log"].status == "ok"


def test_a_round_without_witnesses_names_none(tmp_path: Path) -> None:
    made = rounds_made.make(tmp_path / "round")
    path = made.write(tmp_path / "bundle")
    found = checks(path, made)
    assert (found["split view"].status, "whose witnesses" in found) == ("NOT CHECKED", False)
    found = checks(path, made, witnesses=[witness(NAMES[0])])
    assert {name for name, check in found.items() if check.status != "ok"} == {"split view", "time", "whose witnesses"}
    assert "of this round, which names none" in found["whose witnesses"].meaning


def test_witnesses_that_nobody_vouches_for_are_said_to_be_the_operators_word(bundle: Path, made: Made) -> None:
    """The operator makes two witnesses of its own; the third, which is a real one, has never seen this history."""
    recosign(bundle, lambda _, note: cosigned(note, at=made.now, by=NAMES[1:]))
    alone = checks(bundle, made)["whose witnesses"]
    assert (alone.status, "they may all be the operator's own" in alone.meaning) == ("NOT CHECKED", True)
    assert all(witness(name) in alone.meaning for name in NAMES)
    real = witness(NAMES[0])
    for given in ([real], [real, witness(NAMES[1])]):
        found = checks(bundle, made, witnesses=given)["whose witnesses"]
        assert (found.status, f"no cosignature of {real} over" in found.meaning) == ("NOT CHECKED", True), given
    # Whoever knows all three knows a whole quorum that has seen it; which one has not is named.
    found = checks(bundle, made, witnesses=[*map(witness, NAMES)])["whose witnesses"]
    assert (found.status, f"not of {real}" in found.where) == ("ok", True)


def test_a_false_line_of_a_witness_that_the_auditor_knows_fails(bundle: Path, made: Made) -> None:
    forged = cosigned(made.notes[len(made.entries) - 1], at=made.now, by=("stranger.example.org",)).splitlines()[-1]
    text = (bundle / "checkpoint").read_text("utf-8")
    (bundle / "checkpoint").write_text(f"{text}{forged}\n", "utf-8")
    found = checks(bundle, made, witnesses=[witness("stranger.example.org")])["whose witnesses"]
    assert (found.status, found.where) == ("FAILED", "checkpoint")


# ---- time ----------------------------------------------------------------------------------------------------------


def test_time_counts_by_the_witness_that_completes_the_quorum(bundle: Path, made: Made) -> None:
    """Two saw it in time, the third a day later: the second counts."""
    times = CLOSES + timedelta(minutes=5), CLOSES + timedelta(days=1)

    def change(size: int, note: str) -> str:
        early, late = (then(made, size, time) for time in times)
        return cosigned(cosigned(note, at=early, by=NAMES[:2]), at=late, by=NAMES[2:])

    recosign(bundle, change)
    assert checks(bundle, made)["time"].status == "ok"


def test_five_minutes_after_the_close_are_the_last_that_count(bundle: Path, made: Made) -> None:
    late = CLOSES + timedelta(minutes=5, seconds=1)
    recosign(bundle, lambda size, note: cosigned(note, at=then(made, size, late), by=NAMES))
    found = checks(bundle, made)["time"]
    # All that the witnesses cosigned then and that ends before the commitment shows that it was not there.
    assert (found.status, found.where.startswith("log entry")) == ("FAILED", True)
    assert "without it; it had to be there by 2027-03-31T00:05:00" in found.meaning


def test_an_outage_over_the_close_is_a_gap_and_is_named(bundle: Path, made: Made) -> None:
    """What the witnesses saw before the close lacks the commitment, what they saw next came too late to tell."""
    last = commitment(made, "untrained")
    hours = timedelta(hours=2)

    def change(size: int, note: str) -> str:
        return cosigned(note, at=then(made, size, CLOSES + (hours if size > last else -hours)), by=NAMES)

    recosign(bundle, change)
    found = checks(bundle, made)["time"]
    assert found.status == "NOT CHECKED"
    assert found.meaning.startswith(f"log entry {last}, the commitment of untrained: ")
    assert "last seen without it 2027-03-30T22:00:00" in found.meaning
    assert "first seen with it 2027-03-31T02:00:00" in found.meaning


def test_a_commitment_put_in_after_the_close_is_named(bundle: Path, made: Made) -> None:
    """The server backdated it: its record says in time, the witnesses saw the log without it an hour after the close."""
    last = commitment(made, "untrained")
    before = max(size for size in map(int, (file.name for file in (bundle / "checkpoints").iterdir())) if size <= last)
    late = {True: timedelta(hours=2), False: timedelta(hours=1)}

    def change(size: int, note: str) -> str:
        return cosigned(note, at=then(made, size, CLOSES + late[size > last]), by=NAMES if size >= before else ())

    recosign(bundle, change)
    found = checks(bundle, made)["time"]
    assert (found.status, found.where) == ("FAILED", f"log entry {last}, the commitment of untrained")
    assert f"at 2027-03-31T01:00:00.000000Z the witnesses saw a log of {before} entries, without it" in found.meaning


def test_one_witness_whose_clock_is_off_by_a_day_changes_nothing(bundle: Path, made: Made) -> None:
    seen = commitment(made, "untrained") + 2

    def at(size: int) -> datetime:
        return then(made, size, CLOSES - timedelta(hours=1) if size <= seen else CLOSES + timedelta(days=2))

    for off in (timedelta(days=-1), timedelta(days=1)):
        recosign(
            bundle,
            lambda size, note: cosigned(cosigned(note, at=at(size) + off, by=NAMES[:1]), at=at(size), by=NAMES[1:]),  # noqa: B023
        )
        assert checks(bundle, made)["time"].status == "ok", off


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Made, int, datetime]:
    """A bundle whose server skips the objection window: its PreparationFinished says a week later than it is; by which size it is there, and when."""
    monkeypatch.setattr(rounds_made, "QUORUM", 2)
    monkeypatch.setattr(rounds_made, "WITNESSES", NAMES)
    monkeypatch.setattr(rounds_made, "DEFINITION", rounds_made.DEFINITION.replace('window = "0s"', 'window = "168h"'))
    scheduled, real = Made.scheduled, []

    def dated(self: Made, kind: str, fields: dict, **options: object) -> int:
        if kind == "PreparationFinished":
            real.append((len(self.entries) + 1, self.now + timedelta(seconds=10)))
            self.kept.add(len(self.entries))  # the last preparation's
            options = {"after": timedelta(days=7)}
        return scheduled(self, kind, fields, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Made, "scheduled", dated)
    made = rounds_made.make(tmp_path / "round")
    made.write(tmp_path / "bundle")
    return made, *real[0]


def test_a_record_that_is_dated_ahead_of_the_witnesses_that_saw_it_is_named(
    ahead: tuple[Made, int, datetime], tmp_path: Path
) -> None:
    """PreparationFinished was cosigned seconds after the last preparation."""
    path, (made, finished, seen) = tmp_path / "bundle", ahead
    assert checks(path, made)["time"].status == "ok"

    def change(size: int, note: str) -> str:
        return cosigned(note, at=seen if size >= finished else then(made, size, CLOSES), by=NAMES)

    recosign(path, change)
    found = checks(path, made)["time"]
    assert (found.status, found.where) == ("FAILED", f"log entry {finished - 1}, PreparationFinished")
    assert f"witnesses had cosigned a log with it by {format_time(seen)}" in found.meaning


def test_whoever_kept_a_cosigned_checkpoint_finds_what_a_bundle_leaves_out(
    ahead: tuple[Made, int, datetime], tmp_path: Path
) -> None:
    """No bundle shows which sizes a log signed: without those that tell, a record that is dated ahead passes, until a stranger puts one back."""
    path, (made, finished, seen) = tmp_path / "bundle", ahead

    def change(size: int, note: str) -> str:
        late = made.now if size == len(made.entries) else seen
        return cosigned(note, at=late if size >= finished else then(made, size, CLOSES), by=NAMES)

    recosign(path, change)
    assert checks(path, made)["time"].status == "FAILED"
    telling = [file for file in (path / "checkpoints").iterdir() if finished <= int(file.name) < len(made.entries)]
    saved = (path / "checkpoints" / str(finished)).read_text("utf-8")
    for file in telling:
        file.unlink()
    found = checks(path, made)
    assert {found[name].status for name in ("time", "earlier checkpoints", "split view")} == {"ok"}
    (path / "checkpoints" / str(finished)).write_text(saved, "utf-8")
    found = checks(path, made)
    assert (found["time"].status, found["earlier checkpoints"].status) == ("FAILED", "ok")


# ---- receipts ------------------------------------------------------------------------------------------------------


def test_a_receipt_of_another_round_or_record_in_the_bundle_is_named(bundle: Path, made: Made) -> None:
    size = len(made.entries)
    hashes = [digests.leaf_hash(entry) for entry in made.entries]
    for index, words in ((0, "RoundDefined of marbles-elsewhere"), (2, f"HoldoutSealed of {made.round}")):
        path = bundle / "receipts" / f"{index}.tlog-proof"
        proof = tuple(log.inclusion_proof(hashes, index, size))
        path.write_text(log.Receipt(index, made.entries[index], proof, made.notes[size]).text(), "utf-8")
        found = checks(bundle, made)["receipts"]
        assert (found.status, found.where) == ("FAILED", f"receipts/{index}.tlog-proof")
        assert words in found.meaning
        assert made.round in found.meaning
        path.unlink()


# ---- the close itself ----------------------------------------------------------------------------------------------


def test_an_extension_that_was_backdated_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Organizer and operator together let a friend in: the extension's record says in time, the witnesses saw the log without it."""
    monkeypatch.setattr(rounds_made, "QUORUM", 2)
    monkeypatch.setattr(rounds_made, "WITNESSES", NAMES)
    plain_submissions = rounds_made.submit_all
    where: list[int] = []

    def extended(made: Made) -> None:
        plain_submissions(made)
        fields = {"closes": format_time(CLOSES + timedelta(days=1))}
        where.append(made.signed("ClosingExtended", fields, by="organizer", keep=True))

    monkeypatch.setattr(rounds_made, "submit_all", extended)
    made = rounds_made.make(tmp_path / "round")
    path = made.write(tmp_path / "bundle")
    assert checks(path, made)["time"].where == "4 records, each cosigned by 2 witnesses"
    (index,) = where
    before = CLOSES + timedelta(hours=1)
    recosign(path, lambda size, note: cosigned(note, at=made.now if size > index else before, by=NAMES))
    found = checks(path, made)["time"]
    assert found.status == "FAILED"
    # The commitments are due a day later: they were there an hour after the old close, the extension was not.
    assert found.where == f"log entry {index}, ClosingExtended to {format_time(CLOSES + timedelta(days=1))}"
    assert f"without it; it had to be there by {format_time(CLOSES + timedelta(minutes=5))}" in found.meaning
