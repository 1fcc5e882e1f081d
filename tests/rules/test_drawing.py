"""Draws: known values, no number twice, all numbers equally likely."""

import collections

from hypothesis import given
from hypothesis import strategies as st

from acclimate_competitions import drawing

SEED = bytes(range(32))
FIRST_FIVE = [21, 20, 2, 10, 73]
ROW_SEED = "f5912e46c2c72d6bcfd64219fa35700b2cd7ac6bb1cf70d25e4ad304066bb2ea"


def test_known_draws_stay_as_they_are():
    # Computed with another program (a shell, openssl and bc) from the layout in drawing.py.
    assert drawing.numbers(SEED, count=5, of=100) == FIRST_FIVE
    assert drawing.row_seed(SEED).hex() == ROW_SEED


@given(st.binary(min_size=32, max_size=32), st.integers(0, 40), st.integers(0, 40))
def test_a_draw_is_of_different_numbers_as_many_as_there_are(seed, count, of):
    drawn = drawing.numbers(seed, count=count, of=of)
    assert len(drawn) == len(set(drawn)) == min(count, of)
    assert all(0 <= number < of for number in drawn)
    assert drawn[: count // 2] == drawing.numbers(seed, count=count // 2, of=of)


def test_every_number_is_equally_likely():
    counts = collections.Counter(
        drawing.numbers(bytes([i % 256, i // 256]) * 16, count=1, of=7)[0] for i in range(7000)
    )
    chi = sum((counts[n] - 1000) ** 2 / 1000 for n in range(7))
    assert chi < 22.5  # 0.001 of chi-squared with 6 degrees of freedom


def test_each_byte_of_secret_and_record_moves_the_draw():
    seeds = {
        drawing.job_seed(SEED, b"finished"),
        drawing.job_seed(SEED[::-1], b"finished"),
        drawing.job_seed(SEED, b"finishes"),
    }
    assert len(seeds) == 3
