"""What a report says of what is not there: submissions that became no entry, other rounds of the same question."""

from pathlib import Path

import pytest
import rounds_made
from rounds_made import Made, public

from acclimate import verify
from acclimate.verify.report import Check
from acclimate_competitions import digests, records


def checks(made: Made, path: Path) -> dict[str, Check]:
    report = verify.verify(made.write(path), log_key=made.signer.vkey)
    assert [check for check in report.checks if check.status == "FAILED"] == []
    return {check.name: check for check in report.checks}


def commit(made: Made, entrant: str, number: int) -> dict[str, str]:
    fields = {"entrant": entrant, "commitment": digests.of_bytes(f"{entrant} {number}".encode())}
    made.signed("SubmissionCommitted", fields, by=entrant)
    return fields


def test_submissions_that_became_no_entry_are_counted_and_their_entrants_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server never logs that it took the files of cat, a rival: nothing else in the log says so."""
    submit = rounds_made.submit_all

    def more(made: Made) -> None:
        submit(made)
        made.signed("EntrantRegistered", {"entrant": "cat", "ed25519": public("cat"), "conflicts": []}, by="cat")
        for number in range(3):
            commit(made, "cat", number)
        made.signed("SubmissionRefused", commit(made, "bea", 9) | {"reason": "too large"}, by="evaluator")
        made.signed("SubmissionWithdrawn", commit(made, "ada", 9), by="ada")

    monkeypatch.setattr(rounds_made, "submit_all", more)
    made = rounds_made.make(tmp_path / "round")
    found = checks(made, tmp_path / "bundle")["submissions"]
    assert found.status == "ok"
    assert found.where == (
        "4 submissions; 3 forfeited (committed to, never accepted or refused: the log does not say why): cat;"
        " 1 refused by an evaluator, with its reason in the log: bea; 1 withdrawn: ada"
    )


def test_other_rounds_of_the_same_question_are_named_with_their_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An organizer who tries again until a ranking pleases leaves the other tries in the log."""
    splits = rounds_made.make_splits

    def tried(made: Made) -> None:
        splits(made)
        for name, organizer in (("first-try", "organizer"), ("others", "another")):
            fields = rounds_made.defined_fields(made) | {"name": name, "organizer": {"ed25519": public(organizer)}}
            request = records.sign("RoundDefined", "", fields, key=rounds_made.key(organizer))
            made.append(request)
            made.round = request["round"]
            made.signed("RoundVoided", {"reason": "the wrong one won"}, by=organizer)

    monkeypatch.setattr(rounds_made, "make_splits", tried)
    made = rounds_made.make(tmp_path / "round")
    where = checks(made, tmp_path / "bundle")["round"].where
    assert where.startswith(f"{made.round}, from log entry 5; besides, of the same competition and organizer: ")
    assert where.count("marbles-first-try-") == 1 and "(voided at log entry 1)" in where
    assert where.count("marbles-elsewhere-") == 1 and where.endswith("(no end in these entries)")
    assert "marbles-others-" not in where


def test_of_other_rounds_only_what_is_signed_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server appends a round in the organizer's name, and an end to one that had none."""
    splits = rounds_made.make_splits

    def forged(made: Made) -> None:
        splits(made)
        fields = rounds_made.defined_fields(made)
        made.append(records.sign("RoundDefined", "", fields | {"name": "made-up"}, key=rounds_made.key("mallory")))
        request = records.sign("RoundDefined", "", fields | {"name": "left"}, key=rounds_made.key("organizer"))
        made.append(request)
        made.round = request["round"]
        made.signed("RoundVoided", {"reason": "so they say"}, by="mallory")

    monkeypatch.setattr(rounds_made, "make_splits", forged)
    where = checks(rounds_made.make(tmp_path / "round"), tmp_path / "bundle")["round"].where
    assert "marbles-made-up-" not in where
    assert "marbles-left-" in where and "voided" not in where
    assert where.count("(no end in these entries)") == 2
