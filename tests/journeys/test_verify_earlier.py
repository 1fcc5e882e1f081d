"""A round that follows others of its competition in the same log: what it may say of them, and what an auditor is told that no bundle shows."""

import random
from datetime import timedelta
from pathlib import Path

import pytest
import rounds_made

from acclimate import log, verify
from acclimate.verify import others
from acclimate_competitions import digests, records

NAME = "earlier rounds"
ENDS = {
    "RankingPublished": {name: digests.of_bytes(b"ranking") for name in ("ranking", "policy")} | {"reason": "first"},
    "RoundVoided": {"reason": "labels leaked", "phase": "opened", "approvals": []},
}
AGREED = ("custodian-a", "custodian-c")
"""As many custodians as it takes to end a round whose close has passed."""
OF = digests.of_bytes(b"of the other round")
UNSIGNED = {
    "RoundOpened": {"seal": OF},
    "RoundClosed": {"count": 0, "entries_root": OF, "forfeited": {"count": 0, "root": OF}},
    "PreparationFinished": {"count": 0, "root": OF},
    "HoldoutOpened": {"key": OF, "plaintext": OF, "row_root": OF},
}
PREPARED = ("RoundOpened", "RoundClosed", "PreparationFinished")
honest_defined, honest_seal = rounds_made.defined_fields, rounds_made.seal_holdout


def approvals(of: str, *, by: str, agreed: tuple[str, ...] = AGREED) -> list[dict[str, str]]:
    """What these sign of a voiding that somebody signs."""
    signed = {"by": rounds_made.public(by)}
    return [
        records.approve("RoundVoided", of, ENDS["RoundVoided"], **signed, key=rounds_made.key(each)) for each in agreed
    ]


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
            other = records.parse(made.entries[0]).round
            made.append({"type": "HoldoutOpened", "round": other, "fields": UNSIGNED["HoldoutOpened"]})
            if end:
                fields = ENDS[end]
                if end == "RoundVoided":
                    fields = fields | {"approvals": approvals(other, by=by)}
                request = records.sign(end, other, fields, key=rounds_made.key(by))
                made.append(request | ({"fields": fields | {"reason": "other words"}} if altered else {}))
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
        ("RoundVoided", "organizer", True),
        ("RoundVoided", "custodian-b", True),
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


@pytest.mark.parametrize(
    ("by", "agreed", "before", "late", "counts"),
    [
        pytest.param("custodian-a", (), ("HoldoutOpened",), 1, False, id="a custodian alone"),
        pytest.param("custodian-a", ("custodian-a",), ("HoldoutOpened",), 1, False, id="a custodian twice"),
        pytest.param("custodian-a", ("mallory",), ("HoldoutOpened",), 1, False, id="a custodian and a stranger"),
        pytest.param("custodian-a", ("custodian-b",), ("HoldoutOpened",), 1, True, id="two custodians"),
        pytest.param("organizer", (), ("HoldoutOpened",), 1, False, id="the organizer alone once it was opened"),
        pytest.param("organizer", ("custodian-a",), ("RoundClosed",), 1, False, id="the organizer and one"),
        pytest.param("organizer", (), ("RoundOpened",), 1, True, id="the organizer alone before the close"),
        pytest.param("organizer", (), ("RoundOpened",), 31, False, id="the organizer alone when the close has passed"),
        pytest.param("organizer", (), (), 31, True, id="the organizer alone of a round that never opened"),
        pytest.param("organizer", (), PREPARED, 59, False, id="the organizer alone before release_by"),
        pytest.param("organizer", (), PREPARED, 61, True, id="the organizer alone where custody failed"),
        pytest.param("organizer", (), (*PREPARED, "HoldoutOpened"), 61, False, id="the organizer alone after both"),
        pytest.param("custodian-a", (), PREPARED, 61, False, id="a custodian alone after release_by"),
        pytest.param("custodian-a", (), PREPARED, 91, True, id="a custodian alone of a round that lapsed"),
        pytest.param("custodian-a", (), ("HoldoutOpened",), 91, False, id="a custodian alone of one that was opened"),
    ],
)
def test_as_many_as_it_takes_void_a_round(
    by: str, agreed: tuple[str, ...], before: tuple[str, ...], late: int, counts: bool, tmp_path: Path
) -> None:
    """One custodian, or an organizer whom a server helps, ends no round whose scores may be known."""
    made = rounds_made.Made(tmp_path, log.Signer(rounds_made.ORIGIN, rounds_made.key("log")), random.Random(7))
    rounds_made.make_splits(made)
    defined = records.sign("RoundDefined", "", honest_defined(made), key=rounds_made.key("organizer"))
    made.append(defined)
    for kind in before:
        made.append({"type": kind, "round": defined["round"], "fields": UNSIGNED[kind]})
    fields = ENDS["RoundVoided"] | {"approvals": approvals(defined["round"], by=by, agreed=agreed)}
    made.append(
        records.sign("RoundVoided", defined["round"], fields, key=rounds_made.key(by)), after=timedelta(days=late)
    )
    found = others.ends(list(map(records.parse, made.entries)))
    assert found == ({defined["round"]: (len(made.entries) - 1, "voided")} if counts else {})
