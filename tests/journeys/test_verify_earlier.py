"""A round that follows others of its competition in the same log: what it may say of them, and what an auditor is told that no bundle shows."""

from pathlib import Path

import pytest
import rounds_made

from acclimate import verify
from acclimate_competitions import digests, records

NAME = "earlier rounds"
ENDS = {
    "RankingPublished": {name: digests.of_bytes(b"ranking") for name in ("ranking", "policy")} | {"reason": "first"},
    "RoundVoided": {"reason": "labels leaked", "approvals": []},
}
honest_defined, honest_seal = rounds_made.defined_fields, rounds_made.seal_holdout


def said(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    predecessor: str = "",
    opened: bool = False,
    end: str = "",
    by: str = "organizer",
    altered: bool = False,
) -> tuple[str, str, str] | None:
    """The line of a round; the other round of its competition in the log is `its own` predecessor where that is asked for.

    The other one may be opened before this one is sealed, and have a record that ends it, by somebody, who may have signed other words.
    """

    def defined(made: rounds_made.Made) -> dict:
        fields = honest_defined(made)
        if not made.entries or not predecessor:
            return fields
        earlier = records.parse(made.entries[0]).round
        return {**fields, "predecessor": earlier if predecessor == "its own" else predecessor}

    def seal(made: rounds_made.Made) -> None:
        if opened:
            fields = dict.fromkeys(("key", "plaintext", "row_root"), digests.of_bytes(b"of the other round"))
            other = records.parse(made.entries[0]).round
            made.append({"type": "HoldoutOpened", "round": other, "fields": fields})
            if end:
                request = records.sign(end, other, ENDS[end], key=rounds_made.key(by))
                made.append(request | ({"fields": ENDS[end] | {"reason": "other words"}} if altered else {}))
        honest_seal(made)

    monkeypatch.setattr(rounds_made, "defined_fields", defined)
    monkeypatch.setattr(rounds_made, "seal_holdout", seal)
    report = verify.verify(rounds_made.make(folder / "made").write(folder / "bundle"))
    assert [check.name for check in report.failed if check.name != NAME] == []
    found = [check for check in report.checks if check.name == NAME]
    return (found[0].status, found[0].where, found[0].meaning) if found else None


def test_nothing_is_said_of_a_first_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert said(monkeypatch, tmp_path) is None


def test_the_round_that_it_follows_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = said(monkeypatch, tmp_path, predecessor="its own")
    assert found is not None and found[0] == "ok"
    assert "it follows marbles-elsewhere-" in found[1] and "no holdout of the competition was opened" in found[1]


@pytest.mark.parametrize("opened", [False, True])
def test_a_round_that_follows_none_of_this_log_is_named(
    opened: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made_up = f"marbles-2026-1-{'0' * 32}"
    found = said(monkeypatch, tmp_path, predecessor=made_up, opened=opened)
    assert found is not None and found[0] == "FAILED"
    assert found[1] == "log entry 1, predecessor" and made_up in found[2]


@pytest.mark.parametrize("predecessor", ["", "its own"])
def test_a_holdout_that_was_open_when_this_one_was_sealed_is_named_whether_or_not_the_round_follows_it(
    predecessor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = said(monkeypatch, tmp_path, predecessor=predecessor, opened=True)
    assert found is not None and found[0] == "NOT CHECKED"
    assert "marbles-elsewhere-" in found[2] and "that it has no row of them is its organizer's word" in found[2]


def test_a_round_that_its_organizer_did_not_sign_is_no_predecessor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server puts words into its log in the organizer's name."""
    honest = records.sign

    def sign(kind: str, of: str, fields: dict, *, key) -> dict:
        forged = kind == "RoundDefined" and fields["name"] == "elsewhere"
        return honest(kind, of, fields, key=rounds_made.key("mallory") if forged else key)

    monkeypatch.setattr(records, "sign", sign)
    found = said(monkeypatch, tmp_path, predecessor="its own")
    assert found is not None and found[:2] == ("FAILED", "log entry 1, predecessor")


@pytest.mark.parametrize(
    ("end", "by", "counts"),
    [
        ("RankingPublished", "evaluator", True),
        ("RankingPublished", "custodian-a", False),
        ("RankingPublished", "mallory", False),
        ("RoundVoided", "custodian-a", True),
        ("RoundVoided", "evaluator", False),
        ("RoundVoided", "mallory", False),
    ],
)
def test_a_round_is_ended_by_nobody_but_who_may(
    end: str, by: str, counts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = said(monkeypatch, tmp_path, opened=True, end=end, by=by)
    assert found is not None and found[0] == "NOT CHECKED"
    assert ("with no ranking published, nor void, in this log" in found[2]) == (not counts)


@pytest.mark.parametrize("end", ENDS)
def test_a_round_is_not_ended_by_words_that_nobody_signed(
    end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = said(monkeypatch, tmp_path, opened=True, end=end, altered=True)
    assert found is not None and "with no ranking published, nor void, in this log" in found[2]


@pytest.mark.parametrize("end", ["", *ENDS])
def test_a_round_that_was_opened_and_never_published_is_named_as_such(
    end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = said(monkeypatch, tmp_path, opened=True, end=end)
    assert found is not None and found[0] == "NOT CHECKED"
    assert ("with no ranking published, nor void, in this log" in found[2]) == (not end)
