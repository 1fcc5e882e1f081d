"""Numbers that more than one page repeats are the code's, wherever they stand."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from acclimate.api import logs
from acclimate.client import evidence
from acclimate.verify import witnesses
from acclimate_competitions import drawing, rounds

ROOT = Path(__file__).parent.parent.parent
WORDS = {"one": 1, "two": 2, "three": 3, "five": 5, "ten": 10, "thirty-two": 32}
NUMBER = rf"(\d+|{'|'.join(WORDS)})"

MINUTE = timedelta(minutes=1)
IN_TIME = witnesses.GRACE / MINUTE
SAID = {
    # What the code says, and each sentence that repeats it: (file, the words around the number).
    "in time after the close": (
        IN_TIME,
        [
            ("docs/protocol.md", "commitment of every entry, due {} minutes after"),
            ("docs/protocol.md", "ClosingExtended, due {} minutes after"),
            ("docs/protocol.md", "an `at` more than {} minutes after a checkpoint"),
            ("docs/auditors.md", "seen at most {} minutes after the close"),
            ("docs/auditors.md", "dated more than {} minutes later than the quorum saw it"),
            ("docs/decisions/0011-witnesses-that-are-down-stop-no-phase.md", "up to {} minutes after the close"),
            ("infra/prometheus/rules.yaml", "{} minutes after a close it costs entries"),
        ],
    ),
    "ahead of the witnesses": (
        evidence.AHEAD_OF_WITNESSES / MINUTE,
        [("docs/protocol.md", "nor more than {} minutes after the time by which the quorum")],
    ),
    "ahead of the own clock": (
        evidence.AHEAD_OF_CLOCK / MINUTE,
        [("docs/protocol.md", "dated more than {} minutes after the own clock")],
    ),
    "a round has lapsed": (
        rounds.LAPSE / timedelta(days=1),
        [
            ("docs/protocol.md", "From {} days after `release_by` on"),
            ("docs/organizers.md", "in any other phase {} days later"),
            ("docs/custodians.md", "never opened? {} days after the date"),
            ("docs/threat-model.md", "shares are released {} days after `release_by`"),
            ("docs/decisions/0014-custodians-end-a-round-without-its-organizer.md", "**Added later.** {} days after"),
        ],
    ),
    "a receipt waits": (
        logs.WAIT_SECONDS,
        [
            ("docs/operators.md", "A receipt waits up to {} seconds for the quorum"),
            ("platform/acclimate/api/logs.py", "it waits up to {} s, and"),
        ],
    ),
    "rows that are opened": (
        drawing.ROWS_OPENED,
        [
            (
                "docs/protocol.md",
                'row-draw/v1" ‖ 0x00 ‖ root of the log up to and with HoldoutOpened, its 32 bytes), {}, rows)',
            ),
            ("docs/organizers.md", "{} drawn rows are opened"),
            ("docs/organizers.md", "Nobody chooses the {} rows"),
            ("docs/organizers.md", "a holdout of {} rows or fewer"),
            ("docs/auditors.md", "{} rows, drawn by the log itself"),
            ("docs/decisions/0012-a-private-holdout-has-two-bundles.md", "It opens {} drawn rows"),
            ("CHANGELOG.md", "{} drawn rows"),
        ],
    ),
}


@pytest.mark.parametrize("what", SAID)
def test_a_number_is_the_same_wherever_it_stands(what: str) -> None:
    number, places = SAID[what]
    for file, words in places:
        text = " ".join((ROOT / file).read_text("utf-8").split())
        before, after = (re.escape(part) for part in words.split("{}"))
        found = re.findall(before + NUMBER + after, text)
        assert found, f"{file} no longer says {words!r}: take it off this list, or mend it"
        assert {WORDS.get(one) or float(one) for one in found} == {number}, f"{file}: {words}"
