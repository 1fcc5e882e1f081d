"""Dates as people type them, and tables and phases as they are shown."""

from datetime import UTC, datetime, timedelta

import pytest

from acclimate.cli import moments, output, status
from acclimate_competitions.errors import Refusal

NOW = datetime(2027, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("now", timedelta(0)),
        ("+30s", timedelta(seconds=30)),
        ("+2h", timedelta(hours=2)),
        ("+1d12h", timedelta(hours=36)),
        ("+90m", timedelta(minutes=90)),
        ("2027-03-01T12:00:00Z", timedelta(0)),
        ("2027-03-01T14:00:00+01:00", timedelta(hours=1)),
        ("2027-03-01t12:00:00.5z", timedelta(seconds=0.5)),
        ("2027-03-01 12:01Z", timedelta(minutes=1)),
    ],
)
def test_dates_are_read(text: str, after: timedelta) -> None:
    assert moments.parse(text, now=NOW) == NOW + after


@pytest.mark.parametrize(
    "text",
    [
        "2027-03-01",
        "2027-03-01T12:00:00",
        "2027-02-30T00:00:00Z",
        "+",
        "+2w",
        "-2h",
        "2 h",
        "tomorrow",
        "",
        "+999999d" * 2,
        "+٢h",
        "٢٠٢٧-03-01T12:00:00Z",
    ],
)
def test_dates_that_could_mean_several_moments_or_none_are_refused(text: str) -> None:
    with pytest.raises(Refusal) as caught:
        moments.parse(text, now=NOW)
    assert caught.value.code == "time_invalid"


def test_a_naive_date_is_refused_with_suggestions_that_are_accepted() -> None:
    with pytest.raises(Refusal) as caught:
        moments.parse("2027-03-01T12:00:00", now=NOW)
    suggestions = [word.rstrip(";,") for word in caught.value.hint.split() if word.startswith("2027")]
    assert len(suggestions) == 2
    assert moments.parse(suggestions[0], now=NOW) == NOW
    moments.parse(suggestions[1], now=NOW)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "now"), (1, "in 1 s"), (-1, "1 s ago"), (3_660, "in 1 h 1 min"), (86_400, "in 1 d"), (-90_061, "1 d 1 h ago"),
        (59.6, "in 1 min"), (3_601, "in 1 h"),
    ],
)  # fmt: skip
def test_distances_for_people(seconds: float, text: str) -> None:
    assert moments.distance(timedelta(seconds=seconds)) == text


def test_a_table_lines_up() -> None:
    assert output.table(("rank", "entrant"), [(1, "ada"), (12, "b")], right=("rank",)) == [
        "rank  entrant",
        "   1  ada",
        "  12  b",
    ]


def test_the_present_phase_stands_in_brackets() -> None:
    assert "sealed→[open]→closed" in status.phase_line("open")
    assert "[voided]" in status.phase_line("voided")
