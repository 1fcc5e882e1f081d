"""A reading of the database's clock that can't be right is refused before anything is logged by it."""

from datetime import UTC, datetime, timedelta

import pytest

from acclimate.clocks import APART, BEHIND, LEAP, Clocks, since_boot
from acclimate_competitions.errors import Refusal

START = 1_800_000_000.0


class Hands:
    """The machine's clock and the steady one, which the test moves."""

    def __init__(self):
        self.now, self.passed = START, 500.0
        self.clocks = Clocks(machine=lambda: self.now, steady=lambda: self.passed)

    def wait(self, seconds):
        self.now, self.passed = self.now + seconds, self.passed + seconds

    def check(self, offset=0.0):
        """The database's clock is so far ahead of this machine's."""
        self.clocks.check(datetime.fromtimestamp(self.now + offset, UTC))

    def refuses(self, match, offset=0.0):
        with pytest.raises(Refusal, match=match) as caught:
            self.check(offset)
        assert caught.value.code == "busy" and caught.value.hint


@pytest.fixture
def hands():
    return Hands()


def test_clocks_that_agree_well_enough_are_believed_however_long_it_lasts(hands):
    for _ in range(400):
        hands.wait(86_400)
        for offset in (0, 2, -2, APART, -APART):
            hands.check(offset)


@pytest.mark.parametrize("side", [1, -1])
def test_two_machines_that_differ_by_more_than_an_hour(hands, side):
    for days in (1, 400):
        hands.refuses("so far apart", side * days * 86_400)
    hands.refuses("so far apart", side * (APART + 1))
    hands.check()


def test_a_clock_that_leaps_and_takes_this_machines_with_it(hands):
    hands.wait(3 * 86_400)
    hands.now += 400 * 86_400
    hands.refuses(f"{400 * 86_400} s more")
    hands.now -= 400 * 86_400
    hands.check()
    # A process that begins after a long sleep knows of none.
    hands.now += LEAP + 1
    hands.refuses("began")
    hands.clocks = Clocks(machine=lambda: hands.now, steady=lambda: hands.passed)
    hands.check()


def test_a_clock_that_is_behind_the_log(hands):
    now = datetime.fromtimestamp(START, UTC)
    for behind in (0, 5, BEHIND):
        hands.clocks.check(now, last=now + timedelta(seconds=behind))
    for behind in (BEHIND + 1, 25 * 3600, 3 * LEAP):
        with pytest.raises(Refusal, match="caught up") as caught:
            hands.clocks.check(now, last=now + timedelta(seconds=behind))
        assert caught.value.code == "busy" and "clock_behind" in caught.value.hint
    hands.clocks.check(now, last=None)


def test_the_machines_own_clocks_agree():
    Clocks().check(datetime.now(UTC))
    assert since_boot() <= since_boot()
